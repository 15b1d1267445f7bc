"""A supervisor's work on its own node of a run over several nodes: ranks, courier, shelf, and their snapshots.

The **courier** sends each new snapshot to the next nodes of the ring and receives those of the nodes before; the
**shelf** serves the snapshots of the last generation to other nodes.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial

from meshwright.checkpoint.remote import Shelf, remote_snapshot
from meshwright.checkpoint.snapshot import Segment, Snapshot, State, read_snapshots
from meshwright.checkpoint.star import StarAgreement
from meshwright.errors import CheckpointError, MeshwrightError
from meshwright.launch.contract import NodeRanks
from meshwright.launch.devices import Devices
from meshwright.launch.rendezvous import interface_of, link_bytes_s, listen_at, open_store_socket
from meshwright.monitor.progress import RankStamp
from meshwright.resilience.courier import Helper, Inlet, start_courier, start_shelf
from meshwright.resilience.disk import DiskWriter, Share
from meshwright.resilience.generation_ranks import GenerationRanks, job_origin
from meshwright.resilience.hang_watch import HangError
from meshwright.resilience.host_memory_budget import (
    COPIES,
    NODE_COPIES,
    available_bytes,
    held_for_others,
    largest_snapshot,
)
from meshwright.resilience.peers import Message
from meshwright.resilience.spare_copies import SpareCopies, ranks_to_copy
from meshwright.spec.plan import Plan
from meshwright.train.faults import COURIER, Faults, parse_faults
from meshwright.train.integrity import Damage
from meshwright.train.memory import PeerCopies
from meshwright.train.session import TrainJob, run_rank
from meshwright.transport.key import RunKey

_POLL_S = 0.01
Fence = Callable[[], None]


class GenerationAborted(MeshwrightError):
    """The leader or another node ends this generation; its ranks didn't fail."""


class LocalNode:
    """The ranks of a node, generation after generation.

    Args:
        job: of the run.
        devices: of this node, one rank each.
        node: its number.
        address: by which other nodes reach it.
        remake: returns the job of another plan.
        event: records an event: its kind, and its fields by keyword.
        key: the run's secret, by which every connection is authenticated.
    """

    def __init__(
        self,
        job: TrainJob,
        devices: Devices,
        node: int,
        address: str,
        remake: Callable[[Plan], TrainJob],
        event: Callable[..., None],
        key: RunKey,
    ) -> None:
        self.job, self.devices, self.node, self.address = job, devices, node, address
        self._remake, self._event, self._key = remake, event, key
        self.slots = [devices.slot(index) for index in range(devices.count)]
        self.snapshots: list[tuple[Snapshot, bool]] = []
        """Snapshots in this node's memory, each with whether a rank of this node wrote it."""
        self.interrupts = 0
        """How often the user asked that the run end."""
        self.terminated = False
        """Whether SIGTERM asked for the run's end."""
        self.ranks: GenerationRanks | None = None
        """The running ranks; None between generations."""
        self._listeners: dict[str, socket.socket] = {}
        self._shelf: Helper | None = None
        self._courier: Helper | None = None
        self._disk: DiskWriter | None = None
        self._spare_copies: SpareCopies | None = None
        self._start_courier: Callable[[], Helper]
        self._faults = parse_faults(job.config.recovery.faults)
        self.outcome: Message = {"generation": -1, "outcome": "", "result": None, "failure": None}
        """How the last generation ended here."""

    def report(self) -> Message:
        """Opens listeners and the shelf for another generation; returns this node's report (`messages.NodeReport`)."""
        if self._shelf is None:
            for name in ("store", "shelf", "courier", "disk"):
                if name not in self._listeners:
                    # Fresh ports each generation: connections of the previous one can't reach its successors.
                    self._listeners[name] = listen_at(self.address)
            # The shelf forks with the snapshots of now: it must end before the next generation replaces them.
            self._shelf = start_shelf(
                self._listeners["shelf"], [snapshot for snapshot, _ in self.snapshots], self._key, self._event
            )
        ports = {name: listener.getsockname()[1] for name, listener in self._listeners.items()}
        snapshot_rows = [
            [snapshot.generation, snapshot.step, snapshot.rank, snapshot.ranks, is_local]
            for snapshot, is_local in self.snapshots
        ]
        newest = max(
            (snapshot for snapshot, _ in self.snapshots),
            key=lambda snapshot: (snapshot.step, snapshot.generation),
            default=None,
        )
        resources = {
            "peak": newest.meta.get("peak_flops") if newest is not None else None,
            "available": available_bytes(),
            "link": link_bytes_s(self.address),
        }
        return (
            {"node": self.node, "slots": self.slots, "host": self.address, "ports": ports, "held": snapshot_rows}
            | resources
            | (self.outcome)
        )

    def state(self, order: Message) -> State | None:
        """Returns the state to restore by an order; snapshots on other nodes are read on first use."""
        if order["state"] is None:
            return None
        step, generation, holders = (order["state"][name] for name in ("step", "generation", "places"))
        local_snapshots = {
            snapshot.rank: snapshot
            for snapshot, _ in self.snapshots
            if (snapshot.step, snapshot.generation) == (step, generation)
        }
        shelves = {node: Shelf(address[0], address[1], self._key) for node, address in order["shelves"].items()}
        snapshots = [
            local_snapshots.get(int(rank)) or remote_snapshot(shelves[str(node)], (generation, step, int(rank)))
            for rank, node in sorted(holders.items(), key=lambda item: int(item[0]))
        ]
        return State(step, snapshots, order["state"]["tier"])

    def run(self, order: Message, watch: Callable[[GenerationRanks], None], wake: int, fence: Fence) -> None:
        """Runs this node's ranks of a generation until they end, and sets `outcome`; raises what ``watch`` raises.

        Args:
            order: the leader's (`messages.Order`).
            watch: called some times a second; an exception of it ends the ranks.
            wake: descriptor whose readability calls ``watch`` at once.
            fence: called by ranks before they write; raises once another generation was claimed.
        """
        generation = order["generation"]
        self.outcome = {"generation": generation, "outcome": "fenced", "result": None, "failure": None, "reached": 0}
        job = self._remake(Plan.from_json(order["plan"]))
        state = self.state(order)
        span = self._rank_placement(order)
        share = order["nodes"][str(self.node)]
        devices, copies = self.devices.only(share["slots"]), self._snapshots_per_rank(order)
        ranks = GenerationRanks(job, devices, generation, self.interrupts, span, copies, order["every"], order["disk"])
        self._disk = self._make_disk_writer(order, job, fence) if ranks.disk else None
        peers = order["peers"] if order["every"] else 0
        # Shared by ranks and courier, so created before either is forked.
        copied = PeerCopies(len(share["slots"]), peers) if peers else None
        peer_segments = self._peer_segments(order, peers)
        self._spare_copies = self._start_spare_copies(order)
        error: MeshwrightError | None = None
        self.ranks = ranks
        try:
            if copied is not None:
                segments = {span.first + index: own for index, own in enumerate(ranks.segments)}
                targets = [(peer["host"], peer["courier"]) for peer in self._neighbours(order, range(1, peers + 1))]
                most_bytes = largest_snapshot(job.plan)
                inlet = Inlet(others=peer_segments, most_bytes=most_bytes, key=self._key, refused=self._event)
                faults = partial(Faults, job.run_dir, COURIER - self.node, generation, self._faults)
                self._start_courier = partial(
                    start_courier, self._listeners["courier"], targets, segments, inlet, copied, faults
                )
                self._courier = self._start_courier()
            lost_at = None if order["since"] is None else time.monotonic() - order["since"]
            past = (lost_at, order["peak"], order["sick"], order["damage"] and Damage.from_json(order["damage"]))
            memory = dataclasses.replace(ranks.memory(state, *past), peer_copies=copied, fence=fence)
            ranks.launcher.start(run_rank, dataclasses.replace(job, memory=memory))
            result = ranks.launcher.wait(watch=lambda: watch(ranks), wake=wake)[0]
            self._await_disk_writer(ranks, watch)
            self.outcome |= {"outcome": "finished", "result": result}
        # No failure of these ranks: the outcome stays "fenced".
        except GenerationAborted:
            raise
        except MeshwrightError as failed:
            error = failed
        finally:
            self.interrupts = max(self.interrupts, ranks.launcher.interrupts)
            self.terminated |= ranks.launcher.terminated
            ranks.launcher.cancel()
            ranks.hang.refresh()
            # Helpers write into segments that are collected below: they must end first.
            spare = self._end_helpers()
            if error is not None:
                self.outcome |= {"outcome": "failed", "failure": _failure(error, ranks)}
            self.outcome["reached"] = max((stamp.step for stamp in ranks.hang.last_stamps.values()), default=0)
            self._collect_snapshots(order, ranks, peer_segments, spare)
            self._release(ranks, peer_segments, copied)

    def poll(self, ranks: GenerationRanks) -> list[RankStamp]:
        """Returns the ranks' progress stamps; reports slow ranks, restarts a dead courier and drives the disk writer.

        Raises:
            HangError: when they hang.
        """
        stamps = ranks.hang.poll()
        # A dead courier costs copies, not the run: restart it; it resends the newest snapshots.
        if self._courier is not None and self._courier.died:
            self._event("courier_lost", node=self.node)
            self._courier = self._start_courier()
        if self._disk is not None:
            self._disk.poll(ranks.disk, ranks.layout, ranks.control)
        if self._spare_copies is not None and self._spare_copies.just_done:
            copied = [snapshot.rank for snapshot in self._spare_copies.snapshots()]
            self._event("state_copied", node=self.node, step=self._spare_copies.wanted[0][1], ranks=copied)
        for slow in ranks.slow.poll(stamps):
            coordinates = ranks.layout.coordinates(slow.rank)
            self._event("slow_rank", slow=slow.rank, place=coordinates, share=slow.share, others=slow.others)
        return stamps

    def _make_disk_writer(self, order: Message, job: TrainJob, fence: Fence) -> DiskWriter:
        """Returns the writer of this node's share of checkpoints; the writers of all nodes agree over the first's."""
        ring = sorted(int(node) for node in order["nodes"])
        ring_index, first_node = ring.index(self.node), order["nodes"][str(ring[0])]
        agree = partial(
            StarAgreement,
            ring_index,
            len(ring),
            address=(first_node["host"], first_node["disk"]),
            listener=self._listeners["disk"] if ring_index == 0 else None,
            limit_s=job.config.checkpoint.wait_s,
            run_key=self._key,
            refused=self._event,
        )
        share = Share(node=self.node, first=ring_index == 0, agree=agree, fence=fence)
        root = job.run_dir / "checkpoints"
        return DiskWriter(root, job.config.checkpoint, job_origin(job), self._event, self._faults, share)

    def _await_disk_writer(self, ranks: GenerationRanks, watch: Callable[[GenerationRanks], None]) -> None:
        """Waits until the ended ranks' last checkpoint is written.

        Raises:
            CheckpointError: when that takes too long, or the last checkpoint couldn't be written.
        """
        disk, limit_s = self._disk, self.job.config.checkpoint.wait_s
        if disk is None:
            return
        deadline = time.monotonic() + 2 * limit_s
        disk.poll(ranks.disk, ranks.layout, ranks.control)
        while disk.busy:
            watch(ranks)
            time.sleep(_POLL_S)
            if time.monotonic() > deadline:
                raise CheckpointError(f"the last checkpoint was not written within checkpoint.wait_s = {limit_s:g} s")
        if disk.failed is not None:
            raise CheckpointError(disk.failed)

    def _snapshots_per_rank(self, order: Message) -> int:
        return NODE_COPIES if len(order["nodes"]) > 1 else COPIES

    def _rank_placement(self, order: Message) -> NodeRanks:
        """Returns this node's ranks within the world; with rank 0 on this node, the store's socket goes along."""
        first_rank, alone = order["nodes"][str(self.node)]["first"], len(order["nodes"]) == 1
        listener = self._listeners.pop("store") if first_rank == 0 else None
        host, port = order["store"]
        if alone and listener is not None:
            # Ranks of one node need no network: the store looks up names, which takes long without one.
            listener.close()
            listener = open_store_socket(order["world"])
            host, port = listener.getsockname()[:2]
        return NodeRanks(
            node=self.node,
            nodes=len(order["nodes"]),
            first=first_rank,
            world=order["world"],
            host=host,
            port=port,
            listener=listener,
            interface="" if alone else interface_of(self.address),
        )

    def _neighbours(self, order: Message, offsets: Iterable[int]) -> list[Message]:
        """Returns the shares of the nodes at ``offsets`` after this one in the ring; negative offsets are before it."""
        ring = sorted(int(node) for node in order["nodes"])
        ring_index = ring.index(self.node)
        return [order["nodes"][str(ring[(ring_index + offset) % len(ring)])] for offset in offsets]

    def _peer_segments(self, order: Message, peers: int) -> dict[int, tuple[Segment, ...]]:
        """Returns empty segments for the snapshots of the preceding nodes' ranks, by rank."""
        nodes = self._neighbours(order, range(-peers, 0))
        ranks = [rank for share in nodes for rank in range(share["first"], share["first"] + len(share["slots"]))]
        return {rank: tuple(Segment() for _ in range(held_for_others(peers))) for rank in ranks}

    def _end_helpers(self) -> list[Snapshot]:
        """Ends courier, disk writer and spare copying; returns the spare copies that are complete."""
        spare = self._spare_copies.snapshots() if self._spare_copies is not None else []
        for helper in (self._courier, self._disk, self._spare_copies):
            if helper is not None:
                helper.close()
        self._courier = self._disk = self._spare_copies = None
        return spare

    def _start_spare_copies(self, order: Message) -> SpareCopies | None:
        """Starts copying those snapshots of the restored state that only one other node holds; None without any."""
        holders = ranks_to_copy(order, self.node)
        if not holders:
            return None
        step, generation = order["state"]["step"], order["state"]["generation"]
        shelf_addresses = {rank: order["shelves"][str(node)] for rank, node in sorted(holders.items())}
        return SpareCopies(
            {
                (generation, step, rank): partial(Shelf, address[0], address[1], self._key)
                for rank, address in shelf_addresses.items()
            }
        )

    def _collect_snapshots(
        self,
        order: Message,
        ranks: GenerationRanks,
        peer_segments: dict[int, tuple[Segment, ...]],
        spare: list[Snapshot],
    ) -> None:
        """Keeps the generation's snapshots beside those it restored from, since only these may form a whole state."""
        # Mappings stay valid after their segments are closed below.
        restored_from = (order["state"]["step"], order["state"]["generation"]) if order["state"] else None
        restored = [pair for pair in self.snapshots if (pair[0].step, pair[0].generation) == restored_from]
        local_snapshots = read_snapshots(ranks.all_segments())
        peer_snapshots = read_snapshots(entry for segments in peer_segments.values() for entry in segments)
        self.snapshots = [
            *restored,
            *((entry, True) for entry in local_snapshots),
            *((entry, False) for entry in (*spare, *peer_snapshots)),
        ]

    def _release(
        self, ranks: GenerationRanks, peer_segments: dict[int, tuple[Segment, ...]], copied: PeerCopies | None
    ) -> None:
        self.ranks = None
        ranks.close()
        for segment in (entry for segments in peer_segments.values() for entry in segments):
            segment.close()
        if copied is not None:
            copied.close()
        self.clear()

    def clear(self) -> None:
        """Ends the shelf and closes the listeners of `report`."""
        if self._shelf is not None:
            self._shelf.close()
            self._shelf = None
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()


def _failure(error: MeshwrightError, ranks: GenerationRanks) -> Message:
    """Returns a failure as `messages.Failure`."""
    rank = ranks.blamed(error)
    stamp = ranks.hang.last_stamps.get(rank)
    failures = ranks.launcher.failures
    return {
        "error": type(error).__name__ if not isinstance(error, HangError) else "LaunchError",
        "text": str(error),
        "rank": rank,
        "place": ranks.launcher.label(rank) if ranks.launcher.label is not None and rank >= 0 else "",
        "echo": bool(failures) and failures[0].is_echo,
        "hang": isinstance(error, HangError),
        "raised": ranks.raised,
        "phase": stamp.phase if stamp else "start",
        "step": stamp.step if stamp else 0,
        "at": time.time(),
    }
