"""The outer optimizer: islands train by themselves, and join once in a round of steps.

An **island** is a group of ranks that take each step together; its ranks hold the same parts of the weights as those of
every other island, rank by rank. With theta_0 the weights at a round's start and theta_i those of island i at its end,
after n_i target tokens, all islands continue from

    delta = sum_i n_i (theta_0 - theta_i) / sum_i n_i           the pseudo-gradient
    b     = momentum b + delta
    theta = theta_0 - lr (delta + momentum b)                   Nesterov; lr b without

Where islands exchange with some others alone (`parallel.sync`: ring, exponential), each goes on from the mean of its
own weights and theirs, and the outer weights are the mean over all, taken before they are evaluated or saved.

AdamW's moments stay with their island. The rate 1 without momentum is the mean of the weights: local SGD.
Source: Douillard et al., DiLoCo (2023), algorithm 1; McMahan et al., FedAvg (2017), algorithm 1.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from meshwright.errors import CheckpointError, ConfigError
from meshwright.json_types import JsonObject
from meshwright.parallel.axis_group import PendingCollective
from meshwright.parallel.dcp_shards import StateTensor
from meshwright.parallel.program import Program
from meshwright.parallel.sync import find_exchange
from meshwright.parallel.sync.all_reduce import EXCHANGE as ALL_REDUCE
from meshwright.parallel.sync.contract import PendingMean
from meshwright.parallel.weights import Weight
from meshwright.spec.groups import round_axes
from meshwright.spec.layout import Layout
from meshwright.train.config import OuterConfig
from meshwright.train.run_config import RunConfig
from meshwright.train.site_optimizer import check_site
from meshwright.train.state import OUTER_MOMENTUM, WEIGHTS, island_prefix
from meshwright.train.step import squared_norm

_COUNTERS = "counters"
_COUNTER_BYTES = 16384
"""Bytes of an island's plain values: the losses and norms of its last steps above all."""
VOTES = ("stop", "evaluate", "checkpoint")
"""What an island's hooks may ask of all islands; it happens after the next join."""


def check_islands(config: RunConfig, layout: Layout, resumes: bool = False) -> None:
    """Refuses settings of the outer step that a layout can't obey.

    Args:
        config: of the run.
        layout: of the run.
        resumes: whether the run has been started before, whose settings stay though its islands may go.

    Raises:
        ConfigError: with what to write instead.
    """
    if config.outer.meet:
        check_site(config, layout)
        return
    if layout.islands == 1:
        if config.outer != OuterConfig() and not resumes:
            raise ConfigError(f"outer.* says how islands join, and {layout} has one; write islands=2, or leave it out")
        return
    exchange, outer = find_exchange(config.outer.topology), config.outer
    exchange.check(layout.islands)
    if not exchange.global_mean and (outer.kind != "local_sgd" or outer.compress != "none"):
        raise ConfigError(
            f"outer.topology = {exchange.name} averages the weights of a few islands, so that there is no movement of "
            "all to step along or to round; write --outer local_sgd and leave outer.compress out, or --outer.topology "
            "all_reduce"
        )
    if config.train.rebalance:
        raise ConfigError(
            f"train.rebalance = {config.train.rebalance} moves rows between ranks of all islands, which agree on "
            "nothing within a round; leave it out, or take replicate in place of islands"
        )
    if config.recovery.on_sick == "rewind":
        raise ConfigError(
            "recovery.on_sick = rewind goes back with all ranks at once, and under islands a sick step is known to one "
            "island alone; write recovery.on_sick = skip or stop"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinReport:
    """A join of the islands, the same on every rank but for the bytes."""

    losses: tuple[float, ...]
    """Mean loss of each island over the targets of its round."""
    tokens: tuple[float, ...]
    """Target tokens of each island's round."""
    pseudo_gradient_norm: float | None
    """2-norm of the mean movement of the islands' weights; None where no island has that mean."""
    consensus_distance: float
    """Root of the mean over islands of the squared distance of their weights from the mean that they got."""
    raw_bytes: int
    """Bytes of this rank's movement in the type of its weights."""
    sent_bytes: int
    """Bytes that this rank sent to other islands for it."""
    votes: tuple[float, ...]
    """Sums of `VOTES` over islands."""
    stop_count: float
    """Sum over islands of what their ranks were asked (`OuterOptimizer.request_stop`)."""

    def to_json(self) -> dict[str, object]:
        """Returns plain values for a line of metrics."""
        return {
            "island_losses": list(self.losses),
            "island_tokens": list(self.tokens),
            "pseudo_gradient_norm": self.pseudo_gradient_norm,
            "consensus_distance": self.consensus_distance,
            "raw_bytes": self.raw_bytes,
            "sent_bytes": self.sent_bytes,
        }


@dataclass(slots=True)
class _Transfer:
    """A join under way."""

    mean: PendingMean
    summary: torch.Tensor
    """(4 + 2 islands,) float64: `VOTES`, the stop count, then tokens and summed loss of each island."""
    pending_summary: PendingCollective


class OuterOptimizer:
    """Joins this rank's parts of the weights with those of the other islands.

    Args:
        program: built under a layout of several islands.
        config: the outer step.
        on_change: called after a join has changed the weights.
    """

    def __init__(self, program: Program, config: OuterConfig, on_change: Callable[[], None]) -> None:
        assert program.mesh is not None
        mesh = program.mesh
        self._program, self._config, self._on_change = program, config, on_change
        self.islands, self.island = mesh.layout.islands, mesh.layout.island(mesh.rank)
        self._exchange = find_exchange(config.topology)
        self._exchange.check(self.islands)
        self._group, self._world = mesh.combined_group(round_axes()), mesh.world
        self._weights: list[Weight] = list(program.weights)
        # A stage may hold frozen weights alone.
        first = (program.weights or program.frozen)[0].local
        self._device = torch.device("cuda", torch.cuda.current_device()) if mesh.world.on_cuda else first.device
        sizes = [weight.local.numel() for weight in self._weights]
        self._start = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        self._momentum = torch.zeros_like(self._start)
        self._start_views = self._split(self._start)
        self._counters = torch.zeros(_COUNTER_BYTES, dtype=torch.uint8, device=first.device)
        self._votes = [0.0] * len(VOTES)
        self._stop_count = 0.0
        self._round_tokens = self._round_loss = 0.0
        self._round_steps = self._joins = 0
        self.restart()

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns a view of ``flat: (n,)`` for each weight, of the shape of its local part."""
        sizes = [weight.local.numel() for weight in self._weights]
        return [view.view_as(weight.local) for view, weight in zip(flat.split(sizes), self._weights)]

    def restart(self) -> None:
        """Begins a round from the present weights, which are equal in all islands."""
        for weight, start in zip(self._weights, self._start_views):
            start.copy_(weight.local)
        self._round_tokens = self._round_loss = 0.0
        self._round_steps = 0

    def request_stop(self, count: float) -> None:
        """Asks all islands to end after the next join; a saved state doesn't hold this, since it asks these processes.

        Args:
            count: ranks of this island that were asked to end so far, below 1 for a reconfiguration.
        """
        self._stop_count = max(self._stop_count, count)

    def vote(self, **votes: float) -> None:
        """Asks something of all islands, which happens after the next join.

        Args:
            votes: amount for each of `VOTES`.
        """
        self._votes = [self._votes[index] + votes.get(name, 0.0) for index, name in enumerate(VOTES)]

    def ends_round(self, step: int, last: bool) -> bool:
        """Returns whether the islands join after so many steps.

        Args:
            step: steps done.
            last: whether the run ends after this step, which ends the round too.
        """
        return last or step % self._config.every == 0

    def after_step(self, step: int, tokens: float, loss: float, last: bool) -> JoinReport | None:
        """Counts a step, and joins the islands where a round ends; all ranks call it after each step.

        Args:
            step: steps done.
            tokens: target tokens of this island in the step; 0 where the step was skipped.
            loss: mean loss over them.
            last: whether the run ends after this step, which ends the round too.

        Returns:
            The join's figures; None within a round.
        """
        self._round_steps += 1
        if tokens:
            self._round_tokens, self._round_loss = self._round_tokens + tokens, self._round_loss + tokens * loss
        if not self.ends_round(step, last):
            return None
        report = self._apply(self._begin())
        if last and not self._exchange.global_mean:
            with torch.no_grad():
                self._average_all()
                for weight, start in zip(self._weights, self._start_views):
                    weight.local.copy_(start)
            self._on_change()
        return report

    def _average_all(self) -> None:
        """Sets the outer weights to the mean over all islands, where exchanges leave their weights apart."""
        if self._exchange.global_mean:
            return
        values = torch.empty(self._start.shape, dtype=self._start.dtype, device=self._device)
        for view, weight in zip(self._split(values), self._weights):
            view.copy_(weight.local)
        self._start.copy_(ALL_REDUCE.start(values, 1.0, self._group, 0).finish())

    def _take_outer_step(self, mean: torch.Tensor) -> None:
        """Moves the outer weights along the mean movement, (n,), which is overwritten."""
        config = self._config
        self._momentum.mul_(config.decay).add_(mean)
        # Nesterov looks ahead: the movement, and what the momentum makes of it in the next round.
        direction = mean.add_(self._momentum, alpha=config.decay) if config.nesterov else self._momentum
        self._start.sub_(direction, alpha=config.rate)

    def _begin(self) -> _Transfer:
        """Starts the exchange of this rank's movement since the round's start, and of the round's summary."""
        # The movement is taken at the round's end: start minus present, weight by weight into one flat tensor.
        values = torch.empty(self._start.shape, dtype=self._start.dtype, device=self._device)
        for view, start, weight in zip(self._split(values), self._start_views, self._weights):
            view.copy_(start - weight.local if self._exchange.global_mean else weight.local)
        tokens, losses = ([0.0] * self.islands for _ in range(2))
        tokens[self.island], losses[self.island] = self._round_tokens, self._round_loss
        values_by_island = [*self._votes, self._stop_count, *tokens, *losses]
        summary = torch.tensor(values_by_island, dtype=torch.float64, device=self._device)
        mean = self._exchange.start(values, self._round_tokens, self._group, self._joins, self._config.compress)
        return _Transfer(mean, summary, self._group.all_reduce(summary, "the islands' losses"))

    @torch.no_grad()
    def _apply(self, transfer: _Transfer) -> JoinReport:
        """Waits for a transfer, takes the outer step and begins the next round from its weights."""
        mean = transfer.mean.finish()
        transfer.pending_summary.wait()
        summary = transfer.summary.tolist()
        votes, stop_count, figures = summary[: len(VOTES)], summary[len(VOTES)], summary[len(VOTES) + 1 :]
        means = self._split(mean)
        global_mean = self._exchange.global_mean
        deviations = [
            ((start - weight.local) if global_mean else weight.local).to(view.device) - view
            for start, weight, view in zip(self._start_views, self._weights, means)
        ]
        squares = torch.stack(
            [squared_norm(zip(self._weights, tensors), self._device) for tensors in (means, deviations)]
        )
        # Partial over an island's ranks; over the islands it is a mean.
        self._world.all_reduce(squares).wait()
        norm, distance = (squares / self.islands).sqrt().tolist()
        if global_mean:
            self._take_outer_step(mean.to(self._start.device))
            means = self._start_views
        for weight, view in zip(self._weights, means):
            weight.local.copy_(view)
        self._round_tokens = self._round_loss = 0.0
        self._round_steps, self._votes, self._stop_count = 0, [0.0] * len(VOTES), 0.0
        self._joins += 1
        self._program.weights_changed()
        self._on_change()
        tokens, losses = figures[: self.islands], figures[self.islands :]
        return JoinReport(
            losses=tuple(loss / max(1.0, count) for loss, count in zip(losses, tokens)),
            tokens=tuple(tokens),
            pseudo_gradient_norm=norm if global_mean else None,
            consensus_distance=distance,
            raw_bytes=self._start.nbytes,
            sent_bytes=transfer.mean.sent_bytes,
            votes=tuple(votes),
            stop_count=stop_count,
        )

    @contextlib.contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Puts the weights of the last join in place of this island's own, as long as the context lasts."""
        self._average_all()
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchanges this island's weights with those of the last join."""
        for weight, start in zip(self._weights, self._start_views):
            own = weight.local.clone()
            weight.local.copy_(start)
            start.copy_(own)
        self._program.weights_changed()

    def state(self) -> Iterator[tuple[str, StateTensor]]:
        """Yields (name, tensor) of what checkpoints hold beside each island's weights and moments."""
        for prefix, flat in ((WEIGHTS, self._start), (OUTER_MOMENTUM, self._momentum)):
            for weight, view in zip(self._weights, self._split(flat)):
                yield f"{prefix}/{weight.name}", weight.checkpoint_boxes(view)
        yield f"{island_prefix(self.island)}{_COUNTERS}", self._counters

    def addresses(self) -> list[int]:
        """Returns the memory addresses of `state`'s tensors."""
        return [self._start.data_ptr(), self._momentum.data_ptr(), self._counters.data_ptr()]

    def bytes(self) -> int:
        """Returns the bytes of the outer optimizer's state that this rank holds between joins."""
        return self._start.nbytes + self._momentum.nbytes

    def prepare_state(self, values: JsonObject) -> None:
        """Writes this island's plain values into the tensor that checkpoints hold, and takes the outer weights.

        Args:
            values: of the loop.

        Raises:
            CheckpointError: when they are too long.
        """
        self._average_all()
        rounds = {"tokens": self._round_tokens, "loss": self._round_loss, "steps": self._round_steps}
        own = {"round": rounds, "joins": self._joins, "votes": self._votes}
        text = json.dumps(own | dict(values)).encode()
        if len(text) > _COUNTER_BYTES:
            raise CheckpointError(f"an island's plain values take {len(text)} bytes, more than {_COUNTER_BYTES}")
        padded = bytearray(text.ljust(_COUNTER_BYTES))
        self._counters.copy_(torch.frombuffer(padded, dtype=torch.uint8))

    def read_counters(self) -> JsonObject:
        """Restores the round from the tensor that a checkpoint filled; returns the values of `prepare_state`."""
        values = json.loads(bytes(self._counters.cpu().numpy()).decode())
        rounds = values["round"]
        self._round_tokens, self._round_loss = float(rounds["tokens"]), float(rounds["loss"])
        self._round_steps, self._joins = int(rounds["steps"]), int(values["joins"])
        self._votes = [float(vote) for vote in values["votes"]]
        return dict(values)
