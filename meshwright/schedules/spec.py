"""What a schedule states about itself, how one joins, and how it is built for given sizes."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache

from meshwright.errors import PlanError, nearest
from meshwright.schedules.action import Action, Schedule
from meshwright.schedules.closed_form import HeldForm, StepForm

Order = Callable[[int, int, int, int], list[Action]]
"""(rank, ranks, stages per rank, micro-batches) to the actions of that rank."""
Rule = Callable[[int, int, int], None]
"""(ranks, stages per rank, micro-batches); raises PlanError."""


class Placement(Enum):
    """Which rank a stage stands on."""

    LOOP = "loop"
    """Stage s on rank s % ranks: every stage sends to the next rank."""
    V = "v"
    """Down the ranks and up again: the first and the last stage share a rank."""

    def rank_of(self, stage: int, ranks: int) -> int:
        """Returns the rank of a stage."""
        lap, place = divmod(stage, ranks)
        return ranks - 1 - place if self is Placement.V and lap % 2 else place


def any_microbatches(ranks: int, stages_per_rank: int, microbatches: int) -> None:
    """The rule of a schedule that takes any number of micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSpec:
    """Facts of one schedule, and the function that makes its actions."""

    name: str
    """What the user writes."""
    purpose: str
    """When to take it."""
    source: str
    """The paper."""
    order: Order
    """Actions of one rank."""
    least_stages: int
    """Stages per rank, at least."""
    most_stages: int | None
    """Stages per rank, at most; None for no bound."""
    placement: Placement = Placement.LOOP
    """Which rank a stage stands on."""
    splits_backward: bool = False
    """Whether INPUT and WEIGHT are separate actions."""
    rule: Rule = any_microbatches
    """What the number of micro-batches must fulfil beyond being one or more."""
    bubble: Callable[[int, int, int], float | None] = lambda ranks, stages_per_rank, microbatches: None
    """Most idle time as a share of all time when F = I = W = 1, B = 2 and sends are free; None where not stated."""
    bubble_text: str = "simulated only"
    """The same as a formula: p ranks, v stages per rank, m micro-batches."""
    peak_live: Callable[[int, int, int], int]
    """Most (stage, micro-batch) pairs that a rank holds between forward and end of backward."""
    peak_text: str
    """The same as a formula."""
    step_s: StepForm | None = None
    """Seconds of a step as a formula over many layouts; None reads them off the actions, which is slower."""
    held: HeldForm | None = None
    """What each rank holds as a formula over many layouts; None reads it off the actions."""
    searched: bool = True
    """Whether the planner looks at it unasked; False where another holds no more and idles no more."""
    owners: tuple[int, ...] = ()
    """The rank of each stage, where it follows no `Placement`."""

    @property
    def stages_text(self) -> str:
        """Stages per rank in words."""
        if self.most_stages is None:
            return f"{self.least_stages} or more"
        return str(self.least_stages)

    def rank_of(self, stage: int, ranks: int) -> int:
        """Returns the rank of a stage."""
        return self.owners[stage] if self.owners else self.placement.rank_of(stage, ranks)

    def check(self, ranks: int, stages_per_rank: int, microbatches: int) -> None:
        """Says whether the schedule can be built for these sizes.

        Args:
            ranks: degree of the pipeline.
            stages_per_rank: model parts on each rank.
            microbatches: micro-batches of one step.

        Raises:
            PlanError: it can't; the message gives the rule and the nearest that works.
        """
        for label, value in (("ranks", ranks), ("micro-batches", microbatches)):
            if value < 1:
                raise PlanError(f"schedule {self.name} with {value} {label}: take 1 or more")
        too_many = self.most_stages is not None and stages_per_rank > self.most_stages
        if stages_per_rank < self.least_stages or too_many:
            take = self.most_stages if too_many else self.least_stages
            raise PlanError(
                f"schedule {self.name} needs {self.stages_text} stages per rank, not {stages_per_rank}; take {take}, "
                f"or a schedule for {stages_per_rank}: {', '.join(_for_stages(stages_per_rank)) or 'there is none'}"
            )
        self.rule(ranks, stages_per_rank, microbatches)

    def build(self, ranks: int, stages_per_rank: int, microbatches: int) -> Schedule:
        """Builds the schedule; a pure function of its arguments, which are those of `check`.

        Raises:
            PlanError: the sizes don't fit; see `check`.
        """
        self.check(ranks, stages_per_rank, microbatches)
        rows = (tuple(self.order(rank, ranks, stages_per_rank, microbatches)) for rank in range(ranks))
        return Schedule(name=self.name, stages=ranks * stages_per_rank, microbatches=microbatches, actions=tuple(rows))


def _for_stages(stages_per_rank: int) -> list[str]:
    fits = []
    for spec in known_schedules().values():
        if spec.least_stages <= stages_per_rank <= (spec.most_stages or stages_per_rank):
            fits.append(spec.name)
    return fits


@cache
def known_schedules() -> dict[str, ScheduleSpec]:
    """Returns every schedule that has a file in this folder, fewest stages per rank first, then by name.

    A new schedule joins by adding ``schedules/<name>.py`` with a ``SCHEDULE``; nothing else lists schedules.
    """
    import meshwright.schedules as folder

    found = []
    for entry in pkgutil.iter_modules(folder.__path__):
        if entry.ispkg or entry.name.startswith("_"):
            continue
        module = importlib.import_module(f"{folder.__name__}.{entry.name}")
        spec = getattr(module, "SCHEDULE", None)
        if isinstance(spec, ScheduleSpec):
            found.append(spec)
    found.sort(key=lambda spec: (spec.least_stages, spec.splits_backward, spec.name))
    return {spec.name: spec for spec in found}


def searched_schedules() -> tuple[str, ...]:
    """Returns the names of the schedules that the planner chooses among unasked."""
    return tuple(name for name, spec in known_schedules().items() if spec.searched)


def find_schedule(name: str) -> ScheduleSpec:
    """Returns the schedule of that name.

    Raises:
        PlanError: there is none; the message names the nearest.
    """
    known = known_schedules()
    if name not in known:
        raise PlanError(f"schedule = {name}: there is no such schedule{nearest(name, known)}, or file:PATH of a CSV")
    return known[name]
