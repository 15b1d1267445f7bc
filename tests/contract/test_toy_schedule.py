"""A schedule is its file: copies under other names are planned, priced, run, proven and resumed as the originals.

Also one that states no formulas, and schedules of the user's in a file, with and without ``stages=``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from meshwright import schedules
from meshwright.cli.main import main
from meshwright.cluster.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.planner.candidate_prices import price_candidate
from meshwright.planner.choose import choose, search_space
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.price import price_many
from meshwright.planner.question import Question
from meshwright.planner.space import layout_of
from meshwright.proof.layouts import all_layouts
from meshwright.schedules import __main__ as command
from meshwright.schedules import draw
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.simulate import simulate
from meshwright.schedules.spec import find_schedule, known_schedules
from meshwright.spec.layout import Layout
from tests.contract import test_pipeline_models as models
from tests.runs import call, rows, words, write_corpus
from tests.toys import added, copied_schedule

COPIES = {
    "toy": ("gpipe", "gpipe"),
    "toyloop": ("interleaved", "interleaved"),
    "toyhalf": ("zero_bubble", "zerobubble"),
}
"""Name of a copy: the file that it is copied from, and the name of the original."""
PLAIN = "plainfill"
"""A copy of GPipe without its formulas."""
SIZES = TableSizes(name="small", layers=16, width=2048, heads=16, vocab=32000, ffn=5632)
TOY = "pp=4,schedule=toy,microbatches=8"


@pytest.fixture(scope="module", autouse=True)
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    files = {(schedules, name): copied_schedule(module, name) for name, (module, _) in COPIES.items()}
    bare = copied_schedule("gpipe", PLAIN)
    bare, count = re.subn(r"(?m)^    (step_s|in_flight|bubble|bubble_text)=.*\n", "", bare)
    assert count == 4
    with added(tmp_path_factory.mktemp("toys"), files | {(schedules, PLAIN): bare}):
        yield


def question(limits: dict | None = None, devices: int = 8, rows_: int = 64) -> Question:
    job = PricedJob(shape=shape_from_sizes(SIZES), sequence=2048, rows=rows_)
    cluster = Cluster.parse(f"{devices}xh100")
    return Question(job=job, cluster=cluster, base=Layout(precision="bf16"), limits=limits or {})


def test_it_is_found_by_its_name() -> None:
    assert find_schedule("toy").name == "toy"
    assert Layout.parse(TOY).pipeline().actions == Layout.parse(TOY.replace("toy", "gpipe")).pipeline().actions
    assert {layout.schedule for layout in all_layouts(2)} >= {*COPIES, PLAIN}
    with pytest.raises(PlanError, match="did you mean 'toyhalf'"):
        find_schedule("toyhalv")


@pytest.mark.parametrize("name", COPIES)
def test_time_and_memory_are_those_of_the_original(name: str) -> None:
    """Over degrees, micro-batches, ZeRO levels, recompute and stages: every part of time and memory, to the bit."""
    asked, pairs = question(), list[tuple[Layout, Layout]]()
    sizes = product((2, 4), ("replicate=2", "shard=2,zero=1", "tp=2"), (8, 16), ("none", "full"), (0, 2, 4))
    for pp, data, micro, recompute, stages in sizes:
        text = f"pp={pp},{data},microbatches={micro},recompute={recompute},stages={stages},precision=bf16,schedule="
        try:
            known_schedules()[name].check(pp, stages or known_schedules()[name].least_stages, micro)
        except PlanError:
            continue
        pairs.append((Layout.parse(text + name), Layout.parse(text + COPIES[name][1])))
    assert len(pairs) >= 20
    copies, originals = ([pair[at] for pair in pairs] for at in (0, 1))
    blocks = len(asked.job.shape.blocks)
    priced = [
        price_many(asked.job, LayoutBatch.from_layouts(some, blocks), asked.machine, asked.runtime)
        for some in (copies, originals)
    ]
    assert priced[0].step_s.tolist() == priced[1].step_s.tolist()
    for part in priced[0].memory:
        assert priced[0].memory[part].tolist() == priced[1].memory[part].tolist()
    for copy, original in pairs[::5]:
        assert price_candidate(asked, copy).price == price_candidate(asked, original).price


def test_without_formulas_it_is_priced_by_its_actions() -> None:
    """It holds every micro-batch, as GPipe does; as 1F1B, which it was priced as once, it would hold four."""
    text = "pp=4,shard=2,zero=1,microbatches=32,precision=bf16,schedule="
    bare, gpipe, usual = (
        price_candidate(question(), Layout.parse(text + name)).price for name in (PLAIN, "gpipe", "1f1b")
    )
    assert [stage.held for stage in bare.stages] == [32] * 4 == [stage.held for stage in gpipe.stages]
    assert bare.memory == gpipe.memory and bare.peak == gpipe.peak > 2 * usual.peak
    assert bare.step_s == pytest.approx(gpipe.step_s, rel=1e-9)


def test_the_search_looks_at_it() -> None:
    """Unasked where its file says so; where it is asked for it finds what it finds with the original."""
    best = {}
    for name in ("toyloop", "interleaved", "toy", "gpipe", PLAIN):
        asked = question({"fixed": {"pp": 4}, "schedules": (name,)})
        found = choose(asked, 4)
        best[name] = [(str(one.layout).replace(name, "X"), one.price.step_s, one.price.peak) for one in found.best]
        assert all(one.layout.schedule == name for one in found.best)
    assert best["toyloop"] == best["interleaved"] and best["toy"] == best["gpipe"]
    assert [layout for layout, *_ in best[PLAIN]] == [layout for layout, *_ in best["toy"]]
    asked = question({"fixed": {"pp": 4}})
    assert "toyloop" in asked.space.schedules and "toy" not in asked.space.schedules
    found = search_space(asked)
    assert found.best is not None
    degrees, _ = found.best
    seen = {layout_of(degrees, at, asked.base, 16).schedule for at in range(degrees.count)}
    assert {"toyloop", "interleaved"} <= seen


def test_it_is_listed_and_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--json"]) == 0
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    for name, (_, original) in COPIES.items():
        assert listed[name] == listed[original] | {"name": name}
    pictures = []
    for name in ("toy", "gpipe"):
        schedule = Layout.parse(TOY.replace("toy", name)).pipeline()
        seen = simulate(schedule, ActionCosts.uniform(schedule.stages))
        pictures.append((draw.text(seen), draw.svg(seen).replace(f">{name}:", ">X:")))
        assert command.main(["--draw", name]) == 0
        assert capsys.readouterr().out == pictures[-1][0]
    assert pictures[0] == pictures[1]


PLAN = ("plan", "--sizes", "layers=8,width=512,heads=8,vocab=1024", "--cluster", "8xh100", "--batch", "32", "--json")


def test_the_command_plans_with_it_and_inspects_it(capsys: pytest.CaptureFixture[str]) -> None:
    told = {}
    for name in ("toy", "gpipe"):
        layout = f"pp=4,replicate=2,microbatches=8,schedule={name}"
        assert main([*PLAN, "--fix", "pp=4", "--schedules", name, "--layout", layout]) == 0
        report = json.loads(capsys.readouterr().out)
        assert f"schedule={name}" in report["plan"]
        told[name] = ([one["price"] for one in report["best"]], list(report["compared"].values()))
        assert main(["inspect", "gpt2", "--layout", f"pp=2,microbatches=4,schedule={name}", "--json"]) == 0
        told[name] += (json.loads(capsys.readouterr().out.replace(f"schedule={name}", "schedule=X")),)
    assert told["toy"] == told["gpipe"]


def test_any_plan_with_it_equals_one_rank() -> None:
    texts = [f"pp=2,microbatches=4,schedule={name}" for name in (*COPIES, PLAIN)]
    models.all_pass("gpt2", *texts, "pp=2,shard=2,zero=2,microbatches=4,schedule=toy,recompute=full")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus.txt", 60)
    return tmp_path


TRAIN = ("--model.layers", "4", "--train.steps", "4", "--checkpoint.every", "2")


def losses(root: Path, run: str, layout: str, *more: str, devices: int = 2) -> list[tuple[float, float]]:
    """Trains with a history of its own, by which plans would be corrected; returns the loss and norm of each step."""

    def alone() -> None:
        os.environ["XDG_CACHE_HOME"] = str(root / f"{run}-cache")

    argv = words(root, run, *TRAIN, *more, layout=layout, devices=devices)
    status, text = call(argv, root / f"{run}.log", before=alone)
    assert status == 0, text
    return [(row["loss"], row["grad_norm"]) for row in rows(root / run)]


@pytest.mark.slow
def test_a_run_with_it_is_that_of_the_original_and_is_resumed(root: Path) -> None:
    """Losses to the bit; its checkpoint goes on under it, under the original, and on one rank."""
    layout = "pp=2,microbatches=4,schedule="
    toy = losses(root, "toy", layout + "toy")
    assert len(toy) == 4 and toy == losses(root, "gpipe", layout + "gpipe")
    plans = [json.loads((root / name / "plan.json").read_text()) for name in ("toy", "gpipe")]
    assert "schedule=toy" in plans[0]["layout"]["text"]
    assert plans[0]["prediction"]["step_s"] == plans[1]["prediction"]["step_s"] > 0
    later = {}
    for name, start, text in (
        ("of the original", "gpipe", layout + "gpipe"),
        ("of the copy", "toy", layout + "toy"),
        ("across", "toy", layout + "gpipe"),
        ("one rank", "toy", "microbatches=4"),
    ):
        shutil.copytree(root / start, root / name)
        found = losses(root, name, text, "--train.steps", "8", devices=1 if name == "one rank" else 2)
        assert found[:4] == toy and len(found) == 8
        later[name] = found[4:]
    assert later["of the copy"] == later["across"] == later["of the original"]
    for one, many in zip(later["one rank"], later["across"]):
        assert one == pytest.approx(many, rel=1e-5)


def file_of(name: str, place: Path, ranks: int = 2, microbatches: int = 4) -> Path:
    path = place / f"{name}.csv"
    spec = known_schedules()[name]
    path.write_text(spec.build(ranks, spec.least_stages, microbatches).to_csv())
    return path


@pytest.mark.parametrize("stages", ["", ",stages=2"])
def test_a_file_is_planned_and_proven_with_stages_and_without(
    stages: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_of("interleaved", tmp_path)
    layout = f"pp=2,replicate=4,microbatches=4,schedule=file:{path}{stages}"
    known = "pp=2,replicate=4,microbatches=4,schedule=interleaved"
    assert main([*PLAN, "--layout", layout, known]) == 0
    told = list(json.loads(capsys.readouterr().out)["compared"].values())
    assert told[0].startswith("fits, ") and told[0] == told[1]
    models.all_pass("gpt2", f"pp=2,microbatches=4,schedule=file:{path}{stages}")
    sizes = ["--ranks", "2", "--microbatches", "4", *(["--stages-per-rank", "2"] if stages else [])]
    assert command.main(["--draw", f"file:{path}", *sizes]) == 0
    assert main([*PLAN, "--schedules", f"file:{path}"]) == 2
    assert "is of one size; compare it by --layout" in capsys.readouterr().err


def test_what_devices_of_several_kinds_have_no_search_for_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """There pipelines run 1F1B: a schedule that is asked for was passed over in silence."""
    argv = list(PLAN)
    argv[argv.index("--cluster") + 1] = "8xh100+8xa100-40"
    for more in (["--schedules", "toy"], ["--fix", "tp=2"], ["--fix", "zero=1"]):
        assert main([*argv, *more]) == 2
        assert "name whole layouts by --layout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("pp=2,microbatches=4,stages=3", "take 2"),
        ("pp=2,microbatches=8", "runs 4 micro-batches, the step has 8; take 4"),
        ("pp=4,microbatches=4", "has 2 rows, the pipeline 4 ranks"),
    ],
)
def test_a_file_of_other_sizes_is_refused_with_a_cure(
    text: str, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_of("interleaved", tmp_path)
    layout = f"{text},schedule=file:{path}"
    ranks = int(text[3])
    assert main([*PLAN, "--layout", f"{layout},replicate={8 // ranks}"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["compared"].values()
    assert told.startswith("can't be: ") and rule in told
    (verdict,) = models.verify(models.case("gpt2"), [Layout.parse(f"{layout},precision=float64")])
    assert rule in (verdict.refused or "")


@pytest.mark.slow
def test_a_run_with_a_file_has_a_whole_plan(root: Path) -> None:
    path = file_of("interleaved", root)
    known = losses(root, "known", "pp=2,microbatches=4,schedule=interleaved")
    for run, stages in (("bare", ""), ("named", ",stages=2")):
        assert losses(root, run, f"pp=2,microbatches=4,schedule=file:{path}{stages}") == known
        plans = [json.loads((root / name / "plan.json").read_text()) for name in (run, "known")]
        assert plans[0]["prediction"]["memory"] == plans[1]["prediction"]["memory"]
        assert plans[0]["prediction"]["step_s"] == pytest.approx(plans[1]["prediction"]["step_s"], rel=1e-9)
    layout = f"pp=2,microbatches=4,stages=3,schedule=file:{path}"
    status, text = call(words(root, "odd", *TRAIN, layout=layout, devices=2), root / "odd.log")
    assert status == 2 and "take 2" in text
