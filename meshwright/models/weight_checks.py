"""Refuses weights that no layout trains: computed, sparse, complex or hooked ones, and gradients that are sparse."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.shared_memory import shared_memory_refusal
from meshwright.torch_compat.tensors import tree_leaves

SPARSE = (
    "its code makes a sparse tensor, and shards and the optimizer hold dense weights; nearest that works: a dense "
    "weight that forward multiplies by a mask in a buffer"
)
"""Why a model with sparse weights is refused."""


def makes_sparse_tensor(error: Exception) -> bool:
    """Whether code failed on the meta device as it made a sparse tensor, which isn't there."""
    return re.search(r"aten::\w*sparse|Sparse\w*TensorImpl", str(error)) is not None


def reads_values(error: Exception) -> bool:
    """Whether code failed on the meta device as it read values, or put them beside real ones of a loaded model."""
    return re.search(r"meta tensor|(on|device) meta|meta device|incompatible tensor type", str(error)) is not None


def sparse_gradient_refusal(module: nn.Module) -> str:
    """Returns why the gradient of a module's table of rows can't be summed over ranks; empty for none such."""
    for path, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse and child.weight.requires_grad:
            return (
                f"'{path}' has sparse=True, and ranks sum dense gradients, which the optimizer takes; nearest that "
                "works: sparse=False"
            )
    return ""


def check_weights(module: nn.Module, model: str) -> None:
    """Refuses what neither the optimizer nor a shard can hold.

    Args:
        module: as its code made it, on any device.
        model: its name for the message.

    Raises:
        ConfigError: with the weight, and the nearest that works.
    """
    if reason := next(_refusals(module), ""):
        raise ConfigError(f"model '{model}': {reason}")


def _refusals(module: nn.Module) -> Iterator[str]:
    """Yields why weights can't be trained."""
    # Source: peft 0.21, peft_model.py, PeftModelForCausalLM.forward.
    for config in (getattr(module, "peft_config", None) or {}).values():
        if getattr(config, "is_prompt_learning", False):
            kind = getattr(config.peft_type, "value", config.peft_type)
            yield (
                f"peft's {kind} puts num_virtual_tokens = {config.num_virtual_tokens} learned positions into each row, "
                "so that its logits, or its keys, aren't of the row's tokens; nearest that works: adapters of the "
                "model's own layers, such as LoraConfig or IA3Config"
            )
    # Source: peft 0.21, tuners/adalora/model.py and tuners/adamss/model.py.
    if callable(getattr(getattr(module, "base_model", None), "update_and_allocate", None)):
        kinds = [getattr(config.peft_type, "value", config.peft_type) for config in module.peft_config.values()]
        yield (
            f"peft's {kinds[0]} gives its ranks to the layers anew in update_and_allocate(step), which a loop calls "
            "between backward and the next step, with whole gradients; train would leave all of them as they begin; "
            "nearest that works: LoraConfig, with r or rank_pattern as AdaLoRA's target_r"
        )
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        for key, value in vars(child).items():
            if any(isinstance(item, torch.Tensor) and item.grad_fn is not None for item in tree_leaves(value)):
                yield (
                    f"'{prefix}{key}' is computed from weights while the model is made, as torch.nn.utils.weight_norm "
                    "does, and a copy of the model would still have it from the first weights; nearest that works: "
                    f"torch.nn.utils.parametrizations.weight_norm, or compute it in forward"
                )
        for key, weight in child._parameters.items():
            if weight is not None and weight.layout != torch.strided:
                yield f"the weight '{prefix}{key}' is sparse ({weight.layout}): {SPARSE}"
            if weight is not None and weight.is_complex():
                yield (
                    f"the weight '{prefix}{key}' is complex ({weight.dtype}), and shards and the optimizer hold real "
                    "ones; nearest that works: a real weight with a last dim of 2 that forward reads by "
                    "torch.view_as_complex"
                )
            if weight is not None and (weight._backward_hooks or weight._post_accumulate_grad_hooks):
                yield (
                    f"the weight '{prefix}{key}' has a hook on its gradient, and ranks hold shards or copies in its "
                    "place, which would lack it; nearest that works: a torch.autograd.Function in forward, "
                    "or a hook on a tensor that forward makes of the weight"
                )
    yield from (reason for find in (sparse_gradient_refusal, shared_memory_refusal) if (reason := find(module)))
