"""Compressed collectives as a choice of the layout: number formats, their bytes, and which gradients share a message.

Values travel in blocks of `BLOCK_VALUES` with one scale each. A block never holds values of two weights, and how it is
rounded depends on its weight and its place there alone: which other weights share its message changes no number.
Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning (ICLR 2016), for blocks of 8 bits with a scale;
Alistarh et al., QSGD (NeurIPS 2017), for unbiased stochastic rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from meshwright.errors import PlanError, nearest

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


@dataclass(frozen=True, slots=True)
class Compression:
    """Rounding of the gradients' sum over copies: ``none``, ``int8``, or ``int8:2`` over nodes of 2 copies each.

    With a number, runs of so many neighbouring copies sum exactly first, and rounded numbers travel between the runs.
    """

    name: str = "none"
    """``none``, or one of `FORMATS`."""
    node_copies: int = 1
    """Neighbouring copies that sum exactly among themselves: those on one node."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the text form.

        Raises:
            PlanError: for an unknown format, or a number of copies that is no whole number of at least 2.
        """
        name, colon, copies = text.partition(":")
        if name not in ("none", *FORMATS):
            raise PlanError(f"compress={name} is unknown{nearest(name, ('none', *FORMATS))}")
        if colon and (name == "none" or not copies.isdigit() or int(copies) < 2):
            example = name if name in FORMATS else "int8"
            raise PlanError(f"compress={text}: write {example}:K, K copies of a node, 2 or more")
        return cls(name, int(copies or 1))

    def __str__(self) -> str:
        """Returns the text form."""
        return f"{self.name}:{self.node_copies}" if self.node_copies > 1 else self.name

    def __bool__(self) -> bool:
        """Returns whether anything is rounded."""
        return self.name != "none"

    def exact_copies(self, copies: int) -> int:
        """Returns how many neighbours of a group of copies sum exactly: 1 where runs don't divide it, or are all of it.

        Experts may have fewer copies than the other weights.
        """
        divides = copies % self.node_copies == 0 and copies > self.node_copies
        return self.node_copies if divides else 1

    def over(self, copies: int) -> Self:
        """Returns the same choice for another number of copies: without runs where they don't fit, ``none`` for one."""
        if copies == 1:
            return type(self)()
        return type(self)(self.name, self.exact_copies(copies))

    def check(self, copies: int, axes: tuple[str, str, int]) -> None:
        """Refuses what can't be with a number of copies.

        Args:
            copies: ranks over which a gradient is summed.
            axes: names of the axes of copies and of shards, and the degree of the latter, for the cure.

        Raises:
            PlanError: there are no copies, or the runs don't divide them.
        """
        if not self or (copies > 1 and self.exact_copies(copies) == self.node_copies):
            return
        if copies == 1:
            copy_axis, shard_axis, shard_degree = axes
            halves = f"{copy_axis}=2,{shard_axis}={shard_degree // 2}"
            cure = halves if shard_degree % 2 == 0 and shard_degree > 2 else f"{copy_axis}=2"
            raise PlanError(
                f"compress={self} rounds the gradients' sum over copies, and this layout has none; write {cure}, or "
                "drop it"
            )
        raise PlanError(
            f"compress={self}: runs of {self.node_copies} copies must divide the {copies} copies and be fewer; nearest "
            f"that works: compress={self.name}"
        )

    @property
    def format(self) -> NumberFormat:
        """The number format, of a layout that compresses."""
        return FORMATS[self.name]


def count_blocks(elements: int) -> int:
    """Returns the blocks of a weight of so many elements on this rank; the last may be filled up with zeros."""
    return -(-elements // BLOCK_VALUES)


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
    buckets: list[list[int]] = []
    open_buckets: dict[object, tuple[list[int], int]] = {}
    for position in reversed(range(len(sizes))):
        kind, size = kinds[position] if kinds else None, sizes[position]
        if size >= alone_bytes:
            buckets.append([position])
            # Collectives leave in this order: an older bucket that still waits for gradients would hold this one back.
            open_buckets.pop(kind, None)
            continue
        if kind not in open_buckets:
            open_buckets[kind] = ([], 0)
            buckets.append(open_buckets[kind][0])
        bucket, filled = open_buckets.pop(kind)
        bucket.append(position)
        if filled + size < alone_bytes:
            open_buckets[kind] = (bucket, filled + size)
    yield from buckets
