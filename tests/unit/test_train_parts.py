"""Learning rate, loss scale, loss and optimizer, each against what it must equal."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from meshwright.cli.arguments import read_config
from meshwright.parallel.weights import named_weights
from meshwright.train import optimizer as train_optimizer
from meshwright.train.config import OptimizerConfig, ScheduleConfig
from meshwright.train.loss import cross_entropy_sums
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.rate import learning_rate
from meshwright.train.run_config import RunConfig
from meshwright.train.scaler import GROWTH_STEPS, LARGEST, LossScaler
from meshwright.train.step import ROW, squared_norm

torch.set_num_threads(1)


def rates(steps: int = 100, **options) -> list[float]:
    return [learning_rate(step, steps, 2.0, ScheduleConfig(**options)) for step in range(steps)]


def test_cosine() -> None:
    found = rates(shape="cosine", warmup=10, floor=0.1)
    assert found[:10] == pytest.approx([2.0 * (step + 1) / 11 for step in range(10)])
    assert found[10] == 2.0 and found[-1] == pytest.approx(0.2)
    middle = 10 + (99 - 10) / 2
    assert learning_rate(int(middle), 100, 2.0, ScheduleConfig(warmup=10)) == pytest.approx(1.1, rel=0.02)
    expected = [0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * (step - 10) / 89)) for step in range(10, 100)]
    assert found[10:] == pytest.approx(expected)


def test_linear_and_constant() -> None:
    found = rates(shape="linear", warmup=0, floor=0.0)
    assert found == pytest.approx([2.0 * (1 - step / 99) for step in range(100)])
    assert rates(shape="constant", warmup=4)[4:] == [2.0] * 96


@pytest.mark.parametrize(("steps", "warmup"), [(12, 3), (10, 0), (40, 5)])
def test_rates_are_those_of_transformers_a_step_later(steps: int, warmup: int) -> None:
    """As docs/migrating.md says: Trainer's first step has rate 0, and its last isn't the end of the schedule."""
    schedules = {
        ("cosine", 0.1): partial(get_cosine_with_min_lr_schedule_with_warmup, min_lr_rate=0.1),
        ("cosine", 0.0): get_cosine_schedule_with_warmup,
        ("linear", 0.0): get_linear_schedule_with_warmup,
    }
    for (shape, floor), make in schedules.items():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
        schedule = make(optimizer, num_warmup_steps=warmup + 1, num_training_steps=steps)
        assert schedule.get_last_lr() == [0.0]
        wanted = []
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            wanted += schedule.get_last_lr()
        assert rates(steps, shape=shape, warmup=warmup, floor=floor) == pytest.approx(wanted, abs=1e-15)


def test_warmup_stable_decay() -> None:
    found = rates(shape="wsd", warmup=5, floor=0.0, decay_share=0.2)
    assert found[5:81] == [2.0] * 76
    assert found[80:] == pytest.approx([2.0 * (1 - (step - 80) / 19) for step in range(80, 100)])


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd"])
def test_every_shape_rises_then_falls_to_its_floor(shape: str) -> None:
    for steps, warmup in itertools.product((2, 3, 7, 50), (0, 1)):
        found = [learning_rate(step, steps, 1.0, ScheduleConfig(shape=shape, warmup=warmup)) for step in range(steps)]
        assert all(0 < rate <= 1.0 for rate in found)
        assert found[warmup:] == sorted(found[warmup:], reverse=True)
        if steps > warmup + 1:
            assert found[-1] == pytest.approx(0.1)
    assert learning_rate(70, 50, 1.0, ScheduleConfig(shape=shape, warmup=0)) == pytest.approx(0.1)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (3, 0), (4, 1), (30, 7), (399, 99), (400, 100), (1000, 100)])
def test_warmup_is_a_quarter_of_a_short_run_where_none_is_named(steps: int, warmup: int) -> None:
    usual = ScheduleConfig()
    assert usual.warmup_steps(steps) == warmup and ScheduleConfig(warmup=7).warmup_steps(steps) == 7
    by_share = ScheduleConfig(warmup_share=0.03)
    assert by_share.warmup_steps(steps) == -(-3 * steps // 100)
    found = [learning_rate(step, steps, 2.0, usual) for step in range(steps)]
    assert found[:warmup] == [2.0 * (step + 1) / (warmup + 1) for step in range(warmup)]
    assert max(found) == found[warmup] == pytest.approx(2.0)


@pytest.mark.parametrize("steps", [1, 30])
def test_a_short_run_that_names_no_warmup_is_taken(steps: int) -> None:
    assert read_config(RunConfig, ("--train.steps", str(steps)), "train").train.steps == steps


def test_loss_scale() -> None:
    scaler = LossScaler(True)
    start = scaler.scale
    scaler.update(False)
    assert scaler.scale == start / 2
    for _ in range(GROWTH_STEPS - 1):
        scaler.update(True)
    assert scaler.scale == start / 2
    other = LossScaler(True)
    other.restore(scaler.state())
    for item in (scaler, other):
        item.update(True)
        assert item.scale == start
    inert = LossScaler(False)
    inert.restore(scaler.state())
    other.restore(inert.state())
    assert (inert.scale, other.scale) == (1.0, start)
    for _ in range(60):
        scaler.update(False)
    assert scaler.scale == 1.0
    for _ in range(30 * GROWTH_STEPS):
        scaler.update(True)
    assert scaler.scale == LARGEST


def test_no_loss_scale_outside_fp16() -> None:
    scaler = LossScaler(False)
    for finite in (True, False, True):
        scaler.update(finite)
    assert scaler.scale == 1.0


def head(dtype: torch.dtype, cap: float | None = None) -> tuple[torch.Tensor, ...]:
    """Returns (x, weight, targets) and leaves some targets out."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(3, 5, 8, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(23, 8, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, 23, (3, 5), generator=draw)
    targets[0, 2:] = targets[2, 0] = -100
    return x, weight, targets


HEADS = {
    "plain": lambda x, weight: functional.linear(x, weight),
    "capped": lambda x, weight: 5 * torch.tanh(functional.linear(x, weight) / 5),
    "scaled": lambda x, weight: functional.linear(x, weight) * 0.3,
    "read again": lambda x, weight: torch.sigmoid(functional.linear(x, weight)),
    "read again below a view": lambda x, weight: functional.linear(x, weight).log_softmax(-1).view(3, 5, 23),
    "bias": lambda x, weight: functional.linear(x, weight, weight[:, 0]),
    "float": lambda x, weight: functional.linear(x, weight).float(),
    "product": lambda x, weight: x @ weight.T,
    "transposed": lambda x, weight: (weight @ x.transpose(1, 2)).transpose(1, 2),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)]
)
def test_cross_entropy_equals_torch(name: str, dtype: torch.dtype, bound: float) -> None:
    if name == "float" and dtype == torch.float64:
        pytest.skip("float32 logits of float64 weights are covered by float32")
    x, weight, targets = head(dtype)
    loss, sums = cross_entropy_sums(HEADS[name](x, weight), targets, 0.25)
    loss.backward()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    again = [item.detach().clone().requires_grad_() for item in (x, weight)]
    logits = HEADS[name](*again)
    wide = logits.to(torch.float64)
    expected = functional.cross_entropy(wide.reshape(-1, 23), targets.reshape(-1), reduction="sum", ignore_index=-100)
    (expected * 0.25).backward()
    hits = ((logits.argmax(-1) == targets) & (targets != -100)).sum()
    assert sums.dtype == torch.float64 and not sums.requires_grad
    assert sums[0].item() == pytest.approx(expected.item(), rel=max(bound / 10, 1e-13))
    assert sums[1:].tolist() == [int((targets != -100).sum()), int(hits)]
    assert loss.item() == pytest.approx(0.25 * expected.item(), rel=max(bound / 10, 1e-13))
    for found, wanted in zip((x.grad, weight.grad), (item.grad for item in again)):
        assert (found - wanted).abs().max() <= bound * wanted.abs().max()


def test_cross_entropy_hands_an_upstream_factor_on() -> None:
    grads = []
    for scale, factor in ((0.5, 3.0), (1.5, 1.0)):
        x, weight, targets = head(torch.float64)
        (cross_entropy_sums(functional.linear(x, weight), targets, scale)[0] * factor).backward()
        grads.append(weight.grad)
    assert torch.allclose(*grads, rtol=1e-14)


@pytest.mark.parametrize("likeliest", [0, 22])
def test_cross_entropy_of_ignored_targets_alone_is_nothing(likeliest: int) -> None:
    """Nor is a word right that nobody asked for, the first one least of all: it stands in for what is ignored."""
    x, weight, targets = head(torch.float32)
    bias = 100.0 * functional.one_hot(torch.tensor(likeliest), 23)
    loss, sums = cross_entropy_sums(functional.linear(x, weight, bias), torch.full_like(targets, -100), 1.0)
    loss.backward()
    assert loss.item() == 0 and sums.tolist() == [0, 0, 0]
    assert not x.grad.any() and not weight.grad.any()


def test_cross_entropy_leaves_logits_that_others_read() -> None:
    leaf = torch.randn(2, 3, 7, requires_grad=True)
    before = leaf.detach().clone()
    cross_entropy_sums(leaf, torch.zeros(2, 3, dtype=torch.long), 1.0)[0].backward()
    assert torch.equal(leaf, before) and leaf.grad is not None
    with torch.no_grad():
        x, weight, targets = head(torch.float32)
        logits = functional.linear(x, weight)
        before = logits.clone()
        cross_entropy_sums(logits, targets, 1.0)
        assert torch.equal(logits, before)


def small(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)).to(dtype)


def gradients(module: nn.Module, step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(item.shape, generator=draw, dtype=torch.float64).to(item.dtype) for item in module.parameters()]


def factor_of(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "single"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("on_host", [False, True])
def test_adamw_equals_torch_to_the_bit(
    implementation: str, dtype: torch.dtype, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In host memory one weight after the other.
    monkeypatch.setattr(train_optimizer, "HOST_CHUNK", 1)
    ours, theirs = small(dtype), small(dtype)
    options = {implementation: True} if implementation != "single" else {"foreach": False, "fused": False}
    groups = [
        {"params": [item for item in theirs.parameters() if item.dim() >= 2], "weight_decay": 0.3},
        {"params": [item for item in theirs.parameters() if item.dim() < 2], "weight_decay": 0.0},
    ]
    torchs = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6, **options)
    config = OptimizerConfig(beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3, implementation=implementation)
    optimizer = LocalAdamW(named_weights(ours, {}, 1), config, on_host=on_host)
    for step in range(4):
        lr = 0.01 * (step + 1)
        for item, other, grad in zip(ours.parameters(), theirs.parameters(), gradients(ours, step)):
            # Half of the held gradient is the true one: a power of two, so that folding it in rounds nothing.
            item.grad, other.grad = grad * 2, grad
        for group in torchs.param_groups:
            group["lr"] = lr
        optimizer.step(lr, factor_of(0.5))
        torchs.step()
        assert all(torch.equal(item, other) for item, other in zip(ours.parameters(), theirs.parameters()))
    assert optimizer.steps == 4
    assert optimizer.bytes() == 2 * sum(item.nbytes for item in ours.parameters())


@pytest.mark.parametrize("implementation", ["fused", "foreach", "single"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("on_host", [False, True])
def test_a_factor_that_is_not_finite_skips_the_update(implementation: str, value: float, on_host: bool) -> None:
    module = small(torch.float32)
    config = OptimizerConfig(implementation=implementation)
    optimizer = LocalAdamW(named_weights(module, {}, 1), config, on_host=on_host)
    for step, factor in enumerate((1.0, value, 1.0)):
        for item, grad in zip(module.parameters(), gradients(module, step)):
            item.grad = grad if math.isfinite(factor) else torch.full_like(grad, math.nan)
        before = [item.detach().clone() for item in module.parameters()]
        optimizer.step(1e-2, factor_of(factor))
        same = all(torch.equal(item, old) for item, old in zip(module.parameters(), before))
        assert same is not math.isfinite(factor)
        assert all(bool(item.isfinite().all()) for item in module.parameters())
    assert optimizer.steps == (3 if math.isfinite(value) else 2)


@pytest.mark.parametrize("on_host", [False, True])
def test_state_goes_on_to_the_bit(on_host: bool) -> None:
    config = OptimizerConfig()

    def run(module: nn.Module, optimizer: LocalAdamW, steps: range) -> None:
        for step in steps:
            for item, grad in zip(module.parameters(), gradients(module, step)):
                item.grad = grad
            optimizer.step(1e-2, factor_of(1.0))

    first, second = small(torch.float32), small(torch.float32)
    one = LocalAdamW(named_weights(first, {}, 1), config, on_host=on_host)
    run(first, one, range(3))
    saved = {name: tensor.clone() for name, tensor in one.state()}
    two = LocalAdamW(named_weights(second, {}, 1), config, on_host=on_host)
    with torch.no_grad():
        for item, other in zip(second.parameters(), first.parameters()):
            item.copy_(other)
    for name, tensor in two.state():
        tensor.copy_(saved[name])
    two.restored(3)
    run(first, one, range(3, 6))
    run(second, two, range(3, 6))
    assert all(torch.equal(item, other) for item, other in zip(first.parameters(), second.parameters()))


@pytest.mark.parametrize("count", [0, 1, 2 * ROW - 1, 2 * ROW, 2 * ROW + 1, 5_000_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_large_host_tensor_is_exact(count: int, dtype: torch.dtype) -> None:
    """A single sum in float32 is 7e-5 off in five million numbers."""
    module = nn.ParameterList([torch.zeros(count), torch.zeros(3)])
    grads = [torch.linspace(-1, 2, item.numel()).to(dtype) for item in module]
    found = squared_norm(zip(named_weights(module, {}, 1), grads), torch.device("cpu"))
    wanted = sum(float((grad.double().numpy() ** 2).sum()) for grad in grads)
    assert float(found) == pytest.approx(wanted, rel=5e-6)


def test_decay_of_all_weights() -> None:
    module = small(torch.float32)
    optimizer = LocalAdamW(named_weights(module, {}, 1), OptimizerConfig(decay="all", weight_decay=0.5))
    before = [item.detach().clone() for item in module.parameters()]
    for item in module.parameters():
        item.grad = torch.zeros_like(item)
    optimizer.step(0.1, factor_of(1.0))
    for item, old in zip(module.parameters(), before):
        assert torch.allclose(item, old * 0.95)
