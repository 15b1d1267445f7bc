"""Detects silent data corruption by comparing checksums of state that several ranks hold.

Replicas, weights tied over pipeline stages, weights that tensor-parallel ranks share, and replicated experts are all
found in one way: as boxes of the state that more than one rank holds. The ranks that hold the same boxes are a **holder
set**; each of them sums the bits of its boxes to one 64-bit number, and the numbers are gathered and compared. A single
flipped bit always changes the sum.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from meshwright.checkpoint.agreement import Agreement
from meshwright.checkpoint.tensor_shards import TensorShard, collect_local_shards, split_into_cells, view_within
from meshwright.json_types import JsonObject
from meshwright.parallel.dcp_shards import StateTensor
from meshwright.parallel.program import Program
from meshwright.spec.placement import Box
from meshwright.torch_compat.tensors import tree_flatten
from meshwright.train.damage import Element
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.state import (
    BUFFERS,
    COUNTERS,
    island_of_name,
    island_prefix,
    state_addresses,
    state_tensors,
)

SHARE = 0.002
"""Share of a run's time that comparisons may cost."""
FIRST = 10
"""Steps between comparisons until their cost is known."""
MOST_STEPS = 1000
"""Largest number of steps between comparisons."""
ROUNDING = 1e-3
"""Largest difference of copies, relative to the tensor's root mean square, that counts as rounding: ranks may sum the
same terms in another order."""
_SHOWN = 4
_GOLDEN_RATIO_BITS = 0x9E3779B97F4A7C15
"""Odd, so that a sum times its powers changes whenever the sum does. Source: Knuth, 6.4, the golden ratio's bits."""
_WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class HolderSet:
    """The boxes of the state that exactly these ranks hold."""

    ranks: tuple[int, ...]
    """The holders, ascending."""
    names: tuple[str, ...]
    """Name of each box's tensor."""
    views: tuple[torch.Tensor, ...]
    """Each box in this rank's memory; empty on other ranks."""


@dataclass(frozen=True, slots=True)
class CopyMismatch:
    """Copies that differ."""

    ranks: tuple[int, ...]
    """The holders."""
    odd: tuple[int, ...]
    """Holders that differ from the majority; empty without a majority."""
    names: tuple[str, ...]
    """Tensors that differ, the first few."""
    count: int
    """How many tensors differ."""
    size: float
    """Largest difference of an element, relative to its tensor's root mean square; infinite if not finite."""
    element: Element | None = None
    """The element with the largest difference."""

    def __str__(self) -> str:
        """Returns a clause for an event or error."""
        tensor_names = ", ".join(self.names) + (
            f" and {self.count - len(self.names)} more" if self.count > _SHOWN else ""
        )
        subject = f"rank {', '.join(map(str, self.odd))} differs from ranks" if self.odd else "ranks"
        other_ranks = ", ".join(str(rank) for rank in self.ranks if rank not in self.odd)
        return f"{subject} {other_ranks} {'' if self.odd else 'hold different copies '}in {tensor_names}"


@dataclass(slots=True)
class Comparison:
    """The outcome of comparing all copies, the same on every rank."""

    rows: list[list[int]]
    """The checksums of each rank."""
    differences: list[CopyMismatch] = field(default_factory=list)
    """Copies that differ by more than rounding."""
    alarms: tuple[int, ...] = ()
    """Ranks whose own state is out of bounds (`train.bounds`)."""
    rounded: list[CopyMismatch] = field(default_factory=list)
    """Copies that differ by rounding, found now; they are no longer compared."""


class CopyCheck:
    """Compares the state that several ranks hold.

    Args:
        program: this rank's program.
        optimizer: over its weights.
        agreement: exchanges small values between all ranks.
        every: steps between comparisons; None adapts to a cost of `SHARE` of the time.
    """

    def __init__(self, program: Program, optimizer: LocalAdamW, agreement: Agreement, every: int | None) -> None:
        self._program, self._optimizer, self._agreement = program, optimizer, agreement
        self._fixed_interval = every
        self.every = every or FIRST
        """Steps between comparisons."""
        self._holder_sets: list[HolderSet] = []
        self._addresses: list[int] = []
        self._state: dict[str, StateTensor] | None = None
        self._across_islands = False
        """Whether the holder sets take what islands hold for themselves as copies."""
        self._tolerated: set[tuple[int, ...]] = set()
        self._cost_ns = self._width = 0
        self._last_comparison = (0, time.monotonic())

    def due(self, step: int) -> bool:
        """Whether to compare copies after a step."""
        return step - self._last_comparison[0] >= self.every

    def start(self, step: int) -> None:
        """Sets the step from which this rank trains."""
        self._last_comparison = (step, time.monotonic())

    def compare(
        self, step: int, scalars: Sequence[float | int], alarm: bool = False, across_islands: bool = False
    ) -> Comparison:
        """Compares all copies after a step; every rank must call it.

        Args:
            step: steps done.
            scalars: plain values that must be equal on all ranks.
            alarm: whether this rank's own state is out of bounds; sent to all ranks.
            across_islands: whether islands took all steps as one, so that their own states are copies too.
        """
        started_ns = time.perf_counter_ns()
        # The holder sets contain views: gather them again after memory has moved.
        is_moved = self._state is None or state_addresses(self._program, self._optimizer) != self._addresses
        if is_moved or across_islands != self._across_islands:
            self._across_islands = across_islands
            self._agree_on_holders()
        checksums = [
            _scalar_checksum(scalars),
            *(_checksum(holder_set.views) for holder_set in self._holder_sets if holder_set.views),
        ]
        last_step, last_time = self._last_comparison
        # Step time since the last comparison, for the interval that keeps the cost below `SHARE`.
        step_ns = int(1e9 * (time.monotonic() - last_time) / max(1, step - last_step))
        # all_gather needs equal lengths: ranks in fewer holder sets pad with zeros.
        checksums += [0] * (self._width - len(checksums))
        summed_ns = time.perf_counter_ns()
        rows = self._gather_rows([*checksums, int(alarm), self._cost_ns, step_ns])
        # The wait for the slowest rank in the gather isn't a cost of comparing: the time before it counts.
        self._cost_ns = summed_ns - started_ns
        self._adapt_interval(rows)
        self._last_comparison = (step, time.monotonic())
        comparison = self._compare_rows([row[: self._width] for row in rows])
        comparison.alarms = tuple(rank for rank, row in enumerate(rows) if row[self._width])
        return comparison

    def tolerate(self, difference: CopyMismatch) -> None:
        """Stops comparing the copies of a holder set whose differences recurred when recomputed."""
        self._tolerated.add(difference.ranks)

    def _agree_on_holders(self) -> None:
        """Builds the holder sets from the shards of all ranks; every rank must call it."""
        self._state = state_tensors(self._program, self._optimizer)
        self._addresses = state_addresses(self._program, self._optimizer)
        # Buffers may differ between ranks by design, as running statistics of local batches.
        local_shards = [
            (replace(shard, name=_name_of_copies(shard.name)) if self._across_islands else shard, view)
            for shard, view in collect_local_shards(self._state)
            if not shard.name.startswith(f"{BUFFERS}/")
        ]
        tables = [
            [TensorShard.from_json(values) for values in table]
            for table in self._agreement.gather([shard.to_json() for shard, _ in local_shards])
        ]
        holders: dict[tuple[str, tuple[int, ...], Box], set[int]] = {}
        boxes: dict[tuple[str, tuple[int, ...]], set[Box]] = {}
        for shard in (shard for table in tables for shard in table):
            boxes.setdefault((shard.name, shard.shape), set()).add(shard.box)
        # Shards of ranks may overlap partly: their boxes are cut into cells that each rank holds entirely or not.
        cells = {key: split_into_cells(key[1], shard_boxes) for key, shard_boxes in boxes.items()}
        for rank, table in enumerate(tables):
            for shard in table:
                for box in cells[shard.name, shard.shape][shard.box]:
                    holders.setdefault((shard.name, shard.shape, box), set()).add(rank)
        # This rank's views of the cells that it holds, through its own shards.
        views = {
            (shard.name, shard.shape, box): view_within(view, shard.box, box)
            for shard, view in local_shards
            for box in cells[shard.name, shard.shape][shard.box]
        }
        sets: dict[tuple[int, ...], list[tuple[str, tuple[int, ...], Box]]] = {}
        for key in sorted(holders):
            # State that only one rank holds has nothing to be compared with (`train.bounds` covers it).
            if len(holders[key]) > 1:
                sets.setdefault(tuple(sorted(holders[key])), []).append(key)
        own_rank = self._agreement.rank
        self._holder_sets = [
            HolderSet(
                ranks, tuple(key[0] for key in keys), tuple(views[key] for key in keys) if own_rank in ranks else ()
            )
            for ranks, keys in sorted(sets.items())
        ]
        self._width = 1 + max(
            sum(rank in holder_set.ranks for holder_set in self._holder_sets) for rank in range(len(tables))
        )

    def _gather_rows(self, values: list[int]) -> list[list[int]]:
        group, count = self._agreement.group, self._agreement.count
        if group is None:
            return [values]
        # On the CPU: the agreement's group is gloo, and the row small.
        local_row = torch.tensor(values, dtype=torch.int64)
        rows = [torch.empty_like(local_row) for _ in range(count)]
        dist.all_gather(rows, local_row, group=group)
        return [row.tolist() for row in rows]

    def _adapt_interval(self, rows: list[list[int]]) -> None:
        """Sets the steps between comparisons from the last one's cost on the slowest rank and the step time."""
        cost_ns, step_ns = (max(row[column] for row in rows) for column in (-2, -1))
        # All ranks take the maximum over the same rows, so they agree on the next step.
        if self._fixed_interval is None and cost_ns and step_ns:
            self.every = max(1, min(MOST_STEPS, int(cost_ns / (SHARE * step_ns)) + 1))

    def _compare_rows(self, rows: list[list[int]]) -> Comparison:
        comparison = Comparison(rows)
        everyone = tuple(range(len(rows)))
        # Column 0 is every rank's scalars; then a column for each holder set of the rank, in the same order.
        if len({row[0] for row in rows}) > 1:
            odd = _outvoted_ranks(everyone, [row[0] for row in rows])
            comparison.differences.append(CopyMismatch(everyone, odd, ("counters of the loop",), 1, float("inf")))
        columns = [1] * len(rows)
        for holder_set in self._holder_sets:
            values = [rows[rank][columns[rank]] for rank in holder_set.ranks]
            for rank in holder_set.ranks:
                columns[rank] += 1
            if len(set(values)) > 1 and holder_set.ranks not in self._tolerated:
                difference = self._measure_mismatch(holder_set, values)
                small = difference.size <= ROUNDING
                # Rounding persists: don't pay for the measurement again at each comparison.
                if small:
                    self.tolerate(difference)
                (comparison.rounded if small else comparison.differences).append(difference)
        return comparison

    def _measure_mismatch(self, holder_set: HolderSet, values: list[int]) -> CopyMismatch:
        """Returns which tensors of a holder set differ, and by how much; every rank must call it."""
        # A second exchange, only after a mismatch: which tensors differ.
        table = self._agreement.gather([_as_int64(_bit_sum(view)) for view in holder_set.views])
        unequal = [
            number
            for number in range(len(holder_set.names))
            if len({table[rank][number] for rank in holder_set.ranks}) > 1
        ]
        largest_differences = [self._largest_difference(holder_set, number) for number in unequal[:_SHOWN]]
        size, element = max(largest_differences, key=lambda pair: pair[0])
        names = tuple(holder_set.names[number] for number in unequal[:_SHOWN])
        return CopyMismatch(
            holder_set.ranks, _outvoted_ranks(holder_set.ranks, values), names, len(unequal), size, element
        )

    def _largest_difference(self, holder_set: HolderSet, number: int) -> tuple[float, Element]:
        """Returns the largest difference of a box's copies, relative to its root mean square, and that element.

        Every rank must call it, and gets the same. The first holder broadcasts its copy, float64 on the CPU.
        """
        reference_rank, own_rank = holder_set.ranks[0], self._agreement.rank
        shape = self._agreement.gather(list(holder_set.views[number].shape) if holder_set.views else [])[reference_rank]
        reference = torch.zeros(shape, dtype=torch.float64)
        if own_rank == reference_rank:
            reference.copy_(holder_set.views[number])
        # Ranks outside the holder set must take part in the collective too.
        dist.broadcast(reference, group=self._agreement.group, group_src=reference_rank)
        relative_size, index = 0.0, 0
        if holder_set.views:
            difference = (
                (holder_set.views[number].to("cpu", torch.float64) - reference).abs().nan_to_num(nan=math.inf).view(-1)
            )
            index = int(difference.argmax())
            rms = float(reference.square().mean().sqrt())
            relative_size = float(difference[index]) / rms if 0 < rms < math.inf else math.inf
        sizes, indices = self._agreement.gather(repr(relative_size)), self._agreement.gather(index)
        farthest_rank = max(holder_set.ranks, key=lambda rank: float(sizes[rank]))
        size, index = float(sizes[farthest_rank]), indices[farthest_rank]
        return size, Element(
            holder_set.ranks, number, index, tuple(map(repr, self._gather_element(holder_set, number, index)))
        )

    def _gather_element(self, holder_set: HolderSet, number: int, index: int) -> list[float]:
        """Returns the value of a box's element on each of its holders; every rank must call it."""
        local_value = float(holder_set.views[number].reshape(-1)[index]) if holder_set.views else 0.0
        values = self._agreement.gather(repr(local_value))
        return [float(values[rank]) for rank in holder_set.ranks]

    def right_value(self, element: Element) -> float | None:
        """Returns an element's present value on its first holder; None when no holder set has that element."""
        if self._state is None:
            self._agree_on_holders()
        holder_set = next((holder_set for holder_set in self._holder_sets if holder_set.ranks == element.ranks), None)
        if holder_set is None or element.number >= len(holder_set.names):
            return None
        shapes = self._agreement.gather(holder_set.views[element.number].numel() if holder_set.views else 0)
        if element.index >= shapes[holder_set.ranks[0]]:
            return None
        return self._gather_element(holder_set, element.number, element.index)[0]


def _name_of_copies(name: str) -> str:
    """Returns the name of a tensor without the number of its island, whose plain values remain its own."""
    island = island_of_name(name)
    if island is None or name == f"{island_prefix(island)}{COUNTERS}":
        return name
    return f"islands/{name.removeprefix(island_prefix(island))}"


def _outvoted_ranks(ranks: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
    """Returns the ranks whose value differs from the majority's; empty without a majority of more than half."""
    (value, count), *_ = Counter(values).most_common()
    if 2 * count <= len(values):
        return ()
    return tuple(rank for rank, rank_value in zip(ranks, values) if rank_value != value)


def _checksum(views: Sequence[torch.Tensor]) -> int:
    """Returns a 64-bit checksum of tensors of any shape and dtype; any change of one tensor's bit sum changes it."""
    # sum_i g^(i+1) s_i mod 2^64: odd factors keep each term invertible, powers keep swapped tensors distinct.
    totals = [_bit_sum(view) for view in views]
    factors = [_as_int64(pow(_GOLDEN_RATIO_BITS, power + 1, _WORD)) for power in range(len(totals))]
    stacked = torch.stack(totals)
    return int((stacked * torch.tensor(factors, device=stacked.device)).sum())


def _bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum of a tensor's 64-bit words modulo 2^64, an int64 scalar on its device."""
    flat = tensor.contiguous().reshape(-1)
    elements_per_word = 8 // flat.element_size()
    aligned_size = flat.numel() - flat.numel() % elements_per_word
    # The tail that fills no word is padded with zeros; a head off an 8-byte boundary can't be viewed as int64, nor can
    # an empty one, whose address is 0, at such an offset.
    head, tail = flat[:aligned_size], flat[aligned_size:]
    if head.data_ptr() % 8 or head.storage_offset() % elements_per_word:
        head = head.clone()
    total = head.view(torch.int64).sum()
    if tail.numel():
        padded = torch.zeros(elements_per_word, dtype=flat.dtype, device=flat.device)
        padded[: tail.numel()] = tail
        total += padded.view(torch.int64).sum()
    return total


def _scalar_checksum(values: Sequence[float | int]) -> int:
    return int(_bit_sum(torch.tensor([float(value) for value in values], dtype=torch.float64)))


def _as_int64(value: int | torch.Tensor) -> int:
    """Returns a number modulo 2^64 as a signed int64."""
    number = int(value) % _WORD
    return number - _WORD if number >= _WORD // 2 else number


def as_values(values: JsonObject) -> list[float]:
    """Returns the numbers among plain values as floats, ordered by name, those of lists and objects among them too."""
    leaves = tree_flatten([value for _, value in sorted(values.items())])[0]
    return [float(value) for value in leaves if isinstance(value, (int, float))]
