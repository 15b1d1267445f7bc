"""The compressed sum of gradients over copies: rounded numbers travel, and every copy decodes the same bytes.

Two shots: rank p gets chunk p of every rank's rounded gradients (an all-to-all), adds them up in rank order, rounds the
sum and hands it to all (an all-gather). Where copies share a node, they sum exactly among themselves first, each then
sends its part of the node's sum, and the node's copies gather the parts: still the same bits on every copy.
Source: Dettmers (ICLR 2016) and Wang et al., ZeRO++ (2023), section 4, for blocks and for two exchanges instead of a
ring, whose every hop would round again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.parallel.axis_group import AxisGroup, PendingCollective
from meshwright.parallel.block_codec import BlockCodec, WeightBlocks
from meshwright.spec.compression import BLOCK_VALUES, FORMATS, Compression, chunk_blocks


@dataclass(slots=True)
class RoundingKey:
    """What the random roundings of a step follow from, beside weight, place and rank; whoever runs steps sets it."""

    seed: int = 0
    step: int = 0


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
    name: str
    """Number format, as in `spec.compression.FORMATS`."""
    run: int
    """Neighbours that summed exactly first."""
    draw: str
    """Seed and step of the roundings, ``"0,3"``; empty for rounding to the nearest."""
    copies_name: str = ""
    """Tells its ranks' draws from those of other shards' copies; empty for rounding to the nearest."""


Observer = Callable[[LossyTransfer], None]
"""Called when a transfer has ended; may change what the program reads."""


class GradientCompressor:
    """Sums gradients over copies in rounded numbers.

    Args:
        compression: the layout's choice.
        groups: the copies.
        key: of the step's random roundings.
        copies_name: tells the draws of one shard's copies from those of other shards'; the same on all ranks that hold
            the same weight, or their copies part.
    """

    def __init__(self, compression: Compression, groups: CopyGroups, key: RoundingKey, copies_name: str = "0") -> None:
        self._copies_name = copies_name
        self._name, self._groups, self._key = compression.name, groups, key
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
        inside = self._groups.inside
        chunk = chunk_blocks(weights.count, self._groups.copies.size)
        blocks = weights.pack(tensors, chunk * self._groups.copies.size, dtype)
        before = [tensor.clone() for tensor in tensors] if self.observer is not None else []
        draw = f"{self._key.seed},{self._key.step}"
        if inside is None:
            yield from self._sum_across(weights, blocks, 0, draw, of)
        else:
            # This rank's part of the node's exact sum travels between nodes.
            part = blocks.new_empty(len(blocks) // inside.size, BLOCK_VALUES)
            yield inside.reduce_scatter(part.view(-1), blocks.view(-1), of)
            yield from self._sum_across(weights, part, inside.index * len(part), draw, of)
            yield inside.all_gather(blocks.view(-1), part.view(-1), of)
        weights.unpack(blocks, tensors)
        if self.observer is not None:
            copies, run = self._groups.copies, inside.size if inside else 1
            transfer = LossyTransfer(
                weights=weights,
                before=before,
                after=tensors,
                axis_group=copies,
                name=self._name,
                run=run,
                draw=draw,
                copies_name=self._copies_name,
            )
            self.observer(transfer)

    def _sum_across(
        self, weights: WeightBlocks, blocks: torch.Tensor, first: int, step_draw: str, of: str
    ) -> Iterator[PendingCollective]:
        """Sums blocks, (N, 256), from number ``first`` of the weights on, in place, in rounded numbers."""
        across, codec = self._groups.across, self._codec
        chunk, own = len(blocks) // across.size, across.index
        draw = f"{step_draw},{self._copies_name}"
        raw_bytes = blocks[chunk:].nbytes
        encoded = codec.encode(blocks, weights.fractions(f"{draw},{own}", first, len(blocks), blocks.device))
        received = torch.empty_like(encoded)
        exchange = across.all_to_all(received.split(chunk), encoded.split(chunk), of)
        exchange.raw_bytes = raw_bytes
        yield exchange
        # In rank order, so that the sum doesn't depend on who computes it.
        terms = received.split(chunk)
        total = codec.decode(terms[0], blocks.dtype)
        for term in terms[1:]:
            total += codec.decode(term, blocks.dtype)
        fractions = weights.fractions(f"{draw},sum", first + own * chunk, chunk, blocks.device)
        encoded_total = codec.encode(total, fractions)
        own_blocks = blocks[own * chunk : (own + 1) * chunk]
        self._book_error(own_blocks, codec.decode(terms[own], blocks.dtype), total, encoded_total)
        gathered = torch.empty_like(encoded)
        gather = across.all_gather(gathered.view(-1), encoded_total.view(-1), of)
        gather.raw_bytes = raw_bytes
        yield gather
        blocks.copy_(codec.decode(gathered, blocks.dtype))

    def _book_error(
        self, own: torch.Tensor, decoded: torch.Tensor, total: torch.Tensor, encoded_total: torch.Tensor
    ) -> None:
        """Books how far rounding takes this rank's chunk of the sum, (M, 256) each but the bytes of the sum."""
        # The other ranks' terms are rounded as this one's is, independently: their squares add up.
        error = (decoded - own).square_().sum() * self._groups.across.size
        error += (self._codec.decode(encoded_total, total.dtype) - total).square_().sum()
        across = self._groups.across
        across.log.add_rounding(across.axis, "all_gather", error, total.square().sum())


class WeightCompressor:
    """Gathers weights in rounded numbers: every rank decodes the same bytes, its own shard's too.

    Args:
        name: of the number format; values are rounded to the nearest, since the same weights must give the same loss.
        axis_group: the ranks that share the weights.
    """

    def __init__(self, name: str, axis_group: AxisGroup) -> None:
        self._name, self._axis_group = name, axis_group
        self._codec = BlockCodec(name, FORMATS[name])
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
        before = [values.clone() for values in shard.split(sizes)] if self.observer is not None else []
        encoded = self._codec.encode(weights.pack(shard.split(sizes), weights.count, dtype), None)
        gathered = encoded.new_empty(group.size, *encoded.shape)
        transfer = group.all_gather(gathered.view(-1), encoded.view(-1), of)
        transfer.raw_bytes = shard.nbytes * (group.size - 1)
        yield transfer
        after = output.split(sizes * group.size)
        for rank, shard_bytes in enumerate(gathered):
            shards = after[rank * len(sizes) : (rank + 1) * len(sizes)]
            weights.unpack(self._codec.decode(shard_bytes, dtype), shards)
        if self.observer is not None:
            self.observer(
                LossyTransfer(
                    weights=weights, before=before, after=after, axis_group=group, name=self._name, run=1, draw=""
                )
            )
