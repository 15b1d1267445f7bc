"""What a supervisor does on its own node of a run over several: ranks, courier, shelf, and what they leave behind."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial

from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.remote import Shelf, remote
from meshwright.checkpoint.snapshot import Segment, Snapshot, State, read_snapshots
from meshwright.checkpoint.star import StarAgreement
from meshwright.data.tokens import TokenSet
from meshwright.errors import CheckpointError, MeshwrightError
from meshwright.launch.contract import NodeRanks
from meshwright.launch.devices import Devices
from meshwright.launch.rendezvous import interface_of, link_bytes_s, listen_at, open_store_socket
from meshwright.monitor.progress import RankStamp
from meshwright.resilience.courier import Helper, Inlet, start_courier, start_shelf
from meshwright.resilience.disk import DiskWriter, Share
from meshwright.resilience.generation_ranks import GenerationRanks
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
from meshwright.train.memory import Copied
from meshwright.train.session import TrainJob, run_rank
from meshwright.transport.key import RunKey

_POLL_S = 0.01
Fence = Callable[[], None]


class GenerationAborted(MeshwrightError):
    """Ranks are to end because another node, or the leader, says so; no failure of theirs."""


class LocalNode:
    """The ranks of a node, generation after generation.

    Args:
        job: of the run.
        devices: of this node, one rank each.
        node: its number.
        address: by which other nodes reach it.
        remake: gives the job of another plan.
        event: takes kind and data of what happened.
        key: of the run; every connection begins with it.
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
        self.slots = [devices.slot(at) for at in range(devices.count)]
        self.held: list[tuple[Snapshot, bool]] = []
        """Snapshots here, and whether ranks of this node wrote them."""
        self.interrupts = 0
        """How often the user asked that the run end."""
        self.terminated = False
        """Whether it was asked by SIGTERM."""
        self.ranks: GenerationRanks | None = None
        """The ranks that run."""
        self._listeners: dict[str, socket.socket] = {}
        self._shelf: Helper | None = None
        self._courier: Helper | None = None
        self._disk: DiskWriter | None = None
        self._spare: SpareCopies | None = None
        self._send: Callable[[], Helper]
        self._faults = parse_faults(job.config.recovery.faults)
        self.last: Message = {"generation": -1, "outcome": "", "result": None, "failure": None}
        """How the last generation ended here."""

    def report(self) -> Message:
        """Makes ready for another generation, and returns what the leader needs to know for it."""
        if self._shelf is None:
            for name in ("store", "shelf", "courier", "disk"):
                if name not in self._listeners:
                    self._listeners[name] = listen_at(self.address)
            self._shelf = start_shelf(self._listeners["shelf"], [one for one, _ in self.held], self._key, self._event)
        ports = {name: listener.getsockname()[1] for name, listener in self._listeners.items()}
        held = [[one.generation, one.step, one.rank, one.ranks, own] for one, own in self.held]
        newest = max((one for one, _ in self.held), key=lambda one: (one.step, one.generation), default=None)
        more = {
            "peak": newest.meta.get("peak_flops") if newest is not None else None,
            "available": available_bytes(),
            "link": link_bytes_s(self.address),
        }
        return (
            {"node": self.node, "slots": self.slots, "host": self.address, "ports": ports, "held": held}
            | more
            | (self.last)
        )

    def state(self, order: Message) -> State | None:
        """Returns the state that an order says to go on from; what lies elsewhere is opened when it is needed."""
        if order["state"] is None:
            return None
        step, generation, places = (order["state"][name] for name in ("step", "generation", "places"))
        here = {one.rank: one for one, _ in self.held if (one.step, one.generation) == (step, generation)}
        shelves = {node: Shelf(address[0], address[1], self._key) for node, address in order["shelves"].items()}
        found = [
            here.get(int(rank)) or remote(shelves[str(node)], (generation, step, int(rank)))
            for rank, node in sorted(places.items(), key=lambda item: int(item[0]))
        ]
        return State(step, found, order["state"]["tier"])

    def run(self, order: Message, watch: Callable[[GenerationRanks], None], wake: int, fence: Fence) -> None:
        """Runs this node's ranks of a generation to their end, whatever it is; `last` says how it came.

        Args:
            order: the leader's.
            watch: called some times a second; what it raises ends the ranks.
            wake: descriptor that calls for it at once.
            fence: asked by ranks before they write.

        Raises:
            Orders: as ``watch`` raises it.
        """
        generation = order["generation"]
        self.last = {"generation": generation, "outcome": "fenced", "result": None, "failure": None, "reached": 0}
        job = self._remake(Plan.from_json(order["plan"]))
        state = self.state(order)
        place = self._place(order)
        mine = order["nodes"][str(self.node)]
        devices, copies = self.devices.only(mine["slots"]), self._copies(order)
        ranks = GenerationRanks(job, devices, generation, self.interrupts, place, copies, order["every"], order["disk"])
        self._disk = self._writer(order, job, fence) if ranks.disk else None
        peers = order["peers"] if order["every"] else 0
        copied = Copied(len(mine["slots"]), peers) if peers else None
        others = self._others(order, peers)
        self._spare = self._spare_copies(order)
        error: MeshwrightError | None = None
        self.ranks = ranks
        try:
            if copied is not None:
                own = {place.first + at: segments for at, segments in enumerate(ranks.segments)}
                to = [(one["host"], one["courier"]) for one in self._neighbours(order, range(1, peers + 1))]
                most = largest_snapshot(job.plan)
                inlet = Inlet(others=others, most_bytes=most, key=self._key, refused=self._event)
                faults = partial(Faults, job.run_dir, COURIER - self.node, generation, self._faults)
                self._send = partial(start_courier, self._listeners["courier"], to, own, inlet, copied, faults)
                self._courier = self._send()
            lost_at = None if order["since"] is None else time.monotonic() - order["since"]
            past = (lost_at, order["peak"], order["sick"], order["damage"] and Damage.from_json(order["damage"]))
            memory = dataclasses.replace(ranks.memory(state, *past), copied=copied, fence=fence)
            ranks.launcher.start(run_rank, dataclasses.replace(job, memory=memory))
            result = ranks.launcher.wait(watch=lambda: watch(ranks), wake=wake)[0]
            self._written(ranks, watch)
            self.last |= {"outcome": "finished", "result": result}
        except GenerationAborted:
            raise
        except MeshwrightError as failed:
            error = failed
        finally:
            self.interrupts = max(self.interrupts, ranks.launcher.interrupts)
            self.terminated |= ranks.launcher.terminated
            ranks.launcher.cancel()
            ranks.hang.refresh()
            spare = self._end_helpers()
            if error is not None:
                self.last |= {"outcome": "failed", "failure": _failure(error, ranks)}
            self.last["reached"] = max((one.step for one in ranks.hang.last.values()), default=0)
            self._take_over(order, ranks, others, spare)
            self._let_go(ranks, others, copied)

    def look(self, ranks: GenerationRanks) -> list[RankStamp]:
        """Looks at where the ranks stand, and returns it; tells of those that are slow, and sees to the courier.

        Raises:
            HangError: when they hang.
        """
        found = ranks.hang.look()
        if self._courier is not None and self._courier.died:
            self._event("courier_lost", node=self.node)
            self._courier = self._send()
        if self._disk is not None:
            self._disk.look(ranks.disk, ranks.layout, ranks.control)
        if self._spare is not None and self._spare.just_done:
            copied = [one.rank for one in self._spare.snapshots()]
            self._event("state_copied", node=self.node, step=self._spare.wanted[0][1], ranks=copied)
        for slow in ranks.slow.look(found):
            place = ranks.layout.place(slow.rank)
            self._event("slow_rank", slow=slow.rank, place=place, share=slow.share, others=slow.others)
        return found

    def _writer(self, order: Message, job: TrainJob, fence: Fence) -> DiskWriter:
        """Returns what writes this node's share of checkpoints; the writers of all nodes agree at the first one's."""
        ring = sorted(int(node) for node in order["nodes"])
        at, head = ring.index(self.node), order["nodes"][str(ring[0])]
        agree = partial(
            StarAgreement,
            at,
            len(ring),
            address=(head["host"], head["disk"]),
            listener=self._listeners["disk"] if at == 0 else None,
            limit_s=job.config.checkpoint.wait_s,
            run_key=self._key,
            refused=self._event,
        )
        share = Share(node=self.node, first=at == 0, agree=agree, fence=fence)
        data = TokenSet.open(job.data_dir).fingerprint
        origin = Origin(model=job.fingerprint, data=data, config=job.config.to_dict())
        root = job.run_dir / "checkpoints"
        return DiskWriter(root, job.config.checkpoint, origin, self._event, self._faults, share)

    def _written(self, ranks: GenerationRanks, watch: Callable[[GenerationRanks], None]) -> None:
        """Waits until all that the ranks left for the disk is written, once they have ended.

        Raises:
            CheckpointError: when that takes too long, or the last checkpoint couldn't be written.
        """
        disk, limit_s = self._disk, self.job.config.checkpoint.wait_s
        if disk is None:
            return
        end = time.monotonic() + 2 * limit_s
        disk.look(ranks.disk, ranks.layout, ranks.control)
        while disk.busy:
            watch(ranks)
            time.sleep(_POLL_S)
            if time.monotonic() > end:
                raise CheckpointError(f"the last checkpoint was not written within checkpoint.wait_s = {limit_s:g} s")
        if disk.failed is not None:
            raise CheckpointError(disk.failed)

    def _copies(self, order: Message) -> int:
        return NODE_COPIES if len(order["nodes"]) > 1 else COPIES

    def _place(self, order: Message) -> NodeRanks:
        """Returns where this node's ranks stand, and gives the launcher the store's socket where rank 0 is here."""
        first, alone = order["nodes"][str(self.node)]["first"], len(order["nodes"]) == 1
        listener = self._listeners.pop("store") if first == 0 else None
        host, port = order["store"]
        if alone and listener is not None:
            # Ranks of one node need no network: the store looks up names, which takes long without one.
            listener.close()
            listener = open_store_socket(order["world"])
            host, port = listener.getsockname()[:2]
        return NodeRanks(
            node=self.node,
            nodes=len(order["nodes"]),
            first=first,
            world=order["world"],
            host=host,
            port=port,
            listener=listener,
            interface="" if alone else interface_of(self.address),
        )

    def _neighbours(self, order: Message, ways: Iterable[int]) -> list[Message]:
        """Returns the nodes so many places after this one in the ring; before it for less than 0."""
        ring = sorted(int(node) for node in order["nodes"])
        at = ring.index(self.node)
        return [order["nodes"][str(ring[(at + way) % len(ring)])] for way in ways]

    def _others(self, order: Message, peers: int) -> dict[int, tuple[Segment, ...]]:
        """Returns what the snapshots of the ranks of the nodes before are put in, by rank."""
        nodes = self._neighbours(order, range(-peers, 0))
        ranks = [rank for one in nodes for rank in range(one["first"], one["first"] + len(one["slots"]))]
        return {rank: tuple(Segment() for _ in range(held_for_others(peers))) for rank in ranks}

    def _end_helpers(self) -> list[Snapshot]:
        """Ends what works beside the ranks; returns the second copies that were made."""
        spare = self._spare.snapshots() if self._spare is not None else []
        for helper in (self._courier, self._disk, self._spare):
            if helper is not None:
                helper.close()
        self._courier = self._disk = self._spare = None
        return spare

    def _spare_copies(self, order: Message) -> SpareCopies | None:
        """Begins to copy what of the state to go on from one other node holds alone; None where there is nothing."""
        wanted = ranks_to_copy(order, self.node)
        if not wanted:
            return None
        step, generation = order["state"]["step"], order["state"]["generation"]
        places = {rank: order["shelves"][str(node)] for rank, node in sorted(wanted.items())}
        return SpareCopies(
            {(generation, step, rank): partial(Shelf, at[0], at[1], self._key) for rank, at in places.items()}
        )

    def _take_over(
        self, order: Message, ranks: GenerationRanks, others: dict[int, tuple[Segment, ...]], spare: list[Snapshot]
    ) -> None:
        """Keeps what the generation left beside what it began from, which alone may be whole."""
        began = (order["state"]["step"], order["state"]["generation"]) if order["state"] else None
        kept = [pair for pair in self.held if (pair[0].step, pair[0].generation) == began]
        own = read_snapshots(ranks.all_segments())
        peers = read_snapshots(one for segments in others.values() for one in segments)
        self.held = [*kept, *((one, True) for one in own), *((one, False) for one in (*spare, *peers))]

    def _let_go(self, ranks: GenerationRanks, others: dict[int, tuple[Segment, ...]], copied: Copied | None) -> None:
        self.ranks = None
        ranks.close()
        for segment in (one for segments in others.values() for one in segments):
            segment.close()
        if copied is not None:
            copied.close()
        self.clear()

    def clear(self) -> None:
        """Ends the shelf and closes what was made ready."""
        if self._shelf is not None:
            self._shelf.close()
            self._shelf = None
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()


def _failure(error: MeshwrightError, ranks: GenerationRanks) -> Message:
    """Returns what the leader needs to know of a failure."""
    rank = ranks.blamed(error)
    at = ranks.hang.last.get(rank)
    failures = ranks.launcher.failures
    return {
        "error": type(error).__name__ if not isinstance(error, HangError) else "LaunchError",
        "text": str(error),
        "rank": rank,
        "place": ranks.launcher.label(rank) if ranks.launcher.label is not None and rank >= 0 else "",
        "echo": bool(failures) and failures[0].is_echo,
        "hang": isinstance(error, HangError),
        "raised": ranks.raised,
        "phase": at.phase if at else "start",
        "step": at.step if at else 0,
        "at": time.time(),
    }
