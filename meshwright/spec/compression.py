"""Compressed collectives as a choice of the layout: number formats, their bytes, and which gradients share a message.

Values travel in blocks of `BLOCK_VALUES` with one scale each. A block never holds values of two weights, and how it is
rounded depends on its weight and its place there alone: which other weights share its message changes no number.
Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning (ICLR 2016), for blocks of 8 bits with a scale;
Alistarh et al., QSGD (NeurIPS 2017), for unbiased stochastic rounding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from meshwright.errors import PlanError, nearest
from meshwright.spec.low_rank import POWER_SGD, sums_in_low_rank
from meshwright.spec.top_k import TOP_K, sums_largest_values

BLOCK_VALUES = 256
"""Values that share a scale."""
ALONE_BYTES = 1 << 20
"""Gradients of at least this size travel alone; smaller ones are packed until a bucket holds this much."""
ALONE_SHARE = 16
"""In a model of less than 16 MiB of gradients, one of 1/16 of them travels alone, so that small clones bucket alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberFormat:
    """A format of rounded numbers on the wire."""

    value_bytes: int
    """Bytes of a value."""
    largest: float
    """The value that the largest of a block becomes; 0 where blocks have no scale."""
    mantissa_bits: int
    """Explicit bits of the mantissa; 0 for whole numbers."""
    least_exponent: int
    """Exponent of the smallest normal number; below it the distance between numbers stays the same."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, with its float32 scale where it has one."""
        return BLOCK_VALUES * self.value_bytes + (4 if self.largest else 0)


FORMATS: Mapping[str, NumberFormat] = {
    "bf16": NumberFormat(value_bytes=2, largest=0.0, mantissa_bits=7, least_exponent=-126),
    # A scale for each block, so that no loss scale overflows it.
    "fp16": NumberFormat(value_bytes=2, largest=65504.0, mantissa_bits=10, least_exponent=-14),
    "int8": NumberFormat(value_bytes=1, largest=127.0, mantissa_bits=0, least_exponent=0),
    # e4m3. Source: Micikevicius et al., FP8 Formats for Deep Learning (2022), table 1.
    "fp8": NumberFormat(value_bytes=1, largest=448.0, mantissa_bits=3, least_exponent=-6),
}
"""Number formats of gradients on the wire, by name."""
WEIGHT_FORMATS = ("none", "int8", "fp8")
"""Number formats of gathered weights."""
FLOAT8_CAPABILITY = 8.9
"""Compute capability from which NVIDIA's GPUs have float8: Ada."""
TOKEN_FORMATS = ("none", "fp8")
"""Number formats of tokens on their way to experts."""
RUN_VALUES = 128
"""Values of a token that share a scale, which is a power of two."""


METHODS = (*FORMATS, POWER_SGD, TOP_K)
"""Ways to sum gradients over copies with fewer bytes: numbers of fewer bits, matrices of low rank, fewer values."""
_FEEDBACK_NUMBERS = {POWER_SGD: ("R", "rank R of 1 or more", 1), TOP_K: ("D", "one value in D, 2 or more", 2)}
"""Letter of the number of each method with error feedback, what it says, and the least."""


@dataclass(frozen=True, slots=True)
class Compression:
    """Fewer bytes for the gradients' sum over copies: ``none``, ``int8``, ``int8:2``, ``powersgd:4``, ``topk:100``.

    With a number, runs of so many neighbouring copies sum exactly first, and rounded numbers travel between the runs.
    That of ``powersgd`` is the rank, that of ``topk`` says of how many values one travels; one more, as in
    ``powersgd:4:100``, says how many first steps sum exactly.
    """

    name: str = "none"
    """``none``, or one of `METHODS`."""
    node_copies: int = 1
    """Neighbouring copies that sum exactly among themselves: those on one node."""
    rank: int = 0
    """Of ``powersgd``; 0 for other methods."""
    exact_steps: int = 0
    """First steps of the run that ``powersgd`` and ``topk`` sum exactly."""
    inverse_density: int = 0
    """Of ``topk``: of so many values one travels; 0 for other methods."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the text form.

        Raises:
            PlanError: for an unknown name, a number of copies that is no whole number of at least 2, or a rank or a
                density that can't be.
        """
        name, colon, numbers = text.partition(":")
        if name not in ("none", *METHODS):
            raise PlanError(f"compress={name} is unknown{nearest(name, ('none', *METHODS))}")
        if name in _FEEDBACK_NUMBERS:
            letter, meaning, least = _FEEDBACK_NUMBERS[name]
            number, more, steps = numbers.partition(":")
            if not number.isdecimal() or int(number) < least or not (steps.isdecimal() or not more):
                raise PlanError(
                    f"compress={text}: write {name}:{letter}, {meaning}, or {name}:{letter}:S, the first S steps exact"
                )
            if name == TOP_K:
                return cls(name, exact_steps=int(steps or 0), inverse_density=int(number))
            return cls(name, rank=int(number), exact_steps=int(steps or 0))
        if colon and (name == "none" or not numbers.isdigit() or int(numbers) < 2):
            example = name if name in FORMATS else "int8"
            raise PlanError(f"compress={text}: write {example}:K, K copies of a node, 2 or more")
        return cls(name, int(numbers or 1))

    def __str__(self) -> str:
        """Returns the text form."""
        if self.keeps_errors:
            return f"{self.name}:{self.rank or self.inverse_density}" + (
                f":{self.exact_steps}" if self.exact_steps else ""
            )
        return f"{self.name}:{self.node_copies}" if self.node_copies > 1 else self.name

    def __bool__(self) -> bool:
        """Returns whether sums are other than exact."""
        return self.name != "none"

    @property
    def keeps_errors(self) -> bool:
        """Whether what a sum leaves out of a copy's gradients is kept for its next step."""
        return self.name in _FEEDBACK_NUMBERS

    @property
    def is_low_rank(self) -> bool:
        """Whether matrices are summed in low rank."""
        return self.name == POWER_SGD

    def leaves_out(self, shape: Sequence[int], local_shape: Sequence[int]) -> bool:
        """Returns whether the sum of a weight's gradient leaves out what is owed to the next step.

        Args:
            shape: of the whole weight, before any axis splits it.
            local_shape: of this rank's part.
        """
        if self.is_low_rank:
            return sums_in_low_rank(shape, local_shape, self.rank)
        return self.name == TOP_K and sums_largest_values(shape) and math.prod(local_shape) > 0

    def exact_copies(self, copies: int) -> int:
        """Returns how many neighbours of a group of copies sum exactly: 1 where runs don't divide it, or are all of it.

        Experts may have fewer copies than the other weights.
        """
        divides = copies % self.node_copies == 0 and copies > self.node_copies
        return self.node_copies if divides else 1

    def over(self, copies: int) -> Self:
        """Returns the same choice for another number of copies: without runs where they don't fit, ``none`` for one.

        Where indices and values of all copies would be more than the exact sum, that is taken.
        """
        if copies == 1 or 0 < self.inverse_density <= copies:
            return type(self)()
        return dataclasses.replace(self, node_copies=self.exact_copies(copies))

    def check(self, copies: int, axes: tuple[str, str, int]) -> None:
        """Refuses what can't be with a number of copies.

        Args:
            copies: ranks over which a gradient is summed.
            axes: names of the axes of copies and of shards, and the degree of the latter, for the cure.

        Raises:
            PlanError: there are no copies, the runs don't divide them, or values and indices would be more bytes.
        """
        if copies > 1 and 0 < self.inverse_density <= copies:
            raise PlanError(
                f"compress={self}: {copies} copies that get 1/{self.inverse_density} of each other's values, with "
                f"indices, get no fewer bytes than by an exact sum; write {self.name}:{copies + 1} or more"
            )
        if not self or (copies > 1 and self.exact_copies(copies) == self.node_copies):
            return
        if copies == 1:
            copy_axis, shard_axis, shard_degree = axes
            halves = f"{copy_axis}=2,{shard_axis}={shard_degree // 2}"
            verb = "approximates" if self.keeps_errors else "rounds"
            cure = halves if shard_degree % 2 == 0 and shard_degree > 2 else f"{copy_axis}=2"
            raise PlanError(
                f"compress={self} {verb} the gradients' sum over copies, and this layout has none; write {cure}, or "
                "drop it"
            )
        raise PlanError(
            f"compress={self}: runs of {self.node_copies} copies must divide the {copies} copies and be fewer; nearest "
            f"that works: compress={self.name}"
        )

    @property
    def format(self) -> NumberFormat:
        """The number format, of a layout that rounds."""
        return FORMATS[self.name]


def count_blocks(elements: int) -> int:
    """Returns the blocks of a weight of so many elements on this rank; the last may be filled up with zeros."""
    return -(-elements // BLOCK_VALUES)


def row_bytes(values: int) -> int:
    """Returns the bytes of a token of so many values in float8, with a byte for the scale of each run."""
    return values - (-values // RUN_VALUES)


def chunk_blocks(blocks: int, copies: int) -> int:
    """Returns the blocks of a message that each of some copies sums; those after the last hold zeros."""
    return -(-blocks // copies)


def assign_buckets(sizes: Sequence[int], kinds: Sequence[object] = ()) -> Iterator[list[int]]:
    """Yields the gradients that travel together, as positions, back to front as backward makes them.

    Args:
        sizes: bytes of each gradient, in the order in which forward uses the weights.
        kinds: of each, such as its dtype; those of different kinds aren't packed together. All alike where empty.

    Yields:
        Positions in ``sizes``, one list for each message.
    """
    alone_bytes = min(ALONE_BYTES, max(1, sum(sizes) // ALONE_SHARE))
    open_buckets: dict[object, tuple[list[int], int]] = {}
    for position in reversed(range(len(sizes))):
        kind, size = kinds[position] if kinds else None, sizes[position]
        if size >= alone_bytes:
            yield [position]
            continue
        bucket, filled = open_buckets.pop(kind, ([], 0))
        bucket.append(position)
        # A bucket takes its place when it is full: collectives leave in this order, and one that still waits for
        # gradients would hold back those after it.
        if filled + size >= alone_bytes:
            yield bucket
        else:
            open_buckets[kind] = (bucket, filled + size)
    for bucket, _ in open_buckets.values():
        yield bucket
