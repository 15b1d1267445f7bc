"""Reads the sizes of a model's layers off its modules: the matrix products, and the widths that set activation memory.

The dims of each matrix give the product's input and output; experts are rows of 3-D weights, or the numbered children
of a list. Facts that the weights don't show (heads, windows, experts for each token) come from the config.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from meshwright.models.build import BuiltModel
from meshwright.models.sizes import ACTIVE_EXPERTS, size_of
from meshwright.spec.model_shape import LayerShape, Product

_ACTIVE_ATTRIBUTES = ("top_k", "topk", "k", "num_selected", "experts_per_token")
"""Attributes of modules of one's own with the number of experts that a token visits."""
_NUMBERED = re.compile(r"(^|\.)experts\.(\d+)\.")
_LOW_RANK = re.compile(r"_a_proj|_down_proj_|q_lora|kv_lora|compress")
_CLOSING = re.compile(r"(o_proj|out\w*|down\w*|c_proj|fc2|fc_out|w2|wo|dense|dense_4h_to_h|down_proj)(\.weight)?$")
"""Names of the projection that returns to the residual stream."""
_NORM = re.compile(r"norm[^.]*\.weight$")
_NORM_BEHIND = re.compile(r"^post_(feedforward|mlp|ffn|ff)_?[^.]*norm[^.]*$")
"""Names of a norm behind the feed-forward part; ``post_attention_layernorm`` is most often one ahead of it."""
_STATE = ("conv", "A_log", "bias")


def read_blocks(built: BuiltModel) -> tuple[LayerShape, ...]:
    """Returns the sizes of every layer, in order; equal layers are one object."""
    config = built.hf_config
    hf_fields = config.get_text_config(decoder=True).to_dict() if config is not None else {}
    shape_by_kind: dict[Any, LayerShape] = {}
    shapes = []
    for layer_index, name in enumerate(built.structure.layers):
        layer = built.module.get_submodule(name)
        window = _window_tokens(hf_fields, layer_index, built.structure.context or 0)
        key = (type(layer), window, tuple((key, tuple(parameter.shape)) for key, parameter in layer.named_parameters()))
        if key not in shape_by_kind:
            shape_by_kind[key] = _layer_shape(layer, built.structure.width or 0, hf_fields, window)
        shapes.append(shape_by_kind[key])
    return tuple(shapes)


def _layer_shape(layer: nn.Module, width: int, hf_fields: Mapping[str, Any], window: int) -> LayerShape:
    """Returns the sizes of one layer."""
    experts = _expert_count(layer)
    products = _products(layer, width, experts)
    expert_products = [product for product in products if product.experts]
    heads = size_of(hf_fields, "heads") or (1 if not hf_fields else 0)
    latent_width = sum(product.outer for product in products if _LOW_RANK.search(product.name))
    head_size = hf_fields.get("head_dim") or (width // heads if heads else 0)
    # latent attention: query heads are wider than values by the rotary dims
    if latent_width:
        head_size = (
            hf_fields.get("qk_head_dim")
            or hf_fields.get("qk_nope_head_dim", 0) + hf_fields.get("qk_rope_head_dim", 0)
            or head_size
        )
    # Falcon: one key head for all query heads, whatever num_kv_heads says
    one_key_head = hf_fields.get("multi_query") and not hf_fields.get("new_decoder_architecture")
    kv_heads = 1 if one_key_head else size_of(hf_fields, "kv_heads") or heads
    has_attention = (
        any("att" in key.lower() or "mixer" in key.lower() for key, _ in layer.named_children()) or not hf_fields
    )
    expert_parameters = sum(
        weight.numel() for name, weight in layer.named_parameters() if _is_expert(name, weight, experts)
    )
    row_products, ffn, ffn_columns_out = [item for item in products if item.split == "rows" and not item.experts], 0, 0
    # the last row-parallel product is the feed-forward's; one alone is attention's
    if len(row_products) > 1 or (row_products and not heads):
        owner = _parent_module(row_products[-1].name)
        ffn = row_products[-1].inner
        # gated: gate and up projections together have two outputs for each input of the down projection
        ffn_columns_out = sum(
            item.outer for item in products if item.split == "columns" and _parent_module(item.name) == owner
        )
    expert_ffn = max((product.inner for product in expert_products if product.split == "rows"), default=0)
    expert_columns_out = sum(product.outer for product in expert_products if product.split == "columns")
    dropout_count, drops_scores = _dropouts(layer)
    shape = LayerShape(
        products=products,
        width=width,
        parameters=sum(parameter.numel() for parameter in layer.parameters()),
        expert_parameters=expert_parameters,
        heads=heads if has_attention else 0,
        kv_heads=kv_heads if has_attention else 0,
        head_size=head_size if has_attention else 0,
        value_size=(hf_fields.get("v_head_dim") or head_size) if has_attention else 0,
        normed_width=_normed_width(layer, products, (heads, kv_heads), head_size) if has_attention else 0,
        window=window,
        latent=latent_width,
        ffn=ffn,
        gated=(bool(ffn) and ffn_columns_out >= 2 * ffn)
        or (bool(expert_parameters) and expert_columns_out >= 2 * expert_ffn),
        norm="rms" if any("rms" in type(child).__name__.lower() for child in layer.modules()) else "layer",
        norm_behind=any(_NORM_BEHIND.search(name) for name, _ in layer.named_children()),
        dropout=any(isinstance(child, nn.Dropout) and child.p > 0 for child in layer.modules()),
        drops=dropout_count,
        drops_scores=drops_scores,
        experts=experts,
        expert_ffn=expert_ffn,
    )
    return _with_routing(shape, hf_fields, layer) if experts else shape


def _with_routing(shape: LayerShape, hf_fields: Mapping[str, Any], layer: nn.Module) -> LayerShape:
    """Returns a layer's sizes with the experts that its router chooses, and the groups of them that it chooses first.

    Those groups are DeepSeek-V2's and V3's; their descendants keep the names.
    """
    is_limited = hf_fields.get("topk_method") != "greedy"
    groups, chosen = (int(hf_fields.get(name) or 0) * is_limited for name in ("n_group", "topk_group"))
    active = _active_experts(hf_fields, ACTIVE_EXPERTS)
    if not hf_fields:
        # a model of one's own says it by an attribute of its router or mixture
        named = (_active_experts(vars(child), (*ACTIVE_EXPERTS, *_ACTIVE_ATTRIBUTES)) for child in layer.modules())
        active = max(count for count in (1, *named) if count <= shape.experts)
    if not 0 < chosen < groups or shape.experts % groups or active > chosen * shape.experts // groups:
        groups = chosen = 0
    return dataclasses.replace(shape, active_experts=active, expert_groups=groups, chosen_groups=chosen)


def _normed_width(layer: nn.Module, products: Sequence[Product], heads: Sequence[int], head_size: int) -> int:
    """Returns the width of queries and keys that norms take over all heads: norms of such a width beside the products.

    Args:
        layer: with its parameters.
        products: of the layer.
        heads: of queries and of keys; a norm over one head of its own needs no other rank's.
        head_size: E.
    """
    widths = {count * head_size for count in heads if count > 1}
    owners = {_parent_module(product.name) for product in products if product.split == "columns"}
    norms = (
        weight
        for path, weight in layer.named_parameters()
        if _NORM.search(path) and _parent_module(path) in owners and weight.dim() == 1
    )
    return sum(weight.numel() for weight in norms if weight.numel() in widths)


def _dropouts(layer: nn.Module) -> tuple[int, bool]:
    """Returns the number of a layer's dropouts outside attention, and whether attention weights are dropped.

    A dropout is a module or a float attribute named so. A probability named after attention, or a float of an attention
    module, is one of attention weights; a float of the layer itself serves both of its sublayers.
    """
    count, drops_attention = 0, False
    for path, child in layer.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(child, nn.Dropout):
            drops_attention |= child.p > 0 and name.startswith("att")
            count += child.p > 0 and not name.startswith("att")
            continue
        for key, value in vars(child).items():
            if type(value) is float and value > 0 and "drop" in key:
                is_attention = key.startswith("att") or "attention" in type(child).__name__.lower()
                drops_attention |= is_attention
                count += 0 if is_attention else (2 if child is layer else 1)
    return count, drops_attention


def _products(layer: nn.Module, width: int, experts: int) -> tuple[Product, ...]:
    """Returns the matrix products in the order of the parameters; those of numbered experts once."""
    seen_names: set[str] = set()
    groups: dict[str, list[tuple[str, int, int]]] = {}
    for path, item in layer.named_parameters():
        owner, _, key = path.rpartition(".")
        owner_module = layer.get_submodule(owner)
        if item.dim() < 2 or isinstance(owner_module, nn.Embedding) or any(state_name in path for state_name in _STATE):
            continue
        is_expert = _is_expert(path, item, experts)
        unnumbered_name = _NUMBERED.sub(r"\1experts.", path)
        if unnumbered_name in seen_names:
            continue
        seen_names.add(unnumbered_name)
        module_name = owner.rpartition(".")[0] if isinstance(owner_module, nn.Linear) or key == "weight" else owner
        # Linear stores (out, in), transformers' Conv1D (in, out)
        dim_0, dim_1 = (int(size) for size in item.shape[-2:])
        inner_and_outer = (dim_0, dim_1) if type(owner_module).__name__ == "Conv1D" else (dim_1, dim_0)
        groups.setdefault(f"{module_name}{'*' if is_expert else ''}", []).append((unnumbered_name, *inner_and_outer))
    return tuple(
        product
        for module_name, products in groups.items()
        for product in _assign_splits(module_name, products, width, experts)
    )


def _assign_splits(group: str, matrices: list[tuple[str, int, int]], width: int, experts: int) -> list[Product]:
    """Assigns tp's split to one module's products: the last one that returns to the model's width is row-parallel."""
    is_expert, products = group.endswith("*"), []
    closing_indices = [
        index for index, (name, _, outer) in enumerate(matrices) if _CLOSING.search(name) and outer == width
    ]
    closing_index = closing_indices[-1] if closing_indices else len(matrices) - 1
    for index, (name, inner, outer) in enumerate(matrices):
        is_closing = index == closing_index
        if is_expert:
            # Rows of experts lie either way; one of the sides is the model's width.
            hidden = inner if outer == width else outer
            inner, outer = (hidden, width) if is_closing and len(matrices) > 1 else (width, hidden)
        split = "rows" if is_closing and outer == width else "columns"
        # routers and low-rank projections are replicated
        if (outer == experts and experts and not is_expert) or _LOW_RANK.search(name):
            split = ""
        products.append(Product(name=name, inner=inner, outer=outer, split=split, experts=is_expert))
    return products


def _parent_module(name: str) -> str:
    """Returns the name of the module that a product belongs to: its matrix's parent."""
    return name.removesuffix(".weight").rpartition(".")[0]


def _is_expert(path: str, item: Any, experts: int) -> bool:
    """Returns whether a parameter belongs to experts."""
    return bool(experts) and (bool(_NUMBERED.search(path)) or (item.dim() == 3 and item.shape[0] == experts))


def _expert_count(layer: nn.Module) -> int:
    """Returns the number of experts of a layer: rows of 3-D weights, or numbered children."""
    stacked_counts = [
        parameter.shape[0]
        for key, parameter in layer.named_parameters()
        if parameter.dim() == 3 and "expert" in key.lower()
    ]
    numbers = [int(match[2]) + 1 for key, _ in layer.named_parameters() if (match := _NUMBERED.search(key))]
    return max([*stacked_counts, *numbers], default=0)


def _active_experts(fields: Mapping[str, Any], names: Sequence[str]) -> int:
    """Returns the number of experts that a token visits, by the fields of a config or a module."""
    return max((value for key in names if type(value := fields.get(key)) is int), default=1)


def _window_tokens(hf_fields: Mapping[str, Any], layer_index: int, context: int) -> int:
    """Returns how many tokens a layer's queries look back at; 0 for all."""
    window = hf_fields.get("sliding_window") or 0
    layer_types = hf_fields.get("layer_types") or ()
    if layer_types:
        return int(window) if "sliding" in str(layer_types[layer_index % len(layer_types)]) else 0
    if hf_fields.get("use_sliding_window") is False or int(window) >= (context or 1 << 62):
        return 0
    return int(window)
