"""Checkpoints written beside the training: a forked process writes the snapshots that ranks left in memory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.checkpoint.agreement import Agreement
from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.snapshot import Segment, Snapshot, State, find_complete_states, read_snapshots, read_step
from meshwright.checkpoint.store import CheckpointStore
from meshwright.errors import CheckpointError, LaunchError
from meshwright.resilience.helper import Helper
from meshwright.spec.layout import Layout
from meshwright.train.faults import WRITER, Fault, Faults
from meshwright.train.supervisor_requests import SupervisorRequests

_POLL_S = 0.005


@dataclass(frozen=True, kw_only=True)
class WriterShare:
    """One node's role when the writers of several nodes make a checkpoint together."""

    node: int
    """Number of the node."""
    first: bool
    """Whether it renames the checkpoint to its final name, and reports it."""
    agree: Callable[[tuple[int, int]], Agreement]
    """Makes this node's end of the writers' agreement on the state of a (generation, step)."""
    fence: Callable[[], None]
    """Raises once another generation was claimed."""


class DiskWriter:
    """Writes one checkpoint at a time.

    Args:
        root: folder of the checkpoints.
        config: how they are written and kept.
        origin: what trains the state; the layout is each checkpoint's own.
        event: records an event for each checkpoint that was written or failed.
        faults: the injected faults.
        share: this node's share of the work, where several write together; None for all of it.
    """

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        origin: Origin,
        event: Callable[..., None],
        faults: Sequence[Fault] = (),
        share: WriterShare | None = None,
    ) -> None:
        self._share = share
        self._root, self._config, self._origin = root, config, origin
        self._event, self._faults = event, faults
        self._last_written = (-1, -1)
        self._step = 0
        self._control: SupervisorRequests | None = None
        self._helper: Helper | None = None
        self.failed: str | None = None
        """Why the last checkpoint failed; None when it didn't."""

    def poll(self, segments: Sequence[Segment], layout: Layout, control: SupervisorRequests | None) -> None:
        """Collects a finished checkpoint, and starts writing a new one once all ranks left its snapshot.

        Args:
            segments: the ranks' segments for the disk; one each.
            layout: of the ranks.
            control: reports the written step to the ranks; None when they have ended.
        """
        # A checkpoint of the previous generation isn't reported to these ranks: they count steps of their own.
        if self._collect() and control is not None and control is self._control:
            control.publish_written(self._step, self.failed is None)
        # One checkpoint at a time; a newer snapshot waits in its segment.
        if self.busy or not segments or not all(segment.size for segment in segments):
            return
        identities = {read_step(segment) for segment in segments}
        # All ranks must have left the same (generation, step): a mixture is a snapshot in progress.
        if len(identities) == 1 and (identity := identities.pop()) is not None and identity != self._last_written:
            # `read_step` sees a header's first fields. One that a rank, preempted in between, has written in part fails
            # its checksum: the next poll reads again, and the rank overwrites nothing before its checkpoint is known.
            if len(read_snapshots(segments)) < len(segments):
                return
            self._last_written, self._step, self._control = identity, identity[1], control
            self._start(segments, layout)

    def _start(self, segments: Sequence[Segment], layout: Layout) -> None:
        try:
            # Writing must not slow down the ranks on the same cores.
            self._helper = Helper(lambda: json.dumps(self._write(segments, layout)).encode(), nice=5)
        except LaunchError as error:
            self._report({"error": str(error)})
            if self._control is not None:
                self._control.publish_written(self._step, False)

    def _write(self, segments: Sequence[Segment], layout: Layout) -> dict[str, Any]:
        """Writes the checkpoint, and returns a report of it; runs in the forked process."""
        try:
            snapshots = read_snapshots(segments)
            state = State(self._step, snapshots) if self._share is not None else _complete_state(snapshots)
            origin = replace(self._origin, layout=layout)
            return self._store(state.step).save_state(state.step, state, state.meta, origin).event_fields()
        except CheckpointError as error:
            return {"error": str(error)}
        # Any failure becomes a report: the child must never return into the supervisor's code.
        except BaseException as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _store(self, step: int) -> CheckpointStore:
        share = self._share
        fault_rank = WRITER - share.node if share is not None else WRITER
        faults = Faults(self._root.parent, fault_rank, self._last_written[0], self._faults)
        faults.begin_step(step)
        store = CheckpointStore(
            self._root,
            self._config,
            share.agree(self._last_written) if share is not None else None,
            stamp=lambda phase: faults.reach(f"checkpoint.{phase}"),
            fence=share.fence if share is not None else None,
        )
        store.resumed_after(step)
        return store

    def _collect(self) -> bool:
        """Reads the child's report; returns whether a checkpoint was finished now."""
        if self._helper is None or not self._helper.has_ended:
            return False
        # Without a report it was killed.
        report = json.loads(self._helper.answer or '{"error": "its writer was killed"}')
        self._helper = None
        self._report(report)
        return True

    def _report(self, report: dict[str, Any]) -> None:
        """Records a checkpoint as written or failed; ``report`` has the event's fields, or ``error``."""
        self.failed = report.get("error")
        if self._share is not None and not self._share.first:
            if self.failed is not None:
                # The child may have died before it connected: the first node's writer would wait for it.
                self._share.agree(self._last_written).give_up()
        elif self.failed is None:
            self._event("checkpoint_saved", step=self._step, **report)
        else:
            self._event("checkpoint_failed", step=self._step, reason=self.failed)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._helper is not None

    def finish(self, limit_s: float) -> None:
        """Waits until the checkpoint under way is written.

        Raises:
            CheckpointError: when that takes longer than ``limit_s`` seconds.
        """
        deadline = time.monotonic() + limit_s
        while self.busy and not self._collect():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"the checkpoint of step {self._step} was not written within checkpoint.wait_s = {limit_s:g} s"
                )
            time.sleep(_POLL_S)

    def give_up(self) -> None:
        """Kills the process that writes a checkpoint, and reports that it wasn't written."""
        if self.busy:
            self.close()
            self._report({"error": "it was given up for a newer state, as the run ends"})

    def close(self) -> None:
        """Kills the writing process, if any; what it wrote is never renamed to a checkpoint."""
        if self._helper is not None:
            self._helper.close()
            self._helper = None


def save_newest_state(store: CheckpointStore, state: State, origin: Origin) -> dict[str, Any] | None:
    """Writes a state to disk before a run ends by an error, unless the newest checkpoint is as new.

    Returns:
        The event's fields: ``kind``, step, and path and bytes or a reason; None when nothing was to be written.
    """
    latest = store.latest()
    if latest is not None and latest.step >= state.step:
        return None
    store.resumed_after(state.step)
    try:
        saved = store.save_state(state.step, state, state.meta, origin)
    except CheckpointError as failed:
        return {"kind": "checkpoint_failed", "step": state.step, "reason": str(failed)}
    return {"kind": "checkpoint_saved", "step": state.step, **saved.event_fields()}


def _complete_state(snapshots: Sequence[Snapshot]) -> State:
    """Returns the state that the snapshots of all ranks make.

    Raises:
        CheckpointError: when they don't hold every element of every tensor exactly once.
    """
    states = find_complete_states(snapshots)
    if not states:
        ranks = ", ".join(f"rank {snapshot.rank} of step {snapshot.step}" for snapshot in snapshots)
        raise CheckpointError(f"the snapshots in memory don't make a whole state: {ranks or 'none is readable'}")
    return states[0]
