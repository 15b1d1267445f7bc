"""Ready layers, the mesh and the ZeRO optimizer: equal to their whole counterparts to 1e-12 in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import ConfigError
from meshwright.strategy import (
    TensorParallelLinear,
    TensorParallelMultiheadAttention,
    ZeroRedundancyOptimizer,
    device_mesh,
)
from meshwright.strategy.layers import seeded_linear
from tests.own_models import mean_loss, plain_model, rows
from tests.ranks.group import run_ranks


def linear_errors(rank: int, mode: Any, options: dict[str, bool]) -> list[torch.Tensor]:
    """(found, wanted) pairs, one after the other."""
    torch.set_default_dtype(torch.float64)
    size, x = dist.get_world_size(), rows(12)[0][0]
    split = TensorParallelLinear(12, 8, mode, seed=4, **options)
    torch.manual_seed(4)
    whole = nn.Linear(12, 8)
    given, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    mine = (lambda item: item.chunk(size, -1)[rank]) if options.get("input_is_split") else (lambda item: item)
    out = (lambda item: item) if options.get("gather_output", True) else (lambda item: item.chunk(size, -1)[rank])
    slope = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    found, wanted = split(mine(given)), whole(plain)
    found.backward(out(slope))
    wanted.backward(slope)
    dim = 0 if mode == "columns" else 1
    bias = whole.bias.grad if dim else whole.bias.grad.chunk(size)[rank]
    pairs = [(found, out(wanted)), (mine(given.grad), mine(plain.grad)), (split.bias.grad, bias)]
    pairs += [(split.weight.grad, whole.weight.grad.chunk(size, dim)[rank]), (split.to_linear().weight, whole.weight)]
    return [item.detach() for pair in pairs for item in pair]


@pytest.mark.parametrize(
    ("mode", "options"),
    [("columns", {}), ("columns", {"gather_output": False}), ("rows", {}), ("rows", {"input_is_split": True})],
)
def test_a_split_linear_is_the_whole_one(mode: str, options: dict[str, bool]) -> None:
    for found in run_ranks(2, linear_errors, mode, options):
        torch.testing.assert_close(found[::2], found[1::2], rtol=1e-12, atol=1e-12)


def attention_errors(rank: int, kv_heads: int | None, causal: bool) -> list[torch.Tensor]:
    torch.set_default_dtype(torch.float64)
    size, x = dist.get_world_size(), rows(5, 16)[0][0]
    split = TensorParallelMultiheadAttention(16, 4, kv_heads, causal=causal, seed=3)
    query, key, value, out = (part.to_linear() for part in (split.query, split.key, split.value, split.out))
    given, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    heads = [part(plain).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (query, key, value)]
    heads[1:] = [item.repeat_interleave(4 // item.shape[1], dim=1) for item in heads[1:]]
    scores = heads[0] @ heads[1].transpose(2, 3) / 2.0
    if causal:
        scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    wanted = out((scores.softmax(-1) @ heads[2]).transpose(1, 2).flatten(2))
    found = split(given)
    slope = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    found.backward(slope)
    wanted.backward(slope)
    pairs = [(found, wanted), (given.grad, plain.grad)]
    columns = [(split.query, query, 0), (split.key, key, 0), (split.value, value, 0)]
    for part, whole, dim in (*columns, (split.out, out, 1)):
        pairs.append((part.weight.grad, whole.weight.grad.chunk(size, dim)[rank]))
        pairs.append((part.bias.grad, whole.bias.grad if dim else whole.bias.grad.chunk(size)[rank]))
    return [item.detach() for pair in pairs for item in pair]


@pytest.mark.parametrize(("kv_heads", "causal"), [(None, True), (2, True), (None, False)])
def test_split_attention_is_the_whole_one(kv_heads: int | None, causal: bool) -> None:
    for found in run_ranks(2, attention_errors, kv_heads, causal):
        torch.testing.assert_close(found[::2], found[1::2], rtol=1e-12, atol=1e-12)


def test_layers_refuse_what_does_not_divide() -> None:
    def work(_rank: int) -> list[str]:
        found = []
        for make in (
            lambda: TensorParallelLinear(4, 7, "columns"),
            lambda: TensorParallelLinear(4, 8, "columns", input_is_split=True),
            lambda: TensorParallelLinear(4, 8, "diagonal"),  # type: ignore[arg-type]
            lambda: TensorParallelMultiheadAttention(12, 4, 1),
        ):
            try:
                make()
            except ConfigError as error:
                found.append(str(error))
        return found

    for uneven, option, mode, heads in run_ranks(2, work):
        assert "out_features=7 doesn't divide over 2 ranks; nearest that works: 6 or 8" in uneven
        assert "no effect on columns" in option
        assert "'columns'" in mode
        assert "kv_heads=1" in heads


def test_a_mesh_has_the_axes_of_the_layout() -> None:
    def work(_rank: int) -> Any:
        mesh = device_mesh("pp=2,replicate=2,tp=2")
        line = TensorParallelLinear(4, 4, "columns", mesh["tp"])
        with pytest.raises(ConfigError, match="name the one"):
            TensorParallelLinear(4, 4, "columns", mesh)
        dist.barrier()
        return mesh.mesh_dim_names, tuple(mesh.shape), tuple(line.weight.shape)

    assert run_ranks(8, work) == [(("pp", "replicate", "tp"), (2, 2, 2), (2, 4))] * 8
    with pytest.raises(ConfigError, match="no process group"):
        device_mesh("tp=2")


def test_zero_by_the_name_of_torch() -> None:
    def work(_rank: int) -> tuple[list[torch.Tensor], int]:
        model, alone = plain_model(), plain_model()
        shared = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        plain = torch.optim.AdamW(alone.parameters(), lr=1e-2)
        for x, y in rows():
            for held, optimizer in ((model, shared), (alone, plain)):
                mean_loss(held(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        kept = sum(item.numel() for state in shared.optim.state.values() for item in state.values())
        pairs = zip(model.parameters(), alone.parameters())
        return [item.detach() for pair in pairs for item in pair], kept

    weights = sum(item.numel() for item in plain_model().parameters())
    for found, kept in run_ranks(2, work):
        torch.testing.assert_close(found[::2], found[1::2], rtol=1e-12, atol=1e-12)
        assert kept < 0.7 * 2 * weights


def frozen_flags(_rank: int) -> list[list[bool]]:
    flags = []
    for trainable in (True, False):
        linear = nn.Linear(12, 8).requires_grad_(trainable)
        split = TensorParallelLinear.from_linear(linear, "columns")
        flags.append([parameter.requires_grad for parameter in split.parameters()])
        state = torch.default_generator.get_state()
        flags.append([parameter.requires_grad for parameter in split.to_linear().parameters()])
        assert torch.equal(torch.default_generator.get_state(), state)
    return flags


def test_a_frozen_linear_stays_frozen() -> None:
    for flags in run_ranks(2, frozen_flags):
        assert flags == [[True, True], [True, True], [False, False], [False, False]]


def projection_errors(_rank: int) -> list[bool]:
    attention = TensorParallelMultiheadAttention(8, 4, seed=2)
    projections = (attention.query, attention.key, attention.value, attention.out)
    return [
        torch.equal(projection.to_linear().weight, seeded_linear(8, 8, True, 8 + offset).weight)
        for offset, projection in enumerate(projections)
    ]


def test_projections_of_attention_have_the_seeds_that_are_documented() -> None:
    assert run_ranks(2, projection_errors) == [[True] * 4] * 2


def test_a_seeded_linear_leaves_other_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _seed: pytest.fail("every GPU was seeded"))
    state = torch.default_generator.get_state()
    first, again, other = (seeded_linear(4, 3, True, seed) for seed in (1, 1, 2))
    assert torch.equal(first.weight, again.weight) and not torch.equal(first.weight, other.weight)
    assert torch.equal(torch.default_generator.get_state(), state)
