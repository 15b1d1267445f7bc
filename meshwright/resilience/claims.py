"""Who leads a run over several nodes: whoever created the file of the newest generation, in the shared run directory.

A generation's file is made by linking a finished one to its name, which succeeds for one process alone, also on a
network file system. It is the fence too: a rank of an older generation that finds the next one's file writes nothing
any more. The leader renews its file, so that nodes that have lost contact with it can tell whether it still leads.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError, LaunchError
from meshwright.records import RecordCodec, RecordError

FOLDER = "generations"
LEASE_S = 4.0
"""A leader that hasn't renewed its file for so long is taken for dead."""
RENEW_S = 1.0
PRESENCE_S = 4.0
"""A node that is alive renews its own file within so long."""
FRESH_S = 2.0
"""One that has renewed it within so long is taken for alive."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a generation's file says."""

    generation: int
    """Counted from 0."""
    node: int
    """Number of the leader's node."""
    session: str
    """Of the leader's process."""
    host: str
    """Where the leader listens."""
    port: int
    """Its port."""


_CODEC = RecordCodec((Claim,))


class Claims:
    """The files of a run's generations."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self._newest = max((int(path.name) for path in self._folder.iterdir() if path.name.isdigit()), default=-1)
        self._read: Claim | None = None
        self._seen: tuple[int, int] = (-1, 0)
        self._seen_at = time.monotonic()
        self._renewed = self._looked = self._present = 0.0

    def newest(self) -> Claim | None:
        """Returns the claim of the newest generation; None before the first."""
        while self._path(self._newest + 1).exists():
            self._newest += 1
        if self._newest >= 0 and (self._read is None or self._read.generation != self._newest):
            path = self._path(self._newest)
            try:
                self._read = _CODEC.loads_as(Claim, path.read_bytes())
            except RecordError as error:
                raise LaunchError(f"{path} is damaged ({error}); remove it while no node runs") from None
        return self._read

    def take(self, claim: Claim) -> bool:
        """Creates a generation's file; returns whether it was this process that did."""
        beside = self._folder / f".{uuid.uuid4().hex}"
        with beside.open("w", encoding="utf-8") as file:
            file.write(_CODEC.dumps(claim).decode())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(beside, self._path(claim.generation))
        except FileExistsError:
            return False
        finally:
            beside.unlink()
        return True

    def renew(self, generation: int) -> None:
        """Tells that the leader lives; does nothing when that was told a moment ago."""
        now = time.monotonic()
        if now - self._renewed >= RENEW_S:
            self._renewed = now
            with contextlib.suppress(OSError):
                os.utime(self._path(generation))

    def age_s(self) -> float:
        """Returns the seconds for which the newest generation's leader was not seen to renew its file.

        Infinite when there is no leader, it gave way, or the run has ended. Counted from the first look: clocks of
        other machines don't matter.
        """
        now = time.monotonic()
        if self._newest < 0 or any(self._path(self._newest, end).exists() for end in (".ended", ".yielded")):
            return math.inf
        if self._seen[0] != self._newest or now - self._looked >= RENEW_S / 2:
            self._looked = now
            # Opened, not looked up: a network file system then asks its server.
            with self._path(self._newest).open("rb") as file:
                seen = (self._newest, os.fstat(file.fileno()).st_mtime_ns)
            if seen != self._seen:
                self._seen, self._seen_at = seen, now
        return now - self._seen_at

    def be_present(self, node: int) -> None:
        """Tells that a node's supervisor lives, whomever it can reach; does nothing when that was told a moment ago."""
        now = time.monotonic()
        if now - self._present >= RENEW_S:
            self._present = now
            with contextlib.suppress(OSError):
                self._node(node).touch()

    def stamps(self, nodes: Iterable[int]) -> dict[int, int]:
        """Returns when nodes last told that they live, by the file system's clock; without those that never did."""
        found = {}
        for node in nodes:
            with contextlib.suppress(OSError), self._node(node).open("rb") as file:
                found[node] = os.fstat(file.fileno()).st_mtime_ns
        return found

    def give_way(self, generation: int) -> None:
        """Tells that a generation's leader doesn't lead any more, so that nodes which it can't reach may."""
        with contextlib.suppress(OSError):
            self._path(generation, ".yielded").touch()

    def end(self, generation: int, result: Mapping[str, Any] | None) -> None:
        """Tells that the run has ended, so that nobody waits for its leader, and how; None for an error."""
        with contextlib.suppress(OSError):
            beside = self._folder / f".{uuid.uuid4().hex}"
            beside.write_text(json.dumps(result), encoding="utf-8")
            beside.replace(self._path(generation, ".ended"))

    def ending(self, after: int) -> dict[str, Any] | None:
        """Returns how the newest generation's leader ended the run; None when it hasn't, or that was long ago.

        Args:
            after: the newest generation when this process began.

        Raises:
            LaunchError: when it ended by an error.
        """
        path = self._path(self._newest, ".ended")
        if self._newest <= after or not path.exists():
            return None
        try:
            result = _CODEC.loads_as(dict | None, path.read_bytes())  # type: ignore[arg-type]
        except RecordError as error:
            raise LaunchError(f"{path} doesn't say how the run ended ({error}); events.jsonl does") from None
        if result is None:
            raise LaunchError("the run was ended by an error on the node that led")
        return dict(result)

    def over(self, generation: int) -> bool:
        """Whether a newer generation than this one was claimed."""
        return self._path(generation + 1).exists()

    def fence(self, generation: int) -> Callable[[], None]:
        """Returns what raises `CheckpointError` once a newer generation was claimed."""
        path = str(self._path(generation + 1))

        def check() -> None:
            if os.path.exists(path):
                raise CheckpointError(f"generation {generation} of the run was given up: {path} stands")

        return check

    def _node(self, node: int) -> Path:
        return self._folder / f"node-{node}"

    def _path(self, generation: int, more: str = "") -> Path:
        return self._folder / f"{generation:06d}{more}"
