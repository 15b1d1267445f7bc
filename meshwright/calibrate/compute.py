"""What one rank computes: matrix products, attention, other operations, the optimizer's update."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional as F

from meshwright.calibrate.clock import DeviceTimer
from meshwright.cluster.calibration import FORMS
from meshwright.train.loss import cross_entropy_sums

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Data types by the names that layouts give them."""
WIDTH = 512
"""Features over which normalisations and softmax run."""
VOCABULARY = 4096
"""Classes of the loss, rows of the embedding."""
COLD_BYTES = 1 << 25
"""Bytes that processor cores go through before they meet an operand again: in a step most of what is read was put away
long before, and comes from beyond a core's own cache."""
MOST_SETS = 64
"""Sets of operands at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GridSizes:
    """What is measured; every table is a full grid."""

    tokens: tuple[int, ...]
    """Rows of matrix products."""
    widths: tuple[int, ...]
    """Their columns and lengths."""
    sequences: tuple[int, ...]
    """Tokens of attention."""
    heads: tuple[int, ...]
    """Sequences x heads of attention."""
    head_sizes: tuple[int, ...]
    """Features of a head."""
    elements: tuple[int, ...]
    """Of other operations and of the optimizer."""
    messages: tuple[int, ...]
    """Bytes of collectives."""
    dtypes: tuple[str, ...]
    """Data types; those after the first, and one rank alone, are measured at fewer sizes."""
    window_s: float
    """Least time for each figure."""
    passes: int = 1
    """How often all is measured with the first data type; the faster of each counts."""

    def fewer(self) -> GridSizes:
        """Returns every other size, the smallest among them."""
        names = ("tokens", "widths", "sequences", "heads", "head_sizes", "elements")
        return dataclasses.replace(self, **{name: getattr(self, name)[::2] for name in names})  # type: ignore[arg-type]


CPU = GridSizes(
    tokens=(16, 128, 512, 2048),
    widths=(32, 128, 512, 2048),
    sequences=(64, 256, 1024),
    heads=(4,),
    head_sizes=(32, 128),
    elements=(1024, 16384, 131072, 524288, 4194304),
    messages=(1024, 16384, 262144, 4194304, 33554432),
    dtypes=("float32", "bf16"),
    window_s=0.02,
    passes=1,
)
"""Sizes for processor cores."""
GPU = GridSizes(
    tokens=(128, 1024, 4096, 16384),
    widths=(256, 1024, 4096, 16384),
    sequences=(512, 2048, 8192),
    heads=(8, 32),
    head_sizes=(64, 128),
    elements=(16384, 1048576, 8388608, 67108864),
    messages=(16384, 262144, 4194304, 67108864, 536870912),
    dtypes=("bf16", "float32"),
    window_s=0.005,
)
"""Sizes for GPUs."""
QUICK = {
    "tokens": (64, 512),
    "widths": (64, 512),
    "sequences": (64, 256),
    "heads": (4,),
    "head_sizes": (64,),
    "elements": (1024, 65536),
    "messages": (1024, 65536, 1048576),
    "dtypes": ("float32",),
    "window_s": 0.004,
    "passes": 1,
}
"""What replaces the sizes of a quick calibration: a few seconds, for a first idea and for tests."""


def matmuls(sizes: GridSizes, dtype: str, clock: DeviceTimer) -> Iterator[tuple[Any, ...]]:
    """Yields (form, m, n, k, seconds) of the products that a linear layer and its gradients are."""
    kind, place = DTYPES[dtype], clock.device
    for form in FORMS:
        rows, sums = (sizes.widths, sizes.tokens) if form == "tn" else (sizes.tokens, sizes.widths)
        for m, n, k in itertools.product(rows, sizes.widths, sums):
            works = []
            for _ in range(_sets(m * k + k * n + m * n, kind, place)):
                a = _filled((k, m), kind, place).t() if form == "tn" else _filled((m, k), kind, place)
                b = _filled((n, k), kind, place).t() if form == "nt" else _filled((k, n), kind, place)
                out = torch.empty(m, n, dtype=kind, device=place)
                works.append(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]
            yield form, m, n, k, clock.seconds(_in_turn(works))


def attentions(sizes: GridSizes, dtype: str, clock: DeviceTimer) -> Iterator[tuple[Any, ...]]:
    """Yields (rows, sequence, head size, forward seconds, backward seconds) of causal attention."""
    kind = DTYPES[dtype]
    for rows, sequence, size in itertools.product(sizes.heads, sizes.sequences, sizes.head_sizes):
        q, k, v = (_filled((1, rows, sequence, size), kind, clock.device).requires_grad_() for _ in range(3))

        def forward(q: Any = q, k: Any = k, v: Any = v) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        ahead = clock.seconds(forward)
        yield rows, sequence, size, ahead, clock.seconds(_gradient(forward(), (q, k, v)))


def operations(sizes: GridSizes, dtype: str, clock: DeviceTimer) -> Iterator[tuple[Any, ...]]:
    """Yields (operation, elements, seconds), gradients under the operation's name with ``_backward``."""
    kind, place = DTYPES[dtype], clock.device
    for count in sizes.elements:
        pairs = [
            (_filled((count,), kind, place), _filled((count,), kind, place))
            for _ in range(_sets(2 * count, kind, place))
        ]
        rows = [(x.view(-1, min(WIDTH, count)), y) for x, y in pairs]
        for name, binary in PAIRED.items():
            yield name, count, clock.seconds(_in_turn([functools.partial(binary, x, y) for x, y in pairs]))
        for name, unary in SINGLE.items():
            yield name, count, clock.seconds(_in_turn([functools.partial(unary, x) for x, _ in rows]))
        for name, work, given in _differentiable(count, kind, place):
            yield name, count, clock.seconds(work)
            yield f"{name}_backward", count, clock.seconds(_gradient(work(), given))


PAIRED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "copy": lambda x, y: y.copy_(x),
    "add": torch.add,
    "mul": torch.mul,
}
"""Operations of two tensors, by the names that the tables have them under."""
SINGLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "tanh": torch.tanh,
    "pow": lambda x: torch.pow(x, 3.0),
    "sum": lambda x: x.sum(-1),
    "fill": lambda x: x.fill_(1.0),
}
"""Operations of one tensor (n / `WIDTH`, `WIDTH`)."""


def _sets(elements: int, kind: torch.dtype, place: torch.device) -> int:
    """Returns how many sets of operands of so many elements are measured in turn."""
    if place.type != "cpu":
        return 1
    return max(1, min(MOST_SETS, COLD_BYTES // (elements * kind.itemsize)))


def _in_turn(works: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Returns what does the next of some works at every call."""
    if len(works) == 1:
        return works[0]
    following = itertools.cycle(works).__next__
    return lambda: following()()


def _differentiable(
    count: int, kind: torch.dtype, place: torch.device
) -> Iterator[tuple[str, Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]]:
    """Yields operations of a transformer on ``count`` elements, with what their gradient is taken by."""
    wide = _filled((max(1, count // WIDTH), min(WIDTH, count)), kind, place).requires_grad_()
    weight = _filled(wide.shape[-1:], kind, place).requires_grad_()
    table = _filled((VOCABULARY, wide.shape[1]), kind, place).requires_grad_()
    logits = _filled((max(1, count // VOCABULARY), min(VOCABULARY, count)), kind, place).requires_grad_()
    index = torch.randint(VOCABULARY, (len(wide),), device=place)
    target = torch.randint(logits.shape[1], (len(logits),), device=place)
    yield "gelu", lambda: F.gelu(wide), (wide,)
    yield "silu", lambda: F.silu(wide), (wide,)
    yield "layer_norm", lambda: F.layer_norm(wide, weight.shape, weight, weight), (wide, weight)
    yield "rms_norm", lambda: weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)), (wide, weight)
    yield "softmax", lambda: F.softmax(wide, dim=-1), (wide,)
    yield "cross_entropy", lambda: F.cross_entropy(logits.float(), target, reduction="sum"), (logits,)
    yield "loss", lambda: cross_entropy_sums(logits.view_as(logits), target, 1.0)[0], (logits,)
    yield "embedding", lambda: F.embedding(index, table), (table,)


def optimizer(sizes: GridSizes, clock: DeviceTimer) -> Iterator[tuple[int, float]]:
    """Yields (elements, seconds) of one fused AdamW update in float32, as training runs it."""
    for count in sizes.elements:
        weight, gradient, first, second = ([_filled((count,), torch.float32, clock.device).abs_()] for _ in range(4))
        step = [torch.ones((), device=clock.device)]
        lists: tuple[Any, ...] = (weight, gradient, first, second, [], step)

        def update(lists: Any = lists) -> None:
            # The kernel itself: the optimizer's class brings in torch's compiler, for seconds, at its first step.
            torch._fused_adamw_(*lists, lr=1e-6, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, **_NO_MORE)

        yield count, clock.seconds(update)


_NO_MORE = {"amsgrad": False, "maximize": False}
"""What the fused kernel wants to be told."""


def launch_s(clock: DeviceTimer) -> float:
    """Returns host time of one small operation."""
    x = _filled((16,), torch.float32, clock.device)
    return clock.seconds(lambda: torch.add(x, x))


def _filled(shape: Any, kind: torch.dtype, place: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=place).to(kind)


def _gradient(result: torch.Tensor, given: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    """Returns what runs the backward of ``result``: the engine itself, as autograd.grad imports sympy for seconds."""
    upstream = torch.ones_like(result)
    return lambda: _engine_run_backward(
        (result,), (upstream,), True, False, given, allow_unreachable=False, accumulate_grad=False
    )
