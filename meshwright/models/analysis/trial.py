"""Rehearses a split in one process: ranks are threads that exchange tensors at a barrier.

A small real layer is split as the runtime would split it and run forward and backward; its outputs and every gradient
must equal the whole layer's. Only splits that pass enter the sharding table.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import nn

from meshwright.models.analysis.trace import LayerTrace, first_tensor
from meshwright.parallel import tensor
from meshwright.parallel.axis_group import DifferentiableCollectives
from meshwright.parallel.float64_ops import Float64Ops
from meshwright.parallel.model_checkpointing import restoring_first_run
from meshwright.spec.placement import Box, LocalShard
from meshwright.spec.sharding_table import LayerRows, ShardingTable, vocabulary_span
from meshwright.torch_compat.tensors import tree_map_only

TOLERANCE = 1e-9
"""Largest error, relative to the largest entry; computed in float64 alone (`parallel.float64_ops`) it is 1e-13."""
TOKENS = 8
"""Tokens of a short row."""
PATIENCE_S = 20.0
"""Time for which a thread waits for the others."""
LONG_PATIENCE_S = 60.0
"""The same with long rows."""
_FullResult: TypeAlias = tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]
"""Output, gradients of the inputs, and gradient of each trained parameter by name."""
_RankResult: TypeAlias = tuple[
    torch.Tensor, list[torch.Tensor], dict[str, tuple[LocalShard | None, torch.Tensor]], list[tensor.PartialGrad]
]
"""The same of one rank, each parameter with its local shard; and the gradients that are partial over the axis."""
_Result = TypeVar("_Result")


class _FinishedThread:
    """Marks the slot of a thread that has finished and won't exchange any more."""


class _FinishedExchange:
    """A work handle of a collective that has already completed."""

    def wait(self, timeout: Any = None) -> bool:
        """Returns at once."""
        return True


class ThreadGroup(DifferentiableCollectives):
    """One thread's end of a group of threads, with the collectives of `parallel.axis_group.AxisGroup`."""

    def __init__(self, size: int, index: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        super().__init__()
        self.size, self.index = size, index
        self._barrier, self._slots = barrier, slots

    @classmethod
    def group(cls, size: int, patience_s: float = PATIENCE_S) -> list[ThreadGroup]:
        """Returns the ends of a new group, whose threads wait so many seconds for each other."""
        barrier, slots = threading.Barrier(size, timeout=patience_s), [None] * size
        return [cls(size, index, barrier, slots) for index in range(size)]

    def abort(self) -> None:
        """Frees all waiting threads with an error."""
        self._barrier.abort()

    def leave(self) -> None:
        """Declares that this thread won't exchange any more, and aborts a group that waits for it."""
        self._slots[self.index] = _FinishedThread()
        if self._barrier.n_waiting:
            self._barrier.abort()

    def exchange(self, value: Any) -> list[Any]:
        """Returns every thread's value, in order of index."""
        # a thread that has finished would never come to the barrier: fail now instead of after the timeout
        if any(isinstance(item, _FinishedThread) for item in self._slots):
            self._barrier.abort()
        self._slots[self.index] = value
        self._barrier.wait()
        # Second barrier: nobody may overwrite a slot for the next exchange before all have read this one.
        gathered = list(self._slots)
        self._barrier.wait()
        return gathered

    def all_reduce(self, tensor: torch.Tensor) -> _FinishedExchange:
        """Sums a tensor of any shape over the threads, in place."""
        contributions = self.exchange(tensor.detach().clone())
        with torch.no_grad():
            tensor.copy_(torch.stack(contributions).sum(0))
        return _FinishedExchange()

    def all_reduce_max(self, tensor: torch.Tensor) -> _FinishedExchange:
        """Replaces a tensor of any shape by the elementwise maximum over the threads."""
        tensor.copy_(torch.stack(self.exchange(tensor.clone())).amax(0))
        return _FinishedExchange()

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> _FinishedExchange:
        """Concatenates every thread's flattened ``part``, (n,), into ``output``, (n · size,), in order of index."""
        output.copy_(torch.cat([item.reshape(-1) for item in self.exchange(part.detach().clone())]))
        return _FinishedExchange()

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> _FinishedExchange:
        """Sums ``tensor``, (n · size,), over the threads and writes this thread's n elements into ``output``."""
        contributions = self.exchange(tensor.detach().clone())
        output.copy_(torch.stack(contributions).sum(0).view(self.size, -1)[self.index].view_as(output))
        return _FinishedExchange()

    def all_to_all(self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> _FinishedExchange:
        """Writes into ``outputs[i]`` the tensor that thread i has for this one; ``parts[j]`` goes to thread j."""
        for output, sent in zip(outputs, self.exchange([part.detach().clone() for part in parts])):
            output.copy_(sent[self.index])
        return _FinishedExchange()


def in_threads(size: int, work: Callable[[ThreadGroup], _Result], patience_s: float = PATIENCE_S) -> list[_Result]:
    """Runs ``work`` on each thread of a group and returns the results in order of index.

    Args:
        size: number of threads.
        work: function of a thread's end of the group.
        patience_s: how long a thread waits for the others.

    Raises:
        RuntimeError: with the first error of a thread, or when threads wait for each other for ever.
    """
    # A forked process makes torch's thread pool anew, and threads that meet there before it stands fail: "Invalid
    # thread pool!". Source: caffe2/utils/threadpool/pthreadpool-cpp.cc.
    torch.set_num_threads(torch.get_num_threads())
    axis_groups = ThreadGroup.group(size, patience_s)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(axis_group: ThreadGroup) -> None:
        try:
            results[axis_group.index] = work(axis_group)
            axis_group.leave()
        # another thread failed first; its error is the one to report
        except threading.BrokenBarrierError:
            pass
        except Exception as error:
            errors.append(error)
            axis_group.abort()

    threads = [threading.Thread(target=run, args=(axis_group,), daemon=True) for axis_group in axis_groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience_s * 2)
    # a broken barrier without an error: a thread left while another waited
    if not errors and any(item is None for item in results):
        raise RuntimeError("the ranks waited for each other")
    if errors:
        raise RuntimeError(reason_of(errors[0])[:180]) from errors[0]
    if any(thread.is_alive() for thread in threads):
        raise RuntimeError("the ranks waited for each other")
    return results


def reason_of(error: BaseException) -> str:
    """Returns an error's message in one line that is never empty."""
    text = " ".join(str(error).split())
    if isinstance(error, RuntimeError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else f"its code raised {type(error).__name__}"


def duplicate(module: nn.Module) -> nn.Module:
    """Copies a module; tensors that its forward stored for a later call are detached, since a graph can't be copied."""
    for child in module.modules():
        for key, value in vars(child).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                setattr(child, key, value.detach())
    return copy.deepcopy(module)


def rehearse_layer(trace: LayerTrace, rows: LayerRows, degree: int, sequence: bool = False) -> str:
    """Compares a split layer with the whole layer; returns the difference in words, "" when they agree.

    Args:
        trace: a call of the layer, with the layer itself.
        rows: the layer's entry of the sharding table.
        degree: of the axis.
        sequence: whether tokens are split between the groups.
    """
    expected = _run_full_layer(trace)
    try:
        rank_results = in_threads(degree, lambda axis_group: _run_split_layer(trace, rows, axis_group, sequence))
        return _compare_layer(trace, expected, rank_results, degree, sequence)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        return reason_of(error)


def _run_traced_call(layer: nn.Module, trace: LayerTrace, inputs: dict[int, torch.Tensor]) -> torch.Tensor:
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


def _output_grad(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Returns fixed random numbers of an output's shape, as its gradient."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=dtype)


def _run_full_layer(trace: LayerTrace) -> _FullResult:
    """Runs the whole layer: its output, its inputs' gradients, and each trained parameter's gradient by name."""
    inputs = {id(item): item.detach().clone().requires_grad_() for item in trace.inputs}
    trained = {name: parameter for name, parameter in trace.layer.named_parameters() if parameter.requires_grad}
    out = _run_traced_call(trace.layer, trace, inputs)
    sources = [*inputs.values(), *trained.values()]
    grads = torch.autograd.grad(out, sources, _output_grad(out.shape, out.dtype), allow_unused=True)
    # autograd returns None where the output doesn't depend on a tensor: a zero gradient
    grads_or_zero = [torch.zeros_like(source) if grad is None else grad for source, grad in zip(sources, grads)]
    return out.detach(), grads_or_zero[: len(inputs)], dict(zip(trained, grads_or_zero[len(inputs) :]))


def _run_split_layer(trace: LayerTrace, rows: LayerRows, axis_group: Any, sequence: bool) -> _RankResult:
    """Runs one rank's shard of the layer.

    Returns:
        Its output; the gradients of its inputs, both a shard of the tokens under ``sequence``; each parameter's local
        shard and gradient by name; and the gradients that are still partial over the axis.
    """
    layer = duplicate(trace.layer)
    sharded = tensor.wrap_layer(layer, "layer", rows, axis_group, axis_group.size, sequence)
    inputs = {}
    for item in trace.inputs:
        local_input = item.detach()
        if sequence and local_input.dim() == 3:
            local_input = local_input.chunk(axis_group.size, dim=1)[axis_group.index]
        inputs[id(item)] = local_input.clone().requires_grad_()
    out = _run_traced_call(layer, trace, inputs)
    # the same output gradient as the whole layer's, cut to this rank's tokens
    output_grad = _output_grad(trace.output.shape if trace.output is not None else out.shape, out.dtype)
    if sequence:
        output_grad = output_grad.chunk(axis_group.size, dim=1)[axis_group.index]
    trained = {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}
    sources = [*inputs.values(), *trained.values()]
    grads = torch.autograd.grad(out, sources, output_grad, allow_unused=True)
    grads_or_zero = [torch.zeros_like(source) if grad is None else grad for source, grad in zip(sources, grads)]
    parameter_grads = {
        name: (sharded.local_shards.get(f"layer.{name}"), grad)
        for name, grad in zip(trained, grads_or_zero[len(inputs) :])
    }
    return out.detach(), grads_or_zero[: len(inputs)], parameter_grads, sharded.partial_grads


def _compare_layer(
    trace: LayerTrace, expected: _FullResult, rank_results: list[_RankResult], degree: int, sequence: bool
) -> str:
    """Names the first output or gradient of a rank that differs from the whole layer's; "" for none."""
    full_output, full_input_grads, parameters = expected
    # before any comparison: a partial gradient alone never equals the full one
    _sum_partial_grads(rank_results, degree)
    for index, (rank_output, rank_input_grads, *_rest) in enumerate(rank_results):
        if error := _excess_error(rank_output, _token_shard(full_output, degree, index, sequence)):
            return f"its output is off by {error:.1e}"
        for input_index, (grad, full_grad) in enumerate(zip(rank_input_grads, full_input_grads)):
            if error := _excess_error(grad, _token_shard(full_grad, degree, index, sequence)):
                return f"the gradient of its input {input_index} is off by {error:.1e}"
    return _compare_gradients(parameters, rank_results, degree, already_summed=True)


def _compare_gradients(
    expected: dict[str, torch.Tensor], rank_results: list[_RankResult], degree: int, already_summed: bool = False
) -> str:
    """Names the first parameter whose gradient differs on some rank; "" for none."""
    if not already_summed:
        _sum_partial_grads(rank_results, degree)
    # errors are relative to the largest gradient: a gradient of rounding noise must not fail
    scale = max((float(item.abs().max()) for item in expected.values()), default=0.0)
    for *_, parameters, _owed in rank_results:
        for name, (local_shard, grad) in parameters.items():
            full_grad = expected[name]
            expected_shard = grad.new_empty(grad.shape)
            for box in (local_shard or LocalShard.unsharded(name, tuple(full_grad.shape), degree)).boxes():
                expected_shard[_box_slices(box.local_box)] = full_grad[_box_slices(box.global_box)]
            if error := _excess_error(grad, expected_shard, scale):
                return f"the gradient of {name} is off by {error:.1e}"
    return ""


def _sum_partial_grads(rank_results: list[_RankResult], degree: int) -> None:
    """Sums the partial gradients over ranks in place, as `tp.PartialGradReducer` does over processes."""
    # the list of partial gradients is the same on every rank
    for partial_grad in rank_results[0][3]:
        name = partial_grad.name.removeprefix("layer.")
        ranks = partial_grad.ranks or degree
        for start in range(0, degree, ranks):
            grads = [rank_results[index][2][name][1] for index in range(start, start + ranks)]
            # runs: stretches of one dim that are partial; without any, the whole gradient is
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


def _excess_error(actual: torch.Tensor, expected: torch.Tensor, scale: float = 0.0) -> float:
    """Returns the relative error of two tensors of one shape where it is above the tolerance, else 0."""
    if actual.shape != expected.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    error = float((actual - expected).abs().max()) / max(float(expected.abs().max()), 1e-3 * scale, 1e-12)
    return 0.0 if error <= TOLERANCE else error


class _Model(Protocol):
    @property
    def module(self) -> nn.Module: ...

    def run(self, rows: int = 4, module: nn.Module | None = None, *, tokens: int = TOKENS) -> torch.Tensor: ...


def rehearse_model(
    clone: _Model, table: ShardingTable, degree: int, rows: int = 4, tokens: int = TOKENS, sequence: bool = False
) -> str:
    """Compares a split model with the whole model; returns the difference in words, "" when they agree.

    Args:
        clone: a small real model.
        table: for it.
        degree: of the axis.
        rows: B.
        tokens: S.
        sequence: whether tokens are split between the groups.
    """
    trained = {name: parameter for name, parameter in clone.module.named_parameters() if parameter.requires_grad}
    full_logits = clone.run(rows, tokens=tokens)
    # the loss of a model without logits is a scalar, which has no vocabulary dim
    splits_vocabulary = bool(table.vocabulary) and full_logits.dim() == 3
    output_grad = _output_grad(full_logits.shape, full_logits.dtype)
    grads = torch.autograd.grad(full_logits, list(trained.values()), output_grad, allow_unused=True)
    expected = {
        name: torch.zeros_like(item) if grad is None else grad for (name, item), grad in zip(trained.items(), grads)
    }
    full_logits = full_logits.detach()

    def run_rank(axis_group: Any) -> _RankResult:
        module = duplicate(clone.module)
        sharded = tensor.wrap_model(module, table, axis_group, axis_group.size, sequence)
        rank_output = clone.run(rows, module, tokens=tokens)
        rank_output_grad = output_grad
        # this rank's head computes a span of the vocabulary
        if splits_vocabulary and rank_output.shape[-1] != full_logits.shape[-1]:
            start, stop = vocabulary_span(full_logits.shape[-1], axis_group.size, axis_group.index)
            rank_output_grad = output_grad[..., start:stop]
        local_parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        local_grads = torch.autograd.grad(
            rank_output, list(local_parameters.values()), rank_output_grad, allow_unused=True
        )
        parameter_grads = {
            name: (sharded.local_shards.get(name), torch.zeros_like(parameter) if grad is None else grad)
            for (name, parameter), grad in zip(local_parameters.items(), local_grads)
        }
        return rank_output.detach(), [], parameter_grads, sharded.partial_grads

    try:
        rank_results = in_threads(degree, run_rank, PATIENCE_S if tokens == TOKENS else LONG_PATIENCE_S)
        for index, (rank_logits, *_rest) in enumerate(rank_results):
            start, stop = vocabulary_span(full_logits.shape[-1], degree, index) if full_logits.dim() == 3 else (0, 0)
            has_full_vocabulary = rank_logits.shape == full_logits.shape
            if error := _excess_error(
                rank_logits, full_logits if has_full_vocabulary else full_logits[..., start:stop]
            ):
                return f"its logits are off by {error:.1e} where {degree} ranks split layers and vocabulary"
        return _compare_gradients(expected, rank_results, degree)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        return reason_of(error)
