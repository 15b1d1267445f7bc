"""What a module computes and keeps, operator by operator, read off fake tensors: nothing is computed, nothing held.

The module's own code runs forward and backward on tensors that have shapes and no memory. A dispatch mode sees every
operator, and autograd's hooks see what is kept for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from meshwright.models.fused import Call, fused
from meshwright.parallel.axis_group import DifferentiableCollectives
from meshwright.spec.model_shape import ModuleWork, Operator

aten = torch.ops.aten
PRODUCTS = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2)}
"""Products of matrices, and which of their arguments are the factors."""
ATTENTION = "_scaled_dot_product"
"""How the names of fused attention operators begin."""
FREE = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze",
        "detach", "alias", "as_strided", "split", "unbind", "chunk", "empty", "empty_like", "new_empty", "reshape",
        "_reshape_alias", "split_with_sizes", "empty_strided", "new_empty_strided", "_to_copy_view"}  # fmt: skip
"""Operators that move no bytes."""


DRAWN_BYTES = 125
"""Bytes moved for each element that dropout draws by `parallel.keyed_random` on a device, which isn't run here:
`bernoulli_` stands for it. The planner's `cost.own` counts them."""


class BlankGroup(DifferentiableCollectives):
    """Stands for a group's wire: collectives leave what is there, and are written down.

    Args:
        size: ranks.
        index: this rank's.
    """

    def __init__(self, size: int, index: int = 0) -> None:
        super().__init__()
        self.size, self.index = size, index
        self.sent: list[tuple[str, int, int]] = []

    def _book(self, op: str, tensor: torch.Tensor) -> _FinishedCollective:
        self.sent.append((op, tensor.numel() * tensor.element_size(), self.size))
        return _FinishedCollective()

    def all_reduce(self, tensor: torch.Tensor) -> _FinishedCollective:
        """As `parallel.axis_group.AxisGroup.all_reduce`."""
        return self._book("all_reduce", tensor)

    def all_reduce_max(self, tensor: torch.Tensor) -> _FinishedCollective:
        """As `parallel.axis_group.AxisGroup.all_reduce_max`."""
        return self._book("all_reduce", tensor)

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> _FinishedCollective:
        """As `parallel.axis_group.AxisGroup.all_gather`."""
        return self._book("all_gather", output)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> _FinishedCollective:
        """As `parallel.axis_group.AxisGroup.reduce_scatter`."""
        return self._book("reduce_scatter", tensor)

    def all_to_all(self, outputs: Any, parts: Any) -> _FinishedCollective:
        """As `parallel.axis_group.AxisGroup.all_to_all`."""
        whole = sum(part.numel() * part.element_size() for part in parts)
        self.sent.append(("all_to_all", whole, self.size))
        return _FinishedCollective()


class _FinishedCollective:
    def wait(self, timeout: Any = None) -> bool:
        """Nothing is under way."""
        return True


class _Counter(TorchDispatchMode):
    """Writes down every operator."""

    def __init__(self, rows: list[Operator]) -> None:
        super().__init__()
        self.rows = rows
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs and books one operator."""
        out = func(*args, **(kwargs or {}))
        row = _row(func, args, kwargs or {}, out)
        if row is not None:
            self.rows.append(row)
            self.calls.append(Call.of(row, (args, kwargs), out))
        return out


def _row(func: Any, args: Any, kwargs: Any, out: Any) -> Operator | None:
    packet = getattr(func, "overloadpacket", func)
    name = getattr(packet, "__name__", str(packet))
    results = [item for item in tree_flatten(out)[0] if isinstance(item, torch.Tensor)]
    if name in FREE or not results:
        return None
    given = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor)]
    moved = sum(item.numel() * item.element_size() for item in (*given, *results))
    if packet in PRODUCTS:
        left, right = (args[place] for place in PRODUCTS[packet])
        batch = left.shape[0] if left.dim() == 3 else 1
        m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
        kept = sum(item.numel() * item.element_size() for item in results)
        flops = 2.0 * batch * m * n * k
        return Operator("product", name, (batch, m, n, k), flops, moved, kept, left.stride(-1) != 1 and k > 1)
    if name.startswith(ATTENTION):
        back = "backward" in name
        query, key = (given[1], given[2]) if back else (given[0], given[1])
        rows, heads, queries, size = query.shape
        keys = key.shape[-2]
        flops = 4.0 * rows * heads * queries * keys * size * (2.5 if back else 1.0)
        kept = 0 if back else sum(item.numel() * item.element_size() for item in results)
        return Operator("attention", name, (rows, heads, queries, keys, size), flops, moved, kept)
    if name.startswith("bernoulli"):
        name, moved = "draw", DRAWN_BYTES * sum(item.numel() for item in results)
    return Operator("element", name, (), 0.0, moved)


def measure_work(
    module: nn.Module,
    call: Callable[[], torch.Tensor],
    inputs: Sequence[torch.Tensor],
    lent: Sequence[torch.Tensor] = (),
) -> ModuleWork:
    """Runs a module forward and backward on fake tensors and returns what it computed and kept.

    Args:
        module: its parameters are fake (`faked`).
        call: runs it; gives what gradients start from.
        inputs: tensors that gradients flow to.
        lent: tensors that others hold too: tables of positions, masks; they aren't counted as kept.
    """
    work = ModuleWork()
    own = {item.untyped_storage()._cdata for item in (*module.parameters(), *module.buffers(), *lent)}
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(item: torch.Tensor) -> torch.Tensor:
        storage = item.untyped_storage()
        if storage._cdata not in own and storage._cdata not in kept:
            kept[storage._cdata] = storage.nbytes()
            alive.append(item)  # an address must not be used twice
        return item

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda item: item), _Counter(work.forward) as ahead:
        out = call()
    targets = [item for item in (*inputs, *module.parameters()) if item.requires_grad]
    with _Counter(work.backward) as back:
        given = torch.autograd.grad(out, targets, torch.empty_like(out), allow_unused=True)
    work.fused_forward = fused(ahead.calls, {*kept, out.untyped_storage()._cdata})
    work.fused_backward = fused(back.calls, {item.untyped_storage()._cdata for item in given if item is not None})
    work.saved_bytes = sum(kept.values())
    work.input_bytes = sum(item.numel() * item.element_size() for item in inputs)
    return work


@contextmanager
def faked(module: nn.Module, dtype: torch.dtype) -> Iterator[Any]:
    """Replaces a meta module's parameters and buffers by fake CPU tensors while it is entered; yields the fake mode.

    Args:
        module: on meta.
        dtype: that floating parameters get.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    undo: list[tuple[dict[str, Any], str, Any]] = []
    made: dict[int, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for part in module.modules():
            for table in (part._parameters, part._buffers):
                for key, item in table.items():
                    if item is None:
                        continue
                    if id(item) not in made:
                        kind = dtype if item.is_floating_point() and isinstance(item, nn.Parameter) else item.dtype
                        fake: Any = torch.empty(item.shape, dtype=kind, device="cpu")
                        trained = isinstance(item, nn.Parameter)
                        made[id(item)] = nn.Parameter(fake, item.requires_grad) if trained else fake
                    undo.append((table, key, item))
                    table[key] = made[id(item)]
        try:
            yield mode
        finally:
            for table, key, item in undo:
                table[key] = item
