"""Snapshots of a run's state in shared memory that outlives its ranks, restored by the ranks after a failure."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from meshwright.checkpoint.agreement import Agreement
from meshwright.checkpoint.snapshot import Segment, State
from meshwright.checkpoint.snapshot_writer import SnapshotWriter
from meshwright.checkpoint.tensor_shards import assign_saved_shards, collect_local_shards, digest
from meshwright.errors import CheckpointError
from meshwright.json_types import JsonObject
from meshwright.launch.devices import allowed_core_time
from meshwright.parallel.dcp_shards import StateTensor
from meshwright.parallel.program import Program
from meshwright.train.damage import Damage
from meshwright.train.flight import Flight
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.stage_times import PublishedTimes
from meshwright.train.state import (
    BUFFERS,
    adopt_values,
    plain_values,
    restore_targets,
    state_addresses,
    state_tensors,
)
from meshwright.train.supervisor_requests import SupervisorRequests

_INT64 = struct.Struct("<q")
CUT_SHARE = 2.0**-20
"""A rank's contribution to the all-reduced stop count when a reconfiguration was requested: all together below 1."""


_CHECKSUM_THREADS = 4
"""Most threads that make the checksums of a GPU's state, 3 GB a second each."""
RESTORING = "restoring from memory failed"
"""Beginning of the error for a state in memory that can't be restored."""


class PeerCopies:
    """Shared counters of the newest snapshot of each local rank that arrived on each peer, set by the courier.

    Args:
        ranks: number of ranks on this node.
        peers: number of other nodes that receive their snapshots.
    """

    LIMIT_S = 20.0
    """Longest wait of a rank for its copy to arrive; a peer that needs longer counts as lost by then."""

    def __init__(self, ranks: int, peers: int = 1) -> None:
        self._peers = peers
        self._segment = Segment()
        self._map = self._segment.map(_INT64.size * ranks * peers)
        for rank in range(ranks):
            for peer in range(peers):
                # -1: nothing arrived. Fresh shared memory would read as step 0.
                self.record(rank, -1, peer)

    def record(self, local_rank: int, step: int, peer: int = 0) -> None:
        """Records that a peer has a rank's snapshot of a step."""
        _INT64.pack_into(self._map, _INT64.size * (local_rank * self._peers + peer), step)

    def newest_step(self, local_rank: int) -> int:
        """Returns the newest step of which every peer has a rank's snapshot or a later one."""
        offset = local_rank * self._peers
        # The slowest peer decides: after any loss a peer must have the step.
        return min(_INT64.unpack_from(self._map, _INT64.size * (offset + peer))[0] for peer in range(self._peers))

    def wait(self, local_rank: int, step: int) -> None:
        """Waits until every peer has a rank's snapshot of a step or a later one, up to `LIMIT_S`."""
        deadline = time.monotonic() + self.LIMIT_S
        while self.newest_step(local_rank) < step and time.monotonic() < deadline:
            time.sleep(0.0005)

    def close(self) -> None:
        """Lets go of the memory."""
        self._map.close()
        self._segment.close()


@dataclass(frozen=True, kw_only=True)
class RecoveryMemory:
    """Everything that a supervisor shares with the ranks it starts."""

    segments: tuple[tuple[Segment, ...], ...]
    """Segments for each local rank's snapshots: two, or three where they are also sent to peers."""
    disk: tuple[Segment, ...]
    """Each local rank's segment for checkpoints, which the supervisor writes; empty when ranks write themselves."""
    control: SupervisorRequests
    """Requests of the supervisor."""
    every: int
    """Steps between snapshots; 0 for none."""
    state: State | None = None
    """The state to restore; None to restore from disk or start anew."""
    lost_at: float | None = None
    """time.monotonic() at which the failure of the previous ranks was noticed; None without one."""
    anomalous_step: int = 0
    """Step up to whose batches the data is skipped; 0 for none."""
    damage: Damage | None = None
    """The damage that ended the previous ranks; None without one."""
    peak_flops: float | None = None
    """FLOP/s of one device's matrix products, as the previous ranks measured it."""
    peer_copies: PeerCopies | None = None
    """Which snapshots peers have; None without peers. A rank writes its next snapshot only after the last one arrived,
    so that with three segments there is always a step whose snapshot every rank has both locally and on the peers."""
    fence: Callable[[], None] | None = None
    """Raises once another generation was claimed; called before anything is written."""
    times: PublishedTimes | None = None
    """Where ranks publish what they computed; None where nobody asks (`train.replan`)."""
    flight: Flight | None = None
    """Queries the operations that the ranks' GPUs wait for; None for ranks on the CPU."""


class StateSnapshots:
    """A snapshot writer that gathers the state's tensors again only after their memory has moved.

    Args:
        make_writer: makes the writer for a state's tensors.
    """

    def __init__(self, make_writer: Callable[[Mapping[str, StateTensor]], SnapshotWriter]) -> None:
        self._make_writer = make_writer
        self._writer: SnapshotWriter | None = None
        self._addresses: list[int] | None = None

    def prepare(self, program: Program, optimizer: LocalAdamW) -> None:
        """Has the memory allocated by a thread, where the state is on a GPU: its first snapshot then waits for less."""
        if self._writer is None:
            self._writer = self._make_writer(state_tensors(program, optimizer))

    def save(self, step: int, program: Program, optimizer: LocalAdamW, values: JsonObject) -> None:
        """Copies the state; the optimizer's next update waits for a copy that runs asynchronously on the device."""
        addresses = state_addresses(program, optimizer)
        # The writer keeps the last tensors alive, so that equal addresses mean the same tensors.
        tensors = state_tensors(program, optimizer) if addresses != self._addresses else None
        if self._writer is None:
            assert tensors is not None
            self._writer = self._make_writer(tensors)
        self._writer.save(step, tensors, values)
        if tensors is not None:
            # `state_tensors` creates moments that didn't exist yet, so the addresses are read again.
            self._addresses = state_addresses(program, optimizer)
        # The copy runs on its own stream; the update would overwrite what it still reads.
        optimizer.wait_for(self._writer.copier.copy_event)

    def wait(self) -> None:
        """Waits until the last snapshot is complete."""
        if self._writer is not None:
            self._writer.wait()

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the segments that this process has mapped; 0 before the first snapshot."""
        return self._writer.mapped_bytes if self._writer is not None else 0


class RankMemory:
    """One rank's use of the shared memory; all ranks call every method together.

    Args:
        memory: from the supervisor.
        rank: this rank.
        generation: of these ranks.
        agreement: exchanges small values between all ranks.
        local_rank: its index among the ranks of this node.
    """

    def __init__(
        self, memory: RecoveryMemory, rank: int, generation: int, agreement: Agreement, local_rank: int | None = None
    ) -> None:
        self._memory, self._rank, self._generation, self._agreement = memory, rank, generation, agreement
        self._make_writer: Callable[[Sequence[Segment]], SnapshotWriter] | None = None
        self._local_rank = rank if local_rank is None else local_rank
        self._writer: StateSnapshots | None = None
        self._disk: StateSnapshots | None = None
        self._saved_step = 0
        self.snapshot_step = -1
        """Step of the last snapshot."""

    @property
    def state(self) -> State | None:
        """The state to restore, if the previous ranks left one."""
        return self._memory.state

    @property
    def damage(self) -> Damage | None:
        """The damage that ended the previous ranks."""
        return self._memory.damage

    @property
    def lost_at(self) -> float | None:
        """time.monotonic() at which the failure of the previous ranks was noticed."""
        return self._memory.lost_at

    @property
    def snapshot_bytes(self) -> int:
        """Host bytes of this rank's snapshots and of its copy for checkpoints, as far as any were taken."""
        return sum(writer.mapped_bytes for writer in (self._writer, self._disk) if writer is not None)

    def check_fence(self) -> None:
        """Stops a rank whose generation was superseded.

        Raises:
            CheckpointError: when another generation was claimed.
        """
        if self._memory.fence is not None:
            self._memory.fence()

    @property
    def reconfiguration_requested(self) -> bool:
        """Whether the supervisor requested a reconfiguration."""
        return self._memory.control.reconfiguration_requested

    def restore(self, program: Program, optimizer: LocalAdamW, scaler: LossScaler) -> JsonObject | None:
        """Fills weights, moments and counters from the previous ranks' state; returns its plain values, if any.

        Raises:
            CheckpointError: on every rank when the state is damaged on any.
        """
        state = self._memory.state
        if state is None:
            return None
        tensors = restore_targets(program, optimizer, state.names)
        # One rank's damaged snapshot makes all of them fail together, so that none trains on alone.
        self._agreement.run_on_all(RESTORING, lambda: state.fill(tensors))
        return adopt_values(state.meta, program, optimizer, scaler, state.names)

    @property
    def takes_snapshots(self) -> bool:
        """Whether snapshots are taken."""
        return self._memory.every > 0

    def due(self, step: int) -> bool:
        """Returns whether to take a snapshot after this step; over several nodes always after the first.

        After a node was lost, state that it held has only one copy until then.
        """
        is_first = self._memory.peer_copies is not None and self.snapshot_step < 0
        return self._memory.every > 0 and (is_first or step % self._memory.every == 0)

    def prepare(self, program: Program, optimizer: LocalAdamW) -> None:
        """Has memory for snapshots and checkpoints allocated beside the training, where the state is on a GPU.

        To be called once moments exist, after the first step; the kernel needs half a second for a GB.
        """
        if program.weights_device.type == "cpu":
            return
        if self.takes_snapshots:
            self._snapshots().prepare(program, optimizer)
        if self.supervisor_writes:
            self._checkpoints().prepare(program, optimizer)

    def _snapshots(self) -> StateSnapshots:
        if self._writer is None:
            segments = self._memory.segments[self._local_rank]
            self._writer = StateSnapshots(lambda tensors: self._writer_factory(tensors)(segments))
        return self._writer

    def _checkpoints(self) -> StateSnapshots:
        if self._disk is None:
            segments = self._memory.disk[self._local_rank : self._local_rank + 1]
            self._disk = StateSnapshots(lambda tensors: self._writer_factory(tensors)(segments))
        return self._disk

    def save_snapshot(
        self, step: int, program: Program, optimizer: LocalAdamW, scaler: LossScaler, tokens: int, **values: object
    ) -> float:
        """Takes a snapshot after ``step`` steps; returns the seconds for which it blocked training."""
        # The snapshot that peers lack must not be overwritten: wait until the last one has arrived.
        started = time.perf_counter()
        if self._memory.peer_copies is not None and self.snapshot_step >= 0:
            self._memory.peer_copies.wait(self._local_rank, self.snapshot_step)
        self._snapshots().save(step, program, optimizer, plain_values(optimizer, scaler, tokens) | values)
        self.snapshot_step = step
        return time.perf_counter() - started

    def complete_snapshot(self, step: int) -> None:
        """Waits until the last snapshot is complete, if one is due after this step; call before the last all-reduce.

        A rank that finishes the step overwrites its older snapshot. None may do so until every rank has completed the
        last one, or no state would be complete on all ranks for a moment. The all-reduce provides that barrier within
        an island; between islands it is the gathering of steps before each copy (`Trainer._agrees`).
        """
        if self._writer is not None and (self.reconfiguration_requested or self.due(step)):
            self._writer.wait()

    def wait(self) -> None:
        """Waits until this rank's last snapshot is complete."""
        if self._writer is not None:
            self._writer.wait()

    @property
    def supervisor_writes(self) -> bool:
        """Whether the supervisor writes checkpoints."""
        return bool(self._memory.disk)

    def save_checkpoint(
        self,
        step: int,
        program: Program,
        optimizer: LocalAdamW,
        scaler: LossScaler,
        tokens: int,
        limit_s: float,
        **values: object,
    ) -> float:
        """Copies the state for the supervisor, which writes it to disk beside the training.

        Returns:
            Seconds for which training was blocked: by the copy, and by waiting for the previous checkpoint.

        Raises:
            CheckpointError: when the previous checkpoint isn't written within ``limit_s`` seconds.
        """
        started = time.perf_counter()
        # The disk's segment holds the previous checkpoint until it is written.
        while self._memory.control.written[0] < self._saved_step:
            if time.perf_counter() - started > limit_s:
                raise CheckpointError(
                    f"the checkpoint of step {self._saved_step} was not written within "
                    f"checkpoint.wait_s = {limit_s:g} s; raise it, or checkpoint.every"
                )
            time.sleep(0.002)
        self._checkpoints().save(step, program, optimizer, plain_values(optimizer, scaler, tokens) | values)
        self._saved_step = step
        if self._memory.peer_copies is None:
            self.snapshot_step = step  # it can be restored like a snapshot, but the courier doesn't send it
        return time.perf_counter() - started

    def _writer_factory(self, tensors: Mapping[str, StateTensor]) -> Callable[[Sequence[Segment]], SnapshotWriter]:
        """Agrees with the other ranks, once, which rank stores which shard; returns a factory of writers."""
        if self._make_writer is None:
            held = collect_local_shards(tensors)
            local_shards = [shard for shard, _ in held]
            device = next((tensor.device for _, tensor in held if tensor.is_cuda), None)
            cores_per_rank = int(allowed_core_time()) // max(1, len(self._memory.segments))
            # Replicated shards are stored by one rank each (`assign_saved_shards`), so a state is stored once.
            tables = self._agreement.gather(local_shards)
            self._make_writer = partial(
                SnapshotWriter,
                rank=self._rank,
                generation=self._generation,
                ranks=len(tables),
                tensors=digest(shard for table in tables for shard in table),
                local_shards=local_shards,
                saved_shards=assign_saved_shards(tables)[self._rank],
                changing=f"{BUFFERS}/",
                device=device,
                # Ranks on the CPU compute on these cores; the host of a GPU has some to spare.
                threads=max(1, min(_CHECKSUM_THREADS, cores_per_rank // 2)) if device is not None else 1,
            )
        return self._make_writer

    def close(self) -> None:
        """Waits until the last snapshots are complete and, before a reconfiguration, have arrived on the peers."""
        for writer in (self._writer, self._disk):
            if writer is not None:
                writer.wait()
        if self.reconfiguration_requested and self._memory.peer_copies is not None and self.snapshot_step >= 0:
            self._memory.peer_copies.wait(self._local_rank, self.snapshot_step)
