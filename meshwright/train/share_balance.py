"""Dynamic load balance: each reader's rows follow the speed that it computes with, at the same global batch.

Ranks that share a step end it together, so wall time says nothing of a slow one: what counts is the time that each
computed, without its waits in collectives. Every few steps all ranks learn these times, and each finds the same new
shares by the same arithmetic. A step trains the same rows whoever reads them, and the loss is divided by the targets of
the global batch, so its gradient stays the global batch's up to the order of the sum.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from meshwright.control_groups import available_bytes
from meshwright.errors import PlanError
from meshwright.events import StepRecord
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.program import Program
from meshwright.spec.balanced_shares import balanced_shares
from meshwright.spec.layout import Layout
from meshwright.train.config import TrainConfig
from meshwright.train.feed import TokenFeed
from meshwright.train.hooks import Request, StepInfo

LEAST_GAIN = 0.05
"""Shares change when the slowest reader's time is expected to fall by this share: less isn't worth a change,"""
CERTAINTY = 2.5
"""and by so many standard errors of the times more, so that noise alone moves no rows to and fro."""
WINDOWS = (1, 2, 4, 8)
"""Decisions whose steps count together: the last one shows a large change at once, more of them show a small one."""
NOISE_STEPS = 32
"""Newest differences between steps that follow each other, which noise is read from."""
SURE_DIFFERENCES = 8
"""Differences from which on their median says how noisy times are."""
MEMORY_SHARE = 0.9
"""Share of a device's memory that more rows may fill."""
WARM_UP_STEPS = 2
"""Steps after a start, or after a change, whose times say nothing: kernels load, buffers of new sizes are made."""


def check_rebalance(config: TrainConfig, layout: Layout, unit: int = 1) -> None:
    """Refuses, before a rank starts, a layout whose shares can't change.

    Args:
        config: with ``rebalance`` and ``batch``.
        layout: to be run.
        unit: rows that a micro-batch of the model must be a multiple of.

    Raises:
        PlanError: with the rule and the nearest that works.
    """
    reason = fixed_shares_reason(config, layout, unit)
    if config.rebalance and reason:
        raise PlanError(f"train.rebalance = {config.rebalance} moves rows between ranks that read other rows; {reason}")


def fixed_shares_reason(config: TrainConfig, layout: Layout, unit: int = 1) -> str:
    """Returns why the shares of a layout can't change, and what works; empty where they can (`check_rebalance`)."""
    readers, rows = layout.reader(0)[1], config.batch // layout.microbatches
    if readers == 1:
        return f"{layout} has one reader: use replicate or shard, or leave it out"
    if layout.islands > 1:
        return f"{layout} has islands, which agree on nothing within a round: use replicate in their place"
    if layout.compile:
        return "compile=true would compile for each number of rows anew: drop one"
    if layout.ep_halves:
        return "ep_halves=true needs two rows of each micro-batch on every rank, and one may be left: use ep_overlap=2"
    if rows // unit <= readers:
        return (
            f"a micro-batch has {rows} rows, in units of {unit}, for {readers} readers, so none can be moved: use "
            f"microbatches=1 or train.batch = {2 * readers * unit} and more"
        )
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareChange:
    """A decision, the same on every rank."""

    first_step: int
    """Global batch from which on it holds."""
    shares: tuple[int, ...]
    """Rows of each reader in a micro-batch."""
    seconds: tuple[float, ...]
    """Seconds of a step that each reader computed, its slowest rank's, before the change."""
    expected_s: float
    """The slowest reader's after it, where a row costs what it cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPace:
    """A rank's times, as all ranks learn them."""

    seconds: tuple[float, ...]
    """Median seconds that it computed a step, over its newest steps of each of `WINDOWS`, as far as there are."""
    row_limit: int
    """Rows of a micro-batch that its memory allows."""
    noise: float = 0.0
    """Standard deviation of a step's seconds, as a share of them."""


class ShareDecision:
    """What all ranks decide alike from all ranks' times; no communication, no clock.

    Args:
        reader_of: the reader that each rank belongs to.
        shares: first rows of each reader in a micro-batch.
        unit: rows that can't be split.
        every: steps between decisions, of which the first of `WINDOWS` has as many.
    """

    def __init__(self, reader_of: Sequence[int], shares: Sequence[int], unit: int, every: int) -> None:
        self._reader_of, self.shares, self._unit, self._every = tuple(reader_of), tuple(shares), unit, every

    def decide(self, times: Sequence[RankPace], first_step: int) -> ShareChange | None:
        """Returns new shares where they are worth it, by the fewest steps that show it.

        Args:
            times: by rank.
            first_step: from which on new shares can hold.
        """
        limits = [sum(self.shares)] * len(self.shares)
        for reader, rank in zip(self._reader_of, times, strict=True):
            # A reader's ranks share its rows (tp, pp, cp): the slowest sets its pace, the fullest its limit.
            limits[reader] = min(limits[reader], rank.row_limit)
        noise = max(rank.noise for rank in times)
        for window, decisions in enumerate(WINDOWS[: len(times[0].seconds)]):
            seconds = [0.0] * len(self.shares)
            for reader, rank in zip(self._reader_of, times, strict=True):
                seconds[reader] = max(seconds[reader], rank.seconds[window])
            if min(seconds) <= 0.0:
                return None
            per_row = [busy_s / rows for busy_s, rows in zip(seconds, self.shares)]
            shares = balanced_shares(per_row, limits, sum(self.shares), self._unit)
            expected_s = max(rows * cost for rows, cost in zip(shares, per_row))
            # Of a median of n draws sqrt(pi / 2n) deviations; of the ratio of two of them, sqrt(2) times that.
            error = noise * math.sqrt(math.pi / (decisions * self._every))
            if expected_s < (1.0 - LEAST_GAIN - CERTAINTY * error) * max(seconds):
                self.shares = tuple(shares)
                return ShareChange(
                    first_step=first_step, shares=self.shares, seconds=tuple(seconds), expected_s=expected_s
                )
        return None


class ShareBalancer:
    """A hook of the loop: measures each step, decides with all ranks every few, and tells feed and program.

    Args:
        program: whose random numbers follow the rows.
        mesh: its ranks and layout.
        feed: of this rank, at the first step that it will train.
        config: the batch, and how often to decide.
        event: reports a change.
        local_ranks: ranks on this host, which share its memory.
        unit: rows that a micro-batch of the model must be a multiple of.
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        feed: TokenFeed,
        config: TrainConfig,
        event: Callable[[ShareChange], None],
        *,
        local_ranks: int = 1,
        unit: int = 1,
    ) -> None:
        layout = mesh.layout
        self._mesh, self._program, self._feed, self._event = mesh, program, feed, event
        self._every, self._local_ranks, self._microbatches = config.rebalance, local_ranks, layout.microbatches
        rows = config.batch // layout.microbatches
        reader_of = [layout.reader(rank)[0] for rank in range(layout.world)]
        shares = [rows * share // sum(layout.reader_shares()) for share in layout.reader_shares()]
        self._decision = ShareDecision(reader_of, shares, unit, self._every)
        self._reader = reader_of[mesh.rank]
        self._most_rows = shares[self._reader]
        self._pending: ShareChange | None = None
        self._busy_s: deque[float] = deque(maxlen=WINDOWS[-1] * self._every)
        self._differences: deque[float] = deque(maxlen=NOISE_STEPS)
        self._undecided_steps = 0
        self._ignored_steps = WARM_UP_STEPS

    def __call__(self, info: StepInfo) -> Request:
        """Takes a step's times, and decides with all ranks where enough of them are there."""
        if self._pending is not None:
            if self._feed.next_step >= self._pending.first_step:
                # From the next step on: what follows from the row's place in the batch (dropout) must move with it.
                self._program.change_reader_shares(self._pending.shares)
                self._pending, self._ignored_steps = None, WARM_UP_STEPS
        elif self._ignored_steps:
            self._ignored_steps -= 1
        else:
            self._busy_s.append(busy_seconds(info.record))
            self._undecided_steps += 1
            if self._undecided_steps >= self._every:
                self._decide(info.record)
        return Request.NONE

    def _decide(self, record: StepRecord) -> None:
        times = self._gather(self._row_limit(record))
        self._undecided_steps = 0
        self._pending = self._decision.decide(times, self._feed.next_unread)
        if self._pending is not None:
            self._busy_s.clear()
            shares, first = self._pending.shares, sum(self._pending.shares[: self._reader])
            span = (first * self._microbatches, (first + shares[self._reader]) * self._microbatches)
            self._feed.change_span(self._pending.first_step, span)
            self._event(self._pending)

    def _gather(self, row_limit: int) -> list[RankPace]:
        """Returns every rank's times, in rank order; all ranks have seen equally many steps."""
        newest = list(self._busy_s)
        windows = [count * self._every for count in WINDOWS if count * self._every <= len(newest)]
        # Medians, since one step may hold what has nothing to do with rows: a snapshot, a page fault.
        seconds = [median(newest[-count:]) for count in windows]
        self._differences.extend(relative_differences(newest[-self._every - 1 :]))
        own = [float(row_limit), noise_of(self._differences), *seconds]
        mine = torch.tensor(own, dtype=torch.float64, device=self._mesh.device_type)
        values = mine.new_empty(len(own) * self._mesh.world.size)
        self._mesh.world.all_gather(values, mine).wait()
        # Else this wait would be taken from the next step's time.
        self._mesh.log.drain()
        return [
            RankPace(row_limit=int(limit), noise=noise, seconds=tuple(seconds))
            for limit, noise, *seconds in values.view(-1, len(own)).tolist()
        ]

    def _row_limit(self, record: StepRecord) -> int:
        """Returns the rows of a micro-batch that this rank has memory for; those that it has had at the least."""
        # The peak is that of the most rows so far.
        self._most_rows = max(self._most_rows, self._decision.shares[self._reader])
        peak = record.memory["peak"]
        # What isn't state grows with the rows: a bound from above, since some of it (kernels, buckets) doesn't.
        grows = max(1, peak - sum(size for kind, size in record.memory.items() if kind != "peak"))
        return self._most_rows + int(self._most_rows * MEMORY_SHARE * self._free_bytes() / grows)

    def _free_bytes(self) -> int:
        if self._mesh.device_type == "cuda":
            free, _ = torch.cuda.mem_get_info()
            return max(0, free + torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated())
        return available_bytes() // self._local_ranks


def busy_seconds(record: StepRecord) -> float:
    """Returns the seconds of a step that its rank computed: without waits for collectives and for data."""
    waits = sum(row.exposed_s for row in record.comm) + record.parts.get("data", 0.0)
    return max(0.0, record.step_s - waits)


def relative_differences(seconds: Sequence[float]) -> list[float]:
    """Returns by which share of their mean each two seconds that follow each other differ."""
    return [2.0 * abs(later - earlier) / (later + earlier or 1.0) for earlier, later in pairwise(seconds)]


def noise_of(differences: Sequence[float]) -> float:
    """Returns the standard deviation of values from the absolute differences of neighbours; 0 without any.

    By the median, so that one change of the values themselves, or one step that held something else, says nothing.
    """
    if not differences:
        return 0.0
    # The median of a few may be small by chance: the largest then stands for it.
    typical = median(differences) if len(differences) >= SURE_DIFFERENCES else max(differences)
    # |a - b| of two normal draws has the median 0.6745 sqrt(2) deviations.
    return typical / (0.6745 * math.sqrt(2.0))
