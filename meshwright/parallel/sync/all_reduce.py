"""All islands at once: every island gets the weighted mean over all of them."""

from __future__ import annotations

import torch

from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.block_codec import BlockCodec
from meshwright.parallel.sync.contract import Exchange, PendingMean
from meshwright.spec.compression import BLOCK_VALUES, FORMATS, count_blocks

_SUBJECT = "the islands' weights"


class AllReduce(Exchange):
    """The weighted mean over all islands, to the same bits on each."""

    name = "all_reduce"
    global_mean = True

    def sent_bytes(self, elements: int, element_bytes: int, islands: int, compress: str = "none") -> int:
        """Returns the bytes that a rank sends in an exchange: a ring's, or its rounded blocks to every other island."""
        if compress != "none":
            return count_blocks(elements) * FORMATS[compress].block_bytes * (islands - 1)
        return 2 * elements * element_bytes * (islands - 1) // islands

    def check(self, islands: int) -> None:
        """Refuses no number of islands."""

    def start(
        self, values: torch.Tensor, weight: float, group: AxisGroup, exchange_index: int, compress: str = "none"
    ) -> PendingMean:
        """Starts the sum of weight x ``values: (n,)`` and of the weights; `PendingMean.finish` divides."""
        if compress != "none":
            return _gather_rounded(values, weight, group, BlockCodec(compress, FORMATS[compress]))
        # In float64: a sum of token counts must be exact.
        total = torch.tensor([weight], dtype=torch.float64, device=values.device)
        pending = [group.all_reduce(values.mul_(weight), _SUBJECT), group.all_reduce(total, _SUBJECT)]

        def finish() -> torch.Tensor:
            for collective in pending:
                collective.wait()
            # No island may have trained on a token: then all of them hold zeros.
            return values.div_(total.clamp(min=1.0).to(values.dtype))

        return PendingMean(finish, self.sent_bytes(values.numel(), values.element_size(), group.size))


def _gather_rounded(values: torch.Tensor, weight: float, group: AxisGroup, codec: BlockCodec) -> PendingMean:
    """Starts gathering every island's ``values: (n,)`` in rounded blocks, which each sums in the same order.

    A sum of rounded numbers would round after every term; gathered, each island's movement is rounded once.
    """
    size = values.numel()
    blocks = values.new_zeros((count_blocks(size), BLOCK_VALUES))
    blocks.view(-1)[:size] = values
    # To the nearest, without random numbers: all islands start the next round from the same decoded mean.
    rounded = codec.encode(blocks, None).view(-1)
    gathered = rounded.new_empty(group.size * rounded.numel())
    own_weight = torch.tensor([weight], dtype=torch.float64, device=values.device)
    weights = torch.empty(group.size, dtype=torch.float64, device=values.device)
    pending = [group.all_gather(gathered, rounded, _SUBJECT), group.all_gather(weights, own_weight, _SUBJECT)]

    def finish() -> torch.Tensor:
        for collective in pending:
            collective.wait()
        shares = (weights / weights.sum().clamp(min=1.0)).tolist()
        values.zero_()
        # In the islands' order on all of them, so that every island gets the same bits.
        for encoded, share in zip(gathered.view(group.size, -1, codec.block_bytes), shares):
            values.add_(codec.decode(encoded, values.dtype).view(-1)[:size], alpha=share)
        return values

    return PendingMean(finish, rounded.nbytes * (group.size - 1))


EXCHANGE = AllReduce()
