"""Rehearses a pipeline on a small model in one process: stages must return the full model's output and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.models.analysis.clone import Clone
from meshwright.models.analysis.evidence import StageTrial
from meshwright.models.analysis.rehearsal import PassComparison, run_passes
from meshwright.parallel.stage import Stage, copy_module
from meshwright.spec.layer_graph import LayerGraph, weights_by_stage
from meshwright.torch_compat.pipelining import stage_backward_input, stage_backward_weight

_STAGES = 16
"""Largest number of stages of a rehearsal."""
_BOUND = 1e-6
"""Largest relative difference between stages and full model: the same operations on the same numbers, in float64."""
Tokens = tuple[torch.Tensor, torch.Tensor]
"""(B, S) tokens and their targets."""


def rehearse_stages(clone: Clone, layer_graph: LayerGraph, arguments: Tokens) -> StageTrial:
    """Cuts a model into stages and compares output and gradients with the full model.

    Args:
        clone: tied weights apart; it stays unchanged.
        layer_graph: to be proven.
        arguments: tokens and targets.

    Returns:
        The trial, with the reasons for which backward can't come in halves, or an end be a stage without layers.

    Raises:
        PlanError: it can't be cut anywhere, or stages compute something else than the full model.
    """
    module = clone.module
    # a random gradient of the output, so that errors of different elements can't cancel
    generator = torch.Generator().manual_seed(2)
    output_grad: list[torch.Tensor] = []

    def draw_output_grad(output: torch.Tensor) -> torch.Tensor:
        output_grad.append(torch.randn(output.shape, generator=generator, dtype=output.dtype))
        return output_grad[0]

    # a copy of the modules that shares the weights: forward may store tensors of its graph in a module
    shared_copy = copy_module(module, share=True)
    expected = run_passes(lambda: clone.output_of(shared_copy, *arguments), module, draw_output_grad)
    names, layers = [name for name, _ in module.named_parameters(remove_duplicate=False)], len(layer_graph.layers)
    bounds = _spread_bounds(layer_graph)
    run_model = functools.partial(_boundary_output, clone=clone, arguments=arguments)
    comparison = PassComparison(_BOUND)

    def compare_stages(bounds: tuple[int, ...], halves: bool) -> None:
        weights = weights_by_stage(layer_graph, names, bounds, clone.structure.ties)
        try:
            output = _run_stages(module, layer_graph, run_model, weights, bounds, output_grad[0], halves=halves)
            _compare(comparison, "its output", output, expected.output)
            _compare_gradients(comparison, module, expected.grads)
        finally:
            module.zero_grad(set_to_none=True)

    def failure_of(bounds: tuple[int, ...], halves: bool) -> str:
        try:
            compare_stages(bounds, halves)
        except (PlanError, RuntimeError, AssertionError, LookupError, TypeError, ValueError, AttributeError) as error:
            # torch's message lists all tensors before the error itself
            cause = error.__cause__ or error
            return " ".join(str(cause).split())[:200] or type(cause).__name__
        return ""

    compare_stages(bounds, False)
    largest_error = comparison.error
    # a refusal of zero-bubble schedules alone, not of the pipeline
    whole_backward = failure_of(bounds, halves=True)
    refused_ends = {
        boundary: reason
        for boundary in {0, layers} - set(layer_graph.blocked)
        if (reason := failure_of((0, boundary, layers), halves=not whole_backward))
    }
    return StageTrial(bounds=bounds, error=largest_error, whole_backward=whole_backward, refused_ends=refused_ends)


def _spread_bounds(layer_graph: LayerGraph) -> tuple[int, ...]:
    """Returns the first layer of each stage of a rehearsal, and the number of layers: as many cuts as it may have.

    Raises:
        PlanError: no cut is possible.
    """
    layer_count = len(layer_graph.layers)
    open_boundaries = [boundary for boundary in range(1, layer_count) if boundary not in layer_graph.blocked]
    if not open_boundaries:
        boundary, reason = next((bound, why) for bound, why in layer_graph.blocked.items() if 0 < bound < layer_count)
        raise PlanError(f"in front of layer {boundary}, {reason}")
    if len(open_boundaries) >= _STAGES:
        # spread evenly
        open_boundaries = [
            open_boundaries[index * len(open_boundaries) // (_STAGES - 1)] for index in range(_STAGES - 1)
        ]
    return (0, *open_boundaries, layer_count)


def _compare_gradients(
    comparison: PassComparison, module: nn.Module, expected_grads: Mapping[str, torch.Tensor]
) -> None:
    """Compares a module's gradients with the full model's, by name and of the parameter's shape; clears them."""
    largest = max((float(grad.abs().max()) for grad in expected_grads.values()), default=1.0)
    for name, item in module.named_parameters():
        if item.requires_grad:
            actual = item.grad if item.grad is not None else torch.zeros_like(item)
            _compare(comparison, f"the gradient of '{name}'", actual, expected_grads[name], largest)
    module.zero_grad(set_to_none=True)


def _run_stages(
    module: nn.Module,
    layer_graph: LayerGraph,
    run_model: Callable[[nn.Module], tuple[torch.Tensor, ...]],
    stage_weights: list[frozenset[str]],
    bounds: tuple[int, ...],
    output_grad: torch.Tensor,
    halves: bool = False,
) -> torch.Tensor:
    """Runs stage after stage, forward and backward; gradients add up in the weights, which the stages share.

    With ``halves`` each stage after the first computes the gradients of its inputs first, then those of its weights.

    Args:
        module: the full model.
        layer_graph: of the model.
        run_model: runs a stage's module.
        stage_weights: names of the weights of each stage.
        bounds: first layer of each stage, and the number of layers.
        output_grad: gradient of the last stage's output, of the same shape.
        halves: splits each backward into input gradients and weight gradients.

    Returns:
        The last stage's output, detached.
    """
    received: tuple[torch.Tensor, ...] = ()
    stage_calls: list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], nn.Module]] = []
    for number, weight_names in enumerate(stage_weights):
        stage = Stage(copy_module(module, share=True), layer_graph, bounds, number, weight_names)
        stage.arm(torch.float64, torch.device("cpu"))
        sent = stage.run(functools.partial(run_model, stage.module), received)
        stage_calls.append((received, sent, stage.module))
        # as after a receive from another process: same values, a new leaf
        received = tuple(item.detach().requires_grad_(item.requires_grad) for item in sent)
    gradients: tuple[torch.Tensor | None, ...] = (output_grad,)
    output = stage_calls[-1][1][0].detach()
    for received_inputs, sent, stage_module in reversed(stage_calls):
        sent_with_grad = [
            (item, grad) for item, grad in zip(sent, gradients) if item.requires_grad and grad is not None
        ]
        outputs, output_grads = [grad for grad, _ in sent_with_grad], [grad for _, grad in sent_with_grad]
        # the first stage has no input gradients to compute first
        if halves and received_inputs:
            gradients, groups = stage_backward_input(
                outputs, output_grads, list(received_inputs), stage_module.parameters()
            )
            stage_backward_weight(stage_module.parameters(), groups)
        else:
            torch.autograd.backward(outputs, output_grads)
            gradients = tuple(item.grad for item in received_inputs)
    return output


def _boundary_output(module: nn.Module, clone: Clone, arguments: Tokens) -> tuple[torch.Tensor, ...]:
    """Runs the last stage's model; returns its output in a tuple."""
    # Not a view, which a backward in halves can't detach in place: the last stage of a run ends in a loss, no view.
    return (clone.output_of(module, *arguments).clone(),)


def _compare(
    comparison: PassComparison, subject: str, actual: torch.Tensor, expected: torch.Tensor, scale: float = 0.0
) -> None:
    """Refuses a tensor that differs from the full model's by more than rounding; both have one shape."""
    if comparison.differs(actual.detach(), expected.detach(), scale):
        difference = float((actual.detach() - expected.detach()).abs().max())
        raise PlanError(
            f"cut into stages, {subject} moves by {difference:.1e}: some value reaches a layer on another way"
        )
