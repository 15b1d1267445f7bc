"""An axis is its facts: copies under other names are planned, priced, run, proven and checkpointed as the originals.

``twin`` is a copy of ``replicate``, which changes no module: one file of facts. ``ring`` is a copy of ``cp``, which
does: facts and a file of mechanics.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import parallel
from meshwright.cli.main import main
from meshwright.cluster.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.jobs.model_reading import model_parts
from meshwright.models.analysis.table import sharding_table
from meshwright.models.measure import measure_shape
from meshwright.monitor.rundir import read_run
from meshwright.monitor.sections import layout_grid
from meshwright.parallel.build import check
from meshwright.planner.candidate_prices import price_candidate
from meshwright.planner.choose import choose
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.price import price_many
from meshwright.planner.memory import position_memory
from meshwright.planner.question import Question
from meshwright.planner.space import contains, cores, expand, layout_of
from meshwright.planner.traffic import step_collectives
from meshwright.proof.layouts import all_layouts, data_layouts
from meshwright.proof.verify import random_batches, verify
from meshwright.spec import axes
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Mechanics
from meshwright.spec.groups import gradient_axes, loss_axes, mesh_shape, reader, state_axes
from meshwright.spec.layout import Layout
from meshwright.strategy.mesh import layout_of_dims
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from tests.contract import test_pipeline_models as models
from tests.ranks import test_traffic as traffic
from tests.ranks.group import run_ranks
from tests.runs import call, rows, words, write_corpus
from tests.toys import added, copied_axis, copied_mechanics

ORIGINAL = {"twin": "replicate", "ring": "cp"}
SIZES = TableSizes(name="small", layers=16, width=2048, heads=16, vocab=32000, ffn=5632)


@pytest.fixture(scope="module", autouse=True)
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    files = {
        (axes, "twin"): copied_axis("replicate", "twin", 25),
        (axes, "ring"): copied_axis("cp", "ring", 45),
        (parallel, "ring_context"): copied_mechanics("context", "cp", "ring"),
    }
    with added(tmp_path_factory.mktemp("toys"), files):
        yield


def original(text: str) -> str:
    """The text of a layout with the axes that toys are copies of."""
    for name, other in ORIGINAL.items():
        text = text.replace(f"{name}=", f"{other}=")
    return text


def question(limits: dict[str, Any] | None = None, devices: str = "8xh100") -> Question:
    job = PricedJob(shape=shape_from_sizes(SIZES), sequence=2048, rows=64)
    return Question(job=job, cluster=Cluster.parse(devices), base=Layout(precision="bf16"), limits=limits or {})


def test_groups_follow_from_its_facts() -> None:
    layout = Layout.parse("twin=2,shard=2,zero=2")
    assert str(layout) == "twin=2,shard=2,zero=2" and layout.world == 4
    assert tuple(mesh_shape({})) == ("islands", "pp", "replicate", "twin", "shard", "cp", "ring", "tp")
    assert loss_axes() == ("replicate", "twin", "shard", "cp", "ring")
    assert state_axes(2) == ("shard", "cp", "ring") and gradient_axes(state_axes(2)) == ("replicate", "twin")
    assert [reader(rank, layout.degrees) for rank in range(4)] == [(rank, 4) for rank in range(4)]
    assert layout.describe_rank(3) == "rank 3: twin 1, shard 1"
    with pytest.raises(PlanError, match=r"cp=2 and ring=2 both split the same work.*write cp=4"):
        Layout.parse("cp=2,ring=2")
    with pytest.raises(PlanError, match="attention=gather has no effect without cp"):
        Layout.parse("attention=gather")
    assert Layout.parse("ring=2,attention=gather").degree(Mechanics.TOKENS) == 2
    with pytest.raises(PlanError, match="did you mean 'twin'"):
        Layout.parse("twim=2")


def test_time_and_memory_are_those_of_the_original() -> None:
    """Over degrees, ZeRO levels, micro-batches and recompute, on one node and on several: to the bit."""
    for devices in ("16xh100", "4x4xa100-80"):
        asked = question(devices=devices)
        texts = []
        for data, rest, micro, recompute in product(
            ("twin=16", "twin=4,shard=4,zero=1", "twin=2,shard=8,zero=2", "twin=2,shard=8,zero=3"),
            ("", "tp=2", "pp=2", "ring=2", "pp=2,tp=2"),
            (1, 2),
            ("none", "full"),
        ):
            degrees = dict(part.split("=") for part in (data + "," + rest).split(",") if part)
            by = 16 // (int(degrees.get("tp", 1)) * int(degrees.get("pp", 1)) * int(degrees.get("ring", 1)))
            twin = by // int(degrees.get("shard", 1))
            if twin > 1:
                text = ",".join([*(f"{k}={v}" for k, v in (degrees | {"twin": str(twin)}).items())])
                texts.append(f"{text},microbatches={micro},recompute={recompute},precision=bf16")
        pairs = [(Layout.parse(text), Layout.parse(original(text))) for text in texts]
        assert len(pairs) >= 40 and all(first.world == 16 for first, _ in pairs)
        prices = [
            price_many(asked.job, LayoutBatch.from_layouts(some, 16), asked.machine, asked.runtime)
            for some in zip(*pairs)
        ]
        assert prices[0].step_s.tolist() == prices[1].step_s.tolist() and prices[0].step_s.min() > 0
        for part in prices[0].memory:
            assert prices[0].memory[part].tolist() == prices[1].memory[part].tolist()
        for copy, other in pairs[::9]:
            assert price_candidate(asked, copy).price == price_candidate(asked, other).price
        for copy, other in pairs[::29]:
            state = [position_memory(one, models_parts(one)) for one in (copy, other)]
            assert [one.memory for one in state[0]] == [one.memory for one in state[1]]


def test_replicate_and_its_copy_are_one_number_of_copies() -> None:
    asked = question()
    both, one = Layout.parse("replicate=2,twin=4,precision=bf16"), Layout.parse("replicate=8,precision=bf16")
    assert price_candidate(asked, both).price == price_candidate(asked, one).price


def models_parts(layout: Layout) -> Any:
    built = traffic.model("llama")
    return model_parts(built, analyse_model(built, layout))


def test_the_search_finds_it_where_it_is_asked_for() -> None:
    """Unasked ``replicate`` stands for both, since they cost the same; what is given stays as given."""
    plain = choose(question(), 5)
    assert {name for one in plain.best for name in one.layout.degrees}.isdisjoint(ORIGINAL)
    for toy, name in ORIGINAL.items():
        found, known = (choose(question({"fixed": {axis: 2}}), 5) for axis in (toy, name))
        assert all(one.layout.degree(toy) == 2 for one in found.best)
        if toy == "ring":  # of ``replicate`` a search gives 2 in all; of ``twin`` 2, and ``replicate`` is free
            assert [original(str(one.layout)) for one in found.best] == [str(one.layout) for one in known.best]
            assert [one.price for one in found.best] == [one.price for one in known.best]
    both = choose(question({"fixed": {"twin": 2, "replicate": 1}}), 5)
    alone = choose(question({"fixed": {"replicate": 2}}), 5)
    assert [original(str(one.layout)) for one in both.best] == [str(one.layout) for one in alone.best]
    assert [one.price for one in both.best] == [one.price for one in alone.best]
    asked = question({"fixed": {"twin": 4}})
    every = cores(asked.job, asked.space)
    degrees = expand(asked.job, asked.space, every)
    layouts = [layout_of(degrees, at, asked.base, 16, asked.space.fixed) for at in range(0, degrees.count, 7)]
    assert all(one.degree("twin") == 4 and one.world == 8 for one in layouts)
    assert all(contains(asked.job, asked.space, every, asked.base, one) for one in layouts)
    given = Layout.parse("replicate=2,twin=4,precision=bf16")
    moved = dataclasses.replace(given, degrees={"replicate": 4, "twin": 2})
    assert contains(asked.job, asked.space, every, asked.base, given)
    assert not contains(asked.job, asked.space, every, asked.base, moved)


def test_the_command_plans_with_it_and_inspects_it(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "plan",
        "--sizes",
        "layers=8,width=512,heads=8,vocab=1024",
        "--cluster",
        "8xh100",
        "--batch",
        "32",
        "--json",
    ]
    assert main([*argv, "--fix", "twin=2", "--layout", "twin=8", "replicate=8"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "twin=2" in report["plan"]
    told = list(report["compared"].values())
    assert told[0].startswith("fits, ") and told[0] == told[1]
    shown = []
    for layout in ("twin=2,ring=2", "replicate=2,cp=2"):
        assert main(["inspect", "gpt2", "--layout", layout, "--json"]) == 0
        shown.append(json.loads(original(capsys.readouterr().out)))
    assert shown[0] == shown[1]


def test_a_mesh_of_the_user_s_may_have_it_and_proofs_try_it() -> None:
    assert str(layout_of_dims({"twin": 2, "tp": 2})) == "twin=2,tp=2"
    tried = {frozenset(layout.degrees) for layout in data_layouts(4)}
    assert {frozenset(("twin",)), frozenset(("twin", "replicate")), frozenset(("twin", "shard"))} <= tried
    every = {frozenset(layout.degrees) for layout in all_layouts(4)}
    assert {frozenset(("twin", "tp")), frozenset(("ring", "twin")), frozenset(("ring",))} <= every
    assert not any({"cp", "ring"} <= names for names in every)


@pytest.mark.slow
def test_planned_bytes_are_those_that_ranks_send() -> None:
    """Every rank of layouts with the new axes, axis by axis; and as many as with the axes that they are copies of."""
    texts = ["twin=2,shard=2,zero=2,microbatches=2", "twin=2,ring=2", "twin=2,replicate=2"]
    built = traffic.model("llama")
    table, shape = sharding_table(built, 2), measure_shape(built)
    facts = {
        text: analyse_model(traffic.model("llama"), Layout.parse(text), ModelAnalysis(table=table)) for text in texts
    }

    def work(rank: int) -> dict[str, Any]:
        torch.set_num_threads(1)
        return {text: traffic.trained("llama", Layout.parse(text), facts[text], rank)["traffic"] for text in texts}

    job = PricedJob(shape=shape, sequence=traffic.TOKENS, rows=traffic.ROWS, precision="float32")
    for rank, sent in enumerate(run_ranks(4, work)):
        for text in texts:
            layout = Layout.parse(text)
            planned = step_collectives(job, layout, model_parts(built, facts[text]), rank).sent()
            assert sent[text] == pytest.approx(planned, rel=1e-6), (text, rank)
            assert any("twin" in axis for axis in sent[text])
            if "replicate" not in text:
                other = Layout.parse(original(text))
                known = analyse_model(traffic.model("llama"), other, ModelAnalysis(table=table))
                listed = step_collectives(job, other, model_parts(built, known), rank).sent()
                assert renamed(planned) == listed


def renamed(sizes: Mapping[str, int]) -> dict[str, int]:
    return {"+".join(ORIGINAL.get(name, name) for name in axis.split("+")): size for axis, size in sizes.items()}


def test_any_plan_with_it_equals_one_rank() -> None:
    rows_of_8 = random_batches(2, 8, 8, models.VOCAB, documents=True)
    case = dataclasses.replace(models.case("llama"), batches=rows_of_8)
    texts = (
        "twin=2",
        "twin=2,shard=2,zero=2,microbatches=2",
        "twin=2,replicate=2",
        "twin=2,tp=2,microbatches=2",
        "twin=2,pp=2,microbatches=2",
        "ring=2",
        "ring=2,attention=gather",
        "ring=2,shard=2,zero=3",
    )
    verdicts = verify(case, models.layouts(*texts))
    assert [(verdict.layout, verdict.refused) for verdict in verdicts if not verdict.passed] == []
    assert all(verdict.worst.error < 1e-9 for verdict in verdicts)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_corpus(tmp_path / "corpus.txt", 60)
    return tmp_path


def train(root: Path, run: str, layout: str, steps: int, devices: int) -> list[tuple[float, float]]:
    more = ("--model.heads", "4", "--train.steps", str(steps), "--checkpoint.every", "2", "--monitor.report")
    status, text = call(words(root, run, *more, layout=layout, devices=devices), root / f"{run}.log")
    assert status == 0, text
    return [(row["loss"], row["grad_norm"]) for row in rows(root / run)]


@pytest.mark.slow
def test_a_run_is_that_of_the_original_and_goes_on_under_other_layouts(root: Path) -> None:
    """Losses to the bit; a checkpoint that it wrote is read by others, and one that others wrote by it."""
    toy, layout = train(root, "toy", "twin=2,shard=2,zero=2", 4, 4), "twin=2,shard=2,zero=2"
    assert toy == train(root, "original", original(layout), 4, 4)
    plans = [json.loads((root / name / "plan.json").read_text()) for name in ("toy", "original")]
    assert plans[0]["layout"]["degrees"] == {"twin": 2, "shard": 2}
    assert plans[0]["prediction"]["memory"] == plans[1]["prediction"]["memory"]
    assert (
        "twin (2)" in "".join(layout_grid(read_run(root / "toy")))
        and "twin" in (root / "toy" / "report.html").read_text()
    )
    later = train(root, "toy", "tp=2", 6, 2)
    again = train(root, "toy", "ring=2", 8, 2)
    last = train(root, "toy", "twin=2", 10, 2)
    assert (len(later), len(again), len(last)) == (6, 8, 10)
    plain = [train(root, "original", "replicate=1", steps, 1) for steps in (6, 8, 10)]
    for many, one in zip((later, again, last), plain):
        for first, second in zip(many, one):
            assert first == pytest.approx(second, rel=2e-4)


UNPRICED = """
from meshwright.spec.axis import Axis, Holds, Mechanics, Reads

AXIS = Axis(name="{name}", reads=Reads.{reads}, holds=Holds.{holds}, order={order}, purpose="odd")
"""


def test_what_has_no_price_is_refused_and_never_priced_as_absent(tmp_path: Path) -> None:
    """Facts without mechanics that explain them, an order that formulas don't have, mechanics without a file."""
    files = {
        (axes, "vocab"): UNPRICED.format(name="vocab", reads="SAME", holds="SHARD", order=55),
        (axes, "inner"): UNPRICED.format(name="inner", reads="ROWS", holds="COPY", order=48),
        (axes, "columns"): copied_axis("tp", "columns", 70),
    }
    with added(tmp_path, files):
        asked = question()
        assert choose(asked, 3).best[0].layout.degrees.keys().isdisjoint({"vocab", "inner", "columns"})
        for name, rule in (
            ("vocab", "axis vocab reads same, holds shard and has the mechanics 'none', for which the planner has no"),
            ("inner", "axis inner lies inside of shard.*give inner an order below 30"),
        ):
            layout = Layout.parse(f"shard=4,{name}=2,zero=1,precision=bf16")
            with pytest.raises(PlanError, match=rule):
                price_candidate(asked, layout)
        with pytest.raises(PlanError, match=r"axis vocab .* has no formula|no layout with vocab above 1 has a price"):
            choose(question({"fixed": {"vocab": 2}}), 3)
        for name, rule in (
            ("vocab", "axis vocab reads same and changes no module.*would compute the same"),
            ("columns", "no file of parallel/ has a TRANSFORM with axis='columns'"),
        ):
            with pytest.raises(PlanError, match=rule):
                check(Layout.parse(f"{name}=2"), "cpu", 4)
        (verdict,) = models.verify(models.case("llama"), [Layout.parse("columns=2,precision=float64")])
        assert "no file of parallel/" in (verdict.refused or "")
        assert price_candidate(asked, Layout.parse("columns=2,shard=4,zero=1")).price == (
            price_candidate(asked, Layout.parse("tp=2,shard=4,zero=1")).price
        )
    assert "vocab" not in known_axes()
