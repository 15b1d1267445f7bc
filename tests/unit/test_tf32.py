"""Products in TF32: which modules keep exact ones, when, and where the precision is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from meshwright.cluster import catalogue
from meshwright.cluster.cluster import Cluster
from meshwright.errors import ConfigError, PlanError
from meshwright.jobs import product_checks
from meshwright.jobs.product_checks import check_products
from meshwright.launch.devices import Devices
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel.tf32 import exact_modules, use_tf32
from meshwright.planner.device_limits import check_products as check_planned
from meshwright.spec.layout import Layout

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


def test_devices_without_tensor_cores_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"processor cores; nearest that works: precision=float32"):
        check_products(LAYOUT, Devices(kind="cpu", count=2, found=2, cores=2))
    monkeypatch.setattr(product_checks, "least_compute_capability", lambda: 7.0)
    with pytest.raises(ConfigError, match=r"capability 8.0, here is one of 7.0; nearest that works: precision=float32"):
        check_products(LAYOUT, Devices(kind="cuda", count=1, found=1, cores=2))
    monkeypatch.setattr(product_checks, "least_compute_capability", lambda: 8.0)
    check_products(LAYOUT, Devices(kind="cuda", count=1, found=1, cores=2))


def test_the_planner_refuses_it_where_devices_have_no_such_rate() -> None:
    with pytest.raises(PlanError, match=r"v100.* has no products in tf32; nearest that works: precision=float32"):
        check_planned(LAYOUT, Cluster.parse("8xv100"))
    check_planned(LAYOUT, Cluster.parse("8xh100"))


def test_state_and_activations_are_those_of_float32() -> None:
    assert (LAYOUT.compute_precision, LAYOUT.product_precision) == ("float32", "tf32")
    assert not LAYOUT.is_mixed_precision
    assert catalogue.device("h100").peak("tf32") > catalogue.device("h100").peak("float32")
