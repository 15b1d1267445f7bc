"""Private names of torch's tensors, autograd, modes and pytrees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import _get_current_function_mode_stack
from torch.serialization import _get_layout
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._pytree import (
    MappingKey,
    SequenceKey,
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from meshwright.torch_compat import PrivateName

__all__ = [
    "FLOAT8_PRODUCT",
    "FUSED_ATTENTION",
    "GROUPED_PRODUCT",
    "LOG_SOFTMAX",
    "PRIVATE_NAMES",
    "TYPE_COPY",
    "BatchNormBase",
    "FakeTensorMode",
    "MappingKey",
    "SequenceKey",
    "TorchArgs",
    "TorchDispatchMode",
    "TorchFunction",
    "TorchKwargs",
    "TreeSpec",
    "after_backward",
    "backward_keeps_graph",
    "collective_dump",
    "dispatch_mode",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "function_modes",
    "fused_adamw_",
    "in_backward",
    "is_view",
    "local_tensor",
    "run_backward",
    "storage_layout",
    "tensor_factories",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
    "without_dispatch_mode",
    "without_tensor_subclasses",
    "wrap_checkpoint_generator",
    "wrapper_tensor",
]

PRIVATE_NAMES = (
    PrivateName(
        "torch._C:DisableTorchFunctionSubclass",
        "reading a gradient of ours without our own operators",
    ),
    PrivateName(
        "torch.autograd:Variable._execution_engine.queue_callback", "a hook at the end of backward, as DDP has"
    ),
    PrivateName(
        "torch:Tensor._make_wrapper_subclass",
        "a tensor in a state_dict that only DCP can read",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "tensors of shapes alone; public under no other name",
    ),
    PrivateName(
        "torch.serialization:_get_layout",
        "pickled metadata of torch.distributed.checkpoint names it",
    ),
    PrivateName(
        "torch.distributed.tensor:DTensor._local_tensor.__get__",
        "a shard's own memory without autograd: to_local() makes a view with a graph at each call",
    ),
    PrivateName(
        "torch:Tensor._is_view", "an output that is a view loses FSDP2's hooks when a model adds to it in place"
    ),
    PrivateName(
        "torch.overrides:_get_current_function_mode_stack", "what a checkpoint runs again needs the same modes"
    ),
    PrivateName(
        "torch.utils._python_dispatch:_get_current_dispatch_mode",
        "whether FLOPs are being counted",
    ),
    PrivateName(
        "torch.utils._python_dispatch:_pop_mode_temporarily",
        "measuring inside of a traced forward, unseen",
    ),
    PrivateName(
        "torch.utils._python_dispatch:TorchDispatchMode", "counting operators; documented, in a private module"
    ),
    PrivateName(
        "torch._C:_current_graph_task_id", "whether a forward runs inside of backward, as a recomputed one does"
    ),
    PrivateName(
        "torch._C._autograd:_get_current_graph_task_keep_graph",
        "whether a saved tensor may be written over, since no other backward reads it",
    ),
    PrivateName(
        "torch.autograd.graph:_engine_run_backward", "timing a backward: autograd.grad imports sympy for seconds"
    ),
    PrivateName(
        "torch.utils._device:_device_constructors",
        "every function that makes a tensor on a device",
    ),
    PrivateName(
        "torch.nn.modules.batchnorm:_BatchNorm", "the base of all batch norms, whose statistics are of one rank"
    ),
    PrivateName(
        "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
        "a model's own checkpoints call it; since torch 2.14 for callers outside of torch alone",
    ),
    PrivateName(
        "torch.utils.checkpoint:_checkpoint_without_reentrant_generator_impl",
        "the same since torch 2.14",
        since="2.14",
    ),
    PrivateName(
        "torch:_foreach_norm",
        "norms of many gradients in one kernel",
    ),
    PrivateName(
        "torch:_foreach_mul_",
        "clipping of many gradients in one kernel",
    ),
    PrivateName(
        "torch:_foreach_copy_",
        "copies of many tensors in one kernel",
    ),
    PrivateName(
        "torch:_fused_adamw_",
        "the kernel of AdamW without its class, which imports the compiler",
    ),
    *(
        PrivateName(
            f"torch.utils._pytree:{name}", "nested arguments and results of a call; torch.utils.pytree isn't in 2.11"
        )
        for name in (
            *("MappingKey", "SequenceKey", "TreeSpec", "tree_flatten", "tree_flatten_with_path", "tree_leaves"),
            *("tree_map_only", "tree_unflatten", "treespec_dumps", "treespec_loads"),
        )
    ),
    *(
        PrivateName(f"torch:ops.aten.{name}", "an operator behind `scaled_dot_product_attention`, by which it is told")
        for name in (
            *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
            *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        )
    ),
    PrivateName("torch:ops.aten._scaled_mm", "the operator of products in float8, whose outputs recompute keeps"),
    PrivateName("torch:ops.aten._grouped_mm", "the operator of experts' products, whose outputs recompute keeps"),
    PrivateName("torch:ops.aten._log_softmax", "the operator between logits and their cross-entropy"),
    PrivateName("torch:ops.aten._to_copy", "the operator of copies in another type, which logits are followed through"),
    *(
        PrivateName(f"torch._C._distributed_c10d:{name}", "what NCCL recorded of its collectives", needs_cuda=True)
        for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    ),
)

TorchFunction: TypeAlias = Callable[..., Any]
"""A function of torch, as ``__torch_function__`` gets it."""
TorchArgs: TypeAlias = Sequence[Any]
"""Positional arguments of a `TorchFunction`."""
TorchKwargs: TypeAlias = Mapping[str, Any]
"""Keyword arguments of a `TorchFunction`."""
FUSED_ATTENTION: tuple[TorchFunction, ...] = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention,
)
"""Operators behind `scaled_dot_product_attention`."""
FLOAT8_PRODUCT: TorchFunction = torch.ops.aten._scaled_mm
"""Operator of a product of two float8 matrices with scales."""
GROUPED_PRODUCT: TorchFunction = torch.ops.aten._grouped_mm
"""Operator of a product of each expert's tokens with its matrix."""
LOG_SOFTMAX: TorchFunction = torch.ops.aten._log_softmax
"""Operator of the logarithm of a softmax."""
TYPE_COPY: TorchFunction = torch.ops.aten._to_copy
"""Operator of a copy in another type or on another device."""
BatchNormBase = _BatchNorm
storage_layout: Callable[[str], torch.layout] = _get_layout
foreach_norm: TorchFunction = torch._foreach_norm
foreach_mul_: TorchFunction = torch._foreach_mul_
foreach_copy_: TorchFunction = torch._foreach_copy_
fused_adamw_: TorchFunction = torch._fused_adamw_
run_backward: TorchFunction = _engine_run_backward
backward_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's shard on this rank, (n_local, ...), sharing its memory; a plain tensor itself."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def is_view(tensor: torch.Tensor) -> bool:
    """Returns whether autograd takes a tensor of any shape for a view of another."""
    return bool(tensor._is_view())


def in_backward() -> bool:
    """Whether this thread runs inside of a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def function_modes() -> list[Any]:
    """Returns the TorchFunctionModes that are entered, outermost first."""
    return list(_get_current_function_mode_stack())


def dispatch_mode() -> object:
    """Returns the innermost TorchDispatchMode that is entered; None without one."""
    return _get_current_dispatch_mode()


def without_dispatch_mode() -> AbstractContextManager[Any]:
    """Returns a context in which the innermost TorchDispatchMode sees nothing."""
    context: AbstractContextManager[Any] = _pop_mode_temporarily()
    return context


def tensor_factories() -> Sequence[TorchFunction]:
    """Returns torch's functions that make tensors and take a ``device``."""
    return tuple(_device_constructors())


def without_tensor_subclasses() -> AbstractContextManager[None]:
    """Returns a context in which ``__torch_function__`` of tensor subclasses isn't called."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def after_backward(callback: Callable[[], None]) -> None:
    """Calls back when the backward pass that runs now has ended, after all that was asked for before."""
    engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(callback)


def wrapper_tensor(cls: type[Any], size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Returns a tensor of a subclass that has a shape and no memory of its own.

    Args:
        cls: subclass of torch.Tensor.
        size: its shape.
        dtype: its element type.
        device: where it says that it lies.
    """
    make_subclass: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    return make_subclass(cls, size, dtype=dtype, device=device, requires_grad=False)


def collective_dump() -> Callable[[bool, bool], bytes] | None:
    """Returns torch's dump of this process's collectives, (with them, active ones alone) to JSON; None without one."""
    dump = getattr(c10d, "_dump_nccl_trace_json", None) or getattr(c10d, "_dump_fr_trace_json", None)
    return dump if callable(dump) else None


def wrap_checkpoint_generator(wrap: Callable[[TorchFunction], TorchFunction]) -> None:
    """Replaces the generator that `torch.utils.checkpoint` runs around a first forward.

    Args:
        wrap: torch's own generator function to the one that takes its place.
    """
    name = "_checkpoint_without_reentrant_generator_impl"  # called by torch 2.14 and 2.15
    if not hasattr(torch_checkpoint, name):
        name = "_checkpoint_without_reentrant_generator"
    setattr(torch_checkpoint, name, wrap(getattr(torch_checkpoint, name)))
