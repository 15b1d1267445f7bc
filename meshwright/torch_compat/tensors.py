"""Private names of torch's tensors, autograd, modes and pytrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import _get_current_function_mode_stack
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
    "FUSED_ATTENTION",
    "PRIVATE_NAMES",
    "BatchNormBase",
    "MappingKey",
    "SequenceKey",
    "TorchDispatchMode",
    "TreeSpec",
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
    "tensor_factories",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
    "without_dispatch_mode",
]

PRIVATE_NAMES = (
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
        "a model's own checkpoints call it",
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
    PrivateName(
        "torch.utils._pytree:tree_map_only",
        "nested arguments of a call; torch.utils.pytree isn't in 2.11",
    ),
)

FUSED_ATTENTION: tuple[Any, ...] = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention,
)
"""Operators behind `scaled_dot_product_attention`."""
BatchNormBase = _BatchNorm
foreach_norm: Callable[..., Any] = torch._foreach_norm
foreach_mul_: Callable[..., Any] = torch._foreach_mul_
foreach_copy_: Callable[..., Any] = torch._foreach_copy_
fused_adamw_: Callable[..., Any] = torch._fused_adamw_
run_backward: Callable[..., Any] = _engine_run_backward


def local_tensor(tensor: Any) -> torch.Tensor:
    """Returns a DTensor's shard on this rank, (n_local, ...), sharing its memory; a plain tensor itself."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd takes a tensor for a view of another."""
    return bool(tensor._is_view())


def in_backward() -> bool:
    """Whether this thread runs inside of a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def function_modes() -> list[Any]:
    """Returns the TorchFunctionModes that are entered, outermost first."""
    return list(_get_current_function_mode_stack())


def dispatch_mode() -> Any:
    """Returns the innermost TorchDispatchMode that is entered; None without one."""
    return _get_current_dispatch_mode()


def without_dispatch_mode() -> AbstractContextManager[Any]:
    """Returns a context in which the innermost TorchDispatchMode sees nothing."""
    context: AbstractContextManager[Any] = _pop_mode_temporarily()
    return context


def tensor_factories() -> Sequence[Callable[..., Any]]:
    """Returns torch's functions that make tensors and take a ``device``."""
    return tuple(_device_constructors())


def wrap_checkpoint_generator(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces the generator that `torch.utils.checkpoint` runs around a first forward.

    Args:
        wrap: torch's own generator function to the one that takes its place.
    """
    torch_checkpoint._checkpoint_without_reentrant_generator = wrap(
        torch_checkpoint._checkpoint_without_reentrant_generator
    )
