"""A run as a site: one island, whose rounds an outer server makes into versions (`meshwright.sites`).

It stands where `train.outer.OuterOptimizer` stands for islands of one run. The outer step and its momentum are the
server's; here are the weights of the last version, from which a round's movement is taken.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.errors import ConfigError, RankError
from meshwright.json_types import JsonObject
from meshwright.parallel.dcp_shards import StateTensor
from meshwright.parallel.program import Program
from meshwright.parallel.weights import Weight
from meshwright.sites.client import ServerAddress, SiteClient
from meshwright.sites.messages import Declaration
from meshwright.sites.settings import ServerSettings
from meshwright.spec.layout import Layout
from meshwright.train.config import OuterConfig
from meshwright.train.join_report import VOTES
from meshwright.train.run_config import RunConfig
from meshwright.train.site_boxes import SiteBoxes
from meshwright.train.site_link import RoundFigures, ServerRelease, SiteLink
from meshwright.train.state import WEIGHTS
from meshwright.transport.key import read_key

LEAVE_S = 20.0
"""Longest wait of a run that was asked to end for the server to take its open round."""


def server_settings(config: OuterConfig) -> ServerSettings:
    """Returns the settings of sites and server of a recipe."""
    return ServerSettings(
        mode=config.mode,
        sites=config.sites,
        lr=config.rate,
        momentum=config.decay,
        nesterov=config.nesterov,
        quorum=config.quorum or config.sites,
        grace_s=config.grace_s,
        staleness=config.staleness,
        momentum_every=config.momentum_every or config.sites,
    )


def check_site(config: RunConfig, layout: Layout) -> None:
    """Refuses settings that a site can't obey.

    Raises:
        ConfigError: with what to write instead.
    """
    outer = config.outer
    if layout.islands > 1:
        raise ConfigError(
            f"outer.meet = {outer.meet} makes this run one island, and {layout} has {layout.islands}; write replicate "
            "in place of islands"
        )
    if layout.compress.keeps_errors:
        raise ConfigError(
            f"compress={layout.compress}: sites begin rounds from weights that their copies' errors don't belong to; "
            "write compress=int8"
        )
    if outer.topology != "all_reduce":
        raise ConfigError(f"outer.topology = {outer.topology} is for islands of one run; leave it out of a site's")
    if (outer.fragment_count, outer.delay_steps, outer.mix) != (1, 0, None):
        raise ConfigError(
            f"outer.fragments = {outer.fragment_count}, outer.delay = {outer.delay_steps} and outer.mix = {outer.mix} "
            "stream between islands of one run; leave them out of a site's, whose movement goes to the server whole"
        )
    if outer.warmup:
        raise ConfigError(
            f"outer.warmup = {outer.warmup} sums gradients between islands of one run, and sites send none; leave it "
            "out, and begin from a checkpoint's weights that all sites have"
        )
    if not outer.key_file:
        raise ConfigError("outer.meet needs outer.key_file, a copy of the server's key on this machine")
    if config.recovery.on_sick == "rewind":
        raise ConfigError(
            "recovery.on_sick = rewind goes back to weights before those that the outer server has; write "
            "recovery.on_sick = skip or stop"
        )
    server_address(outer)


def server_address(config: OuterConfig) -> ServerAddress:
    """Returns where the server listens, and its key.

    Raises:
        ConfigError: for an address that is none.
        LaunchError: when the key can't be read.
    """
    host, _, port = config.meet.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"outer.meet = {config.meet}: give HOST:PORT, as the server printed it")
    return ServerAddress(host.strip("[]"), int(port), read_key(Path(config.key_file).expanduser()))


def declare(config: RunConfig, fingerprint: str, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> Declaration:
    """Returns what a site tells of itself when it dials in.

    Args:
        config: of its run.
        fingerprint: of the model's architecture.
        shapes: of the trained weights, by name.
        dtype: of the weights.
    """
    settings = server_settings(config.outer).agreed() | {"train.batch": config.train.batch}
    return Declaration(model=fingerprint, dtype=str(dtype).removeprefix("torch."), shapes=shapes, settings=settings)


def make_client(config: RunConfig, declaration: Declaration) -> SiteClient:
    """Returns the client of a site's first rank, or of the process that starts its ranks."""
    run = f"{socket.gethostname()}:{Path(config.run).resolve()}"
    return SiteClient(server_address(config.outer), config.outer.site, run, declaration)


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteReport:
    """A join at the server, the same on every rank but for the seconds."""

    site: int
    tokens: float
    loss: float
    """Mean loss over the targets of the round."""
    release: ServerRelease | None
    """The version that the site goes on from; None where it left, or lost its open round as it ended."""
    raw_bytes: int
    """Bytes of the site's movement in the type of its weights."""
    sent_bytes: int
    """The same as it travelled."""
    votes: tuple[float, ...]
    stop_count: float

    def to_json(self) -> dict[str, object]:
        """Returns plain values for a line of metrics."""
        values: dict[str, object] = {"site": self.site, "site_tokens": self.tokens, "site_loss": self.loss}
        if self.release is not None:
            values |= {
                "version": self.release.version,
                "staleness": self.release.staleness,
                "sites": self.release.sites,
                "wait_s": self.release.wait_s,
            }
            values |= {"refused": self.release.refused} if self.release.refused else {}
        return values | {"raw_bytes": self.raw_bytes, "sent_bytes": self.sent_bytes}


class SiteOptimizer:
    """Joins this run with other sites at an outer server; all ranks build and call it together.

    Args:
        program: built under a layout of one island.
        config: of the run.
        fingerprint: of the model's architecture.
        on_change: called after a join has changed the weights.
    """

    islands, island = 1, 0

    def __init__(self, program: Program, config: RunConfig, fingerprint: str, on_change: Callable[[], None]) -> None:
        assert program.mesh is not None
        self._program, self._config, self._on_change = program, config.outer, on_change
        self._weights: list[Weight] = list(program.weights)
        first = (program.weights or program.frozen)[0].local
        self._start = torch.empty(sum(weight.local.numel() for weight in self._weights), dtype=first.dtype)
        self._start_views = self._split(self._start)
        boxes = SiteBoxes(self._weights)
        address = server_address(config.outer)
        client = None
        if program.mesh.rank == 0:
            client = make_client(config, declare(config, fingerprint, boxes.shapes, first.dtype))
        self._link = SiteLink(
            boxes,
            address=address,
            client=client,
            site=config.outer.site,
            compress=config.outer.number_format,
            wait_s=config.outer.wait_s,
            stamp=lambda: self.stamp(),
        )
        self.stamp: Callable[[], None] = lambda: None
        """Says that this rank waits for the server; the trainer's."""
        self._votes = [0.0] * len(VOTES)
        self._stop_count = 0.0
        self.restart()

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns a view of ``flat: (n,)`` for each weight, of the shape of its local part."""
        sizes = [weight.local.numel() for weight in self._weights]
        return [view.view(weight.local.shape) for view, weight in zip(flat.split(sizes), self._weights)]

    @torch.no_grad()
    def restart(self) -> None:
        """Begins a round from the present weights."""
        for weight, start in zip(self._weights, self._start_views):
            start.copy_(weight.local)
        self._round_tokens = self._round_loss = 0.0
        self._round_steps = 0

    def dial_in(self) -> int:
        """Takes the server's present version, or gives it these weights as its first; returns the version.

        Raises:
            RankError: when the server refuses this site, or isn't there for `outer.wait_s`.
        """
        version = self._link.start(self._start_views)
        self._take_start()
        return version

    @torch.no_grad()
    def _take_start(self) -> None:
        for weight, start in zip(self._weights, self._start_views):
            weight.local.copy_(start)
        self._round_tokens = self._round_loss = 0.0
        self._round_steps = 0
        self._program.weights_changed()
        self._on_change()

    def request_stop(self, count: float) -> None:
        """Ends the round after this step, because ranks of this site were asked to end.

        Args:
            count: of them, below 1 for a reconfiguration.
        """
        self._stop_count = max(self._stop_count, count)

    def vote(self, **votes: float) -> None:
        """Asks for something that happens after the next join.

        Args:
            votes: amount for each of `train.join_report.VOTES`.
        """
        self._votes = [self._votes[index] + votes.get(name, 0.0) for index, name in enumerate(VOTES)]

    def ends_round(self, step: int, last: bool) -> bool:
        """Returns whether the site joins after so many steps: a stop doesn't wait for the round's end.

        Args:
            step: steps done.
            last: whether the run ends after this step.
        """
        return last or step % self._config.round_steps == 0 or self._stop_count > 0

    def sends_ahead(self, step: int, last: bool) -> bool:
        """Returns False: a site's movement leaves at the end of its round, which waits for the version."""
        return False

    def receive(self, step: int, last: bool) -> None:
        """Does nothing: no exchange is under way before a round's end."""

    def after_step(self, step: int, tokens: float, loss: float, last: bool) -> SiteReport | None:
        """Counts a step, and joins where a round ends; all ranks call it after each step.

        Args:
            step: steps done.
            tokens: target tokens of the step; 0 where it was skipped.
            loss: mean loss over them.
            last: whether the run ends after this step.

        Returns:
            The join's figures; None within a round.
        """
        self._round_steps += 1
        if tokens:
            self._round_tokens, self._round_loss = self._round_tokens + tokens, self._round_loss + tokens * loss
        if not self.ends_round(step, last):
            return None
        mean_loss = self._round_loss / max(1.0, self._round_tokens)
        leaves = self._stop_count > 0 and not last
        figures = RoundFigures(tokens=self._round_tokens, loss=mean_loss, steps=self._round_steps, leaves=leaves)
        report = SiteReport(
            site=self._config.site,
            tokens=self._round_tokens,
            loss=mean_loss,
            release=self._join(figures),
            raw_bytes=self._link.raw_bytes,
            sent_bytes=self._link.sent_bytes,
            votes=tuple(self._votes),
            stop_count=self._stop_count,
        )
        if last or leaves:
            self._link.leave()
        self._votes, self._stop_count = [0.0] * len(VOTES), 0.0
        return report

    @torch.no_grad()
    def _join(self, figures: RoundFigures) -> ServerRelease | None:
        movements = [start - weight.local.to(start.device) for start, weight in zip(self._start_views, self._weights)]
        try:
            wait_s = LEAVE_S if figures.leaves else self._config.wait_s
            release = self._link.join(movements, self._start_views, figures, wait_s)
        except RankError:
            # A run that was asked to end ends, without its open round.
            if not figures.leaves:
                raise
            release = None
        if release is not None:
            self._take_start()
        return release

    @contextlib.contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Puts the weights of the last version in place of this site's own, as long as the context lasts."""
        self._program.swap_weights(self._weights, self._start_views)
        try:
            yield
        finally:
            self._program.swap_weights(self._weights, self._start_views)

    def state(self) -> Iterator[tuple[str, StateTensor]]:
        """Yields (name, tensor) of the weights of the last version, which checkpoints hold beside the site's own."""
        for weight, view in zip(self._weights, self._start_views):
            yield f"{WEIGHTS}/{weight.name}", weight.checkpoint_boxes(view)

    def addresses(self) -> list[int]:
        """Returns the memory addresses of `state`'s tensors."""
        return [self._start.data_ptr()]

    def bytes(self) -> int:
        """Returns the bytes of the outer weights that this rank holds, in host memory."""
        return self._start.nbytes

    def prepare_state(self, values: JsonObject) -> None:
        """Does nothing: the plain values of a site are those of its run."""

    def read_counters(self) -> JsonObject:
        """Returns no values of its own; the open round of a state is lost."""
        return {}

    def leave(self) -> None:
        """Tells the server that this site ends, so that nobody waits for it."""
        self._link.leave()

    def close(self) -> None:
        """Ends the session, if it is open."""
        self._link.close()
