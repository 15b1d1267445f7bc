"""The variable-length attention kernel of torch, whose operator is private and whose signature grew."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from meshwright.torch_compat import PrivateName
from meshwright.torch_compat.tensors import TorchFunction

PRIVATE_NAMES = (
    PrivateName(
        "torch.nn.attention.varlen:torch.ops.torch_attn._varlen_attn",
        "the operator behind `varlen_attn`, which selective recompute keeps",
    ),
    PrivateName(
        "torch._dynamo:maybe_mark_dynamic", "sizes that differ from batch to batch and need no compilation of their own"
    ),
)

VARLEN_OPERATOR: TorchFunction = torch.ops.torch_attn._varlen_attn
"""Operator behind `varlen_attn`."""
# torch 2.11 takes fewer key heads as they are; later versions want to be asked.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def varlen_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    left: int,
    scale: float,
) -> torch.Tensor:
    """Computes causal attention within runs of tokens by torch's kernel for CUDA.

    Args:
        query: (T, H, E) bf16 or fp16, E a multiple of 8 up to 256.
        key: (T, K, E), K dividing H.
        value: (T, K, E).
        starts: (n + 1,) int32, first token of each run, then T.
        longest: tokens of the longest run.
        left: number of tokens before its own that a query sees; -1 for all.
        scale: factor on the scores.

    Returns:
        (T, H, E).
    """
    output: torch.Tensor = varlen_attn(
        query, key, value, starts, starts, longest, longest, scale=scale, window_size=(left, 0), **_GROUPED
    )
    return output


def mark_dynamic_sizes(tensor: torch.Tensor, *dims: int) -> None:
    """Tells the compiler that some sizes of an input, of any shape, change from call to call."""
    # By name: importing the compiler takes seconds, and only a compiled run has done so.
    compiler: Any = importlib.import_module("torch._dynamo")
    compiler.maybe_mark_dynamic(tensor, list(dims))
