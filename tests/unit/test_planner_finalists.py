"""Islands that the planner chooses by itself, and one rule for what `plan` shows and what a run takes."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.data.config import DataConfig
from meshwright.errors import ConfigError, NoRoomError, PlanError
from meshwright.jobs import layouts
from meshwright.jobs.layouts import make_plans
from meshwright.jobs.machines import Machines
from meshwright.jobs.model_reading import ReadModel, make_measure, read_model
from meshwright.jobs.plan import plannable_model
from meshwright.jobs.plan_model import PlannableModel, PlanResult, model_of_sizes, plan_model
from meshwright.jobs.requests import PlanConfig
from meshwright.launch.devices import Devices
from meshwright.models import compiled_bytes
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.planner.candidate import sort_candidates
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.measured_price import measure_activations, price_layout
from meshwright.planner.question import Question
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.config import OptimizerConfig, OuterConfig, TrainConfig
from meshwright.train.island_checks import check_islands
from meshwright.train.model_analysis import analyse_model
from meshwright.train.run_config import RunConfig
from tests.runs import warm_compiler
from tests.tiers import further

SIZES = "layers=12,width=768,heads=12,vocab=50304"
SLOW = PlanConfig(sizes=SIZES, cluster="4x8xa100-80@ethernet-10g", batch=256, sequence=1024)


def planned(config: PlanConfig, **fields: object) -> PlanResult:
    return plan_model(dataclasses.replace(config, **fields), model_of_sizes(SIZES))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "texts",
    [
        # In order of time, which ties; the last one is the plan.
        (
            "pp=8,tp=2,microbatches=16",
            "pp=2,shard=4,tp=2,zero=2,microbatches=4",
            "pp=4,shard=2,tp=2,zero=1,microbatches=8",
        ),
        ("pp=4,shard=2,zero=1,microbatches=8", "replicate=2,pp=4,microbatches=8"),
        ("pp=2,shard=4,zero=1,microbatches=4", "shard=8,zero=3"),
    ],
)
def test_of_layouts_that_tie_a_short_pipeline_with_split_state_is_the_plan(texts: tuple[str, ...]) -> None:
    tied = [
        SimpleNamespace(layout=Layout.parse(text), price=SimpleNamespace(step_s=1.0 + place / 100))
        for place, text in enumerate(texts)
    ]
    beyond = SimpleNamespace(layout=Layout.parse("replicate=8"), price=SimpleNamespace(step_s=1.1))
    ordered, ties = sort_candidates([*tied, beyond], 0.05)  # type: ignore[list-item]
    assert ordered == (tied[-1], *tied[:-1], beyond) and ties == len(texts)


def test_islands_are_the_fewest_that_are_about_as_fast_as_any() -> None:
    slow = dataclasses.replace(SLOW, outer=OuterConfig().resolved)
    exact, allowed = planned(slow), planned(slow, allow=("islands",))
    assert all(option.layout.islands == 1 for option in exact.choice.best)
    # The same question with the islands given: another way through the planner.
    by_count = {count: planned(slow, fix=f"islands={count}").step_s for count in (2, 4)}
    fewest = min(count for count, step_s in by_count.items() if step_s <= 1.05 * min(by_count.values()))
    assert allowed.layout.islands == fewest
    assert allowed.step_s == pytest.approx(by_count[fewest], rel=1e-12)
    assert allowed.step_s < 0.9 * exact.step_s
    (note,) = [note for note in allowed.choice.notes if "--allow islands" in note]
    assert str(exact.layout) in note and "join once in 30 steps" in note
    # Joins ten times as seldom cost a tenth.
    joins = [option for option in allowed.choice.best if option.layout.islands > 1]
    assert joins[0].price.parts["join"] > 0


def test_islands_are_not_chosen_where_they_win_little() -> None:
    fast = dataclasses.replace(SLOW, cluster="8xh100", batch=512)
    allowed = planned(fast, allow=("islands",))
    assert allowed.layout == planned(fast).layout
    (note,) = [note for note in allowed.choice.notes if "--allow islands" in note]
    assert "changes nothing here: islands=" in note


def test_settings_of_islands_that_the_planner_may_take_are_no_error_where_it_takes_none() -> None:
    outer, plan = OuterConfig(every=5), Layout.parse("shard=2,zero=1")
    check_islands(RunConfig(outer=outer, allow=("islands",)), plan)
    for config in (RunConfig(outer=outer), RunConfig(outer=outer, layout="shard=2,zero=1", allow=("islands",))):
        with pytest.raises(ConfigError, match="says how islands join"):
            check_islands(config, plan)


def test_what_islands_do_not_reach_is_said() -> None:
    unequal = planned(SLOW, cluster="4xh100+4xa100-80", allow=("islands",))
    (note,) = [note for note in unequal.choice.notes if "--allow islands" in note]
    assert "changes nothing" in note and "--outer.meet" in note


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"allow": ("loss",)}, "allow: loss is unknown.*lossy"),
        ({"allow": ("lossy",), "layout": "replicate=2"}, "lets the planner choose"),
    ],
)
def test_refusals_of_a_run(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(RunConfig(), **fields).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("allow", [(), ("lossy",), ("islands",), ("lossy", "islands")])
def test_a_run_takes_what_plan_shows(allow: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = Cluster.parse("2x1xcpu@ethernet-1g")
    monkeypatch.setattr(layouts, "cluster_of_machines", lambda machines: cluster)
    monkeypatch.setattr(layouts, "run_history_file", lambda machines: (tmp_path / "none.json", ""))
    sizes = ModelConfig(name="gpt2", layers=4, width=256, heads=4, vocab=2048, context=128)
    config = RunConfig(allow=allow, model=sizes, data=DataConfig(sequence=128), train=TrainConfig(batch=16))
    devices = Devices(kind="cpu", count=1, found=1, cores=1)
    plan, _ = make_plans(config, read_model(config, None, 128), Machines(devices=devices, ranks=2))[0]
    request = PlanConfig(model=sizes, batch=16, sequence=128, precision="float32", allow=allow)
    shown = plan_model(request, plannable_model(sizes, 128), cluster)
    assert plan.layout == shown.layout
    assert plan.layout.is_lossy <= ("lossy" in allow)
    assert (plan.layout.islands > 1) == ("islands" in allow)


def test_islands_that_a_setting_rules_out_give_way_to_the_next_layout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(layouts, "cluster_of_machines", lambda machines: Cluster.parse("2x1xcpu@ethernet-1g"))
    monkeypatch.setattr(layouts, "run_history_file", lambda machines: (tmp_path / "none.json", ""))
    sizes = ModelConfig(name="gpt2", layers=4, width=256, heads=4, vocab=2048, context=128)
    machines = Machines(devices=Devices(kind="cpu", count=1, found=1, cores=1), ranks=2)

    def run_plan(train: TrainConfig) -> Plan:
        config = RunConfig(allow=("islands",), model=sizes, data=DataConfig(sequence=128), train=train)
        return make_plans(config, read_model(config, None, 128), machines)[0][0]

    islands, measured = run_plan(TrainConfig(batch=16)), run_plan(TrainConfig(batch=16, noise_scale=2))
    assert islands.layout.islands > 1 == measured.layout.islands
    assert f"{islands.layout}: train.noise_scale = 2 is of the rows that all ranks" in measured.reason
    assert not measured.outer


@pytest.mark.parametrize(("kind", "name"), [("cuda", "2xh100"), ("cpu", "2xcpu")])
def test_what_fits_nowhere_is_refused_with_what_would_fit(
    kind: Literal["cpu", "cuda"], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a host's cores, which share more of their memory than is planned, what the state alone allows may run."""
    cluster = Cluster.parse(name)
    monkeypatch.setattr(layouts, "cluster_of_machines", lambda machines: cluster)
    monkeypatch.setattr(layouts, "run_history_file", lambda machines: (tmp_path / "none.json", ""))
    state_bytes = 16 * 2**30
    monkeypatch.setattr(layouts, "device_memory_bytes", lambda devices, ranks: state_bytes)
    sizes = ModelConfig(name="llama", layers=160, width=8192, heads=64, ffn=28672, vocab=32000, context=2048)
    config = RunConfig(model=sizes, data=DataConfig(sequence=2048), train=TrainConfig(batch=16))
    model = read_model(config, None, 2048)
    machines = Machines(devices=Devices(kind=kind, count=2, found=2, cores=2), ranks=2)
    said: list[str] = []
    with pytest.raises(PlanError, match=f"no layout of {name} holds llama .* nearest that would: about"):
        make_plans(config, model, machines, say=said.append)
    assert not said
    state_bytes = 2**42
    if kind == "cuda":
        with pytest.raises(NoRoomError):
            make_plans(config, model, machines)
    else:
        assert make_plans(config, model, machines, say=said.append)[0][0].layout.world == 2
        assert said[0].startswith(f"plan: by state alone, since none could be planned here: no layout of {name}")


# -------------------------------------------------------- compiled layers

WIDE = ModelConfig(name="llama", layers=4, width=2048, heads=16, ffn=8192, vocab=32000, context=2048)
UNTRACED = "keep for backward couldn't be traced"


class Models:
    """Models that are read, and measured by whoever plans, once for all plans of them; one reading for each side."""

    def __init__(self) -> None:
        self._of_runs: dict[str, ReadModel] = {}
        self._of_plans: dict[str, PlannableModel] = {}

    def of_run(self, config: RunConfig) -> ReadModel:
        name = repr(config.model)
        self._of_runs[name] = self._of_runs.get(name) or read_model(config, None, 2048)
        return self._of_runs[name]

    def of_plan(self, sizes: ModelConfig) -> PlannableModel:
        self._of_plans[repr(sizes)] = self._of_plans.get(repr(sizes)) or plannable_model(sizes, 2048)
        return self._of_plans[repr(sizes)]


@pytest.fixture(scope="module")
def models() -> Models:
    warm_compiler()
    return Models()


def run_layout(
    monkeypatch: pytest.MonkeyPatch,
    models: Models,
    kind: str,
    steps: int,
    sizes: ModelConfig = WIDE,
    can_compile: bool = True,
    lr_batch: int = 0,
) -> tuple[Layout, str]:
    """Returns the layout that a run of two devices takes, and why."""
    cluster = Cluster.parse("2xh100" if kind == "cuda" else "2x1xcpu@ethernet-1g")
    monkeypatch.setattr(layouts, "cluster_of_machines", lambda machines: cluster)
    monkeypatch.setattr(layouts, "run_history_file", lambda machines: (Path("/nowhere"), ""))
    monkeypatch.setattr(layouts, "can_compile", lambda: can_compile)
    train = TrainConfig(batch=16, steps=steps)
    optimizer = OptimizerConfig(lr_batch=lr_batch, lr_rule="adascale" if lr_batch else "sqrt")
    config = RunConfig(model=sizes, data=DataConfig(sequence=2048), train=train, optimizer=optimizer)
    devices = Devices(kind=kind, count=2, found=2, cores=2)
    plan, _ = make_plans(config, models.of_run(config), Machines(devices=devices, ranks=2))[0]
    return plan.layout, plan.reason


def test_a_run_on_gpus_compiles_where_its_steps_make_up_for_it(monkeypatch: pytest.MonkeyPatch, models: Models) -> None:
    layout, reason = run_layout(monkeypatch, models, "cuda", 100_000)
    assert layout.compile and "the first step compiles for about 8.0 s" in reason and UNTRACED not in reason
    # The saved seconds of a step, by the price of both layouts, are the least number of steps that pay.
    built = build_meta(WIDE)
    measure = make_measure(built, 2048, "bf16")
    job = PricedJob(shape=measure_shape(built), sequence=2048, rows=16)
    question = measure_activations(Question(job=job, cluster=Cluster.parse("2xh100")), measure)
    forms = (dataclasses.replace(layout, compile=on) for on in (False, True))
    eager, made = (price_layout(question, form, measure).price for form in forms)
    steps = math.ceil(8.0 / (eager.step_s - made.step_s))
    assert not run_layout(monkeypatch, models, "cuda", round(0.8 * steps))[0].compile
    assert run_layout(monkeypatch, models, "cuda", round(1.25 * steps))[0].compile
    # Steps of 4 rows: where gradients are noise alone, those of 16 rows end the run after a quarter.
    found = [
        run_layout(monkeypatch, models, "cuda", round(share * steps), lr_batch=4)[0].compile for share in (3.2, 5.0)
    ]
    assert found == [False, True]


@pytest.mark.parametrize("steps", further([20, 1000], (1,)))
def test_a_plan_for_gpus_is_compiled_where_the_run_is(
    steps: int, monkeypatch: pytest.MonkeyPatch, models: Models
) -> None:
    run = run_layout(monkeypatch, models, "cuda", steps)[0]
    model, cluster = models.of_plan(WIDE), Cluster.parse("2xh100")
    request = PlanConfig(model=WIDE, batch=16, sequence=2048, steps=steps)
    shown = plan_model(request, model, cluster)
    assert shown.layout == run and shown.layout.compile == (steps == 1000)
    # The front of time and memory is of the layouts that are faster.
    assert all(Layout.parse(text).compile == shown.layout.compile for _, _, text in shown.choice.front)
    assert ("which the first step compiles for about 8.0 s" in shown.reason) == shown.layout.compile
    assert not any(UNTRACED in note for note in shown.choice.notes)
    assert PlanConfig().steps == TrainConfig().steps
    for named in (True, False):
        assert plan_model(dataclasses.replace(request, compile=named), model, cluster).layout.compile == named
    # Megatron has no flag for it; compiled code would hide what dropout draws.
    assert not plan_model(dataclasses.replace(request, emit="megatron"), model, cluster).layout.compile
    drops = dataclasses.replace(WIDE, name="gpt2", dropout=0.1)
    assert not plan_model(dataclasses.replace(request, model=drops), models.of_plan(drops), cluster).layout.compile
    # By its sizes alone too, where nothing was built.
    for field in ("dropout", "drops", "drops_scores"):
        blocks = tuple(dataclasses.replace(block, **{field: 1}) for block in model.shape.blocks)
        drawing = dataclasses.replace(model, shape=dataclasses.replace(model.shape, blocks=blocks))
        assert not plan_model(request, drawing, cluster).layout.compile, field


def test_a_plan_says_where_compiled_layers_could_not_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise RuntimeError("an operator without a rule for fake tensors")

    monkeypatch.setattr(compiled_bytes, "partitions", fail)
    request = PlanConfig(model=WIDE, batch=16, sequence=2048, steps=100_000)
    shown = plan_model(request, plannable_model(WIDE, 2048), Cluster.parse("2xh100"))
    assert shown.layout.compile and [UNTRACED in note for note in shown.choice.notes].count(True) == 1
    layout, reason = run_layout(monkeypatch, Models(), "cuda", 100_000)
    assert layout.compile and UNTRACED in reason


@pytest.mark.parametrize(
    ("family", "dropout"), further([("llama", "attention_dropout"), ("gpt2", "embd_pdrop"), ("gpt2", "attn_pdrop")])
)
def test_a_model_that_draws_anywhere_is_not_compiled(
    family: str, dropout: str, monkeypatch: pytest.MonkeyPatch, models: Models
) -> None:
    """What the run refuses: a probability of attention's own code, or of the embedding, outside of all layers."""
    drops = dataclasses.replace(WIDE, name=family, overrides={dropout: 0.1})
    with pytest.raises(PlanError, match="compile=true hides what"):
        analyse_model(build_meta(drops), Layout(compile=True))
    assert not run_layout(monkeypatch, models, "cuda", 100_000, drops)[0].compile
    request = PlanConfig(model=drops, batch=16, sequence=2048, steps=100_000)
    assert not plan_model(request, models.of_plan(drops), Cluster.parse("2xh100")).layout.compile
    same = dataclasses.replace(WIDE, name=family)
    assert run_layout(monkeypatch, models, "cuda", 100_000, same)[0].compile


def test_a_run_is_not_compiled_where_compiled_layers_are_refused(
    monkeypatch: pytest.MonkeyPatch, models: Models
) -> None:
    assert not run_layout(monkeypatch, models, "cpu", 100_000)[0].compile
    drops = dataclasses.replace(WIDE, name="gpt2", dropout=0.1)
    assert not run_layout(monkeypatch, models, "cuda", 100_000, drops)[0].compile
    assert not run_layout(monkeypatch, models, "cuda", 100_000, can_compile=False)[0].compile


@pytest.mark.parametrize(
    ("cluster", "is_noted"), [("8xh100", False), ("8xh100@ethernet-25g", True), ("2x4xh100@ethernet-25g", False)]
)
def test_a_network_that_one_node_has_no_use_for_is_noted(cluster: str, is_noted: bool) -> None:
    """Only the plan's words change: the network is between nodes."""
    result = planned(SLOW, cluster=cluster)
    note = "the cluster is one node, so its network, ethernet-25g, isn't used"
    assert (note in result.choice.notes) is is_noted


@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_a_run_of_a_model_that_draws_is_not_even_offered_compiled_layouts(
    dropout: float, monkeypatch: pytest.MonkeyPatch, models: Models
) -> None:
    """Tried first, they would be refused one by one, named in the reason, and could be all of the finalists."""
    drops = dataclasses.replace(WIDE, name="gpt2", dropout=dropout)
    questions: list[Question] = []
    choose = layouts.choose_finalists

    def record_question(question: Question, *rest: Any) -> Any:
        questions.append(question)
        return choose(question, *rest)

    monkeypatch.setattr(layouts, "choose_finalists", record_question)
    layout, reason = run_layout(monkeypatch, models, "cuda", 100_000, drops)
    assert {question.compile_steps for question in questions} == {0 if dropout else 100_000}
    assert layout.compile is (dropout == 0.0)
    assert "compile=true hides" not in reason
