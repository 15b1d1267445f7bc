"""Random numbers of the oracle: the rule by which dropout draws, written down plainly for one device and whole tensors.

A draw has a name: seed, step, the layer in whose call it happens (outside of the layers: the innermost module), which
call of it this is, and how many draws came before in the call. The tensor's first dim counts the rows of the global
batch, once or several times over: every row has an equal part of it. An element's number follows from the draw's name,
its row, its line (places in all dims of the row but the last, counted through) and its place in the last dim.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from meshwright.errors import PlanError
from meshwright.torch_compat.tensors import TorchArgs, TorchFunction, TorchKwargs

_LOW, _NONE = np.uint64(0xFFFFFFFF), np.uint64(0)
_ALL = 2**64


class Masks(TorchFunctionMode):
    """Inside it, the forward of one global batch draws by the rule.

    Args:
        module: the whole model, on one device.
        layers: names of its repeated blocks.
        rows: of the batch.
        name: seed and step, ``"0,3"``.
        first_row: place of the first row in the global batch.
    """

    def __init__(self, module: nn.Module, layers: Collection[str], rows: int, name: str, first_row: int = 0) -> None:
        super().__init__()
        self._rows, self._name, self._first_row = rows, name, first_row
        self._stack: list[list[Any]] = [["", 0, 0]]
        self._calls: dict[str, int] = {}
        self._hooks: list[RemovableHandle] = []
        layer_prefixes = tuple(f"{layer}." for layer in layers)
        for path, submodule in module.named_modules():
            if not path.startswith(layer_prefixes):
                self._hooks.append(submodule.register_forward_pre_hook(self._pushes_call(path)))
                self._hooks.append(submodule.register_forward_hook(self._pop_call))

    def __exit__(self, *error: object) -> None:
        """Leaves the module as it was."""
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def __torch_function__(
        self,
        func: TorchFunction,
        types: Collection[type],
        args: TorchArgs = (),
        kwargs: TorchKwargs | None = None,
    ) -> object:
        """Replaces the functions that draw; torch calls this for each function."""
        keywords = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            return self._attention(func, args, keywords)
        if func in (functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d):
            arguments = dict(zip(("input", "p", "training", "inplace"), args)) | keywords
            x, p = arguments["input"], arguments.get("p", 0.5)
            if not arguments.get("training", True) or p == 0:
                return func(*args, **keywords)
            shape = x.shape if func is functional.dropout else (*x.shape[:2], *(1 for _ in x.shape[2:]))
            noise = self._noise(shape, p, x)
            return x.mul_(noise) if arguments.get("inplace") else x * noise
        out = func(*args, **keywords)
        if func in (torch.rand, torch.rand_like):
            return out.copy_(self._numbers(out.shape) / 2**32)
        if func in (torch.randn, torch.randn_like):
            return out.copy_(torch.special.ndtri(self._numbers(out.shape) / 2**32))
        if func is torch.Tensor.bernoulli_:
            return out.copy_(self._numbers(out.shape) / 2**32 < (args[1] if len(args) > 1 else keywords.get("p", 0.5)))
        return out

    def _pushes_call(self, path: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            call = self._calls.get(path, 0)
            self._calls[path] = call + 1
            self._stack.append([path, call, 0])

        return enter

    def _pop_call(self, *_: object) -> None:
        self._stack.pop()

    def _attention(self, func: TorchFunction, args: TorchArgs, keywords: TorchKwargs) -> object:
        arguments = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args)) | dict(keywords)
        p = arguments.get("dropout_p", 0.0)
        if not p:
            return func(*args, **keywords)
        query, key, value, mask = arguments["query"], arguments["key"], arguments["value"], arguments.get("attn_mask")
        # Written out, since no fused kernel hands out its weights: softmax(q k^T / sqrt(E) + mask) before dropout.
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scores = query @ key.transpose(-1, -2) * (arguments.get("scale") or 1 / math.sqrt(query.shape[-1]))
        if arguments.get("is_causal"):
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(scores).masked_fill(~mask, -math.inf)
            scores = scores + mask
        return scores.softmax(dim=-1) * self._noise(scores.shape, p, scores) @ value

    def _noise(self, shape: Sequence[int], p: float, reference: torch.Tensor) -> torch.Tensor:
        keep = (self._numbers(shape) >= round(p * 2**32)).to(reference)
        return keep / (1 - p) if p < 1 else keep

    def _numbers(self, shape: Sequence[int]) -> torch.Tensor:
        """Returns the numbers of the next draw, float64: a half more than whole numbers below 2^32."""
        # The innermost module that is called now names the draw; the counter makes the next draw of the call another.
        path, call, number = self._stack[-1]
        self._stack[-1][2] += 1
        base = hashlib.blake2b(f"{self._name},{path}:{call},{number}".encode(), digest_size=8).digest()
        rows = self._rows if shape else 1
        if math.prod(shape) % rows:
            raise PlanError(
                f"random numbers of {path or 'the model'}: it draws a tensor {tuple(shape)}, which isn't of the "
                f"{rows} rows of the batch, as where a router chose them, so that no number has a place that "
                "all layouts share; nearest that works: draw in front of the router or behind it, for all tokens, or "
                "verify in evaluation mode (--training false)"
            )
        size = math.prod(shape) // rows
        # A tensor (rows, x, y, w) has x y lines of w columns in each row; a tensor (rows,) has one of each.
        width = shape[-1] if len(shape) > 1 else 1
        line, column = np.divmod(np.arange(size, dtype=np.uint64), np.uint64(width))
        rows_of_numbers = []
        for row in range(self._first_row, self._first_row + rows):
            # The key of a row; of a number without dims, such as that of a skipped layer, the same for all rows.
            counter = int.from_bytes(base, "little") + (row + 1 if shape else 0) * 0x9E3779B97F4A7C15
            rows_of_numbers.append(plain_bits(counter, line, column))
        return torch.from_numpy(np.stack(rows_of_numbers).astype(np.float64) + 0.5).view(tuple(shape))


def plain_bits(counter: int, line: NDArray[np.uint64], column: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the 32 random bits of some elements of a row, (n,).

    Args:
        counter: base of the draw, and the row's number times splitmix64's step.
        line: (n,) line of each element.
        column: (n,) place of each in its line.
    """
    key = _splitmix(counter)
    u = _mixed(_product(line, 0x9E3779B9) + np.uint64(key % 2**32))
    v = _mixed(_product(line, 0x85EBCA6B) + np.uint64(key >> 32))
    return _mixed(_product(column, 0x9E3779B9) + u, v)


def _splitmix(z: int) -> int:
    z %= _ALL
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % _ALL
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % _ALL
    return z ^ (z >> 31)


def _product(x: NDArray[np.uint64], factor: int) -> NDArray[np.uint64]:
    return x * np.uint64(factor) & _LOW


def _mixed(x: NDArray[np.uint64], addend: NDArray[np.uint64] | np.uint64 = _NONE) -> NDArray[np.uint64]:
    x = x & _LOW
    x = _product(x ^ (x >> np.uint64(16)), 0x7FEB352D)
    x = x ^ (x >> np.uint64(15))
    x = _product((x + addend) & _LOW, 0x846CA68B)
    return x ^ (x >> np.uint64(16))
