"""The supervisor of a single node's ranks: the process that lives as long as the run, and holds the ranks' snapshots.

It never uses a device, a thread or a process group, so ranks can be forked from it, warm, and are disposable. When one
dies or hangs, all ranks of its **generation** are killed before the next generation starts, so that no stale rank can
write. The next one restores the newest state that is complete over all ranks, under a layout for the devices present.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from meshwright.checkpoint.snapshot import Segment, State, find_complete_states, read_snapshots
from meshwright.checkpoint.store import CheckpointStore
from meshwright.errors import CheckpointError, ClusterError, LaunchError, MeshwrightError, PlanError, RankError
from meshwright.events import Event
from meshwright.launch.devices import Devices
from meshwright.launch.host_memory import SUPERVISOR_SCORE, prefer_for_killing
from meshwright.launch.signals import interrupts_to
from meshwright.monitor.display import show_event
from meshwright.monitor.sinks import SUPERVISOR, JsonlSink
from meshwright.resilience.descriptors import ensure, needed
from meshwright.resilience.devices import Roster
from meshwright.resilience.disk import DiskWriter
from meshwright.resilience.generation_ranks import HOPELESS, GenerationRanks, Patience, job_origin, keep_on_disk
from meshwright.resilience.keeper import Keeper
from meshwright.resilience.plan_prefetch import PlanPrefetcher
from meshwright.resilience.rewinds import Rewinds
from meshwright.spec.plan import Plan
from meshwright.train.faults import parse_faults
from meshwright.train.integrity import Damage
from meshwright.train.memory import RESTORING
from meshwright.train.model_analysis import ModelAnalysis
from meshwright.train.session import TrainJob, run_rank


class Supervisor:
    """Runs a job to its end, and restarts its ranks after failures.

    Args:
        job: of the run; its directory exists.
        devices: of the ranks, as many as the job's plan has ranks.
        plans: returns a plan for fewer ranks, with its model analysis; raises for a number without a layout.
        announce: called with each later generation's job before it starts; returns it with its display's header.

    Raises:
        ConfigError: when this process may not open as many files as the ranks after a failure need.
    """

    def __init__(
        self,
        job: TrainJob,
        devices: Devices,
        plans: Callable[[int], tuple[Plan, ModelAnalysis]],
        announce: Callable[[TrainJob], TrainJob],
    ) -> None:
        ensure(needed(job.plan.layout, devices.count, cuda=devices.kind == "cuda"))
        self._first_job, self._announce = job, announce
        self._config = job.config.recovery
        self._devices = devices
        self._roster = Roster([devices.slot(rank) for rank in range(devices.count)], self._config)
        self._plan_prefetcher = PlanPrefetcher(plans)
        self._plan_prefetcher.learn(job.plan.ranks, (job.plan, job.analysis))
        self._sink = JsonlSink(job.run_dir, metrics=False)
        self._store = CheckpointStore(job.run_dir / "checkpoints", job.config.checkpoint)
        self._origin = job_origin(job)
        self._layout = job.plan.layout
        faults = parse_faults(self._config.faults)
        self._disk = DiskWriter(self._store.root, job.config.checkpoint, self._origin, self._event, faults)
        self.generation = 0
        self.terminated = False
        """Whether SIGTERM asked for the run's end."""
        self._states: list[State] = []
        self._peak: float | None = None
        self._lost_at: float | None = None
        self._interrupts = 0
        self._patience = Patience(self._config.attempts)
        self._ranks_run = False
        self._rewinds = Rewinds(job.config, self._store, self._event)
        self._keeper: Keeper | None = None

    def run(self) -> dict[str, Any]:
        """Runs the job; returns rank 0's result.

        Raises:
            MeshwrightError: when the run can't go on; its newest state has been written to disk then.
            KeyboardInterrupt: at the second Ctrl-C.
        """
        # Out of memory the kernel should kill a rank, which is replaceable, not the holder of the state.
        prefer_for_killing(SUPERVISOR_SCORE)
        try:
            with interrupts_to(self._count_interrupt):
                while True:
                    result = self._run_generation()
                    if result is not None:
                        self._finish_disk()
                        return result
                    self.generation += 1
        finally:
            self._drop_keeper()
            self._disk.close()
            self._plan_prefetcher.close()
            self._sink.close()

    def _run_generation(self) -> dict[str, Any] | None:
        """Runs one generation of ranks; returns the run's result, or None when another generation must follow."""
        job, slots = self._next_job()
        fruitless = self._patience.fruitless
        ranks = GenerationRanks(job, self._devices.only(slots), self.generation, self._interrupts, fruitless=fruitless)
        if not ranks.room.snapshots:
            state_bytes, available_bytes = ranks.room.state_bytes, ranks.room.available_bytes
            self._event("snapshots_off", state_bytes=state_bytes, available_bytes=available_bytes, from_disk_only=True)
        error: MeshwrightError | None = None
        result: dict[str, Any] = {}
        try:
            recovery_state = (self._lost_at, self._peak, self._rewinds.sick_step, self._rewinds.damage)
            memory = ranks.memory(self._newest_state_in_memory(), *recovery_state)
            self._start_keeper(ranks)
            self._ranks_run = True
            ranks.launcher.start(run_rank, dataclasses.replace(job, memory=memory))
            result = ranks.launcher.wait(watch=lambda: self._watch_generation(ranks))[0]
        except MeshwrightError as failure:
            error, self._lost_at = failure, time.monotonic()
        finally:
            self._interrupts = max(self._interrupts, ranks.launcher.interrupts)
            self.terminated |= ranks.launcher.terminated
            ranks.launcher.cancel()
            ranks.hang.refresh()
            self._ranks_run = False
            fenced_at = time.monotonic()
            # After an anomalous step the snapshots are what is rewound from: don't collect them.
            if not result or (result.get("cut") and not result["sick"]):
                self._collect_states(ranks.all_segments())
            if result:
                self._disk.finish(job.config.checkpoint.wait_s)
            self._disk.poll(ranks.disk, job.plan.layout, None)
            self._layout = job.plan.layout
            ranks.close()
        if error is not None:
            self._record_failure(error, ranks, fenced_at)
            self._handle_failure(error, ranks, slots)
            return None
        if not result.get("cut"):
            return result
        if result["sick"]:
            self._rewind_anomalous_steps(result)
            return None
        if "damage" in result:
            self._rewind_damage(Damage.from_json(result["damage"]), slots)
            return None
        readmitted = self._roster.due()
        self._roster.readmit(readmitted)
        self._lost_at = time.monotonic()
        self._event("growing", step=result["step"], devices=readmitted)
        return None

    def _start_keeper(self, ranks: GenerationRanks) -> None:
        """Starts a process that writes these ranks' newest state to disk if this process is killed."""
        segments, older_state = ranks.all_segments(), self._newest_state_in_memory()
        layout, old_layout = ranks.layout, self._layout

        def save() -> None:
            states = find_complete_states(read_snapshots(segments))
            state = states[0] if states else older_state
            if state is None:
                return
            origin = dataclasses.replace(self._origin, layout=layout if states else old_layout)
            event_fields = keep_on_disk(
                CheckpointStore(self._store.root, self._first_job.config.checkpoint), state, origin
            )
            sink = JsonlSink(self._first_job.run_dir, metrics=False)
            sink.event(Event(kind="supervisor_lost", rank=SUPERVISOR, data={"step": state.step}))
            if event_fields is not None:
                sink.event(Event(rank=SUPERVISOR, kind=event_fields.pop("kind"), data=event_fields))
            sink.close()

        keeper = Keeper(self._first_job.run_dir, save, self._first_job.config.checkpoint.wait_s)
        self._drop_keeper()
        self._keeper = keeper

    def _drop_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    def _rewind_anomalous_steps(self, result: dict[str, Any]) -> None:
        """Restarts from the last checkpoint, with the batches after the anomalous ones."""
        self._drop_keeper()  # it would write the state that is rewound from
        self._states, self._lost_at = [], time.monotonic()
        self._disk.finish(self._first_job.config.checkpoint.wait_s)
        self._rewinds.turn_back(result)

    def _rewind_damage(self, damage: Damage, slots: list[int]) -> None:
        """Restarts from the newest state that is older than a damage.

        Raises:
            RankError: when damages recurred too often without a step beyond the furthest one.
        """
        self._drop_keeper()  # the state that it would write may be damaged
        self._lost_at = time.monotonic()
        self._disk.finish(self._first_job.config.checkpoint.wait_s)
        try:
            keep = self._rewinds.go_back(damage, any(state.step <= damage.keep for state in self._states))
        except RankError as error:
            self._states = [state for state in self._states if state.step <= damage.keep]
            raise self._save_newest_state(error) from None
        self._states = [state for state in self._states if state.step <= keep]
        if len(damage.ranks) == 1 and self._roster.blame(slots[damage.ranks[0]]):
            self._event("left_out", device=slots[damage.ranks[0]], seconds=self._roster.next_s())

    def _newest_state_in_memory(self) -> State | None:
        """Returns the newest state in memory; None without one, or when a checkpoint on disk is newer."""
        latest = self._store.latest() if self._states else None
        return None if not self._states or (latest and latest.step > self._states[0].step) else self._states[0]

    def _next_job(self) -> tuple[TrainJob, list[int]]:
        """Returns the job for the largest usable number of the present devices, and these devices."""
        started = time.monotonic()
        if self.generation == 0:
            return self._first_job, self._roster.present
        self._await_devices()
        slots = self._roster.present
        reason = ""
        for ranks in range(len(slots), self._config.minimum - 1, -1):
            try:
                (plan, analysis), cached = self._plan_prefetcher.answer(ranks)
            except (PlanError, ClusterError) as error:
                reason = reason or str(error)
                continue
            job = self._announce(dataclasses.replace(self._first_job, plan=plan, analysis=analysis))
            event_fields = {
                "layout": str(job.plan.layout),
                "ranks": ranks,
                "left_out": self._roster.absent,
                "ahead": cached,
            }
            self._event("planned", seconds=time.monotonic() - started, **event_fields)
            return job, slots[:ranks]
        raise self._save_newest_state(LaunchError(f"no layout for the {len(slots)} ranks that are left: {reason}"))

    def _await_devices(self) -> None:
        """Waits until `recovery.minimum` devices are usable, readmitting those whose time out is over."""
        while len(self._roster.present) < self._config.minimum:
            pause = self._roster.next_s()
            self._event("waiting", seconds=pause, present=len(self._roster.present), minimum=self._config.minimum)
            deadline = time.monotonic() + pause
            # Short sleeps, so that an interrupt ends the wait promptly.
            while time.monotonic() < deadline:
                time.sleep(min(0.1, max(0.0, deadline - time.monotonic())))
                if self._interrupts:
                    raise self._save_newest_state(LaunchError("ended while waiting for devices to come back"))
            self._roster.readmit(self._roster.due())

    def _watch_generation(self, ranks: GenerationRanks) -> None:
        stamps = ranks.hang.poll()
        self._disk.poll(ranks.disk, ranks.layout, ranks.control)
        for slow in ranks.slow.poll(stamps):
            coordinates = ranks.layout.coordinates(slow.rank)
            self._event("slow_rank", slow=slow.rank, place=coordinates, share=slow.share, others=slow.others)
        if self._roster.due() and not ranks.control.reconfiguration_requested:
            ranks.control.request_reconfiguration()
        # Past the first steps the run is likely to last: plan in advance for the loss of one or two ranks.
        if stamps and all(stamp.step > 2 for stamp in stamps):
            count = ranks.launcher.ranks
            self._plan_prefetcher.start([fewer for fewer in (count - 1, count - 2) if fewer >= self._config.minimum])

    def _record_failure(self, error: MeshwrightError, ranks: GenerationRanks, fenced_at: float) -> None:
        rank = ranks.blamed(error)
        coordinates = ranks.launcher.label(rank) if ranks.launcher.label is not None and rank >= 0 else ""
        stamp = ranks.hang.last_stamps.get(rank)
        position = {"phase": stamp.phase if stamp else "start", "step": stamp.step if stamp else 0}
        reason = str(error).splitlines()[0]
        self._event("rank_lost", lost=rank, place=coordinates, why=reason, generation=self.generation, **position)
        assert self._lost_at is not None
        self._event("fenced", generation=self.generation, seconds=fenced_at - self._lost_at)

    def _handle_failure(self, error: MeshwrightError, ranks: GenerationRanks, slots: list[int]) -> None:
        """Decides whether to go on after a failure, and which device to leave out.

        Raises:
            MeshwrightError: when the run can't go on.
        """
        reached = max((stamp.step for stamp in ranks.hang.last_stamps.values()), default=0)
        blamed_stamp = ranks.hang.last_stamps.get(ranks.blamed(error))
        raised_at_step = (blamed_stamp.step if blamed_stamp else 0) if ranks.raised else None
        gives_up = self._patience.ends(error, reached, raised_at_step)
        # A damaged snapshot is dropped; the next older state, or the disk, is tried.
        refused = isinstance(error, CheckpointError) and self._states and RESTORING in str(error)
        if refused:
            self._states.pop(0)
            self._event("snapshot_refused", reason=str(error))
        if gives_up or (self._interrupts and not refused):
            raise self._save_newest_state(error)
        rank = ranks.blamed(error)
        if 0 <= rank < len(slots) and self._roster.blame(slots[rank]):
            self._event("left_out", device=slots[rank], seconds=self._roster.next_s())

    def _collect_states(self, segments: Sequence[Segment]) -> None:
        """Keeps the newest complete states of an ended generation, in place of older ones."""
        states = find_complete_states(read_snapshots(segments))
        if states:
            # After a damage, older states are kept until the recomputed ones have proven intact.
            self._states = [*states, *(self._states if self._rewinds.damage is not None else ())]
            self._peak = states[0].meta.get("peak_flops")

    def _save_newest_state(self, error: MeshwrightError) -> MeshwrightError:
        """Writes the newest state in memory to disk before the run ends; returns ``error``, to be raised."""
        state = self._states[0] if self._states else None
        # A configuration error at the start trained nothing: there is no new state to save.
        if state is not None and not isinstance(error, HOPELESS):
            self._disk.finish(self._first_job.config.checkpoint.wait_s)
            origin = dataclasses.replace(self._origin, layout=self._layout)
            event_fields = keep_on_disk(self._store, state, origin)
            if event_fields is not None:
                self._event(**event_fields)
        return error

    def _finish_disk(self) -> None:
        """Waits for the last checkpoint.

        Raises:
            CheckpointError: when it couldn't be written.
        """
        self._disk.finish(self._first_job.config.checkpoint.wait_s)
        if self._disk.failed is not None:
            raise CheckpointError(self._disk.failed)

    def _event(self, kind: str, **data: Any) -> None:
        """Records an event, and shows it while no ranks run, whose display would do so."""
        event = Event(kind=kind, rank=SUPERVISOR, data=data)
        self._sink.event(event)
        if not self._ranks_run:
            show_event(event, self._first_job.config.monitor.display)

    def _count_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        self.terminated |= number == signal.SIGTERM
        if self._interrupts > 1:
            raise KeyboardInterrupt
