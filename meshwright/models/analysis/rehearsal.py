"""Rehearses a split in one process: ranks are threads that exchange tensors at a barrier.

A small real layer or model is split as the runtime would split it and run forward and backward; its outputs and every
gradient must equal the unsplit one's. Only splits that pass enter the sharding table. `PassResult`, `run_passes` and
`relative_error` are the harness of every rehearsal of this room: of layers and models here, of tokens in `context`, of
stages in `stage_rehearsal`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.models.analysis.clone import TOKENS, duplicate_module
from meshwright.models.analysis.evidence import Shape, SplitTrial
from meshwright.models.analysis.thread_group import (
    LONG_PATIENCE_S,
    PATIENCE_S,
    ThreadGroup,
    describe_error,
    raising_module,
    run_in_threads,
)
from meshwright.models.analysis.trace import LayerTrace, first_tensor
from meshwright.parallel import tensor
from meshwright.parallel.float64_ops import Float64Ops
from meshwright.parallel.model_checkpointing import restoring_first_run
from meshwright.parallel.parameter_slices import read_number
from meshwright.spec.placement import Box, LocalShard
from meshwright.spec.sharding_table import LayerSharding, ShardingTable, vocabulary_span
from meshwright.torch_compat.tensors import tree_map_only

TOLERANCE = 1e-9
"""Largest error, relative to the largest entry; computed in float64 alone (`parallel.float64_ops`) it is 1e-13."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """One forward and backward pass."""

    output: torch.Tensor
    """Detached; of any shape."""
    input_grads: list[torch.Tensor]
    """Of the inputs' shapes."""
    grads: dict[str, torch.Tensor]
    """Gradient of each trained parameter by name, of its shape; zeros where the output is independent of it."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """One rank's pass of a split layer or model."""

    passes: PassResult
    shards: Mapping[str, LocalShard] = field(default_factory=dict)
    """Which part of the full weight a parameter stands for, by name."""
    partial_grads: Sequence[tensor.PartialGrad] = ()
    """Gradients that are partial over the axis."""
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    """Shapes of its parameters by name."""
    attributes: Mapping[str, int] = field(default_factory=dict)
    """Values of its adapted shape attributes, by ``module.attribute``."""


class PassComparison:
    """Compares tensors with expected ones until one differs, and remembers the largest relative error.

    Args:
        tolerance: largest relative error of equal tensors.
    """

    def __init__(self, tolerance: float = TOLERANCE) -> None:
        self.tolerance = tolerance
        self.error = 0.0

    def differs(self, actual: torch.Tensor, expected: torch.Tensor, scale: float = 0.0) -> bool:
        """Returns whether two tensors of any shape differ; the error then stays in `error`.

        Args:
            actual: of the split computation.
            expected: of the unsplit one.
            scale: largest entry of a family of tensors, so that one of rounding noise doesn't fail.
        """
        error = relative_error(actual, expected, scale)
        # a NaN is no error within the tolerance
        is_different = not error <= self.tolerance
        self.error = error if is_different else max(self.error, error)
        return is_different


def relative_error(actual: torch.Tensor, expected: torch.Tensor, scale: float = 0.0) -> float:
    """Returns the largest difference relative to the largest expected entry; infinite for other shapes."""
    if actual.shape != expected.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    return float((actual - expected).abs().max()) / max(float(expected.abs().max()), 1e-3 * scale, 1e-12)


def run_passes(
    call: Callable[[], torch.Tensor],
    module: nn.Module,
    output_grad_of: Callable[[torch.Tensor], torch.Tensor],
    inputs: Sequence[torch.Tensor] = (),
) -> PassResult:
    """Runs forward and backward once.

    Args:
        call: runs forward and returns its output, of any shape.
        module: its trained parameters get gradients.
        output_grad_of: returns the output's gradient, of its shape.
        inputs: leaves that get gradients too.
    """
    output = call()
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    sources = [*inputs, *trained.values()]
    # a model that is frozen as a whole, as the reference of a preference loss, has a forward alone to compare
    grads: Sequence[torch.Tensor | None] = [None] * len(sources)
    if sources and output.requires_grad:
        grads = torch.autograd.grad(output, sources, output_grad_of(output), allow_unused=True)
    # autograd returns None where the output doesn't depend on a tensor: a zero gradient
    grads_or_zero = [torch.zeros_like(source) if grad is None else grad for source, grad in zip(sources, grads)]
    parameter_grads = dict(zip(trained, grads_or_zero[len(inputs) :]))
    return PassResult(output.detach(), grads_or_zero[: len(inputs)], parameter_grads)


def random_output_grad(output: torch.Tensor) -> torch.Tensor:
    """Returns fixed random numbers of an output's shape, as its gradient: errors of two elements can't cancel."""
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=output.dtype)


def rehearse_layer(trace: LayerTrace, rows: LayerSharding, degree: int, sequence: bool = False) -> SplitTrial:
    """Compares a split layer with the unsplit layer.

    Args:
        trace: a call of the layer, with the layer itself.
        rows: the layer's entry of the sharding table.
        degree: of the axis.
        sequence: whether tokens are split between the groups.

    Raises:
        PlanError: the unsplit layer can't be called again.
    """
    inputs = {id(item): item.detach().clone().requires_grad_() for item in trace.inputs}
    try:
        expected = run_passes(
            lambda: _run_traced_call(trace.layer, trace, inputs), trace.layer, random_output_grad, [*inputs.values()]
        )
    except Exception as error:  # code of any model
        raise PlanError(
            f"a {type(trace.layer).__name__} fails when it is called again on the inputs of its first call "
            f"({describe_error(error)}), as where that call filled a cache which its caller holds; so no split of it "
            "can be tried; nearest that works: replicate, shard or pp in place of tp, cp and ep"
        ) from error

    def compare(rank_results: list[RankResult], comparison: PassComparison) -> str:
        # before any comparison: a partial gradient alone never equals the full one
        _sum_partial_grads(rank_results, degree)
        for index, rank in enumerate(rank_results):
            full_output = _token_shard(expected.output, degree, index, sequence)
            if comparison.differs(rank.passes.output, full_output):
                return f"its output is off by {comparison.error:.1e}"
            for input_index, grads in enumerate(zip(rank.passes.input_grads, expected.input_grads)):
                if comparison.differs(grads[0], _token_shard(grads[1], degree, index, sequence)):
                    return f"the gradient of its input {input_index} is off by {comparison.error:.1e}"
        return _compare_gradients(expected.grads, rank_results, degree, comparison)

    trial = _rehearse(
        lambda axis_group: _run_split_layer(trace, rows, axis_group, sequence), degree, PATIENCE_S, compare, sequence
    )
    full_values = {
        f"{number.module}.{number.attribute}".lstrip("."): read_number(
            trace.layer.get_submodule(number.module), number.attribute
        )
        for group in rows.groups
        for number in group.shape_attributes
    }
    attributes = {name: (full_values[name], value) for name, (_, value) in trial.attributes.items()}
    shapes = {name: tuple(parameter.shape) for name, parameter in trace.layer.named_parameters()}
    parameters = {name: (shapes[name], local) for name, (_, local) in trial.parameters.items() if local != shapes[name]}
    return dataclasses.replace(
        trial,
        attributes=attributes,
        parameters=parameters,
        numbers=tuple(number for group in rows.groups for number in group.shape_attributes),
        cuttings=tuple(cutting for group in rows.groups for cutting in group.cuttings),
    )


def _rehearse(
    run_rank: Callable[[ThreadGroup], RankResult],
    degree: int,
    patience_s: float,
    compare: Callable[[list[RankResult], PassComparison], str],
    sequence: bool = False,
) -> SplitTrial:
    """Runs the ranks of a split in threads and compares their results; what their code raises is the failure.

    Args:
        run_rank: returns one rank's result.
        degree: number of ranks.
        patience_s: how long a thread waits for the others.
        compare: names the first difference; "" for none.
        sequence: whether a rank has a part of the tokens between the groups of a layer.
    """
    comparison = PassComparison()
    try:
        rank_results = run_in_threads(degree, run_rank, patience_s)
        failure = compare(rank_results, comparison)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        module = raising_module(error) if sequence else ""
        code = f"the code of {module} doesn't run on a part of the tokens" if module else ""
        return SplitTrial(degree=degree, failure=f"{code} ({describe_error(error)})" if code else describe_error(error))
    first_rank = rank_results[0]
    return SplitTrial(
        degree=degree,
        failure=failure,
        error=comparison.error,
        parameters={name: (shape, shape) for name, shape in first_rank.shapes.items()},
        attributes={name: (value, value) for name, value in first_rank.attributes.items()},
    )


def _run_traced_call(layer: nn.Module, trace: LayerTrace, inputs: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Calls a layer as traced, with ``inputs`` (by the traced leaf's id) as its leaves; returns (B, S, D) float64."""

    def substitute_input(item: torch.Tensor) -> torch.Tensor:
        # The code may write into its arguments.
        return inputs[id(item)].clone() if id(item) in inputs else item

    args, kwargs = tree_map_only(torch.Tensor, substitute_input, (trace.args, trace.kwargs))
    with Float64Ops(), restoring_first_run():
        out = first_tensor(layer(*args, **kwargs))
    if out is None:
        raise RuntimeError("the layer returns no tensor")
    return out


def _run_split_layer(trace: LayerTrace, rows: LayerSharding, axis_group: Any, sequence: bool) -> RankResult:
    """Runs one rank's shard of the layer; its output and its inputs' gradients are of its tokens under ``sequence``."""
    layer = duplicate_module(trace.layer)
    sharded = tensor.wrap_layer(layer, "layer", rows, axis_group, axis_group.size, sequence)
    inputs = {}
    for item in trace.inputs:
        local_input = item.detach()
        if sequence and local_input.dim() == 3:
            local_input = local_input.chunk(axis_group.size, dim=1)[axis_group.index]
        inputs[id(item)] = local_input.clone().requires_grad_()

    def output_grad_of(output: torch.Tensor) -> torch.Tensor:
        # the same output gradient as the full layer's, cut to this rank's tokens
        output_grad = random_output_grad(trace.output if trace.output is not None else output).to(output.dtype)
        return output_grad.chunk(axis_group.size, dim=1)[axis_group.index] if sequence else output_grad

    passes = run_passes(lambda: _run_traced_call(layer, trace, inputs), layer, output_grad_of, [*inputs.values()])
    return RankResult(
        passes=passes,
        shards={name.removeprefix("layer."): shard for name, shard in sharded.local_shards.items()},
        partial_grads=[
            dataclasses.replace(item, name=item.name.removeprefix("layer.")) for item in sharded.partial_grads
        ],
        shapes={name: tuple(parameter.shape) for name, parameter in layer.named_parameters()},
        attributes=dict(_local_attributes(layer, rows)),
    )


def _local_attributes(layer: nn.Module, rows: LayerSharding) -> Iterator[tuple[str, int]]:
    """Yields the adapted shape attributes of a split layer with this rank's values."""
    for group in rows.groups:
        for number in group.shape_attributes:
            name = f"{number.module}.{number.attribute}".lstrip(".")
            yield name, read_number(layer.get_submodule(number.module), number.attribute)


def _compare_gradients(
    expected: Mapping[str, torch.Tensor], rank_results: Sequence[RankResult], degree: int, comparison: PassComparison
) -> str:
    """Names the first parameter whose gradient, summed already, differs on some rank; "" for none."""
    # errors are relative to the largest gradient: a gradient of rounding noise must not fail
    scale = max((float(item.abs().max()) for item in expected.values()), default=0.0)
    for rank in rank_results:
        for name, grad in rank.passes.grads.items():
            full_grad = expected[name]
            expected_shard = grad.new_empty(grad.shape)
            shard = rank.shards.get(name) or LocalShard.unsharded(name, tuple(full_grad.shape), degree)
            for box in shard.boxes():
                expected_shard[_box_slices(box.local_box)] = full_grad[_box_slices(box.global_box)]
            if comparison.differs(grad, expected_shard, scale):
                return f"the gradient of {name} is off by {comparison.error:.1e}"
    return ""


def _sum_partial_grads(rank_results: Sequence[RankResult], degree: int) -> None:
    """Sums the partial gradients over ranks in place, as `tp.PartialGradReducer` does over processes."""
    # the list of partial gradients is the same on every rank
    for partial_grad in rank_results[0].partial_grads:
        ranks = partial_grad.ranks or degree
        for start in range(0, degree, ranks):
            grads = [rank_results[index].passes.grads[partial_grad.name] for index in range(start, start + ranks)]
            # runs: stretches of one dim that are partial; without any, the full gradient is
            for summed_run in partial_grad.runs or ((0, grads[0].shape[partial_grad.dim] if grads[0].dim() else 0),):
                views = [
                    grad.narrow(partial_grad.dim, summed_run[0], summed_run[1] - summed_run[0]) if grad.dim() else grad
                    for grad in grads
                ]
                total = torch.stack(views).sum(0)
                for view in views:
                    view.copy_(total)


def _box_slices(box: Box) -> tuple[slice, ...]:
    """Turns a box, (start, stop) in each dim, into slices."""
    return tuple(slice(start, stop) for start, stop in box)


def _token_shard(full: torch.Tensor, degree: int, index: int, sequence: bool) -> torch.Tensor:
    """Returns a rank's tokens of (B, S, D) where the sequence is split, else the full tensor."""
    return full.chunk(degree, dim=1)[index] if sequence and full.dim() == 3 else full


class _Model(Protocol):
    @property
    def module(self) -> nn.Module: ...

    def run(self, rows: int = 4, module: nn.Module | None = None, *, tokens: int = TOKENS) -> torch.Tensor: ...


def rehearse_model(
    clone: _Model, table: ShardingTable, degree: int, rows: int = 4, tokens: int = TOKENS, sequence: bool = False
) -> SplitTrial:
    """Compares a split model with the unsplit model.

    Args:
        clone: a small real model.
        table: for it.
        degree: of the axis.
        rows: B.
        tokens: S.
        sequence: whether tokens are split between the groups.
    """
    expected = run_passes(lambda: clone.run(rows, tokens=tokens), clone.module, random_output_grad)
    full_logits, output_grad = expected.output, random_output_grad(expected.output)
    # the loss of a model without logits is a scalar, which has no vocabulary dim
    splits_vocabulary = bool(table.vocabulary) and full_logits.dim() == 3

    def run_rank(axis_group: Any) -> RankResult:
        module = duplicate_module(clone.module)
        sharded = tensor.wrap_model(module, table, axis_group, axis_group.size, sequence)

        def output_grad_of(output: torch.Tensor) -> torch.Tensor:
            # this rank's head computes a span of the vocabulary
            if splits_vocabulary and output.shape[-1] != full_logits.shape[-1]:
                start, stop = vocabulary_span(full_logits.shape[-1], axis_group.size, axis_group.index)
                return output_grad[..., start:stop]
            return output_grad

        passes = run_passes(lambda: clone.run(rows, module, tokens=tokens), module, output_grad_of)
        # A weight of several layers is summed once, under its first name (`parallel.partial_grads`).
        names = {name for name, _ in module.named_parameters()}
        partial_grads = [partial for partial in sharded.partial_grads if partial.name in names]
        return RankResult(passes, sharded.local_shards, partial_grads)

    def compare(rank_results: list[RankResult], comparison: PassComparison) -> str:
        for index, rank in enumerate(rank_results):
            expected_logits = full_logits
            if rank.passes.output.shape != full_logits.shape:
                start, stop = (
                    vocabulary_span(full_logits.shape[-1], degree, index) if full_logits.dim() == 3 else (0, 0)
                )
                expected_logits = full_logits[..., start:stop]
            if comparison.differs(rank.passes.output, expected_logits):
                return f"its logits are off by {comparison.error:.1e} where {degree} ranks split layers and vocabulary"
        _sum_partial_grads(rank_results, degree)
        return _compare_gradients(expected.grads, rank_results, degree, comparison)

    return _rehearse(run_rank, degree, PATIENCE_S if tokens == TOKENS else LONG_PATIENCE_S, compare)
