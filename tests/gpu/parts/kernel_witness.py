"""What the kernels must give: formulas in float64, written from papers, and the harness that times and compares."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]
BF16, FP16 = torch.bfloat16, torch.float16
BOUNDS = {BF16: 0.02, FP16: 0.004, torch.float32: 1e-4}
"""A few roundings of each type: 2^-8, 2^-11; of float32 what a sum of some thousand terms loses."""
DOCUMENTS = {
    "documents": [[1, 4095], [2000, 1, 37, 2058]],
    "many": [[1] * 7 + [97] * 42 + [15], [512] * 8],
    "odd": [[4095], [1, 1, 4093]],
    "whole": [[4096], [4096]],
}
SMALL = {"documents": [[1, 63], [30, 1, 5, 28]], "many": [[1] * 7 + [9] * 6 + [3], [16] * 4], "odd": [[63], [1, 1, 61]],
         "whole": [[64], [64]]}  # fmt: skip


class Bench:
    """One device on which cases run; each prints a line as soon as it is known.

    Args:
        small: sizes for a CPU.
        has_values: whether errors count; on the simulated GPU they don't.
        deadline: of time.monotonic.
    """

    def __init__(self, small: bool, has_values: bool, deadline: float) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.small, self.has_values, self.deadline, self.failed = small, has_values, deadline, False

    def line(self, case: str, error: float | None = None, bound: float | None = None, **more: object) -> None:
        """Prints a case; it is wrong where its error isn't at most its bound."""
        # Not "error > bound": NaN is wrong too.
        ok = error is None or bound is None or not self.has_values or error <= bound
        self.failed |= not ok
        fields = {"case": case, "device": self.device.type, "error": error, "bound": bound, "ok": ok} | more
        print(json.dumps({key: value for key, value in fields.items() if value is not None}, default=str), flush=True)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def ms(self, run: Callable[[], object], steps: int = 10) -> float:
        """Returns the median of so many runs in ms, after three to warm up."""
        if self.small:
            steps = 2
        for _ in range(1 if self.small else 3):
            run()
        times = []
        for _ in range(steps):
            if self.device.type == "cuda":
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run()
                stop.record()
                stop.synchronize()
                times.append(start.elapsed_time(stop))
            else:
                begin = time.perf_counter()
                run()
                times.append(1e3 * (time.perf_counter() - begin))
        return round(statistics.median(times), 4)

    def kernels(self, run: Callable[[], object], most: int = 4) -> list[str]:
        """Returns the names of the kernels that take longest, with their microseconds."""
        if self.device.type == "cpu" or not self.has_values:
            run()
            return []
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            run()
            self.synchronize()
        events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
        return [f"{event.key[:110]}: {event.self_device_time_total:.0f} us x {event.count}" for event in events[:most]]

    def peak_mb(self, run: Callable[[], object]) -> float | None:
        """Returns the most memory that a run takes beyond what is there before it, in MB."""
        if self.device.type == "cpu":
            return None
        self.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        self.synchronize()
        return round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)


def draw(*shapes: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int = 0) -> list[torch.Tensor]:
    """Returns normal numbers of the shapes, rounded to a type."""
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(*shape, generator=generator, device=device).to(dtype) for shape in shapes]


def relative(found: torch.Tensor, expected: torch.Tensor, least: float = 1e-300) -> float:
    """Returns the largest distance of a row (last dim) from what it should be, by the row's length or the mean one.

    Args:
        found: (..., E).
        expected: (..., E).
        least: length by which a distance is told at least, where all of ``expected`` may be zero.
    """
    found, expected = (x.detach().double().reshape(-1, x.shape[-1] if x.dim() else 1) for x in (found, expected))
    lengths = expected.norm(dim=1)
    return float(((found - expected).norm(dim=1) / lengths.clamp(min=max(least, float(lengths.mean())))).max())


def by_token(found: torch.Tensor, expected: torch.Tensor, least: float = 1e-300) -> float:
    """Returns `relative` of tokens (B, heads, S, E), all heads of a token together."""
    return relative(*(x.transpose(1, 2).flatten(2) for x in (found, expected)), least)


def positions_of(documents: list[list[int]]) -> torch.Tensor:
    """Returns each token's place in its document, (B, S)."""
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in documents])


def visible(documents: Sequence[Sequence[int]], window: int, device: torch.device) -> torch.Tensor:
    """Returns (B, S, S) bool: a query sees its document up to itself, the last ``window`` tokens of it (0: all)."""
    tokens = sum(documents[0])
    mask = torch.zeros(len(documents), tokens, tokens, dtype=torch.bool, device=device)
    for row, lengths in enumerate(documents):
        first = 0
        for length in lengths:
            block = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            mask[row, first : first + length, first : first + length] = block.triu(1 - window) if window else block
            first += length
        assert first == tokens
    return mask


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    upstream: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> Tensors:
    """Returns output and the gradients of query, key and value in float64, a head at a time.

    Args:
        query: (B, H, S, E).
        key: (B, K, S, E).
        value: (B, K, S, E').
        upstream: (B, H, S, E').
        mask: (B, S, S), True where a query sees a key.
        scale: factor on the scores.
    """
    query, key, value, upstream = (x.detach().double() for x in (query, key, value, upstream))
    output, grads = torch.zeros_like(upstream), [torch.zeros_like(x) for x in (query, key, value)]
    group = query.shape[1] // key.shape[1]
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            q, k, v, do = query[row, head], key[row, head // group], value[row, head // group], upstream[row, head]
            weights = (q @ k.T * scale).masked_fill_(~mask[row], -torch.inf).softmax(-1)
            output[row, head] = weights @ v
            # dS = P (dP - sum(P dP)).
            slopes = do @ v.T
            scores = weights * (slopes - (weights * slopes).sum(-1, keepdim=True)) * scale
            grads[0][row, head] = scores @ k
            grads[1][row, head // group] += scores.T @ q
            grads[2][row, head // group] += weights.T @ do
    return output, *grads


def head_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, scale: float, limit: float) -> Tensors:
    """Returns (scale x summed cross-entropy, gradients of hidden (N, D) and weight (V, D)) in float64."""
    hidden, weight = hidden.detach().double(), weight.detach().double()
    product = hidden @ weight.T
    logits = limit * torch.tanh(product / limit) if limit else product
    log_weights = logits.log_softmax(-1)
    counted = targets != -100
    rows = torch.arange(len(targets), device=targets.device)[counted]
    loss = -scale * log_weights[rows, targets[counted]].sum()
    slopes = log_weights.exp_()
    slopes[rows, targets[counted]] -= 1.0
    slopes *= (scale * counted).unsqueeze(1)
    if limit:
        slopes *= 1.0 - (logits / limit) ** 2
    return loss, slopes @ weight, slopes.T @ hidden


def experts(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Returns the weighted sum of each token's experts, by a loop over them.

    Args:
        hidden: (T, D).
        gate_up: (X, 2 F, D).
        down: (X, D, F).
        index: (T, k), an expert of each token.
        weights: (T, k).
    """
    output = torch.zeros_like(hidden)
    for expert in range(len(gate_up)):
        chosen = (index == expert).nonzero()
        tokens, slots = chosen[:, 0], chosen[:, 1]
        gate, up = (hidden[tokens] @ gate_up[expert].T).chunk(2, dim=-1)
        heads = (gate * torch.sigmoid(gate) * up) @ down[expert].T
        output = output.index_add(0, tokens, heads * weights[tokens, slots].unsqueeze(-1))
    return output


def adamw(
    weight: torch.Tensor,
    grads: Sequence[torch.Tensor],
    rates: Sequence[float],
    decay: float,
    betas: tuple[float, float],
) -> torch.Tensor:
    """Returns a weight after AdamW's updates (Loshchilov and Hutter 2019, algorithm 2), in float64."""
    theta = weight.detach().double().clone()
    first, second = torch.zeros_like(theta), torch.zeros_like(theta)
    for step, (grad, rate) in enumerate(zip(grads, rates), start=1):
        g = grad.double()
        first = betas[0] * first + (1 - betas[0]) * g
        second = betas[1] * second + (1 - betas[1]) * g * g
        mean, square = first / (1 - betas[0] ** step), second / (1 - betas[1] ** step)
        theta = theta - rate * decay * theta - rate * mean / (square.sqrt() + 1e-8)
    return theta


def arguments(description: str | None) -> Any:
    """Returns the words of the command line."""
    import argparse

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", required=True)
    parser.add_argument("--limit-s", type=float, default=110.0)
    parser.add_argument("--no-values", action="store_true", help="errors don't count: the simulated GPU")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--only", default="", help="cases whose name has one of these, with commas between, in it")
    return parser.parse_args()
