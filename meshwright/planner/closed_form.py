"""Builds the shape of a standard transformer from the sizes in a table, without a model."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.spec.model_shape import LayerShape, ModelShape, Product


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Sizes of multi-head latent attention: low-rank queries, keys and values. Source: DeepSeek-V2 (2024), 2.1."""

    query_rank: int
    """Rank of queries; 0 where one product computes them from the residual stream."""
    kv_rank: int
    """Rank that keys and values share."""
    rope_size: int
    """Size of the rotary part of each query and of the one shared key."""
    nope_size: int
    """Size of the part of each query and key without position."""
    value_size: int
    """Size of a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSizes:
    """Sizes of a model from a table; letters as in docs/notation.md."""

    name: str
    """Name of the model."""
    layers: int
    """Number of blocks."""
    width: int
    """D."""
    heads: int
    """H."""
    vocab: int
    """V, padded as in the run."""
    kv_heads: int = 0
    """K; 0 is H."""
    head_size: int = 0
    """E; 0 is D / H."""
    ffn: int = 0
    """F of dense blocks; 0 is 4 D."""
    gated: bool = True
    """Llama's block: gated feed-forward, RMSNorm, no biases, rotary positions; else GPT's."""
    biases: bool | None = None
    """Biases in every product; None follows ``gated``."""
    positions: int = 0
    """Learned positions."""
    tied: bool = False
    """Head and embedding are one weight."""
    dropout: bool = False
    """Whether the code has dropout."""
    window: int = 0
    """Sliding window of every second block; 0 for none."""
    sinks: bool = False
    """Learned sinks in the softmax."""
    experts: int = 0
    """X of blocks with experts."""
    active_experts: int = 0
    """Routed experts a token visits."""
    expert_groups: int = 0
    """Equal runs of experts, of which the router first chooses some; 0 where it chooses among all experts."""
    chosen_groups: int = 0
    """Runs that hold all experts of a token."""
    expert_ffn: int = 0
    """F of a routed expert."""
    shared_ffn: int = 0
    """F of the shared experts together."""
    dense_layers: int = 0
    """Number of leading blocks without experts."""
    latent: Latent | None = None
    """Low-rank attention."""


def shape_from_sizes(sizes: TableSizes) -> ModelShape:
    """Returns the shape of the standard transformer of these sizes.

    Args:
        sizes: of the model.

    Raises:
        PlanError: when heads don't divide the width and no head size is given, a size is missing, or sizes of keys or
            experts contradict each other.
    """
    if min(sizes.layers, sizes.width, sizes.heads, sizes.vocab) < 1:
        raise PlanError(f"{sizes.name}: layers, width, heads and vocab must be above 0")
    _check_heads(sizes)
    _check_experts(sizes)
    _check_groups(sizes)
    dense_block, expert_block = _block(sizes, False, 0), _block(sizes, True, 0)
    windowed_block = {True: _block(sizes, True, sizes.window), False: _block(sizes, False, sizes.window)}
    blocks = []
    for layer in range(sizes.layers):
        has_experts = bool(sizes.experts) and layer >= sizes.dense_layers
        blocks.append(
            windowed_block[has_experts]
            if sizes.window and layer % 2 == 0
            else (expert_block if has_experts else dense_block)
        )
    norm = sizes.width * (1 if sizes.gated else 2)
    embedding = (sizes.vocab + sizes.positions) * sizes.width
    head = 0 if sizes.tied else sizes.vocab * sizes.width
    return ModelShape(
        name=sizes.name,
        parameters=sum(block.parameters for block in blocks) + embedding + head + norm,
        layer_parameters=tuple(block.parameters for block in blocks),
        embedding_parameters=embedding,
        head_parameters=head,
        other_parameters=norm,
        matmul_parameters=round(sum(block.forward_flops_per_token() for block in blocks) / 2)
        + sizes.vocab * sizes.width,
        layers=sizes.layers,
        width=sizes.width,
        heads=sizes.heads,
        head_size=blocks[0].head_size,
        vocab=sizes.vocab,
        experts=sizes.experts,
        active_experts=sizes.active_experts,
        tied=sizes.tied,
        positions=sizes.positions,
        blocks=tuple(blocks),
    )


def _check_heads(sizes: TableSizes) -> None:
    """Refuses heads of keys that the heads can't share out evenly."""
    if sizes.kv_heads and sizes.heads % sizes.kv_heads:
        divisor = max(count for count in range(1, sizes.kv_heads + 1) if sizes.heads % count == 0)
        raise PlanError(
            f"{sizes.name}: kv_heads={sizes.kv_heads} don't divide heads={sizes.heads}: equally many share one; "
            f"nearest that works: kv_heads={divisor}"
        )


def _check_experts(sizes: TableSizes) -> None:
    """Refuses sizes of experts that are incomplete, or that no layer would have."""
    if not sizes.experts:
        unused = ("active_experts", "expert_ffn", "shared_ffn", "dense_layers")
        if name := next((name for name in unused if getattr(sizes, name)), ""):
            raise PlanError(
                f"{sizes.name}: {name}={getattr(sizes, name)} is of a model with experts, and experts isn't given; "
                "give experts, or leave it out"
            )
        return
    if not (1 <= sizes.active_experts <= sizes.experts and sizes.expert_ffn > 0):
        raise PlanError(
            f"{sizes.name}: experts={sizes.experts} need active_experts, those that a token visits, from 1 to as many, "
            f"and expert_ffn above 0; given are active_experts={sizes.active_experts}, expert_ffn={sizes.expert_ffn}"
        )
    if sizes.dense_layers >= sizes.layers:
        raise PlanError(
            f"{sizes.name}: dense_layers={sizes.dense_layers} of {sizes.layers} layers leave none for the experts; "
            f"give up to {sizes.layers - 1}, or leave experts out"
        )


def _check_groups(sizes: TableSizes) -> None:
    """Refuses groups of experts that no router could choose from."""
    groups, chosen, experts = sizes.expert_groups, sizes.chosen_groups, sizes.experts
    if not groups and not chosen:
        return
    is_whole = bool(groups) and experts % groups == 0
    if not (is_whole and 0 < chosen <= groups and sizes.active_experts <= chosen * experts // groups):
        raise PlanError(
            f"{sizes.name}: experts={experts} in expert_groups={groups}, of which chosen_groups={chosen} hold a "
            f"token's active_experts={sizes.active_experts}: groups divide the experts, one to all of them are chosen, "
            "and those have as many experts at least; nearest that works: leave both out"
        )


def _block(sizes: TableSizes, has_experts: bool, window: int) -> LayerShape:
    attention, widths = _attention(sizes)
    ffn = sizes.shared_ffn if has_experts else (sizes.ffn or 4 * sizes.width)
    products = attention + (_feed_forward(sizes.width, ffn, sizes.gated, False) if ffn else ())
    if has_experts:
        products += (Product(name="router", inner=sizes.width, outer=sizes.experts),)
        products += _feed_forward(sizes.width, sizes.expert_ffn, sizes.gated, True)
    weights = {
        experts: sum(product.inner * product.outer for product in products if product.experts is experts)
        for experts in (False, True)
    }
    has_biases = sizes.biases if sizes.biases is not None else not sizes.gated
    biases = sum(product.outer for product in products if not product.experts) if has_biases else 0
    norms = 2 * sizes.width * (1 if sizes.gated else 2)
    if sizes.latent:
        norms += sizes.latent.query_rank + sizes.latent.kv_rank
    expert_parameters = weights[True] * sizes.experts if has_experts else 0
    return LayerShape(
        products=products,
        width=sizes.width,
        parameters=weights[False] + biases + norms + expert_parameters,
        expert_parameters=expert_parameters,
        window=window,
        sinks=sizes.sinks,
        ffn=ffn,
        gated=sizes.gated,
        norm="rms" if sizes.gated else "layer",
        norm_behind=False,
        dropout=sizes.dropout,
        drops=2 if sizes.dropout else 0,
        drops_scores=sizes.dropout,
        experts=sizes.experts if has_experts else 0,
        active_experts=sizes.active_experts if has_experts else 0,
        expert_groups=sizes.expert_groups if has_experts else 0,
        chosen_groups=sizes.chosen_groups if has_experts else 0,
        expert_ffn=sizes.expert_ffn if has_experts else 0,
        **widths,
    )


def _feed_forward(width: int, ffn: int, gated: bool, experts: bool) -> tuple[Product, ...]:
    prefix = "expert_" if experts else ""
    return (
        Product(name=f"{prefix}up", inner=width, outer=ffn * (2 if gated else 1), split="columns", experts=experts),
        Product(name=f"{prefix}down", inner=ffn, outer=width, split="rows", experts=experts),
    )


def _attention(sizes: TableSizes) -> tuple[tuple[Product, ...], dict[str, int]]:
    """Returns attention's products and the head sizes of its `LayerShape`."""
    width, heads = sizes.width, sizes.heads
    if sizes.latent:
        return _latent_attention(sizes, sizes.latent)
    if not sizes.head_size and width % heads:
        raise PlanError(f"{sizes.name}: {heads} heads don't divide the width {width}; give the head size")
    head_size, kv_heads = sizes.head_size or width // heads, sizes.kv_heads or heads
    products = (
        Product(name="qkv", inner=width, outer=(heads + 2 * kv_heads) * head_size, split="columns"),
        Product(name="out", inner=heads * head_size, outer=width, split="rows"),
    )
    return products, {"heads": heads, "kv_heads": kv_heads, "head_size": head_size, "value_size": head_size}


def _latent_attention(sizes: TableSizes, latent: Latent) -> tuple[tuple[Product, ...], dict[str, int]]:
    width, heads = sizes.width, sizes.heads
    query_size, key_value_size = latent.nope_size + latent.rope_size, latent.nope_size + latent.value_size
    products = (
        *((Product(name="q_down", inner=width, outer=latent.query_rank),) if latent.query_rank else ()),
        Product(name="q_up", inner=latent.query_rank or width, outer=heads * query_size, split="columns"),
        Product(name="kv_down", inner=width, outer=latent.kv_rank + latent.rope_size),
        Product(name="kv_up", inner=latent.kv_rank, outer=heads * key_value_size, split="columns"),
        Product(name="out", inner=heads * latent.value_size, outer=width, split="rows"),
    )
    widths = {"heads": heads, "kv_heads": heads, "head_size": query_size, "value_size": latent.value_size}
    return products, widths | {"latent": latent.query_rank + latent.kv_rank + latent.rope_size}
