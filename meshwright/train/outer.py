"""The outer optimizer: islands train by themselves, and join once in a round of steps.

An **island** is a group of ranks that take each step together; its ranks hold the same parts of the weights as those of
every other island, rank by rank. With theta_0 the weights at a round's start and theta_i those of island i at its end,
after n_i target tokens, all islands continue from

    delta = sum_i n_i (theta_0 - theta_i) / sum_i n_i           the pseudo-gradient
    b     = momentum b + delta
    theta = theta_0 - lr (delta + momentum b)                   Nesterov; lr b without

In the first `outer.warmup` steps there is one island: gradients are summed over all, whose weights and moments stay
equal, so that rounds begin from a model that has learned something (in the paper from a pretrained one). With
`outer.compress` these sums travel rounded too, by random numbers as those of ``compress`` in a layout
(`parallel.compression`): in as many bytes there are four times as many such steps.

Where islands exchange with some others alone (`parallel.sync`: ring, exponential), each goes on from the mean of its
own weights and theirs, and the outer weights are the mean over all, taken before they are evaluated or saved.

Streaming: the weights are split into fragments (`train.fragments`), each with rounds of its own, staggered. With
`outer.delay` D a fragment's exchange starts after step t and the outer step follows after step t + D, from the movement
as it was at t; then an island goes on from mix theta_i + (1 - mix) theta. Movements are always from the outer weights,
so what an island keeps of its own counts in the next round.

AdamW's moments stay with their island. The rate 1 without momentum is the mean of the weights: local SGD.
Source: Douillard et al., DiLoCo (2023), algorithm 1; Douillard et al., Streaming DiLoCo (2025), algorithm 2; McMahan
et al., FedAvg (2017), algorithm 1.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator

import torch

from meshwright.errors import CheckpointError
from meshwright.json_types import JsonObject
from meshwright.parallel.dcp_shards import StateTensor
from meshwright.parallel.program import Program
from meshwright.parallel.sync import find_exchange
from meshwright.parallel.sync.all_reduce import EXCHANGE as ALL_REDUCE
from meshwright.spec.groups import round_axes
from meshwright.train.config import OuterConfig
from meshwright.train.fragments import Fragment, Transfer, make_fragments
from meshwright.train.join_report import VOTES, JoinReport, merge_reports
from meshwright.train.joint_gradients import JointGradients
from meshwright.train.state import COUNTERS, OUTER_MOMENTUM, OUTER_TRANSFER, TRANSFER_SUMMARIES, WEIGHTS, island_prefix
from meshwright.train.step import squared_norm

_COUNTER_BYTES = 16384
"""Bytes of an island's plain values: the losses and norms of its last steps above all."""


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
        # A stage may hold frozen weights alone.
        first = (program.weights or program.frozen)[0].local
        self._device = torch.device("cuda", torch.cuda.current_device()) if mesh.world.on_cuda else first.device
        self._joint_gradients = JointGradients(self._group, self._device, config.number_format, program.rounding_key)
        self._fragments = make_fragments(program.weights, config.fragment_count, config.round_steps)
        # In the order of fragments, so that each is a run of the flat tensors.
        self._weights = [weight for fragment in self._fragments for weight in fragment.weights]
        self._start = torch.empty(self._fragments[-1].span.stop, dtype=first.dtype, device=first.device)
        self._momentum = torch.zeros_like(self._start)
        # Means that arrived before their time: a snapshot can't hold a collective under way.
        self._received = torch.zeros_like(self._start) if config.delay_steps else None
        # For each fragment the summary of `Transfer`, its norm and its distance.
        columns = len(VOTES) + 3 + 2 * self.islands
        self._summaries = torch.zeros(config.fragment_count, columns, dtype=torch.float64, device=first.device)
        self._start_views = self._split(self._start)
        self._counters = torch.zeros(_COUNTER_BYTES, dtype=torch.uint8, device=first.device)
        self._votes = [0.0] * len(VOTES)
        self._stop_count = 0.0
        self.restart()

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns a view of ``flat: (n,)`` for each weight, of the shape of its local part."""
        return [view for fragment in self._fragments for view in fragment.split(flat[fragment.span])]

    def restart(self) -> None:
        """Begins a round from the present weights, which are equal in all islands."""
        for weight, start in zip(self._weights, self._start_views):
            start.copy_(weight.local)
        for fragment in self._fragments:
            fragment.tokens = fragment.loss = 0.0
            fragment.transfer = None

    def is_joint(self, step: int) -> bool:
        """Returns whether all islands take the step after so many steps as one."""
        return step < self._config.warmup

    def sum_gradients(self) -> None:
        """Sums the gradients of this rank's weights over the islands, for a step that these take as one."""
        self._joint_gradients.sum(self._weights)

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

    def sends_ahead(self, step: int, last: bool) -> bool:
        """Returns whether an exchange starts after so many steps whose result is taken in a later one."""
        return bool(self._config.delay_steps) and not last and bool(self._starting(step, last))

    def ends_round(self, step: int, last: bool) -> bool:
        """Returns whether weights of this island change to those of a join after so many steps.

        Args:
            step: steps done.
            last: whether the run ends after this step, which ends all rounds too.
        """
        return last or bool(self._arriving(step, last) if self._config.delay_steps else self._starting(step, last))

    def _starting(self, step: int, last: bool) -> list[Fragment]:
        """Returns the fragments whose exchange starts after so many steps."""
        steps = step - self._config.warmup
        return [
            fragment
            for fragment in self._fragments
            if last or (steps > 0 and steps % self._config.round_steps == fragment.offset)
        ]

    def _arriving(self, step: int, last: bool) -> list[Fragment]:
        """Returns the fragments whose exchange started before and is taken after so many steps."""
        delay = self._config.delay_steps
        return [
            fragment
            for fragment in self._fragments
            if fragment.transfer is not None and (last or step - fragment.transfer.step >= delay)
        ]

    def receive(self, step: int, last: bool) -> None:
        """Waits for what is taken after so many steps, so that it can be compared before any weight changes."""
        for fragment in self._arriving(step, last):
            self._receive(fragment)

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
        if self.is_joint(step - 1):
            self.restart()
            if not last:
                return None
        for fragment in self._fragments:
            fragment.count(tokens, loss)
        reports = [self._apply(fragment, self._config.own_share) for fragment in self._arriving(step, last)]
        for fragment in self._starting(step, last):
            self._begin(fragment, step)
            if last or not self._config.delay_steps:
                reports.append(self._apply(fragment, 0.0))
        if last and not self._exchange.global_mean:
            with torch.no_grad():
                self._average_all()
                for weight, start in zip(self._weights, self._start_views):
                    weight.local.copy_(start)
            self._program.weights_changed()
            self._on_change()
        return merge_reports(reports)

    def _average_all(self) -> None:
        """Sets the outer weights to the mean over all islands, where exchanges leave their weights apart."""
        if self._exchange.global_mean:
            return
        values = torch.empty(self._start.shape, dtype=self._start.dtype, device=self._device)
        for view, weight in zip(self._split(values), self._weights):
            view.copy_(weight.local)
        self._start.copy_(ALL_REDUCE.start(values, 1.0, self._group, 0).finish())

    def _take_outer_step(self, mean: torch.Tensor, span: slice) -> None:
        """Moves a run of the outer weights along the mean movement, (n,), which is overwritten."""
        config, momentum = self._config, self._momentum[span]
        momentum.mul_(config.decay).add_(mean)
        # Nesterov looks ahead: the movement, and what the momentum makes of it in the next round.
        direction = mean.add_(momentum, alpha=config.decay) if config.nesterov else momentum
        self._start[span].sub_(direction, alpha=config.rate)

    @torch.no_grad()
    def _begin(self, fragment: Fragment, step: int) -> None:
        """Starts the exchange of this rank's movement from the outer weights, and of the round's summary."""
        # The movement is taken at the round's end: start minus present, weight by weight into one flat tensor.
        start = self._start[fragment.span]
        values = torch.empty(start.shape, dtype=start.dtype, device=self._device)
        for view, outer, weight in zip(fragment.split(values), fragment.split(start), fragment.weights):
            view.copy_(outer - weight.local if self._exchange.global_mean else weight.local)
        # The exchange may overwrite the values, and with a delay the weights go on.
        movement = fragment.split(values.clone()) if self._config.delay_steps else None
        tokens, losses = ([0.0] * self.islands for _ in range(2))
        tokens[self.island], losses[self.island] = fragment.tokens, fragment.loss
        values_by_island = [*self._votes, self._stop_count, *tokens, *losses]
        summary = torch.tensor(values_by_island, dtype=torch.float64, device=self._device)
        mean = self._exchange.start(values, fragment.tokens, self._group, fragment.joins, self._config.number_format)
        pending = (mean, self._group.all_reduce(summary, "the islands' losses"))
        fragment.transfer = Transfer(step, summary, mean.sent_bytes, pending, movement)
        fragment.tokens = fragment.loss = 0.0
        fragment.joins += 1
        self._votes, self._stop_count = [0.0] * len(VOTES), 0.0

    @torch.no_grad()
    def _receive(self, fragment: Fragment) -> Transfer:
        """Waits for a fragment's mean movement, if it is still under way; every rank calls it after the same step."""
        transfer = fragment.transfer
        assert transfer is not None
        if transfer.pending is None:
            return transfer
        wait_began = time.perf_counter()
        mean, summary = transfer.pending
        values = mean.finish()
        summary.wait()
        means, global_mean = fragment.split(values), self._exchange.global_mean
        movement = transfer.movement or [
            start - weight.local if global_mean else weight.local
            for start, weight in zip(fragment.split(self._start[fragment.span]), fragment.weights)
        ]
        deviations = [own.to(view.device) - view for own, view in zip(movement, means)]
        squares = torch.stack(
            [squared_norm(zip(fragment.weights, tensors), self._device) for tensors in (means, deviations)]
        )
        # Partial over an island's ranks; over the islands it is a mean.
        self._world.all_reduce(squares).wait()
        transfer.norm, transfer.distance = (squares / self.islands).sqrt().tolist()
        transfer.wait_s = time.perf_counter() - wait_began
        transfer.pending = transfer.movement = None
        transfer.mean = values
        if self._received is not None:
            transfer.mean = self._received[fragment.span].copy_(values)
        return transfer

    @torch.no_grad()
    def _apply(self, fragment: Fragment, own_share: float) -> JoinReport:
        """Takes the outer step from a fragment's mean movement, and begins its next round.

        Args:
            fragment: whose exchange has started.
            own_share: share of this island's own weights that stays.
        """
        transfer, start, global_mean = self._receive(fragment), self._start[fragment.span], self._exchange.global_mean
        assert transfer.mean is not None
        means = fragment.split(transfer.mean)
        if global_mean:
            self._take_outer_step(transfer.mean.to(start.device), fragment.span)
            means = fragment.split(start)
        for weight, view in zip(fragment.weights, means):
            if own_share:
                weight.local.mul_(own_share).add_(view, alpha=1.0 - own_share)
            else:
                weight.local.copy_(view)
        fragment.transfer = None
        self._program.weights_changed(fragment.weights)
        self._on_change()
        summary = transfer.summary.tolist()
        votes, stop_count, figures = summary[: len(VOTES)], summary[len(VOTES)], summary[len(VOTES) + 1 :]
        tokens, losses = figures[: self.islands], figures[self.islands :]
        return JoinReport(
            losses=tuple(loss / max(1.0, count) for loss, count in zip(losses, tokens)),
            tokens=tuple(tokens),
            pseudo_gradient_norm=transfer.norm if global_mean else None,
            consensus_distance=transfer.distance,
            raw_bytes=start.nbytes,
            sent_bytes=transfer.sent_bytes,
            wait_s=transfer.wait_s,
            fragments=(fragment.index,),
            votes=tuple(votes),
            stop_count=stop_count,
        )

    @contextlib.contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Puts the weights of the last join in place of this island's own, as long as the context lasts."""
        self._average_all()
        self._program.swap_weights(self._weights, self._start_views)
        try:
            yield
        finally:
            self._program.swap_weights(self._weights, self._start_views)

    def state(self) -> Iterator[tuple[str, StateTensor]]:
        """Yields (name, tensor) of what checkpoints hold beside each island's weights and moments."""
        flat_tensors = [(WEIGHTS, self._start), (OUTER_MOMENTUM, self._momentum)]
        if self._received is not None:
            flat_tensors.append((OUTER_TRANSFER, self._received))
            yield TRANSFER_SUMMARIES, self._summaries
        for prefix, flat in flat_tensors:
            for weight, view in zip(self._weights, self._split(flat)):
                yield f"{prefix}/{weight.name}", weight.checkpoint_boxes(view)
        yield f"{island_prefix(self.island)}{COUNTERS}", self._counters

    def addresses(self) -> list[int]:
        """Returns the memory addresses of `state`'s tensors."""
        received = [] if self._received is None else [self._received.data_ptr(), self._summaries.data_ptr()]
        return [self._start.data_ptr(), self._momentum.data_ptr(), *received, self._counters.data_ptr()]

    def bytes(self) -> int:
        """Returns the bytes of the outer optimizer's state that this rank holds between joins."""
        received = 0 if self._received is None else self._received.nbytes
        return self._start.nbytes + self._momentum.nbytes + received

    def prepare_state(self, values: JsonObject) -> None:
        """Writes this island's plain values into the tensor that checkpoints hold, and takes the outer weights.

        Exchanges under way are waited for, and what they brought is saved with the state; it is taken in its own step.

        Args:
            values: of the loop.

        Raises:
            CheckpointError: when they are too long.
        """
        self._average_all()
        rounds: list[list[float | None]] = []
        for fragment in self._fragments:
            started = None
            if fragment.transfer is not None:
                transfer = self._receive(fragment)
                started = transfer.step
                figures = [*transfer.summary.tolist(), transfer.norm, transfer.distance]
                self._summaries[fragment.index] = torch.tensor(figures, dtype=torch.float64)
            rounds.append([fragment.tokens, fragment.loss, fragment.joins, started])
        text = json.dumps({"rounds": rounds, "votes": self._votes} | dict(values)).encode()
        if len(text) > _COUNTER_BYTES:
            raise CheckpointError(f"an island's plain values take {len(text)} bytes, more than {_COUNTER_BYTES}")
        padded = bytearray(text.ljust(_COUNTER_BYTES))
        self._counters.copy_(torch.frombuffer(padded, dtype=torch.uint8))

    def read_counters(self) -> JsonObject:
        """Restores the round from the tensor that a checkpoint filled; returns the values of `prepare_state`."""
        values = json.loads(bytes(self._counters.cpu().numpy()).decode())
        # Checkpoints from before there were fragments have one round.
        rounds = values.get("rounds") or [[values["round"]["tokens"], values["round"]["loss"], values["joins"], None]]
        for fragment, (tokens, loss, joins, started) in zip(self._fragments, rounds):
            fragment.tokens, fragment.loss, fragment.joins = float(tokens), float(loss), int(joins)
            fragment.transfer = None if started is None else self._restored_transfer(fragment, int(started))
        self._votes = [float(vote) for vote in values["votes"]]
        return dict(values)

    def _restored_transfer(self, fragment: Fragment, step: int) -> Transfer:
        """Returns a fragment's exchange that started after ``step`` steps and whose result a checkpoint held."""
        assert self._received is not None
        *summary, norm, distance = self._summaries[fragment.index].tolist()
        mean = self._received[fragment.span]
        sent_bytes = self._exchange.sent_bytes(
            mean.numel(), mean.element_size(), self._group.size, self._config.number_format
        )
        figures = torch.tensor(summary, dtype=torch.float64)
        return Transfer(step, figures, sent_bytes, mean=mean, norm=norm, distance=distance)
