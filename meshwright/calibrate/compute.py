"""Measures the computations of one rank: matrix products, attention, other operations, the optimizer's update."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from meshwright.calibrate.clock import DeviceTimer
from meshwright.cluster.calibration import FORMS
from meshwright.parallel.block_codec import BlockCodec, WeightBlocks, WeightStore
from meshwright.parallel.triton_kernels import load_kernels
from meshwright.spec.compression import FORMATS
from meshwright.torch_compat.tensors import fused_adamw_, run_backward
from meshwright.train.loss import cross_entropy_sums

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch's data types by their names in layouts."""
WIDTH = 512
"""Features of normalisations and softmax."""
VOCABULARY = 4096
"""Classes of the loss, rows of the embedding."""
COLD_BYTES = 1 << 25
"""Bytes that a core reads before it uses an operand again. In a training step, too, most operands were written long
before and are no longer in the core's own cache."""
DEVICE_COLD_BYTES = 1 << 28
"""The same on a GPU: five times the last-level cache of an H100 of 50 MB."""
MAX_OPERAND_SETS = 64
"""Most sets of operands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GridSizes:
    """Sizes that are measured; every table is a full grid over them."""

    tokens: tuple[int, ...]
    """Rows of matrix products."""
    widths: tuple[int, ...]
    """Their columns and contracted dims."""
    sequences: tuple[int, ...]
    """Tokens of attention."""
    heads: tuple[int, ...]
    """Sequences x heads of attention."""
    head_sizes: tuple[int, ...]
    """Features of a head."""
    elements: tuple[int, ...]
    """Elements of other operations and of the optimizer."""
    messages: tuple[int, ...]
    """Bytes of collectives."""
    dtypes: tuple[str, ...]
    """Data types; those after the first, and one rank alone, are measured at fewer sizes."""
    window_s: float
    """Least seconds of a measurement."""
    passes: int = 1
    """Number of measurements with the first data type; the fastest of each counts."""
    heat_s: float = 0.0
    """Seconds that a GPU works before the first measurement."""
    updated: tuple[int, ...] = ()
    """Elements of the optimizer's update beside `elements`."""

    def thinned(self) -> GridSizes:
        """Returns every second size, from the first on.

        A GPU keeps all elements, of which few take it a launch, and all tokens, of which few leave it idle: what lies
        between two sizes that are far apart isn't between their rates.
        """
        fields = ["widths", "sequences", "heads", "head_sizes", *(() if self.heat_s else ("tokens", "elements"))]
        return dataclasses.replace(self, **{name: getattr(self, name)[::2] for name in fields})  # type: ignore[arg-type]


CPU = GridSizes(
    tokens=(16, 128, 512, 2048),
    widths=(32, 128, 512, 2048),
    sequences=(64, 256, 1024),
    heads=(4,),
    head_sizes=(32, 128),
    elements=(1024, 16384, 131072, 524288, 4194304),
    messages=(1024, 16384, 262144, 1048576, 4194304, 33554432),
    dtypes=("float32", "bf16"),
    window_s=0.02,
    passes=1,
)
"""Sizes for processor cores."""
GPU = GridSizes(
    tokens=(128, 1024, 4096, 16384),
    widths=(256, 1024, 2048, 4096, 8192, 16384),
    sequences=(512, 2048, 8192),
    # Fewer leave some of the device idle.
    heads=(128, 8),
    head_sizes=(64, 128),
    elements=(16384, 262144, 2097152, 16777216, 134217728),
    messages=(16384, 262144, 4194304, 67108864, 536870912),
    dtypes=("bf16", "float32"),
    window_s=0.003,
    heat_s=1.0,
    updated=(1 << 28,),
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
"""Fields of a quick calibration of a few seconds, for a first impression and for tests."""
QUICK_GPU = {
    "tokens": (512, 4096, 16384),
    "widths": (1024, 4096, 8192),
    "sequences": (1024, 8192),
    "heads": (128, 16),
    "head_sizes": (64, 128),
    "elements": (16384, 2097152, 67108864),
    "messages": (16384, 4194304, 268435456),
    "window_s": 0.002,
    "heat_s": 0.5,
}
"""The same on a GPU: fewer sizes, yet none so small that plans would take the device for a slow one."""
MOST_ROUNDED = 1 << 24
"""Most elements that are rounded: their rate is that of any larger number."""


def matmuls(sizes: GridSizes, dtype: str, clock: DeviceTimer) -> Iterator[tuple[Any, ...]]:
    """Yields (form, m, n, k, seconds) of a linear layer's matrix products, forward and backward.

    A product is (m, k) x (k, n) of ``dtype``; `FORMS` says which operand is transposed.
    """
    torch_dtype, device = DTYPES[dtype], clock.device
    for form in FORMS:
        rows, contracted = (sizes.widths, sizes.tokens) if form == "tn" else (sizes.tokens, sizes.widths)
        for m, n, k in itertools.product(rows, sizes.widths, contracted):
            products = []
            for _ in range(_operand_sets(m * k + k * n + m * n, torch_dtype, device)):
                operand_a = (
                    _random_tensor((k, m), torch_dtype, device).t()
                    if form == "tn"
                    else _random_tensor((m, k), torch_dtype, device)
                )
                operand_b = (
                    _random_tensor((n, k), torch_dtype, device).t()
                    if form == "nt"
                    else _random_tensor((k, n), torch_dtype, device)
                )
                result = torch.empty(m, n, dtype=torch_dtype, device=device)
                products.append(
                    lambda operand_a=operand_a, operand_b=operand_b, result=result: torch.mm(
                        operand_a, operand_b, out=result
                    )
                )  # type: ignore[misc]
            yield form, m, n, k, clock.seconds(_cycle(products))


def attentions(sizes: GridSizes, dtype: str, clock: DeviceTimer) -> Iterator[tuple[Any, ...]]:
    """Yields (rows, sequence, head size, forward seconds, backward seconds) of causal attention.

    Query, key and value are (1, rows, sequence, head size) of ``dtype``.
    """
    torch_dtype = DTYPES[dtype]
    for rows, sequence, size in itertools.product(sizes.heads, sizes.sequences, sizes.head_sizes):
        q, k, v = (
            _random_tensor((1, rows, sequence, size), torch_dtype, clock.device).requires_grad_() for _ in range(3)
        )

        def forward(q: Any = q, k: Any = k, v: Any = v) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        # The backward is timed by itself, over one recorded graph.
        forward_s = clock.seconds(forward)
        yield rows, sequence, size, forward_s, clock.seconds(_backward_of(forward(), (q, k, v)))


def operations(sizes: GridSizes, dtype: str, clock: DeviceTimer) -> Iterator[tuple[Any, ...]]:
    """Yields (operation, elements, seconds); a gradient has its operation's name with ``_backward``."""
    torch_dtype, device = DTYPES[dtype], clock.device
    for count in sizes.elements:
        operand_pairs = [
            (_random_tensor((count,), torch_dtype, device), _random_tensor((count,), torch_dtype, device))
            for _ in range(_operand_sets(2 * count, torch_dtype, device))
        ]
        # Row-wise operations (softmax, sums) run over WIDTH features.
        rows = [(x.view(-1, min(WIDTH, count)), y) for x, y in operand_pairs]
        for name, binary in PAIRED.items():
            yield name, count, clock.seconds(_cycle([functools.partial(binary, x, y) for x, y in operand_pairs]))
        for name, unary in SINGLE.items():
            yield name, count, clock.seconds(_cycle([functools.partial(unary, x) for x, _ in rows]))
        for name, work, inputs in _differentiable(count, torch_dtype, device):
            yield name, count, clock.seconds(work)
            yield f"{name}_backward", count, clock.seconds(_backward_of(work(), inputs))


PAIRED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "copy": lambda x, y: y.copy_(x),
    "add": torch.add,
    "mul": torch.mul,
}
"""Operations of two tensors (n,), by their names in the tables."""
SINGLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "tanh": torch.tanh,
    "pow": lambda x: torch.pow(x, 3.0),
    "sum": lambda x: x.sum(-1),
    "fill": lambda x: x.fill_(1.0),
}
"""Operations of one tensor (n / `WIDTH`, `WIDTH`)."""


def _operand_sets(elements: int, torch_dtype: torch.dtype, device: torch.device) -> int:
    """Returns the number of operand sets to cycle through, so that each is cold in cache when its turn comes."""
    cold_bytes = COLD_BYTES if device.type == "cpu" else DEVICE_COLD_BYTES
    # Enough sets to exceed the caches before an operand is used again.
    return max(1, min(MAX_OPERAND_SETS, cold_bytes // (elements * torch_dtype.itemsize)))


def _cycle(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Returns a function that runs the next of the calls each time, in a cycle."""
    if len(calls) == 1:
        return calls[0]
    # Cycling through sets keeps operands cold.
    next_call = itertools.cycle(calls).__next__
    return lambda: next_call()()


def _differentiable(
    count: int, torch_dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]]:
    """Yields a transformer's operations on ``count`` elements: name, call, and inputs of its gradient."""
    activations = _random_tensor((max(1, count // WIDTH), min(WIDTH, count)), torch_dtype, device).requires_grad_()
    weight = _random_tensor(activations.shape[-1:], torch_dtype, device).requires_grad_()
    table = _random_tensor((VOCABULARY, activations.shape[1]), torch_dtype, device).requires_grad_()
    logits = _random_tensor((max(1, count // VOCABULARY), min(VOCABULARY, count)), torch_dtype, device).requires_grad_()
    index = torch.randint(VOCABULARY, (len(activations),), device=device)
    # Random classes, one for each row of logits.
    target = torch.randint(logits.shape[1], (len(logits),), device=device)
    yield "gelu", lambda: F.gelu(activations), (activations,)
    yield "silu", lambda: F.silu(activations), (activations,)
    yield "layer_norm", lambda: F.layer_norm(activations, weight.shape, weight, weight), (activations, weight)
    yield (
        "rms_norm",
        lambda: weight * (activations * torch.rsqrt(activations.pow(2).mean(-1, keepdim=True) + 1e-6)),
        (activations, weight),
    )
    yield "softmax", lambda: F.softmax(activations, dim=-1), (activations,)
    yield "cross_entropy", lambda: F.cross_entropy(logits.float(), target, reduction="sum"), (logits,)
    yield "loss", lambda: cross_entropy_sums(logits.view_as(logits), target, 1.0)[0], (logits,)
    yield "embedding", lambda: F.embedding(index, table), (table,)


def roundings(sizes: GridSizes, clock: DeviceTimer) -> Iterator[tuple[str, int, float]]:
    """Yields (operation, elements, seconds) of rounding float32 gradients and decoding them, as a run does it.

    Of each number format: ``round`` by random numbers, ``nearest``, ``decode``, and ``book`` for the error of a sum.
    """
    for count in (size for size in sizes.elements if size <= MOST_ROUNDED):
        operand_sets = _operand_sets(2 * count, torch.float32, clock.device)
        for name in FORMATS:
            works = [_rounding_works(name, count, clock.device) for _ in range(operand_sets)]
            for operation in works[0]:
                yield f"{operation}_{name}", count, clock.seconds(_cycle([work[operation] for work in works]))


def _rounding_works(name: str, count: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Returns what rounding to a number format is timed by, over operands of their own."""
    codec, weights = BlockCodec(name, FORMATS[name]), WeightBlocks(("calibrate",), (count,))
    source, target = (
        WeightStore(weights, (_random_tensor((count,), torch.float32, device),), torch.float32) for _ in range(2)
    )

    def draw(first: int, blocks: int) -> torch.Tensor:
        return weights.fractions("0,0,0.0", first, blocks, device)

    encoded = codec.encode_store(source, weights.count, None)
    total = codec.sum_terms((encoded,), torch.float32)
    return {
        "round": functools.partial(codec.encode_store, source, weights.count, draw),
        "nearest": functools.partial(codec.encode_store, source, weights.count, None),
        "decode": functools.partial(codec.decode_to_store, target, encoded),
        "book": functools.partial(codec.rounding_error, source, 0, encoded, total, encoded, 1),
    }


def optimizer(sizes: GridSizes, clock: DeviceTimer) -> Iterator[tuple[int, float]]:
    """Yields (elements, seconds) of one fused AdamW update in float32, as training runs it."""
    kernels = load_kernels("adamw") if clock.device.type == "cuda" else None
    for count in (*sizes.elements, *(size for size in sizes.updated if _has_room(16 * size, clock.device))):
        # fp32 weight, gradient and both moments; absolute values, since a second moment is never negative.
        weight, gradient, first_moment, second_moment = (
            _random_tensor((count,), torch.float32, clock.device).abs_() for _ in range(4)
        )
        step = torch.ones((), device=clock.device)
        if kernels is not None:
            tensors = kernels.Tensors(
                weight=weight, exp_avg=first_moment, exp_avg_sq=second_moment, copy=None, decays=True
            )
            betas = ADAMW["beta1"], ADAMW["beta2"]
            own = kernels.Update([tensors], step, betas, ADAMW["eps"], ADAMW["weight_decay"])
            factor = torch.ones((), dtype=torch.float64, device=clock.device)
            yield count, clock.seconds(functools.partial(own.run, [gradient], ADAMW["lr"], factor))
            continue
        lists: tuple[Any, ...] = ([weight], [gradient], [first_moment], [second_moment], [], [step])
        # The kernel itself: the first step of the optimizer's class imports torch's compiler, which costs seconds.
        yield count, clock.seconds(functools.partial(fused_adamw_, *lists, **ADAMW))


def _has_room(size: int, device: torch.device) -> bool:
    """Whether half of a GPU's free memory holds ``size`` bytes."""
    return 2 * size < torch.cuda.mem_get_info(device)[0]


ADAMW: dict[str, Any] = {
    **{"lr": 1e-6, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8},
    **{"amsgrad": False, "maximize": False},
}
"""Arguments of a timed update; the fused kernel requires all."""


def launch_s(clock: DeviceTimer) -> float:
    """Returns host seconds of one small operation."""
    x = _random_tensor((16,), torch.float32, clock.device)
    measure = clock.launch_seconds if clock.device.type == "cuda" else clock.seconds
    return measure(lambda: torch.add(x, x))


def _random_tensor(shape: Any, torch_dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(torch_dtype)


def _backward_of(result: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    """Returns a function that runs the backward of ``result`` by the engine: autograd.grad would import sympy."""
    # retain_graph is true: the same graph is run again and again.
    upstream = torch.ones_like(result)
    return lambda: run_backward(
        (result,), (upstream,), True, False, inputs, allow_unreachable=False, accumulate_grad=False
    )
