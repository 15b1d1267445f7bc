"""Defines `ScheduleSpec`, the facts of a schedule, and finds all known schedules."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache

from meshwright.errors import PlanError, nearest
from meshwright.schedules.action import Action, Schedule
from meshwright.schedules.closed_form import InFlightForm, PairedForm, StepForm

Order = Callable[[int, int, int, int], list[Action]]
"""Maps (rank, ranks, stages per rank, micro-batches) to the actions of that rank."""
Rule = Callable[[int, int, int], None]
"""Checks (ranks, stages per rank, micro-batches); raises PlanError."""


class Placement(Enum):
    """The rule that places stages on ranks."""

    LOOP = "loop"
    """Stage s on rank s % ranks: every stage sends to the next rank."""
    V = "v"
    """Down the ranks and back up: the first and the last stage share a rank."""

    def rank_of(self, stage: int, ranks: int) -> int:
        """Returns the rank of a stage."""
        lap, position = divmod(stage, ranks)
        return ranks - 1 - position if self is Placement.V and lap % 2 else position


def any_microbatches(ranks: int, stages_per_rank: int, microbatches: int) -> None:
    """Accepts any number of micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSpec:
    """Facts of one schedule, and the function that builds its actions."""

    name: str
    """Name in layouts and options."""
    purpose: str
    """When to use it."""
    source: str
    """The paper."""
    order: Order
    """Builds the actions of one rank."""
    least_stages: int
    """Fewest stages per rank."""
    most_stages: int | None
    """Most stages per rank; None for no bound."""
    placement: Placement = Placement.LOOP
    """The rule that places stages on ranks."""
    splits_backward: bool = False
    """Whether INPUT and WEIGHT are separate actions."""
    rule: Rule = any_microbatches
    """Further condition on the number of micro-batches."""
    bubble: Callable[[int, int, int], float | None] = lambda ranks, stages_per_rank, microbatches: None
    """Upper bound on the idle share of all time at F = I = W = 1, B = 2, free sends; None where not stated."""
    bubble_text: str = "simulated only"
    """The same as a formula: p ranks, v stages per rank, m micro-batches."""
    peak_live: Callable[[int, int, int], int]
    """Most live (stage, micro-batch) pairs of a rank: from its forward to the end of its backward."""
    peak_text: str
    """The same as a formula."""
    step_s: StepForm | None = None
    """Seconds of a step as a formula over arrays; None simulates the actions, which is slower."""
    in_flight: InFlightForm | None = None
    """In-flight micro-batches of each rank as a formula over arrays; None simulates the actions."""
    searched: bool = True
    """Whether the planner searches it by default; False where another schedule is never worse."""
    paired_share: PairedForm | None = None
    """Share of a rank's forwards, or backwards, that run in a pair with one of another stage; None where none does."""
    owners: tuple[int, ...] = ()
    """The rank of each stage, where no `Placement` describes it."""

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
        """Checks that the schedule exists for these sizes.

        Args:
            ranks: degree of the pipeline.
            stages_per_rank: stages of each rank.
            microbatches: micro-batches of one step.

        Raises:
            PlanError: it doesn't; the message has the rule and the nearest sizes that work.
        """
        for label, value in (("ranks", ranks), ("micro-batches", microbatches)):
            if value < 1:
                raise PlanError(f"schedule {self.name} with {value} {label}: take 1 or more")
        too_many = self.most_stages is not None and stages_per_rank > self.most_stages
        if stages_per_rank < self.least_stages or too_many:
            suggestion = self.most_stages if too_many else self.least_stages
            raise PlanError(
                f"schedule {self.name} needs {self.stages_text} stages per rank, not {stages_per_rank}; take "
                f"{suggestion}, or a schedule for {stages_per_rank}: "
                f"{', '.join(_for_stages(stages_per_rank)) or 'there is none'}"
            )
        self.rule(ranks, stages_per_rank, microbatches)

    def build(self, ranks: int, stages_per_rank: int, microbatches: int) -> Schedule:
        """Builds the schedule for the sizes of `check`; a pure function.

        Raises:
            PlanError: the sizes don't fit; see `check`.
        """
        self.check(ranks, stages_per_rank, microbatches)
        rows = (tuple(self.order(rank, ranks, stages_per_rank, microbatches)) for rank in range(ranks))
        return Schedule(name=self.name, stages=ranks * stages_per_rank, microbatches=microbatches, actions=tuple(rows))


def _for_stages(stages_per_rank: int) -> list[str]:
    names = []
    for spec in known_schedules().values():
        if spec.least_stages <= stages_per_rank <= (spec.most_stages or stages_per_rank):
            names.append(spec.name)
    return names


@cache
def known_schedules() -> dict[str, ScheduleSpec]:
    """Returns every schedule with a file in this folder, fewest stages per rank first, then by name.

    A new schedule joins by adding ``schedules/<name>.py`` with a ``SCHEDULE``; nothing else lists schedules.
    """
    # The parent package, which is imported before this module of it.
    folder = importlib.import_module(__package__ or "meshwright.schedules")
    specs = []
    for entry in pkgutil.iter_modules(folder.__path__):
        if entry.ispkg or entry.name.startswith("_"):
            continue
        module = importlib.import_module(f"{folder.__name__}.{entry.name}")
        spec = getattr(module, "SCHEDULE", None)
        if isinstance(spec, ScheduleSpec):
            specs.append(spec)
    specs.sort(key=lambda spec: (spec.least_stages, spec.splits_backward, spec.name))
    return {spec.name: spec for spec in specs}


def searched_schedules() -> tuple[str, ...]:
    """Returns the names of the schedules that the planner searches by default."""
    return tuple(name for name, spec in known_schedules().items() if spec.searched)


def find_schedule(name: str) -> ScheduleSpec:
    """Returns the schedule of that name.

    Raises:
        PlanError: there is none; the message names the nearest.
    """
    schedules = known_schedules()
    if name not in schedules:
        raise PlanError(
            f"schedule = {name}: there is no such schedule{nearest(name, schedules)}, or file:PATH of a CSV"
        )
    return schedules[name]
