"""Whether all that several ranks hold of the same weights and moments is the same: a checksum each, compared.

Replicas, weights tied over pipeline stages, what tensor-parallel ranks share, and the copies of experts are found the
same way: boxes of the state that more than one rank holds. Ranks that hold the same boxes are a holder set; each of
them sums up its boxes' bits to one number, and these are gathered. A flipped bit changes a sum, always.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from meshwright.checkpoint.agreement import Agreement
from meshwright.checkpoint.tensor_shards import TensorShard, cells_of, parts_of, within
from meshwright.parallel.program import Program
from meshwright.spec.placement import Box
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.state import BUFFERS, state_places, state_tensors

SHARE = 0.002
"""Of a run's time that comparing may cost."""
FIRST = 10
"""Steps between comparisons while it isn't known what they cost."""
MOST_STEPS = 1000
"""Steps between comparisons at most."""
ROUNDING = 1e-3
"""Largest difference of copies, of the root mean square of what they are copies of, that is taken for rounding: ranks
that compute the same sums in another order."""
_SHOWN = 4
_ODD = 0x9E3779B97F4A7C15
"""Odd, so that a sum times its powers changes whenever the sum does. Source: Knuth, 6.4, the golden ratio's bits."""
_WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class HolderSet:
    """Boxes that the same ranks hold."""

    ranks: tuple[int, ...]
    """These ranks, ascending."""
    names: tuple[str, ...]
    """Name of each box's tensor."""
    views: tuple[torch.Tensor, ...]
    """Each box in this rank's memory; empty on other ranks."""


@dataclass(frozen=True, slots=True)
class Element:
    """One element of what several ranks hold, as each of them has it."""

    ranks: tuple[int, ...]
    """Who holds it."""
    number: int
    """Which of their boxes it is in."""
    index: int
    """Its place in that box, counted through all dims."""
    values: tuple[str, ...]
    """What each of them has, as Python writes it: JSON has no infinity."""

    def farthest(self, value: float) -> tuple[int, ...]:
        """Returns the rank whose value is farthest from a right one; none where several are."""
        apart = [abs(float(one) - value) for one in self.values]
        apart = [math.inf if math.isnan(one) else one for one in apart]
        most = max(apart)
        return (self.ranks[apart.index(most)],) if apart.count(most) == 1 else ()


@dataclass(frozen=True, slots=True)
class CopyMismatch:
    """Copies that aren't equal."""

    ranks: tuple[int, ...]
    """Who holds them."""
    odd: tuple[int, ...]
    """Those of them that differ from most; empty where no value is that of most."""
    names: tuple[str, ...]
    """Tensors that differ, the first few."""
    count: int
    """How many tensors differ."""
    size: float
    """Largest difference of an element, of the root mean square of its tensor; infinite for what isn't finite."""
    element: Element | None = None
    """Where that is."""

    def __str__(self) -> str:
        """Returns a sentence without an end."""
        where = ", ".join(self.names) + (f" and {self.count - len(self.names)} more" if self.count > _SHOWN else "")
        who = f"rank {', '.join(map(str, self.odd))} differs from ranks" if self.odd else "ranks"
        others = ", ".join(str(rank) for rank in self.ranks if rank not in self.odd)
        return f"{who} {others} {'' if self.odd else 'hold different copies '}in {where}"


@dataclass(slots=True)
class Comparison:
    """What comparing all copies came to, the same on every rank."""

    rows: list[list[int]]
    """The checksums of each rank."""
    differences: list[CopyMismatch] = field(default_factory=list)
    """What isn't equal, to rounding; none while all is well."""
    alarms: tuple[int, ...] = ()
    """Ranks whose own part is out of bounds (`train.bounds`)."""
    rounded: list[CopyMismatch] = field(default_factory=list)
    """What differs by rounding, seen for the first time: such copies are no longer compared."""


class CopyCheck:
    """Compares what ranks hold twice.

    Args:
        program: of this rank.
        optimizer: over its weights.
        agreement: how ranks exchange small values.
        every: steps between comparisons; None for as often as costs `SHARE` of the time.
    """

    def __init__(self, program: Program, optimizer: LocalAdamW, agreement: Agreement, every: int | None) -> None:
        self._program, self._optimizer, self._agreement = program, optimizer, agreement
        self._given = every
        self.every = every or FIRST
        """Steps between comparisons."""
        self._sets: list[HolderSet] = []
        self._places: list[int] = []
        self._held: Any = None
        self._tolerated: set[tuple[int, ...]] = set()
        self._spent_ns = self._width = 0
        self._last = (0, time.monotonic())

    def due(self, step: int) -> bool:
        """Whether copies are to be compared after a step."""
        return step - self._last[0] >= self.every

    def start(self, step: int) -> None:
        """Tells from which step on this rank trains."""
        self._last = (step, time.monotonic())

    def compare(self, step: int, scalars: Sequence[float | int], alarm: bool = False) -> Comparison:
        """Compares all copies after a step; every rank must call it.

        Args:
            step: steps done.
            scalars: plain values that all ranks must have alike.
            alarm: whether this rank's own part is out of bounds, which all ranks learn.
        """
        began = time.perf_counter_ns()
        if self._held is None or state_places(self._program, self._optimizer) != self._places:
            self._plan()
        own = [_scalar_sum(scalars), *(_sum_of(one.views) for one in self._sets if one.views)]
        since, at = self._last
        step_ns = int(1e9 * (time.monotonic() - at) / max(1, step - since))
        own += [0] * (self._width - len(own))
        summed = time.perf_counter_ns()
        rows = self._gathered([*own, int(alarm), self._spent_ns, step_ns])
        # What waiting for the slowest rank takes is its own time, not that of comparing.
        self._spent_ns = summed - began
        self._adapt(rows)
        self._last = (step, time.monotonic())
        found = self._judged([row[: self._width] for row in rows])
        found.alarms = tuple(rank for rank, row in enumerate(rows) if row[self._width])
        return found

    def tolerate(self, difference: CopyMismatch) -> None:
        """No longer compares the copies of some ranks: computed again, they came to the same differences."""
        self._tolerated.add(difference.ranks)

    def _plan(self) -> None:
        """Agrees with the other ranks on who holds what."""
        self._held = state_tensors(self._program, self._optimizer)
        self._places = state_places(self._program, self._optimizer)
        held = [pair for pair in parts_of(self._held) if not pair[0].name.startswith(f"{BUFFERS}/")]
        tables = [
            [TensorShard.from_json(values) for values in table]
            for table in self._agreement.gather([part.to_json() for part, _ in held])
        ]
        holders: dict[tuple[str, tuple[int, ...], Box], set[int]] = {}
        boxes: dict[tuple[str, tuple[int, ...]], set[Box]] = {}
        for part in (part for table in tables for part in table):
            boxes.setdefault((part.name, part.shape), set()).add(part.box)
        cells = {key: cells_of(key[1], found) for key, found in boxes.items()}
        for rank, table in enumerate(tables):
            for part in table:
                for box in cells[part.name, part.shape][part.box]:
                    holders.setdefault((part.name, part.shape, box), set()).add(rank)
        views = {
            (part.name, part.shape, box): within(view, part.box, box)
            for part, view in held
            for box in cells[part.name, part.shape][part.box]
        }
        sets: dict[tuple[int, ...], list[tuple[str, tuple[int, ...], Box]]] = {}
        for key in sorted(holders):
            if len(holders[key]) > 1:
                sets.setdefault(tuple(sorted(holders[key])), []).append(key)
        mine = self._agreement.rank
        self._sets = [
            HolderSet(ranks, tuple(key[0] for key in keys), tuple(views[key] for key in keys) if mine in ranks else ())
            for ranks, keys in sorted(sets.items())
        ]
        self._width = 1 + max(sum(rank in one.ranks for one in self._sets) for rank in range(len(tables)))

    def _gathered(self, values: list[int]) -> list[list[int]]:
        group, count = self._agreement.group, self._agreement.count
        if group is None:
            return [values]
        own = torch.tensor(values, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(count)]
        dist.all_gather(found, own, group=group)
        return [row.tolist() for row in found]

    def _adapt(self, rows: list[list[int]]) -> None:
        """Sets the steps between comparisons by what the last one cost the slowest rank, and what a step takes."""
        spent, step_ns = (max(row[at] for row in rows) for at in (-2, -1))
        if self._given is None and spent and step_ns:
            self.every = max(1, min(MOST_STEPS, int(spent / (SHARE * step_ns)) + 1))

    def _judged(self, rows: list[list[int]]) -> Comparison:
        found = Comparison(rows)
        everyone = tuple(range(len(rows)))
        if len({row[0] for row in rows}) > 1:
            odd = _odd(everyone, [row[0] for row in rows])
            found.differences.append(CopyMismatch(everyone, odd, ("counters of the loop",), 1, float("inf")))
        at = [1] * len(rows)
        for one in self._sets:
            values = [rows[rank][at[rank]] for rank in one.ranks]
            for rank in one.ranks:
                at[rank] += 1
            if len(set(values)) > 1 and one.ranks not in self._tolerated:
                difference = self._measured(one, values)
                small = difference.size <= ROUNDING
                if small:
                    self.tolerate(difference)
                (found.rounded if small else found.differences).append(difference)
        return found

    def _measured(self, one: HolderSet, values: list[int]) -> CopyMismatch:
        """Finds which tensors differ and by how much: the ranks that hold them send what they are unsure of."""
        table = self._agreement.gather([_signed(_bits(view)) for view in one.views])
        unequal = [at for at in range(len(one.names)) if len({table[rank][at] for rank in one.ranks}) > 1]
        found = [self._distance(one, at) for at in unequal[:_SHOWN]]
        size, element = max(found, key=lambda pair: pair[0])
        names = tuple(one.names[at] for at in unequal[:_SHOWN])
        return CopyMismatch(one.ranks, _odd(one.ranks, values), names, len(unequal), size, element)

    def _distance(self, one: HolderSet, at: int) -> tuple[float, Element]:
        """Returns how far the copies of a box are apart, and where most; the same on every rank."""
        first, mine = one.ranks[0], self._agreement.rank
        shape = self._agreement.gather(list(one.views[at].shape) if one.views else [])[first]
        sent = torch.zeros(shape, dtype=torch.float64)
        if mine == first:
            sent.copy_(one.views[at])
        dist.broadcast(sent, group=self._agreement.group, group_src=first)
        apart, index = 0.0, 0
        if one.views:
            difference = (one.views[at].to("cpu", torch.float64) - sent).abs().nan_to_num(nan=math.inf).view(-1)
            index = int(difference.argmax())
            rms = float(sent.square().mean().sqrt())
            apart = float(difference[index]) / rms if 0 < rms < math.inf else math.inf
        sizes, places = self._agreement.gather(repr(apart)), self._agreement.gather(index)
        most = max(one.ranks, key=lambda rank: float(sizes[rank]))
        size, index = float(sizes[most]), places[most]
        return size, Element(one.ranks, at, index, tuple(map(repr, self._values(one, at, index))))

    def _values(self, one: HolderSet, at: int, index: int) -> list[float]:
        """Returns an element of a box as each of its holders has it."""
        own = float(one.views[at].reshape(-1)[index]) if one.views else 0.0
        found = self._agreement.gather(repr(own))
        return [float(found[rank]) for rank in one.ranks]

    def right_value(self, element: Element) -> float | None:
        """Returns what the holders of an element have now, when they agree; None where nobody holds it like that."""
        if self._held is None:
            self._plan()
        one = next((one for one in self._sets if one.ranks == element.ranks), None)
        if one is None or element.number >= len(one.names):
            return None
        shapes = self._agreement.gather(one.views[element.number].numel() if one.views else 0)
        if element.index >= shapes[one.ranks[0]]:
            return None
        return self._values(one, element.number, element.index)[0]


def _odd(ranks: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
    """Returns the ranks whose value isn't that of more than half of them; none where no value is."""
    (value, count), *_ = Counter(values).most_common()
    if 2 * count <= len(values):
        return ()
    return tuple(rank for rank, own in zip(ranks, values) if own != value)


def _sum_of(views: Sequence[torch.Tensor]) -> int:
    """Returns one number of 64 bits for some tensors, which any single change changes."""
    totals = [_bits(view) for view in views]
    factors = [_signed(pow(_ODD, at + 1, _WORD)) for at in range(len(totals))]
    stacked = torch.stack(totals)
    return int((stacked * torch.tensor(factors, device=stacked.device)).sum())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum of a tensor's words of 64 bits, modulo 2^64: int64, without dims, on its device."""
    flat = tensor.contiguous().reshape(-1)
    words = 8 // flat.element_size()
    whole = flat.numel() - flat.numel() % words
    head, tail = flat[:whole], flat[whole:]
    if head.data_ptr() % 8:
        head = head.clone()
    total = head.view(torch.int64).sum()
    if tail.numel():
        padded = torch.zeros(words, dtype=flat.dtype, device=flat.device)
        padded[: tail.numel()] = tail
        total += padded.view(torch.int64).sum()
    return total


def _scalar_sum(values: Sequence[float | int]) -> int:
    return int(_bits(torch.tensor([float(value) for value in values], dtype=torch.float64)))


def _signed(value: int | torch.Tensor) -> int:
    """Returns a number modulo 2^64 as torch's int64 has it."""
    number = int(value) % _WORD
    return number - _WORD if number >= _WORD // 2 else number


def as_values(values: Mapping[str, Any]) -> list[float]:
    """Returns the numbers among plain values, in order of their names: what all ranks must have alike."""
    kept = ((name, value) for name, value in sorted(values.items()) if isinstance(value, (int, float)))
    return [float(value) for _, value in kept]
