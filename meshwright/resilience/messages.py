"""Messages between the processes that run the nodes of a run: frozen records, checked field by field when decoded.

On a run of one node the same records pass from function to function, and none leaves the process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.records import RecordCodec, RecordError
from meshwright.spec.plan import Plan
from meshwright.train.damage import Damage, Element
from meshwright.train.outcome import TrainOutcome
from meshwright.train.stage_times import RankTime

VERSION = 7
"""Version of the messages below; supervisors of different versions refuse each other's."""
Device = tuple[int, int]
"""A node and the number of one of its devices."""


class Address(NamedTuple):
    """Host and port of a listener."""

    host: str
    port: int


class SnapshotRecord(NamedTuple):
    """A snapshot in a node's memory."""

    generation: int
    step: int
    rank: int
    """The rank that wrote it."""
    ranks: int
    """How many ranks wrote snapshots of this step."""
    is_local: bool
    """Whether a rank of this node wrote it."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Ports on which a node listens for a generation."""

    store: int
    snapshots: int
    courier: int
    disk: int


@dataclass(frozen=True, kw_only=True)
class NodeFailure:
    """The first failure of a node's ranks."""

    node: int
    error: str
    """Name of the error's class."""
    text: str
    rank: int
    """The rank that failed first; -1 when none stands out."""
    coordinates: str
    """Of that rank in the mesh."""
    is_echo: bool
    """Whether it failed only because a peer had."""
    is_hang: bool
    raised: bool
    """Whether it was an exception in the rank, which a restart may well meet again."""
    is_shortage: bool
    """Whether its memory ran out: the device's, or the host's, for which the kernel killed it."""
    phase: str
    step: int
    time: float
    """Seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class GenerationEnd:
    """How a generation ended on a node; neither outcome nor failure when it was aborted."""

    generation: int = -1
    outcome: TrainOutcome | None = None
    failure: NodeFailure | None = None
    furthest_step: int = 0
    """The furthest step of any of its ranks."""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What a node has, and how the last generation ended there (`LocalNode.report`)."""

    node: int
    session: str
    """Identifies its supervisor's process: a restarted one has another."""
    slots: tuple[int, ...]
    """Its devices, one rank each."""
    host: str
    ports: Ports | None
    """None on a run of one node, which listens nowhere."""
    snapshots: tuple[SnapshotRecord, ...]
    peak_flops: float | None
    """FLOP/s of one device, as ranks measured it."""
    available_bytes: int
    """Memory that it can give."""
    link_bytes_s: float | None
    """Rate of its network interface; None when unknown."""
    end: GenerationEnd

    def __post_init__(self) -> None:
        """Refuses another node's failure."""
        if self.end.failure is not None and self.end.failure.node != self.node:
            raise ValueError(f"node {self.node} reports a failure of node {self.end.failure.node}")

    def address(self, port: str) -> Address:
        """Returns the address of one of its listeners, by its name in `Ports`; port 0 where it has none."""
        return Address(self.host, getattr(self.ports, port) if self.ports is not None else 0)


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    """The ranks of one node in a generation."""

    node: int
    first_rank: int
    slots: tuple[int, ...]
    """Device of each rank."""
    courier: Address
    disk: Address

    @property
    def ranks(self) -> range:
        """Its ranks."""
        return range(self.first_rank, self.first_rank + len(self.slots))


@dataclass(frozen=True, kw_only=True)
class StateLocation:
    """A state in the nodes' memory that is complete over all ranks."""

    step: int
    generation: int
    holders: Mapping[int, int]
    """By rank, a node that holds its snapshot."""
    tier: str
    """``memory`` where each rank's own node holds its snapshot, else ``peer``."""
    single_copies: tuple[int, ...] = ()
    """Ranks whose snapshot only one node holds."""


@dataclass(frozen=True, kw_only=True)
class CopyPlan:
    """Which copies of the state a generation makes, the same on all nodes."""

    every: int
    """Steps between snapshots; 0 for none."""
    disk: bool
    """Whether checkpoints are written beside the training, from a further copy."""
    peers: int = 0
    """Other nodes that hold each snapshot."""


@dataclass(frozen=True, kw_only=True)
class RewindState:
    """What a run was rewound for."""

    anomalous_step: int = 0
    """Step up to whose batches the data is skipped; 0 for none."""
    damage: Damage | None = None
    """The damage that caused the last rewind."""
    floor: int = -1
    """Newest generation whose states in memory don't count, because the run was rewound from them."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The leader's order for a generation: ranks, plan, state and copies."""

    generation: int
    plan: Plan
    shares: tuple[NodeShare, ...]
    """Of the nodes with ranks, by node."""
    members: tuple[int, ...]
    """All connected nodes."""
    store: Address
    """Of the ranks' rendezvous."""
    snapshot_servers: Mapping[int, Address] = field(default_factory=dict)
    """Where each node's snapshots are read."""
    state: StateLocation | None = None
    """The state to restore; None to restore from disk or start anew."""
    peak_flops: float | None = None
    lost_for_s: float | None = None
    """Seconds since the failure of the previous ranks was noticed; None without one."""
    rewind: RewindState = RewindState()
    copies: CopyPlan
    failures_without_progress: int = 0
    """Failures in a row without a new step between them."""

    def __post_init__(self) -> None:
        """Refuses an order whose fields contradict each other."""
        nodes = [share.node for share in self.shares]
        if not nodes or nodes != sorted(set(nodes)) or not set(nodes) <= set(self.members):
            raise ValueError(f"nodes {nodes} of members {list(self.members)}")
        ranks = [rank for share in sorted(self.shares, key=lambda share: share.first_rank) for rank in share.ranks]
        if ranks != list(range(self.plan.layout.world)) or not all(share.slots for share in self.shares):
            raise ValueError(f"{len(ranks)} ranks for a layout of {self.plan.layout.world}")
        if self.state is not None and not set(self.state.holders.values()) <= self.snapshot_servers.keys():
            raise ValueError("a state at a node without a snapshot server")
        if not 0 <= self.copies.peers < len(nodes):
            raise ValueError(f"copies at {self.copies.peers} of {len(nodes)} nodes")

    @property
    def nodes(self) -> list[int]:
        """Nodes with ranks, in the order of the ring."""
        return [share.node for share in self.shares]

    @property
    def devices(self) -> tuple[Device, ...]:
        """Node and number of each rank's device."""
        return tuple((share.node, slot) for share in self.shares for slot in share.slots)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.plan.layout.world

    @property
    def peers(self) -> int:
        """Other nodes that receive each snapshot."""
        return self.copies.peers if self.copies.every else 0

    def share(self, node: int) -> NodeShare:
        """Returns the share of a node with ranks."""
        return next(share for share in self.shares if share.node == node)

    def neighbours(self, node: int, first: int, last: int) -> list[NodeShare]:
        """Returns the shares from ``first`` to ``last`` places after a node in the ring; negative is before it."""
        # A member without ranks stands before the first node of the ring.
        index = self.nodes.index(node) if node in self.nodes else -1
        return [self.shares[(index + offset) % len(self.shares)] for offset in range(first, last + 1)]


@dataclass(frozen=True)
class Beat:
    """A sign of life (`peers.BEAT_S`)."""


@dataclass(frozen=True)
class Busy:
    """The sender will be silent for at most ``seconds``, because it is about to block."""

    seconds: float


@dataclass(frozen=True)
class Ready:
    """A node is ready for another generation."""

    report: NodeReport


@dataclass(frozen=True)
class Start:
    """The leader starts a generation: each node forks its ranks."""

    order: Order


@dataclass(frozen=True)
class Reconfigure:
    """The leader ends a generation in order: ranks stop after a step that they agree on."""

    generation: int


@dataclass(frozen=True)
class Fence:
    """The leader aborts a generation: each node kills its ranks and reports `Ready`."""

    generation: int


@dataclass(frozen=True)
class End:
    """The run has ended."""

    outcome: TrainOutcome | None
    """None for an error."""
    error: str


@dataclass(frozen=True)
class ComputeTimes:
    """What the ranks of a follower computed, which the leader's planner asks for."""

    generation: int
    times: tuple[RankTime, ...]
    """Of the node's ranks, in their order."""

    def __post_init__(self) -> None:
        """Refuses times that no step takes."""
        seconds = [seconds for rank_time in self.times for seconds in (rank_time.busy_s, rank_time.step_s)]
        if not all(math.isfinite(value) and value > 0.0 for value in seconds):
            raise ValueError("a rank's seconds of a step must be finite and above 0")


Message = Beat | Busy | Ready | Start | Reconfigure | ComputeTimes | Fence | End


@dataclass(frozen=True)
class Envelope:
    """A message with its version."""

    version: int
    message: Message

    def __post_init__(self) -> None:
        """Refuses another version."""
        if self.version != VERSION:
            # `RecordCodec` turns the ValueError into a RecordError, which closes the connection.
            raise ValueError(f"messages of version {self.version}, this program speaks {VERSION}")


def _decode_plan(values: Any) -> Plan:
    """Returns the plan of `Plan.to_json`'s values.

    Raises:
        RecordError: for anything else.
    """
    try:
        return Plan.from_json(values)
    except (MeshwrightError, AttributeError) as error:
        raise RecordError(f"not a plan: {error}") from None


_CONTENTS = (
    *(Address, SnapshotRecord, Ports, NodeFailure, GenerationEnd, NodeReport, NodeShare, StateLocation, CopyPlan),
    *(RewindState, Order, TrainOutcome, Damage, Element, RankTime),
)
CODEC = RecordCodec(
    (Beat, Busy, Ready, Start, Reconfigure, ComputeTimes, Fence, End, Envelope, *_CONTENTS),
    customs={Plan: (Plan.to_json, _decode_plan)},
)
"""Messages to JSON and back."""


def encode(message: Message) -> bytes:
    """Returns a message as bytes."""
    return CODEC.dumps(Envelope(VERSION, message))


def decode(data: bytes | bytearray) -> Message:
    """Returns the message of `encode`'s bytes.

    Raises:
        RecordError: for anything else.
    """
    return CODEC.loads_as(Envelope, data).message
