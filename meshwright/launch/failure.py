"""Failures of ranks: their record, the choice of the root cause, and the error raised for it."""

from __future__ import annotations

import pickle
import re
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.errors import LOST_CONTACT, LaunchError, MeshwrightError

RankLabel = Callable[[int], str]
"""Names a rank by its coordinates in the mesh, as ``replicate 1, shard 0``; empty without a mesh."""

_LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|[Ss]ocket (closed|error|Timeout)|ncclRemoteError|"
    r"remote process exited|NCCL communicator was aborted|failed to recv, got 0 bytes|wait timeout after"
)


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The end of a rank that didn't return."""

    rank: int
    """Global rank."""
    summary: str
    """One line: the exception, the signal or the exit status."""
    trace: str = ""
    """Traceback text; empty when the process died without one."""
    error: bytes = b""
    """The pickled `MeshwrightError`; empty for other exceptions."""
    status: int = 1
    """Exit status of the process; minus the signal's number when a signal ended it."""
    time: float = 0.0
    """time.monotonic() at which it was noticed."""

    @property
    def is_echo(self) -> bool:
        """Whether the rank failed only because a peer had failed."""
        # Without an exception the process died by itself: a cause, no echo.
        if not self.error and not self.trace:
            return False
        return LOST_CONTACT in self.summary or bool(_LOST_PEER.search(self.summary))


def describe_exception(rank: int, error: BaseException, time: float) -> RankFailure:
    """Records an exception that ended a rank's work.

    Args:
        rank: global rank.
        error: what was raised.
        time: monotonic seconds.
    """
    packed = b""
    if isinstance(error, MeshwrightError):
        try:
            packed = pickle.dumps(error)
            # Some exceptions pickle but fail to unpickle: try it here, where the error is still known.
            pickle.loads(packed)
        except Exception:
            packed = b""
    summary = traceback.format_exception_only(error)[-1].strip()
    return RankFailure(rank, summary, "".join(traceback.format_exception(error)), packed, 1, time)


def describe_status(rank: int, status: int, time: float) -> RankFailure:
    """Records a process that ended without sending an outcome.

    Args:
        rank: global rank.
        status: exit status, or minus the signal's number.
        time: monotonic seconds.
    """
    if status >= 0:
        text = f"exited with status {status} before its work was done"
    else:
        text = f"was killed by {_signal_name(-status)}"
        if -status == signal.SIGKILL:
            text += " (the kernel does that when memory runs out; see dmesg)"
    return RankFailure(rank, text, status=status, time=time)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_failure(failures: Sequence[RankFailure]) -> RankFailure:
    """Returns the failure that caused the others: the earliest one that isn't an echo of a lost peer.

    A rank killed by a signal precedes those that raised: their exceptions may be echoes that `is_echo` doesn't know.
    """

    def order(failure: RankFailure) -> tuple[bool, bool, float, bool, int]:
        # Ascending: no echo first, then signals, then the earliest; without a traceback before with.
        return failure.is_echo, failure.status >= 0, failure.time, bool(failure.trace), failure.rank

    return min(failures, key=order)


def rank_prefix(rank: int, label: RankLabel | None = None) -> str:
    """Returns ``[rank 37: pp 0, tp 5]``, or ``[rank 37]`` without a label."""
    coordinates = label(rank) if label is not None else ""
    return f"[rank {rank}: {coordinates}]" if coordinates else f"[rank {rank}]"


def failure_error(failures: Sequence[RankFailure], world: int, label: RankLabel | None = None) -> MeshwrightError:
    """Builds the error of a failed launch.

    Args:
        failures: those noticed before the other ranks were ended; at least one.
        world: number of ranks.
        label: names a rank's coordinates.

    Returns:
        The rank's own `MeshwrightError` with its prefix, or a `LaunchError` with the first traceback on top.
    """
    cause = first_failure(failures)
    prefix = rank_prefix(cause.rank, label)
    # The rank's own error keeps its class, so that callers can tell a configuration error from a crash.
    if cause.error:
        return prefixed(pickle.loads(cause.error), prefix)
    lines = [f"{prefix} {cause.summary}"]
    if cause.trace:
        lines.append(cause.trace.rstrip())
    later_failures = [failure for failure in failures if failure.rank != cause.rank]
    lines += [
        f"then {rank_prefix(later.rank, label)} {later.summary.splitlines()[0][:300]}" for later in later_failures
    ]
    if world > 1:
        lines.append(f"all {world} ranks have been ended")
    return LaunchError("\n".join(lines))


def prefixed(error: MeshwrightError, prefix: str) -> MeshwrightError:
    """Returns an error of the same class whose message begins with the rank's prefix."""
    text = f"{prefix} {error}"
    try:
        return type(error)(text)
    except TypeError:
        return LaunchError(text)
