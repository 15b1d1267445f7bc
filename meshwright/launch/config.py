"""Settings of a launch: the limits of every wait."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config import Config
from meshwright.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig(Config):
    """How ranks are started and how long anything about them may take."""

    grace_s: float = 3.0
    """Seconds between the signal that ends the ranks of a failed launch and the one that kills them."""
    stop_s: float = 600.0
    """Seconds that ranks get to write a checkpoint and end after the first Ctrl-C; then they are killed."""
    group_s: float = 60.0
    """Seconds that ranks wait for each other when the process group forms."""
    collective_s: float = 600.0
    """Seconds that one collective may take before the rank that waits for it fails."""
    owner_s: float = 0.0
    """Seconds to wait for the end of another command that trains in the same run directory; 0 refuses at once."""
    network: str = ""
    """What is between the nodes, for the plan: a name of the catalogue's, as ``ethernet-25g`` or ``8xinfiniband-ndr``;
    the usual network of such nodes when empty. A calibration over the same nodes measures it instead."""
    keep_memory: bool = True
    """On CPU ranks, keep freed tensor memory in the process instead of handing it back after each operation."""

    def check(self) -> None:
        """Raises `ConfigError` for a limit that isn't above zero."""
        if not self.owner_s >= 0:
            raise ConfigError(f"launch.owner_s = {self.owner_s}: give seconds, or 0 to refuse at once")
        for name in ("grace_s", "stop_s", "group_s", "collective_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"launch.{name} = {value}: every wait has a limit above 0 seconds; write 60, say")
