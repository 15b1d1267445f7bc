"""Counts what a compiled layer keeps for backward: the compiler's own partition of its forward and backward.

torch.compile writes both as one graph and cuts it where least has to be kept, by what is cheap to compute again. The
same cut is made here, of a graph of fake tensors: nothing is computed, and no GPU is needed.
Source: torch 2.11 and 2.13, torch/_functorch/partitioners.py (min_cut_rematerialization_partition).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from meshwright.parallel.float8 import ALIGNMENT
from meshwright.parallel.recompute import recompute_all, selective_policy
from meshwright.spec.model_shape import KeptBytes
from meshwright.torch_compat.partitioner import operator_types, partitions
from meshwright.torch_compat.tensors import FLOAT8_PRODUCT, tree_flatten, tree_unflatten


def layer_bytes(
    layer: nn.Module, call: Callable[..., torch.Tensor], arguments: Any, float8: bool, width: int
) -> KeptBytes:
    """Returns what a compiled layer keeps, and what else its backward has at once.

    Args:
        layer: its parameters are fake (`operators.faked`).
        call: runs it on arguments such as these; returns the tensor from which gradients start.
        arguments: (args, kwargs) with fake tensors; those to which gradients flow require them. The others are other
            modules' too, and aren't counted.
        float8: its products are in float8.
        width: D, of the hidden state.
    """
    leaves, spec = tree_flatten(arguments)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    weights = {id(weight): weight for weight in layer.parameters()}
    buffers = {id(buffer): buffer for buffer in layer.buffers()}
    own = [*weights.values(), *buffers.values()]

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        given = list(leaves)
        for place, tensor in zip(places, tensors[len(own) :]):
            given[place] = tensor
        args, kwargs = tree_unflatten(given, spec)
        with _in_place_of(layer, dict(zip(map(id, own), tensors))), _Float8Linears(float8):
            return call(*args, **kwargs)

    tensors = [*own, *(leaves[place] for place in places)]
    # What neither is made by the layer nor is its input.
    lent = [index for index, tensor in enumerate(tensors) if index < len(own) or not tensor.requires_grad]
    selective_by_width = functools.partial(selective_policy, width=width)
    found = partitions(function, tensors, len(weights), (None, selective_by_width, recompute_all))
    saved, selective, full = (_saved_bytes(partition, lent) for partition in found)
    working, *further = (_working_bytes(backward, lent, len(weights)) for _, backward in found)
    return KeptBytes(saved=(saved, selective, full), working=(working, further[0], further[1]))


@contextmanager
def _in_place_of(layer: nn.Module, traced: dict[int, torch.Tensor]) -> Iterator[None]:
    """Lets modules compute with other tensors than their own weights and buffers, by the identity of these."""
    originals: list[tuple[dict[str, Any], str, Any]] = []
    for module in layer.modules():
        for table in (module._parameters, module._buffers):
            originals += [(table, name, item) for name, item in table.items() if item is not None]
    try:
        for table, name, item in originals:
            table[name] = traced[id(item)]
        yield
    finally:
        for table, name, item in originals:
            table[name] = item


def _storage(node: Any) -> int | None:
    """Returns the storage of what a node of a graph returns, by which views of one tensor are equal."""
    value = getattr(node, "meta", {}).get("val")
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else None


def _sizes(nodes: Iterable[Any]) -> dict[int, int]:
    """Returns the bytes of the distinct storages of what nodes return."""
    sizes = dict[int, int]()
    for node in nodes:
        if (storage := _storage(node)) is not None:
            sizes[storage] = int(node.meta["val"].untyped_storage().nbytes())
    return sizes


def _argument_numbers(graph: Any) -> dict[int | None, int]:
    """Returns the number of the function's argument behind each storage that is one."""
    arguments = (node for node in graph.find_nodes(op="placeholder") if node.name.startswith("primals_"))
    return {_storage(node): int(node.name.removeprefix("primals_")) - 1 for node in arguments}


def _kept_nodes(backward: Any) -> list[Any]:
    """Returns the inputs of a backward's graph that its forward kept."""
    return [node for node in backward.find_nodes(op="placeholder") if not node.name.startswith("tangents_")]


def _saved_bytes(partition: Any, lent: Sequence[int]) -> int:
    """Returns the bytes that go from forward to backward: distinct memory, without that of arguments in ``lent``."""
    forward, backward = (module.graph for module in partition)
    numbers = _argument_numbers(forward)
    return sum(size for storage, size in _sizes(_kept_nodes(backward)).items() if numbers.get(storage) not in lent)


def _working_bytes(backward: Any, lent: Sequence[int], weights: int) -> int:
    """Returns the most bytes that backward has at once beyond what was kept, without gradients of weights.

    An operator that can be fused into all that read it has no memory: it is computed where it is read. All that is
    fused between two other operators is a kernel, whose results exist beside all that it reads.
    """
    graph = _BackwardGraph(backward.graph, lent, weights)
    live = {storage: graph.sizes[storage] for storage in graph.given if storage in graph.sizes}
    most_bytes, made, in_kernel = sum(live.values()), set(graph.given), False
    for place, node in enumerate(graph.nodes):
        if not (in_kernel and graph.is_fused(node)):
            live = {storage: size for storage, size in live.items() if graph.last_read.get(storage, -1) >= place}
        in_kernel, storage = graph.is_fused(node), _storage(node)
        if storage in graph.sizes and storage not in made:
            made.add(storage)
            live[storage] = graph.sizes[storage]
            most_bytes = max(most_bytes, sum(live.values()))
    return max(0, most_bytes - sum(size for storage, size in graph.sizes.items() if storage in graph.kept))


class _BackwardGraph:
    """Which storages of a backward's graph are in memory, and when each is read last.

    Args:
        graph: of `torch.fx`.
        lent: numbers of the function's arguments that aren't counted.
        weights: number of its first arguments whose gradients aren't counted.
    """

    def __init__(self, graph: Any, lent: Sequence[int], weights: int) -> None:
        self._types = operator_types()
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        self.kept: set[int | None] = {*_sizes(_kept_nodes(graph))}
        """Storages that forward kept."""
        self.given: set[int | None] = {*_sizes(graph.find_nodes(op="placeholder"))}
        """Storages that exist when backward begins."""
        (output,) = graph.find_nodes(op="output")
        gradients: list[Any] = list(tree_flatten(output.args)[0])
        results: set[int | None] = {*_sizes(gradients)}
        uncounted: set[int | None] = {*_sizes(gradients[:weights])}
        uncounted |= {storage for storage, number in _argument_numbers(graph).items() if number in lent}
        self._in_memory = self.given | results
        self._in_memory |= set(_sizes(node for node in self.nodes if not self._is_only_fused(node)))
        everything = _sizes(self.nodes).items()
        self.sizes = {storage: size for storage, size in everything if storage in self._in_memory - uncounted}
        """Bytes of each storage that is in memory and counted."""
        self._reads = dict[Any, set[int | None]]()
        for node in self.nodes:
            self._reads[node] = set().union(*(self._memory_behind(source) for source in node.all_input_nodes))
        self.last_read: dict[int | None, int] = dict.fromkeys(results, len(self.nodes))
        """Place of the last node that reads a storage, itself or by what is fused into it."""
        for place, node in enumerate(self.nodes):
            for storage in self._reads[node] - {_storage(node)}:
                self.last_read[storage] = max(self.last_read.get(storage, 0), place)
        self._delay_to_shared_kernels()

    def is_fused(self, node: Any) -> bool:
        """Returns whether an operator can be a part of a kernel with others, or is none at all."""
        is_other = node.op != "call_function" or node.target is operator.getitem
        return is_other or self._types.is_fusible(node) or self._types.is_view(node)

    def _is_only_fused(self, node: Any) -> bool:
        return self.is_fused(node) and all(self.is_fused(user) for user in node.users)

    def _memory_behind(self, node: Any) -> set[int | None]:
        """Returns the storages that are read to have what a node returns."""
        storage = _storage(node)
        return {storage} if storage in self._in_memory or storage is None else self._reads[node]

    def _delay_to_shared_kernels(self) -> None:
        """Lets results live until a later kernel that reads the same: the compiler computes both there, in one."""
        before, behind_others = dict[Any, set[Any]](), dict[Any, set[Any]]()
        for node in self.nodes:
            sources = node.all_input_nodes
            before[node] = {node}.union(*(before[source] for source in sources))
            # What can't be in a kernel with it, since something else has to be computed in between.
            behind_others[node] = set().union(*(behind_others[source] for source in sources))
            if not self.is_fused(node):
                behind_others[node] |= before[node]
        written = [(place, node) for place, node in enumerate(self.nodes) if self._writes(node)]
        for place, node in written:
            for earlier_place, earlier in written:
                shares = self._reads[node] & self._reads[earlier]
                if earlier_place < place and shares and earlier not in behind_others[node]:
                    self.last_read[_storage(earlier)] = max(self.last_read.get(_storage(earlier), 0), place)

    def _writes(self, node: Any) -> bool:
        """Returns whether an operator that can be fused writes a result of its own."""
        storage = _storage(node)
        is_view = any(_storage(source) == storage for source in node.all_input_nodes)
        return node.op == "call_function" and self._types.is_fusible(node) and not is_view and storage in self.sizes


class _Float8Linears(TorchFunctionMode):
    """Computes linear products in float8 as `parallel.float8` does, on fake tensors and without torchao."""

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self._enabled = enabled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function of torch."""
        if self._enabled and func is functional.linear and not kwargs:
            x, weight, *bias = args
            if all(size % ALIGNMENT == 0 for size in weight.shape):
                y = _Float8Product.apply(x, weight.t())
                return y + bias[0] if bias and bias[0] is not None else y
        return func(*args, **(kwargs or {}))


class _Float8Product(torch.autograd.Function):
    """x W^T with each operand of its three products cast by a scale of its own; x and W are kept as they are."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        rows = _multiply(x.reshape(-1, x.shape[-1]), weight)
        return rows.reshape(*x.shape[:-1], weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1])
        of_x = _multiply(gradient, weight.t()).reshape(x.shape)
        return of_x, _multiply(x.reshape(-1, x.shape[-1]).t(), gradient)


def _multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns the product of (m, k) and (k, n), both cast to float8."""
    (left8, left_scale), (right8, right_scale) = _cast(left), _cast(right)
    # The kernel reads the left one by rows and the right one by columns.
    columns = right8.t().contiguous().t()
    product: torch.Tensor = FLOAT8_PRODUCT(left8.contiguous(), columns, left_scale, right_scale, out_dtype=left.dtype)
    return product


def _cast(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a tensor in float8, and its scale."""
    scale = tensor.abs().max().to(torch.float32).clamp(min=1e-12) / 448.0
    return (tensor.to(torch.float32) / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale
