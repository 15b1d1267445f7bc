"""The pipeline engine trains a model of one's own, convolutional ones too, as plain PyTorch does on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from meshwright.errors import ConfigError, DataError, PlanError
from meshwright.strategy import HybridParallelStrategy, PipelineEngine
from tests.own_models import (
    CLIP,
    Batch,
    convolutional,
    equal,
    flat_convolutional,
    gpt2,
    mean_loss,
    mixtral,
    plainly,
    rows,
    world,
)
from tests.ranks.group import run_ranks
from tests.tiers import further


def pipeline(
    _rank: int, text: str, make: Callable[[], nn.Module], batches: list[Batch], example: torch.Tensor | None
) -> tuple[list[float], list[float]]:
    adam = functools.partial(torch.optim.AdamW, lr=1e-2)
    engine = PipelineEngine(make(), text, mean_loss, adam, example=example, clip=CLIP)
    index, count = engine.reader
    mine = [(x.chunk(count)[index], y.chunk(count)[index]) for x, y in batches]
    losses, norms = [], []
    for batch in mine[:2]:
        losses.append(engine.step(*batch))
        norms.append(float(engine.norm))
    held = engine.evaluate(mine[2:])
    x, y = mine[2]
    assert engine.evaluate([(x[:1], y[:1]), (x[1:], y[1:])]) == pytest.approx(held, rel=1e-9)
    assert engine.train_epoch(mine[2:]) == pytest.approx(held, rel=1e-9)
    return [*losses, held], [*norms, float(engine.norm)]


@pytest.mark.parametrize(
    ("make", "text"),
    further(
        [
            (convolutional, "pp=4,microbatches=4"),
            (convolutional, "pp=2,replicate=2,microbatches=2,schedule=zbv"),
            (flat_convolutional, "pp=3,microbatches=2"),
            (gpt2, "pp=2,replicate=2,tp=2,microbatches=2"),
            (mixtral, "pp=1,shard=2,ep=2,microbatches=2"),
        ],
        (1, 3),
    ),
)
def test_a_pipeline_of_ones_own_model_equals_one_device(make: Callable[[], nn.Module], text: str) -> None:
    image = make in (convolutional, flat_convolutional)
    batches = rows(3, 16, 16) if image else rows()
    example = batches[0][0] if image else None
    found = run_ranks(world(text), pipeline, text, make, batches, example, timeout=250)
    equal(found, plainly(make, batches))


class Choosy(nn.Module):
    """A layer with an expert that few rows choose, and a weight that nothing reads."""

    def __init__(self, width: int, bound: float) -> None:
        super().__init__()
        self.every, self.few = nn.Linear(width, width), nn.Linear(width, width)
        self.unread = nn.Parameter(torch.ones(width))
        self._bound = bound

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, chosen = torch.tanh(self.every(x)), x[:, 0] > self._bound
        if chosen.any():
            out = out.index_put((chosen,), out[chosen] + self.few(x[chosen]))
        return out


def choosy() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(Choosy(4, bound) for bound in (0.9, 0.4, -0.2, 9.0))).double()


def choosy_batches() -> list[Batch]:
    """Three batches: the first expert is chosen by every row, by none, and by one."""
    draw = torch.Generator().manual_seed(5)
    batches = [torch.randn(8, 4, generator=draw, dtype=torch.float64).clamp(max=0.3) for _ in range(3)]
    batches[0][:, 0], batches[2][5, 0] = 1.0, 1.0
    return [(x, x.flip(-1)) for x in batches]


ADAM = functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.5)


def choosy_weights(_rank: int, text: str, folder: str) -> None:
    engine = PipelineEngine(choosy(), text, nn.functional.mse_loss, ADAM, example=torch.zeros(2, 4).double())
    index, count = engine.reader
    first, *rest = [(x.chunk(count)[index], y.chunk(count)[index]) for x, y in choosy_batches()]
    engine.step(*first)
    # the state of weights that no step has changed is saved and loaded with the others'
    dcp.save(engine.state_dict(), checkpoint_id=f"{folder}/one")
    engine = PipelineEngine(choosy(), text, nn.functional.mse_loss, ADAM, example=torch.zeros(2, 4).double())
    dcp.load(engine.state_dict(), checkpoint_id=f"{folder}/one")
    for batch in rest:
        engine.step(*batch)
    dcp.save(engine.state_dict(), checkpoint_id=f"{folder}/three")


@pytest.mark.parametrize(
    "text",
    further(
        [
            "pp=2,microbatches=4",
            "pp=2,replicate=2,microbatches=2",
            "pp=2,shard=2,zero=3,microbatches=2",
            "pp=2,microbatches=2,schedule=zbv",
            "shard=2,zero=2,microbatches=2,pp=1",
        ],
        (0, 2),
    ),
)
def test_weights_that_no_row_reaches_stay_as_on_one_device(text: str, tmp_path: Path) -> None:
    model = choosy()
    optimizer = ADAM(model.parameters())
    reached = []
    for x, y in choosy_batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        reached.append([name for name, parameter in model.named_parameters() if parameter.grad is None])
        optimizer.step()
    assert [("0.few.weight" in names, "0.unread" in names) for names in reached] == [
        (False, True),
        (True, True),
        (False, True),
    ]
    run_ranks(world(text), choosy_weights, text, str(tmp_path), timeout=250)
    dcp_to_torch_save(tmp_path / "three", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt")
    torch.testing.assert_close(found["model"], dict(model.named_parameters()), rtol=1e-9, atol=1e-9, check_device=False)
    for name, parameter in model.named_parameters():
        steps = optimizer.state[parameter]["step"] if parameter in optimizer.state else 0
        assert found["optimizer"]["step"][name] == steps


def pipeline_refusals(_rank: int) -> list[str]:
    adam = functools.partial(torch.optim.AdamW, lr=1e-2)
    found = []
    (x, y), *_ = rows(3, 16, 16)
    engine = PipelineEngine(convolutional(), "pp=2", mean_loss, adam, microbatches=3, example=x)
    for act in (
        lambda: engine.step(x, y),
        lambda: engine.train_epoch([]),
        lambda: PipelineEngine(convolutional(), "pp=2,microbatches=2", mean_loss, adam, microbatches=3, example=x),
        lambda: PipelineEngine(convolutional(), "pp=2", mean_loss, adam).optimizer,
    ):
        try:
            act()
        except (DataError, PlanError, ConfigError) as error:
            found.append(str(error))
    return found


class Counting(nn.Module):
    """A layer that counts its calls, and computes with the count."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.calls += 1
        return torch.tanh(self.linear(x)) * self.calls.clone()


def counting(_rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Counting(4)), nn.Sequential(Counting(4))).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    engine = PipelineEngine(model, "pp=2,microbatches=2", nn.functional.mse_loss, example=x)
    # As a checkpoint's values are loaded: in place.
    for module in engine.modules:
        for buffer in module.buffers():
            buffer.fill_(3)
    with pytest.raises(ConfigError, match=r"forward changes (the|a) buffer .*for each micro-batch"):
        engine.step(x, x)


def test_buffers_that_each_micro_batch_would_change_are_refused() -> None:
    run_ranks(2, counting)


def test_what_a_pipeline_refuses() -> None:
    for uneven, empty, twice, blind in run_ranks(2, pipeline_refusals):
        assert "nearest that works: 6 or 9 rows" in uneven
        assert "gave no batch" in empty
        assert "give one of them" in twice
        assert "example=" in blind


def calls_a_stage(_rank: int) -> str:
    strategy = HybridParallelStrategy("pp=2")
    model = convolutional()
    model, _ = strategy.shard(model, torch.optim.AdamW(model.parameters()), loss=mean_loss, example=rows(3, 8, 8)[0][0])
    with pytest.raises(ConfigError) as refusal:
        model(rows(3, 8, 8)[0][0])
    return str(refusal.value)


def test_a_loop_that_calls_a_stage_itself_is_told_who_runs_it() -> None:
    for stage, told in enumerate(run_ranks(2, calls_a_stage)):
        assert f"stage {stage} of 2" in told and "strategy.step(batch)" in told and "a layout without pp" in told


def refused_in_a_stage(_rank: int, phase: str) -> list[str]:
    x, y = rows(3, 8, 8)[0]
    engine = PipelineEngine(convolutional(), "pp=2,microbatches=2", mean_loss, example=x)

    def refuse(*_: object) -> None:
        raise PlanError("a sentence of ours")

    def refuse_gradient(out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(refuse)

    for module in engine.modules:
        if phase == "forward":
            module.register_forward_pre_hook(refuse)
        else:
            module.register_forward_hook(lambda _module, _args, out: refuse_gradient(out))
    engine.step(x, y)
    return []


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_refusal_in_a_stage_is_told_as_it_is(phase: str) -> None:
    with pytest.raises(PlanError, match=r"^\[rank \d\] a sentence of ours"):
        run_ranks(2, refused_in_a_stage, phase)
