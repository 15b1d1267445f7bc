"""Rehearses a pipeline on a small model, in one process: stage after stage and back must give what the whole gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from meshwright.errors import PlanError
from meshwright.models.forward import model_output
from meshwright.models.objective import Objective, nothing_dropped, trial_output
from meshwright.models.structure import ModelStructure
from meshwright.parallel.float64_ops import Float64Ops
from meshwright.parallel.stage import Stage, copied
from meshwright.spec.layer_graph import LayerGraph, held_names

_STAGES = 16
"""Most stages of a rehearsal."""
_BOUND = 1e-6
"""Largest relative difference between stages and whole: the same operations on the same numbers, in float64."""
Tokens = tuple[torch.Tensor, torch.Tensor]
"""(B, S) tokens and their targets."""


def output_of(
    module: nn.Module, structure: ModelStructure, arguments: Tokens, objective: Objective | None = None
) -> torch.Tensor:
    """Returns the logits of a model, with the terms of its own loss in them, or the loss of one that has no logits."""
    if objective is not None and not objective.plain:
        with Float64Ops(), nothing_dropped():
            return trial_output(module, structure, objective, *arguments)
    found = model_output(module, structure, *arguments)
    output = found.logits if found.logits is not None else found.loss
    assert output is not None
    return output


def rehearse(
    module: nn.Module,
    structure: ModelStructure,
    layer_graph: LayerGraph,
    arguments: Tokens,
    objective: Objective | None = None,
) -> str:
    """Cuts a model into stages and compares output and gradients with the whole.

    Args:
        module: real, small, in float64; it is left as it was.
        structure: its parts.
        layer_graph: what is proven.
        arguments: tokens and targets.
        objective: the model's own loss.

    Returns:
        Why its backward can't come in two halves, as some schedules ask; "" when it can.

    Raises:
        PlanError: it can't be cut anywhere, or stages compute something else than the whole.
    """
    whole = output_of(copied(module, share=True), structure, arguments, objective)
    draw = torch.Generator().manual_seed(2)
    slope = torch.randn(whole.shape, generator=draw, dtype=whole.dtype)
    (whole * slope).sum().backward()
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    wanted = {name: item.grad for name, item in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    count = len(layer_graph.layers)
    cuts = [place for place in range(1, count) if place not in layer_graph.blocked]
    if not cuts:
        place, why = next(iter(layer_graph.blocked.items()))
        raise PlanError(f"in front of layer {place}, {why}")
    inner = [cuts[index * len(cuts) // (_STAGES - 1)] for index in range(_STAGES - 1)] if len(cuts) >= _STAGES else cuts
    bounds = (0, *inner, count)
    held = held_names(layer_graph, names, bounds, structure.ties)
    call = functools.partial(_as_payload, structure=structure, arguments=arguments, objective=objective)
    output = _through_stages(module, layer_graph, call, held, bounds, slope)
    _compare("its output", output, whole)
    _compare_gradients(module, wanted)
    try:
        _through_stages(module, layer_graph, call, held, bounds, slope, halves=True)
        _compare_gradients(module, wanted)
    except (PlanError, RuntimeError, AssertionError) as error:
        cause = error.__cause__ or error  # torch lists all tensors in front of what went wrong
        return " ".join(str(cause).split())[:200] or type(cause).__name__
    finally:
        module.zero_grad(set_to_none=True)
    return ""


def _compare_gradients(module: nn.Module, wanted: Mapping[str, torch.Tensor | None]) -> None:
    """Compares a module's gradients with the whole model's, and clears them."""
    size = max((float(item.abs().max()) for item in wanted.values() if item is not None), default=1.0)
    for name, item in module.named_parameters():
        whole = wanted[name]
        wish = whole if whole is not None else torch.zeros_like(item)
        found = item.grad if item.grad is not None else torch.zeros_like(item)
        _compare(f"the gradient of '{name}'", found, wish, size)
    module.zero_grad(set_to_none=True)


def _through_stages(
    module: nn.Module,
    layer_graph: LayerGraph,
    call: Callable[[nn.Module], tuple[torch.Tensor, ...]],
    held: list[frozenset[str]],
    bounds: tuple[int, ...],
    slope: torch.Tensor,
    halves: bool = False,
) -> torch.Tensor:
    """Runs stage after stage and back; gradients add up in the clone's own weights, which the stages share.

    With ``halves`` each stage after the first computes the gradients of its inputs first, then those of its weights.
    """
    received: tuple[torch.Tensor, ...] = ()
    trail: list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], nn.Module]] = []
    for kept, first, stop in zip(held, bounds, bounds[1:]):
        stage = Stage(copied(module, share=True), layer_graph, first, stop, kept)
        stage.arm(torch.float64, torch.device("cpu"))
        given = stage.run(functools.partial(call, stage.module), received)
        trail.append((received, given, stage.module))
        received = tuple(item.detach().requires_grad_(item.requires_grad) for item in given)
    gradients: tuple[torch.Tensor | None, ...] = (slope,)
    output = trail[-1][1][0].detach()
    for taken, given, part in reversed(trail):
        pairs = [(item, grad) for item, grad in zip(given, gradients) if item.requires_grad and grad is not None]
        outputs, slopes = [item for item, _ in pairs], [grad for _, grad in pairs]
        if halves and taken:
            gradients, groups = stage_backward_input(outputs, slopes, list(taken), part.parameters())
            stage_backward_weight(part.parameters(), groups)
        else:
            torch.autograd.backward(outputs, slopes)
            gradients = tuple(item.grad for item in taken)
    return output


def _as_payload(
    module: nn.Module, structure: ModelStructure, arguments: Tokens, objective: Objective | None
) -> tuple[torch.Tensor, ...]:
    # Not a view, which a backward in halves can't detach in place: the last stage of a run ends in a loss, no view.
    return (output_of(module, structure, arguments, objective).clone(),)


def _compare(what: str, found: torch.Tensor, wanted: torch.Tensor, size: float = 0.0) -> None:
    difference = float((found.detach() - wanted.detach()).abs().max())
    bound = _BOUND * max(float(wanted.detach().abs().max()), 1e-3 * size)
    if not difference <= bound:
        raise PlanError(f"cut into stages, {what} moves by {difference:.1e}: some value reaches a layer on another way")
