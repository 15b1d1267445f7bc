"""The fused attention operators of torch that give the log-sum-exp, which merging partial attention needs.

`torch.nn.attention.varlen` gives it forward, but its backward takes no log-sum-exp over other keys than its own.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

from meshwright.torch_compat import PrivateName
from meshwright.torch_compat.tensors import TorchFunction

PRIVATE_NAMES = (
    PrivateName("torch:_fused_sdp_choice", "which kernel torch's own attention would take"),
    *(
        PrivateName(f"torch:ops.aten.{name}", "attention of some keys with its log-sum-exp; nothing public has both")
        for name in (
            *("_flash_attention_forward", "_flash_attention_backward"),
            *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"),
            *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
        )
    ),
)

Window = tuple[int, int]
"""Tokens to the left and right of its own that a query sees, aligned at the last ones; -1 for all."""
_FORWARD: TorchFunction = torch.ops.aten._flash_attention_forward
_BACKWARD: TorchFunction = torch.ops.aten._flash_attention_backward
_CUDNN_FORWARD: TorchFunction = torch.ops.aten._scaled_dot_product_cudnn_attention
_CUDNN_BACKWARD: TorchFunction = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
_CPU_FORWARD: TorchFunction = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD: TorchFunction = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    window: Window,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention within segments by FlashAttention, on CUDA.

    Args:
        query: (T, H, E) bf16 or fp16, E a multiple of 8 up to 256.
        key: (U, K, E), K dividing H.
        value: (U, K, E).
        starts: first tokens of the segments of queries and of keys, (n + 1,) int32 each.
        longest: tokens of the longest segments.
        window: of each segment.
        scale: factor on the scores.

    Returns:
        Output (T, H, E) and log-sum-exp (H, T) fp32.
    """
    causal = window == (-1, 0)
    output, log_sums, *_ = _FORWARD(
        query, key, value, *starts, *longest, 0.0, causal, False, scale=scale,
        window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip
    return output, log_sums


def flash_backward(
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    starts: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    window: Window,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value; ``output`` and ``log_sums`` may be over more keys than these.

    Args:
        upstream: gradient of the output, (T, H, E).
        query: as `flash_forward`.
        key: as `flash_forward`.
        value: as `flash_forward`.
        output: (T, H, E).
        log_sums: (H, T) fp32, contiguous.
        starts: as `flash_forward`.
        longest: as `flash_forward`.
        window: as `flash_forward`.
        scale: as `flash_forward`.
    """
    # Dropout's state, which without dropout nobody reads.
    rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _BACKWARD(
        upstream, query, key, value, output, log_sums, *starts, *longest, 0.0, window == (-1, 0), rng_state,
        torch.empty(0, device=query.device), scale=scale, window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip
    return grads


def takes_cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> bool:
    """Returns whether torch itself would take cuDNN's attention for these, as it does on Hopper and later.

    On one H100, (4, 32, 8192, 128) with 8 key heads in bf16, causal, forward and backward: 15.3 ms where
    FlashAttention-2 takes 25.0 (`tests/gpu/parts/kernels.py`).

    Args:
        query: (B, H, L, E) on CUDA.
        key: (B, K, M, E).
        value: (B, K, M, E).
        causal: whether query i sees keys up to i.
    """
    # Whatever the call sees of gradients: the kernel must have both passes.
    operands = [x.detach().requires_grad_() for x in (query, key, value)]
    choice = torch._fused_sdp_choice(*operands, None, 0.0, causal, enable_gqa=query.shape[1] != key.shape[1])
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


def cudnn_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention by cuDNN.

    Args:
        query: (B, H, L, E) bf16 or fp16.
        key: (B, K, M, E), K dividing H.
        value: (B, K, M, E).
        causal: whether query i sees keys up to i; L = M.
        scale: factor on the scores.

    Returns:
        Output (B, H, L, E) and log-sum-exp (B, H, L) fp32.
    """
    output, log_sums, *_ = _CUDNN_FORWARD(query, key, value, None, True, 0.0, causal, False, scale=scale)
    return output, log_sums.view(log_sums.shape[:3])


def cudnn_backward(
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value; ``output`` and ``log_sums`` may be over more keys than these.

    Args:
        upstream: gradient of the output, (B, H, L, E).
        query: as `cudnn_forward`.
        key: as `cudnn_forward`.
        value: as `cudnn_forward`.
        output: (B, H, L, E).
        log_sums: (B, H, L) fp32.
        causal: as `cudnn_forward`.
        scale: as `cudnn_forward`.
    """
    # Dropout's state, which without dropout nobody reads.
    unread = torch.zeros((), dtype=torch.int64, device=query.device)
    longest = query.shape[2], key.shape[2]
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _CUDNN_BACKWARD(
        upstream, query, key, value, output, log_sums.contiguous().unsqueeze(-1), unread, unread, None, None, None,
        *longest, 0.0, causal, scale=scale,
    )  # fmt: skip
    return grads


def cpu_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention by the CPU's fused kernel.

    Args:
        query: (B, H, L, E) of any floating type.
        key: (B, K, M, E), K dividing H.
        value: (B, K, M, E).
        causal: whether query i sees keys up to i; L = M.
        mask: (L, M) added to the scores.
        scale: factor on the scores.

    Returns:
        Output (B, H, L, E) and log-sum-exp (B, H, L), in float32 or wider.
    """
    output, log_sums = _CPU_FORWARD(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    return output, log_sums


def cpu_backward(
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value; ``output`` and ``log_sums`` may be over more keys than these.

    Args:
        upstream: gradient of the output, (B, H, L, E).
        query: as `cpu_forward`.
        key: as `cpu_forward`.
        value: as `cpu_forward`.
        output: (B, H, L, E).
        log_sums: (B, H, L).
        causal: as `cpu_forward`.
        mask: as `cpu_forward`.
        scale: as `cpu_forward`.
    """
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _CPU_BACKWARD(
        upstream, query, key, value, output, log_sums, 0.0, causal, attn_mask=mask, scale=scale
    )
    return grads
