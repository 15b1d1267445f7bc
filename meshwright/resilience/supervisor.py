"""The supervisor: the process of the command itself, which lives as long as the run and holds the ranks' snapshots.

It never uses a device, a thread or a process group, so ranks can be forked from it, warm, and are disposable. A run of
one node has one supervisor, a run of several nodes one on each (`agent`); the same controller leads both.
"""

from __future__ import annotations

from collections import deque
from types import FrameType
from typing import Any

from meshwright.events import Event
from meshwright.launch.devices import Devices
from meshwright.launch.host_memory import SUPERVISOR_SCORE, prefer_for_killing
from meshwright.launch.signals import handle_interrupts
from meshwright.monitor.display import show_event
from meshwright.monitor.sinks import SUPERVISOR, JsonlSink
from meshwright.resilience.controller import Controller
from meshwright.resilience.descriptors import count_descriptors, raise_descriptor_limit
from meshwright.resilience.local_node import LocalNode
from meshwright.resilience.local_storage import LocalStorage
from meshwright.resilience.membership import Membership
from meshwright.resilience.planning import Planning
from meshwright.train.outcome import TrainOutcome
from meshwright.train.session import TrainJob

_MOST_UNSHOWN = 64
"""Newest events recorded beside ranks that are kept: their display shows each within a step."""


class Supervisor:
    """Runs a job on this node to its end, and restarts its ranks after failures.

    Args:
        job: of the run; its directory exists.
        devices: of this node's ranks.
        planning: gives plans and jobs for other numbers of ranks.
        nodes: number of nodes of the run.

    Raises:
        ConfigError: when this process may not open as many files as the ranks after a failure need.
    """

    def __init__(self, job: TrainJob, devices: Devices, planning: Planning, nodes: int = 1) -> None:
        # Checked before any rank or socket: the limit must also suffice for the ranks after a failure.
        peers = min(job.config.recovery.copies, nodes - 1)
        raise_descriptor_limit(count_descriptors(job.plan.layout, devices.count, nodes, peers, devices.kind == "cuda"))
        self._job, self._devices, self._planning = job, devices, planning
        self._sink = JsonlSink(job.run_dir, metrics=False)
        self._recorded: deque[Event] = deque(maxlen=_MOST_UNSHOWN)
        """Events recorded while ranks run, until these have ended."""
        self._local = self._make_node()

    def _make_node(self) -> LocalNode:
        storage = LocalStorage(self._job, self.event)
        return LocalNode(self._job, self._devices, self._planning.make_job, self.event, storage)

    def run(self) -> TrainOutcome:
        """Runs the job; returns its outcome.

        Raises:
            MeshwrightError: when the run can't go on; its newest state has been written to disk then.
            KeyboardInterrupt: at the second Ctrl-C.
        """
        # Out of memory the kernel should kill a rank, which is replaceable, not the holder of the state.
        prefer_for_killing(SUPERVISOR_SCORE)
        try:
            with handle_interrupts(self._count_interrupt):
                return self._lead_run()
        finally:
            self._close()

    def _lead_run(self) -> TrainOutcome:
        controller = Controller(Membership(self._local), self._planning, self.event)
        return controller.run({self._local.node}, 0.0)

    def _close(self) -> None:
        self._local.storage.close()
        self._show_recorded()
        self._sink.close()

    def event(self, kind: str, **data: Any) -> None:
        """Records an event, and shows it while no ranks run, whose display would do so."""
        event = Event(kind=kind, rank=SUPERVISOR, data=data)
        self._sink.event(event)
        if self._local.ranks_run:
            self._recorded.append(event)
        else:
            self._show_recorded()
            show_event(event, self._job.config.monitor.display)

    def _show_recorded(self) -> None:
        """Shows the events that the display of the ranks, which have ended, hasn't shown."""
        while self._recorded:
            event = self._recorded.popleft()
            if event.time > self._local.shown_until:
                show_event(event, self._job.config.monitor.display)

    @property
    def terminated(self) -> bool:
        """Whether SIGTERM asked for the run's end here."""
        return self._local.interrupts.terminated

    def _count_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._local.interrupts.record(number)
        # The first interrupt lets ranks save a checkpoint; the second gives up at once.
        if self._local.interrupts.count > 1:
            raise KeyboardInterrupt
