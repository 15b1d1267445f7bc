"""Settings of the outer server: how versions are made, and what sites must agree on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Mode = Literal["sync", "async", "bounded"]
Setting = bool | int | float | str
"""A value of a recipe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """How movements of sites become versions of the outer weights."""

    mode: Mode = "sync"
    """``sync``: a version is the mean of several sites' rounds; ``async``: each round makes a version when it comes;
    ``bounded``: as ``async``, and a site that is far ahead of the slowest waits."""
    sites: int = 1
    """Number of sites among which rows are shared; more can't dial in."""
    lr: float = 0.7
    momentum: float
    nesterov: bool = True
    quorum: int = 1
    """``sync``: sites whose rounds start the grace window; ``async`` and ``bounded`` don't wait."""
    grace_s: float = 30.0
    """Longest wait for further sites once a quorum has come, and silence after which a site is forgotten."""
    staleness: int = 2
    """``bounded``: rounds that a site may be ahead of the slowest live one when it starts a round."""
    momentum_every: int = 1
    """``async`` and ``bounded``: movements between two updates of the momentum (N of delayed Nesterov)."""

    def agreed(self) -> dict[str, Setting]:
        """Returns what every site must have set alike, by its name in a recipe."""
        values = asdict(self)
        return {f"outer.{name}": value for name, value in values.items() if name not in ("quorum", "grace_s")}
