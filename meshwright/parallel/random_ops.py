"""Replaces torch's functions that draw random numbers by the same functions over keyed numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from meshwright.errors import PlanError
from meshwright.torch_compat.tensors import TorchArgs, TorchFunction, TorchKwargs

DEAR = 1 << 26
"""Weights of attention (B H S S) beyond which backward makes them again, and a byte of each is kept instead of nine."""


class RandomSource(Protocol):
    """Where the numbers come from."""

    def dropout_mask(self, shape: Sequence[int], p: float, device: torch.device) -> torch.Tensor:
        """Returns ``shape`` bool: True where dropout of probability ``p`` keeps an element."""

    def drop(self, x: torch.Tensor, p: float, inplace: bool = False) -> torch.Tensor:
        """Returns ``x / (1 - p)``, of any shape, where dropout keeps an element, else 0; in ``x`` if ``inplace``."""
        return apply_dropout(x, self.dropout_mask(x.shape, p, x.device), p, inplace)

    def uniform(self, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Returns ``shape`` float64 numbers between 0 and 1."""

    def attention_dropout_mask(self, query: torch.Tensor, keys: int, p: float) -> torch.Tensor:
        """Returns what dropout keeps of the weights (B, H, queries, keys) of attention, bool."""


Replacement = Callable[[RandomSource, TorchFunction, TorchArgs, TorchKwargs], torch.Tensor]
"""Called in place of a function that draws: (numbers, function, its arguments) to the function's result."""


class RandomOpsMode(TorchFunctionMode):
    """Inside it, functions that draw random numbers get those of ``numbers``."""

    def __init__(self, numbers: RandomSource) -> None:
        super().__init__()
        self._numbers = numbers

    def __torch_function__(
        self,
        func: TorchFunction,
        types: Collection[type],
        args: TorchArgs = (),
        kwargs: TorchKwargs | None = None,
    ) -> object:
        """Replaces the functions that draw random numbers; torch calls this for each function."""
        replacement = _REPLACEMENTS.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(self._numbers, func, tuple(args), dict(kwargs or {}))


class _DropoutFunction(torch.autograd.Function):
    """Keeps one byte an element for backward, as dropout's own kernels do."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return (x * keep).mul_(scale)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (upstream[0] * ctx.saved_tensors[0]).mul_(ctx.scale), None, None


def apply_dropout(x: torch.Tensor, keep: torch.Tensor, p: float, inplace: bool = False) -> torch.Tensor:
    """Returns ``x / (1 - p)`` where ``keep``, of the shape of ``x``, is True, else 0."""
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    if inplace:
        return x.mul_(keep).mul_(scale)
    out: torch.Tensor = _DropoutFunction.apply(x, keep, scale)
    return out


def _dropout(numbers: RandomSource, func: TorchFunction, args: TorchArgs, kwargs: TorchKwargs) -> torch.Tensor:
    x, p, training, inplace = _arguments(args, kwargs, ("input", "p", "training", "inplace"), (None, 0.5, True, False))
    training = kwargs.get("train", training)
    if not training or not p or x.is_meta:
        out: torch.Tensor = func(*args, **kwargs)
        return out
    return numbers.drop(x, p, inplace or func is torch.dropout_)


def _feature_dropout(numbers: RandomSource, func: TorchFunction, args: TorchArgs, kwargs: TorchKwargs) -> torch.Tensor:
    """Drops full channels: one draw for each (B, C)."""
    x, p, training, inplace = _arguments(args, kwargs, ("input", "p", "training", "inplace"), (None, 0.5, True, False))
    training = kwargs.get("train", training)
    if not training or not p or x.is_meta:
        out: torch.Tensor = func(*args, **kwargs)
        return out
    # One draw for each (row, channel), broadcast over the dims behind.
    shape = (*x.shape[:2], *(1 for _ in x.shape[2:]))
    return apply_dropout(x, numbers.dropout_mask(shape, p, x.device), p, inplace)


def _attention(numbers: RandomSource, func: TorchFunction, args: TorchArgs, kwargs: TorchKwargs) -> torch.Tensor:
    """Computes attention with dropout unfused, since no fused kernel accepts a dropout mask."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    query, key, value, mask, p, causal = _arguments(args, kwargs, names, (None, None, None, None, 0.0, False))
    if not p or query.is_meta:
        out: torch.Tensor = func(*args, **kwargs)
        return out
    if query.dim() != 4:
        raise PlanError(f"attention with dropout over {tuple(query.shape)}; what works: (B, H, S, E)")
    # (B, H, queries, keys) bool, made before the recomputed region, so that backward sees the same draw.
    keep = numbers.attention_dropout_mask(query, key.shape[-2], p)
    if kwargs.get("enable_gqa"):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scale = kwargs.get("scale") or 1.0 / math.sqrt(query.shape[-1])
    if causal:
        mask = torch.ones(keep.shape[-2:], dtype=torch.bool, device=keep.device).tril()
    inputs = (query * scale, key, value, mask, keep, p)
    # Large ones are computed again in backward: the mask is kept, one byte a weight, and not the scores.
    if keep.numel() <= DEAR or not torch.is_grad_enabled():
        return _attention_with_mask(*inputs)
    output: torch.Tensor = checkpoint(_attention_with_mask, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output


def _attention_with_mask(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, keep: torch.Tensor, p: float
) -> torch.Tensor:
    scores = query @ key.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return apply_dropout(torch.softmax(scores, dim=-1), keep, p) @ value


def _draw_over_uniform(
    from_uniform: Callable[[torch.Tensor, torch.Tensor, TorchArgs, TorchKwargs], torch.Tensor],
) -> Replacement:
    """Returns the replacement of a function that draws a tensor: torch makes it, then keyed numbers overwrite it."""

    def draw(numbers: RandomSource, func: TorchFunction, args: TorchArgs, kwargs: TorchKwargs) -> torch.Tensor:
        out: torch.Tensor = func(*args, **kwargs)
        # Shapes alone are asked for: no number is drawn, and none is counted.
        if out.is_meta:
            return out
        if kwargs.get("generator") is not None:
            raise PlanError(f"{func.__name__} with a generator of its own can't be drawn by place; leave generator out")
        with torch.no_grad():
            return out.copy_(from_uniform(numbers.uniform(out.shape, out.device), out, args, kwargs))

    return draw


def _uniform(u: torch.Tensor, _: torch.Tensor, args: TorchArgs, kwargs: TorchKwargs) -> torch.Tensor:
    low, high = _arguments(args[1:], kwargs, ("from", "to"), (0.0, 1.0))
    return u * (high - low) + low


def _bernoulli(u: torch.Tensor, _: torch.Tensor, args: TorchArgs, kwargs: TorchKwargs) -> torch.Tensor:
    """Draws `torch.bernoulli`: the tensor holds the probabilities, unless ``p`` is given."""
    probability = kwargs.get("p", args[1] if len(args) > 1 else args[0])
    return (u < probability).to(u.dtype)


def _bernoulli_in_place(u: torch.Tensor, _: torch.Tensor, args: TorchArgs, kwargs: TorchKwargs) -> torch.Tensor:
    (p,) = _arguments(args[1:], kwargs, ("p",), (0.5,))
    return (u < p).to(u.dtype)


def _standard_normal(u: torch.Tensor, *_: object) -> torch.Tensor:
    # The inverse normal distribution function: one uniform number makes one normal number, whatever its neighbours do.
    return torch.special.ndtri(u)


def _normal_in_place(u: torch.Tensor, _: torch.Tensor, args: TorchArgs, kwargs: TorchKwargs) -> torch.Tensor:
    mean, std = _arguments(args[1:], kwargs, ("mean", "std"), (0.0, 1.0))
    return torch.special.ndtri(u) * std + mean


def _refuse(_: RandomSource, func: TorchFunction, args: TorchArgs, kwargs: TorchKwargs) -> torch.Tensor:
    if kwargs.get("training", kwargs.get("train")) is False:
        output: torch.Tensor = func(*args, **kwargs)
        return output
    raise PlanError(
        f"a forward that trains draws random numbers by {func.__name__}, which would depend on the layout; what works: "
        "dropout, dropout1d to 3d, scaled_dot_product_attention, rand, randn, bernoulli, uniform_, normal_"
    )


def _arguments(args: TorchArgs, kwargs: TorchKwargs, names: Sequence[str], defaults: TorchArgs) -> list[Any]:
    """Values of arguments, positional or named."""
    by_name = dict(zip(names, args)) | dict(kwargs)
    return [by_name.get(name, default) for name, default in zip(names, defaults)]


_UNIT_UNIFORM = _draw_over_uniform(lambda u, *_: u)
_REPLACEMENTS: dict[TorchFunction, Replacement] = {
    functional.scaled_dot_product_attention: _attention,
    **dict.fromkeys((functional.dropout, torch.dropout, torch.dropout_), _dropout),
    **dict.fromkeys((functional.dropout1d, functional.dropout2d, functional.dropout3d), _feature_dropout),
    **dict.fromkeys((torch.feature_dropout,), _feature_dropout),
    **dict.fromkeys((torch.rand, torch.rand_like), _UNIT_UNIFORM),
    **dict.fromkeys((torch.randn, torch.randn_like), _draw_over_uniform(_standard_normal)),
    **dict.fromkeys((torch.bernoulli, torch.Tensor.bernoulli), _draw_over_uniform(_bernoulli)),
    torch.Tensor.bernoulli_: _draw_over_uniform(_bernoulli_in_place),
    torch.Tensor.uniform_: _draw_over_uniform(_uniform),
    torch.Tensor.normal_: _draw_over_uniform(_normal_in_place),
    **dict.fromkeys((functional.alpha_dropout, functional.feature_alpha_dropout, functional.rrelu), _refuse),
    **dict.fromkeys((torch.normal, torch.randint, torch.randint_like, torch.randperm, torch.multinomial), _refuse),
    **dict.fromkeys((torch.poisson, torch.Tensor.multinomial, torch.Tensor.exponential_), _refuse),
    **dict.fromkeys((torch.Tensor.random_, torch.Tensor.geometric_, torch.Tensor.cauchy_), _refuse),
    **dict.fromkeys((torch.Tensor.log_normal_, torch.native_dropout), _refuse),
}
