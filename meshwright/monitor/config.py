"""Settings of what a run shows and records."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, Self

from meshwright.config import Config
from meshwright.errors import ConfigError

HOST = "127.0.0.1"
"""Address of a page that only this machine reaches."""
DRIFT_BOUND = 0.25
"""Relative difference between planned and measured from which a part counts as drifted."""
_TRACKER = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
"""A tracker's name; it becomes a file's."""
PAGE_TIMELINE = 50
"""Steps between two recorded timelines under a page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorConfig(Config):
    """What a run shows on the screen and writes beside metrics.jsonl and events.jsonl, which are always written."""

    every: int = 10
    """Steps between two lines on the screen and between two points in TensorBoard; metrics.jsonl has every step."""
    display: Literal["auto", "live", "plain", "none"] = "auto"
    """live: a panel that redraws; plain: a line every few steps; auto: live on a terminal, plain elsewhere."""
    tensorboard: bool = True
    """Whether tensorboard/ is written in the run directory."""
    trackers: tuple[str, ...] = ()
    """More trackers of the run's scalars: trackio, wandb, mlflow, or another package's (docs/watching.md)."""
    project: str = "meshwright"
    """Name under which trackers put the run."""
    report: bool = True
    """Whether report.html is written at the end of the run."""
    wait_s: float = 1.0
    """Seconds that a rank waits before the display says for what; plain lines say so after ten times as long."""
    drift_bound: float = DRIFT_BOUND
    """Relative difference between planned and measured from which a part counts as drifted."""
    port: int | None = None
    """Port of a live page, with /metrics for Prometheus (docs/watching.md); any free port for 0, no page without."""
    host: str = HOST
    """Address that the page is bound to; beyond this machine it shows nothing without the run's token."""
    health_s: float = 0.0
    """Seconds between two samples of each node's GPUs, network devices and energy (docs/watching.md); 0 for none."""
    timeline: int | None = None
    """Steps between two of which each rank records phases and waits, for `trace` and the page; 0 for none. Without a
    value 50 under a page, else none."""

    @property
    def timeline_every(self) -> int:
        """Steps between two recorded timelines; 0 for none."""
        if self.timeline is not None:
            return self.timeline
        return PAGE_TIMELINE if self.port is not None else 0

    def without_output(self) -> Self:
        """Returns the settings of a run that nobody watches: a trial's, or a proof's."""
        return replace(self, display="none", tensorboard=False, trackers=(), report=False, timeline=0, health_s=0.0)

    def check(self) -> None:
        """Refuses intervals and bounds that aren't positive, and ports out of range."""
        if self.every < 1:
            raise ConfigError(f"monitor.every = {self.every}: it counts steps, write at least 1; --monitor.every 10")
        if len(set(self.trackers)) < len(self.trackers) or not all(map(_TRACKER.fullmatch, self.trackers)):
            names = ", ".join(self.trackers)
            raise ConfigError(f"monitor.trackers = {names}: give different names, as --monitor.trackers trackio mlflow")
        if not self.project.strip():
            raise ConfigError("monitor.project is empty: trackers need a name to put the run under")
        for name in ("wait_s", "drift_bound"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"monitor.{name} = {getattr(self, name)}: it must be more than 0")
        if self.health_s and not self.health_s >= 1.0:
            raise ConfigError(f"monitor.health_s = {self.health_s}: give at least 1 second, or 0 for no samples")
        if self.port is not None and not 0 <= self.port < 1 << 16:
            raise ConfigError(f"monitor.port = {self.port}: ports go up to 65535; --monitor.port 8787")
        if self.timeline is not None and self.timeline < 0:
            raise ConfigError(f"monitor.timeline = {self.timeline}: it counts steps; 0 records none")
