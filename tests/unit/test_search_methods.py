"""The benchmark that compares searches: its layouts are the space's, its policy learns, its counts are right."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import search_methods
from benchmarks.search_methods import (
    DECISIONS,
    METHODS,
    LayoutTree,
    Policy,
    Prices,
    compare,
    crossed,
    main,
    run_json,
    table,
)
from meshwright.cluster.cluster import Cluster
from meshwright.planner.candidate_prices import price_candidate
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.question import Question
from meshwright.planner.space import contains, cores, layout_of
from meshwright.spec.layout import Layout

SIZES = TableSizes(
    name="mixture", layers=4, width=512, heads=8, vocab=8000, experts=4, active_experts=2, expert_ffn=512
)


@pytest.fixture(scope="module")
def tree() -> LayoutTree:
    job = PricedJob(shape=shape_from_sizes(SIZES), sequence=512, rows=16)
    limits = {"offloads": ("none",)}
    return LayoutTree(
        Question(job=job, cluster=Cluster.parse("8xh100"), base=Layout(precision="bf16"), limits=limits, usable=0.9)
    )


def test_every_path_is_a_layout_of_the_space_and_priced_as_it_is(tree: LayoutTree) -> None:
    draw, question = np.random.default_rng(0), tree.question
    paths = [tree.random_path(draw) for _ in range(40)]
    batch, core_rows = tree.batch(paths), cores(question.job, question.space)
    costs = Prices(tree, len(paths)).ask(paths)
    for index in range(len(paths)):
        layout = layout_of(batch, index, question.base, 4)
        layout.check_ranks(8)
        layout.check_batch(16)
        assert contains(question.job, question.space, core_rows, question.base, layout), layout
        if "pp" not in layout.degrees:  # a pipeline's printed price is simulated
            assert np.exp(costs[index]) == pytest.approx(price_candidate(question, layout).price.step_s)


def test_all_layouts_are_reached(tree: LayoutTree) -> None:
    def count(prefix: tuple[int, ...] = ()) -> int:
        if len(prefix) == len(DECISIONS):
            return 1
        return sum(count((*prefix, value)) for value in tree.options(prefix))

    draw = np.random.default_rng(1)
    seen = {tree.random_path(draw) for _ in range(1500)}
    assert len(seen) <= count() < 20_000
    values = tree.values()
    assert all(value in values[at] for path in seen for at, value in enumerate(path))
    assert {path[3] for path in seen} == {1, 2, 4} and {path[7] for path in seen} == {0, 1, 2, 3}


def test_children_take_what_their_parents_have(tree: LayoutTree) -> None:
    draw = np.random.default_rng(2)
    for _ in range(20):
        mother, father = tree.random_path(draw), tree.random_path(draw)
        assert crossed(tree, mother, mother, draw, 0.0) == mother
        child = crossed(tree, mother, father, draw, 0.0)
        assert child[0] in (mother[0], father[0])
        assert all(child[at] in tree.options(child[:at]) for at in range(len(DECISIONS)))


def log_chance(policy: Policy, tree: LayoutTree, path: tuple[int, ...]) -> float:
    """By the chances of a path's decisions, one after the other."""
    total = 0.0
    for depth in range(len(DECISIONS)):
        chances = policy._forward([path[:depth]], [tree.options(path[:depth])])[2][0]
        assert chances.sum() == pytest.approx(1.0)
        total += float(np.log(chances[policy._index[depth][path[depth]]]))
    return total


@pytest.mark.parametrize("weight", ["inner", "outer", "bias"])
def test_the_gradient_is_that_of_finite_differences(weight: str, tree: LayoutTree) -> None:
    draw = np.random.default_rng(3)
    policy = Policy(tree.values(), draw, hidden=5)
    policy.weights["outer"] = draw.normal(size=policy.weights["outer"].shape)
    paths, advantages = policy.sample(tree, 3, draw), np.array([1.0, -0.5, 2.0])
    gradient = policy.gradient(tree, paths, advantages, 0.0)[weight]

    def objective() -> float:
        return float(
            np.mean([advantage * log_chance(policy, tree, path) for advantage, path in zip(advantages, paths)])
        )

    spots = [tuple(spot) for spot in np.argwhere(np.abs(gradient) > 1e-3)[::7][:12]]
    assert spots
    for spot in spots:
        values = []
        for shift in (1e-5, -1e-5):
            policy.weights[weight][spot] += shift
            values.append(objective())
            policy.weights[weight][spot] -= shift
        assert gradient[spot] == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4, abs=1e-8)


def test_a_policy_comes_to_decide_what_is_rewarded(tree: LayoutTree) -> None:
    draw = np.random.default_rng(4)
    policy = Policy(tree.values(), draw)
    wanted = tree.random_path(draw)

    def share() -> float:
        return float(np.mean([path[2] == wanted[2] for path in policy.sample(tree, 200, draw)]))

    before = share()
    for _ in range(40):
        paths = policy.sample(tree, 32, draw)
        rewards = np.array([1.0 if path[2] == wanted[2] else -1.0 for path in paths])
        policy.ascend(policy.gradient(tree, paths, rewards, 0.0), 0.03)
    assert share() > max(0.95, before + 0.2)


def test_no_method_beats_the_exact_search_and_all_count_their_prices(
    tree: LayoutTree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # Recomputing any number of layers, as the methods may, is in the exact search where memory is short alone.
    runs = compare("small", tree.question, 150, 2)
    assert [run.method for run in runs] == ["exact", *(method for method in METHODS for _ in range(2))]
    for run in runs[1:]:
        assert run.prices == 150 and run.ratios[150] >= 1 - 1e-9
        assert run.found_after is None or run.ratios[150] <= 1 + search_methods.CLOSE
    monkeypatch.setattr(search_methods, "question_of", lambda name: tree.question)
    name = next(iter(search_methods.QUESTIONS))
    path = tmp_path / "runs.json"
    assert main(["--prices", "300", "--seeds", "1", "--only", name, "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 1 and len({line.count("|") for line in lines}) == 1
    written = json.loads(path.read_text())
    assert [run["method"] for run in written] == ["exact", *METHODS]
    nothing = [runs[0], *(dataclasses.replace(run, ratios={150: float("inf")}) for run in runs[1:])]
    assert table(nothing)[2].count("(worst nothing); ") == len(METHODS)
    assert run_json(nothing[1])["ratios"] == {150: None}


def test_the_best_so_far_only_falls(tree: LayoutTree) -> None:
    prices = Prices(tree, 130)
    METHODS["genetic"](prices, np.random.default_rng(5))
    assert prices.left == 0 and len(prices.best_s) == 130
    assert np.all(np.diff(prices.best_s) <= 0)


def test_questions_are_known() -> None:
    for name in search_methods.QUESTIONS:
        question = search_methods.question_of(name)
        assert question.cluster.devices >= 128 and question.job.rows % 2 == 0
