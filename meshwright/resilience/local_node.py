"""This node's ranks, generation after generation, and the snapshots that they leave in its memory."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping

from meshwright.checkpoint.remote import remote_snapshot
from meshwright.checkpoint.snapshot import Snapshot, State, read_snapshots
from meshwright.errors import MeshwrightError
from meshwright.launch.devices import Devices
from meshwright.launch.signals import InterruptCounter
from meshwright.monitor.progress import RankStamp
from meshwright.resilience import host_memory_budget
from meshwright.resilience.departure import Departure
from meshwright.resilience.generation import NodeSnapshot, retain_snapshots
from meshwright.resilience.generation_ranks import Fence, GenerationAborted, GenerationRanks, LeftRun, Watch
from meshwright.resilience.hang_watch import HangError
from meshwright.resilience.local_storage import LocalStorage
from meshwright.resilience.messages import (
    Address,
    GenerationEnd,
    NodeFailure,
    NodeReport,
    Order,
    SnapshotRecord,
    StateLocation,
)
from meshwright.resilience.peer_storage import PeerStorage
from meshwright.spec.plan import Plan
from meshwright.train.model_analysis import ModelAnalysis
from meshwright.train.session import TrainJob, run_rank


class LocalNode:
    """The ranks of a node, generation after generation.

    Args:
        job: of the run.
        devices: of this node, one rank each.
        make_job: returns the job of another plan; the analysis is that of the plan, where it is known.
        event: records an event: its kind, and its fields by keyword.
        storage: carries the state to disk and to other nodes.
        node: this node's number.
        session: identifies this process.
    """

    def __init__(
        self,
        job: TrainJob,
        devices: Devices,
        make_job: Callable[[Plan, ModelAnalysis | None], TrainJob],
        event: Callable[..., None],
        storage: LocalStorage | PeerStorage,
        node: int = 0,
        session: str = "",
    ) -> None:
        self.job, self.devices, self.node = job, devices, node
        self.storage = storage
        """Carries the state to disk and to other nodes."""
        self._make_job, self._event, self._session = make_job, event, session
        self.snapshots: list[NodeSnapshot] = []
        """Snapshots in this node's memory."""
        self.interrupts = InterruptCounter()
        """How often the user asked that the run end; shared with the launchers of all generations."""
        self.departure = Departure(job.run_dir, node, self.interrupts, job.config.launch.stop_s)
        """Of this node from a run of islands, at SIGTERM."""
        self.ranks_run = False
        """Whether ranks run, whose display shows events."""
        self.shown_until = math.inf
        """Time of the newest event that the last ranks' display has shown; infinity where rank 0 wasn't here."""
        self.end = GenerationEnd()
        """How the last generation ended here."""
        self.failed_at: float | None = None
        """time.monotonic() at which the last generation's failure was noticed here; None without one."""

    def report(self) -> NodeReport:
        """Prepares this node for another generation and returns its report."""
        snapshots = [entry.snapshot for entry in self.snapshots]
        newest = max(snapshots, key=lambda snapshot: (snapshot.step, snapshot.generation), default=None)
        return NodeReport(
            node=self.node,
            session=self._session,
            slots=tuple(self.devices.slot(index) for index in range(self.devices.count)),
            host=self.storage.host,
            ports=self.storage.open_ports(snapshots),
            snapshots=tuple(
                SnapshotRecord(snapshot.generation, snapshot.step, snapshot.rank, snapshot.ranks, entry.is_local)
                for entry in self.snapshots
                for snapshot in (entry.snapshot,)
            ),
            peak_flops=newest.meta.get("peak_flops") if newest is not None else None,
            available_bytes=host_memory_budget.available_bytes(),
            link_bytes_s=self.storage.link_bytes_s,
            end=self.end,
        )

    def open_state(self, location: StateLocation, servers: Mapping[int, Address]) -> State:
        """Returns a state in the nodes' memory; snapshots on other nodes are read on first use.

        Args:
            location: where it lies.
            servers: address of each node's snapshot server.
        """
        step, generation = location.step, location.generation
        local_snapshots = {
            entry.snapshot.rank: entry.snapshot
            for entry in self.snapshots
            if (entry.snapshot.step, entry.snapshot.generation) == (step, generation)
        }
        clients = self.storage.connect_snapshot_servers(servers)
        snapshots = [
            local_snapshots.get(rank) or remote_snapshot(clients[holder], (generation, step, rank))
            for rank, holder in sorted(location.holders.items())
        ]
        return State(step, snapshots, location.tier)

    def skip(self, generation: int) -> None:
        """Records a generation in which this node has no ranks."""
        self.end = GenerationEnd(generation=generation)

    def run(
        self,
        order: Order,
        watch: Watch,
        analysis: ModelAnalysis | None = None,
        wake: int = -1,
        fence: Fence | None = None,
    ) -> None:
        """Runs this node's ranks of a generation until they end, and sets `end`; raises what ``watch`` raises.

        Args:
            order: the leader's.
            watch: called some times a second; an exception of it ends the ranks.
            analysis: of the order's plan, where it is known.
            wake: descriptor whose readability calls ``watch`` at once.
            fence: called by ranks before they write.
        """
        self.end, self.failed_at = GenerationEnd(generation=order.generation), None
        self.interrupts.leaves_at_sigterm = order.plan.layout.islands > 1 and len(order.nodes) > 1
        job = self._make_job(order.plan, analysis)
        state = self.open_state(order.state, order.snapshot_servers) if order.state is not None else None
        devices = self.devices.only(order.share(self.node).slots)
        with contextlib.ExitStack() as opened:
            node_ranks = self.storage.place_ranks(order)
            if node_ranks is not None and node_ranks.listener is not None:
                # The launcher closes it too, but ranks that never start have none.
                opened.callback(node_ranks.listener.close)
            ranks = GenerationRanks(job, devices, order, self.interrupts, node_ranks)
            opened.callback(ranks.close)
            self._run_ranks(order, job, ranks, state, watch, wake, fence)

    def _run_ranks(
        self,
        order: Order,
        job: TrainJob,
        ranks: GenerationRanks,
        state: State | None,
        watch: Watch,
        wake: int,
        fence: Fence | None,
    ) -> None:
        """Starts the ranks, waits for their end, and keeps their snapshots; see `run`."""
        error: MeshwrightError | None = None
        try:
            copied = self.storage.start(order, job, ranks, state, fence)
            lost_at = None if order.lost_for_s is None else time.monotonic() - order.lost_for_s
            memory = ranks.share_memory(state, lost_at, copied, fence)
            self.ranks_run = True
            ranks.launcher.start(run_rank, dataclasses.replace(job, memory=memory))
            outcome = ranks.launcher.wait(watch=lambda: watch(ranks), wake=wake)[0]
            self.storage.await_checkpoint(ranks, watch)
            self.end = dataclasses.replace(self.end, outcome=outcome)
        # No failure of these ranks: the generation ends without outcome or failure.
        except (GenerationAborted, LeftRun):
            raise
        except MeshwrightError as failed:
            error, self.failed_at = failed, time.monotonic()
        finally:
            ranks.launcher.cancel()
            has_display = order.share(self.node).first_rank == 0
            self.shown_until = ranks.control.shown_until if has_display else math.inf
            self.ranks_run = False
            ranks.hang.refresh()
            self.end = dataclasses.replace(
                self.end,
                failure=self._describe_failure(error, ranks) if error is not None else None,
                furthest_step=ranks.furthest_step,
            )
            received: list[Snapshot] = []
            try:
                # What receives snapshots must end before they are read.
                received = self.storage.stop(ranks, self.end.outcome is not None)
            finally:
                local = read_snapshots(ranks.all_segments())
                self.snapshots = retain_snapshots(order, self.snapshots, local, received)

    def poll(self, ranks: GenerationRanks) -> list[RankStamp]:
        """Returns the ranks' progress stamps; reports slow ranks, and drives what carries their state.

        Raises:
            HangError: when they hang.
            LeftRun: when this node leaves the run in the middle of a round.
        """
        self.departure.poll()
        stamps = ranks.hang.poll()
        self.storage.poll(ranks)
        for slow in ranks.slow.poll(stamps):
            coordinates = ranks.layout.coordinates(slow.rank)
            self._event("slow_rank", slow=slow.rank, place=coordinates, share=slow.share, others=slow.others)
        return stamps

    def _describe_failure(self, error: MeshwrightError, ranks: GenerationRanks) -> NodeFailure:
        rank = ranks.find_blamed_rank(error)
        stamp = ranks.hang.last_stamps.get(rank)
        failures = ranks.launcher.failures
        return NodeFailure(
            node=self.node,
            error=type(error).__name__ if not isinstance(error, HangError) else "LaunchError",
            text=str(error),
            rank=rank,
            coordinates=ranks.launcher.label(rank) if ranks.launcher.label is not None and rank >= 0 else "",
            is_echo=bool(failures) and failures[0].is_echo,
            is_hang=isinstance(error, HangError),
            raised=ranks.raised,
            is_shortage=ranks.ran_out_of_memory,
            phase=stamp.phase if stamp else "start",
            step=stamp.step if stamp else 0,
            time=time.time(),
        )
