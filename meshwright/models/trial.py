"""Rehearses a split in one process: ranks are threads, whose collectives meet at a barrier.

A small real layer is split as the runtime would split it and run forward and backward; outputs and every gradient must
be those of the whole layer. Nothing enters the sharding table that didn't pass.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from meshwright.models.trace import LayerTrace, first_tensor
from meshwright.parallel import tensor
from meshwright.parallel.axis_group import DifferentiableCollectives
from meshwright.parallel.float64_ops import Float64Ops
from meshwright.parallel.model_checkpointing import repeated
from meshwright.spec.placement import LocalShard
from meshwright.spec.sharding_table import LayerRows, ShardingTable, vocabulary_span

TOLERANCE = 1e-9
"""Largest error, relative to the largest entry; computed in float64 alone (`parallel.float64_ops`) it is 1e-13."""
TOKENS = 8
"""Tokens of a short row."""
PATIENCE_S = 20.0
"""How long a thread waits for the others."""
LONG_PATIENCE_S = 60.0
"""The same with long rows."""


class _Left:
    """Stands where a thread that is done gave its values."""


class _FinishedExchange:
    def wait(self, timeout: Any = None) -> bool:
        return True


class ThreadGroup(DifferentiableCollectives):
    """One thread's end of a group of threads; offers the collectives of `parallel.axis_group.AxisGroup`."""

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
        """Frees all threads that wait, with an error."""
        self._barrier.abort()

    def leave(self) -> None:
        """Says that this thread won't exchange any more: one that waits for it now would wait for ever."""
        self._slots[self.index] = _Left()
        if self._barrier.n_waiting:
            self._barrier.abort()

    def exchange(self, value: Any) -> list[Any]:
        """Returns what every thread gave, in order."""
        if any(isinstance(item, _Left) for item in self._slots):
            self._barrier.abort()
        self._slots[self.index] = value
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def all_reduce(self, tensor: torch.Tensor) -> _FinishedExchange:
        """As `AxisGroup.all_reduce`."""
        parts = self.exchange(tensor.detach().clone())
        with torch.no_grad():
            tensor.copy_(torch.stack(parts).sum(0))
        return _FinishedExchange()

    def all_reduce_max(self, tensor: torch.Tensor) -> _FinishedExchange:
        """As `AxisGroup.all_reduce_max`."""
        tensor.copy_(torch.stack(self.exchange(tensor.clone())).amax(0))
        return _FinishedExchange()

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> _FinishedExchange:
        """As `AxisGroup.all_gather`."""
        output.copy_(torch.cat([item.reshape(-1) for item in self.exchange(part.detach().clone())]))
        return _FinishedExchange()

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> _FinishedExchange:
        """As `AxisGroup.reduce_scatter`."""
        parts = self.exchange(tensor.detach().clone())
        output.copy_(torch.stack(parts).sum(0).view(self.size, -1)[self.index].view_as(output))
        return _FinishedExchange()

    def all_to_all(self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> _FinishedExchange:
        """As `AxisGroup.all_to_all`."""
        for output, sent in zip(outputs, self.exchange([part.detach().clone() for part in parts])):
            output.copy_(sent[self.index])
        return _FinishedExchange()


def in_threads(size: int, work: Callable[[ThreadGroup], Any], patience_s: float = PATIENCE_S) -> list[Any]:
    """Runs ``work`` on the threads of a group and returns what each gave.

    Args:
        size: number of threads.
        work: what each runs, with its end of the group.
        patience_s: how long a thread waits for the others.

    Raises:
        RuntimeError: with the first error of a thread.
    """
    # A forked process makes torch's thread pool anew, and threads that meet there before it stands fail: "Invalid
    # thread pool!". Source: caffe2/utils/threadpool/pthreadpool-cpp.cc.
    torch.set_num_threads(torch.get_num_threads())
    axis_groups = ThreadGroup.group(size, patience_s)
    found: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(axis_group: ThreadGroup) -> None:
        try:
            found[axis_group.index] = work(axis_group)
            axis_group.leave()
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
    if not errors and any(item is None for item in found):
        raise RuntimeError("the ranks waited for each other")
    if errors:
        raise RuntimeError(reason_of(errors[0])[:180]) from errors[0]
    if any(thread.is_alive() for thread in threads):
        raise RuntimeError("the ranks waited for each other")
    return found


def reason_of(error: BaseException) -> str:
    """Returns what an error says, in one line that is never empty."""
    text = " ".join(str(error).split())
    if isinstance(error, RuntimeError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else f"its code raised {type(error).__name__}"


def duplicate(module: nn.Module) -> nn.Module:
    """Returns a copy of a module; states that its forward has kept for a next call lose their graph."""
    for part in module.modules():
        for key, value in vars(part).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                setattr(part, key, value.detach())
    return copy.deepcopy(module)


def rehearse_layer(trace: LayerTrace, rows: LayerRows, degree: int, sequence: bool = False) -> str:
    """Returns why a layer split by some rows isn't the whole layer; "" when it is.

    Args:
        trace: a call of the layer, with the layer itself.
        rows: its part of the table.
        degree: of the axis.
        sequence: whether tokens are split between the groups.
    """
    wanted = _whole(trace)
    try:
        found = in_threads(degree, lambda axis_group: _part(trace, rows, axis_group, sequence))
        return _difference(trace, wanted, found, degree, sequence)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        return reason_of(error)


def _call(layer: nn.Module, trace: LayerTrace, inputs: dict[int, torch.Tensor]) -> torch.Tensor:
    def given(item: torch.Tensor) -> torch.Tensor:
        # The code may write into what it gets.
        return inputs[id(item)].clone() if id(item) in inputs else item

    args, kwargs = tree_map_only(torch.Tensor, given, (trace.args, trace.kwargs))
    with Float64Ops(), repeated():
        out = first_tensor(layer(*args, **kwargs))
    if out is None:
        raise RuntimeError("the layer returns no tensor")
    return out


def _cotangent(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=dtype)


def _whole(trace: LayerTrace) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    inputs = {id(item): item.detach().clone().requires_grad_() for item in trace.inputs}
    named = {name: item for name, item in trace.layer.named_parameters() if item.requires_grad}
    out = _call(trace.layer, trace, inputs)
    sources = [*inputs.values(), *named.values()]
    grads = torch.autograd.grad(out, sources, _cotangent(out.shape, out.dtype), allow_unused=True)
    full = [torch.zeros_like(source) if grad is None else grad for source, grad in zip(sources, grads)]
    return out.detach(), full[: len(inputs)], dict(zip(named, full[len(inputs) :]))


def _part(
    trace: LayerTrace, rows: LayerRows, axis_group: Any, sequence: bool
) -> tuple[
    torch.Tensor, list[torch.Tensor], dict[str, tuple[LocalShard | None, torch.Tensor]], list[tensor.PartialGrad]
]:
    layer = duplicate(trace.layer)
    done = tensor.wrap_layer(layer, "layer", rows, axis_group, axis_group.size, sequence)
    inputs = {}
    for item in trace.inputs:
        held = item.detach()
        if sequence and held.dim() == 3:
            held = held.chunk(axis_group.size, dim=1)[axis_group.index]
        inputs[id(item)] = held.clone().requires_grad_()
    out = _call(layer, trace, inputs)
    upstream = _cotangent(trace.output.shape if trace.output is not None else out.shape, out.dtype)
    if sequence:
        upstream = upstream.chunk(axis_group.size, dim=1)[axis_group.index]
    named = {name: item for name, item in layer.named_parameters() if item.requires_grad}
    sources = [*inputs.values(), *named.values()]
    grads = torch.autograd.grad(out, sources, upstream, allow_unused=True)
    full = [torch.zeros_like(source) if grad is None else grad for source, grad in zip(sources, grads)]
    parts = {name: (done.places.get(f"layer.{name}"), grad) for name, grad in zip(named, full[len(inputs) :])}
    return out.detach(), full[: len(inputs)], parts, done.owed


def _difference(trace: LayerTrace, wanted: Any, found: list[Any], degree: int, sequence: bool) -> str:
    out, inputs, parameters = wanted
    _sum_owed(found, degree)
    for index, (own, own_inputs, *_rest) in enumerate(found):
        if error := _apart(own, _token_part(out, degree, index, sequence)):
            return f"its output is off by {error:.1e}"
        for place, (grad, whole) in enumerate(zip(own_inputs, inputs)):
            if error := _apart(grad, _token_part(whole, degree, index, sequence)):
                return f"the gradient of its input {place} is off by {error:.1e}"
    return _gradients_apart(parameters, found, degree, summed=True)


def _gradients_apart(wanted: dict[str, torch.Tensor], found: list[Any], degree: int, summed: bool = False) -> str:
    """Which parameter's gradient is off on some rank; "" for none."""
    if not summed:
        _sum_owed(found, degree)
    scale = max((float(item.abs().max()) for item in wanted.values()), default=0.0)
    for *_, parameters, _owed in found:
        for name, (place, grad) in parameters.items():
            whole = wanted[name]
            part = grad.new_empty(grad.shape)
            for piece in (place or LocalShard.whole(name, tuple(whole.shape), degree)).pieces():
                part[_slices(piece.local)] = whole[_slices(piece.whole)]
            if error := _apart(grad, part, scale):
                return f"the gradient of {name} is off by {error:.1e}"
    return ""


def _sum_owed(found: list[Any], degree: int) -> None:
    """Does what `tp.PartialGradReducer` does, over what the threads left."""
    for owed in found[0][3]:
        name = owed.name.removeprefix("layer.")
        ranks = owed.ranks or degree
        for start in range(0, degree, ranks):
            grads = [found[index][2][name][1] for index in range(start, start + ranks)]
            for run in owed.runs or ((0, grads[0].shape[owed.dim] if grads[0].dim() else 0),):
                views = [grad.narrow(owed.dim, run[0], run[1] - run[0]) if grad.dim() else grad for grad in grads]
                total = torch.stack(views).sum(0)
                for view in views:
                    view.copy_(total)


def _slices(box: Any) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _token_part(whole: torch.Tensor, degree: int, index: int, sequence: bool) -> torch.Tensor:
    return whole.chunk(degree, dim=1)[index] if sequence and whole.dim() == 3 else whole


def _apart(found: torch.Tensor, wanted: torch.Tensor, scale: float = 0.0) -> float:
    """The relative error where it is too large, else 0."""
    if found.shape != wanted.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    error = float((found - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-3 * scale, 1e-12)
    return 0.0 if error <= TOLERANCE else error


class _Model(Protocol):
    @property
    def module(self) -> nn.Module: ...

    def run(self, rows: int = 4, module: nn.Module | None = None, *, tokens: int = TOKENS) -> torch.Tensor: ...


def rehearse_model(
    clone: _Model, table: ShardingTable, degree: int, rows: int = 4, tokens: int = TOKENS, sequence: bool = False
) -> str:
    """Returns why a whole model, split by a table, isn't the whole model; "" when it is.

    Args:
        clone: a small real model.
        table: for it.
        degree: of the axis.
        rows: of the batch.
        tokens: a row.
        sequence: whether tokens are split between the groups.
    """
    named = {name: item for name, item in clone.module.named_parameters() if item.requires_grad}
    out = clone.run(rows, tokens=tokens)
    split = bool(table.vocabulary) and out.dim() == 3
    upstream = _cotangent(out.shape, out.dtype)
    grads = torch.autograd.grad(out, list(named.values()), upstream, allow_unused=True)
    wanted = {
        name: torch.zeros_like(item) if grad is None else grad for (name, item), grad in zip(named.items(), grads)
    }
    out = out.detach()

    def part(axis_group: Any) -> Any:
        module = duplicate(clone.module)
        done = tensor.wrap_model(module, table, axis_group, axis_group.size, sequence)
        mine = clone.run(rows, module, tokens=tokens)
        cotangent = upstream
        if split and mine.shape[-1] != out.shape[-1]:
            start, stop = vocabulary_span(out.shape[-1], axis_group.size, axis_group.index)
            cotangent = upstream[..., start:stop]
        held = {name: item for name, item in module.named_parameters() if item.requires_grad}
        got = torch.autograd.grad(mine, list(held.values()), cotangent, allow_unused=True)
        parts = {
            name: (done.places.get(name), torch.zeros_like(item) if grad is None else grad)
            for (name, item), grad in zip(held.items(), got)
        }
        return mine.detach(), [], parts, done.owed

    try:
        found = in_threads(degree, part, PATIENCE_S if tokens == TOKENS else LONG_PATIENCE_S)
        for index, (own, *_rest) in enumerate(found):
            start, stop = vocabulary_span(out.shape[-1], degree, index) if out.dim() == 3 else (0, 0)
            whole = own.shape == out.shape
            if error := _apart(own, out if whole else out[..., start:stop]):
                return f"its logits are off by {error:.1e} where {degree} ranks split layers and vocabulary"
        return _gradients_apart(wanted, found, degree)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        return reason_of(error)
