"""Messages between sites, the outer server and its shards: a closed list of records, as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.records import RecordCodec
from meshwright.sites.boxes import Box
from meshwright.sites.settings import Setting

VERSION = 1
"""Of these messages; a site of another version is refused by it."""
MOST_HELLO_BYTES = 64 << 20
"""Largest message: the names and shapes of a model's weights, or the boxes of a rank."""
MOST_SHARDS = 64
SEED_ROUND = -1
"""Round of the first weights, which one site hands over whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """What a site trains: sites of another model are refused."""

    model: str
    """Fingerprint of the architecture."""
    dtype: str
    """Of the weights: float32 or float64."""
    shapes: dict[str, tuple[int, ...]]
    """Shape of each trained weight, by name."""
    settings: dict[str, Setting] = field(default_factory=dict)
    """`ServerSettings.agreed`, and rows of a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """Site to coordinator: dials in."""

    version: int
    site: int
    """Its number, from 0."""
    run: str
    """Names the site's run, so that no other takes its number while it is live."""
    declaration: Declaration
    previous_session: int
    """Session that was lost in this process; 0 for none."""
    previous_round: int
    """The round that was being committed in it; below -1 for none."""
    probe: bool = False
    """Whether the site only asks whether it could dial in, before it starts its ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """Coordinator to site: what it needs for a session."""

    session: int
    version: int
    """Version to pull; -1 where the site must hand over the first weights."""
    ports: tuple[int, ...]
    """Port of each shard, on the coordinator's host."""
    grace_s: float
    committed: bool
    """Whether the round of the lost session was taken in, and `Released` follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """The server to a site: what it asked for can't be."""

    why: str
    final: bool
    """Whether it is in vain to ask again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alive:
    """Site to coordinator: it still trains."""

    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """Site to coordinator: a round's movement is staged on all shards."""

    session: int
    round: int
    base: int
    """Version that the round began from."""
    tokens: float
    loss: float
    steps: int
    raw_bytes: int
    sent_bytes: int
    leaves: bool
    """Whether the site ends and takes no further version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Released:
    """Coordinator to site: the version to go on from."""

    round: int
    version: int
    staleness: int
    """Versions that were made between the round's base and the one that it went into."""
    sites: int
    """Live sites."""
    waited_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodbye:
    """Site to coordinator: it ends."""

    session: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """Rank to shard: boxes of a movement, whose bytes follow as a parcel."""

    site: int
    session: int
    round: int
    format: str
    """``raw``, or the number format of blocks."""
    boxes: tuple[tuple[str, Box], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pull:
    """Rank to shard: asks for boxes of a version, which come as a parcel after `Done`."""

    site: int
    session: int
    version: int
    boxes: tuple[tuple[str, Box], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """Shard to rank or coordinator: it is done."""

    value: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Declare:
    """Coordinator to shard: the weights, and the folder of a saved state to read; empty for none."""

    shapes: dict[str, tuple[int, ...]]
    dtype: str
    folder: str
    version: int
    saved_shards: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Admit:
    """Coordinator to shard: a site's session; those before it end."""

    site: int
    session: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitStaged:
    """Coordinator to shard: asks whether a round is staged whole, and keeps it until it is applied."""

    site: int
    session: int
    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Apply:
    """Coordinator to shard: makes a version of movements."""

    version: int
    movements: tuple[tuple[int, int, int, float], ...]
    """(site, session, round, weight) in the order of their sum."""
    momentum_every: int
    """Movements between two updates of the momentum; 0 for one in each version."""
    takes_momentum: bool
    lr: float
    momentum: float
    nesterov: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """Coordinator to shard: the present version stays readable for a site, until its next."""

    site: int
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """Coordinator to shard: a site was forgotten; its version and open round may go."""

    site: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """Coordinator to shard: writes its state into a folder."""

    folder: str


CODEC = RecordCodec(
    (
        *(Declaration, Hello, Welcome, Refused, Alive, Commit, Released, Goodbye, Push, Pull, Done),
        *(Declare, Admit, CommitStaged, Apply, Pin, Drop, Save),
    )
)
