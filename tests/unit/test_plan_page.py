"""The page of a plan: its figures are the JSON's, its colours can be told apart, it needs nothing from elsewhere."""

from __future__ import annotations

import html
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.main import main
from meshwright.jobs import plan_sections
from meshwright.jobs.plan_charts import MEMORY_KINDS, STEP_KINDS, TEXTURES, Bar, Kind, assign_kinds, bars, step_kinds
from meshwright.jobs.plan_model import PlanResult, model_of_sizes, plan_model, scale_model
from meshwright.jobs.requests import PlanConfig
from meshwright.monitor.page import page, section_html
from meshwright.planner.cost.prices import MEMORY
from meshwright.planner.explain import NAMES

SIZES = "layers=8,width=2048,heads=16,vocab=32000,ffn=5632"
CONFIG = PlanConfig(sizes=SIZES, cluster="2x8xh100", batch=64, sequence=1024, fix="pp=4", show=5)
UNITS = {"s": 1.0, "ms": 1e-3, "k": 1e3, "M": 1e6, "GiB": 2.0**30, "MiB": 2.0**20}
SEES = {
    "all colours": np.eye(3),
    "no long waves": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no middle waves": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no short waves": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
"""Linear RGB as a dichromat sees it. Source: Machado, Oliveira and Fernandes (2009), table 1, severity 1.0."""
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.180437], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)


@pytest.fixture(scope="module")
def result() -> PlanResult:
    return plan_model(CONFIG, model_of_sizes(SIZES))


@pytest.fixture(scope="module")
def document(result: PlanResult) -> str:
    return page("a plan", plan_sections.plan_sections(result))


def quantity(text: str) -> float:
    """Reads ``4.8 s``, ``437.2 k``, ``65.3 GiB`` or ``40.0%``, by a table of its own."""
    text = text.strip()
    if text.endswith("%"):
        return float(text[:-1]) / 100
    number, _, unit = text.partition(" ")
    return float(number.lstrip("$").replace(",", "")) * UNITS.get(unit, 1.0)


def plain(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", markup)).strip()


def tiles(document: str) -> dict[str, str]:
    pairs = re.findall(r'<div class="tile"><span>(.*?)</span><b>(.*?)</b>', document)
    return {plain(name): plain(value) for name, value in pairs}


def rows(document: str, heading: str) -> list[list[str]]:
    """Returns the cells of the first table of a section."""
    section = document[document.index(f"<h2>{heading}</h2>") :]
    body = section[section.index("<table>") : section.index("</table>")]
    return [[plain(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in body.split("<tr>")[2:]]


def test_tiles_and_table_have_the_figures_of_the_json(result: PlanResult, document: str) -> None:
    best, shown = result.to_json()["best"][0], tiles(document)
    assert quantity(shown["a step"]) == pytest.approx(best["price"]["step_s"], rel=0.01)
    assert quantity(shown["tokens a second"]) == pytest.approx(best["tokens_per_s"], rel=5e-3)  # three digits
    assert quantity(shown["MFU"]) == pytest.approx(best["mfu"], abs=6e-4)
    assert quantity(shown["a device"]) == pytest.approx(best["tflops_per_device"], abs=0.06)
    assert quantity(shown["fullest rank"]) == pytest.approx(best["price"]["peak"], rel=0.01)
    assert quantity(shown["a million tokens"]) == pytest.approx(best["cost_per_mtoken"], abs=6e-5)
    assert quantity(shown["a token"].removesuffix(" J")) == pytest.approx(best["joules_per_token"], abs=6e-4)
    table = rows(document, "The best layouts")
    assert len(table) == 5
    for cells, candidate in zip(table, result.to_json()["best"], strict=True):
        text = candidate["layout"]["text"]
        assert sorted([*cells[0].split(","), "precision=bf16"]) == sorted(text.split(","))
        assert quantity(cells[1]) == pytest.approx(candidate["price"]["step_s"], rel=0.01)
        assert quantity(cells[3]) == pytest.approx(candidate["mfu"], abs=6e-4)


def test_mfu_is_the_papers_formula(result: PlanResult) -> None:
    # PaLM (2022), appendix B: R = P / (6 N + 12 L H Q T); N without the embedding, which multiplies nothing.
    width, ffn, layers, vocab, tokens = 2048, 5632, 8, 32000, 1024
    products = layers * (4 * width * width + 3 * width * ffn) + vocab * width
    flops_per_token = 6 * products + 12 * layers * width * tokens
    for candidate in result.to_json()["best"]:
        assert candidate["tflops_per_device"] * 1e12 == pytest.approx(flops_per_token * candidate["tokens_per_s"] / 16)
        # An H100's data sheet: 989 TFLOP/s, dense bf16.
        assert candidate["mfu"] == pytest.approx(candidate["tflops_per_device"] / 989, rel=1e-3)


def test_segments_add_up_and_are_as_long_as_their_values(result: PlanResult, document: str) -> None:
    bars_of = re.findall(r'class="filled" style="width:([\d.]+)%">(.*?)\n</div>', document, re.DOTALL)
    longest = max(candidate["price"]["step_s"] for candidate in result.to_json()["best"])
    for (filled, segments), candidate in zip(bars_of, result.to_json()["best"]):
        assert float(filled) / 100 == pytest.approx(candidate["price"]["step_s"] / longest, abs=1e-4)
        widths = [float(width) for width in re.findall(r'style="width:([\d.]+)%"', segments)]
        assert sum(widths) == pytest.approx(100, abs=0.1)
        assert len(widths) == sum(seconds > 0 for seconds in candidate["price"]["parts"].values())
    used = {stage["peak"] for stage in result.to_json()["best"][0]["price"]["stages"]}
    memory = [float(filled) / 100 * 85520809984 for filled, _ in bars_of[5:]]
    assert memory and all(min(abs(value - peak) for peak in used) < 2e8 for value in memory)


def test_the_pipeline_has_a_box_for_every_action(result: PlanResult, document: str) -> None:
    drawn = document[document.index("<h2>The pipeline of one step</h2>") :]
    drawn = drawn[: drawn.index("</svg>")]
    layout = result.layout
    stages = layout.degrees["pp"] * layout.stages_per_rank
    boxes = re.findall(r"<rect class=\"f\d\"[^>]*><title>(\w+)", drawn)
    assert boxes.count("forward") == stages * layout.microbatches
    assert len(boxes) in (2 * stages * layout.microbatches, 3 * stages * layout.microbatches)


def test_an_interval_of_the_plan_is_drawn_and_said(result: PlanResult, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = result.to_json()
    step_s = answer["best"][0]["price"]["step_s"]
    answer["best"][0]["step_interval"] = (0.9 * step_s, 1.25 * step_s)
    monkeypatch.setattr(PlanResult, "to_json", lambda _: answer)
    document = page("a plan", plan_sections.plan_sections(result))
    assert document.count('class="interval"') == 1
    left, width = re.search(r'class="interval" style="left:([\d.]+)%;width:([\d.]+)%"', document).groups()
    longest = max(1.25 * step_s, *(candidate["price"]["step_s"] for candidate in answer["best"]))
    assert float(left) == pytest.approx(90 * step_s / longest, abs=0.01)
    assert float(width) == pytest.approx(35 * step_s / longest, abs=0.01)
    for wrong in (None, (1.0,), (2.0, 1.0), (float("nan"), 1.0)):
        assert plan_sections.step_interval({"step_interval": wrong}) is None


def test_the_knee_is_the_curves(result: PlanResult) -> None:
    config = replace(CONFIG, cluster="64xh100", devices="1,8,16,64", fix="")
    scaled = scale_model(config, model_of_sizes(SIZES))
    document = section_html(*plan_sections.scaling_section(scaled))
    answer = scaled.to_json()
    assert ("the knee" in document) == (answer["knee"] is not None)
    table = rows(document, plan_sections.SCALING)
    assert [int(cells[0].split()[0]) for cells in table] == [1, 8, 16, 64]
    for cells, point in zip(table, answer["points"], strict=True):
        assert quantity(cells[3]) == pytest.approx(point["efficiency"], abs=6e-3)
        assert quantity(cells[2]) == pytest.approx(point["best"]["mfu"], abs=6e-4)
    nothing = scale_model(
        replace(config, cluster="2xt4", devices="1,2", batch=1, sequence=1 << 20), model_of_sizes(SIZES)
    )
    assert "No number of devices up to 2" in section_html(*plan_sections.scaling_section(nothing))


def test_every_part_has_a_look_of_its_own() -> None:
    assert len(set(step_kinds().values())) == len(NAMES) and set(step_kinds()) == set(NAMES)
    assert set(STEP_KINDS) <= set(NAMES) and set(MEMORY_KINDS) == set(MEMORY)
    # A part that comes later gets a look that no other has.
    later = assign_kinds([*NAMES, "new", "newer"], STEP_KINDS)
    assert len(set(later.values())) == len(NAMES) + 2 and {kind.texture for kind in later.values()} <= set(TEXTURES)
    assert STEP_KINDS["tp"].texture == STEP_KINDS["reduce"].texture == "hatched" and STEP_KINDS["matmul"] == Kind(0)


def palettes(document: str) -> dict[str, tuple[list[str], list[str]]]:
    """Returns colours and text on them, light and dark, as the page's style defines them first."""
    light, dark = document.split("@media(prefers-color-scheme:dark)")[:2]
    found = {}
    for name, text in (("light", light), ("dark", dark)):
        found[name] = tuple([re.search(rf"--{key}{i}:(#\w+)", text)[1] for i in range(7)] for key in "ct")
    return found


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[start : start + 2], 16) for start in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_differ_for_every_eye_and_carry_readable_text(document: str, theme: str) -> None:
    colours, texts = palettes(document)[theme]
    for sight, matrix in SEES.items():
        seen = [lab(np.asarray(matrix) @ linear(colour)) for colour in colours]
        nearest = min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))
        # Five times the least difference that an eye notices, CIE 1976.
        assert nearest > 5 * 2.3, (sight, nearest)
    for colour, text in zip(colours, texts, strict=True):
        bright, dim = sorted((float(TO_XYZ[1] @ linear(value)) for value in (colour, text)), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 4.5


def test_the_page_needs_nothing_and_escapes_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    path = tmp_path / "plan.html"
    words = ["plan", "--sizes", f"{SIZES},name={hostile}", "--cluster", "8xh100", "--batch", "32", "--sequence", "1024"]
    assert main([*words, "--html", str(path), "--json", "--layout", "tp=3", "replicate=8"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["name"] == hostile
    text = path.read_text()
    assert "<script" not in text and "http" not in text.replace("http://www.w3.org", "") and hostile not in text
    assert "&lt;img src=x" in text and "@media(prefers-color-scheme:dark)" in text
    # What is drawn is said too.
    assert text.count('role="img" aria-label=') >= text.count('class="stack"') > 5


def test_a_bar_says_its_parts() -> None:
    bar = Bar(label="pp=2", values={"matmul": 3.0, "tp": 1.0, "cp": 0.0}, total="4 s")
    drawn = bars([bar], "Seconds", step_kinds(), lambda value: f"{value:g} s", NAMES, full=8.0, limit=6.0)
    assert 'aria-label="pp=2: 4 s; matrix products 3 s, 75.0%; tensor-parallel traffic 1 s, 25.0%"' in drawn
    assert 'class="filled" style="width:50.00%"' in drawn and 'class="limit" style="left:75.00%"' in drawn
    assert "context-parallel" not in drawn
