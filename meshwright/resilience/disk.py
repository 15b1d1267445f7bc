"""Checkpoints written beside the training: from what ranks left in memory, by a process that does nothing else."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.checkpoint.agreement import Agreement
from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.snapshot import Segment, State, peek, read_snapshots, whole_states
from meshwright.checkpoint.store import CheckpointStore
from meshwright.errors import CheckpointError
from meshwright.forking import die_with_parent
from meshwright.spec.layout import Layout
from meshwright.train.faults import WRITER, Fault, Faults
from meshwright.train.memory import Control

_POLL_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one of several nodes does when their writers make a checkpoint together."""

    node: int
    """Number of the node."""
    first: bool
    """Whether it is the one that gives the checkpoint its name, and tells of it."""
    agree: Callable[[tuple[int, int]], Agreement]
    """Makes this node's end of how the writers agree on the state of a generation and step."""
    fence: Callable[[], None]
    """Raises once others lead the run."""


class DiskWriter:
    """Writes one checkpoint at a time.

    Args:
        root: folder of the checkpoints.
        config: how they are written and kept.
        origin: what trains the state; the layout is each checkpoint's own.
        event: told of each checkpoint that stands or couldn't be written.
        faults: what is to go wrong on purpose.
        share: this node's share of the work, where several write together; None for all of it.
    """

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        origin: Origin,
        event: Callable[..., None],
        faults: Sequence[Fault] = (),
        share: Share | None = None,
    ) -> None:
        self._share = share
        self._root, self._config, self._origin = root, config, origin
        self._event, self._faults = event, faults
        self._last = (-1, -1)
        self._step = 0
        self._control: Control | None = None
        self._pid, self._pipe = 0, -1
        self._read = bytearray()
        self.failed: str | None = None
        """Why the last checkpoint couldn't be written; None while all is well."""

    def poll(self, segments: Sequence[Segment], layout: Layout, control: Control | None) -> None:
        """Starts to write what all ranks have left since the last time, and takes note of what was written.

        Args:
            segments: where the ranks leave what is to be written; one each.
            layout: of the ranks.
            control: where they are told what was written; None when they are gone.
        """
        # What was left by ranks before these says nothing of what these have left.
        if self._collect() and control is not None and control is self._control:
            control.tell_written(self._step, self.failed is None)
        if self._pid or not segments or not all(segment.size for segment in segments):
            return
        found = {peek(segment) for segment in segments}
        if len(found) == 1 and (new := found.pop()) is not None and new != self._last:
            self._last, self._step, self._control = new, new[1], control
            self._start(segments, layout)

    def _start(self, segments: Sequence[Segment], layout: Layout) -> None:
        self._pipe, send = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._work(segments, layout, send, parent)
        os.close(send)
        os.set_blocking(self._pipe, False)

    def _work(self, segments: Sequence[Segment], layout: Layout, send: int, parent: int) -> None:
        """Writes, says how it went, and ends; in the forked process."""
        told: dict[str, Any] = {}
        try:
            die_with_parent(parent)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            os.nice(5)
            held = read_snapshots(segments)
            state = State(self._step, held) if self._share is not None else whole_states(held)[0]
            origin = replace(self._origin, layout=layout)
            saved = self._store(state.step).save_state(state.step, state, state.meta, origin)
            told = saved.told()
        except CheckpointError as error:
            told = {"error": str(error)}
        except BaseException as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        finally:
            os.write(send, json.dumps(told).encode())
            os._exit(0)

    def _store(self, step: int) -> CheckpointStore:
        share = self._share
        who = WRITER - share.node if share is not None else WRITER
        faults = Faults(self._root.parent, who, self._last[0], self._faults)
        faults.begin(step)
        store = CheckpointStore(
            self._root,
            self._config,
            share.agree(self._last) if share is not None else None,
            stamp=lambda phase: faults.at(f"checkpoint.{phase}"),
            fence=share.fence if share is not None else None,
        )
        store.went_on(step)
        return store

    def _collect(self) -> bool:
        """Takes in how a checkpoint went; returns whether one was finished now."""
        while self._pid:
            try:
                chunk = os.read(self._pipe, 1 << 16)
            except BlockingIOError:
                return False
            self._read += chunk
            if chunk:
                continue
            os.close(self._pipe)
            os.waitpid(self._pid, 0)
            self._pid, self._pipe = 0, -1
            told = json.loads(self._read or '{"error": "its writer was killed"}')
            self._read.clear()
            self.failed = told.get("error")
            if self._share is not None and not self._share.first:
                if self.failed is not None:
                    # It may have died before the first one had heard of it, which would wait for it.
                    self._share.agree(self._last).give_up()
                return True
            if self.failed is None:
                self._event("checkpoint_saved", step=self._step, **told)
            else:
                self._event("checkpoint_failed", step=self._step, reason=self.failed)
            return True
        return False

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return bool(self._pid)

    def finish(self, limit_s: float) -> None:
        """Waits until the checkpoint under way is written.

        Raises:
            CheckpointError: when that takes longer than ``limit_s`` seconds.
        """
        end = time.monotonic() + limit_s
        while self._pid and not self._collect():
            if time.monotonic() > end:
                raise CheckpointError(
                    f"the checkpoint of step {self._step} was not written within checkpoint.wait_s = {limit_s:g} s"
                )
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Ends the process, if it is still at work; what it wrote is no checkpoint then."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.close(self._pipe)
            os.waitpid(self._pid, 0)
            self._pid = 0
