"""Settings of what a run shows and records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.config import Config
from meshwright.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorConfig(Config):
    """What a run shows on the screen and writes beside metrics.jsonl and events.jsonl, which are always written."""

    every: int = 10
    """Steps between two lines on the screen and between two points in TensorBoard; metrics.jsonl has every step."""
    display: Literal["auto", "live", "plain", "none"] = "auto"
    """live: a panel that redraws; plain: a line every few steps; auto: live on a terminal, plain elsewhere."""
    tensorboard: bool = True
    """Whether tensorboard/ is written in the run directory."""
    report: bool = True
    """Whether report.html is written at the end of the run."""
    wait_s: float = 1.0
    """Seconds that a rank waits before the display says for what; plain lines say so after ten times as long."""
    drift_bound: float = 0.25
    """Relative difference between planned and measured from which a part counts as drifted."""

    def check(self) -> None:
        """Refuses intervals and bounds that aren't positive."""
        if self.every < 1:
            raise ConfigError(f"monitor.every = {self.every}: it counts steps, write at least 1; --monitor.every 10")
        for name in ("wait_s", "drift_bound"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"monitor.{name} = {getattr(self, name)}: it must be more than 0")
