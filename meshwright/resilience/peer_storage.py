"""The state of a node's ranks beyond them, on a run over several nodes: copies at peers, and shared checkpoints.

The **courier** sends each new snapshot to the next nodes of the ring and receives those of the nodes before; the
**snapshot server** lets other nodes read the snapshots of the last generation; the nodes' disk writers make one
checkpoint; **spare copies** are second copies of the restored state.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from functools import partial

from meshwright.checkpoint.remote import Key, Shelf
from meshwright.checkpoint.snapshot import HEADER_BYTES, Segment, Snapshot, State, read_snapshots
from meshwright.checkpoint.star import StarAgreement
from meshwright.control_groups import available_bytes
from meshwright.errors import CheckpointError
from meshwright.launch.addresses import interface_of, link_bytes_s, listen_at, open_store_socket
from meshwright.launch.contract import NodeRanks
from meshwright.resilience.courier import CourierInbox, start_courier, start_snapshot_server
from meshwright.resilience.disk import DiskWriter, WriterShare
from meshwright.resilience.generation_ranks import Fence, GenerationRanks, Watch, job_origin
from meshwright.resilience.helper import Helper
from meshwright.resilience.host_memory_budget import max_snapshot_bytes, peer_snapshots_per_rank
from meshwright.resilience.messages import Address, Order, Ports
from meshwright.resilience.orders import ranks_to_copy
from meshwright.train.faults import COURIER, Faults, parse_faults
from meshwright.train.memory import PeerCopies
from meshwright.train.session import TrainJob
from meshwright.transport.key import RunKey

_POLL_S = 0.01
_CHUNK_BYTES = 8 << 20
"""Bytes of a spare copy that are read at once."""
_LISTENERS = ("store", "snapshots", "courier", "disk")


class SpareCopies:
    """Copies the state that a generation restores from other nodes to this one, while its ranks start.

    A node that ran alone, or whose ranks ended before their last snapshots were sent, may be the only holder of some
    state. Until the new ranks' first snapshots are sent, its loss would cost every step since the last checkpoint.

    Args:
        servers: connects to the server of each snapshot's holder.
    """

    def __init__(self, servers: Mapping[Key, Callable[[], Shelf]]) -> None:
        self.wanted = tuple(servers)
        """Generation, step and rank of each snapshot."""
        self._segments = [Segment() for _ in servers]

        def copy_all() -> None:
            for (key, server), segment in zip(servers.items(), self._segments):
                try:
                    _copy_snapshot(server(), key, segment)
                except CheckpointError:  # its holder is gone, which the leader notices by itself
                    continue

        # A process, not a thread: the supervisor's thread must stay responsive, and forks ranks.
        self._helper = Helper(copy_all)
        self._reported = False

    @property
    def just_done(self) -> bool:
        """Whether the copying has ended since the last access."""
        finished = not self._reported and self._helper.has_ended
        self._reported |= finished
        return finished

    def snapshots(self) -> list[Snapshot]:
        """Returns the completely copied snapshots."""
        return read_snapshots(self._segments)

    def close(self) -> None:
        """Ends the copying and closes the segments; `snapshots` keep their memory."""
        self._helper.close()
        for segment in self._segments:
            segment.close()


def _copy_snapshot(server: Shelf, key: Key, segment: Segment) -> None:
    """Copies a snapshot, its header last: a segment without a header holds no snapshot."""
    header_bytes, size = server.read(key, 0, HEADER_BYTES)
    # A copy is a precaution: never at the price of memory that ranks may need.
    if available_bytes() < 2 * size:
        return
    memory = segment.map(size)
    for start in range(HEADER_BYTES, size, _CHUNK_BYTES):
        stop = min(size, start + _CHUNK_BYTES)
        memory[start:stop] = bytes(server.read(key, start, stop - start)[0])
    memory[:HEADER_BYTES] = bytes(header_bytes)
    server.close()


class PeerStorage:
    """Copies the state of a node's ranks to other nodes and to their common disk.

    Args:
        node: this node's number.
        host: address by which other nodes reach it.
        key: the run's secret, by which every connection is authenticated.
        event: records an event: its kind, and its fields by keyword.
    """

    def __init__(self, node: int, host: str, key: RunKey, event: Callable[..., None]) -> None:
        self._node, self.host, self._key, self._event = node, host, key, event
        self._listeners: dict[str, socket.socket] = {}
        self._snapshot_server: Helper | None = None
        self._courier: Helper | None = None
        self._start_courier: Callable[[], Helper]
        self._disk: DiskWriter | None = None
        self._spare_copies: SpareCopies | None = None
        self._peer_segments: dict[int, tuple[Segment, ...]] = {}
        self._copied: PeerCopies | None = None
        self._wait_s = 0.0

    @property
    def link_bytes_s(self) -> float | None:
        """Rate of the network interface; None when unknown."""
        return link_bytes_s(self.host)

    def open_ports(self, snapshots: list[Snapshot]) -> Ports | None:
        """Opens this node's listeners for another generation, and serves its snapshots."""
        if self._snapshot_server is None:
            for name in _LISTENERS:
                if name not in self._listeners:
                    # Fresh ports each generation: connections of the previous one can't reach its successors.
                    self._listeners[name] = listen_at(self.host)
            # The server forks with the snapshots of now: it must end before the next generation replaces them.
            self._snapshot_server = start_snapshot_server(
                self._listeners["snapshots"], snapshots, self._key, self._event
            )
        return Ports(**{name: listener.getsockname()[1] for name, listener in self._listeners.items()})

    def connect_snapshot_servers(self, addresses: Mapping[int, Address]) -> dict[int, Shelf]:
        """Returns clients of other nodes' snapshots, by node, which connect at the first read."""
        return {node: Shelf(address.host, address.port, self._key) for node, address in addresses.items()}

    def place_ranks(self, order: Order) -> NodeRanks | None:
        """Returns this node's ranks within the world; with rank 0 on this node, the store's socket goes along."""
        share, alone = order.share(self._node), len(order.shares) == 1
        listener = self._listeners.pop("store") if share.first_rank == 0 else None
        host, port = order.store
        if alone and listener is not None:
            # Ranks of one node need no network: the store looks up names, which takes long without one.
            listener.close()
            listener = open_store_socket(order.world)
            host, port = listener.getsockname()[:2]
        return NodeRanks(
            node=self._node,
            nodes=len(order.shares),
            first=share.first_rank,
            world=order.world,
            host=host,
            port=port,
            listener=listener,
            interface="" if alone else interface_of(self.host),
        )

    def start(
        self, order: Order, job: TrainJob, ranks: GenerationRanks, state: State | None, fence: Fence | None
    ) -> PeerCopies | None:
        """Starts disk writer, spare copying and courier; returns what has arrived at each peer, None without peers."""
        assert fence is not None
        self._wait_s = job.config.checkpoint.wait_s
        self._disk = self._make_disk_writer(order, job, fence) if ranks.disk else None
        holders = ranks_to_copy(order, self._node)
        if holders and order.state is not None:
            key = (order.state.generation, order.state.step)
            servers = {rank: order.snapshot_servers[node] for rank, node in sorted(holders.items())}
            self._spare_copies = SpareCopies(
                {(*key, rank): partial(Shelf, *address, self._key) for rank, address in servers.items()}
            )
        if not order.peers:
            return None
        copies = peer_snapshots_per_rank(order.peers)
        preceding_ranks = [rank for share in order.neighbours(self._node, -order.peers, -1) for rank in share.ranks]
        self._peer_segments = {rank: tuple(Segment() for _ in range(copies)) for rank in preceding_ranks}
        # Shared by ranks and courier, so created before either is forked.
        self._copied = PeerCopies(len(ranks.segments), order.peers)
        inbox = CourierInbox(
            segments=self._peer_segments, max_bytes=max_snapshot_bytes(job.plan), key=self._key, refused=self._event
        )
        faults = parse_faults(job.config.recovery.faults)
        self._start_courier = partial(
            start_courier,
            self._listeners["courier"],
            [share.courier for share in order.neighbours(self._node, 1, order.peers)],
            dict(zip(order.share(self._node).ranks, ranks.segments)),
            inbox,
            self._copied,
            partial(Faults, job.run_dir, COURIER - self._node, order.generation, faults),
        )
        self._courier = self._start_courier()
        return self._copied

    def _make_disk_writer(self, order: Order, job: TrainJob, fence: Fence) -> DiskWriter:
        """Returns the writer of this node's share of checkpoints; the writers of all nodes agree over the first's."""
        ring_index = order.nodes.index(self._node)
        agree = partial(
            StarAgreement,
            ring_index,
            len(order.shares),
            address=order.shares[0].disk,
            listener=self._listeners["disk"] if ring_index == 0 else None,
            limit_s=self._wait_s,
            run_key=self._key,
            refused=self._event,
        )
        share = WriterShare(node=self._node, first=ring_index == 0, agree=agree, fence=fence)
        faults = parse_faults(job.config.recovery.faults)
        root, config = job.run_dir / "checkpoints", job.config.checkpoint
        return DiskWriter(root, config, job_origin(job), self._event, faults, share)

    def poll(self, ranks: GenerationRanks) -> None:
        """Restarts a courier that died, drives the disk writer, and reports finished spare copies."""
        # A dead courier costs copies, not the run: restart it; it resends the newest snapshots.
        if self._courier is not None and self._courier.has_ended:
            self._event("courier_lost", node=self._node)
            self._courier = self._start_courier()
        if self._disk is not None:
            self._disk.poll(ranks.disk, ranks.layout, ranks.control)
        if self._spare_copies is not None and self._spare_copies.just_done:
            copied_ranks = [snapshot.rank for snapshot in self._spare_copies.snapshots()]
            step = self._spare_copies.wanted[0][1]
            self._event("state_copied", node=self._node, step=step, ranks=copied_ranks)

    def await_checkpoint(self, ranks: GenerationRanks, watch: Watch) -> None:
        """Waits until the ended ranks' last checkpoint is written.

        Raises:
            CheckpointError: when that takes too long, or it couldn't be written.
        """
        disk, deadline = self._disk, time.monotonic() + 2 * self._wait_s
        if disk is None:
            return
        disk.poll(ranks.disk, ranks.layout, ranks.control)
        while disk.busy:
            watch(ranks)
            time.sleep(_POLL_S)
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"the last checkpoint was not written within checkpoint.wait_s = {self._wait_s:g} s"
                )
        if disk.failed is not None:
            raise CheckpointError(disk.failed)

    def stop(self, ranks: GenerationRanks, in_order: bool) -> list[Snapshot]:
        """Ends the processes beside the ranks; returns the snapshots received from other nodes."""
        # A complete spare copy counts though others are missing.
        received = self._spare_copies.snapshots() if self._spare_copies is not None else []
        for helper in (self._courier, self._disk, self._spare_copies):
            if helper is not None:
                helper.close()
        self._courier = self._disk = self._spare_copies = None
        segments = [segment for segments in self._peer_segments.values() for segment in segments]
        # Mappings stay valid after their segments are closed.
        received += read_snapshots(segments)
        for segment in segments:
            segment.close()
        self._peer_segments = {}
        if self._copied is not None:
            self._copied.close()
            self._copied = None
        self.close()
        return received

    def settle(self, rewinds: bool = False) -> None:
        """Does nothing: `await_checkpoint` and `stop` have ended the writer."""

    def clear_disk(self, limit_s: float) -> None:
        """Does nothing: `await_checkpoint` and `stop` have ended the writer."""

    def finish(self) -> None:
        """Does nothing: `await_checkpoint` has waited for the last checkpoint."""

    def close(self) -> None:
        """Ends the snapshot server and closes the listeners."""
        if self._snapshot_server is not None:
            self._snapshot_server.close()
            self._snapshot_server = None
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
