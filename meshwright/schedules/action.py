"""What a rank of a pipeline does, and in which order: actions, and a schedule as one list of them per rank.

The text of an action is torch's own (``torch.distributed.pipelining``), so that torch's runtime executes the very list
that was priced here: ``2F0`` is the forward of stage 2 on micro-batch 0, ``I`` and ``W`` are the two halves of a
backward, and ``(0F1;1B0)OVERLAP_F_B`` is a forward and a backward run as one.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from meshwright.errors import PlanError
from meshwright.records import parse_json


class ActionKind(Enum):
    """What is computed; the values are torch's letters."""

    FORWARD = "F"
    """The forward."""
    BACKWARD = "B"
    """The whole backward."""
    INPUT = "I"
    """The backward to the stage's input only: what the stage before waits for."""
    WEIGHT = "W"
    """The backward to the stage's weights, after its INPUT; nobody waits for it."""
    OVERLAP = "OVERLAP_F_B"
    """A forward and a whole backward of two micro-batches, as one."""

    __hash__ = object.__hash__
    """Each is one object; to hash its name, as enums do, would be most of a simulation's time."""


_PLAIN = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of one stage on one micro-batch, or a pair of such (kind OVERLAP, stage and micro-batch -1)."""

    stage: int
    kind: ActionKind
    microbatch: int
    pair: tuple[Action, Action] | None = None

    @property
    def parts(self) -> tuple[Action, ...]:
        """The forward and the backward of a pair, in the order they run; any other action alone."""
        return (self,) if self.pair is None else self.pair

    def __str__(self) -> str:
        """Torch's text of the action."""
        if self.pair is not None:
            return f"({self.pair[0]};{self.pair[1]}){self.kind.value}"
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads torch's text of an action.

        Args:
            text: as ``0F0``, ``1B3``, ``2I1``, ``2W1`` or ``(0F1;1B0)OVERLAP_F_B``.

        Raises:
            PlanError: the text is none of these.
        """
        bare = text.strip()
        if plain := _PLAIN.fullmatch(bare):
            return cls(int(plain[1]), ActionKind(plain[2]), int(plain[3]))
        if both := _PAIR.fullmatch(bare):
            return overlap(cls.parse(both[1]), cls.parse(both[2]))
        raise PlanError(
            f"'{bare[:80]}' is no action: write stage, F, B, I or W, micro-batch (as 2F0), or (0F1;1B0)OVERLAP_F_B; "
            "sends and receives are added when the schedule runs, leave them out"
        )


def forward(stage: int, microbatch: int) -> Action:
    """Returns the forward of a stage on a micro-batch."""
    return Action(stage, ActionKind.FORWARD, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """Returns the whole backward of a stage on a micro-batch."""
    return Action(stage, ActionKind.BACKWARD, microbatch)


def backward_input(stage: int, microbatch: int) -> Action:
    """Returns the backward to the input of a stage."""
    return Action(stage, ActionKind.INPUT, microbatch)


def backward_weight(stage: int, microbatch: int) -> Action:
    """Returns the backward to the weights of a stage."""
    return Action(stage, ActionKind.WEIGHT, microbatch)


def overlap(first: Action, second: Action) -> Action:
    """Returns a forward and a whole backward as one action."""
    return Action(-1, ActionKind.OVERLAP, -1, (first, second))


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order; sends and receives follow from them."""

    name: str
    stages: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    """One row per rank."""

    @property
    def ranks(self) -> int:
        """Ranks along the pipeline."""
        return len(self.actions)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage, as the actions say it; -1 for a stage that no rank runs."""
        rank_of = [-1] * self.stages
        for rank, row in enumerate(self.actions):
            for action in row:
                for part in action.parts:
                    if part.stage < self.stages:
                        rank_of[part.stage] = rank
        return tuple(rank_of)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward comes as two halves."""
        return any(action.kind is ActionKind.INPUT for row in self.actions for action in row)

    def unsplit(self) -> Schedule:
        """Returns the schedule with each backward whole, where its INPUT stands; nothing waits for a WEIGHT."""
        if not self.splits_backward:
            return self
        rows = [[item for item in row if item.kind is not ActionKind.WEIGHT] for row in self.actions]
        whole = [
            tuple(backward(item.stage, item.microbatch) if item.kind is ActionKind.INPUT else item for item in row)
            for row in rows
        ]
        return replace(self, actions=tuple(whole))

    def stage_rank(self, stage: int) -> int:
        """Returns the rank that runs a stage."""
        return self.placement[stage]

    def rank_stages(self, rank: int) -> tuple[int, ...]:
        """Returns the stages of a rank, lowest first."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def to_csv(self) -> str:
        """Returns torch's compute-only CSV: one row per rank, one action per cell."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.actions)
        return text.getvalue()

    @classmethod
    def from_csv(cls, text: str, name: str = "file") -> Schedule:
        """Reads one row per rank; empty cells (torch writes them for waits) are left out.

        Args:
            text: the CSV.
            name: what to call the schedule.

        Returns:
            The schedule, as many stages and micro-batches as its highest numbers say; `check` tells what is missing.

        Raises:
            PlanError: a cell is no action, or there is none at all.
        """
        try:
            return cls._of_text(name, csv.reader(io.StringIO(text)))
        except csv.Error as error:
            raise PlanError(f"schedule {name} is no CSV of actions: {error}") from None

    def to_json(self) -> str:
        """Returns the schedule as a JSON object; `placement` is there for readers, and is derived again on reading."""
        rows = [[str(action) for action in row] for row in self.actions]
        sizes = {"ranks": self.ranks, "stages": self.stages, "microbatches": self.microbatches}
        return json.dumps({"name": self.name, **sizes, "placement": self.placement, "actions": rows})

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Reads what `to_json` wrote.

        Raises:
            PlanError: the text is no such object.
        """
        try:
            fields = parse_json(text)
            return cls._of_text(fields["name"], fields["actions"])
        except (ValueError, KeyError, TypeError, AttributeError) as fault:
            raise PlanError(f"this JSON is no schedule ({fault!r}): it needs a name, and actions per rank") from None

    @classmethod
    def _of_text(cls, name: str, rows: Iterable[Sequence[str]]) -> Schedule:
        actions = [tuple(Action.parse(cell) for cell in row if cell.strip()) for row in rows if row]
        parts = [part for row in actions for action in row for part in action.parts]
        if not parts:
            raise PlanError(f"schedule {name} has no action: write one row per rank, as 0F0,0B0")
        return cls(
            name=name,
            stages=1 + max(part.stage for part in parts),
            microbatches=1 + max(part.microbatch for part in parts),
            actions=tuple(actions),
        )
