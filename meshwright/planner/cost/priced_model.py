"""N layouts of a job on a machine, which the prices of all layers share: tokens of a rank, products of matrices.

Every formula broadcasts degrees (N,) with the sizes of a layer, which are scalars.
"""

from __future__ import annotations

import copy
from functools import cached_property

import numpy as np

from meshwright.array_types import Index, Values
from meshwright.planner.cost.element_bytes import compute_bytes
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import CollectiveTimes, Machine
from meshwright.planner.cost.kernels import matmul_s, move_s
from meshwright.planner.cost.layout_batch import Array, LayoutBatch, PricedJob
from meshwright.spec.model_shape import LayerShape, Product


class PricedModel:
    """Job, layouts, machine and profile that the prices of all layers share.

    Args:
        job: model and batch.
        layouts: N layouts.
        machine: the hardware.
        engine: the runtime's profile.
    """

    def __init__(self, job: PricedJob, layouts: LayoutBatch, machine: Machine, engine: FrameworkProfile) -> None:
        self.job, self.layouts, self.machine, self.engine = job, layouts, machine, engine
        self.groups = CollectiveTimes(layouts, machine)
        self.element = float(compute_bytes(job.precision))

    @cached_property
    def rows(self) -> Array:
        """Rows of a micro-batch."""
        rows = np.where(self.layouts.rows > 0, self.layouts.rows, self.job.rows)
        return np.asarray(rows / (self.layouts.data * self.layouts.microbatches))

    @cached_property
    def tokens(self) -> Array:
        """Tokens of a micro-batch on a rank of cp, (N,); with ``sequence`` tp divides them further."""
        return self.rows * self.job.sequence / self.layouts.cp

    @cached_property
    def token_shards(self) -> Array:
        """Shards of the tokens outside tp's linears, (N,): tp with sequence parallelism, else 1."""
        return np.where(self.layouts.sequence > 0, self.layouts.tp, 1.0)

    def take(self, index: Index) -> PricedModel:
        """Returns a copy for the layouts at an index, slice or mask."""
        selected = copy.copy(self)
        for name in [name for name, attribute in vars(type(self)).items() if isinstance(attribute, cached_property)]:
            vars(selected).pop(name, None)
        selected.layouts = self.layouts.take(index)
        selected.groups = self.groups.take(index, selected.layouts)
        return selected

    def token_copies_s(self, collectives: Values) -> Values:
        """Returns seconds, (N,) or 0, in which tokens of several rows are put in order for tp's collectives of them.

        Args:
            collectives: gathers and scatters, each of which reads and writes the hidden state once more.
        """
        layouts = self.layouts
        is_copied = (layouts.tp > 1) & (layouts.sequence > 0) & (self.rows > 1)
        if not (self.engine.runtime.copies_tokens and is_copied.any()):
            return 0.0
        moved_bytes = 2.0 * self.element * self.tokens * self.job.shape.width * collectives
        return np.where(is_copied, move_s(moved_bytes, self.machine.device), 0.0)

    def split_blocks(self, layer: LayerShape) -> Values:
        """Returns the number of blocks that tp splits, (N,): attention and feed-forward, but not dispatched experts."""
        is_dispatched = (self.layouts.ep > 1) & (layer.experts > 0)
        return np.where(is_dispatched & (layer.ffn == 0), 1.0, 2.0) if layer.heads else 1.0

    def product_count(self, is_backward: bool) -> int:
        """Returns the products of each weight in a pass: backward has that of its gradient too, where it is trained."""
        return 2 if is_backward and not self.job.adapters else 1

    def product_s(
        self, product: Product, layer: LayerShape | None = None, products: int = 1, chunks: Values = 1.0
    ) -> Array:
        """Returns seconds of a matrix product, (N,).

        Args:
            product: of a layer.
            layer: needed for products of experts.
            products: 1 for forward, 2 for both of backward.
            chunks: of tokens, of which the product is of one.
        """
        layouts, tp = self.layouts, self.layouts.tp
        m: Values = self.tokens / chunks
        n: Values = float(product.outer)
        k: Values = float(product.inner)
        if product.experts and layer is not None:
            is_dispatched = layouts.ep > 1
            routed = self.tokens * layer.active_experts / chunks
            local_experts = layer.experts / layouts.ep
            # ep dispatches the tokens of each rank of tp separately; without it all ranks of tp compute the same ones.
            m = np.where(is_dispatched, routed / tp, routed) / local_experts
            n = n / np.where(is_dispatched | (product.split != "columns"), 1.0, tp)
            k = k / np.where(is_dispatched | (product.split != "rows"), 1.0, tp)
            # With ep a rank has experts / ep full experts; without, a slice of every expert.
            return local_experts * self._products_s(m, n, k, products)
        # Column-parallel linears divide the result, row-parallel ones the contracted size: Shoeybi et al. (2019), 3.
        n = n / tp if product.split == "columns" else n
        k = k / tp if product.split == "rows" else k
        # A replicated product runs on the rank's share of the tokens under sequence parallelism.
        m = m / self.token_shards if not product.split else m
        return self._products_s(m, n, k, products)

    def _products_s(self, m: Values, n: Values, k: Values, products: int) -> Array:
        """Returns seconds of (m, k) x (k, n), or of backward's two products: input and weight gradients."""
        device, dtype, share = self.machine.device, self.job.dtype, self.engine.runtime.matmul
        if products == 1:
            return matmul_s(m, n, k, device, dtype, share)
        # dX = dY W': (m, n) x (n, k); dW = X' dY: (k, m) x (m, n).
        return matmul_s(m, k, n, device, dtype, share) + matmul_s(k, n, m, device, dtype, share)
