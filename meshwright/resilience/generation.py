"""What follows from the end of a generation: decisions over typed reports, without processes, clocks or files.

A **generation** is the life of one set of ranks, from their fork until all of them are gone.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.checkpoint.snapshot import Snapshot
from meshwright.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    LaunchError,
    MeshwrightError,
    PlanError,
    error_of,
)
from meshwright.resilience.messages import Device, NodeFailure, NodeReport, Order
from meshwright.resilience.orders import StateKey
from meshwright.train.memory import RESTORING
from meshwright.train.outcome import TrainOutcome

UNRECOVERABLE = (ConfigError, PlanError, DataError, ClusterError)
"""Errors that a restart can't repair."""
_DAMAGED = "is damaged"
_TWICE_AT_START = "the ranks failed twice in this way before a step, so a third start would too: change what it names"

_TWICE_IN_STEP = "the same rank failed twice in this way in step {step}, so another start would too: mend what it names"


class Ending(enum.Enum):
    """The ways in which a generation ends."""

    COMPLETE = "complete"
    """The run is over: it reached its last step, or was interrupted."""
    RECONFIGURED = "reconfigured"
    """Ranks stopped after an agreed step, so that others run on devices that came back."""
    ANOMALOUS = "anomalous"
    """Ranks stopped at an anomalous step, from which the run is rewound."""
    DAMAGED = "damaged"
    """Ranks stopped because their state is damaged."""
    FAILED = "failed"
    """A rank failed, or a node was lost."""


@dataclass(frozen=True, kw_only=True)
class GenerationVerdict:
    """How a generation ended, over all nodes."""

    ending: Ending
    outcome: TrainOutcome | None = None
    """Of the ranks, unless they failed."""
    failure: NodeFailure | None = None
    """The failure that caused the others; None where the loss of a node did."""
    furthest_step: int = 0
    """The furthest step of any rank."""


def has_ended(order: Order, reports: Mapping[int, NodeReport]) -> bool:
    """Returns whether every node reported that its ranks ended, or one failed or was lost.

    Args:
        order: of the generation.
        reports: of the connected nodes; until a node reports this generation's end, its report has an earlier one's.
    """
    last_reports = [reports.get(node) for node in order.nodes]
    ends = [report.end for report in last_reports if report is not None]
    ends = [end for end in ends if end.generation == order.generation]
    has_failed = None in last_reports or any(end.failure is not None for end in ends)
    return has_failed or len(ends) == len(last_reports)


def judge_generation(order: Order, reports: Mapping[int, NodeReport], lost_nodes: Collection[int]) -> GenerationVerdict:
    """Judges how a generation ended, once no rank of it runs any more.

    Args:
        order: of the generation.
        reports: of the connected nodes.
        lost_nodes: nodes lost while it ran.
    """
    ends = [reports[node].end for node in order.nodes if node in reports]
    ends = [end for end in ends if end.generation == order.generation]
    outcomes = [end.outcome for end in ends if end.outcome is not None]
    complete = next((outcome for outcome in outcomes if not outcome.continues), None)
    if complete is not None:
        return GenerationVerdict(ending=Ending.COMPLETE, outcome=complete)
    failures = [end.failure for end in ends if end.failure is not None]
    if not outcomes or lost_nodes or failures:
        furthest_step = max((end.furthest_step for end in ends), default=0)
        failure = find_root_failure(failures, bool(lost_nodes))
        return GenerationVerdict(ending=Ending.FAILED, failure=failure, furthest_step=furthest_step)
    outcome, ending = outcomes[0], Ending.RECONFIGURED
    if outcome.anomalous_step:
        ending = Ending.ANOMALOUS
    elif outcome.damage is not None:
        ending = Ending.DAMAGED
    return GenerationVerdict(ending=ending, outcome=outcome)


def find_root_failure(failures: Sequence[NodeFailure], nodes_lost: bool) -> NodeFailure | None:
    """Returns the failure that caused the others; None without any, or where the loss of a node caused them."""
    # An echo is the error of a rank whose peer had failed, a hang often that of one that waits for such a peer.
    root = min(failures, key=lambda failure: (failure.is_echo, failure.is_hang, failure.time), default=None)
    if root is not None and nodes_lost and (root.is_echo or root.is_hang):
        return None
    return root


class RestartBudget:
    """Decides whether a run continues after a failure; torchelastic counts ``max_restarts``, this only those in vain.

    Args:
        attempts: failures in a row without a new step after which it doesn't.
    """

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._furthest_step = -1
        self._failures = 0
        self._start_reason = ""
        self.fails_at_start = False
        """Whether the last two failures were the same, of all ranks at their start: a setting that can't work."""
        self._last_exception: tuple[int, str] | None = None
        self.repeats_exception = False
        """Whether the last two failures were the same exception in the same step of the same rank."""

    @property
    def failures_without_progress(self) -> int:
        """Failures in a row after the first without a new step between them."""
        return max(0, self._failures - 1)

    def record_failure(
        self, error: MeshwrightError, furthest_step: int, raised_at: int | None, start_reason: str = ""
    ) -> bool:
        """Records a failure, and returns whether the budget is exhausted, so that the run ends.

        Args:
            error: of the failure.
            furthest_step: of any rank.
            raised_at: step of the rank that failed first, if by an exception in it; else None.
            start_reason: of `describe_start_failure`; empty for another failure.
        """
        self.fails_at_start = bool(start_reason) and start_reason == self._start_reason
        self._start_reason = start_reason
        # The first line of an error names its rank.
        exception = (raised_at, str(error).split("\n", 1)[0]) if raised_at is not None else None
        self.repeats_exception = exception is not None and exception == self._last_exception
        self._last_exception = exception
        # Any new step is progress: only failures without one exhaust the attempts.
        self._failures = 1 if furthest_step > self._furthest_step else self._failures + 1
        # An exception at a step that the run had not got past before is reproducible: a restart would repeat it.
        repeated = raised_at is not None and raised_at <= max(1, self._furthest_step)
        self._furthest_step = max(self._furthest_step, furthest_step)
        # A state that can't be restored is refused and an older one tried: no reproducible error.
        if isinstance(error, CheckpointError) and RESTORING in str(error):
            return self._failures > self._attempts
        in_vain = repeated or self.fails_at_start or self._failures > self._attempts
        return not isinstance(error, LaunchError) or in_vain


def describe_start_failure(failure: NodeFailure) -> str:
    """Returns the reason of a failure of all ranks before their first step; empty for that of one rank, or a later one.

    Numbers are left out, since ranks, ports and seconds differ from one start to the next.
    """
    # Without a rank that failed by itself, what they wait for or what starts them is wrong.
    is_common = failure.rank < 0 or failure.is_echo
    if failure.phase != "start" or failure.is_hang or not is_common:
        return ""
    return re.sub(r"\[rank [^]]*\] |0x[0-9a-f]+|\d+", "", failure.text.splitlines()[0])


@dataclass(frozen=True, kw_only=True)
class FailureDecision:
    """What follows from a failed generation."""

    error: MeshwrightError
    """The error that the run ends with, if it ends."""
    ends_run: bool
    refused_state: StateKey | None = None
    """The state that could not be restored; an older one is tried."""
    blamed: Device | None = None
    """The device whose rank failed first."""


def decide_after_failure(
    verdict: GenerationVerdict,
    order: Order,
    lost_nodes: Mapping[int, str],
    restart_budget: RestartBudget,
    interrupted: bool,
) -> FailureDecision:
    """Decides whether the run continues after a failed generation, from which state, and without which device.

    Args:
        verdict: of the generation.
        order: of the generation.
        lost_nodes: nodes lost while it ran, with the reason.
        restart_budget: records the failure.
        interrupted: whether the user asked that the run end.
    """
    failure = verdict.failure
    if failure is None:
        error: MeshwrightError = LaunchError("; ".join(f"node {node}: {text}" for node, text in lost_nodes.items()))
        exhausted = restart_budget.record_failure(error, verdict.furthest_step, None)
        return FailureDecision(error=error, ends_run=exhausted or interrupted)
    error = error_of(failure.error, failure.text, LaunchError)
    raised_at = failure.step if failure.raised and not failure.is_echo else None
    start_reason = describe_start_failure(failure)
    exhausted = restart_budget.record_failure(error, verdict.furthest_step, raised_at, start_reason)
    if restart_budget.fails_at_start:
        error = error_of(failure.error, f"{failure.text}\n{_TWICE_AT_START}", LaunchError)
    elif exhausted and restart_budget.repeats_exception:
        error = error_of(failure.error, f"{failure.text}\n{_TWICE_IN_STEP.format(step=failure.step)}", LaunchError)
    refused = _refused_state(failure, order)
    blamed = None
    share = order.share(failure.node)
    if not failure.is_echo and failure.rank in share.ranks:
        blamed = (share.node, share.slots[failure.rank - share.first_rank])
    # After an interrupt too an older state is tried: its ranks end at once, with a checkpoint.
    return FailureDecision(
        error=error, ends_run=exhausted or (interrupted and refused is None), refused_state=refused, blamed=blamed
    )


def _refused_state(failure: NodeFailure, order: Order) -> StateKey | None:
    """Returns the state that a failure shows to be damaged, if any."""
    if order.state is None or RESTORING not in failure.text:
        return None
    # Over several nodes the state may be sound, and its holder out of reach.
    if len(order.members) > 1 and _DAMAGED not in failure.text:
        return None
    return order.state.step, order.state.generation


@dataclass(frozen=True)
class NodeSnapshot:
    """A snapshot in a node's memory."""

    snapshot: Snapshot
    is_local: bool
    """Whether a rank of this node wrote it."""


def retain_snapshots(
    order: Order, previous: Sequence[NodeSnapshot], local: Sequence[Snapshot], received: Iterable[Snapshot]
) -> list[NodeSnapshot]:
    """Returns the snapshots that a node keeps after a generation.

    Args:
        order: of the generation.
        previous: what the node kept until now.
        local: what its own ranks left.
        received: copies of other nodes' snapshots.
    """
    ranks_by_step: dict[tuple[int, int], set[int]] = {}
    for snapshot in local:
        ranks_by_step.setdefault((snapshot.step, snapshot.generation), set()).add(snapshot.rank)
    damage, location = order.rewind.damage, order.state
    alone = len(order.shares) == 1
    if alone:
        # Without other nodes, what some ranks left can't become complete any more.
        ranks_by_step = {key: ranks for key, ranks in ranks_by_step.items() if len(ranks) == order.world}
        local = [snapshot for snapshot in local if (snapshot.step, snapshot.generation) in ranks_by_step]
    newest_step = max((step for step, _ in ranks_by_step), default=-1)
    # After a damage older states stay until the recomputed ones have got past it.
    if (damage is not None and newest_step <= damage.step) or (alone and not ranks_by_step):
        older = list(previous)
    elif alone or location is None:
        older = []
    else:
        # Over several nodes, only these are known to be complete.
        restored = (location.step, location.generation)
        older = [entry for entry in previous if (entry.snapshot.step, entry.snapshot.generation) == restored]
    return [
        *older,
        *(NodeSnapshot(snapshot, True) for snapshot in local),
        *(NodeSnapshot(snapshot, False) for snapshot in received),
    ]
