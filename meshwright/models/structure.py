"""The parts of a model by name, read from its structure: what recompute, compile, sharding and later axes act on."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class ModelStructure:
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


def read_structure(module: nn.Module) -> ModelStructure:
    """Reads the parts of a model, on any device.

    Args:
        module: a transformers model, or any nn.Module; blocks are the items of the `nn.ModuleList`, or the repeated
            items of the `nn.Sequential` or `nn.ModuleDict`, that lie outermost. A model of tokens without any of these
            has its outermost modules with parts of their own as blocks, however often forward applies each.
    """
    names = {id(child): name for name, child in module.named_modules()}
    stacks = tuple(_stacks(module))
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
    return ModelStructure(
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


_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def _stacks(module: nn.Module) -> list[tuple[str, ...]]:
    """Outermost runs of repeated blocks of a model, in order; else its lone blocks, each applied once or more."""
    found = [stack for key, child in module.named_children() for stack in _stacks_below(child, key)]
    if not found and (blocks := _blocks(module) or _lone_blocks(module, "", _token_table(module))):
        return [tuple(blocks)]
    return found


def _stacks_below(child: nn.Module, name: str) -> list[tuple[str, ...]]:
    """The stacks of a child; containers inside a container are stacks of their own."""
    blocks = _blocks(child)
    if not blocks:
        return [stack for key, part in child.named_children() for stack in _stacks_below(part, f"{name}.{key}")]
    if not all(isinstance(child.get_submodule(block), _CONTAINERS) for block in blocks):
        return [tuple(f"{name}.{block}" for block in blocks)]
    found = []
    for block in blocks:
        part, path = child.get_submodule(block), f"{name}.{block}"
        found += _stacks_below(part, path) or [tuple(f"{path}.{key}" for key, _ in part.named_children())]
    return found


def _blocks(child: nn.Module) -> list[str]:
    """Names of the blocks that a container repeats; none when it is no stack."""
    items = [(key, item) for key, item in child.named_children() if any(True for _ in item.parameters())]
    if isinstance(child, nn.ModuleList):
        return [key for key, item in items if any(True for _ in item.children())]
    if isinstance(child, (nn.Sequential, nn.ModuleDict)):
        counts = Counter(type(item) for _, item in items)
        return [key for key, item in items if counts[type(item)] > 1 and any(True for _ in item.children())]
    return []


def _lone_blocks(module: nn.Module, path: str, table: nn.Module | None) -> list[str]:
    """Outermost modules with parts of their own, in a model without a stack: one block may be applied several times.

    Args:
        module: the model, or a part that is no block itself.
        path: its name.
        table: the token embedding; what holds it, or a projection to its vocabulary, is no block.
    """
    found: list[str] = []
    vocab = getattr(table, "num_embeddings", None)
    for key, child in module.named_children():
        name, parts = f"{path}.{key}" if path else key, list(child.modules())
        if len(parts) == 1 or not any(True for _ in child.parameters()):
            continue
        heads = any(isinstance(part, nn.Linear) and part.out_features == vocab for part in parts)
        if table is None or heads or any(part is table for part in parts) or isinstance(child, _CONTAINERS):
            found += _lone_blocks(child, name, table) if table is not None else []
        else:
            found.append(name)
    return found


def _token_table(module: nn.Module) -> nn.Module | None:
    name = _first_embedding(dict(module.named_modules()))
    return module.get_submodule(name) if name else None


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


def stack_parameters(module: nn.Module, structure: ModelStructure) -> dict[str, int]:
    """Returns the number of parameters of each block, by name."""
    return {name: sum(p.numel() for p in module.get_submodule(name).parameters()) for name in structure.layers}


def dtype_of(module: nn.Module) -> torch.dtype:
    """Returns the type of the module's first floating parameter, float32 when it has none."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
