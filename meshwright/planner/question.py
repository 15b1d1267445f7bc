"""What is planned: a job on a cluster, the bounds of the search, and how much of a device a plan may fill."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from meshwright.cluster.cluster import Cluster
from meshwright.control_groups import PROCESS_BYTES
from meshwright.errors import PlanError
from meshwright.planner.candidate import Candidate
from meshwright.planner.cost.expert_dispatch import fastest_nodes
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.cost.meshwright_profile import CORE_DRAW_BYTES, CORE_DRAW_S, MESHWRIGHT
from meshwright.planner.cost.rounding import CORE_BYTE
from meshwright.planner.rounds import Rounds
from meshwright.planner.run_history import RunHistory
from meshwright.planner.space import Space
from meshwright.planner.uncertainty import Evidence, TimeSpread, fitted_spreads
from meshwright.schedules.spec import known_schedules
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import CPU_CHUNK_TOKENS

USABLE = 0.94
"""Most share of a device's memory that a plan may fill, however sure its bytes are; the rest is lost to fragmentation
over a long run."""
FITS = 0.99
"""Chance with which a plan fits."""
TIME_TOLERANCE = 0.05
"""Relative difference of predicted times below which layouts tie (docs/predictions.md: regret of the first choice)."""
TIME_TOLERANCE_ON_CORES = 0.15
"""The same on processor cores, where host work competes with the compute and isn't priced."""
OBJECTIVES = ("time", "cost", "energy")
"""What the plan minimizes: seconds, dollars or joules of a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A job to plan on a cluster, and the bounds of the search."""

    job: PricedJob
    cluster: Cluster
    base: Layout = field(default_factory=Layout)
    """Choices that every layout shares: its precision."""
    engine: FrameworkProfile | None = None
    """The runtime that is priced; our own on these devices by default."""
    objective: str = "time"
    """One of `OBJECTIVES`."""
    fits: float = FITS
    """Chance with which a layout must fit its devices."""
    usable: float | None = None
    """Share of a device's memory that may be filled, in place of the one that follows from ``fits``."""
    history: RunHistory = field(default_factory=RunHistory)
    """Measured over priced times of earlier runs on these machines."""
    limits: dict[str, Any] = field(default_factory=dict)
    """Fields of `Space` that differ from their defaults."""
    rounds: Rounds = field(default_factory=Rounds)
    """How islands join, where a layout has several."""
    other_island_devices: int = 0
    """Devices of other islands, which compute at the same time on these machines."""
    compile_steps: int = 0
    """Steps that may make up for compiling layers; 0 where layers are compiled only as ``base`` says."""

    def __post_init__(self) -> None:
        """Refuses an unknown objective, and one without its figures."""
        if self.objective not in OBJECTIVES:
            raise PlanError(f"objective={self.objective}: it is one of {', '.join(OBJECTIVES)}")
        if self.objective == "cost" and self.cluster.price_per_hour is None:
            raise PlanError(
                f"objective=cost: no price is known for {self.cluster}; give price_per_hour in the cluster's file"
            )
        if self.objective == "energy" and not self.cluster.watts:
            raise PlanError(f"objective=energy: no power is known for {self.cluster}; give watts in the cluster's file")

    @property
    def under_load(self) -> bool:
        """Whether other ranks of these machines compute at the same time as one."""
        return self.cluster.devices + self.other_island_devices > 1

    @property
    def runtime(self) -> FrameworkProfile:
        """The profile of the runtime."""
        return self.engine or engine_on(self.cluster)

    @property
    def machine(self) -> Machine:
        """The devices and links that layouts are priced on."""
        return Machine.of(self.cluster)

    @property
    def tie_tolerance(self) -> float:
        """Relative difference of predicted times below which two layouts tie."""
        return TIME_TOLERANCE_ON_CORES if self._on_cores else TIME_TOLERANCE

    @property
    def evidence(self) -> Evidence:
        """What the prices rest on: runs of this machine, its calibration, or published runs on such devices."""
        measured = self.cluster.calibration is not None or self.history.runs > 0
        fitted = set(self.cluster.kinds) <= fitted_spreads().devices
        own_bytes = self.runtime.name == MESHWRIGHT.name and self.job.activations is not None
        return Evidence(framework=measured, device=measured or fitted, own_bytes=own_bytes)

    @property
    def time_spread(self) -> TimeSpread:
        """Scales of the error of predicted times."""
        spread = fitted_spreads().time
        return spread.widened(TIME_TOLERANCE_ON_CORES) if self._on_cores else spread

    @property
    def _on_cores(self) -> bool:
        return self.cluster.device.name.startswith("cpu")

    @property
    def _counts_bytes(self) -> bool:
        """Whether bytes are the model's own: on a calibrated machine, and on cores, where no allocator keeps more."""
        return self.cluster.calibration is not None or self._on_cores

    @property
    def usable_share(self) -> float:
        """Share of each device's memory that a layout may fill: where it fits with the chance ``fits``."""
        if self.usable is not None:
            return self.usable
        return min(USABLE, fitted_spreads().memory.share(self.fits, self.evidence, self._counts_bytes))

    @property
    def usable_bytes(self) -> float:
        """Bytes that a layout may fill on each device."""
        return self.usable_share * self.cluster.memory_bytes

    def tightest_stage(self, candidate: Candidate) -> tuple[int, float]:
        """Returns (index of the stage, bytes of its device) of the rank that fills its device most.

        On devices of several sizes that needn't be the rank that needs most: stages differ, and so do their devices.
        """
        cluster, price, islands = self.cluster, candidate.price, candidate.layout.islands
        if cluster.uniform or len(price.stages) == 1:
            return price.fullest, cluster.memory_bytes
        # Outermost are islands, then stages: the ranks of a stage follow one another within an island.
        island_ranks = cluster.devices // islands
        stage_ranks = island_ranks // len(price.stages)
        rooms = [
            (index, cluster.device_of(island * island_ranks + index * stage_ranks).memory_bytes)
            for island in range(islands)
            for index in range(len(price.stages))
        ]
        return max(rooms, key=lambda room: price.stages[room[0]].peak / room[1])

    def chance_fits(self, needed_bytes: float, device_bytes: float) -> float:
        """Returns the chance that a rank of predicted ``needed_bytes`` fits a device of ``device_bytes``."""
        room = math.log(device_bytes / needed_bytes)
        return fitted_spreads().memory.chance(room, self.evidence, self._counts_bytes)

    def chance_candidate_fits(self, candidate: Candidate) -> float:
        """Returns the chance that all ranks of a layout fit their devices."""
        index, device_bytes = self.tightest_stage(candidate)
        return self.chance_fits(candidate.price.stages[index].peak, device_bytes)

    @property
    def space(self) -> Space:
        """The layouts to choose from."""
        limits = self.limits
        if self.engine is None and self.job.shape.experts:
            limits = {"expert_nodes": fastest_nodes(self.job, self.machine, self.cluster.devices), **limits}
        space = Space(devices=self.cluster.devices, domain=self.cluster.domain, **limits)
        if self.job.splits_backward and not self.base.compile:
            return space
        # torch.compile can't run a backward in two halves, and some models can't.
        unsplit_schedules = tuple(name for name in space.schedules if not known_schedules()[name].splits_backward)
        return dataclasses.replace(space, schedules=unsplit_schedules)


def engine_on(cluster: Cluster) -> FrameworkProfile:
    """Returns our runtime's profile on a cluster's devices.

    On processor cores the cores that compute the model also compute its collectives, so none overlaps. The exception
    are those over a network, which hide but for a core's own seconds (`Machine.core_byte_s`), or by the share of an
    all-reduce that an older calibration measured as hidden. Where a quota leaves a node less than a core none hides:
    what sends is stopped with what computes (``benchmarks/bench_slow_train.py --nodes 4 --rates 1gbit`` on two cores:
    714 and 755 ms, 643 planned so, 510 and 490 with what hides on whole cores). A rank has no device context.
    """
    if not cluster.device.name.startswith("cpu"):
        return MESHWRIGHT
    calibration, shares = cluster.calibration, dict[str, float]()
    over_network = calibration is not None and calibration.nodes == cluster.nodes > 1
    if calibration is None or not over_network or calibration.is_throttled or not calibration.host_s(CORE_BYTE):
        hides = calibration is not None and over_network and not calibration.is_throttled
        overlap = (calibration.overlap or 0.0) if calibration is not None and hides else 0.0
        shares = {"dp_overlap": overlap, "gather_overlap": overlap, "reduce_floor": 1.0 - overlap}
    # Gradients are added at the measured rate, and what nodes wait for each other is in measured collectives.
    shares |= dict.fromkeys(("cp_overlap", "ep_overlap", "interference", "accumulate_bytes", "jitter"), 0.0)
    options = {f"runtime__{name}": share for name, share in shares.items()}
    chunks = {"saved__chunk_logits": 0.0, "saved__chunk_tokens": float(CPU_CHUNK_TOKENS)}
    return MESHWRIGHT.with_options(
        **options,
        **chunks,
        saved__logits=12.0,
        runtime__loss_passes=(24.0, 24.0),
        runtime__update_bytes=30.0,
        runtime__host_step_s=0.01,
        runtime__draw_s=CORE_DRAW_S,
        runtime__mask_bytes=1.0,
        runtime__draw_bytes=CORE_DRAW_BYTES,
        runtime__sends_in_turn=False,
        workspace_bytes=0.0,
        context_bytes=PROCESS_BYTES,
    )
