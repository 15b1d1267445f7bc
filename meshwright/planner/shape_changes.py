"""A model's sizes with some of them changed: its family, deeper and wider; other heads, feed-forward or vocabulary.

The changes work on any `ModelShape`, of a table or read off a model: products of its blocks are scaled one by one.
"""

from __future__ import annotations

import dataclasses
import math

from meshwright.errors import PlanError
from meshwright.spec.model_shape import LayerShape, ModelShape, Product

WIDTH_UNIT = 64
"""Widths that are multiples of it stay multiples of it."""


def heads_step(shape: ModelShape) -> int:
    """Returns the least number of query heads by which a model can grow with its groups of key heads unchanged."""
    kv_heads = max((block.kv_heads for block in shape.blocks), default=0)
    if kv_heads <= 1:
        return 1
    return shape.heads // math.gcd(shape.heads, kv_heads)


def resized(shape: ModelShape, layers: int, heads: int) -> ModelShape:
    """Returns a model of the same family: other layers, and every width in proportion to the heads.

    Head size, vocabulary, number of experts and learned positions stay.

    Args:
        shape: of a model with attention heads.
        layers: number of blocks; their kinds keep their shares.
        heads: query heads, a multiple of `heads_step`.

    Raises:
        PlanError: for a model without heads.
    """
    if not shape.heads:
        raise PlanError(f"{shape.name} has no attention heads to scale its width by; give another model's sizes")
    factor = heads / shape.heads
    scaled_blocks: dict[LayerShape, LayerShape] = {}
    blocks = []
    for layer in range(layers):
        block = shape.blocks[layer * len(shape.blocks) // layers]
        if block not in scaled_blocks:
            scaled_blocks[block] = _scaled_block(block, factor)
        blocks.append(scaled_blocks[block])
    width = _scaled(shape.width, factor)
    around = dataclasses.replace(
        shape,
        embedding_parameters=round(shape.embedding_parameters * width / shape.width),
        head_parameters=round(shape.head_parameters * width / shape.width),
        other_parameters=round(shape.other_parameters * width / shape.width),
        width=width,
        heads=heads,
    )
    return _with_blocks(around, tuple(blocks))


def _scaled(size: int, factor: float) -> int:
    unit = WIDTH_UNIT if size % WIDTH_UNIT == 0 else 1
    return max(unit, unit * round(size * factor / unit))


def _scaled_block(block: LayerShape, factor: float) -> LayerShape:
    """Returns a block with every width scaled; the router's outputs are experts, which stay."""
    products = tuple(
        dataclasses.replace(
            product,
            inner=_scaled(product.inner, factor),
            outer=product.outer if _is_router(product, block) else _scaled(product.outer, factor),
        )
        for product in block.products
    )
    scaled = dataclasses.replace(
        block,
        products=products,
        width=_scaled(block.width, factor),
        heads=round(block.heads * factor),
        kv_heads=block.kv_heads if block.kv_heads <= 1 else round(block.kv_heads * factor),
        latent=_scaled(block.latent, factor) if block.latent else 0,
        ffn=_scaled(block.ffn, factor) if block.ffn else 0,
        expert_ffn=_scaled(block.expert_ffn, factor) if block.expert_ffn else 0,
    )
    # Norms and biases are what the products don't hold; they grow with the width.
    vectors = block.parameters - _product_weights(block)
    expert_parameters = _expert_weights(scaled) if block.expert_parameters else 0
    parameters = _product_weights(scaled) + round(vectors * factor)
    return dataclasses.replace(scaled, parameters=parameters, expert_parameters=expert_parameters)


def _is_router(product: Product, block: LayerShape) -> bool:
    return bool(block.experts) and not product.experts and not product.split and product.outer == block.experts


def _expert_weights(block: LayerShape) -> int:
    return block.experts * sum(product.inner * product.outer for product in block.products if product.experts)


def _product_weights(block: LayerShape) -> int:
    plain = sum(product.inner * product.outer for product in block.products if not product.experts)
    return plain + _expert_weights(block)


def with_vocabulary(shape: ModelShape, vocab: int) -> ModelShape:
    """Returns the model with another number of rows in its embedding and head."""
    added = (vocab - shape.vocab) * shape.width
    return dataclasses.replace(
        shape,
        vocab=vocab,
        embedding_parameters=shape.embedding_parameters + added,
        head_parameters=shape.head_parameters + (0 if shape.tied else added),
        parameters=shape.parameters + added * (1 if shape.tied else 2),
        matmul_parameters=shape.matmul_parameters + added,
    )


def with_positions(shape: ModelShape, tokens: int) -> ModelShape:
    """Returns the model with learned positions for at least so many tokens; one without any is unchanged."""
    added = max(0, tokens - shape.positions) * shape.width
    if not shape.positions or not added:
        return shape
    return dataclasses.replace(
        shape,
        positions=tokens,
        embedding_parameters=shape.embedding_parameters + added,
        parameters=shape.parameters + added,
    )


def with_head_size(shape: ModelShape, head_size: int) -> ModelShape | None:
    """Returns the model with fewer, wider heads or more, narrower ones: the same weights.

    None where the heads don't divide, or where low-rank attention ties the sizes to each other.
    """
    blocks = []
    for block in shape.blocks:
        if not block.heads:
            blocks.append(block)
            continue
        divides = block.query_width % head_size == 0 and block.key_width % head_size == 0
        if block.latent or block.value_size != block.head_size or not divides:
            return None
        heads, kv_heads = block.query_width // head_size, block.key_width // head_size
        if heads % kv_heads:
            return None
        blocks.append(
            dataclasses.replace(block, heads=heads, kv_heads=kv_heads, head_size=head_size, value_size=head_size)
        )
    heads = shape.heads * shape.head_size // head_size
    return dataclasses.replace(shape, blocks=tuple(blocks), heads=heads, head_size=head_size)


def with_feed_forward(shape: ModelShape, ffn: int) -> ModelShape | None:
    """Returns the model with another hidden size of its dense feed-forward parts; None where it has none."""
    changed: dict[LayerShape, LayerShape] = {}
    for block in set(shape.blocks):
        changed[block] = _with_ffn(block, ffn) if block.ffn and not block.experts else block
    if all(block is new for block, new in changed.items()):
        return None
    blocks = tuple(changed[block] for block in shape.blocks)
    return _with_blocks(shape, blocks)


def _with_ffn(block: LayerShape, ffn: int) -> LayerShape:
    rows = [index for index, item in enumerate(block.products) if item.split == "rows" and not item.experts]
    # The last product by rows is the feed-forward's; those by columns since the one before feed it.
    first = rows[-2] + 1 if len(rows) > 1 else 0
    products = list(block.products)
    for index in range(first, rows[-1] + 1):
        item = products[index]
        if item.split == "columns":
            products[index] = dataclasses.replace(item, outer=item.outer // block.ffn * ffn)
        elif index == rows[-1]:
            products[index] = dataclasses.replace(item, inner=ffn)
    added = sum(new.inner * new.outer - old.inner * old.outer for new, old in zip(products, block.products))
    return dataclasses.replace(block, products=tuple(products), ffn=ffn, parameters=block.parameters + added)


def _with_blocks(shape: ModelShape, blocks: tuple[LayerShape, ...]) -> ModelShape:
    """Returns the model with other blocks, and the totals that follow from them."""
    layer_parameters = tuple(block.parameters for block in blocks)
    around = shape.embedding_parameters + shape.head_parameters + shape.other_parameters
    block_weights = round(sum(block.forward_flops_per_token() for block in blocks) / 2)
    return dataclasses.replace(
        shape,
        blocks=blocks,
        layers=len(blocks),
        layer_parameters=layer_parameters,
        parameters=sum(layer_parameters) + around,
        matmul_parameters=block_weights + shape.vocab * shape.width,
    )
