"""What supervisors of several nodes say to each other: frozen records, checked field by field as they come in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from meshwright.records import RecordCodec

VERSION = 3
"""Of the messages below; supervisors of another version don't talk."""


class Ports(TypedDict):
    """Where a node listens for a generation."""

    store: int
    shelf: int
    courier: int
    disk: int


class Failure(TypedDict):
    """How a node's ranks failed."""

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
    """What a node says of itself (`LocalNode.report`)."""

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
    """What an order says of a node with ranks."""

    first: int
    slots: list[int]
    host: str
    courier: int
    disk: int


class StatePlaces(TypedDict):
    """The state to go on from, and which node has each rank's snapshot."""

    step: int
    generation: int
    places: dict[str, int]
    tier: str
    alone: list[int]
    """Ranks whose snapshot no second node holds."""


class Order(TypedDict):
    """What the leader says of a generation (`orders.compose`, `orders.copies`)."""

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
    """A sign of life."""


@dataclass(frozen=True)
class Busy:
    """The sender will be silent, for so many seconds at most."""

    seconds: float


@dataclass(frozen=True)
class Ready:
    """A node is ready for another generation."""

    session: str
    """Of its supervisor's process."""
    report: NodeReport


@dataclass(frozen=True)
class Start:
    """The leader has a generation's ranks started."""

    order: Order


@dataclass(frozen=True)
class Reconfigure:
    """Ranks are to end after a step that they agree on."""

    generation: int


@dataclass(frozen=True)
class Fence:
    """Ranks are to be ended now."""

    generation: int


@dataclass(frozen=True)
class End:
    """The run has ended."""

    result: dict[str, Any] | None
    """What rank 0 returned; None for an error."""
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
