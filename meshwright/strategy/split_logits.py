"""Guards logits of a shard of the vocabulary in user code: `HybridParallelStrategy.loss` takes them, nothing else does.

Under ``tp`` with ``split_vocabulary=True`` a rank's logits are some columns of the whole. A softmax, a maximum or a
loss of one's own would be over these columns alone, on each rank others: what reads or mixes columns is refused.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.build import is_transformers
from meshwright.parallel.vocab_shard import VocabShard
from meshwright.torch_compat.tensors import TorchArgs, TorchFunction, TorchKwargs, without_tensor_subclasses

_OF_ROWS = (
    *("__getitem__", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "chunk", "split", "unbind"),
    *("detach", "clone", "contiguous", "to", "float", "double", "half", "bfloat16", "cpu", "cuda", "data"),
)
"""What may give other rows, or the same in another type; columns stay as they are."""
_NO_VALUES = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "is_contiguous"),
    *(
        "is_floating_point",
        "is_complex",
        "get_device",
        "data_ptr",
        "untyped_storage",
        "__len__",
        "__hash__",
        "__repr__",
    ),
    *("requires_grad_", "retain_grad", "register_hook", "_is_view", "__get__"),
)
"""What reads no value of a column."""
_BY_NUMBERS = ("mul", "div", "true_divide", "__rmul__")
"""What treats all columns alike, where the other factor is a number."""


class SplitLogits(torch.Tensor):
    """Logits (..., V / tp) whose columns only `TargetLoss` reads."""

    @classmethod
    def __torch_function__(
        cls,
        func: TorchFunction,
        types: Collection[type],
        args: TorchArgs = (),
        kwargs: TorchKwargs | None = None,
    ) -> Any:
        """Runs what keeps columns as they are; torch calls this for each function.

        Raises:
            ConfigError: for any other.
        """
        name = getattr(func, "__name__", str(func))
        columns = next((_columns(item) for item in args if isinstance(item, SplitLogits)), None)
        is_scaled = name in _BY_NUMBERS and sum(isinstance(item, torch.Tensor) for item in args) == 1
        if name in _NO_VALUES or name in _OF_ROWS or is_scaled:
            with without_tensor_subclasses():
                result = func(*args, **(kwargs or {}))
            parts = result if isinstance(result, list | tuple) else [result]
            tensors = [part for part in parts if isinstance(part, torch.Tensor)]
            if all(_columns(part) == columns for part in tensors):
                if isinstance(result, torch.Tensor):
                    return _guarded(result)
                return type(result)(map(_guarded, tensors)) if tensors else result
        raise ConfigError(
            f"{name}() of logits under tp with split_vocabulary=True: each rank has {columns} columns of the "
            "vocabulary alone, which strategy.loss(logits, targets) takes together; leave split_vocabulary out for "
            "whole logits, on which any loss is right"
        )


def _columns(logits: torch.Tensor) -> int | None:
    """Returns the last size of logits (..., V); None without one."""
    with without_tensor_subclasses():
        return logits.shape[-1] if logits.dim() else None


def _guarded(logits: torch.Tensor) -> SplitLogits:
    """Returns logits (..., V) guarded, with their gradient."""
    with without_tensor_subclasses():
        return logits.as_subclass(SplitLogits)


def plain_logits(logits: torch.Tensor) -> torch.Tensor:
    """Returns logits (..., V) as a plain tensor, with their gradient."""
    if not isinstance(logits, SplitLogits):
        return logits
    with without_tensor_subclasses():
        return logits.as_subclass(torch.Tensor)


def guard_logits(module: nn.Module, vocab: VocabShard) -> None:
    """Makes a module return its logits guarded: its output, or what is called ``logits`` in it.

    ``labels`` are refused, of which transformers' models compute a loss by themselves; that the code of another model
    computes none of a shard's columns was tried when it was read.

    Args:
        module: the model, whose other hooks are registered.
        vocab: the columns that this rank computes.
    """
    columns = vocab.stop - vocab.start

    def guard(value: object) -> Any:
        is_split = isinstance(value, torch.Tensor) and value.is_floating_point() and _columns(value) == columns
        return _guarded(value) if is_split else value  # type: ignore[arg-type]

    def after_forward(_module: nn.Module, _args: object, output: object) -> object:
        if isinstance(output, MutableMapping) and "logits" in output:
            output["logits"] = guard(output["logits"])
        elif isinstance(output, tuple) and type(output) is tuple:
            return tuple(guard(item) for item in output)
        elif isinstance(output, torch.Tensor):
            return guard(output)
        elif hasattr(output, "logits"):
            output.logits = guard(output.logits)
        return output

    def before_forward(_module: nn.Module, _args: object, arguments: dict[str, object]) -> None:
        if arguments.get("labels") is not None:
            raise ConfigError(
                f"labels= under tp with split_vocabulary=True: each rank has {columns} columns of the vocabulary "
                "alone, of which the model would compute its loss; call it without, and strategy.loss(logits, targets) "
                "with targets[:, t] = labels[:, t + 1], or leave split_vocabulary out"
            )

    if is_transformers(module):
        module.register_forward_pre_hook(before_forward, with_kwargs=True)
    module.register_forward_hook(after_forward)
