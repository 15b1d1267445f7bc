"""Small models of the same architecture: what is tried and proven of a model that is too large to be tried itself.

A clone keeps what layouts depend on: how many query heads share a key head, every kind of layer beside its neighbours,
experts where routing counts them, and windows of attention short enough to be felt in short rows.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.experts import find_experts
from meshwright.models.family import directory_config, family_config
from meshwright.models.sizes import ACTIVE_EXPERTS, SYNONYMS, WINDOWS, layer_count, size_of

CLONE_LAYERS = 8
"""Layers of a smaller clone, unless its kinds of layers need more."""
CLONE_EXPERTS = 8
"""Experts of a smaller clone, unless its tokens visit more than half as many or routing groups them."""
CLONE_WINDOW = 11
"""Most tokens of a clone's window of attention: shorter than any row that is proven, and no multiple of a degree."""
MOST_LAYERS = 64
"""Layers up to which a clone is made longer until every kind of layer is in it."""


def shrink(config: ModelConfig, layers: int = 2, width: int = 64, parts: int = 2) -> ModelConfig:
    """Returns a config of the same architecture with fewer, narrower layers, for proofs and probes.

    Args:
        config: of the model.
        layers: of the clone.
        width: least width of the clone; more where its heads need it.
        parts: into so many its heads are split at most.

    Raises:
        ConfigError: for a function, whose sizes are its own.
    """
    if config.kind == "function":
        raise ConfigError(f"model '{config.name}' is a function: it can't be shrunk; run it as it is (--full)")
    make = directory_config if config.kind == "directory" else family_config
    plain = make(config, None, None).get_text_config(decoder=True).to_dict()
    values = config.to_dict() | {"layers": layers, "width": width, "fresh": config.kind == "directory"}
    for key in ("heads", "kv_heads", "ffn", "experts"):
        values.pop(key, None)
    named = {name for key, names in SYNONYMS.items() if key not in ("vocab", "context") for name in names}
    overrides = {key: item for key, item in config.overrides.items() if key not in named}
    heads, kv_heads = size_of(plain, "heads"), size_of(plain, "kv_heads")
    if heads:
        values |= _heads(heads, kv_heads or heads, width, parts)
        if not plain.keys() & set(SYNONYMS["kv_heads"]):
            values.pop("kv_heads", None)
    if (experts := size_of(plain, "experts")) is not None:
        values["experts"] = _experts(experts, plain)
    values["overrides"] = overrides | _windows(plain, CLONE_WINDOW)
    return ModelConfig.from_dict(values)


def _heads(heads: int, kv_heads: int, width: int, parts: int) -> dict[str, int]:
    """Fewer heads in the same ratio, still enough for ``parts``, and a width that they divide."""
    if heads % kv_heads:
        return {"heads": heads, "width": heads * max(4, width // heads)}
    ratio = heads // kv_heads
    least = max(1, min(kv_heads, max(2, parts) if ratio > 1 else max(4, parts)))
    kept = next(size for size in range(least, kv_heads + 1) if kv_heads % size == 0)
    count = ratio * kept
    # An even number of elements a head, at least four: rotary positions turn halves.
    return {"heads": count, "kv_heads": kept, "width": count * 2 * max(2, -(-width // (2 * count)))}


def _experts(experts: int, plain: Mapping[str, Any]) -> int:
    """Fewer experts where routing looks at each alone; all of them where it chooses among groups."""
    active = max((value for key in ACTIVE_EXPERTS if isinstance(value := plain.get(key), int)), default=0)
    groups = max((value for key in _GROUPS if isinstance(value := plain.get(key), int)), default=1)
    if groups > 1:
        return experts
    least = min(experts, max(CLONE_EXPERTS, 2 * active))
    return next(size for size in range(least, experts + 1) if experts % size == 0)


_GROUPS = ("n_group", "num_expert_group")


def _windows(plain: Mapping[str, Any], most: int) -> dict[str, int]:
    return {key: most for key in WINDOWS if isinstance(size := plain.get(key), int) and size > most}


def with_windows(built: BuiltModel, most: int) -> ModelConfig | None:
    """Returns the model's config with windows of attention of at most so many tokens; None where none is longer.

    Args:
        built: the model.
        most: tokens; 0 for any number.
    """
    if not most or built.hf_config is None:
        return None
    shorter = _windows(built.hf_config.get_text_config(decoder=True).to_dict(), most)
    if not shorter:
        return None
    values = built.config.to_dict()
    return ModelConfig.from_dict(values | {"overrides": {**built.config.overrides, **shorter}})


def narrowed(built: BuiltModel, width: int = 8, layers: int = CLONE_LAYERS) -> ModelConfig:
    """Returns a config of the same architecture and heads in a small width and few layers.

    Experts that are rows of one weight become fewer too; the names of others tell their number.

    Args:
        built: the model, on meta.
        width: elements of each head.
        layers: of the clone; more where its kinds of layers need them.
    """
    hf = built.hf_config
    assert hf is not None
    plain = hf.get_text_config(decoder=True).to_dict()
    heads = size_of(plain, "heads") or 4
    count = min(len(built.structure.layers), layers)
    values = shrink(built.config, count, width * heads).to_dict() | {"width": width * heads}
    for key in ("heads", "kv_heads", "experts"):
        values.pop(key, None)
        if (size := size_of(plain, key)) is not None:
            values[key] = size
    for key in ("vocab", "context"):  # else the user's own would make the clone as large as these
        values.pop(key, None)
    if "experts" in values:
        # Eight layers of all experts in full would outgrow a host; no other size of the clone is five times its heads.
        values["ffn"] = 5 * heads
        if find_experts(built.module):
            values["experts"] = _experts(values["experts"], plain)
    return with_every_kind(built, ModelConfig.from_dict(values))


def with_every_kind(built: BuiltModel, small: ModelConfig) -> ModelConfig:
    """Returns a clone's config with its layers chosen so that every kind stands in it beside every neighbour it has.

    Lists that have one entry a layer are cut down to the chosen layers. Where the family's own rule deals out the kinds
    the clone gets more layers until they are all there; if that takes too many, it stays as it was.

    Args:
        built: the model, on meta.
        small: config of the clone, with as many layers as it must have.
    """
    hf = built.hf_config
    least = small.layers or 0
    if hf is None or not built.structure.layers:
        return small
    wanted = kinds_of(built)
    if pairs(wanted) <= pairs(kinds_of(build_meta(small, 128, 32))):
        return small
    plain = hf.get_text_config(decoder=True).to_dict()
    chosen = walk(wanted, least)
    lists = {
        key: json.dumps([item[place] for place in chosen])
        for key, item in plain.items()
        if isinstance(item, list) and len(item) == layer_count(plain) == len(wanted) and _flat(item)
    }
    lengths = dict.fromkeys([*range(max(least, 2), min(len(wanted), MOST_LAYERS) + 1)])
    tries = [(len(chosen), lists)] if lists else []
    for count, listed in (*tries, *((length, {}) for length in lengths)):
        values = small.to_dict() | {"layers": count, "overrides": {**small.overrides, **listed}}
        try:
            made = ModelConfig.from_dict(values)
            if pairs(wanted) <= pairs(kinds_of(build_meta(made, 128, 32))):
                return made
        except ConfigError:
            continue
    return small


def _flat(item: list[Any]) -> bool:
    return all(isinstance(entry, str | int | float | bool) for entry in item)


def kinds_of(built: BuiltModel) -> tuple[Hashable, ...]:
    """Returns for each layer what tells its kind from others: its code and flags, and what the config calls it."""
    hf = built.hf_config
    listed = hf.get_text_config(decoder=True).to_dict().get("layer_types") if hf is not None else None
    found = []
    for place, name in enumerate(built.structure.layers):
        label = listed[place] if isinstance(listed, list) and place < len(listed) else ""
        layer = built.module.get_submodule(name)
        found.append((label, *(_part_kind(path, part) for path, part in layer.named_modules())))
    return tuple(found)


def _part_kind(path: str, part: nn.Module) -> Hashable:
    names = tuple((key, item.dim()) for key, item in part.named_parameters(recurse=False))
    flags = tuple(sorted((key, str(value)) for key, value in vars(part).items() if isinstance(value, str | bool)))
    windows = tuple(key for key in WINDOWS if vars(part).get(key) is not None)
    # Experts of one list are as many as the clone has; the first stands for all.
    return (path, type(part).__name__, names, flags, windows) if not _later_item(path) else ()


def _later_item(path: str) -> bool:
    return any(key.isdigit() and int(key) > 0 for key in path.split("."))


def pairs(kinds: Sequence[Hashable]) -> set[Any]:
    """Returns the kinds, and which of them follow one another."""
    return {*kinds, *pairwise(kinds)}


def walk(kinds: Sequence[Hashable], least: int) -> list[int]:
    """Returns few places, in order, among which every kind follows every kind that it follows somewhere.

    Args:
        kinds: of all layers.
        least: places at least, where there are as many.
    """
    every = pairs(kinds)
    for size in range(min(least, len(kinds)), min(len(kinds), max(least, CLONE_LAYERS)) + 1):
        for start in range(len(kinds) - size + 1):
            if pairs(kinds[start : start + size]) == every:
                return list(range(start, start + size))
    chosen = list(range(len(kinds)))
    for run in range(len(kinds) // 2, 0, -1):  # drop runs whose ends fit together, the longest first
        start = 1
        while start + run <= len(chosen):
            left = chosen[:start] + chosen[start + run :]
            if len(left) >= least and pairs([kinds[place] for place in left]) == every:
                chosen = left
            else:
                start += 1
    return chosen
