"""How ranks agree: each one's outcome is gathered before any goes on, so a failure on one is a failure on all."""

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
    """What one rank came to: a value, or an error's text."""

    value: Any
    error: str | None


CODEC = RecordCodec((RankOutcome, TensorShard, FileRecord, TensorRecord, RefusedCheckpoint, FetchedCheckpoint))
"""What processes tell each other when they save and load together; as JSON, never as a pickle."""


def build_group(wait_s: float) -> ProcessGroup:
    """Creates a gloo group of all ranks whose operations give up after ``wait_s`` seconds; every rank must call it."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))


class Agreement:
    """Gathers outcomes over a gloo group; a process alone agrees with itself."""

    def __init__(self, group: ProcessGroup | None) -> None:
        """Takes the group.

        Raises:
            CheckpointError: when it isn't gloo: planning over a device's group costs device memory, which may be full.
        """
        if group is not None and (backend := dist.get_backend(group)) != "gloo":
            raise CheckpointError(f"checkpoints agree over a gloo group, not {backend}; give build_group(wait_s)")
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.count = dist.get_world_size(group) if group is not None else 1

    def gather(self, value: T) -> list[T]:
        """Returns every rank's value, in order of rank; values are small, and of what `CODEC` knows.

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
        """Tells those that wait for this process that it won't come; those of a group find out by themselves."""

    def outcomes(self, work: Callable[[], Any]) -> list[RankOutcome]:
        """Runs ``work`` on every rank and returns what each came to."""
        return self.gather(attempt(work))

    def everywhere(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Runs ``work`` on every rank.

        Args:
            what: what is being done, for the message.
            work: called once; what it returns is gathered.

        Returns:
            Every rank's value.

        Raises:
            CheckpointError: the same on every rank, naming those that failed.
        """
        try:
            outcomes = self.outcomes(work)
        except CheckpointError as error:
            raise CheckpointError(f"{what}: {error}") from error
        if any(outcome.error for outcome in outcomes):
            raise CheckpointError(f"{what}: {blame(outcomes)}")
        return [outcome.value for outcome in outcomes]

    def once(self, what: str, work: Callable[[], T]) -> T:
        """Runs ``work`` on rank 0 only and returns its value on every rank.

        Raises:
            CheckpointError: the same on every rank when it failed.
        """
        return self.everywhere(what, work if self.rank == 0 else lambda: None)[0]  # type: ignore[arg-type, return-value]


def blame(outcomes: list[RankOutcome]) -> str:
    """Returns the failures as one line: a text that all ranks share stands once, without ranks."""
    failed = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error}
    texts = list(dict.fromkeys(failed.values()))
    if len(texts) == 1 and (len(failed) == len(outcomes) or len(outcomes) == 1):
        return str(texts[0])
    shown = [f"rank {rank}: {text}" for rank, text in list(failed.items())[:4]]
    more = len(failed) - len(shown)
    return "; ".join(shown) + (f"; and {more} more ranks" if more else "")


def attempt(work: Callable[[], Any]) -> RankOutcome:
    """Runs ``work`` and returns what it came to; never raises."""
    try:
        return RankOutcome(work(), None)
    except Exception as error:
        return RankOutcome(None, _text(error))


def _text(error: BaseException) -> str:
    """Returns an error as one line; a `CheckpointError` is already one."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
