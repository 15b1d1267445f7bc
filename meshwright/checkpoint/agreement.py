"""Agreement between ranks: gathers every rank's outcome before any continues, so one failure is a failure on all."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshwright.checkpoint.contract import FileRecord, TensorRecord
from meshwright.checkpoint.folder import RefusedCheckpoint
from meshwright.checkpoint.mirror import FetchedCheckpoint
from meshwright.checkpoint.tensor_shards import TensorShard
from meshwright.errors import CheckpointError
from meshwright.parallel.byte_collectives import all_gather_bytes
from meshwright.records import RecordCodec, RecordError

T = TypeVar("T")


class RankOutcome(NamedTuple):
    """Outcome of an action on one rank: a value, or an error's text."""

    value: Any
    error: str | None


CODEC = RecordCodec((RankOutcome, TensorShard, FileRecord, TensorRecord, RefusedCheckpoint, FetchedCheckpoint))
"""Messages between processes that save and load together; as JSON, never as a pickle."""


def build_group(wait_s: float) -> ProcessGroup:
    """Creates a gloo group of all ranks whose operations time out after ``wait_s`` seconds; every rank must call it."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))


class Agreement:
    """Gathers outcomes over a gloo group, or trivially for a single process."""

    def __init__(self, group: ProcessGroup | None) -> None:
        """Wraps a group; None for a single process.

        Raises:
            CheckpointError: when it isn't gloo: planning over a device's group costs device memory, which may be full.
        """
        # Only the group's own limit can end a wait for a dead rank, so it must be gloo's.
        if group is not None and (backend := dist.get_backend(group)) != "gloo":
            raise CheckpointError(f"checkpoints agree over a gloo group, not {backend}; give build_group(wait_s)")
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.count = dist.get_world_size(group) if group is not None else 1

    def gather(self, value: T) -> list[T]:
        """Gathers every rank's value, in order of rank; values are small, and of types that `CODEC` knows.

        Raises:
            CheckpointError: when a rank doesn't answer within the group's limit.
        """
        if self.group is None:
            return [value]
        try:
            return [CODEC.loads(data) for data in all_gather_bytes(CODEC.dumps(value), self.group)]
        except (RuntimeError, RecordError) as error:
            raise CheckpointError(f"lost contact with another rank: {_text(error)}") from error

    def give_up(self) -> None:
        """Notifies waiting processes that this one won't come; ranks of a process group notice by themselves."""

    def outcomes(self, action: Callable[[], object]) -> list[RankOutcome]:
        """Runs an action on every rank and gathers the outcomes."""
        return self.gather(capture_outcome(action))

    def run_on_all(self, activity: str, action: Callable[[], T]) -> list[T]:
        """Runs an action on every rank and raises on all of them when it failed on any.

        Args:
            activity: begins the error message: ``saving the checkpoint of step 4 failed``.
            action: called once on each rank; its value is gathered.

        Returns:
            Every rank's value.

        Raises:
            CheckpointError: the same on every rank, naming those that failed.
        """
        try:
            outcomes = self.outcomes(action)
        except CheckpointError as error:
            raise CheckpointError(f"{activity}: {error}") from error
        if any(outcome.error for outcome in outcomes):
            raise CheckpointError(f"{activity}: {format_failures(outcomes)}")
        return [outcome.value for outcome in outcomes]

    def run_on_first(self, activity: str, action: Callable[[], T]) -> T:
        """Runs an action on rank 0 only and returns its value on every rank.

        Raises:
            CheckpointError: the same on every rank when it failed.
        """
        return self.run_on_all(activity, action if self.rank == 0 else lambda: None)[0]  # type: ignore[arg-type, return-value]


def format_failures(outcomes: list[RankOutcome]) -> str:
    """Formats the failures as one line; a text that all ranks share appears once, without ranks."""
    failures = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error}
    # A full disk fails all ranks with the same text: show it once, and else at most four ranks.
    texts = list(dict.fromkeys(failures.values()))
    if len(texts) == 1 and (len(failures) == len(outcomes) or len(outcomes) == 1):
        return str(texts[0])
    shown_failures = [f"rank {rank}: {text}" for rank, text in list(failures.items())[:4]]
    hidden_count = len(failures) - len(shown_failures)
    return "; ".join(shown_failures) + (f"; and {hidden_count} more ranks" if hidden_count else "")


def capture_outcome(action: Callable[[], object]) -> RankOutcome:
    """Runs an action and returns its value or its error's text; never raises."""
    try:
        return RankOutcome(action(), None)
    except Exception as error:
        return RankOutcome(None, _text(error))


def _text(error: BaseException) -> str:
    """Formats an error as one line; a `CheckpointError` already is."""
    if isinstance(error, CheckpointError):
        return str(error)
    # The system's own words, as "No space left on device", without errno and class.
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
