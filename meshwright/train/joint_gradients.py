"""The sum of gradients over islands, for first steps that these take as one (`outer.warmup`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.block_codec import WeightBlocks
from meshwright.parallel.compression import CopyGroups, GradientCompressor, RoundingKey
from meshwright.parallel.weights import Weight
from meshwright.spec.compression import Compression, assign_buckets

_SUBJECT = "gradients before islands part"


class JointGradients:
    """Sums this rank's gradients with those of the ranks of other islands that hold the same weights.

    Args:
        group: these ranks, one of each island.
        device: where collectives read; gradients may lie on the host.
        number_format: of gradients on the wire; ``none`` for their own.
        key: of the random roundings.
    """

    def __init__(self, group: AxisGroup, device: torch.device, number_format: str, key: RoundingKey) -> None:
        self._group, self._device = group, device
        self._compressor: GradientCompressor | None = None
        if number_format != "none":
            # One name of the draws: replicas of an island, and stages that share a weight, must round alike.
            groups = CopyGroups(group, None, group)
            self._compressor = GradientCompressor(Compression(number_format), groups, key, "islands")

    @torch.no_grad()
    def sum(self, weights: Iterable[Weight]) -> None:
        """Sums the gradients of some weights in place."""
        pairs = [(weight.name, weight.gradient) for weight in weights]
        present = [(name, gradient) for name, gradient in pairs if gradient is not None and gradient.numel()]
        names, gradients = [name for name, _ in present], [gradient for _, gradient in present]
        sizes, dtypes = [gradient.nbytes for gradient in gradients], [gradient.dtype for gradient in gradients]
        # Gradients are all there, so room for a copy of them may not be: of a few at a time, and of a large one none.
        for positions in assign_buckets(sizes, dtypes):
            flat = [gradients[position].reshape(-1).to(self._device) for position in positions]
            views: Sequence[torch.Tensor] = flat
            if self._compressor is None:
                values = flat[0] if len(flat) == 1 else torch.cat(flat)
                self._group.all_reduce(values, _SUBJECT).wait()
                views = values.split([part.numel() for part in flat])
            else:
                blocks = WeightBlocks([names[position] for position in positions], [part.numel() for part in flat])
                self._compressor.all_reduce(blocks, flat, _SUBJECT).wait()
            for position, view in zip(positions, views):
                gradient = gradients[position]
                if view.data_ptr() != gradient.data_ptr():
                    gradient.copy_(view.view_as(gradient))
