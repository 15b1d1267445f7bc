"""Between steps user code reads a split weight as on one device, or is told that it can't."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from meshwright.errors import ConfigError
from meshwright.parallel.axis_group import AxisGroup, TrafficLog
from meshwright.strategy import HybridParallelStrategy
from meshwright.strategy.weight_reductions import maximum_over_ranks
from tests.own_models import equal, gpt2, mixtral, output, plain_model, rows, world
from tests.ranks.group import run_ranks
from tests.tiers import further


def spoiled(part: torch.Tensor) -> torch.Tensor:
    """Returns a weight's values with one that is no number, on one rank of those that have a part of it."""
    values = part.detach().clone()
    values[0] = float("nan")
    return values


READ: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.norm(),
    "norm of order 1": lambda p: torch.norm(p, p=1),
    "norm of order 3": lambda p: torch.linalg.vector_norm(p.detach(), 3),
    "frobenius": lambda p: torch.linalg.norm(p),
    "norm of order 0": lambda p: torch.linalg.vector_norm(p, 0),
    "not a number": lambda p: spoiled(p).max().isnan() & spoiled(p).norm(float("inf")).isnan(),
    "norm of all": lambda p: torch._foreach_norm([p.data])[0],
    "largest": lambda p: p.detach().abs().max(),
    "smallest": lambda p: p.amin(),
    "sum": lambda p: p.sum(),
    "mean": lambda p: p.float().double().mean(),
    "squares": lambda p: (p**2).sum(),
    "reflected": lambda p: (1 - 2 / (2 + p)).sum(),
    "positive": lambda p: (p > 0).sum(),
    "finite": lambda p: torch.isfinite(p).all(),
    "any": lambda p: p.isnan().any(),
    "nonzero": lambda p: torch.count_nonzero(p),
    "same": lambda p: torch.equal(p, p.clone()),
    "other": lambda p: torch.allclose(copy.deepcopy(p), p + (p > 0).double(), rtol=1e-3),
    "average": lambda p: p.detach().clone().lerp_(p.detach().exp(), 0.5).sum(),
    "lists": lambda p: torch._foreach_add([p.detach()], [p.detach()])[0].sum(),
}
REFUSED: dict[str, Callable[[Any], Any]] = {
    "rows": lambda p: p.norm(dim=0),
    "largest singular value": lambda p: torch.linalg.norm(p, 2) if p.dim() == 2 else p.norm(dim=0),
    "values": lambda p: p.tolist(),
    "index": lambda p: p[0],
    "loop over rows": lambda p: list(p),
    "transpose": lambda p: p.mT,
    "softmax": lambda p: p.softmax(0),
    "normalised": lambda p: functional.normalize(p, dim=0),
    "running sum": lambda p: p.cumsum(0),
    "running sum in place": lambda p: p.detach().cumsum_(0),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "median": lambda p: p.detach().median(),
    "drawn": lambda p: nn.init.normal_(p),
    "drawn by fans": lambda p: nn.init.kaiming_uniform_(p) if p.dim() > 1 else p.detach().uniform_(),
    "noise": lambda p: torch.randn_like(p),
    "product": lambda p: p @ p.new_ones(p.shape[-1]),
    "file": lambda p: torch.save(p, "/dev/null"),
    "file of values": lambda p: torch.save(p.detach(), "/dev/null"),
    "full": lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p.tolist(),
}


def split_here(strategy: HybridParallelStrategy, parameter: torch.Tensor) -> bool:
    (weight,) = (item for item in strategy.weights if item.parameter is parameter)
    return not weight.shard.is_unsharded


def scalar(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def read_parts(_rank: int, text: str, make: Callable[[], nn.Module]) -> tuple[int, list[str]]:
    """Returns the number of split weights, and what is read otherwise than on one device."""
    strategy = HybridParallelStrategy(text)
    module = strategy.shard(make())
    plain, wrong = dict(make().named_parameters()), []
    split = {item.name for item in strategy.weights if not item.shard.is_unsharded}
    for name, part in ((name, part) for name, part in module.named_parameters() if name in split):
        for label, read in READ.items():
            found, wanted = scalar(read(part)), scalar(read(plain[name]))
            if found != pytest.approx(wanted, rel=1e-6 if label == "mean" else 1e-12, abs=1e-12):
                wrong.append(f"{label} of {name}: {found}, on one device {wanted}")
        for label, read in REFUSED.items():
            try:
                read(part)
                wrong.append(f"{label} of {name} isn't refused")
            except ConfigError as error:
                wrong += [] if f"of {name}, of which this rank has a part under" in str(error) else [str(error)]
        assert part.grad is None and part.requires_grad and part.dtype == torch.float64
        with torch.no_grad():
            part.copy_(plain[name] + 1)  # a full weight is cut
            part[0] = 2.0  # an index is one of the whole weight
            plain[name].add_(1)[0] = 2.0
        if scalar(part.sum()) != pytest.approx(scalar(plain[name].sum()), rel=1e-12):
            wrong.append(f"{name} was written otherwise")
    return len(split), wrong


@pytest.mark.parametrize(
    ("text", "make"),
    further(
        [
            ("tp=2", gpt2),
            ("shard=2,tp=2,zero=3", plain_model),
            ("tp=4", mixtral),
            ("replicate=2,tp=2", plain_model),
            ("shard=2,ep=2", mixtral),
        ],
        (0, 1, 3),
    ),
)
def test_split_weights_read_as_full_ones_or_not_at_all(text: str, make: Callable[[], nn.Module]) -> None:
    for split, wrong in run_ranks(world(text), read_parts, text, make):
        assert split and not wrong, "\n".join(wrong)


def full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def penalised(module: nn.Module, optimizer: Any, batches: list[Any]) -> tuple[list[float], list[float]]:
    """Trains with penalties on weights; returns losses with them, and norms of all weights after each step."""
    losses, norms = [], []
    for x, y in batches:
        optimizer.zero_grad()
        logits = output(module, x).flatten(0, 1)
        penalty: Any = 0.0
        for item in module.parameters():
            penalty = penalty + full(0.05 * item.square().sum() + 0.1 * item.norm() + 0.02 * item.norm(3))
            penalty = penalty + full((item - 0.1).abs().mean())
        loss = functional.cross_entropy(logits, y.flatten()) + penalty
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        norms.append(sum(float(full(item.detach().norm())) for item in module.parameters()))
    return losses, norms


def penalised_by_rank(_rank: int, text: str, make: Callable[[], nn.Module]) -> tuple[list[float], list[float]]:
    strategy = HybridParallelStrategy(text)
    module = strategy.shard(make())
    # a copy and a pickle of what is whole on this rank know no guard
    for item in (item for item in module.parameters() if not split_here(strategy, item)):
        torch.save((item.detach(), copy.deepcopy(item)), io.BytesIO())
    index, count = strategy.reader
    batches = [(x.chunk(count)[index], y.chunk(count)[index]) for x, y in rows()]
    losses, norms = penalised(module, torch.optim.SGD(module.parameters(), lr=0.1), batches)
    return [strategy.mean(loss) for loss in losses], norms


@pytest.mark.parametrize(
    ("text", "make"),
    further(
        [
            ("tp=2", plain_model),
            ("tp=2,sequence=true", gpt2),
            ("shard=2,tp=2,zero=2,recompute=full", plain_model),
            ("shard=2,ep=2", mixtral),
            ("tp=4", mixtral),
        ],
        (1, 2),
    ),
)
def test_penalties_on_weights_train_as_on_one_device(text: str, make: Callable[[], nn.Module]) -> None:
    module = make()
    wanted = penalised(module, torch.optim.SGD(module.parameters(), lr=0.1), rows())
    equal(run_ranks(world(text), penalised_by_rank, text, make), [[scalar(loss) for loss in wanted[0]], wanted[1]])


NORMS_OF_ROWS: dict[str, Callable[[Any], Any]] = {
    "norm of the first dim": lambda g: g.norm(dim=0),
    "norm of rows": lambda g: torch.linalg.vector_norm(g, 2, dim=0),
    "largest singular value": lambda g: torch.linalg.norm(g, 2),
    "largest sum of a column": lambda g: torch.linalg.norm(g, ord=1),
}


def maxima_with_nan(rank: int) -> list[torch.Tensor]:
    group = AxisGroup("world", dist.group.WORLD, TrafficLog())
    nothing, found = float("nan"), []
    for other in range(3):
        values = torch.tensor([nothing if rank == other else 1.0, float(rank)], dtype=torch.float64)
        found.append(maximum_over_ranks(values, group))
    return found


def test_maxima_over_gloo_keep_what_is_no_number_on_any_rank() -> None:
    """gloo's own maximum keeps it from some ranks and drops it from others."""
    for found in run_ranks(3, maxima_with_nan):
        assert all(bool(values[0].isnan()) and values[1] == 2 for values in found)


def norms_of_rows(_rank: int) -> tuple[int, list[str]]:
    strategy = HybridParallelStrategy("tp=2")
    module = strategy.shard(plain_model())
    x, y = rows()[0]
    functional.cross_entropy(output(module, x).flatten(0, 1), y.flatten()).backward()
    found = [item.grad for item in module.parameters() if item.grad is not None and item.grad.dim() == 2]
    split = {item.name for item in strategy.weights if not item.shard.is_unsharded}
    found = [grad for grad in found if getattr(grad, "weight", None) and grad.weight.name in split]
    accepted = []
    for label, norm in NORMS_OF_ROWS.items():
        for grad in found:
            try:
                norm(grad)
                accepted.append(label)
            except ConfigError as error:
                assert "over some dims" in str(error)
    return len(found), accepted


def test_norms_of_rows_and_of_operators_of_a_split_gradient_are_refused() -> None:
    for count, accepted in run_ranks(2, norms_of_rows):
        assert count and not accepted
