"""Actions of a pipeline's ranks, and a schedule: one ordered list of actions per rank.

The text of an action is torch's own (``torch.distributed.pipelining``), so that torch's runtime executes exactly the
list that was priced here. ``2F0`` is the forward of stage 2 on micro-batch 0, ``I`` and ``W`` are the two halves of a
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
    """The kind of computation; the values are torch's letters."""

    FORWARD = "F"
    """The forward."""
    BACKWARD = "B"
    """The full backward, input and weight gradients together."""
    INPUT = "I"
    """The input gradients only, which the previous stage waits for."""
    WEIGHT = "W"
    """The weight gradients, after INPUT; no other rank waits for them."""
    OVERLAP = "OVERLAP_F_B"
    """A forward and a full backward of two micro-batches, as one."""

    __hash__ = object.__hash__
    """Hashes by identity: hashing the name, as enums do, would be most of a simulation's time."""


_PLAIN = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of a stage on a micro-batch, or a pair of them (kind OVERLAP; stage and micro-batch are -1)."""

    stage: int
    kind: ActionKind
    microbatch: int
    pair: tuple[Action, Action] | None = None

    @property
    def parts(self) -> tuple[Action, ...]:
        """The forward and the backward of a pair, in the order they run; of any other action, itself."""
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
        stripped = text.strip()
        if single_match := _PLAIN.fullmatch(stripped):
            return cls(int(single_match[1]), ActionKind(single_match[2]), int(single_match[3]))
        if pair_match := _PAIR.fullmatch(stripped):
            return overlap(cls.parse(pair_match[1]), cls.parse(pair_match[2]))
        raise PlanError(
            f"'{stripped[:80]}' is no action: write stage, F, B, I or W, micro-batch (as 2F0), or "
            "(0F1;1B0)OVERLAP_F_B; sends and receives are added when the schedule runs, leave them out"
        )


def forward(stage: int, microbatch: int) -> Action:
    """Returns the forward of a stage on a micro-batch."""
    return Action(stage, ActionKind.FORWARD, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """Returns the full backward of a stage on a micro-batch."""
    return Action(stage, ActionKind.BACKWARD, microbatch)


def backward_input(stage: int, microbatch: int) -> Action:
    """Returns the input-gradient half of a stage's backward."""
    return Action(stage, ActionKind.INPUT, microbatch)


def backward_weight(stage: int, microbatch: int) -> Action:
    """Returns the weight-gradient half of a stage's backward."""
    return Action(stage, ActionKind.WEIGHT, microbatch)


def overlap(first: Action, second: Action) -> Action:
    """Returns a forward and a full backward as one action."""
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
        """The rank of each stage, by the actions; -1 for a stage that no rank runs."""
        rank_of = [-1] * self.stages
        for rank, row in enumerate(self.actions):
            for action in row:
                for single in action.parts:
                    if single.stage < self.stages:
                        rank_of[single.stage] = rank
        return tuple(rank_of)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is split into INPUT and WEIGHT."""
        return any(action.kind is ActionKind.INPUT for row in self.actions for action in row)

    def unsplit(self) -> Schedule:
        """Returns the schedule with each backward unsplit, at the position of its INPUT."""
        if not self.splits_backward:
            return self
        rows = [[action for action in row if action.kind is not ActionKind.WEIGHT] for row in self.actions]
        unsplit_rows = [
            tuple(
                backward(action.stage, action.microbatch) if action.kind is ActionKind.INPUT else action
                for action in row
            )
            for row in rows
        ]
        return replace(self, actions=tuple(unsplit_rows))

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
            The schedule; its highest stage and micro-batch give its sizes. `check_complete` reports missing actions.

        Raises:
            PlanError: a cell is no action, or there is none at all.
        """
        try:
            return cls._of_text(name, csv.reader(io.StringIO(text)))
        except csv.Error as error:
            raise PlanError(f"schedule {name} is no CSV of actions: {error}") from None

    def to_json(self) -> str:
        """Returns the schedule as a JSON object; `placement` is for people, `from_json` derives it again."""
        rows = [[str(action) for action in row] for row in self.actions]
        sizes = {"ranks": self.ranks, "stages": self.stages, "microbatches": self.microbatches}
        return json.dumps({"name": self.name, **sizes, "placement": self.placement, "actions": rows})

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Reads the JSON of `to_json`.

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
        singles = [single for row in actions for action in row for single in action.parts]
        if not singles:
            raise PlanError(f"schedule {name} has no action: write one row per rank, as 0F0,0B0")
        return cls(
            name=name,
            stages=1 + max(single.stage for single in singles),
            microbatches=1 + max(single.microbatch for single in singles),
            actions=tuple(actions),
        )
