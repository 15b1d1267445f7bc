"""The ranks of one generation on one node, the memory shared with them, and the decision after a failure."""

from __future__ import annotations

import math
from typing import Any

from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.snapshot import Segment, State
from meshwright.checkpoint.store import IMAGE, CheckpointStore
from meshwright.data.tokens import TokenSet
from meshwright.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    LaunchError,
    MeshwrightError,
    PlanError,
)
from meshwright.launch.contract import NodeRanks
from meshwright.launch.devices import Devices
from meshwright.launch.fork import ForkLauncher
from meshwright.monitor.progress import PROGRESS, node_progress, reset_progress
from meshwright.resilience.hang_watch import HangError, HangWatch
from meshwright.resilience.host_memory_budget import COPIES, room_for, state_bytes
from meshwright.resilience.slow_ranks import SlowWatch
from meshwright.spec.axis import Mechanics
from meshwright.spec.groups import coordinates
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.copies import SHARE
from meshwright.train.flight import Flight
from meshwright.train.integrity import Damage
from meshwright.train.memory import RESTORING, RecoveryMemory, SupervisorRequests
from meshwright.train.session import TrainJob

_COPY_BYTES_S = 2e9
"""Bytes a second of a snapshot, copy and checksum, as the slowest machines give them."""
_COMPARE_BYTES_S = 8e9
"""Bytes a second of a checksum's sums: memory's own speed, of one core."""
_STALL_SHARE = 0.01
_MOST_STEPS = 100
_IDLE_LIMIT_GROWTH = 4.0
"""Factor on the idle limit after each failure without a new step: the last one may have been no hang."""
HOPELESS = (ConfigError, PlanError, DataError, ClusterError)
"""Errors that a restart can't repair."""


def steps_between(plan: Plan, wanted: int | None, send_s: float = 0.0) -> int:
    """Returns the steps between snapshots: as configured, or so that they cost about 1 % of the planned step time.

    Args:
        plan: of the run.
        wanted: the user's setting; None chooses by cost.
        send_s: seconds to send a snapshot to another node; it should arrive before the next one.
    """
    if wanted is not None:
        return wanted
    step_s = plan.prediction.step_s
    if not step_s:
        return 10
    # A snapshot blocks the step for its copy: amortise that over steps to `_STALL_SHARE`.
    snapshot_s = state_bytes(plan, 1) / _COPY_BYTES_S
    # State that several ranks hold is compared before each snapshot, at a share of its own (`train.copies.SHARE`).
    compare_s = sum(plan.prediction.memory.get(kind, 0) for kind in ("parameters", "optimizer")) / _COMPARE_BYTES_S
    steps = max(snapshot_s / _STALL_SHARE, compare_s / SHARE if plan.ranks > 1 else 0.0) / step_s
    # The send time is no cost, but a snapshot should arrive before the next one is due.
    return max(1, min(_MOST_STEPS, round(steps + 0.5)), math.ceil(send_s / step_s))


class GenerationRanks:
    """The ranks of one generation on this node, and the memory shared with them.

    Args:
        job: what they do.
        devices: what they run on, one each.
        generation: of them.
        interrupts: how often the user asked already that the run end.
        place: this node's ranks within the world, when other nodes have ranks too.
        copies: snapshots of each that are held.
        every: steps between them, where that was decided for all nodes; 0 for none.
        disk: whether checkpoints are written beside the training, where that was decided for all nodes.
        fruitless: failures in a row before without a new step between.
    """

    def __init__(
        self,
        job: TrainJob,
        devices: Devices,
        generation: int,
        interrupts: int,
        place: NodeRanks | None = None,
        copies: int = COPIES,
        every: int | None = None,
        disk: bool | None = None,
        fruitless: int = 0,
    ) -> None:
        self.layout = layout = job.plan.layout
        rank_count = devices.count
        self.room = room_for(job.plan, rank_count)
        """Which copies of the state fit into this node's memory beside the ranks."""
        alone = steps_between(job.plan, job.config.recovery.snapshot_every) if self.room.snapshots else 0
        self._every = alone if every is None else every
        self.segments = tuple(tuple(Segment() for _ in range(copies)) for _ in range(rank_count))
        writes = (self.room.disk if disk is None else disk) and job.config.checkpoint.backend == IMAGE
        self.disk = tuple(Segment() for _ in range(rank_count)) if writes else ()
        self.control = SupervisorRequests()
        self.flight = Flight(rank_count) if devices.kind == "cuda" else None
        self.launcher = ForkLauncher(
            rank_count,
            devices=devices,
            label=layout.coordinates,
            config=job.config.launch,
            run_id=job.run_dir.name,
            generation=generation,
            disposable=True,
            interrupts=interrupts,
            place=place,
        )
        progress = job.run_dir / (PROGRESS if place is None else node_progress(place.node))
        # Stamps of the previous generation must not look like progress of this one.
        reset_progress(progress, job.plan.ranks)
        first_rank = place.first if place is not None else None
        self.slow = SlowWatch(lambda rank: coordinates(rank, layout.degrees)[layout.axis(Mechanics.STAGES)])
        limit_s, idle_s = job.config.recovery.hang_s, job.config.recovery.idle_s * _IDLE_LIMIT_GROWTH**fruitless
        # No idle limit where devices, other hosts or compiler processes may work while all ranks on this node sleep.
        if place is not None or devices.kind != "cpu" or layout.compile:
            idle_s = 0.0
        query_device = self.flight.query if self.flight is not None else None
        describe = layout.describe_rank
        self.hang = HangWatch(
            progress, generation, rank_count, limit_s, describe, first_rank, idle_s, query_device, layout.compile
        )

    def memory(
        self,
        state: State | None,
        lost_at: float | None,
        peak_flops: float | None,
        sick_step: int,
        damage: Damage | None = None,
    ) -> RecoveryMemory:
        """Returns the memory to share with the ranks."""
        return RecoveryMemory(
            segments=self.segments,
            disk=self.disk,
            control=self.control,
            flight=self.flight,
            every=self._every,
            state=state,
            lost_at=lost_at,
            peak_flops=peak_flops,
            sick_step=sick_step,
            damage=damage,
        )

    @property
    def raised(self) -> bool:
        """Whether the first failure was an exception in a rank, which a restart may well meet again."""
        failures = self.launcher.failures
        return bool(failures) and bool(failures[0].trace) and not failures[0].is_echo

    def blamed(self, error: MeshwrightError) -> int:
        """Returns the rank that failed first; -1 when none stands out."""
        # The launcher killed the ranks after a hang: their exit statuses blame nobody.
        if isinstance(error, HangError):
            return error.rank
        return self.launcher.failures[0].rank if self.launcher.failures else -1

    def close(self) -> None:
        """Lets go of the shared memory."""
        self.control.close()
        if self.flight is not None:
            self.flight.close()
        for segment in self.all_segments():
            segment.close()

    def all_segments(self) -> list[Segment]:
        """Returns all segments to which the ranks write their state."""
        return [*(segment for segments in self.segments for segment in segments), *self.disk]


class Patience:
    """Decides whether a run goes on after a failure.

    Args:
        attempts: failures in a row without a new step after which it doesn't.
    """

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._furthest_step = -1
        self._fruitless = 0

    @property
    def fruitless(self) -> int:
        """Failures in a row after the first without a new step between them."""
        return max(0, self._fruitless - 1)

    def ends(self, error: MeshwrightError, reached: int, raised: int | None) -> bool:
        """Records a failure, and returns whether to give the run up.

        Args:
            error: of the failure.
            reached: the furthest step of any rank.
            raised: step of the rank that failed first, if by an exception in it; else None.
        """
        # An exception at a step that the run had not got past before is reproducible: a restart would repeat it.
        # Any new step is progress: only failures without one exhaust the attempts.
        self._fruitless = 1 if reached > self._furthest_step else self._fruitless + 1
        repeated = raised is not None and raised <= max(1, self._furthest_step)
        self._furthest_step = max(self._furthest_step, reached)
        # A state that can't be restored is refused and an older one tried: no reproducible error.
        if isinstance(error, CheckpointError) and RESTORING in str(error):
            return self._fruitless > self._attempts
        return not isinstance(error, LaunchError) or repeated or self._fruitless > self._attempts


def job_origin(job: TrainJob, layout: Layout | None = None) -> Origin:
    """Returns the origin that a job's checkpoints record: model, data, layout and configuration."""
    data = TokenSet.open(job.data_dir).fingerprint
    return Origin(model=job.fingerprint, data=data, layout=layout, config=job.config.to_dict())


def keep_on_disk(store: CheckpointStore, state: State, origin: Origin) -> dict[str, Any] | None:
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
