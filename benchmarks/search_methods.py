"""Random, genetic and policy-gradient search over layouts against the exact one, by prices asked and by seconds.

    python -m benchmarks.search_methods [--prices 4096] [--seeds 5] [--json FILE]

All choose from the same layouts, one decision after the other (degrees, micro-batches, schedule, sharding, recompute),
and ask the same prices, those of the planner's search, in batches. What doesn't fit has a price too, by how much memory
it lacks. The exact search (`planner/search.py`) bounds instead: it prices what could be among the best, and ends.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.cluster.cluster import Cluster
from meshwright.planner.choose import search_space
from meshwright.planner.closed_form import shape_from_sizes
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.price import price_many
from meshwright.planner.presets import presets
from meshwright.planner.question import Question
from meshwright.planner.space import cores, variants
from meshwright.spec.layout import Layout

QUESTIONS = {
    "GPT-3 175B, 1,024 H100": ("gpt-3-175b", "1024xh100", 1536, 2048),
    "Llama 3 70B, 512 H100": ("llama-3-70b", "512xh100", 512, 8192),
    "Llama 3 405B, 16,384 H100": ("llama-3-405b", "16384xh100", 2048, 8192),
    "Llama 3 405B, 144 H100, tight": ("llama-3-405b", "144xh100", 576, 8192),
    "Mixtral 8x22B, 128 H100": ("mixtral-8x22b", "128xh100", 256, 4096),
    "DeepSeek-V3, 2,048 H800": ("deepseek-v3", "2048xh800", 15360, 4096),
}
"""Preset, cluster, rows and tokens of a row of each question."""
DECISIONS = ("pp", "cp", "tp", "ep", "microbatches", "schedule", "shard", "zero", "recompute", "layers")
"""Decisions of a layout in their order; ``layers`` is how many recompute."""
STAGES_BASE = 64
"""A schedule and its stages of a rank are one decision: code * this + stages."""
CORE_DECISIONS = 6
"""Decisions that fix a core; the others choose one of its variants."""
BATCH = 64
"""Layouts that are priced at once: a population, or a batch of episodes."""
MILESTONES = (256, 1024, 4096)
"""Numbers of prices after which the best so far is compared."""
CLOSE = 0.01
"""Relative distance from the best at which a run counts as having found it."""


class LayoutTree:
    """The layouts of a question as paths of decisions; each prefix knows how it can go on.

    Args:
        question: whose space it is, without state in host memory.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self._layers = len(question.job.shape.blocks)
        core_rows = cores(question.job, question.space).astype(int)
        schedules = core_rows[:, 5] * STAGES_BASE + core_rows[:, 6]
        rows = np.column_stack([core_rows[:, :5], schedules])
        self._rows = rows[np.lexsort(rows.T[::-1])]
        self._ranges: dict[tuple[int, ...], tuple[int, int]] = {(): (0, len(rows))}
        self._options: dict[tuple[int, ...], tuple[int, ...]] = {}

    def options(self, prefix: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the values that the next decision of a path may take, smallest first."""
        if prefix not in self._options:
            self._options[prefix] = tuple(sorted(set(self._next_values(prefix))))
        return self._options[prefix]

    def _next_values(self, prefix: tuple[int, ...]) -> Iterator[int]:
        if len(prefix) < CORE_DECISIONS:
            start, stop = self._range(prefix)
            yield from np.unique(self._rows[start:stop, len(prefix)]).tolist()
            return
        if len(prefix) == len(DECISIONS) - 1:
            yield from range(1, self._layers + 1) if prefix[-1] else (0,)
            return
        core = (*prefix[: CORE_DECISIONS - 1], *divmod(prefix[CORE_DECISIONS - 1], STAGES_BASE))
        chosen = prefix[CORE_DECISIONS:]
        for _, *variant in variants(self.question.job, self.question.space, core):
            if tuple(variant[: len(chosen)]) == chosen:
                yield variant[len(chosen)]

    def _range(self, prefix: tuple[int, ...]) -> tuple[int, int]:
        """Returns (first, last + 1) of the cores that begin with a prefix."""
        if prefix not in self._ranges:
            start, stop = self._range(prefix[:-1])
            column = self._rows[start:stop, len(prefix) - 1]
            near = np.searchsorted(column, [prefix[-1], prefix[-1] + 1])
            self._ranges[prefix] = (start + int(near[0]), start + int(near[1]))
        return self._ranges[prefix]

    def values(self) -> list[list[int]]:
        """Returns every value that each decision takes somewhere."""
        devices = self.question.cluster.devices
        shards = [size for size in range(1, devices + 1) if devices % size == 0]
        core_values = [np.unique(column).tolist() for column in self._rows.T]
        return [*core_values, shards, [0, 1, 2, 3], [0, 1, 2], list(range(self._layers + 1))]

    def random_path(self, draw: np.random.Generator) -> tuple[int, ...]:
        """Returns a path whose every decision is drawn evenly."""
        return self.complete((), lambda prefix, options: int(draw.choice(options)))

    def complete(
        self, prefix: tuple[int, ...], decide: Callable[[tuple[int, ...], tuple[int, ...]], int]
    ) -> tuple[int, ...]:
        """Returns a path that goes on from a prefix; ``decide`` maps (prefix, options) to one of the options."""
        while len(prefix) < len(DECISIONS):
            prefix = (*prefix, decide(prefix, self.options(prefix)))
        return prefix

    def batch(self, paths: Sequence[tuple[int, ...]]) -> LayoutBatch:
        """Returns the layouts of N paths."""
        columns = dict(zip(DECISIONS, np.array(paths, dtype=float).T))
        layers = columns.pop("layers")
        columns["schedule"], columns["stages"] = np.divmod(columns["schedule"], STAGES_BASE)
        parts = columns["pp"] * columns["cp"] * columns["tp"] * columns["shard"]
        columns["replicate"] = self.question.cluster.devices / parts
        columns["sequence"] = (columns["tp"] > 1) * 1.0
        columns["ep_node"] = self.question.space.expert_node(columns["ep"])
        columns["recompute_share"] = np.where(layers > 0, layers / self._layers, 1.0)
        return LayoutBatch.of(columns)


class Prices:
    """Prices paths, counts how many were asked, and keeps the best after each.

    Args:
        tree: of the layouts.
        limit: most prices.
    """

    def __init__(self, tree: LayoutTree, limit: int) -> None:
        self.tree, self.limit = tree, limit
        question = tree.question
        self._machine, self._engine = question.machine, question.runtime.for_layout(question.base)
        self.best_s: list[float] = []
        """Seconds of the fastest layout that fits, after each price; inf before the first."""

    @property
    def left(self) -> int:
        """How many may still be asked."""
        return self.limit - len(self.best_s)

    def ask(self, paths: Sequence[tuple[int, ...]]) -> np.ndarray:
        """Returns what is minimized, (N,) float64: ln seconds, and above them what doesn't fit, by what it lacks."""
        question = self.tree.question
        usable_bytes = question.usable_bytes
        prices = price_many(
            question.job,
            self.tree.batch(paths),
            self._machine,
            self._engine,
            lambda _, memory: np.asarray(memory["peak"] <= usable_bytes),
        )
        fits = prices.step_s > 0
        seconds = np.where(fits, prices.step_s, np.inf)
        before = self.best_s[-1] if self.best_s else np.inf
        self.best_s += np.minimum(np.minimum.accumulate(seconds), before).tolist()
        lacking = 50.0 + np.log(prices.peak / usable_bytes)
        return np.where(fits, np.log(np.where(fits, seconds, 1.0)), lacking)


def search_randomly(prices: Prices, draw: np.random.Generator) -> None:
    """Asks the prices of random paths."""
    while prices.left > 0:
        prices.ask([prices.tree.random_path(draw) for _ in range(min(BATCH, prices.left))])


def search_genetically(
    prices: Prices, draw: np.random.Generator, elite: int = 8, rivals: int = 3, mutation: float = 0.08
) -> None:
    """Evolves a population: the best of a few random ones are parents, whose decisions a child takes one by one.

    Args:
        prices: that may be asked.
        draw: random numbers.
        elite: best layouts that live on; they aren't priced again.
        rivals: of a tournament.
        mutation: chance with which a child decides by itself.
    """
    population = [prices.tree.random_path(draw) for _ in range(min(BATCH, prices.left))]
    costs = prices.ask(population)
    while prices.left > 0:

        def parent(population: list[tuple[int, ...]] = population, costs: np.ndarray = costs) -> tuple[int, ...]:
            drawn = draw.integers(len(population), size=rivals)
            return population[int(drawn[np.argmin(costs[drawn])])]

        count = min(BATCH - elite, prices.left)
        children = [crossed(prices.tree, parent(), parent(), draw, mutation) for _ in range(count)]
        kept = np.argsort(costs, kind="stable")[:elite]
        costs = np.concatenate([costs[kept], prices.ask(children)])
        population = [*(population[index] for index in kept), *children]


def crossed(
    tree: LayoutTree, mother: tuple[int, ...], father: tuple[int, ...], draw: np.random.Generator, mutation: float
) -> tuple[int, ...]:
    """Returns a path that takes each decision from a parent where that is possible, else the nearest that is."""

    def decide(prefix: tuple[int, ...], options: tuple[int, ...]) -> int:
        if draw.random() < mutation:
            return int(draw.choice(options))
        wanted = (mother, father)[int(draw.integers(2))][len(prefix)]
        return min(options, key=lambda value: abs(value - wanted))

    return tree.complete((), decide)


class Policy:
    """A network of one hidden layer that maps the decisions so far to the logits of the next.

    Args:
        values: of each decision, from `LayoutTree.values`.
        draw: random numbers of the first weights.
        hidden: units of the hidden layer.
    """

    def __init__(self, values: Sequence[Sequence[int]], draw: np.random.Generator, hidden: int = 64) -> None:
        sizes = [len(column) for column in values]
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._index = [{value: start + at for at, value in enumerate(column)}
                       for start, column in zip(self._starts.tolist(), values)]  # fmt: skip
        outputs = int(self._starts[-1])
        self.weights = {
            "inner": draw.normal(size=(outputs + len(values), hidden)) / np.sqrt(len(values)),
            "outer": np.zeros((hidden, outputs)),
            "bias": np.zeros(outputs),
        }
        self._moments = {name: (np.zeros_like(weight), np.zeros_like(weight)) for name, weight in self.weights.items()}
        self._steps = 0

    def _forward(
        self, prefixes: Sequence[tuple[int, ...]], options: Sequence[tuple[int, ...]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the inputs (N, inputs), hidden units (N, hidden) and chances (N, outputs) of the next decisions."""
        outputs = int(self._starts[-1])
        inputs = np.zeros((len(prefixes), len(self.weights["inner"])))
        masked = np.full((len(prefixes), outputs), -np.inf)
        for row, (prefix, allowed) in enumerate(zip(prefixes, options)):
            inputs[row, [self._index[at][value] for at, value in enumerate(prefix)]] = 1.0
            inputs[row, outputs + len(prefix)] = 1.0
            masked[row, [self._index[len(prefix)][value] for value in allowed]] = 0.0
        hidden = np.tanh(inputs @ self.weights["inner"])
        logits = hidden @ self.weights["outer"] + self.weights["bias"] + masked
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        return inputs, hidden, chances / chances.sum(axis=1, keepdims=True)

    def sample(self, tree: LayoutTree, count: int, draw: np.random.Generator) -> list[tuple[int, ...]]:
        """Returns paths drawn by the policy."""
        paths: list[tuple[int, ...]] = [()] * count
        for depth in range(len(DECISIONS)):
            options = [tree.options(path) for path in paths]
            chances = self._forward(paths, options)[2]
            for row, allowed in enumerate(options):
                of_options = chances[row, [self._index[depth][value] for value in allowed]]
                paths[row] = (*paths[row], allowed[int(draw.choice(len(allowed), p=of_options / of_options.sum()))])
        return paths

    def gradient(
        self, tree: LayoutTree, paths: Sequence[tuple[int, ...]], advantages: np.ndarray, entropy: float
    ) -> dict[str, np.ndarray]:
        """Returns the gradient of the mean over paths of: advantage x ln chance + entropy x that of every decision.

        Args:
            tree: of the paths.
            paths: N of them.
            advantages: (N,) float64.
            entropy: weight of the entropy.
        """
        total = {name: np.zeros_like(weight) for name, weight in self.weights.items()}
        for depth in range(len(DECISIONS)):
            prefixes = [path[:depth] for path in paths]
            inputs, hidden, chances = self._forward(prefixes, [tree.options(prefix) for prefix in prefixes])
            chosen = np.zeros_like(chances)
            chosen[np.arange(len(paths)), [self._index[depth][path[depth]] for path in paths]] = 1.0
            # d ln p(chosen) / d logits = chosen - p; d entropy / d logits = -p (ln p + entropy)  (Williams, 1992)
            logs = np.log(np.where(chances > 0, chances, 1.0))
            entropies = -(chances * logs).sum(axis=1, keepdims=True)
            outer = (advantages[:, None] * (chosen - chances) - entropy * chances * (logs + entropies)) / len(paths)
            total["bias"] += outer.sum(axis=0)
            total["outer"] += hidden.T @ outer
            total["inner"] += inputs.T @ ((outer @ self.weights["outer"].T) * (1.0 - hidden**2))
        return total

    def ascend(self, gradient: dict[str, np.ndarray], rate: float) -> None:
        """Takes a step of Adam (Kingma and Ba, 2015) up a gradient."""
        self._steps += 1
        for name, slope in gradient.items():
            first, second = self._moments[name]
            first += 0.1 * (slope - first)
            second += 0.001 * (slope**2 - second)
            step = (first / (1 - 0.9**self._steps)) / (np.sqrt(second / (1 - 0.999**self._steps)) + 1e-8)
            self.weights[name] += rate * step


def search_by_policy(prices: Prices, draw: np.random.Generator, rate: float = 0.03, entropy: float = 0.01) -> None:
    """Trains a policy by REINFORCE; a layout's advantage is its place among those of its batch, from 1 to -1."""
    policy = Policy(prices.tree.values(), draw)
    while prices.left > 0:
        paths = policy.sample(prices.tree, min(BATCH, prices.left), draw)
        costs = prices.ask(paths)
        places = np.argsort(np.argsort(costs, kind="stable"), kind="stable")
        advantages = 1.0 - 2.0 * places / max(1, len(paths) - 1)
        policy.ascend(policy.gradient(prices.tree, paths, advantages, entropy), rate)


METHODS: dict[str, Callable[[Prices, np.random.Generator], None]] = {
    "random": search_randomly,
    "genetic": search_genetically,
    "policy gradient": search_by_policy,
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a method found on a question."""

    question: str
    method: str
    seed: int
    prices: int
    """Asked in all; by the exact search, priced."""
    core_s: float
    """Seconds of a core."""
    ratios: dict[int, float]
    """By number of prices, seconds of the best so far over those of the exact search."""
    found_after: int | None
    """Prices after which the best was within `CLOSE` of the exact; None if it never was."""


def question_of(name: str) -> Question:
    """Returns one of `QUESTIONS`."""
    preset, cluster, rows, sequence = QUESTIONS[name]
    job = PricedJob(shape=shape_from_sizes(presets()[preset].sizes), sequence=sequence, rows=rows)
    limits = {"offloads": ("none",)}
    return Question(job=job, cluster=Cluster.parse(cluster), base=Layout(precision="bf16"), limits=limits)


def compare(name: str, question: Question, limit: int, seeds: int) -> list[Run]:
    """Returns the exact search of a question and the runs of every method."""
    started = time.process_time()
    found = search_space(question)
    exact_core_s = time.process_time() - started
    assert found.best is not None
    exact_s = float(found.best[1].step_s[0])
    runs = [Run(question=name, method="exact", seed=0, prices=found.priced, core_s=exact_core_s,
                ratios={found.priced: 1.0}, found_after=found.priced)]  # fmt: skip
    for method, search in METHODS.items():
        for seed in range(seeds):
            started = time.process_time()
            # The tree belongs to the search, as the exact one's enumeration does.
            prices = Prices(LayoutTree(question), limit)
            search(prices, np.random.default_rng(seed))
            best = np.array(prices.best_s) / exact_s
            close = np.flatnonzero(best <= 1 + CLOSE)
            runs.append(
                Run(
                    question=name,
                    method=method,
                    seed=seed,
                    prices=len(best),
                    core_s=time.process_time() - started,
                    ratios={count: float(best[count - 1]) for count in (*MILESTONES, limit) if count <= len(best)},
                    found_after=int(close[0]) + 1 if len(close) else None,
                )
            )
    return runs


def table(runs: Sequence[Run]) -> list[str]:
    """Returns the lines of a table in Markdown, a line for each question.

    A cell has the medians over seeds of the best over the exact one's after each of `MILESTONES`, the worst after the
    last, how many seeds came within `CLOSE`, and seconds of a core.
    """
    lines = [f"| question | exact: prices, core | {' | '.join(METHODS)} |", "|---" * (len(METHODS) + 2) + "|"]
    for question in dict.fromkeys(run.question for run in runs):
        members = {method: [run for run in runs if (run.question, run.method) == (question, method)]
                   for method in ("exact", *METHODS)}  # fmt: skip
        exact = [f"{run.prices:,}, {run.core_s:.1f} s" for run in members.pop("exact")]
        lines.append(f"| {' | '.join([question, *exact, *map(_cell, members.values())])} |")
    return lines


def _cell(runs: Sequence[Run]) -> str:
    counts = [count for count in MILESTONES if all(count in run.ratios for run in runs)]
    medians = [_ratio(float(np.median([run.ratios[count] for run in runs]))) for count in counts]
    worst = _ratio(max(run.ratios[run.prices] for run in runs))
    found = sum(run.found_after is not None for run in runs)
    seconds = float(np.median([run.core_s for run in runs]))
    return f"{', '.join(medians)} (worst {worst}); {found} of {len(runs)}; {seconds:.1f} s"


def _ratio(value: float) -> str:
    return f"{value:.3f}" if np.isfinite(value) else "nothing"


def run_json(run: Run) -> dict[str, Any]:
    """Returns a run as plain values; a ratio is null where nothing that fits was found."""
    return asdict(run) | {
        "ratios": {count: value if np.isfinite(value) else None for count, value in run.ratios.items()}
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="benchmarks.search_methods", description=__doc__)
    parser.add_argument("--prices", type=int, default=MILESTONES[-1], help="most prices that a method may ask")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=QUESTIONS, nargs="+", default=list(QUESTIONS), help="questions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run")
    chosen = parser.parse_args(arguments)
    runs: list[Run] = []
    for name in chosen.only:
        runs += compare(name, question_of(name), chosen.prices, chosen.seeds)
    if chosen.json:
        written = json.dumps([run_json(run) for run in runs], indent=2, allow_nan=False)
        chosen.json.write_text(written + "\n", encoding="utf-8")
    print("\n".join(table(runs)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
