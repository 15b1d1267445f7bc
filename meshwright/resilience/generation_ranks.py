"""The ranks of one generation on one node, what is shared with them, and what is decided when they fail."""

from __future__ import annotations

import math
from typing import Any

from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.snapshot import Segment, State
from meshwright.checkpoint.store import IMAGE, CheckpointStore
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
from meshwright.spec.plan import Plan
from meshwright.train.copies import SHARE
from meshwright.train.flight import Flight
from meshwright.train.integrity import Damage
from meshwright.train.memory import RESTORING, Control, Memory
from meshwright.train.session import TrainJob

_COPY_BYTES_S = 2e9
"""Bytes a second of a snapshot, copy and checksum, as the slowest machines give them."""
_COMPARE_BYTES_S = 8e9
"""Bytes a second of a checksum's sums: memory's own speed, of one core."""
_STALL_SHARE = 0.01
_MOST_STEPS = 100
_LONGER = 4.0
"""Limits of sleep are so many times longer after a failure that no step came between: it may not have been a hang."""
HOPELESS = (ConfigError, PlanError, DataError, ClusterError)
"""What another start can't mend."""


def steps_between(plan: Plan, wanted: int | None, send_s: float = 0.0) -> int:
    """Returns the steps between snapshots: as wanted, or so that they cost about 1 % of the planned time of a step.

    Args:
        plan: of the run.
        wanted: as the user says; None for these.
        send_s: seconds that a snapshot takes on its way to another node, so that it arrives before the next.
    """
    if wanted is not None:
        return wanted
    step_s = plan.prediction.step_s
    if not step_s:
        return 10
    seconds = state_bytes(plan, 1) / _COPY_BYTES_S
    # What several ranks hold is compared before each snapshot, which must not cost more than its own share.
    compared = sum(plan.prediction.memory.get(part, 0) for part in ("parameters", "optimizer")) / _COMPARE_BYTES_S
    steps = max(seconds / _STALL_SHARE, compared / SHARE if plan.ranks > 1 else 0.0) / step_s
    return max(1, min(_MOST_STEPS, round(steps + 0.5)), math.ceil(send_s / step_s))


class GenerationRanks:
    """The ranks of one generation, and what is shared with them.

    Args:
        job: what they do.
        devices: what they run on, one each.
        generation: of them.
        interrupts: how often the user asked already that the run end.
        place: where they stand, when there are others on other nodes.
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
        count = devices.count
        self.room = room_for(job.plan, count)
        """What of the state fits into this node's memory beside the ranks."""
        alone = steps_between(job.plan, job.config.recovery.snapshot_every) if self.room.snapshots else 0
        self._every = alone if every is None else every
        self.segments = tuple(tuple(Segment() for _ in range(copies)) for _ in range(count))
        writes = (self.room.disk if disk is None else disk) and job.config.checkpoint.backend == IMAGE
        self.disk = tuple(Segment() for _ in range(count)) if writes else ()
        self.control = Control()
        self.flight = Flight(count) if devices.kind == "cuda" else None
        self.launcher = ForkLauncher(
            count,
            devices=devices,
            label=layout.place,
            config=job.config.launch,
            run_id=job.run_dir.name,
            generation=generation,
            disposable=True,
            interrupts=interrupts,
            place=place,
        )
        progress = job.run_dir / (PROGRESS if place is None else node_progress(place.node))
        reset_progress(progress, job.plan.ranks)
        first = place.first if place is not None else None
        self.slow = SlowWatch(lambda rank: coordinates(rank, layout.degrees)[layout.axis(Mechanics.STAGES)])
        limit_s, idle_s = job.config.recovery.hang_s, job.config.recovery.idle_s * _LONGER**fruitless
        # Devices, other hosts and compilers' processes work while all ranks here sleep.
        if place is not None or devices.kind != "cpu" or layout.compile:
            idle_s = 0.0
        ask = self.flight.ask if self.flight is not None else None
        names = layout.describe_rank
        self.hang = HangWatch(progress, generation, count, limit_s, names, first, idle_s, ask, layout.compile)

    def memory(
        self,
        state: State | None,
        lost_at: float | None,
        peak_flops: float | None,
        sick_step: int,
        damage: Damage | None = None,
    ) -> Memory:
        """Returns what the ranks are handed."""
        return Memory(
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
        """Whether the first failure was an exception of a rank's own, which another start may well meet again."""
        failures = self.launcher.failures
        return bool(failures) and bool(failures[0].trace) and not failures[0].is_echo

    def blamed(self, error: MeshwrightError) -> int:
        """Returns the rank that failed first; -1 when none stands out."""
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
        """Returns everything that the ranks leave their state in."""
        return [*(one for pair in self.segments for one in pair), *self.disk]


class Patience:
    """Decides whether a run goes on after a failure.

    Args:
        attempts: failures in a row without a new step after which it doesn't.
    """

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._reached = -1
        self._fruitless = 0

    @property
    def fruitless(self) -> int:
        """Failures in a row after the first without a new step between them."""
        return max(0, self._fruitless - 1)

    def ends(self, error: MeshwrightError, reached: int, raised: int | None) -> bool:
        """Takes note of a failure, and returns whether another start is hopeless.

        Args:
            error: of the failure.
            reached: the furthest step of any rank.
            raised: step of the rank that failed first, where that was by an exception of its own; else None.
        """
        self._fruitless = 1 if reached > self._reached else self._fruitless + 1
        again = raised is not None and raised <= max(1, self._reached)
        self._reached = max(self._reached, reached)
        if isinstance(error, CheckpointError) and RESTORING in str(error):
            return self._fruitless > self._attempts
        return not isinstance(error, LaunchError) or again or self._fruitless > self._attempts


def keep_on_disk(store: CheckpointStore, state: State, origin: Origin) -> dict[str, Any] | None:
    """Writes a state to disk before a run ends by an error, where it is newer than what is there.

    Returns:
        What the event says: ``kind``, step, and path and bytes or a reason; None when there is nothing to write.
    """
    latest = store.latest()
    if latest is not None and latest.step >= state.step:
        return None
    store.went_on(state.step)
    try:
        saved = store.save_state(state.step, state, state.meta, origin)
    except CheckpointError as failed:
        return {"kind": "checkpoint_failed", "step": state.step, "reason": str(failed)}
    return {"kind": "checkpoint_saved", "step": state.step, **saved.told()}
