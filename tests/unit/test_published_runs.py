"""Large published runs as questions: their speeds are those that the sources state, and the comparison counts right."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.published import runs
from benchmarks.published.runs import Compared, PublishedRun, compare, forms, main, read_runs, table
from meshwright.planner.measured_price import price_layout
from meshwright.planner.presets import presets

STATED = {
    "Nemotron-4 340B, 6,144 H100": 0.41,
    "MegaScale 175B, 12,288 A100": 0.552,
    "OLMo 2 32B, 1,024 H100": 0.38,
    "MT-NLG 530B, 2,240 A100": 126 * 0.75 / 312,
    "BLOOM 176B, 384 A100": 149.77 * 0.75 / 312,
    "GPT-3 175B, 1,024 A100": 140 * 0.75 / 312,
}
"""MFU that the sources state; where they count recomputed FLOPs too, three quarters of it."""
SMALL = "Llama 3 8B, 128 H100"


@pytest.fixture(scope="module")
def found() -> dict[str, PublishedRun]:
    return {run.name: run for run in read_runs()}


def test_published_speeds_are_those_that_the_sources_state(found: dict[str, PublishedRun]) -> None:
    assert len(found) == 12 and all(run.source for run in found.values())
    for name, mfu in STATED.items():
        assert found[name].mfu == pytest.approx(mfu, abs=0.015), name


def test_models_without_a_preset_have_the_parameters_of_their_papers(found: dict[str, PublishedRun]) -> None:
    parameters = {name: run.question.job.shape.parameters for name, run in found.items()}
    # GLM-130B's position and norms, and OLMo's norms of queries and keys, are left out.
    assert parameters["GLM-130B, 768 A100-40"] == pytest.approx(130e9, rel=0.02)
    assert parameters["OLMo 2 32B, 1,024 H100"] == pytest.approx(32.2e9, rel=0.01)
    assert presets()["nemotron-4-340b"].sizes.layers == 96


def test_published_layouts_use_all_devices_and_divide_the_batch(found: dict[str, PublishedRun]) -> None:
    for run in found.values():
        options = list(forms(run))
        assert options and len(set(map(str, options))) == len(options), run.name
        for layout in options:
            layout.check_ranks(run.question.cluster.devices)
            layout.check_batch(run.question.job.rows)
            # What the source states is in every form.
            assert all(part in str(layout).split(",") for part in run.layout.split(",")), layout


def test_what_a_source_leaves_open_is_tried(found: dict[str, PublishedRun]) -> None:
    nemotron = [str(layout) for layout in forms(found["Nemotron-4 340B, 6,144 H100"])]
    assert any("stages=8" in text and "recompute=full," in text for text in nemotron)
    assert any("schedule=1f1b" in text and "recompute" not in text for text in nemotron)
    assert len(list(forms(found["BLOOM 176B, 384 A100"]))) == 1


def test_a_run_is_compared_in_one_price(found: dict[str, PublishedRun]) -> None:
    item = compare(found[SMALL])
    again = price_layout(item.run.question, item.published.layout, None)
    assert item.published.price.step_s == again.price.step_s and item.published_fits
    assert item.ratio == pytest.approx(item.choice.mfu / item.published.mfu, rel=1e-9)
    low, high = item.mfu_range
    assert low < item.choice.mfu < high
    for mfu, reached in ((low * 0.9, "below"), (item.choice.mfu, "inside"), (high * 1.1, "above"), (None, "")):
        assert dataclasses.replace(item, run=dataclasses.replace(item.run, mfu=mfu)).reached == reached
    without = dataclasses.replace(item, run=dataclasses.replace(item.run, mfu=None))
    assert table([item, without])[-1].startswith("Published MFU inside the interval of the first choice: ")
    assert " of 1;" in table([item, without])[-1] and " of 2." in table([item, without])[-1]


def test_the_command_prints_and_writes(
    found: dict[str, PublishedRun], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def compare_once(run: PublishedRun) -> Compared:
        calls.append(run.name)
        return compare(run)

    monkeypatch.setattr(runs, "compare", compare_once)
    path = tmp_path / "runs.json"
    assert main(["--only", SMALL, "--json", str(path)]) == 0
    assert calls == [SMALL] and SMALL in capsys.readouterr().out
    (written,) = json.loads(path.read_text())
    assert written["name"] == SMALL and written["published_mfu"] == found[SMALL].mfu
