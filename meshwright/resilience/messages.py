"""Messages between the supervisors of several nodes: frozen records, checked field by field when decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from meshwright.records import RecordCodec

VERSION = 3
"""Version of the messages below; supervisors of different versions refuse each other's."""


class Ports(TypedDict):
    """Ports on which a node listens for a generation."""

    store: int
    shelf: int
    courier: int
    disk: int


class Failure(TypedDict):
    """The first failure of a node's ranks."""

    error: str
    text: str
    rank: int
    place: str
    echo: bool
    hang: bool
    raised: bool
    phase: str
    step: int
    at: float


class NodeReport(TypedDict):
    """A node's report to the leader (`LocalNode.report`)."""

    node: int
    slots: list[int]
    host: str
    ports: Ports
    held: list[list[int | bool]]
    """Generation, step, rank and ranks of each snapshot, and whether the node's own ranks wrote it."""
    peak: float | None
    available: int
    link: float | None
    generation: int
    outcome: str
    result: dict[str, Any] | None
    failure: Failure | None
    reached: NotRequired[int]


class NodeShare(TypedDict):
    """The share of an order that concerns one node with ranks."""

    first: int
    slots: list[int]
    host: str
    courier: int
    disk: int


class StatePlaces(TypedDict):
    """The state to restore, and the node that holds each rank's snapshot."""

    step: int
    generation: int
    places: dict[str, int]
    tier: str
    alone: list[int]
    """Ranks whose snapshot only one node holds."""


class Order(TypedDict):
    """The leader's order for a generation (`orders.compose`, `orders.copies`)."""

    generation: int
    plan: dict[str, Any]
    since: float | None
    state: StatePlaces | None
    peak: float | None
    world: int
    nodes: dict[str, NodeShare]
    members: list[int]
    store: list[str | int]
    shelves: dict[str, list[str | int]]
    sick: int
    damage: dict[str, Any] | None
    floor: int
    every: int
    disk: bool
    peers: int


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

    session: str
    """Identifies its supervisor's process: a restarted one has another."""
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

    result: dict[str, Any] | None
    """Rank 0's result; None for an error."""
    error: str


Said = Beat | Busy | Ready | Start | Reconfigure | Fence | End


@dataclass(frozen=True)
class Envelope:
    """A message with its version."""

    version: int
    message: Said

    def __post_init__(self) -> None:
        """Refuses another version."""
        if self.version != VERSION:
            # `RecordCodec` turns the ValueError into a RecordError, which closes the connection.
            raise ValueError(f"messages of version {self.version}, this program speaks {VERSION}")


CODEC = RecordCodec((Beat, Busy, Ready, Start, Reconfigure, Fence, End, Envelope))
"""Messages to JSON and back."""


def encode(message: Said) -> bytes:
    """Returns a message as bytes."""
    return CODEC.dumps(Envelope(VERSION, message))


def decode(data: bytes | bytearray) -> Said:
    """Returns the message of `encode`'s bytes.

    Raises:
        RecordError: for anything else.
    """
    return CODEC.loads_as(Envelope, data).message
