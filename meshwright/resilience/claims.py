"""Leader election of a run over several nodes, by one file for each generation in the shared run directory.

The process that creates the newest generation's file leads. The file is created by linking a finished one to its name,
which succeeds for one process alone, also on a network file system. It is the fence too: a rank of an older generation
that finds the next one's file writes nothing any more. The leader renews its file as a lease, so that nodes without a
connection to it know whether it still leads.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import CheckpointError, LaunchError
from meshwright.records import RecordCodec, RecordError
from meshwright.train.outcome import TrainOutcome

FOLDER = "generations"
LEASE_S = 4.0
"""A leader that hasn't renewed its file for so long counts as dead."""
RENEW_S = 1.0
_PRESENCE = "node-"
PRESENCE_S = 4.0
"""A live node renews its presence file within this time."""
FRESH_S = 2.0
"""A leader that has renewed its file within this time counts as alive."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The contents of a generation's file."""

    generation: int
    """Counted from 0."""
    node: int
    """Number of the leader's node."""
    session: str
    """Identifies the leader's process."""
    host: str
    """Host on which the leader listens."""
    port: int
    """Port on which the leader listens."""


_CODEC = RecordCodec((Claim,))


class Claims:
    """The files of a run's generations."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        # Files of earlier commands in this run directory remain: generations are counted on from them.
        self._newest = max((int(path.name) for path in self._folder.iterdir() if path.name.isdigit()), default=-1)
        self._newest_claim: Claim | None = None
        self._last_stamp: tuple[int, int] = (-1, 0)
        self._changed_at = time.monotonic()
        self._renewed_at = self._checked_at = self._present_at = 0.0

    def newest(self) -> Claim | None:
        """Returns the claim of the newest generation; None before the first."""
        # Generations are consecutive, so one lookup per call suffices in the common case.
        while self._claim_path(self._newest + 1).exists():
            self._newest += 1
        if self._newest >= 0 and (self._newest_claim is None or self._newest_claim.generation != self._newest):
            path = self._claim_path(self._newest)
            try:
                self._newest_claim = _CODEC.loads_as(Claim, path.read_bytes())
            except RecordError as error:
                raise LaunchError(f"{path} is damaged ({error}); remove it while no node runs") from None
        return self._newest_claim

    def try_claim(self, claim: Claim) -> bool:
        """Creates a generation's file; returns False when another process was faster."""
        # Written and synced under another name, then linked: a claim is visible only when it is complete.
        temporary = self._folder / f".{uuid.uuid4().hex}"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(_CODEC.dumps(claim).decode())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, self._claim_path(claim.generation))
        # link, unlike rename, fails if the name exists: it is the atomic test-and-set.
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def renew(self, generation: int) -> None:
        """Renews the leader's lease, at most every `RENEW_S`."""
        now_s = time.monotonic()
        if now_s - self._renewed_at >= RENEW_S:
            self._renewed_at = now_s
            with contextlib.suppress(OSError):
                os.utime(self._claim_path(generation))

    def age_s(self) -> float:
        """Returns the seconds since the newest generation's leader was seen to renew its file.

        Infinite when there is no leader, it gave way, or the run has ended. The age is counted by this machine's clock
        from the last observed change, so that clocks of other machines don't matter.
        """
        now_s = time.monotonic()
        if self._newest < 0 or any(
            self._claim_path(self._newest, suffix).exists() for suffix in (".ended", ".yielded")
        ):
            return math.inf
        if self._last_stamp[0] != self._newest or now_s - self._checked_at >= RENEW_S / 2:
            self._checked_at = now_s
            # Opened instead of stat'ed: an open makes NFS revalidate its cached attributes with the server.
            with self._claim_path(self._newest).open("rb") as file:
                stamp = (self._newest, os.fstat(file.fileno()).st_mtime_ns)
            # Any change counts, forward or backward: the stamp is the file server's clock.
            if stamp != self._last_stamp:
                self._last_stamp, self._changed_at = stamp, now_s
        return now_s - self._changed_at

    def renew_presence(self, node: int) -> None:
        """Renews a node's presence file, at most every `RENEW_S`; needs no connection to any node."""
        now_s = time.monotonic()
        if now_s - self._present_at >= RENEW_S:
            self._present_at = now_s
            with contextlib.suppress(OSError):
                (self._folder / f"{_PRESENCE}{node}").touch()

    def read_presence(self, nodes: Iterable[int]) -> dict[int, int]:
        """Returns the change times of the nodes' presence files in ns, by the file system's clock."""
        return read_presence(self._folder.parent, nodes)

    def yield_lead(self, generation: int) -> None:
        """Marks a generation's leader as yielded, so that nodes which it can't reach may claim the next one."""
        with contextlib.suppress(OSError):
            self._claim_path(generation, ".yielded").touch()

    def record_outcome(self, generation: int, outcome: TrainOutcome | None) -> None:
        """Records the run's outcome, None for an error, so that no node waits for the leader."""
        with contextlib.suppress(OSError):
            temporary = self._folder / f".{uuid.uuid4().hex}"
            temporary.write_text(json.dumps(outcome.to_json() if outcome is not None else None), encoding="utf-8")
            # Renamed into place: a reader sees no outcome or the whole one.
            temporary.replace(self._claim_path(generation, ".ended"))

    def read_outcome(self, after: int) -> TrainOutcome | None:
        """Returns the run's outcome as the newest generation's leader recorded it; None when it recorded none.

        Args:
            after: the newest generation when this process began.

        Raises:
            LaunchError: when it ended by an error.
        """
        path = self._claim_path(self._newest, ".ended")
        # An outcome of a generation before this command's start belongs to an earlier command.
        if self._newest <= after or not path.exists():
            return None
        try:
            values = _CODEC.loads_as(dict | None, path.read_bytes())  # type: ignore[arg-type]
            outcome = TrainOutcome.from_json(values) if values is not None else None
        except (RecordError, KeyError, TypeError, ValueError) as error:
            raise LaunchError(f"{path} doesn't say how the run ended ({error}); events.jsonl does") from None
        if outcome is None:
            raise LaunchError("the run was ended by an error on the node that led")
        return outcome

    def superseded(self, generation: int) -> bool:
        """Whether a newer generation than this one was claimed."""
        return self._claim_path(generation + 1).exists()

    def make_fence(self, generation: int) -> Callable[[], None]:
        """Returns a check that raises `CheckpointError` once a newer generation was claimed."""
        # The check runs before every write of a rank: one lookup, no parsing.
        path = str(self._claim_path(generation + 1))

        def check() -> None:
            if os.path.exists(path):
                raise CheckpointError(f"generation {generation} of the run was given up: {path} stands")

        return check

    def _claim_path(self, generation: int, suffix: str = "") -> Path:
        return self._folder / f"{generation:06d}{suffix}"


def read_presence(run_dir: Path, nodes: Iterable[int]) -> dict[int, int]:
    """Returns the change times of the nodes' presence files in ns, by the file system's clock; makes no folder."""
    stamps = {}
    for node in nodes:
        with contextlib.suppress(OSError), (run_dir / FOLDER / f"{_PRESENCE}{node}").open("rb") as file:
            stamps[node] = os.fstat(file.fileno()).st_mtime_ns
    return stamps


def newest_ended_generation(run_dir: Path) -> int:
    """Returns the newest generation of which the run's end is recorded; -1 without any."""
    numbers = (path.name.removesuffix(".ended") for path in (run_dir / FOLDER).glob("*.ended"))
    return max((int(number) for number in numbers if number.isdigit()), default=-1)
