"""Counts a module's operators and saved activations on fake tensors: nothing is computed and no memory is allocated.

The module's own code runs forward and backward on tensors that have shapes and no memory. A dispatch mode sees every
operator, and autograd's hooks see which tensors are saved for backward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.models.fused import Call, fused
from meshwright.parallel.axis_group import DifferentiableCollectives
from meshwright.parallel.selective import is_kept
from meshwright.spec.model_shape import KeptBytes, ModuleWork, Operator
from meshwright.torch_compat.tensors import GROUPED_PRODUCT, FakeTensorMode, TorchDispatchMode, tree_flatten

aten = torch.ops.aten
PRODUCTS = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2)}
"""Products of matrices, and which of their arguments are the factors."""
ATTENTION = "_scaled_dot_product"
"""Prefix of the names of fused attention operators."""
FREE = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze",
        "detach", "alias", "as_strided", "split", "unbind", "chunk", "empty", "empty_like", "new_empty", "reshape",
        "_reshape_alias", "split_with_sizes", "empty_strided", "new_empty_strided", "_to_copy_view"}  # fmt: skip
"""Operators that move no bytes."""


DRAWN_BYTES = 11.5
"""Bytes moved in the time in which `parallel.keyed_random` draws an element on a device, which isn't run here:
`bernoulli_` stands for it. The planner's `cost.meshwright_profile` counts them."""


class BlankGroup(DifferentiableCollectives):
    """Replaces an axis group: its collectives leave tensors unchanged and are recorded.

    Args:
        size: ranks.
        index: this rank's.
    """

    def __init__(self, size: int, index: int = 0) -> None:
        super().__init__()
        self.size, self.index = size, index
        self.sent: list[tuple[str, int, int]] = []

    def _record_collective(self, op: str, tensor: torch.Tensor) -> _FinishedCollective:
        """Records an operation with the bytes of a tensor of any shape."""
        self.sent.append((op, tensor.numel() * tensor.element_size(), self.size))
        return _FinishedCollective()

    def all_reduce(self, tensor: torch.Tensor) -> _FinishedCollective:
        """Records a sum of a tensor of any shape, by its bytes."""
        return self._record_collective("all_reduce", tensor)

    def all_reduce_max(self, tensor: torch.Tensor) -> _FinishedCollective:
        """Records a maximum of a tensor of any shape, by its bytes."""
        return self._record_collective("all_reduce", tensor)

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> _FinishedCollective:
        """Records an all-gather of ``part: (n,)`` by the bytes of ``output: (size * n,)``."""
        return self._record_collective("all_gather", output)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> _FinishedCollective:
        """Records a reduce-scatter to ``output: (n,)`` by the bytes of ``tensor: (size * n,)``."""
        return self._record_collective("reduce_scatter", tensor)

    def all_to_all(self, outputs: Any, parts: Any) -> _FinishedCollective:
        """Records an all-to-all by the bytes that this rank sends."""
        sent_bytes = sum(tensor.numel() * tensor.element_size() for tensor in parts)
        self.sent.append(("all_to_all", sent_bytes, self.size))
        return _FinishedCollective()


class _FinishedCollective:
    """A work handle of a collective that has already completed."""

    def wait(self, timeout: Any = None) -> bool:
        """Returns at once."""
        return True


class _Counter(TorchDispatchMode):
    """Records every operator, and the memory that its results take until they are freed."""

    def __init__(self, rows: list[Operator], width: int) -> None:
        super().__init__()
        self.rows, self._width = rows, width
        self.calls: list[Call] = []
        self.memory = LiveStorages()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs and records one operator."""
        out = func(*args, **(kwargs or {}))
        row = _operator_of(func, args, kwargs or {}, out)
        if row is not None and row.kept_bytes and not is_kept(func, args, self._width):
            row = dataclasses.replace(row, kept_bytes=0)
        if row is not None:
            self.rows.append(row)
            self.calls.append(Call.of(row, (args, kwargs), out))
        self.memory.record(tree_flatten(out)[0])
        return out


class LiveStorages:
    """Writes down which storages of tensors live when, to find how much there is at once."""

    def __init__(self) -> None:
        self._live: dict[int, StorageWeakRef] = {}
        # Kept, so that no other storage gets the address of one that is gone.
        self._gone: list[StorageWeakRef] = []
        self._sizes: dict[int, int] = {}
        self._changes: list[tuple[int, int]] = []

    def record(self, results: Iterable[Any]) -> None:
        """Adds the storages of tensors, of any shape, and takes off those that were freed since."""
        for tensor in results:
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        for address in [address for address, storage in self._live.items() if storage.expired()]:
            self._gone.append(self._live.pop(address))
            self._changes.append((address, -self._sizes[address]))

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._live[storage._cdata] = StorageWeakRef(storage)
            self._sizes[storage._cdata] = storage.nbytes()
            self._changes.append((storage._cdata, storage.nbytes()))

    def most_bytes(self, left_out: Collection[int]) -> int:
        """Returns the most bytes that lived at once, without the storages of some addresses."""
        changes = (size for address, size in self._changes if address not in left_out)
        return max(accumulate(changes), default=0)


def _operator_of(func: Any, args: Any, kwargs: Any, out: Any) -> Operator | None:
    """Returns an operator's kind, dims, FLOPs and bytes; None for one that moves no bytes."""
    overload_packet = getattr(func, "overloadpacket", func)
    name = getattr(overload_packet, "__name__", str(overload_packet))
    results = [tensor for tensor in tree_flatten(out)[0] if isinstance(tensor, torch.Tensor)]
    # views and uninitialised memory: no traffic
    if name in FREE or not results:
        return None
    tensor_inputs = [tensor for tensor in tree_flatten((args, kwargs))[0] if isinstance(tensor, torch.Tensor)]
    moved_bytes = sum(item.numel() * item.element_size() for item in (*tensor_inputs, *results))
    if overload_packet in PRODUCTS:
        left, right = (args[argument_index] for argument_index in PRODUCTS[overload_packet])
        batch = left.shape[0] if left.dim() == 3 else 1
        # (m, k) x (k, n): two FLOPs for each multiply and add
        m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
        saved_bytes = sum(item.numel() * item.element_size() for item in results)
        flops = 2.0 * batch * m * n * k
        return Operator(
            "product", name, (batch, m, n, k), flops, moved_bytes, saved_bytes, left.stride(-1) != 1 and k > 1
        )
    if overload_packet is GROUPED_PRODUCT:
        sizes, summed = _grouped_sizes(args[0], args[1], results[0])
        saved_bytes = sum(item.numel() * item.element_size() for item in results)
        return Operator("product", name, sizes, 2.0 * math.prod(sizes), moved_bytes, saved_bytes, summed)
    if name.startswith(ATTENTION):
        is_backward = "backward" in name
        # the backward operator's first argument is the output gradient
        query, key = (tensor_inputs[1], tensor_inputs[2]) if is_backward else (tensor_inputs[0], tensor_inputs[1])
        rows, heads, queries, size = query.shape
        keys = key.shape[-2]
        # two products of 2·B·H·S·S'·E each; the backward has five such products, 2.5 times as many
        flops = 4.0 * rows * heads * queries * keys * size * (2.5 if is_backward else 1.0)
        saved_bytes = 0 if is_backward else sum(item.numel() * item.element_size() for item in results)
        return Operator("attention", name, (rows, heads, queries, keys, size), flops, moved_bytes, saved_bytes)
    # stands for the runtime's keyed dropout, which moves more bytes
    if name.startswith("bernoulli"):
        name, moved_bytes = "draw", DRAWN_BYTES * sum(item.numel() for item in results)
    return Operator("element", name, (), 0.0, moved_bytes)


def _grouped_sizes(
    left: torch.Tensor, right: torch.Tensor, result: torch.Tensor
) -> tuple[tuple[int, int, int, int], bool]:
    """Returns (groups, M, N, K) of a product of each expert's tokens, as if all had as many, and whether it sums them.

    Args:
        left: (T, K), tokens of one expert after the other's; (M, T) of a weight's gradient; or (G, M, K).
        right: (G, K, N); (T, N) beside a ``left`` of two dims; or (K, T) beside one of three.
        result: (T, N), (G, M, N) or (M, T).
    """
    if left.dim() == right.dim() == 2:
        groups = result.shape[0]
        return (groups, left.shape[0], right.shape[1], left.shape[1] // groups), True
    groups = left.shape[0] if left.dim() == 3 else right.shape[0]
    m = left.shape[-2] if left.dim() == 3 else left.shape[0] // groups
    n = right.shape[-1] if right.dim() == 3 else right.shape[1] // groups
    return (groups, m, n, left.shape[-1]), False


def measure_work(
    module: nn.Module,
    call: Callable[[], torch.Tensor],
    inputs: Sequence[torch.Tensor],
    lent: Sequence[torch.Tensor] = (),
    width: int = 0,
) -> ModuleWork:
    """Runs a module forward and backward on fake tensors and returns its operators and saved bytes.

    Args:
        module: its parameters are fake (`faked`).
        call: runs it; returns the tensor from which gradients start.
        inputs: tensors of any shape that gradients flow to.
        lent: tensors that other modules keep too: tables of positions, masks; they aren't counted as saved.
        width: D, of the hidden state; selective recompute keeps no product that sums fewer values.
    """
    work = ModuleWork()
    unsaved_storages = {
        parameter.untyped_storage()._cdata for parameter in (*module.parameters(), *module.buffers(), *lent)
    }
    saved: dict[int, StorageWeakRef] = {}
    backward_counter = _Counter(work.backward, width)

    def pack(item: torch.Tensor) -> torch.Tensor:
        # weights and lent tables are in memory anyway; a view counts by its storage, once
        storage = item.untyped_storage()
        if storage._cdata not in unsaved_storages and storage._cdata not in saved:
            # an address must not be used twice
            saved[storage._cdata] = StorageWeakRef(storage)
            backward_counter.memory.record([item])
        return item

    # pack sees every tensor that autograd saves for backward
    forward_counter = _Counter(work.forward, width)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda item: item), forward_counter:
        out = call()
    saved_bytes = backward_counter.memory.most_bytes(())
    targets = [parameter for parameter in (*inputs, *module.parameters()) if parameter.requires_grad]
    upstream = torch.empty_like(out)
    backward_counter.memory.record([upstream])
    with backward_counter:
        grads = torch.autograd.grad(out, targets, upstream, allow_unused=True)
    work.fused_forward = fused(forward_counter.calls, {*saved, out.untyped_storage()._cdata})
    work.fused_backward = fused(
        backward_counter.calls, {grad.untyped_storage()._cdata for grad in grads if grad is not None}
    )
    of_weights = {grad.untyped_storage()._cdata for grad in grads[len(inputs) :] if grad is not None}
    of_weights |= unsaved_storages
    input_bytes = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
    saved_by_mode = (saved_bytes, input_bytes + sum(item.kept_bytes for item in work.forward), input_bytes)
    # Recompute makes anew what wasn't kept before backward begins.
    most_bytes = max(saved_bytes, backward_counter.memory.most_bytes(of_weights))
    none, selective, full = (most_bytes - min(saved_bytes, size) for size in saved_by_mode)
    work.kept = KeptBytes(saved=saved_by_mode, working=(none, selective, full))
    return work


class _GroupedProducts(TorchDispatchMode):
    """Gives grouped products of experts a rule for fake tensors of any type.

    Their kernels take float32 and fp16 too; torch's rule (2.13, `meta_grouped_mm`) takes bf16 alone.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, grouped products as those of bf16."""
        if getattr(func, "overloadpacket", func) is not GROUPED_PRODUCT or args[0].dtype is torch.bfloat16:
            return func(*args, **(kwargs or {}))
        left, right, *others = args
        out = func(left.to(torch.bfloat16), right.to(torch.bfloat16), *others, **(kwargs or {}))
        return torch.empty_strided(out.shape, out.stride(), dtype=left.dtype, device=out.device)


@contextmanager
def faked(module: nn.Module, dtype: torch.dtype) -> Iterator[Any]:
    """Replaces a meta module's parameters and buffers by fake CPU tensors while it is entered; yields the fake mode.

    Args:
        module: on meta.
        dtype: of floating parameters.
    """
    originals: list[tuple[dict[str, Any], str, Any]] = []
    fakes: dict[int, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _GroupedProducts():
        for child in module.modules():
            for table in (child._parameters, child._buffers):
                for key, item in table.items():
                    if item is None:
                        continue
                    # a tied weight stays one tensor
                    if id(item) not in fakes:
                        fake_dtype = (
                            dtype if item.is_floating_point() and isinstance(item, nn.Parameter) else item.dtype
                        )
                        fake: Any = torch.empty(item.shape, dtype=fake_dtype, device="cpu")
                        is_parameter = isinstance(item, nn.Parameter)
                        fakes[id(item)] = nn.Parameter(fake, item.requires_grad) if is_parameter else fake
                    originals.append((table, key, item))
                    table[key] = fakes[id(item)]
        try:
            yield mode
        finally:
            for table, key, item in originals:
                table[key] = item
