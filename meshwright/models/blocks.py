"""A model's layers as sizes, read off its modules: the products of each, and the widths that its memory follows from.

What a layer multiplies is in its weights: the dims of each matrix say what it reads and gives, experts are rows of
weights of three dims, or the numbered children of a list. What a config alone knows (heads, windows, experts that a
token visits) comes from there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from meshwright.models.build import BuiltModel
from meshwright.models.sizes import ACTIVE_EXPERTS, size_of
from meshwright.spec.model_shape import LayerShape, Product

_NUMBERED = re.compile(r"(^|\.)experts\.(\d+)\.")
_LOW_RANK = re.compile(r"_a_proj|_down_proj_|q_lora|kv_lora|compress")
_CLOSING = re.compile(r"(o_proj|out\w*|down\w*|c_proj|fc2|fc_out|w2|wo|dense|dense_4h_to_h|down_proj)(\.weight)?$")
"""How models call the product that leads back to the residual stream."""
_STATE = ("conv", "A_log", "bias")


def read_blocks(built: BuiltModel) -> tuple[LayerShape, ...]:
    """Returns the sizes of every layer, in order; equal layers are one object."""
    config = built.hf_config
    plain = config.get_text_config(decoder=True).to_dict() if config is not None else {}
    known: dict[Any, LayerShape] = {}
    found = []
    for number, name in enumerate(built.structure.layers):
        layer = built.module.get_submodule(name)
        window = _window(plain, number, built.structure.context or 0)
        key = (type(layer), window, tuple((key, tuple(item.shape)) for key, item in layer.named_parameters()))
        if key not in known:
            known[key] = _block(layer, built.structure.width or 0, plain, window)
        found.append(known[key])
    return tuple(found)


def _block(layer: nn.Module, width: int, plain: Mapping[str, Any], window: int) -> LayerShape:
    experts = _expert_count(layer)
    products = _products(layer, width, experts)
    routed = [item for item in products if item.experts]
    heads = size_of(plain, "heads") or (1 if not plain else 0)
    latent = sum(item.outer for item in products if _LOW_RANK.search(item.name))
    size = plain.get("head_dim") or (width // heads if heads else 0)
    if latent:
        size = plain.get("qk_head_dim") or plain.get("qk_nope_head_dim", 0) + plain.get("qk_rope_head_dim", 0) or size
    kv_heads = size_of(plain, "kv_heads") or heads
    if plain.get("multi_query") and not plain.get("new_decoder_architecture"):
        kv_heads = 1
    meets = any("att" in key.lower() or "mixer" in key.lower() for key, _ in layer.named_children()) or not plain
    spread = sum(item.numel() for key, item in layer.named_parameters() if _is_expert(key, item, experts))
    closing = [item for item in products if item.split == "rows" and not item.experts]
    feed, opened = 0, 0
    if len(closing) > 1 or (closing and not heads):
        owner = _owner(closing[-1].name)
        feed = closing[-1].inner
        opened = sum(item.outer for item in products if item.split == "columns" and _owner(item.name) == owner)
    expert_ffn = max((item.inner for item in routed if item.split == "rows"), default=0)
    entering = sum(item.outer for item in routed if item.split == "columns")
    drops, drops_scores = _dropouts(layer)
    return LayerShape(
        products=products,
        width=width,
        parameters=sum(item.numel() for item in layer.parameters()),
        expert_parameters=spread,
        heads=heads if meets else 0,
        kv_heads=kv_heads if meets else 0,
        head_size=size if meets else 0,
        value_size=(plain.get("v_head_dim") or size) if meets else 0,
        window=window,
        latent=latent,
        ffn=feed,
        gated=(bool(feed) and opened >= 2 * feed) or (bool(spread) and entering >= 2 * expert_ffn),
        norm="rms" if any("rms" in type(part).__name__.lower() for part in layer.modules()) else "layer",
        dropout=any(isinstance(part, nn.Dropout) and part.p > 0 for part in layer.modules()),
        drops=drops,
        drops_scores=drops_scores,
        experts=experts,
        active_experts=_active(plain) if experts else 0,
        expert_ffn=expert_ffn,
    )


def _dropouts(layer: nn.Module) -> tuple[int, bool]:
    """Dropouts of a layer beside attention's, and whether attention's weights are dropped too.

    A dropout is a module of its own or a probability by name. Of attention's weights is what is called so, and what is
    a mere number of an attention module; a layer's own number serves both of its parts.
    """
    count, scores = 0, False
    for path, part in layer.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(part, nn.Dropout):
            scores |= part.p > 0 and name.startswith("att")
            count += part.p > 0 and not name.startswith("att")
            continue
        for key, value in vars(part).items():
            if type(value) is float and value > 0 and "drop" in key:
                own = key.startswith("att") or "attention" in type(part).__name__.lower()
                scores |= own
                count += 0 if own else (2 if part is layer else 1)
    return count, scores


def _products(layer: nn.Module, width: int, experts: int) -> tuple[Product, ...]:
    """Matrix products in the order of the parameters; those of numbered experts once."""
    seen: set[str] = set()
    groups: dict[str, list[tuple[str, int, int]]] = {}
    for path, item in layer.named_parameters():
        owner, _, key = path.rpartition(".")
        part = layer.get_submodule(owner)
        if item.dim() < 2 or isinstance(part, nn.Embedding) or any(word in path for word in _STATE):
            continue
        routed = _is_expert(path, item, experts)
        short = _NUMBERED.sub(r"\1experts.", path)
        if short in seen:
            continue
        seen.add(short)
        group = owner.rpartition(".")[0] if isinstance(part, nn.Linear) or key == "weight" else owner
        first, second = (int(size) for size in item.shape[-2:])
        sides = (first, second) if type(part).__name__ == "Conv1D" else (second, first)
        groups.setdefault(f"{group}{'*' if routed else ''}", []).append((short, *sides))
    return tuple(product for group, rows in groups.items() for product in _split(group, rows, width, experts))


def _split(group: str, rows: list[tuple[str, int, int]], width: int, experts: int) -> list[Product]:
    """Says what tp does to the products of one module: the last one back to the model's width is split by rows."""
    routed, made = group.endswith("*"), []
    named = [place for place, (name, _, outer) in enumerate(rows) if _CLOSING.search(name) and outer == width]
    closing = named[-1] if named else len(rows) - 1
    for place, (name, inner, outer) in enumerate(rows):
        last = place == closing
        if routed:
            # Rows of experts lie either way; one of the sides is the model's width.
            other = inner if outer == width else outer
            inner, outer = (other, width) if last and len(rows) > 1 else (width, other)
        split = "rows" if last and outer == width else "columns"
        if (outer == experts and experts and not routed) or _LOW_RANK.search(name):
            split = ""
        made.append(Product(name=name, inner=inner, outer=outer, split=split, experts=routed))
    return made


def _owner(name: str) -> str:
    """The module that a product belongs to: that of its matrix's parent."""
    return name.removesuffix(".weight").rpartition(".")[0]


def _is_expert(path: str, item: Any, experts: int) -> bool:
    return bool(experts) and (bool(_NUMBERED.search(path)) or (item.dim() == 3 and item.shape[0] == experts))


def _expert_count(layer: nn.Module) -> int:
    """Experts of a layer: rows of weights of three dims, or numbered children."""
    rows = [item.shape[0] for key, item in layer.named_parameters() if item.dim() == 3 and "expert" in key.lower()]
    numbers = [int(found[2]) + 1 for key, _ in layer.named_parameters() if (found := _NUMBERED.search(key))]
    return max([*rows, *numbers], default=0)


def _active(plain: Mapping[str, Any]) -> int:
    return max((value for key in ACTIVE_EXPERTS if isinstance(value := plain.get(key), int)), default=1)


def _window(plain: Mapping[str, Any], number: int, context: int) -> int:
    """Tokens that a layer's queries look back at; 0 for all."""
    window = plain.get("sliding_window") or 0
    kinds = plain.get("layer_types") or ()
    if kinds:
        return int(window) if "sliding" in str(kinds[number % len(kinds)]) else 0
    if plain.get("use_sliding_window") is False or int(window) >= (context or 1 << 62):
        return 0
    return int(window)
