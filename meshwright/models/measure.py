"""Counts a model's parameters and sizes into a `ModelShape`."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from meshwright.models.blocks import read_blocks
from meshwright.models.build import BuiltModel
from meshwright.models.sizes import ACTIVE_EXPERTS, SYNONYMS
from meshwright.spec.model_shape import ModelShape

_EXPERT = re.compile(r"(^|\.)(experts?|expert_\w+)(\.|$)")


def measure_shape(built: BuiltModel) -> ModelShape:
    """Counts parameters by module, on meta: nothing is computed.

    Args:
        built: from `build_meta`.

    Returns:
        The sizes. Heads come from the transformers config; a module without one counts as one head as wide as the
        residual stream in every block, which gives the same attention FLOPs as any number of heads of its width.
    """
    module, structure = built.module, built.structure
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    layers = tuple(_parameters_below(sizes, name) for name in structure.layers)
    embedding = sum(
        _parameters_below(sizes, name) for name in (structure.embedding, structure.position_embedding) if name
    )
    # named_parameters lists a tied weight once, under the embedding: the head counts 0
    head = _parameters_below(sizes, structure.head) if structure.head else 0
    total = sum(sizes.values())
    text = built.hf_config.get_text_config(decoder=True).to_dict() if built.hf_config is not None else {}
    experts, active = _first_int(text, *SYNONYMS["experts"]), _first_int(text, *ACTIVE_EXPERTS)
    width = structure.width or 0
    heads = _first_int(text, *SYNONYMS["heads"]) if text else 1
    head_size = _first_int(text, "head_dim") or (width // heads if heads else 0)
    return ModelShape(
        name=built.config.name,
        parameters=total,
        layer_parameters=layers,
        embedding_parameters=embedding,
        head_parameters=head,
        other_parameters=total - sum(layers) - embedding - head,
        matmul_parameters=_matmul_parameters(module, structure, active / experts if experts and active else 1.0),
        layers=len(layers),
        width=width,
        heads=heads,
        head_size=head_size,
        vocab=structure.vocab or 0,
        experts=experts,
        active_experts=active if experts else 0,
        tied=bool(structure.head) and head == 0,
        positions=structure.positions or 0,
        whole_logits=structure.head is None or not isinstance(module.get_submodule(structure.head), nn.Linear),
        blocks=read_blocks(built),
    )


def _parameters_below(sizes: dict[str, int], path: str) -> int:
    """Returns the number of parameters below a module."""
    return sum(size for name, size in sizes.items() if name.startswith(f"{path}."))


def _first_int(text: dict[str, Any], *keys: str) -> int:
    """Returns the first of several config attributes that is an integer, 0 for none."""
    return next((value for key in keys if isinstance(value := text.get(key), int)), 0)


def _matmul_parameters(module: nn.Module, structure: Any, share: float) -> int:
    """Returns the number of weights in matrices outside the embeddings; of experts the share that a token visits."""
    tables = tuple(f"{name}." for name in (structure.embedding, structure.position_embedding) if name)
    count = 0.0
    # a tied head multiplies too, so duplicates count
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.ndim >= 2 and not name.startswith(tables):
            count += parameter.numel() * (share if _EXPERT.search(name) else 1.0)
    return round(count)
