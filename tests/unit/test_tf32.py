"""Products in TF32: which modules keep exact ones, when, and where the precision is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import verify
from meshwright.cluster import catalogue
from meshwright.cluster.cluster import Cluster
from meshwright.errors import ConfigError, PlanError
from meshwright.jobs import product_checks
from meshwright.jobs.product_checks import check_products
from meshwright.launch.devices import Devices
from meshwright.models.analysis import unweighted_products
from meshwright.models.analysis.unweighted_products import find_unweighted_products
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel import float8
from meshwright.parallel.tf32 import exact_modules, float32_products, use_tf32
from meshwright.planner.device_limits import check_products as check_planned
from meshwright.spec.layout import Layout
from meshwright.train.model_analysis import analyse_model

LAYOUT = Layout(precision="tf32")


@pytest.fixture(autouse=True)
def _setting() -> Iterator[None]:
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


class Angles(nn.Module):
    """Says under which setting it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.ones(2))
        self.seen: list[bool] = []

    def forward(self) -> None:
        """Notes the setting."""
        self.seen.append(torch.backends.cuda.matmul.allow_tf32)


def test_only_modules_without_weights_keep_exact_products() -> None:
    model = nn.ModuleDict({"angles": Angles(), "linear": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2), "act": nn.GELU()})
    assert exact_modules(model) == [model["angles"]]
    use_tf32(model)
    assert torch.backends.cuda.matmul.allow_tf32
    model["angles"]()
    assert model["angles"].seen == [False]
    assert torch.backends.cuda.matmul.allow_tf32, "what comes after it rounds again"


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma3_text", "mixtral", "phi3", "olmo2", "cohere"])
def test_rotary_angles_of_public_models_are_found(name: str) -> None:
    module = build_meta(ModelConfig(name=name, layers=2, width=64, heads=4, vocab=64, context=32)).module
    found = {type(child).__name__ for child in exact_modules(module)}
    assert found and all("Rotary" in kind for kind in found), found
    assert not exact_modules(build_meta(ModelConfig(name="gpt2", layers=1, width=64, heads=4)).module)


class RotaryAttention(nn.Module):
    """Attention by hand that makes its own angles, by a buffer beside its weights."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.register_buffer("inv_freq", 1.0 / 100 ** (torch.arange(0, width, 2) / width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[1], dtype=self.inv_freq.dtype)[:, None] @ self.inv_freq[None]
        query, key, value = self.qkv(x).chunk(3, -1)
        turned = torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype)
        return F.scaled_dot_product_attention(query * turned, key * turned, value, is_causal=True)


class HandMade(nn.Module):
    """A language model of two such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(RotaryAttention() for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def test_a_model_that_makes_its_angles_beside_weights_is_refused() -> None:
    built = build_meta(ModelConfig(name="tests.unit.test_tf32:HandMade"))
    assert find_unweighted_products(built) == ["layers.0", "layers.1"]
    with pytest.raises(PlanError, match=r"a product in layers.0 that no weight enters.*nearest.*float32"):
        analyse_model(built, LAYOUT)
    analyse_model(built, Layout())


class Rotary(nn.Module):
    """Angles by a product, in a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(4))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return positions[:, None].to(self.inv_freq.dtype) @ self.inv_freq[None]


class WithRotary(HandMade):
    """The same with a module for angles; each layer's own frequencies are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        angles = self.rotary(torch.arange(tokens.shape[1]))
        return super().forward(tokens) + angles.sum(-1)[None, :, None]


def test_products_in_a_module_without_weights_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build_meta(ModelConfig(name="tests.unit.test_tf32:WithRotary"))
    assert find_unweighted_products(built) == []
    monkeypatch.setattr(unweighted_products, "exact_modules", lambda _module: [])
    assert find_unweighted_products(built) == ["rotary"], "the product is there"


def test_the_setting_is_as_before_behind_a_block() -> None:
    for before in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = before
        with float32_products(rounded=not before):
            assert torch.backends.cuda.matmul.allow_tf32 is not before
        assert torch.backends.cuda.matmul.allow_tf32 is before


def test_devices_without_tensor_cores_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"processor cores; nearest that works: precision=float32"):
        check_products(LAYOUT, Devices(kind="cpu", count=2, found=2, cores=2))
    monkeypatch.setattr(product_checks, "least_compute_capability", lambda: 7.0)
    with pytest.raises(ConfigError, match=r"capability 8.0, here is one of 7.0; nearest that works: precision=float32"):
        check_products(LAYOUT, Devices(kind="cuda", count=1, found=1, cores=2))
    monkeypatch.setattr(product_checks, "least_compute_capability", lambda: 8.0)
    check_products(LAYOUT, Devices(kind="cuda", count=1, found=1, cores=2))


def test_float8_is_refused_without_torchao_before_the_reference_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "has_torchao", lambda: False)
    with pytest.raises(PlanError, match=r"pip install 'meshwright\[fp8\]'.*precision=bf16"):
        verify(model=ModelConfig(name="llama"), layout="tp=2", dtype="fp8", steps=1)


def test_the_planner_refuses_it_where_devices_have_no_such_rate() -> None:
    with pytest.raises(PlanError, match=r"v100.* has no products in tf32; nearest that works: precision=float32"):
        check_planned(LAYOUT, Cluster.parse("8xv100"))
    check_planned(LAYOUT, Cluster.parse("8xh100"))


def test_state_and_activations_are_those_of_float32() -> None:
    assert (LAYOUT.compute_precision, LAYOUT.product_precision) == ("float32", "tf32")
    assert not LAYOUT.is_mixed_precision
    assert catalogue.device("h100").peak("tf32") > catalogue.device("h100").peak("float32")
