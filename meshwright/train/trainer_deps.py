"""What a trainer works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.store import CheckpointStore
from meshwright.launch.signals import StopFlag
from meshwright.monitor.monitor import Monitor
from meshwright.monitor.progress import ProgressWriter
from meshwright.monitor.timeline import TimelineWriter
from meshwright.parallel.program import Program
from meshwright.spec.layout import Layout
from meshwright.train.faults import Faults
from meshwright.train.feed import Feed
from meshwright.train.hooks import Hook
from meshwright.train.memory import RankMemory
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.outer import OuterOptimizer
from meshwright.train.page_requests import PageRequests
from meshwright.train.run_config import RunConfig
from meshwright.train.site_optimizer import SiteOptimizer
from meshwright.train.step import Stepper


@dataclass(kw_only=True, slots=True)
class TrainerDeps:
    """The collaborators of a trainer, built by the session."""

    config: RunConfig
    layout: Layout
    program: Program
    optimizer: LocalAdamW
    stepper: Stepper
    feed: Feed
    store: CheckpointStore
    monitor: Monitor
    progress: ProgressWriter
    origin: Origin
    rank: int
    stop_asked: StopFlag
    """Has ``.requested``: whether this rank was asked to end."""
    flops_per_token: float = 0.0
    peak_flops: float | None = None
    """FLOP/s of all devices' matrix products together, as measured."""
    data_sheet_flops: float | None = None
    """Dense FLOP/s of all devices together by their data sheets; None where one has none."""
    hooks: Sequence[Hook] = field(default_factory=tuple)
    memory: RankMemory | None = None
    """Shared memory for snapshots, when a supervisor watches the ranks."""
    anomalous_step: int = 0
    """Step up to whose batches the data is skipped, when the previous ranks were rewound from it; 0 for none."""
    faults: Faults | None = None
    """The injected faults, if any."""
    outer: OuterOptimizer | SiteOptimizer | None = None
    """Joins the islands, or this site with others; None where there is neither."""
    timeline: TimelineWriter | None = None
    """Records phases and waits of some steps; None where they aren't wanted."""
    page_requests: PageRequests | None = None
    """What the page asked for, on the one rank that spreads it."""
    reads_late: bool = False
    """Whether outcomes of steps may be read while the next step computes; worth it where the host runs ahead."""
