"""Products in float8 are those of torchao's own modules, bit by bit; layouts are off by what they do to one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from meshwright.cluster.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.models.analysis.small_config import shrink_config
from meshwright.models.config import ModelConfig
from meshwright.parallel import float8
from meshwright.parallel.float8 import Float8Product, float8_linears
from meshwright.planner.candidate_prices import price_candidate
from meshwright.planner.choose import choose
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.question import Question
from meshwright.spec.layout import Layout
from meshwright.spec.layout_fields import FLOAT8_RECIPES
from meshwright.torch_compat.torchao_import import import_torchao
from tests.contract.test_low_precision import prove
from tests.tiers import cases

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="pip install 'meshwright[fp8]'")

LLAMA = shrink_config(ModelConfig(name="llama"), layers=2, width=64)
LLAMA_8B = shape_from_sizes(
    TableSizes(name="llama", layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
)
LAYOUTS = ("tp=2,sequence=true", "shard=2,zero=3,microbatches=2,recompute=selective", "pp=2,microbatches=2")


@pytest.fixture(scope="module", autouse=True)
def torchao_loaded() -> Iterator[None]:
    import_torchao("torchao.float8")
    yield


def torchao_module(linear: nn.Linear, recipe: str) -> nn.Module:
    """The linear as a user of torchao converts it."""
    torchao = import_torchao("torchao.float8")
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=True, pad_inner_dim=True)
    return torchao.convert_to_float8_training(nn.Sequential(linear), config=config)[0]


@pytest.mark.parametrize("tokens", [16, 13, 1])
@pytest.mark.parametrize("recipe", FLOAT8_RECIPES.values())
def test_a_product_and_its_gradients_are_those_of_torchaos_module(recipe: str, tokens: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 32, dtype=torch.bfloat16)
    x = torch.randn(2, tokens, 48, dtype=torch.bfloat16)
    results = []
    for call in (
        lambda inputs: Float8Product(linear, recipe, emulate=True)(inputs, linear.weight) + linear.bias,
        torchao_module(linear, recipe),
        linear,
    ):
        inputs = x.clone().requires_grad_()
        linear.zero_grad()
        y = call(inputs)
        y.float().square().sum().backward()
        assert inputs.grad is not None and linear.weight.grad is not None
        results.append((y.detach(), inputs.grad, linear.weight.grad.clone()))
    ours, theirs, in_bf16 = results
    for mine, reference, plain in zip(ours, theirs, in_bf16):
        assert torch.equal(mine, reference)
        distance = float((mine - plain).norm() / plain.norm())
        assert 1e-3 < distance < 0.1, "neither bf16 nor another product"


def test_dims_that_are_no_multiples_of_16_and_extended_modules_stay_as_they_are() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    layer = nn.ModuleDict({"a": nn.Linear(32, 48), "b": nn.Linear(32, 40), "c": nn.Linear(24, 32), "d": Scaled(32, 32)})
    assert list(float8_linears(layer)) == ["a"]


def test_an_expert_without_tokens_gets_none_back() -> None:
    linear = nn.Linear(32, 16, dtype=torch.bfloat16)
    x = torch.zeros(0, 32, dtype=torch.bfloat16, requires_grad=True)
    y = Float8Product(linear, "tensorwise", emulate=True)(x, linear.weight)
    assert y.shape == (0, 16)
    y.sum().backward()
    assert linear.weight.grad is not None and not linear.weight.grad.any()


@pytest.mark.parametrize(
    ("precision", "layout"), cases([(name, layout) for name in FLOAT8_RECIPES for layout in LAYOUTS], [0, 4, 5])
)
def test_layouts_are_off_by_what_float8_does_to_one_device(precision: str, layout: str) -> None:
    (verdict,) = prove(LLAMA, precision, layout, steps=1)
    assert verdict.passed, verdict
    # torchao's plain device is off by some percent of a gradient; in bf16 it would be 0.3 %.
    assert verdict.grad_error > 0.02, "nothing was in float8"


def test_products_of_another_scale_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 multiplies by operands that were cast twice: an error of the size of float8's own, in one direction."""
    plain = Float8Product.__call__

    def off(self: Float8Product, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return plain(self, x, weight) * 1.25

    monkeypatch.setattr(Float8Product, "__call__", off)
    (verdict,) = prove(LLAMA, "fp8", "tp=2", steps=1)
    assert not verdict.passed


def test_a_model_without_such_modules_is_refused() -> None:
    (verdict,) = prove(dataclasses.replace(LLAMA, width=40, ffn=40), "fp8", "tp=2", steps=1)
    assert "multiples of 16" in verdict.refused, verdict


def test_without_torchao_it_is_refused_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "has_torchao", lambda: False)
    with pytest.raises(PlanError, match=r"pip install 'meshwright\[fp8\]'"):
        float8.check(Layout(precision="fp8"), 2)


def question(cluster: str, precision: str) -> Question:
    base = Layout(precision=precision)
    job = PricedJob(
        shape=LLAMA_8B,
        sequence=8192,
        rows=16,
        precision=base.compute_precision,
        products=base.product_precision,
    )
    return Question(job=job, cluster=Cluster.parse(cluster), base=base)


def test_the_planner_prices_it_and_refuses_devices_without_it() -> None:
    plans = {name: choose(question("8xh100", name)).best[0] for name in ("bf16", "fp8")}
    assert plans["fp8"].layout.precision == "fp8"
    # Products are a bit more than half of such a step, and at most twice as fast.
    assert 0.5 < plans["fp8"].price.step_s / plans["bf16"].price.step_s < 0.95
    named = dataclasses.replace(plans["bf16"].layout, precision="fp8")
    in_its_own = price_candidate(question("8xh100", "fp8"), named).price.step_s
    assert price_candidate(question("8xh100", "bf16"), named).price.step_s == in_its_own
    with pytest.raises(PlanError, match=r"a100.* has no products in fp8"):
        price_candidate(question("8xa100", "bf16"), named)
