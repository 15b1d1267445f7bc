"""Runs a small real model with every matrix cut out of autograd's graph, so that their data flow can be read.

Each matrix's output becomes a leaf. The gradient of one matrix's input with respect to the leaves then shows, element
by element, which features reach it without passing through another matrix, whatever the code in between looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.parallel.model_checkpointing import without_checkpoints
from meshwright.torch_compat.tensors import tree_map_only


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
    """The tensors and matrices of one call of a layer."""

    name: str
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Arguments of the call; tensors with a gradient are leaves."""
    inputs: list[torch.Tensor]
    """Those leaves."""
    matrices: dict[str, TracedMatrix] = field(default_factory=dict)
    """Its matrices in order of their calls; of each the output was cut out of autograd's graph."""
    output: torch.Tensor | None = None
    calls: int = 1
    passed_norms: dict[str, torch.Tensor] = field(default_factory=dict)
    """Outputs of norms over all features that were passed through, by name: ``(B, S, D)`` each."""
    arguments: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Tensors that each module inside was called with, by position or name."""

    def standalone_parameters(self) -> dict[str, nn.Parameter]:
        """Returns trained parameters of any shape that belong to no matrix, by name: a norm's scales."""
        owned = {id(parameter) for matrix in self.matrices.values() for parameter in matrix.module.parameters()}
        return {
            name: parameter
            for name, parameter in self.layer.named_parameters()
            if id(parameter) not in owned and parameter.requires_grad
        }


def is_matrix(module: nn.Module) -> bool:
    """Returns whether a module is a product with one weight: a Linear or transformers' transposed Conv1D."""
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def is_experts(module: nn.Module) -> bool:
    """Returns whether a module holds the stacked matrices (X, a, b) of several experts."""
    stacked = [parameter for parameter in module._parameters.values() if parameter is not None and parameter.dim() == 3]
    return len(stacked) >= 2 and len({item.shape[0] for item in stacked}) == 1


def is_norm(module: nn.Module) -> bool:
    """Returns whether a module may scale all features by a common statistic: its parameters are vectors of one size."""
    scales = [parameter for parameter in module._parameters.values() if parameter is not None]
    return (
        bool(scales)
        and not module._modules
        and all(item.dim() == 1 and item.shape == scales[0].shape for item in scales)
    )


def trace(layers: dict[str, nn.Module], run: Callable[[], Any], pass_norms: bool = False) -> dict[str, LayerTrace]:
    """Runs a model once and returns the trace of each layer.

    Args:
        layers: name to layer.
        run: calls the model, with gradients on.
        pass_norms: replaces norms over all features of a token by a pass-through, which keeps features separate.
    """
    traces: dict[str, LayerTrace] = {}
    with _install_hooks(layers, traces, pass_norms), without_checkpoints():
        run()
    return traces


@contextmanager
def _install_hooks(layers: dict[str, nn.Module], traces: dict[str, LayerTrace], pass_norms: bool) -> Iterator[None]:
    """Installs the hooks that fill ``traces``, while it is entered."""
    handles: list[Any] = []
    generator = torch.Generator().manual_seed(13)
    for name, layer in layers.items():
        handles.append(layer.register_forward_pre_hook(_leaf_input_hook(name, traces), with_kwargs=True))
        handles.append(layer.register_forward_hook(_layer_output_hook(name, traces)))
        skipped_prefix = ""
        for path, module in layer.named_modules():
            # the matrices below an expert module are traced as one
            if skipped_prefix and path.startswith(skipped_prefix):
                continue
            if is_experts(module) or is_matrix(module):
                skipped_prefix = f"{path}." if is_experts(module) else ""
                handles.append(module.register_forward_hook(_leaf_output_hook(name, path, traces, generator)))
            elif pass_norms and is_norm(module):
                handles.append(module.register_forward_hook(_pass_norm_hook(name, path, traces), with_kwargs=True))
            elif path and module._modules:
                handles.append(
                    module.register_forward_pre_hook(_record_arguments_hook(name, path, traces), with_kwargs=True)
                )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leaf_input_hook(name: str, traces: dict[str, LayerTrace]) -> Callable[..., Any]:
    """Returns a pre-hook that turns a layer's differentiable arguments into leaves and starts its trace."""

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves: list[torch.Tensor] = []

        def make_leaf(value: torch.Tensor) -> torch.Tensor:
            if not (value.requires_grad and value.is_floating_point()):
                return value
            leaves.append(value.detach().clone().requires_grad_())
            return leaves[-1]

        if name in traces:
            # A shared layer is read off its first call; the whole model's rehearsal sees all of them.
            traces[name].calls += 1
            return None
        args, kwargs = tree_map_only(torch.Tensor, make_leaf, (args, kwargs))
        traces[name] = LayerTrace(name, layer, args, kwargs, leaves)
        # The code may write into its arguments, but autograd forbids writing into a leaf.
        return tree_map_only(torch.Tensor, lambda item: item.clone() if item.requires_grad else item, (args, kwargs))

    return hook


def _layer_output_hook(name: str, traces: dict[str, LayerTrace]) -> Callable[..., Any]:
    """Returns a hook that stores a layer's output."""

    def hook(_layer: nn.Module, _args: Any, out: Any) -> None:
        if traces[name].calls == 1:
            traces[name].output = first_tensor(out)

    return hook


def _leaf_output_hook(
    layer: str, name: str, traces: dict[str, LayerTrace], generator: torch.Generator
) -> Callable[..., Any]:
    """Returns a hook that stores a matrix's input and replaces its output by a random leaf of the same scale."""

    def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        if layer not in traces or traces[layer].calls > 1 or not isinstance(out, torch.Tensor):
            return None
        matrices = traces[layer].matrices
        # Any values of that size do; these leave no feature on the flat side of an activation for all tokens.
        scale = out.detach().std(correction=0) if out.is_floating_point() else 1.0
        leaf = (torch.randn(out.shape, generator=generator, dtype=out.dtype) * scale).requires_grad_()
        if name in matrices:
            matrices[name].calls += 1
        elif args and isinstance(args[0], torch.Tensor):
            matrices[name] = TracedMatrix(name, module, args[0], leaf, experts=is_experts(module))
        return leaf.clone()

    return hook


def _pass_norm_hook(layer: str, name: str, traces: dict[str, LayerTrace]) -> Callable[..., Any]:
    """Returns a hook that replaces a norm's output by a multiple of its input, where it normalises whole tokens."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        if layer not in traces or not isinstance(out, torch.Tensor) or not traces[layer].inputs:
            return None
        # only a layer's first call is traced
        if traces[layer].calls > 1:
            return None
        arguments = [*args, *kwargs.values()]
        same_shape = [tensor for tensor in arguments if isinstance(tensor, torch.Tensor) and tensor.shape == out.shape]
        hidden = traces[layer].inputs[0]
        if not same_shape or out.numel() // out.shape[-1] != hidden.numel() // hidden.shape[-1]:
            # a norm of each head
            return None
        # any linear map would do; factors other than 1 keep it apart from a skip connection
        passed_through = sum(same_shape[1:], same_shape[0] * 1.5)
        if passed_through.requires_grad:
            traces[layer].passed_norms[name] = passed_through
        return passed_through

    return hook


def _record_arguments_hook(layer: str, name: str, traces: dict[str, LayerTrace]) -> Callable[..., Any]:
    """Returns a pre-hook that stores the tensors with which a module is called."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if layer in traces and traces[layer].calls == 1:
            named_arguments = {str(position): item for position, item in enumerate(args)} | kwargs
            traces[layer].arguments[name] = {
                key: tensor for key, tensor in named_arguments.items() if isinstance(tensor, torch.Tensor)
            }

    return hook


def first_tensor(value: Any) -> torch.Tensor | None:
    """Returns the first floating tensor, of any shape, among a layer's nested outputs."""
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() else None
    for item in value if isinstance(value, (tuple, list)) else ():
        if (tensor := first_tensor(item)) is not None:
            return tensor
    return None


def depends_on(target: torch.Tensor, sources: Sequence[torch.Tensor], seed: int = 0) -> list[bool]:
    """Returns which sources a tensor depends on without passing through another leaf.

    Args:
        target: any shape, in the graph.
        sources: leaves of any shape.
        seed: of the random output gradient.
    """
    if not target.requires_grad or not sources:
        return [False] * len(sources)
    generator = torch.Generator().manual_seed(seed)
    # a random output gradient: with ones, opposite terms could cancel
    output_grad = torch.randn(target.shape, generator=generator, dtype=target.dtype)
    grads = torch.autograd.grad(target, sources, output_grad, retain_graph=True, allow_unused=True)
    return [grad is not None and bool((grad != 0).any()) for grad in grads]


def feature_dependence(
    target: torch.Tensor, sources: Sequence[torch.Tensor], rows: int, shift: int = 0
) -> list[torch.Tensor]:
    """Returns a bool matrix (F, F') for each source: whether feature f of the target depends on its feature f'.

    Rows of a batch don't interact, so each row probes one feature: one backward over a batch of B probes B features.

    Args:
        target: (B, S, F) or (B S, F).
        sources: (B, S, F') or (B S, F') leaves.
        rows: B.
        shift: probes each feature in another row than with another shift.
    """
    features = target.shape[-1]
    matrices = [torch.zeros(features, source.shape[-1], dtype=torch.bool) for source in sources]
    generator = torch.Generator().manual_seed(1 + shift)
    for start in range(0, features, rows):
        output_grad = torch.zeros(target.shape, dtype=target.dtype).view(rows, -1, features)
        count = min(rows, features - start)
        for feature in range(count):
            values = torch.randn(output_grad.shape[1], generator=generator, dtype=target.dtype)
            # feature start + feature is probed in its own row, at all tokens of it
            output_grad[(feature + shift) % rows, :, start + feature] = values
        grads = torch.autograd.grad(target, sources, output_grad.view_as(target), retain_graph=True, allow_unused=True)
        for matrix, grad in zip(matrices, grads):
            if grad is not None:
                # nonzero at any token; row r of the result belongs to feature r - shift
                is_nonzero = (grad.reshape(rows, -1, grad.shape[-1]) != 0).any(1)
                matrix[start : start + count] = is_nonzero.roll(-shift, 0)[:count]
    return matrices


def elements_used(
    target: torch.Tensor, parameters: Sequence[torch.Tensor], features: Sequence[tuple[int, int]]
) -> list[list[torch.Tensor]]:
    """Returns for each parameter and each run of the target's features a bool mask of the elements that it depends on.

    Args:
        target: (..., F).
        parameters: of any shape.
        features: runs (start, stop) of the target's features.
    """
    masks: list[list[torch.Tensor]] = [[] for _ in parameters]
    features = features if parameters else ()
    generator = torch.Generator().manual_seed(2)
    random_grad = torch.randn(target.shape, generator=generator, dtype=target.dtype)
    for start, stop in features:
        output_grad = torch.zeros_like(random_grad)
        output_grad[..., start:stop] = random_grad[..., start:stop]
        grads = torch.autograd.grad(target, parameters, output_grad, retain_graph=True, allow_unused=True)
        for parameter_index, (parameter, grad) in enumerate(zip(parameters, grads)):
            masks[parameter_index].append(torch.zeros_like(parameter, dtype=torch.bool) if grad is None else grad != 0)
    return masks


def mixes_tokens(target: torch.Tensor, sources: Sequence[torch.Tensor], rows: int) -> bool:
    """Returns whether the last token of the target depends on earlier tokens of a source.

    Args:
        target: (B, S, F) or (B S, F).
        sources: (B, S, F') or (B S, F') leaves.
        rows: B.
    """
    if not target.requires_grad:
        return False
    # in plain memory, whatever the target's strides
    output_grad = torch.zeros(target.shape, dtype=target.dtype)
    grad_by_row = output_grad.view(rows, -1, target.shape[-1])
    # only the last token has an output gradient; a nonzero gradient before it crossed tokens
    grad_by_row[:, -1] = torch.randn(
        grad_by_row[:, -1].shape, generator=torch.Generator().manual_seed(3), dtype=target.dtype
    )
    grads = torch.autograd.grad(target, sources, output_grad, retain_graph=True, allow_unused=True)
    return any(
        bool((grad.reshape(rows, grad_by_row.shape[1], -1)[:, :-1] != 0).any()) for grad in grads if grad is not None
    )
