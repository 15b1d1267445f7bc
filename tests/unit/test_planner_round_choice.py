"""How islands join where the planner chooses it: prices beside a simulated link, and the mildest of the fast ones."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.errors import ConfigError, PlanError
from meshwright.jobs import train
from meshwright.jobs.plan_model import PlanResult, model_of_sizes, plan_model, question_of
from meshwright.jobs.requests import PlanConfig
from meshwright.jobs.rounds import make_rounds
from meshwright.jobs.run_directory import claim_directory, planned_outer, write_run
from meshwright.planner import state_rule
from meshwright.planner.candidate_prices import price_candidate
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.islands import ExchangePrice, fragment_shares, price_exchange, price_join
from meshwright.planner.measured_price import price_layout
from meshwright.planner.predict import chosen_plan
from meshwright.planner.question import Question
from meshwright.planner.round_choice import DELAYS, FRAGMENTS, ROUND_STEPS, SLACK, _paces
from meshwright.planner.rounds import JOIN, OUTER, Rounds
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import OuterConfig
from meshwright.train.fragments import fragment_index
from meshwright.train.run_config import RunConfig
from tests.unit.test_planner_memory import model

SIZES = "layers=12,width=768,heads=12,vocab=50304"
SLOW = PlanConfig(sizes=SIZES, cluster="4x1xa100-80@ethernet-1g", batch=256, sequence=1024)
MODEL = model_of_sizes(SIZES)


def planned(config: PlanConfig, **fields: object) -> PlanResult:
    return plan_model(dataclasses.replace(config, **fields), MODEL)  # type: ignore[arg-type]


def simulated_step_s(rounds: Rounds, wire_s: list[float], core_s: list[float], step_s: float) -> float:
    """Mean seconds of a step where a link carries one exchange at a time, in the order in which they started."""
    now = link_free = begun = 0.0
    under_way: dict[int, tuple[int, float]] = {}
    length, fragments = rounds.steps, rounds.fragments
    for step in range(1, 40 * length + 1):
        if step == 20 * length + 1:
            begun = now
        # The core works for exchanges on the link beside its step.
        now += step_s
        for fragment in [name for name, (start, _) in under_way.items() if step - start >= rounds.delay]:
            now = max(now, under_way.pop(fragment)[1])
        for fragment in range(fragments):
            if step % length == (fragment + 1) * length // fragments % length:
                link_free = max(now, link_free) + wire_s[fragment]
                if rounds.delay:
                    now += core_s[fragment]
                    under_way[fragment] = (step, link_free)
                else:
                    now = link_free
    return (now - begun) / (20 * length)


@pytest.mark.parametrize("share", [0.3, 0.9, 2.0, 9.0])
def test_an_exchange_costs_what_a_link_makes_it_cost(share: float) -> None:
    """Where the core has little to do for the wire; fragments of any size whose exchanges share one link."""
    draw, step_s = np.random.default_rng(int(10 * share)), 0.5
    for steps, fragments, delay in itertools.product((12, 30), (1, 2, 4), (0, 1, 2)):
        wire_s = share * step_s * draw.uniform(0.95, 1.05, fragments)
        rounds, zeros = Rounds(steps=steps, fragments=fragments, delay=delay), np.zeros(fragments)
        exchange = ExchangePrice(
            sent_bytes=zeros, wire_s=wire_s, core_s=zeros, rounding_s=zeros, update_s=zeros, joint_s=0.0
        )
        priced_s = step_s + exchange.join(rounds, step_s).step_s
        expected_s = simulated_step_s(rounds, wire_s.tolist(), [0.0] * fragments, step_s)
        assert priced_s == pytest.approx(expected_s, rel=0.02), (steps, fragments, delay)
        # A wire that hides still takes its core.
        busy = dataclasses.replace(exchange, wire_s=0.1 * wire_s, core_s=0.1 * wire_s)
        expected_s = simulated_step_s(rounds, busy.wire_s.tolist(), busy.core_s.tolist(), step_s)
        assert step_s + busy.join(rounds, step_s).step_s == pytest.approx(expected_s, rel=0.002)


def test_a_step_is_the_mean_of_a_run_with_first_steps_as_one() -> None:
    """Of 80 steps 20 are taken as one, and six rounds follow."""
    part_s = {"wire_s": 0.3, "core_s": 0.0, "rounding_s": 0.02, "update_s": 0.04}
    exchange = ExchangePrice(
        sent_bytes=np.ones(1), joint_s=0.7, **{name: np.array([seconds]) for name, seconds in part_s.items()}
    )
    rounds = make_rounds(OuterConfig(every=10, warmup=20), 80)
    seconds = [0.7 if step < 20 else 0.0 if (step + 1) % 10 else sum(part_s.values()) for step in range(80)]
    join = exchange.join(rounds, 1.0)
    assert join.step_s == pytest.approx(sum(seconds) / 80)
    assert "the 25% of steps before wait 700.0 ms each" in join.note(1.0)
    assert make_rounds(OuterConfig(warmup=20)).joint_share == 0.0


@pytest.mark.parametrize("islands", [2, 4])
def test_the_sum_of_a_first_step_sends_the_bytes_that_its_numbers_take(islands: int) -> None:
    """By the wire alone: what goes through a link of 1 Gbit/s in each step, counted by hand."""
    layout = Layout.parse(f"islands={islands}")
    config = dataclasses.replace(SLOW, cluster=f"{islands}x1xa100-80@ethernet-1g")
    seconds = {}
    for compress in ("none", "bf16", "int8"):
        outer = OuterConfig(compress=compress, warmup=5)  # type: ignore[arg-type]
        seconds[compress] = price_exchange(question_of(dataclasses.replace(config, outer=outer), MODEL), layout).joint_s
    passes_s = 2 * (islands - 1) / islands * MODEL.shape.parameters / (1e9 / 8)
    assert seconds["none"] == pytest.approx(4 * passes_s, rel=0.1)
    assert seconds["bf16"] / seconds["none"] == pytest.approx(2 / 4, rel=0.03)
    assert seconds["int8"] / seconds["none"] == pytest.approx((1 + 4 / 256) / 4, rel=0.03)


def test_fragments_share_parameters_as_the_runtime_deals_them() -> None:
    shape = shape_from_sizes(TableSizes(name="gpt2", layers=5, width=256, heads=4, vocab=2048))
    layer, rest = shape.layer_parameters[0], shape.parameters - sum(shape.layer_parameters)
    counts = np.zeros(4)
    for name, parameters in [("embed.weight", rest), *((f"layers.{i}.w", layer) for i in range(5))]:
        counts[fragment_index(name, 4)] += parameters
    assert fragment_shares(shape, 4) == pytest.approx(counts / shape.parameters)


def test_the_plan_is_the_mildest_of_all_settings_that_are_about_as_fast() -> None:
    """Every setting named for itself, as the user would, on the layout that was chosen."""
    chosen = planned(SLOW, allow=("islands",)).choice
    (plan, *_), settings = chosen.best, chosen.best[0].rounds
    assert plan.layout.islands > 1 and settings is not None and settings.compress == "none"
    times: dict[tuple[int, int, int], float] = {}
    for every, fragments, delay in itertools.product(ROUND_STEPS, FRAGMENTS, DELAYS):
        if fragments <= every and 6 * delay <= every:
            outer = OuterConfig(every=every, fragments=fragments, delay=delay, compress="none")
            question = question_of(dataclasses.replace(SLOW, outer=outer), MODEL)
            times[every, fragments, delay] = price_layout(question, plan.layout, None).price.step_s
    fast = [key for key, step_s in times.items() if step_s <= min(times.values()) * (1 + SLACK)]
    every, fragments, delay = min(fast, key=lambda key: (key[0] + key[2], key[1], key[2]))
    assert (settings.steps, settings.fragments, settings.delay) == (every, fragments, delay)
    assert plan.price.step_s == pytest.approx(times[every, fragments, delay], rel=1e-9)
    # The usual settings are slower here by more than that, or one would have no reason to leave them.
    assert times[30, 1, 0] > times[every, fragments, delay] * (1 + SLACK)
    (note,) = [note for note in chosen.notes if "as --allow islands permits" in note]
    assert f"--outer.every {every} --outer.fragments {fragments} --outer.delay {delay} --outer.compress none" in note


def test_memory_is_that_of_the_joins_that_were_chosen() -> None:
    """What arrives early lies beside the outer weights and the momentum until its step: half as much again."""
    plain, late = (Rounds(delay=delay) for delay in (0, 1))
    layout, sizes = Layout.parse("islands=2,precision=float32"), model()
    plans = [state_rule.named_plan(layout, 2, sizes, rounds) for rounds in (plain, late)]
    assert [plan.outer["delay"] for plan in plans] == [0, 1]
    assert plans[1].prediction.memory[OUTER] == 1.5 * plans[0].prediction.memory[OUTER]
    result = planned(SLOW, allow=("islands",))
    settings = result.choice.best[0].rounds
    assert settings is not None and settings.delay > 0
    found = chosen_plan(result.question, result.choice, 0, sizes)
    assert found.outer == settings.settings
    state = state_rule.predict(result.choice.best[0].layout, sizes, 3).memory
    assert found.prediction.memory[OUTER] == state[OUTER]


def test_settings_that_were_given_stay_and_numbers_are_rounded_only_where_both_are_allowed() -> None:
    given = planned(SLOW, allow=("islands",), outer=OuterConfig(every=12, delay=0)).choice.best[0].rounds
    assert given is not None and (given.steps, given.delay, given.compress) == (12, 0, "none")
    rounded = planned(SLOW, allow=("islands", "lossy")).choice.best[0].rounds
    assert rounded is not None and rounded.compress == "int8"
    exact = OuterConfig(compress="none")
    kept = planned(SLOW, allow=("islands", "lossy"), outer=exact).choice.best[0].rounds
    assert kept is not None and kept.compress == "none"


def test_rounds_leave_enough_of_them_in_a_run() -> None:
    rounds = make_rounds(OuterConfig(), 600)
    assert (rounds.steps, rounds.most_steps, rounds.free) == (30, 30, {"every", "fragments", "delay", "compress"})
    assert make_rounds(OuterConfig(every=5, delay=0)).free == {"fragments", "compress"}
    assert make_rounds(OuterConfig(warmup=900), 1000).most_steps == 5 == make_rounds(OuterConfig(), 100).most_steps
    assert make_rounds(OuterConfig(warmup=20), 10).most_steps == 0
    lengths = [{pace.steps for pace in _paces(make_rounds(OuterConfig(), steps))} for steps in (10, 199, 700, 9000)]
    assert lengths == [{10}, {10}, {10, 20, 30}, set(ROUND_STEPS)]
    assert {pace.steps for pace in _paces(make_rounds(OuterConfig(every=7), 10))} == {7}


def test_a_run_that_goes_on_joins_as_it_was_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the planner would choose now; its settings may be named, and others are refused."""
    layout, chosen = Layout.parse("islands=2"), Rounds(steps=60, fragments=2, delay=3)
    plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=2, reason="test", outer=chosen.settings)
    config = RunConfig(run=str(tmp_path), allow=("islands",))
    write_run(tmp_path, config, plan)
    assert planned_outer(tmp_path) == chosen.settings
    assert config.outer.filled(plan.outer) == OuterConfig(every=60, fragments=2, delay=3, compress="none")
    claim_directory(config)
    claim_directory(dataclasses.replace(config, outer=OuterConfig(every=60, delay=3)))
    with pytest.raises(ConfigError, match=r"outer.every was 60, is 30"):
        claim_directory(dataclasses.replace(config, outer=OuterConfig(every=30)))
    asked: list[OuterConfig] = []

    def note(config: RunConfig, *_: object) -> None:
        asked.append(config.outer)
        raise PlanError("none is wanted here")

    for name in ("plan_for_fewer_ranks", "make_plans"):
        monkeypatch.setattr(train, name, note)
    monkeypatch.setattr(train, "_text_and_model", lambda config, _: (config, None, SimpleNamespace()))
    monkeypatch.setattr(train, "_find_machines", lambda *_: None)
    with pytest.raises(PlanError):
        train._train(config, SimpleNamespace(ranks=2), (), lambda _: None)  # type: ignore[arg-type]
    job, machines = SimpleNamespace(plan=plan, run_dir=tmp_path), SimpleNamespace(for_ranks=lambda _: None)
    planning = train._make_planning(config, None, job, None, machines, lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(PlanError):
        planning.plan_for_ranks(1)
    assert asked == [config.outer.filled(plan.outer)] * 2
    # One island that is left has no rounds; those of the run stay, for when others come back.
    alone = Plan(layout=Layout(), prediction=Prediction(memory={}), ranks=1, reason="the rank that is left")
    planning.announce_plan(alone)
    assert planned_outer(tmp_path) == chosen.settings and alone.describe() == "replicate=1 (the rank that is left)"
    assert alone.joining_as(chosen.settings).describe() == alone.describe()
    # Plans from before have no such field.
    old = {name: value for name, value in json.loads((tmp_path / "plan.json").read_text()).items() if name != "outer"}
    (tmp_path / "plan.json").write_text(json.dumps(old))
    assert planned_outer(tmp_path) == {}


def test_inner_traffic_of_islands_over_nodes_takes_their_link() -> None:
    shape = shape_from_sizes(TableSizes(name="gpt2", layers=6, width=256, heads=4, vocab=2048))
    job = PricedJob(shape=shape, sequence=128, rows=32, precision="float32")
    question = Question(job=job, cluster=Cluster.parse("4x1xcpu@ethernet-1g"), rounds=Rounds(delay=1))
    price = price_candidate(dataclasses.replace(question, cluster=Cluster.parse("2x1xcpu@ethernet-1g")),
                            Layout.parse("replicate=2,precision=float32")).price  # fmt: skip
    waits_s = price.parts["reduce"]
    assert waits_s > 0 and JOIN not in price.parts
    alone = price_join(question, Layout.parse("islands=4,precision=float32"), price)
    shared = price_join(question, Layout.parse("islands=2,replicate=2,precision=float32"), price)
    assert alone.exchange_s - alone.exposed_s == pytest.approx(min(alone.exchange_s, price.step_s))
    assert shared.exchange_s - shared.exposed_s == pytest.approx(min(shared.exchange_s, price.step_s - waits_s))
