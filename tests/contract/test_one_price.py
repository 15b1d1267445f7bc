"""What `plan` prints has one price: a named layout is never faster than the plan, and the plan equals itself."""

from __future__ import annotations

import dataclasses
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.cluster.calibration import FORMS, Calibration
from meshwright.jobs.plan_model import model_of_sizes, question_of
from meshwright.jobs.requests import PlanConfig
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.space import cores, expand, layout_of
from meshwright.units import format_seconds
from tests.tiers import further

SIZES = ("--model.layers", "2", "--model.width", "64", "--model.heads", "4", "--model.vocab", "256")
MODELS = {"dense": ("llama", ()), "mixture": ("mixtral", ("--model.experts", "4"))}
RANKS = 2


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine whose rates are far from the catalogue's, so that a price by the wrong ones shows."""
    sizes = (16, 4096)
    products = [
        ("float32", form, True, m, n, k, 2.0 * m * n * k / 1e10)
        for form, m, n, k in product(FORMS, sizes, sizes, sizes)
    ]
    plain = [(name, "float32", True, count, count / 1e9) for name in ("copy", "add", "mul") for count in (10, 1000)]
    made = Calibration(
        machine={"kind": "cpu", "cores": RANKS}, ranks=RANKS, matmul=tuple(products), operations=tuple(plain),
        attention=tuple(("float32", True, 1, sequence, 16, 1e-4, 2e-4) for sequence in (16, 64)),
        optimizer=((10, 1e-8), (1000, 1e-6)), host=(("operator_forward", 1e-5), ("operator_backward", 2e-5)),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("calibration") / "machine.json"
    made.write(path)
    return path


def planned(argv: list[str], capsys: pytest.CaptureFixture[str], *layouts: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*argv, *(("--layout", *layouts) if layouts else ())]) == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("measured", further([False, True], (1,)), ids=["catalogue", "calibrated"])
@pytest.mark.parametrize("kind", further(MODELS, ("dense",)))
def test_no_layout_of_the_space_is_faster_than_the_plan(
    kind: str, measured: bool, calibration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, more = MODELS[kind]
    argv = ["plan", "--model", name, *SIZES, *more, "--cluster", f"{RANKS}xcpu", "--batch", "8", "--sequence", "32"]
    argv += ["--json", *(("--calibration", str(calibration)) if measured else ())]
    alone = planned(argv, capsys)
    best = alone["best"][0]["price"]["step_s"]
    again = planned(argv, capsys, alone["plan"])
    assert list(again["compared"].values()) == [f"fits, {format_seconds(best)} a step: is the plan"]
    every = planned(argv, capsys, *layouts_of(kind))
    assert len(every["compared"]) >= 20
    told = [why for why in every["compared"].values() if "faster than the plan" in why]
    assert all("which the model can't tell" in why for why in told), told
    assert every["plan"] == alone["plan"] or "is the plan" in every["compared"][every["plan"]]


def layouts_of(kind: str) -> list[str]:
    """Layouts all over the space, in their text form."""
    sizes = {"layers": 2, "width": 64, "heads": 4, "vocab": 256}
    if kind == "mixture":
        sizes |= {"experts": 4, "active_experts": 2, "expert_ffn": 128}
    shape = shape_from_sizes(TableSizes(name=kind, **sizes))
    config = PlanConfig(sizes="layers=2,width=64,heads=4,vocab=256", cluster=f"{RANKS}xcpu", batch=8, sequence=32)
    question = question_of(config, model_of_sizes(config.sizes))
    question = dataclasses.replace(question, job=dataclasses.replace(question.job, shape=shape))
    degrees = expand(question.job, question.space, cores(question.job, question.space))
    return [str(layout_of(degrees, at, question.base, 2)) for at in range(0, degrees.count, 1 + degrees.count // 40)]
