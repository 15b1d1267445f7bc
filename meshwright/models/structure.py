"""Finds a model's embedding, layers, norm and head by name, for recompute, compile, sharding and the axes."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class ModelStructure:
    """Names of the modules of one model that the trainer treats apart; names are dotted unless said otherwise."""

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
    """Reads the structure of a model, on any device.

    Args:
        module: a transformers model, or any nn.Module; blocks are the items of the `nn.ModuleList`, or the repeated
            items of the `nn.Sequential` or `nn.ModuleDict`, that lie outermost. A model of tokens without any of these
            has as blocks its outermost modules that have submodules, however often forward applies each.
    """
    names = {id(child): name for name, child in module.named_modules()}
    stacks = tuple(_find_stacks(module))
    inside = tuple(f"{name}." for stack in stacks for name in stack)
    # modules neither in a block nor around one
    outside = {
        name: child
        for name, child in module.named_modules()
        if name and not f"{name}.".startswith(inside) and not any(prefix.startswith(f"{name}.") for prefix in inside)
    }
    embedding = _module_from_accessor(module, "get_input_embeddings", names) or _first_embedding(outside)
    vocab, width = _table_sizes(module.get_submodule(embedding)) if embedding else (None, None)
    head = _module_from_accessor(module, "get_output_embeddings", names) or _find_head(outside, vocab)
    config: Any = getattr(module, "config", None)
    transformers = config is not None and hasattr(config, "get_text_config")
    text_config = config.get_text_config(decoder=True) if transformers else config
    context = next((v for k in _CONTEXTS if isinstance(v := getattr(text_config, k, None), int)), None)
    position_name = _find_position_table(outside, embedding)
    positional = _forward_arguments(module)
    return ModelStructure(
        embedding=embedding,
        vocab=vocab,
        width=width,
        stacks=stacks,
        final_norm=_final_norm(outside, head),
        head=head,
        ties=_tied_parameters(module),
        position_embedding=position_name,
        positions=_position_rows(module, position_name),
        context=context,
        token_argument=next((key for key in _TOKENS if key in positional), (*positional, "input_ids")[0]),
        target_argument=next((key for key in _TARGETS if key in positional), None),
        arguments=frozenset(positional),
        transformers=transformers,
    )


def _forward_arguments(module: nn.Module) -> list[str]:
    """Returns the names of forward's arguments, in order."""
    arguments = inspect.signature(module.forward).parameters
    # forward(*args, **kwargs) accepts any name, so these two aren't listed
    named = [key for key, item in arguments.items() if item.kind not in _OF_ANY_NAME]
    # A wrapper of peft hands on what it doesn't name itself: all of it around a model of one's own.
    # Source: peft 0.21, peft_model.py, PeftModel and PeftModelForCausalLM.
    find_inner = getattr(module, "get_base_model", None)
    if len(named) < len(arguments) and callable(find_inner) and isinstance(inner := find_inner(), nn.Module):
        handed = _forward_arguments(inner)
        named += [key for key in handed if key == "position_ids"] if named else handed
    return named


_OF_ANY_NAME = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_TOKENS = ("input_ids", "tokens", "idx", "x", "input", "inputs")
_TARGETS = ("targets", "target", "labels", "label", "y")
_CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context", "block_size")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def _find_stacks(module: nn.Module) -> list[tuple[str, ...]]:
    """Returns the outermost runs of repeated blocks of a model, in order; else its lone blocks."""
    stacks = [stack for key, child in module.named_children() for stack in _stacks_below(child, key)]
    # the model itself may be the stack, as an nn.Sequential of blocks is
    if not stacks and (blocks := _blocks(module) or _lone_blocks(module, "", _token_table(module))):
        return [tuple(blocks)]
    return stacks


def _stacks_below(child: nn.Module, name: str) -> list[tuple[str, ...]]:
    """Returns the stacks of a child; containers inside a container are stacks of their own."""
    blocks = _blocks(child)
    if not blocks:
        return [
            stack
            for key, block_child in child.named_children()
            for stack in _stacks_below(block_child, f"{name}.{key}")
        ]
    if not all(isinstance(child.get_submodule(block), _CONTAINERS) for block in blocks):
        return [tuple(f"{name}.{block}" for block in blocks)]
    # blocks that are containers: each is a stack of its own
    stacks = []
    for block in blocks:
        block_child, path = child.get_submodule(block), f"{name}.{block}"
        stacks += _stacks_below(block_child, path) or [
            tuple(f"{path}.{key}" for key, _ in block_child.named_children())
        ]
    return stacks


def _blocks(child: nn.Module) -> list[str]:
    """Returns the names of the blocks that a container repeats; none when it is no stack."""
    items = [(key, item) for key, item in child.named_children() if any(True for _ in item.parameters())]
    if isinstance(child, nn.ModuleList):
        return [key for key, item in items if any(True for _ in item.children())]
    if isinstance(child, (nn.Sequential, nn.ModuleDict)):
        # an nn.Sequential is a stack where one class repeats
        counts = Counter(type(item) for _, item in items)
        return [key for key, item in items if counts[type(item)] > 1 and any(True for _ in item.children())]
    return []


def _lone_blocks(module: nn.Module, path: str, table: nn.Module | None) -> list[str]:
    """Returns the outermost modules with submodules, in a model without a stack; each may be applied several times.

    Args:
        module: the model, or a submodule that is no block itself.
        path: its name.
        table: the token embedding; a module that contains it, or a projection to its vocabulary, is no block.
    """
    names: list[str] = []
    vocab = getattr(table, "num_embeddings", None)
    for key, child in module.named_children():
        name, submodules = f"{path}.{key}" if path else key, list(child.modules())
        if len(submodules) == 1 or not any(True for _ in child.parameters()):
            continue
        # a module with the head in it is no block, but blocks may lie beside the head
        heads = any(isinstance(submodule, nn.Linear) and submodule.out_features == vocab for submodule in submodules)
        if (
            table is None
            or heads
            or any(submodule is table for submodule in submodules)
            or isinstance(child, _CONTAINERS)
        ):
            names += _lone_blocks(child, name, table) if table is not None else []
        else:
            names.append(name)
    return names


def _token_table(module: nn.Module) -> nn.Module | None:
    """Returns the token embedding of a model, None without one."""
    name = _first_embedding(dict(module.named_modules()))
    return module.get_submodule(name) if name else None


def _module_from_accessor(module: nn.Module, name: str, names: dict[int, str]) -> str | None:
    """Returns the name of the module that a transformers accessor such as ``get_input_embeddings`` returns."""
    try:
        child = getattr(module, name)()
    except (AttributeError, NotImplementedError):
        return None
    return names.get(id(child)) if isinstance(child, nn.Module) else None


def _first_embedding(outside: dict[str, nn.Module]) -> str | None:
    """Returns the name of the first embedding outside the blocks; one of positions only where it is alone."""
    tables = [name for name, child in outside.items() if isinstance(child, nn.Embedding)]
    # a position table alone may be all that there is
    tables = [name for name in tables if not _is_position(name)] or tables
    return tables[0] if tables else None


def _table_sizes(table: nn.Module) -> tuple[int | None, int | None]:
    """Returns rows and columns of an embedding; of a module around one, such as an adapter, those of the one in it."""
    inner = next((child for child in table.modules() if hasattr(child, "num_embeddings")), table)
    vocab, width = (getattr(inner, key, None) for key in ("num_embeddings", "embedding_dim"))
    return vocab, width


def _is_position(name: str) -> bool:
    """Returns whether a name is that of a position table."""
    return "pos" in name.rpartition(".")[2].lower() or name.rpartition(".")[2] == "wpe"


def _find_position_table(outside: dict[str, nn.Module], embedding: str | None) -> str | None:
    """Returns the name of the learned position table, None without one."""
    for name, child in outside.items():
        if name != embedding and _is_position(name) and isinstance(getattr(child, "weight", None), nn.Parameter):
            return name
    return None


def _position_rows(module: nn.Module, position: str | None) -> int | None:
    """Returns the number of tokens that the position table has rows for."""
    if position is None:
        return None
    table = module.get_submodule(position)
    # transformers' OPT keeps two rows of padding in front of the first position
    return int(table.weight.shape[0]) - int(getattr(table, "offset", 0) or 0)


def _find_head(outside: dict[str, nn.Module], vocab: int | None) -> str | None:
    """Returns the name of the last Linear outside the blocks with one output for each vocabulary entry."""
    # the last one: an earlier Linear of the same size may be an auxiliary head
    heads = [n for n, child in outside.items() if isinstance(child, nn.Linear) and vocab in (None, child.out_features)]
    return heads[-1] if heads else None


def _final_norm(outside: dict[str, nn.Module], head: str | None) -> str | None:
    """Returns the name of the last norm outside the blocks."""
    norm_names = [name for name, child in outside.items() if name != head and _is_norm(child)]
    return norm_names[-1] if norm_names else None


def _is_norm(child: nn.Module) -> bool:
    """Returns whether a module is a norm, by its class name."""
    return "norm" in type(child).__name__.lower() and not any(True for _ in child.children())


def _tied_parameters(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Returns the groups of parameter names that are one parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)
