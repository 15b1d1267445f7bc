"""Prices what ``recompute=selective`` keeps of a layer, and which of its products it computes again.

Our runtime keeps the products that sum as many values as the hidden state has, and sums over tp in place of their
summands (`parallel.selective`); other frameworks keep a fixed list.
"""

from __future__ import annotations

from meshwright.array_types import Values
from meshwright.planner.cost.layout_batch import Array
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.spec.model_shape import LayerShape, Product


class SelectiveRecompute:
    """The products of a layer under selective recompute, for N layouts.

    Args:
        model: the layouts on their machine.
        layer: its sizes.
    """

    def __init__(self, model: PricedModel, layer: LayerShape) -> None:
        self._model, self._layer = model, layer

    def is_kept(self, product: Product) -> Array:
        """Returns whether a product is kept, or what ranks make of it, (N,) bool."""
        model, layer = self._model, self._layer
        # Queries of low rank become heads of all tokens, which are kept whatever the product sums over.
        is_query = layer.latent > 0 and product.split == "columns" and product.outer == layer.query_width
        is_exchanged = is_query and model.engine.runtime.context == "heads"
        return model.engine.saved.is_kept(product, layer, model.layouts) | (is_exchanged & (model.layouts.cp > 1))

    def kept_features(self) -> tuple[Values, Values]:
        """Returns features of a token that are kept, (N,) or scalars: (those outside tp's linears, those inside)."""
        saved, layer = self._model.engine.saved, self._layer
        if not saved.selective_is_wide:
            # Attention's output and the feed-forward part's; queries, keys, values and the branches up.
            qkv = layer.query_width + layer.key_width + layer.value_width
            return 2.0 * layer.width, qkv + layer.ffn * (2.0 if layer.gated else 1.0)
        outside: Values = 0.0
        inside: Values = 0.0
        for product in layer.products:
            features = self.is_kept(product) * product.outer
            features = features * (layer.active_experts if product.experts else 1)
            if product.split == "columns" or product.experts:
                inside = inside + features
            else:
                outside = outside + features
        return outside, inside

    def narrow_products_s(self) -> Values:
        """Returns seconds of the products that are computed again because they sum few values, (N,) or 0."""
        model, layer = self._model, self._layer
        if not model.engine.saved.selective_is_wide:
            return 0.0
        # It stops ahead of the last one, unless experts' results are weighed behind it.
        products = layer.products if layer.experts else layer.products[:-1]
        narrow = [product for product in products if product.inner < layer.width]
        again = (~self.is_kept(item) * model.product_s(item, layer) for item in narrow)
        return sum(again, 0.0)
