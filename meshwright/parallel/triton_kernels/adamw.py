"""AdamW over all tensors of a rank in one launch, which reads each number once and writes each once.

A weight costs 28 bytes of traffic where its gradient is float32: weight, gradient and both moments are read, all but
the gradient written. torch's kernel writes the gradient too as it scales it. A gradient in bf16 or fp16 and a copy of
the weight in that type, written beside it, cost 2 bytes each.
Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (ICLR 2019), algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

CHUNK = 2048
"""Elements of a program: 16 for each of 128 threads."""
WARPS = 4
COLUMNS = 6
"""Numbers of a tensor in the table: addresses of weight, moments and copy; its elements; whether it decays."""
ALIGNMENT = 16
"""Bytes of a thread's widest load, by which all addresses divide or none is taken to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensors:
    """One weight's tensors on this rank, contiguous and of equal shapes."""

    weight: torch.Tensor
    """(n,) float32."""
    exp_avg: torch.Tensor
    """(n,) float32."""
    exp_avg_sq: torch.Tensor
    """(n,) float32."""
    copy: torch.Tensor | None
    """(n,) bf16 or fp16, written with the weight's new values; None for none."""
    decays: bool


@triton.jit
def _prepare(factor, logs, steps, numbers):  # type: ignore[no-untyped-def]
    """Writes a step's numbers: whether it counts, factor, 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t); counts it."""
    scale = tl.load(factor)
    counts = tl.abs(scale) < float("inf")
    step = tl.load(steps) + 1.0
    # In float64: 1 - 0.999 has lost three digits of float32's seven.
    time = step.to(tl.float64)
    first, second = 1.0 - tl.exp(time * tl.load(logs)), 1.0 - tl.exp(time * tl.load(logs + 1))
    tl.store(numbers, tl.where(counts, 1.0, 0.0))
    tl.store(numbers + 1, scale.to(tl.float32))
    tl.store(numbers + 2, (1.0 / first).to(tl.float32))
    tl.store(numbers + 3, (1.0 / tl.sqrt(second)).to(tl.float32))
    tl.store(steps, tl.where(counts, step, step - 1.0))


@triton.jit
def _update_chunk(  # type: ignore[no-untyped-def]
    weight, gradient, exp_avg, exp_avg_sq, copy, left, scale, step_size, root, shrink, beta1, rest1, beta2, rest2, eps,
    CHUNK: tl.constexpr, MASKED: tl.constexpr, HAS_COPY: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, CHUNK)
    # A mask would keep the compiler from loads of several elements.
    mask = place < left if MASKED else None
    grad = tl.load(gradient + place, mask=mask).to(tl.float32) * scale
    first = beta1 * tl.load(exp_avg + place, mask=mask) + rest1 * grad
    second = beta2 * tl.load(exp_avg_sq + place, mask=mask) + rest2 * (grad * grad)
    x = tl.load(weight + place, mask=mask)
    x = x - shrink * x
    x = x - step_size * (first / (tl.sqrt_rn(second) * root + eps))
    tl.store(weight + place, x, mask=mask)
    tl.store(exp_avg + place, first, mask=mask)
    tl.store(exp_avg_sq + place, second, mask=mask)
    if HAS_COPY:
        tl.store(copy + place, x.to(copy.dtype.element_ty), mask=mask)


@triton.jit
def _update_by_type(  # type: ignore[no-untyped-def]
    weight, half, wide, is_half, exp_avg, exp_avg_sq, copy, left, scale, step_size, root, shrink,
    beta1, rest1, beta2, rest2, eps,
    CHUNK: tl.constexpr, MASKED: tl.constexpr, HAS_COPY: tl.constexpr,
):  # fmt: skip
    if is_half != 0:
        _update_chunk(
            weight, half, exp_avg, exp_avg_sq, copy, left, scale, step_size, root, shrink,
            beta1, rest1, beta2, rest2, eps, CHUNK, MASKED, HAS_COPY,
        )  # fmt: skip
    else:
        _update_chunk(
            weight, wide, exp_avg, exp_avg_sq, copy, left, scale, step_size, root, shrink,
            beta1, rest1, beta2, rest2, eps, CHUNK, MASKED, HAS_COPY,
        )  # fmt: skip


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    table, gradients, chunks, numbers, lr, decay, beta1, rest1, beta2, rest2, eps,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, HAS_COPY: tl.constexpr, IS_BF16: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor = tl.load(chunks + 2 * program)
    # 64 bits: a tensor may have more than 2^31 elements.
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    row = table + tensor * COLUMNS
    weight = tl.load(row).to(tl.pointer_type(tl.float32)) + start
    exp_avg = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + start
    exp_avg_sq = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + start
    address, is_half = tl.load(gradients + 2 * tensor), tl.load(gradients + 2 * tensor + 1)
    wide = address.to(tl.pointer_type(tl.float32)) + start
    if IS_BF16:
        half = address.to(tl.pointer_type(tl.bfloat16)) + start
        copy = tl.load(row + 3).to(tl.pointer_type(tl.bfloat16)) + start
    else:
        half = address.to(tl.pointer_type(tl.float16)) + start
        copy = tl.load(row + 3).to(tl.pointer_type(tl.float16)) + start
    if ALIGNED:
        weight, exp_avg, exp_avg_sq = (
            tl.multiple_of(weight, 16), tl.multiple_of(exp_avg, 16), tl.multiple_of(exp_avg_sq, 16),
        )  # fmt: skip
        # Of 2 bytes as many elements at a time as of 4: else values would change threads between load and store.
        wide, half, copy = tl.multiple_of(wide, 16), tl.multiple_of(half, 8), tl.multiple_of(copy, 8)
    left = tl.load(row + 4) - start
    shrink = tl.load(row + 5).to(tl.float32) * decay * lr
    # A step that doesn't count changes nothing.
    if tl.load(numbers) != 0.0:
        scale, step_size, root = tl.load(numbers + 1), lr * tl.load(numbers + 2), tl.load(numbers + 3)
        if left >= CHUNK:
            _update_by_type(
                weight, half, wide, is_half, exp_avg, exp_avg_sq, copy, left, scale, step_size, root, shrink,
                beta1, rest1, beta2, rest2, eps, CHUNK, False, HAS_COPY,
            )  # fmt: skip
        else:
            _update_by_type(
                weight, half, wide, is_half, exp_avg, exp_avg_sq, copy, left, scale, step_size, root, shrink,
                beta1, rest1, beta2, rest2, eps, CHUNK, True, HAS_COPY,
            )  # fmt: skip


class Update:
    """AdamW of some tensors, whose addresses lie in a table on their device.

    Args:
        tensors: of each weight, all with a copy of one type or all without.
        steps: () float32, updates done; the kernel counts them.
        betas: of the moments.
        eps: added to the root of the second moment.
        decay: weight decay of those that decay.
    """

    def __init__(
        self, tensors: Sequence[Tensors], steps: torch.Tensor, betas: tuple[float, float], eps: float, decay: float
    ) -> None:
        self._device, self._steps, self._betas, self._eps, self._decay = steps.device, steps, betas, eps, float(decay)
        self._copy_dtype = tensors[0].copy.dtype if tensors[0].copy is not None else None
        # Addresses count while the tensors live.
        self._tensors = tuple(tensors)
        rows = [
            [item.weight.data_ptr(), item.exp_avg.data_ptr(), item.exp_avg_sq.data_ptr(),
             item.copy.data_ptr() if item.copy is not None else 0, item.weight.numel(), int(item.decays)]
            for item in tensors
        ]  # fmt: skip
        self._are_aligned = all(address % ALIGNMENT == 0 for row in rows for address in row[:4])
        self._table = torch.tensor(rows, dtype=torch.int64, device=self._device)
        counts = torch.tensor([triton.cdiv(item.weight.numel(), CHUNK) for item in tensors])
        owners = torch.repeat_interleave(counts)
        firsts = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
        self._chunks = torch.stack([owners, firsts], dim=1).to(device=self._device, dtype=torch.int32)
        logs = [math.log(beta) if beta else -math.inf for beta in betas]
        self._logs = torch.tensor(logs, dtype=torch.float64, device=self._device)
        self._numbers = torch.empty(4, dtype=torch.float32, device=self._device)
        self._gradient_rows: list[int] = []
        self._gradients = torch.empty(0, dtype=torch.int64, device=self._device)

    def run(self, gradients: Sequence[torch.Tensor], lr: float, factor: torch.Tensor) -> None:
        """Updates the weights with ``factor`` x their gradients; a factor that isn't finite changes nothing.

        Args:
            gradients: of each weight, contiguous, (n,) float32 or of the copy's type.
            lr: learning rate.
            factor: () float64 on the device.
        """
        self._set_gradients(gradients)
        is_aligned = self._are_aligned and all(address % ALIGNMENT == 0 for address in self._gradient_rows[::2])
        first, second = self._betas
        _prepare[(1,)](factor, self._logs, self._steps, self._numbers, num_warps=1)
        _update[(len(self._chunks),)](
            self._table, self._gradients, self._chunks, self._numbers,
            float(lr), self._decay, first, 1.0 - first, second, 1.0 - second, self._eps,
            CHUNK=CHUNK, COLUMNS=COLUMNS, ALIGNED=is_aligned, HAS_COPY=self._copy_dtype is not None,
            IS_BF16=self._copy_dtype is not torch.float16, num_warps=WARPS,
        )  # fmt: skip

    def _set_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """Puts the gradients' addresses and types on the device; mostly the allocator gave those of the last step."""
        rows = [number for grad in gradients for number in (grad.data_ptr(), int(grad.dtype is not torch.float32))]
        if rows != self._gradient_rows:
            host = torch.tensor(rows, dtype=torch.int64, pin_memory=self._device.type == "cuda")
            self._gradient_rows, self._gradients = rows, host.to(self._device, non_blocking=True)


def probe() -> None:
    """Updates one weight on the current GPU; fails where Triton doesn't run."""
    weight, *others = (torch.zeros(1, device="cuda") for _ in range(4))
    tensors = Tensors(weight=weight, exp_avg=others[0], exp_avg_sq=others[1], copy=None, decays=True)
    update = Update([tensors], torch.zeros((), device="cuda"), (0.9, 0.999), 1e-8, 0.1)
    update.run([others[2]], 0.1, torch.ones((), dtype=torch.float64, device="cuda"))
