"""Prices ``tp_overlap``: what of tp's traffic is seen where products are computed in n chunks of tokens beside it.

Of n chunks of c seconds of traffic and p seconds of products each:

- a sum after its product: chunk i travels while chunk i + 1 is computed, and backward's last ones under W seconds of
  weight gradients. Seen: max(c, n c - (n - 1) p) of forward, max(0, c - W, n c - (n - 1) p - W) of backward;
- a gather before its product: the first chunk is seen, and what the products of the others don't hide:
  max(c, n c - (n - 1) p).

Beside that n messages have n latencies, products of fewer tokens run at a lower rate, chunks of several ranks' tokens
are copied into order, and what is hidden slows the products that hide it (`RuntimeModel.interference`). All of it is
booked as tp's. Processor cores compute and carry both, so there nothing is hidden.

Source: `parallel.overlapped_products`, of which these are the steps; never measured on several GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.array_types import Values
from meshwright.cluster import traffic
from meshwright.planner.cost.kernels import matmul_s, move_s
from meshwright.planner.cost.layer_cost import PassTime
from meshwright.planner.cost.layout_batch import Array
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.spec.model_shape import LayerShape, Product

CHUNK_OPERATIONS = 5.0
"""Operators that the host launches for a further chunk of a product: its slice, the product, the collective and its
wait, and a copy. Counted off `parallel.overlapped_products`."""
LAYER_OPERATORS = 38.0
"""Operators of a layer's forward, which `RuntimeModel.host_layer_s` is for."""


@dataclass(frozen=True, slots=True)
class TpBlock:
    """Products between two of tp's collectives of a layer: attention, or a feed-forward part."""

    columns: tuple[Product, ...]
    row: Product


def overlapped_blocks(layer: LayerShape) -> Iterator[TpBlock]:
    """Yields the blocks of a layer whose products are of linear modules; those of routed experts aren't."""
    columns: list[Product] = []
    for product in (product for product in layer.products if not product.experts):
        if product.split == "columns":
            columns.append(product)
        elif product.split == "rows":
            yield TpBlock(tuple(columns), product)
            columns = []


class OverlappedTraffic:
    """What ``tp_overlap`` changes in the passes of a layer, for N layouts.

    Args:
        model: the layouts on their machine.
        layer: its sizes.
        collective_s: of a block and pass, that nothing hides, (N,).
    """

    def __init__(self, model: PricedModel, layer: LayerShape, collective_s: Array) -> None:
        self._model, self._layer, self._collective_s = model, layer, collective_s
        layouts = model.layouts
        self._is_on = (layouts.tp_overlap > 0) & (layouts.tp > 1)
        self._is_split = layouts.sequence > 0
        self._chunks = np.maximum(1.0, np.minimum(layouts.tp_overlap, model.tokens / model.token_shards))
        size = model.tokens * layer.width * model.element / self._chunks
        groups = model.groups
        kinds = (traffic.all_gather_s, traffic.reduce_scatter_s, traffic.all_reduce_s)
        self._gather_s, scatter_s, reduce_s = (groups.seconds(kind, size, groups.tp) for kind in kinds)
        self._sum_s = np.where(self._is_split, scatter_s, reduce_s)
        # Without units of its own a device computes and carries on the same cores.
        self._hides = model.machine.device.units > 0

    def correct(self, forward: PassTime, backward: PassTime) -> None:
        """Changes the seconds of tp, and of the host, of a layer's two passes."""
        blocks = list(overlapped_blocks(self._layer))
        for pass_time, is_backward in ((forward, False), (backward, True)):
            change: Values = 0.0
            for block in blocks:
                change = change + self._block_s(block, is_backward) - self._collective_s
            pass_time.tp = np.maximum(pass_time.tp + np.where(self._is_on, change, 0.0), 0.0)
            pass_time.host = pass_time.host + np.where(self._is_on, self._host_s(blocks, is_backward), 0.0)

    def _block_s(self, block: TpBlock, is_backward: bool) -> Array:
        """Returns seconds of a block's traffic in a pass, and of what its chunks take beside it, (N,)."""
        columns_s = self._products_s(block.columns, is_backward)
        row_s = self._products_s((block.row,), is_backward)
        # Forward gathers for the columns and sums the row's output; backward gathers for the row.
        gathering_s, summing_s = (row_s, columns_s) if is_backward else (columns_s, row_s)
        behind_s = self._weight_products_s(block.columns) if is_backward else 0.0
        sums_s = self._sum_s * self._chunks
        seen_s = np.maximum(self._sum_s, sums_s - (self._chunks - 1) * summing_s[1]) - behind_s
        seen_s = self._seen(np.maximum(seen_s, 0.0), sums_s)
        slower_s = self._chunks * summing_s[1] - summing_s[0]
        gathers_s = self._gather_s * self._chunks
        seen_gather_s = np.maximum(self._gather_s, gathers_s - (self._chunks - 1) * gathering_s[1])
        gather_s = self._seen(seen_gather_s, gathers_s) + self._chunks * gathering_s[1] - gathering_s[0]
        return np.asarray(seen_s + slower_s + np.where(self._is_split, gather_s + self._copies_s(block), 0.0))

    def _seen(self, seen_s: Array, all_s: Array) -> Array:
        """Returns seconds of traffic that are seen, and by which the rest slows what hides it."""
        if not self._hides:
            return all_s
        return np.asarray(seen_s + self._model.engine.runtime.slowed_s(all_s - seen_s))

    def _products_s(self, products: Sequence[Product], is_backward: bool) -> tuple[Array, Array]:
        """Returns seconds of products, or of their input gradients, of (all tokens, one chunk), (N,) each."""
        seconds = [np.zeros(self._model.layouts.count), np.zeros(self._model.layouts.count)]
        for product in products:
            inner, outer = self._local_sizes(product)
            inner, outer = (outer, inner) if is_backward else (inner, outer)
            for number, tokens in enumerate((self._model.tokens, self._model.tokens / self._chunks)):
                seconds[number] = seconds[number] + self._matmul_s(tokens, outer, inner)
        return seconds[0], seconds[1]

    def _weight_products_s(self, products: Sequence[Product]) -> Values:
        """Returns seconds of products' weight gradients, (N,) or 0: none are made beside adapters."""
        if self._model.job.adapters:
            return 0.0
        sizes = map(self._local_sizes, products)
        return sum(self._matmul_s(inner, outer, self._model.tokens) for inner, outer in sizes)

    def _local_sizes(self, product: Product) -> tuple[Values, Values]:
        """Returns the features that a rank's part of a product (reads, makes), (N,) or scalars."""
        tp = self._model.layouts.tp
        if product.split == "columns":
            return product.inner, product.outer / tp
        return product.inner / tp, product.outer

    def _matmul_s(self, m: Values, n: Values, k: Values) -> Array:
        model = self._model
        return matmul_s(m, n, k, model.machine.device, model.job.dtype, model.engine.runtime.matmul)

    def _copies_s(self, block: TpBlock) -> Array:
        """Returns seconds in which a pass puts chunks of several ranks' tokens into order, (N,).

        What the columns make and the row reads, and of one row of tokens the hidden state too, which `token_copies_s`
        has of several.
        """
        model = self._model
        features = sum(product.outer for product in block.columns) + block.row.inner
        width = np.where(model.rows > 1, 0.0, float(self._layer.width))
        moved_bytes = 2.0 * model.element * model.tokens * (features / model.layouts.tp + width)
        return np.where(self._chunks > 1, move_s(moved_bytes, model.machine.device), 0.0)

    def _host_s(self, blocks: Sequence[TpBlock], is_backward: bool) -> Array:
        """Returns seconds in which the host launches the further chunks of a pass, (N,)."""
        columns = sum(len(block.columns) for block in blocks)
        summed = columns if is_backward else len(blocks)
        gathered = np.where(self._is_split, len(blocks) if is_backward else columns, 0)
        operator_s = self._model.engine.runtime.host_layer_s / LAYER_OPERATORS
        return np.asarray(operator_s * CHUNK_OPERATIONS * (self._chunks - 1) * (summed + gathered))
