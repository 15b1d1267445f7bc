"""Builds small models of the same architecture, for trials and proofs of a model that is too large to be tried itself.

A clone keeps the properties on which layouts depend: the number of query heads for each key head, every kind of layer
beside its neighbours, experts where routing counts them, and attention windows shorter than short rows.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.analysis.experts import find_experts
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.family import directory_config, family_config
from meshwright.models.sizes import (
    ACTIVE_EXPERTS,
    SYNONYMS,
    WINDOWS,
    latent_attention_values,
    layer_count,
    preset_ffn,
    size_of,
)

CLONE_LAYERS = 8
"""Layers of a smaller clone, unless its kinds of layers need more."""
CLONE_EXPERTS = 8
"""Experts of a smaller clone, unless its tokens visit more than half of them or routing chooses groups of experts."""
EXPERT_LAYERS = 4
"""Layers of a smaller clone with experts, each of which has many times the weights of another layer."""
CLONE_WINDOW = 11
"""Largest attention window of a clone in tokens: shorter than any row that is proven, and no multiple of a degree."""
MOST_LAYERS = 64
"""Largest number of layers of a clone that is extended to include every kind of layer."""


def shrink_config(config: ModelConfig, layers: int = 2, width: int = 64, parts: int = 2) -> ModelConfig:
    """Returns a config of the same architecture with fewer, narrower layers, for proofs and probes.

    Args:
        config: of the model.
        layers: of the clone.
        width: least width of the clone; more where its heads need it.
        parts: largest degree into which its heads are split.

    Raises:
        ConfigError: for a model built by a function, whose sizes can't be set.
    """
    if config.kind == "function":
        raise ConfigError(f"model '{config.name}' is a function: it can't be shrunk; run it as it is (--full)")
    config_of = directory_config if config.kind == "directory" else family_config
    family_values = config_of(config, None, None).get_text_config(decoder=True).to_dict()
    values = config.to_dict() | {"layers": layers, "width": width, "fresh": config.kind == "directory"}
    for key in ("heads", "kv_heads", "ffn", "experts"):
        values.pop(key, None)
    # the user's overrides of sizes would undo the shrinking
    size_attributes = {name for key, names in SYNONYMS.items() if key not in ("vocab", "context") for name in names}
    overrides = {key: value for key, value in config.overrides.items() if key not in size_attributes}
    heads, kv_heads = size_of(family_values, "heads"), size_of(family_values, "kv_heads")
    if heads:
        values |= _shrink_heads(heads, kv_heads or heads, width, parts)
        # the family has no separate number of key heads
        if not family_values.keys() & set(SYNONYMS["kv_heads"]):
            values.pop("kv_heads", None)
    if (experts := size_of(family_values, "experts")) is not None:
        values["experts"] = _shrink_experts(experts, family_values)
    values["overrides"] = overrides | _long_windows(family_values, CLONE_WINDOW)
    if config.kind == "directory":
        _follow_width(values, family_values)
    return ModelConfig.from_dict(values)


def _follow_width(values: dict[str, Any], plain: dict[str, Any]) -> None:
    """Gives a directory's clone the sizes that follow from width and heads in a family's preset, in place.

    Else they would stay those of the model, beside which a narrow width saves little.
    """
    if size_of(plain, "ffn") is not None:
        values["ffn"] = preset_ffn(plain, values["width"])
    if values.get("heads") and "qk_rope_head_dim" in plain:
        sizes = latent_attention_values(plain, values["width"], values["width"] // values["heads"])
        values["overrides"] = values["overrides"] | {key: size for key, size in sizes.items() if key in plain}


def _shrink_heads(heads: int, kv_heads: int, width: int, degree: int) -> dict[str, int]:
    """Returns fewer heads in the same ratio, still enough for a split by ``degree``, and a width that they divide."""
    # no common ratio: keep all heads and make each narrow
    if heads % kv_heads:
        return {"heads": heads, "width": heads * max(4, width // heads)}
    ratio = heads // kv_heads
    # with grouped queries two key heads suffice to show sharing; without, four heads
    least_kv_heads = max(1, min(kv_heads, max(2, degree) if ratio > 1 else max(4, degree)))
    clone_kv_heads = next(size for size in range(least_kv_heads, kv_heads + 1) if kv_heads % size == 0)
    count = ratio * clone_kv_heads
    # An even number of elements a head, at least four: rotary positions turn halves.
    return {"heads": count, "kv_heads": clone_kv_heads, "width": count * 2 * max(2, -(-width // (2 * count)))}


def _shrink_experts(experts: int, plain: Mapping[str, Any]) -> int:
    """Returns fewer experts: twice those that a token visits, and four in each group where routing chooses groups."""
    active = max((value for key in ACTIVE_EXPERTS if isinstance(value := plain.get(key), int)), default=0)
    groups = max((value for key in _GROUPS if isinstance(value := plain.get(key), int)), default=1)
    least = min(experts, max(CLONE_EXPERTS, 2 * active, 4 * groups if groups > 1 else 0))
    sizes = (size for size in range(least, experts) if experts % size == 0 and size % groups == 0)
    return next(sizes, experts)


_GROUPS = ("n_group", "num_expert_group")


def _long_windows(plain: Mapping[str, Any], window_limit: int) -> dict[str, int]:
    """Returns the family's window attributes that exceed a limit, set to it."""
    return {key: window_limit for key in WINDOWS if isinstance(size := plain.get(key), int) and size > window_limit}


def limit_windows(built: BuiltModel, window_limit: int) -> ModelConfig | None:
    """Returns the model's config with attention windows of at most so many tokens; None where none is longer.

    Args:
        built: the model.
        window_limit: in tokens; 0 for no limit.
    """
    if not window_limit or built.hf_config is None:
        return None
    shortened = _long_windows(built.hf_config.get_text_config(decoder=True).to_dict(), window_limit)
    if not shortened:
        return None
    values = built.config.to_dict()
    return ModelConfig.from_dict(values | {"overrides": {**built.config.overrides, **shortened}})


def narrow_config(built: BuiltModel, width: int = 8, layers: int = CLONE_LAYERS) -> ModelConfig:
    """Returns a config of the same architecture and number of heads in a small width and few layers.

    Experts that are rows of one weight become fewer too; the names of others depend on their number.

    Args:
        built: the model, on meta.
        width: elements of each head.
        layers: of the clone; more where its kinds of layers need them.
    """
    hf = built.hf_config
    assert hf is not None
    family_values = hf.get_text_config(decoder=True).to_dict()
    heads = size_of(family_values, "heads") or 4
    count = min(len(built.structure.layers), layers if size_of(family_values, "experts") is None else EXPERT_LAYERS)
    values = shrink_config(built.config, count, width * heads).to_dict() | {"width": width * heads}
    for key in ("heads", "kv_heads", "experts"):
        values.pop(key, None)
        if (size := size_of(family_values, key)) is not None:
            values[key] = size
    # the user's sizes would make the clone as large as the model
    for key in ("vocab", "context"):
        values.pop(key, None)
    if built.config.kind == "directory":
        _follow_width(values, family_values)
    if "experts" in values:
        # Layers of all experts in full would outgrow a host; no other size of the clone is five times its heads.
        values["ffn"] = 5 * heads
        if find_experts(built.module):
            values["experts"] = _shrink_experts(values["experts"], family_values)
    return with_every_kind(built, ModelConfig.from_dict(values))


def with_every_kind(built: BuiltModel, small: ModelConfig) -> ModelConfig:
    """Returns a clone's config whose layers include every kind of layer beside each of its neighbours.

    Lists that have one entry a layer are cut down to the chosen layers. Where the family's own rule assigns the kinds,
    the clone gets more layers until all are present; if that needs too many, it stays as it was.

    Args:
        built: the model, on meta.
        small: config of the clone, with the least number of layers that it must have.
    """
    hf = built.hf_config
    least_layers = small.layers or 0
    if hf is None or not built.structure.layers:
        return small
    layer_kinds = kinds_of_layers(built)
    if kind_pairs(layer_kinds) <= kind_pairs(kinds_of_layers(build_meta(small, 128, 32))):
        return small
    family_values = hf.get_text_config(decoder=True).to_dict()
    chosen_layers = choose_layers(layer_kinds, least_layers)
    # a config that lists the kind of each layer: cut the lists to the chosen layers
    per_layer_lists = {
        key: json.dumps([item[layer_index] for layer_index in chosen_layers])
        for key, item in family_values.items()
        if isinstance(item, list)
        and len(item) == layer_count(family_values) == len(layer_kinds)
        and _is_flat_list(item)
    }
    lengths = dict.fromkeys([*range(max(least_layers, 2), min(len(layer_kinds), MOST_LAYERS) + 1)])
    attempts = [(len(chosen_layers), per_layer_lists)] if per_layer_lists else []
    for count, listed in (*attempts, *((length, {}) for length in lengths)):
        values = small.to_dict() | {"layers": count, "overrides": {**small.overrides, **listed}}
        try:
            candidate = ModelConfig.from_dict(values)
            if kind_pairs(layer_kinds) <= kind_pairs(kinds_of_layers(build_meta(candidate, 128, 32))):
                return candidate
        except ConfigError:
            continue
    return small


def _is_flat_list(item: list[Any]) -> bool:
    """Returns whether a list contains only plain values."""
    return all(isinstance(entry, str | int | float | bool) for entry in item)


def kinds_of_layers(built: BuiltModel) -> tuple[Hashable, ...]:
    """Returns a key for each layer that is equal for layers of one kind: code, flags, and the config's name for it."""
    hf = built.hf_config
    listed = hf.get_text_config(decoder=True).to_dict().get("layer_types") if hf is not None else None
    kinds = []
    for layer_index, name in enumerate(built.structure.layers):
        label = listed[layer_index] if isinstance(listed, list) and layer_index < len(listed) else ""
        layer = built.module.get_submodule(name)
        kinds.append((label, *(_module_kind(path, part) for path, part in layer.named_modules())))
    return tuple(kinds)


def _module_kind(path: str, module: nn.Module) -> Hashable:
    """Returns a module's share of its layer's kind: class, ranks of its parameters, flags and windows."""
    parameter_ranks = tuple((key, parameter.dim()) for key, parameter in module.named_parameters(recurse=False))
    flags = tuple(sorted((key, str(value)) for key, value in vars(module).items() if isinstance(value, str | bool)))
    windows = tuple(key for key in WINDOWS if vars(module).get(key) is not None)
    # Experts of one list are as many as the clone has; the first stands for all.
    return (path, type(module).__name__, parameter_ranks, flags, windows) if not _is_later_item(path) else ()


def _is_later_item(path: str) -> bool:
    """Returns whether a path leads through an item of a list other than the first."""
    return any(key.isdigit() and int(key) > 0 for key in path.split("."))


def kind_pairs(kinds: Sequence[Hashable]) -> set[Any]:
    """Returns the kinds, and which of them follow one another."""
    return {*kinds, *pairwise(kinds)}


def choose_layers(kinds: Sequence[Hashable], least: int) -> list[int]:
    """Returns few layer indices, in order, that keep every pair of kinds which follow one another somewhere.

    Args:
        kinds: of all layers.
        least: least number of indices, where there are as many layers.
    """
    all_pairs = kind_pairs(kinds)
    # a run of consecutive layers, where one of the wanted length has every pair
    for size in range(min(least, len(kinds)), min(len(kinds), max(least, CLONE_LAYERS)) + 1):
        for start in range(len(kinds) - size + 1):
            if kind_pairs(kinds[start : start + size]) == all_pairs:
                return list(range(start, start + size))
    layer_indices = list(range(len(kinds)))
    # drop runs whose ends fit together, the longest first
    for run_length in range(len(kinds) // 2, 0, -1):
        start = 1
        while start + run_length <= len(layer_indices):
            remaining = layer_indices[:start] + layer_indices[start + run_length :]
            if len(remaining) >= least and kind_pairs([kinds[layer_index] for layer_index in remaining]) == all_pairs:
                layer_indices = remaining
            else:
                start += 1
    return layer_indices
