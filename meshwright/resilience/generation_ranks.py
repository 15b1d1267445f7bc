"""The ranks of one generation on one node, and the memory shared with them."""

from __future__ import annotations

import signal
from collections.abc import Callable

from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.snapshot import Segment, State
from meshwright.checkpoint.store import IMAGE
from meshwright.data.tokens import TokenSet
from meshwright.errors import LaunchError, MeshwrightError
from meshwright.launch.contract import NodeRanks
from meshwright.launch.devices import Devices
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.host_memory import count_oom_kills
from meshwright.launch.signals import InterruptCounter
from meshwright.monitor.progress import PROGRESS, node_progress, reset_progress
from meshwright.resilience.hang_watch import HangError, HangWatch
from meshwright.resilience.host_memory_budget import SNAPSHOTS_PER_RANK, SNAPSHOTS_PER_RANK_AND_PEERS
from meshwright.resilience.messages import Order
from meshwright.resilience.slow_ranks import SlowRankWatch
from meshwright.spec.axis import Mechanics
from meshwright.spec.groups import coordinates
from meshwright.spec.layout import Layout
from meshwright.train.flight import Flight
from meshwright.train.memory import PeerCopies, RecoveryMemory
from meshwright.train.session import TrainJob
from meshwright.train.shortage import OUT_OF_MEMORY
from meshwright.train.stage_times import PublishedTimes, can_replan
from meshwright.train.supervisor_requests import SupervisorRequests

_IDLE_LIMIT_GROWTH = 4.0
"""Factor on the idle limit after each failure without a new step: the last one may have been no hang."""


Fence = Callable[[], None]
"""Raises once another generation was claimed."""


class GenerationAborted(MeshwrightError):
    """The leader or another node ends this generation; its ranks didn't fail."""


class LeftRun(LaunchError):
    """This node left a run that goes on without it."""


class GenerationRanks:
    """The ranks of one generation on this node, and the memory shared with them.

    Args:
        job: what they do.
        devices: what they run on, one each.
        order: of the generation.
        interrupts: counts how often the user asked that the run end, also while the ranks start.
        node_ranks: this node's ranks within the world; None on a run of one node.
    """

    def __init__(
        self,
        job: TrainJob,
        devices: Devices,
        order: Order,
        interrupts: InterruptCounter,
        node_ranks: NodeRanks | None = None,
    ) -> None:
        self.layout = layout = job.plan.layout
        self._order, count = order, devices.count
        snapshots = SNAPSHOTS_PER_RANK_AND_PEERS if len(order.shares) > 1 else SNAPSHOTS_PER_RANK
        self.segments = tuple(tuple(Segment() for _ in range(snapshots)) for _ in range(count))
        """Each rank's segments for snapshots, written in turn."""
        writes = order.copies.disk and job.config.checkpoint.backend == IMAGE
        self.disk = tuple(Segment() for _ in range(count)) if writes else ()
        """Each rank's segment for checkpoints; empty when ranks write themselves."""
        self.control = SupervisorRequests()
        self.times = PublishedTimes(count) if job.config.train.replan and can_replan(layout, devices.kind) else None
        """Where ranks publish what they computed, for `replanner.Replanner`."""
        self.flight = Flight(count) if devices.kind == "cuda" else None
        self.launcher = ForkLauncher(
            count,
            devices=devices,
            label=layout.coordinates,
            config=job.config.launch,
            run_id=job.run_dir.name,
            generation=order.generation,
            disposable=True,
            interrupts=interrupts,
            node_ranks=node_ranks,
        )
        self._oom_kills = count_oom_kills()
        progress = job.run_dir / (PROGRESS if node_ranks is None else node_progress(node_ranks.node))
        # Stamps of the previous generation must not look like progress of this one.
        reset_progress(progress, order.world)
        self.slow = SlowRankWatch(lambda rank: coordinates(rank, layout.degrees)[layout.axis(Mechanics.STAGES)])
        recovery = job.config.recovery
        idle_s = recovery.idle_s * _IDLE_LIMIT_GROWTH**order.failures_without_progress
        # No idle limit where devices, other hosts or compiler processes may work while all ranks on this node sleep.
        if node_ranks is not None or devices.kind != "cpu" or layout.compile:
            idle_s = 0.0
        self.hang = HangWatch(
            progress,
            order.generation,
            count,
            recovery.hang_s,
            layout.describe_rank,
            node_ranks.first if node_ranks is not None else None,
            idle_s,
            self.flight.query if self.flight is not None else None,
            layout.compile,
        )

    def share_memory(
        self, state: State | None, lost_at: float | None, copied: PeerCopies | None, fence: Callable[[], None] | None
    ) -> RecoveryMemory:
        """Returns the memory to share with the ranks.

        Args:
            state: the state to restore; None to restore from disk or start anew.
            lost_at: time.monotonic() at which the failure of the previous ranks was noticed; None without one.
            copied: which snapshots peers have; None without peers.
            fence: raises once another generation was claimed; None on a run of one node.
        """
        return RecoveryMemory(
            segments=self.segments,
            disk=self.disk,
            control=self.control,
            flight=self.flight,
            times=self.times,
            every=self._order.copies.every,
            state=state,
            lost_at=lost_at,
            peak_flops=self._order.peak_flops,
            anomalous_step=self._order.rewind.anomalous_step,
            damage=self._order.rewind.damage,
            peer_copies=copied,
            fence=fence,
        )

    @property
    def raised(self) -> bool:
        """Whether the first failure was an exception in a rank, which a restart may well meet again."""
        failures = self.launcher.failures
        return bool(failures) and bool(failures[0].trace) and not failures[0].is_echo

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the first failure was for lack of memory: an allocator's error, or the kernel killed the rank."""
        failures = self.launcher.failures
        if not failures:
            return False
        was_killed = failures[0].status == -signal.SIGKILL and count_oom_kills() > self._oom_kills
        return was_killed or f"{OUT_OF_MEMORY} in" in failures[0].summary

    @property
    def furthest_step(self) -> int:
        """The furthest step of any rank."""
        return max((stamp.step for stamp in self.hang.last_stamps.values()), default=0)

    def find_blamed_rank(self, error: MeshwrightError) -> int:
        """Returns the rank that failed first; -1 when none stands out."""
        # The launcher killed the ranks after a hang: their exit statuses blame nobody.
        if isinstance(error, HangError):
            return error.rank
        return self.launcher.failures[0].rank if self.launcher.failures else -1

    def close(self) -> None:
        """Lets go of the shared memory."""
        self.control.close()
        if self.times is not None:
            self.times.close()
        if self.flight is not None:
            self.flight.close()
        for segment in self.all_segments():
            segment.close()

    def all_segments(self) -> list[Segment]:
        """Returns all segments to which the ranks write their state."""
        return [*(segment for segments in self.segments for segment in segments), *self.disk]


Watch = Callable[[GenerationRanks], None]
"""Called some times a second while ranks run; an exception of it ends them."""


def job_origin(job: TrainJob, layout: Layout | None = None) -> Origin:
    """Returns the origin that a job's checkpoints record: model, data, layout and configuration."""
    data = TokenSet.open(job.data_dir).fingerprint
    return Origin(model=job.fingerprint, data=data, layout=layout, config=job.config.to_dict())
