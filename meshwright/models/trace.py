"""Runs a small real model with every matrix cut out of autograd's graph, so that what depends on what can be read off.

Each matrix's output becomes a leaf. The gradient of one matrix's input with respect to the leaves then says, element by
element, what reaches it without passing through another matrix, whatever the code in between looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from meshwright.parallel.model_checkpointing import inlined


@dataclass(slots=True)
class TracedMatrix:
    """One matrix (or expert module) of a layer, called once."""

    name: str
    """From the layer on."""
    module: nn.Module
    input: torch.Tensor
    """(B, S, F) or (B S, F): still in the graph."""
    output: torch.Tensor
    """A leaf of the graph."""
    calls: int = 1
    experts: bool = False


@dataclass(slots=True)
class LayerTrace:
    """One call of a layer."""

    name: str
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """What it was called with; tensors with a gradient are leaves."""
    inputs: list[torch.Tensor]
    """Those leaves."""
    cuts: dict[str, TracedMatrix] = field(default_factory=dict)
    """Its matrices in order of their calls."""
    output: torch.Tensor | None = None
    calls: int = 1
    opened: dict[str, torch.Tensor] = field(default_factory=dict)
    """What norms over all features gave, where these were opened."""
    arguments: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Tensors that each module inside was called with, by position or name."""

    def loose(self) -> dict[str, nn.Parameter]:
        """Returns trained parameters that belong to no matrix, by name."""
        owned = {id(item) for cut in self.cuts.values() for item in cut.module.parameters()}
        return {
            name: item for name, item in self.layer.named_parameters() if id(item) not in owned and item.requires_grad
        }


def is_matrix(module: nn.Module) -> bool:
    """Whether a module is a product with one weight: a Linear or a transposed one."""
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the stacked matrices of several experts."""
    stacked = [item for item in module._parameters.values() if item is not None and item.dim() == 3]
    return len(stacked) >= 2 and len({item.shape[0] for item in stacked}) == 1


def is_norm(module: nn.Module) -> bool:
    """Whether a module may scale all features by what they have in common: vectors of one size and nothing else."""
    own = [item for item in module._parameters.values() if item is not None]
    return bool(own) and not module._modules and all(item.dim() == 1 and item.shape == own[0].shape for item in own)


def trace(layers: dict[str, nn.Module], run: Callable[[], Any], opened: bool = False) -> dict[str, LayerTrace]:
    """Runs a model once and returns what each layer did.

    Args:
        layers: name to layer.
        run: calls the model, with gradients on.
        opened: let norms over all features of a token pass what they get, so that features don't meet in them.
    """
    found: dict[str, LayerTrace] = {}
    with _hooked(layers, found, opened), inlined():
        run()
    return found


@contextmanager
def _hooked(layers: dict[str, nn.Module], found: dict[str, LayerTrace], opened: bool) -> Iterator[None]:
    handles: list[Any] = []
    draw = torch.Generator().manual_seed(13)
    for name, layer in layers.items():
        handles.append(layer.register_forward_pre_hook(_entering(name, found), with_kwargs=True))
        handles.append(layer.register_forward_hook(_leaving(name, found)))
        inside = ""
        for path, module in layer.named_modules():
            if inside and path.startswith(inside):
                continue
            if is_experts(module) or is_matrix(module):
                inside = f"{path}." if is_experts(module) else ""
                handles.append(module.register_forward_hook(_cutting(name, path, found, draw)))
            elif opened and is_norm(module):
                handles.append(module.register_forward_hook(_opening(name, path, found), with_kwargs=True))
            elif path and module._modules:
                handles.append(module.register_forward_pre_hook(_noting(name, path, found), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _entering(name: str, found: dict[str, LayerTrace]) -> Callable[..., Any]:
    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves: list[torch.Tensor] = []

        def leaf(value: torch.Tensor) -> torch.Tensor:
            if not (value.requires_grad and value.is_floating_point()):
                return value
            leaves.append(value.detach().clone().requires_grad_())
            return leaves[-1]

        if name in found:
            # A shared layer is read off its first call; the whole model's rehearsal sees all of them.
            found[name].calls += 1
            return None
        args, kwargs = tree_map_only(torch.Tensor, leaf, (args, kwargs))
        found[name] = LayerTrace(name, layer, args, kwargs, leaves)
        # The code may write into what it gets, but not into a leaf.
        return tree_map_only(torch.Tensor, lambda item: item.clone() if item.requires_grad else item, (args, kwargs))

    return hook


def _leaving(name: str, found: dict[str, LayerTrace]) -> Callable[..., Any]:
    def hook(_layer: nn.Module, _args: Any, out: Any) -> None:
        if found[name].calls == 1:
            found[name].output = first_tensor(out)

    return hook


def _cutting(layer: str, name: str, found: dict[str, LayerTrace], draw: torch.Generator) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        if layer not in found or found[layer].calls > 1 or not isinstance(out, torch.Tensor):
            return None
        cuts = found[layer].cuts
        # Any values of that size do; these leave no feature on the flat side of an activation for all tokens.
        scale = out.detach().std(correction=0) if out.is_floating_point() else 1.0
        leaf = (torch.randn(out.shape, generator=draw, dtype=out.dtype) * scale).requires_grad_()
        if name in cuts:
            cuts[name].calls += 1
        elif args and isinstance(args[0], torch.Tensor):
            cuts[name] = TracedMatrix(name, module, args[0], leaf, experts=is_experts(module))
        return leaf.clone()

    return hook


def _opening(layer: str, name: str, found: dict[str, LayerTrace]) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        if layer not in found or not isinstance(out, torch.Tensor) or not found[layer].inputs:
            return None
        if found[layer].calls > 1:
            return None
        every = [*args, *kwargs.values()]
        alike = [item for item in every if isinstance(item, torch.Tensor) and item.shape == out.shape]
        first = found[layer].inputs[0]
        if not alike or out.numel() // out.shape[-1] != first.numel() // first.shape[-1]:
            return None  # a norm of each head
        passed = sum(alike[1:], alike[0] * 1.5)
        if passed.requires_grad:
            found[layer].opened[name] = passed
        return passed

    return hook


def _noting(layer: str, name: str, found: dict[str, LayerTrace]) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if layer in found and found[layer].calls == 1:
            given = {str(place): item for place, item in enumerate(args)} | kwargs
            found[layer].arguments[name] = {key: item for key, item in given.items() if isinstance(item, torch.Tensor)}

    return hook


def first_tensor(value: Any) -> torch.Tensor | None:
    """Returns the first floating tensor of what a layer returned."""
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() else None
    for item in value if isinstance(value, (tuple, list)) else ():
        if (found := first_tensor(item)) is not None:
            return found
    return None


def reached(target: torch.Tensor, sources: Sequence[torch.Tensor], seed: int = 0) -> list[bool]:
    """Returns which sources a tensor depends on directly."""
    if not target.requires_grad or not sources:
        return [False] * len(sources)
    draw = torch.Generator().manual_seed(seed)
    weights = torch.randn(target.shape, generator=draw, dtype=target.dtype)
    grads = torch.autograd.grad(target, sources, weights, retain_graph=True, allow_unused=True)
    return [grad is not None and bool((grad != 0).any()) for grad in grads]


def dependence(target: torch.Tensor, sources: Sequence[torch.Tensor], rows: int, shift: int = 0) -> list[torch.Tensor]:
    """Returns for each source a bool matrix (F, F'): whether feature j of the target depends on feature f of it.

    One row of the batch asks for one feature, since rows don't meet: a batch of B answers B features at once.

    Args:
        target: (B, S, F) or (B S, F).
        sources: (B, S, F') or (B S, F') leaves.
        rows: B.
        shift: asks each feature of another row than with another shift.
    """
    features = target.shape[-1]
    found = [torch.zeros(features, source.shape[-1], dtype=torch.bool) for source in sources]
    draw = torch.Generator().manual_seed(1 + shift)
    for start in range(0, features, rows):
        asked = torch.zeros(target.shape, dtype=target.dtype).view(rows, -1, features)
        count = min(rows, features - start)
        for feature in range(count):
            values = torch.randn(asked.shape[1], generator=draw, dtype=target.dtype)
            asked[(feature + shift) % rows, :, start + feature] = values
        grads = torch.autograd.grad(target, sources, asked.view_as(target), retain_graph=True, allow_unused=True)
        for matrix, grad in zip(found, grads):
            if grad is not None:
                hits = (grad.reshape(rows, -1, grad.shape[-1]) != 0).any(1)
                matrix[start : start + count] = hits.roll(-shift, 0)[:count]
    return found


def touched(
    target: torch.Tensor, parameters: Sequence[torch.Tensor], features: Sequence[tuple[int, int]]
) -> list[list[torch.Tensor]]:
    """Returns for each parameter, for each run of the target's features, which elements these depend on."""
    found: list[list[torch.Tensor]] = [[] for _ in parameters]
    features = features if parameters else ()
    draw = torch.Generator().manual_seed(2)
    weights = torch.randn(target.shape, generator=draw, dtype=target.dtype)
    for start, stop in features:
        asked = torch.zeros_like(weights)
        asked[..., start:stop] = weights[..., start:stop]
        grads = torch.autograd.grad(target, parameters, asked, retain_graph=True, allow_unused=True)
        for place, (parameter, grad) in enumerate(zip(parameters, grads)):
            found[place].append(torch.zeros_like(parameter, dtype=torch.bool) if grad is None else grad != 0)
    return found


def mixes_tokens(target: torch.Tensor, sources: Sequence[torch.Tensor], rows: int) -> bool:
    """Whether the last token of the target depends on earlier tokens of a source."""
    if not target.requires_grad:
        return False
    asked = torch.zeros_like(target)
    view = asked.view(rows, -1, target.shape[-1])
    view[:, -1] = torch.randn(view[:, -1].shape, generator=torch.Generator().manual_seed(3), dtype=target.dtype)
    grads = torch.autograd.grad(target, sources, asked, retain_graph=True, allow_unused=True)
    return any(bool((grad.reshape(rows, view.shape[1], -1)[:, :-1] != 0).any()) for grad in grads if grad is not None)
