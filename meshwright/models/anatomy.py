"""The parts of a model by name, read from its structure: what recompute, compile, sharding and later axes act on."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Names of the parts of one model; names are dotted module names unless said otherwise."""

    embedding: str | None
    """The token embedding."""
    vocab: int | None
    """Rows of the token embedding, V."""
    width: int | None
    """Columns of the token embedding, D."""
    stacks: tuple[tuple[str, ...], ...]
    """Each stack of repeated blocks, its blocks in order; most models have one."""
    final_norm: str | None
    """The norm after the last block."""
    head: str | None
    """The projection to logits."""
    ties: tuple[tuple[str, ...], ...]
    """Groups of parameter names that are one parameter."""
    position_embedding: str | None
    """The learned position table."""
    positions: int | None
    """Rows that the learned position table has for tokens; None without one."""
    context: int | None
    """Longest sequence that the model's config states, in tokens."""
    token_argument: str
    """Name of forward's argument for tokens."""
    target_argument: str | None
    """Name of forward's argument for targets."""
    arguments: frozenset[str]
    """Names of forward's arguments."""
    transformers: bool
    """True for a transformers model."""

    @property
    def layers(self) -> tuple[str, ...]:
        """All blocks of all stacks in order: the units of recompute, compile and sharding."""
        return tuple(name for stack in self.stacks for name in stack)

    @property
    def takes_positions(self) -> bool:
        """True when forward takes ``position_ids``."""
        return "position_ids" in self.arguments


def read_anatomy(module: nn.Module) -> Anatomy:
    """Reads the parts of a model, on any device.

    Args:
        module: a transformers model, or any nn.Module; blocks are the items of the `nn.ModuleList` or the repeated
            items of the `nn.Sequential` that lie outermost.
    """
    names = {id(child): name for name, child in module.named_modules()}
    stacks = tuple(_stacks(module, ""))
    inside = tuple(f"{name}." for stack in stacks for name in stack)
    outside = {
        name: child
        for name, child in module.named_modules()
        if name and not f"{name}.".startswith(inside) and not any(prefix.startswith(f"{name}.") for prefix in inside)
    }
    embedding = _accessor(module, "get_input_embeddings", names) or _first_embedding(outside)
    table = module.get_submodule(embedding) if embedding else None
    rows, columns = (getattr(table, key, None) for key in ("num_embeddings", "embedding_dim"))
    head = _accessor(module, "get_output_embeddings", names) or _head(outside, rows)
    config: Any = getattr(module, "config", None)
    transformers = config is not None and hasattr(config, "get_text_config")
    text = config.get_text_config(decoder=True) if transformers else config
    context = next((v for k in _CONTEXTS if isinstance(v := getattr(text, k, None), int)), None)
    position = _position_table(outside, embedding)
    arguments = inspect.signature(module.forward).parameters
    positional = [key for key, item in arguments.items() if item.kind is not inspect.Parameter.VAR_KEYWORD]
    return Anatomy(
        embedding=embedding,
        vocab=rows,
        width=columns,
        stacks=stacks,
        final_norm=_final_norm(outside, head),
        head=head,
        ties=_ties(module),
        position_embedding=position,
        positions=_rows(module, position),
        context=context,
        token_argument=next((key for key in _TOKENS if key in positional), (*positional, "input_ids")[0]),
        target_argument=next((key for key in _TARGETS if key in positional), None),
        arguments=frozenset(positional),
        transformers=transformers,
    )


_TOKENS = ("input_ids", "tokens", "idx", "x", "input", "inputs")
_TARGETS = ("targets", "target", "labels", "label", "y")
_CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context", "block_size")


def _stacks(module: nn.Module, path: str) -> list[tuple[str, ...]]:
    """Outermost runs of repeated blocks below a module, in order."""
    found: list[tuple[str, ...]] = []
    for key, child in module.named_children():
        name = f"{path}.{key}" if path else key
        blocks = _blocks(child)
        if blocks and all(isinstance(child.get_submodule(block), nn.ModuleList) for block in blocks):
            found += [tuple(f"{name}.{b}.{i}" for i, _ in child.get_submodule(b).named_children()) for b in blocks]
        elif blocks:
            found.append(tuple(f"{name}.{block}" for block in blocks))
        else:
            found += _stacks(child, name)
    if not path and not found and (blocks := _blocks(module)):
        return [tuple(blocks)]
    return found


def _blocks(child: nn.Module) -> list[str]:
    """Names of the blocks that a container repeats; none when it is no stack."""
    items = [(key, item) for key, item in child.named_children() if any(True for _ in item.parameters())]
    if isinstance(child, nn.ModuleList):
        return [key for key, item in items if any(True for _ in item.children())]
    if isinstance(child, nn.Sequential):
        counts = Counter(type(item) for _, item in items)
        return [key for key, item in items if counts[type(item)] > 1 and any(True for _ in item.children())]
    return []


def _accessor(module: nn.Module, name: str, names: dict[int, str]) -> str | None:
    try:
        part = getattr(module, name)()
    except (AttributeError, NotImplementedError):
        return None
    return names.get(id(part)) if isinstance(part, nn.Module) else None


def _first_embedding(outside: dict[str, nn.Module]) -> str | None:
    tables = [name for name, child in outside.items() if isinstance(child, nn.Embedding)]
    tables = [name for name in tables if not _is_position(name)] or tables
    return tables[0] if tables else None


def _is_position(name: str) -> bool:
    return "pos" in name.rpartition(".")[2].lower() or name.rpartition(".")[2] == "wpe"


def _position_table(outside: dict[str, nn.Module], embedding: str | None) -> str | None:
    for name, child in outside.items():
        if name != embedding and _is_position(name) and isinstance(getattr(child, "weight", None), nn.Parameter):
            return name
    return None


def _rows(module: nn.Module, position: str | None) -> int | None:
    if position is None:
        return None
    table = module.get_submodule(position)
    return int(table.weight.shape[0]) - int(getattr(table, "offset", 0) or 0)


def _head(outside: dict[str, nn.Module], vocab: int | None) -> str | None:
    heads = [n for n, child in outside.items() if isinstance(child, nn.Linear) and vocab in (None, child.out_features)]
    return heads[-1] if heads else None


def _final_norm(outside: dict[str, nn.Module], head: str | None) -> str | None:
    """The last norm outside the blocks."""
    norms = [name for name, child in outside.items() if name != head and _is_norm(child)]
    return norms[-1] if norms else None


def _is_norm(child: nn.Module) -> bool:
    return "norm" in type(child).__name__.lower() and not any(True for _ in child.children())


def _ties(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def stack_parameters(module: nn.Module, anatomy: Anatomy) -> dict[str, int]:
    """Returns the number of parameters of each block, by name."""
    return {name: sum(p.numel() for p in module.get_submodule(name).parameters()) for name in anatomy.layers}


def dtype_of(module: nn.Module) -> torch.dtype:
    """Returns the type of the module's first floating parameter, float32 when it has none."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
