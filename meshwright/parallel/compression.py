"""The compressed sum of gradients over copies: rounded numbers travel, and every copy decodes the same bytes.

Two shots: rank p gets chunk p of every rank's rounded gradients (an all-to-all), adds them up in rank order, rounds the
sum and hands it to all (an all-gather). Where copies share a node, they sum exactly among themselves first, each then
sends its part of the node's sum, and the node's copies gather the parts: still the same bits on every copy.
Source: Dettmers (ICLR 2016) and Wang et al., ZeRO++ (2023), section 4, for blocks and for two exchanges instead of a
ring, whose every hop would round again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from meshwright.parallel.axis_group import AxisGroup, PendingCollective
from meshwright.parallel.block_codec import BlockCodec, BlockStore, DenseBlocks, WeightBlocks, WeightStore
from meshwright.spec.compression import BLOCK_VALUES, FORMATS, Compression, chunk_blocks


@dataclass(slots=True)
class RoundingKey:
    """What the random roundings of a step follow from, beside weight, place and rank; whoever runs steps sets it."""

    seed: int = 0
    step: int | torch.Tensor = 0
    """A scalar tensor in a custom loop, whose checkpoint is loaded in place."""


class PhasedCollective(dist.Work):  # type: ignore[misc]
    """Several collectives in turn, of which the first is under way: each needs what the one before brought."""

    def __init__(self, phases: Iterator[PendingCollective]) -> None:
        super().__init__()
        self._phases = phases
        self._pending = next(phases, None)

    def advance(self) -> bool:
        """Waits for the collective under way and starts the next; returns whether all have ended."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None  # frees its buffers before the next exchange has its own
            self._pending = next(self._phases, None)
        return self._pending is None

    def wait(self, timeout: object = None) -> bool:
        """Waits for all of them; the process group's own timeout bounds each."""
        while not self.advance():
            continue
        return True


@dataclass(frozen=True, slots=True)
class CopyGroups:
    """The copies that a compressed sum is over."""

    copies: AxisGroup
    """All of them."""
    inside: AxisGroup | None
    """Those on this rank's node, which sum exactly; None where each sends rounded numbers itself."""
    across: AxisGroup
    """Those that rounded numbers travel between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossyTransfer:
    """A transfer of rounded numbers that has ended, for who checks it."""

    weights: WeightBlocks
    """Whose values travelled."""
    before: Sequence[torch.Tensor]
    """This rank's values, exact: gradients of any shapes, or shards (n,)."""
    after: Sequence[torch.Tensor]
    """What the program reads: sums in the shapes of `before`, or the shards of every rank, (n,) each."""
    axis_group: AxisGroup
    """Its ranks."""


Observer = Callable[[LossyTransfer], None]
"""Called when a transfer has ended; may change what the program reads."""


@dataclass(frozen=True, slots=True)
class _Message:
    """Blocks that are summed over ranks in rounded numbers."""

    weights: WeightBlocks
    store: BlockStore
    """Their values."""
    first: int
    """Number of the store's first block among the weights'."""
    count: int
    draw: str
    """Seed, step and copies of the roundings."""
    of: str

    def draws(self, what: str, offset: int = 0) -> Callable[[int, int], torch.Tensor]:
        """Returns what draws the random numbers of blocks from ``offset`` of the store on: a rank's, or the sum's."""

        def draw_fractions(first: int, count: int) -> torch.Tensor:
            begin = self.first + offset + first
            return self.weights.fractions(f"{self.draw},{what}", begin, count, self.store.device)

        return draw_fractions


class GradientSum(Protocol):
    """Sums gradients over copies otherwise than exactly."""

    def all_reduce(self, weights: WeightBlocks, tensors: Sequence[torch.Tensor], of: str = "") -> PhasedCollective:
        """Starts the sum of some gradients, contiguous and of any shapes, in place.

        Args:
            weights: whose gradients they are.
            tensors: the gradients; nobody may read them until the sum has ended.
            of: names them in messages.
        """


class GradientCompressor:
    """Sums gradients over copies in rounded numbers.

    Args:
        compression: the layout's choice.
        groups: the copies.
        key: of the step's random roundings.
        copies_name: tells the draws of one shard's copies, and of one stage, from those of others; the same on all
            ranks that hold the same weight, or their copies part.
    """

    def __init__(
        self, compression: Compression, groups: CopyGroups, key: RoundingKey, copies_name: str = "0.0"
    ) -> None:
        self._copies_name, self._groups, self._key = copies_name, groups, key
        self.observer: Observer | None = None
        """Checks every sum, where a proof set it."""
        self._codec = BlockCodec(compression.name, compression.format)

    def all_reduce(
        self, weights: WeightBlocks, tensors: Sequence[torch.Tensor], of: str = "", dtype: torch.dtype | None = None
    ) -> PhasedCollective:
        """Starts the sum of some gradients, contiguous and of any shapes, in place.

        Args:
            weights: whose gradients they are.
            tensors: the gradients; nobody may read them until the sum has ended.
            of: names them in messages.
            dtype: of the sum; None for float64 where the gradients are, else float32.
        """
        if dtype is None:
            dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        return PhasedCollective(self._phases(weights, tensors, of, dtype))

    def _phases(
        self, weights: WeightBlocks, tensors: Sequence[torch.Tensor], of: str, dtype: torch.dtype
    ) -> Iterator[PendingCollective]:
        if not weights.count:
            return
        inside, size = self._groups.inside, self._groups.copies.size
        count = chunk_blocks(weights.count, size) * size
        before = [tensor.clone() for tensor in tensors] if self.observer is not None else []
        draw = f"{self._key.seed},{int(self._key.step)},{self._copies_name}"
        if inside is None:
            store = WeightStore(weights, tensors, dtype)
            yield from self._sum_across(_Message(weights, store, 0, count, draw, of))
        else:
            # This rank's part of the neighbours' exact sum travels on.
            part_blocks = count // inside.size
            first = inside.index * part_blocks
            elements = [weights.count_elements(index * part_blocks, part_blocks) for index in range(inside.size)]
            blocks = weights.read(tensors, 0, count, dtype)
            # A gradient that fills its blocks is read where it lies.
            if blocks.data_ptr() != tensors[0].data_ptr():
                self._track(blocks)
            part = self._track(blocks.new_empty(part_blocks, BLOCK_VALUES))
            scatter = inside.reduce_scatter(part.view(-1), blocks.view(-1), of)
            scatter.raw_bytes = (sum(elements) - elements[inside.index]) * part.element_size()
            yield scatter
            del blocks, scatter  # packed again for the gather, so that only the part stays in between
            yield from self._sum_across(_Message(weights, DenseBlocks(part), first, part_blocks, draw, of))
            blocks = self._track(part.new_empty(count, BLOCK_VALUES))
            gather = inside.all_gather(blocks.view(-1), part.view(-1), of)
            gather.raw_bytes = elements[inside.index] * (inside.size - 1) * part.element_size()
            yield gather
            weights.write(tensors, 0, blocks)
        if self.observer is not None:
            transfer = LossyTransfer(weights=weights, before=before, after=tensors, axis_group=self._groups.copies)
            self.observer(transfer)

    def _sum_across(self, message: _Message) -> Iterator[PendingCollective]:
        """Sums a message's blocks in place, in rounded numbers."""
        across, codec, store = self._groups.across, self._codec, message.store
        chunk, own = message.count // across.size, across.index
        element_bytes = store.dtype.itemsize
        own_elements = message.weights.count_elements(message.first + own * chunk, chunk)
        elements = message.weights.count_elements(message.first, message.count)
        encoded = self._track(codec.encode_store(store, message.count, message.draws(str(own))))
        received = self._track(torch.empty_like(encoded))
        exchange = across.all_to_all(received.split(chunk), encoded.split(chunk), message.of)
        exchange.raw_bytes = (elements - own_elements) * element_bytes
        yield exchange
        # In rank order, so that the sum doesn't depend on who computes it.
        terms = received.split(chunk)
        total = self._track(codec.sum_terms(terms, store.dtype))
        rounded = self._track(codec.encode_store(DenseBlocks(total), chunk, message.draws("sum", own * chunk)))
        self._book_error(store, own * chunk, terms[own], total, rounded)
        # The bytes that were sent have arrived: their buffer takes the sums of all ranks.
        del exchange, received, terms, total
        gather = across.all_gather(encoded.view(-1), rounded.view(-1), message.of)
        gather.raw_bytes = own_elements * (across.size - 1) * element_bytes
        yield gather
        codec.decode_to_store(store, encoded)

    def _book_error(
        self, store: BlockStore, first: int, term: torch.Tensor, total: torch.Tensor, rounded: torch.Tensor
    ) -> None:
        """Books how far rounding takes this rank's chunk of the sum.

        Args:
            store: this rank's exact values.
            first: number of the chunk's first block there.
            term: (M, block_bytes) uint8, this rank's values as they were sent.
            total: (M, 256) the sum of all ranks' terms.
            rounded: (M, block_bytes) uint8, the sum as it is sent.
        """
        across = self._groups.across
        error, squared_sum = self._codec.rounding_error(store, first, term, total, rounded, across.size)
        across.log.add_rounding(across.axis, "all_gather", error, squared_sum)

    def _track(self, buffer: torch.Tensor) -> torch.Tensor:
        return self._groups.copies.log.buffers.track("gradients", buffer)


class WeightCompressor:
    """Gathers weights in rounded numbers: every rank decodes the same bytes, its own shard's too.

    Args:
        name: of the number format; values are rounded to the nearest, since the same weights must give the same loss.
        axis_group: the ranks that share the weights.
    """

    def __init__(self, name: str, axis_group: AxisGroup) -> None:
        self._axis_group, self._codec = axis_group, BlockCodec(name, FORMATS[name])
        self.observer: Observer | None = None
        """Checks every gather, where a proof set it."""

    def all_gather(
        self, weights: WeightBlocks, output: torch.Tensor, shard: torch.Tensor, of: str = ""
    ) -> PhasedCollective:
        """Starts a gather of every rank's ``shard: (n,)`` into ``output: (size * n,)``, in rank order.

        Args:
            weights: whose shards follow each other in ``shard``.
            output: of any floating dtype.
            shard: may be this rank's own slice of ``output``.
            of: names the weights in messages.
        """
        return PhasedCollective(self._phases(weights, output, shard, of))

    def _phases(
        self, weights: WeightBlocks, output: torch.Tensor, shard: torch.Tensor, of: str
    ) -> Iterator[PendingCollective]:
        if not weights.count:
            return
        group, sizes = self._axis_group, list(weights.sizes)
        dtype = torch.float64 if output.dtype == torch.float64 else torch.float32
        shards = shard.split(sizes)
        before = [values.clone() for values in shards] if self.observer is not None else []
        track = functools.partial(group.log.buffers.track, "weights")
        encoded = track(self._codec.encode_store(WeightStore(weights, shards, dtype), weights.count, None))
        gathered = track(encoded.new_empty(group.size, *encoded.shape))
        transfer = group.all_gather(gathered.view(-1), encoded.view(-1), of)
        transfer.raw_bytes = shard.nbytes * (group.size - 1)
        yield transfer
        after = output.split(sizes * group.size)
        for rank, shard_bytes in enumerate(gathered):
            targets = after[rank * len(sizes) : (rank + 1) * len(sizes)]
            self._codec.decode_to_store(WeightStore(weights, targets, dtype), shard_bytes)
        if self.observer is not None:
            self.observer(LossyTransfer(weights=weights, before=before, after=after, axis_group=group))
