"""The questions about a plan: what training takes, what fits at most, what would be with other machines or sizes.

Each function takes a request and a model that was read, and returns a typed answer; none loads torch. ``question`` of a
`PlanConfig` says which one a request asks.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.cluster.cluster import Cluster
from meshwright.errors import ClusterError, ConfigError, PlanError
from meshwright.jobs.plan_model import (
    PlannableModel,
    make_fits,
    make_solver,
    named_layout,
    plan_model,
    question_of,
    read_cluster,
    spans_devices,
    with_modules,
)
from meshwright.jobs.requests import PlanConfig
from meshwright.planner.budgets import Budget, budgets_within, cheapest_budget, cluster_sizes, make_budget
from meshwright.planner.candidate_prices import price_possible
from meshwright.planner.capacity import (
    BatchCurve,
    LargestModel,
    LongestRows,
    batch_curve,
    batch_sizes,
    largest_model,
    longest_rows,
)
from meshwright.planner.cases import PlannedCase, solve_case
from meshwright.planner.emit import Emitted, emit_plan, narrowed_question, recomputed_whole
from meshwright.planner.finalists import choose_finalists
from meshwright.planner.measured_price import price_layout
from meshwright.planner.measured_run import MeasuredRun, measure_run
from meshwright.planner.reshape import Reshape, reshape
from meshwright.planner.scaling import sizes
from meshwright.planner.walls import Walls, find_walls
from meshwright.planner.what_if import changed_cluster, parse_factors
from meshwright.units import parse_count


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetResult:
    """What training on some tokens takes, by cluster."""

    tokens: float
    """To train on."""
    days: float
    """The deadline; 0 for none."""
    objective: str
    """``energy`` chooses by energy, anything else by dollars."""
    budgets: tuple[Budget, ...]
    """Of every cluster and number of devices that was asked."""
    chosen: Budget | None
    """The cheapest that meets the deadline; None where none does."""

    @property
    def is_met(self) -> bool:
        """Whether some cluster meets the deadline."""
        return self.chosen is not None

    def to_json(self) -> dict[str, object]:
        """Returns the answer as plain values."""
        return {
            "tokens": self.tokens,
            "days": self.days,
            "objective": self.objective,
            "budgets": [budget.to_json() for budget in self.budgets],
            "chosen": self.chosen.to_json() if self.chosen else None,
        }


def plan_budget(config: PlanConfig, model: PlannableModel, cluster: Cluster | None = None) -> BudgetResult:
    """Returns days, device hours, dollars and energy of training on ``config.tokens`` tokens.

    With ``config.days`` the cheapest cluster that meets it is found: whole nodes of each cluster that is named.

    Args:
        config: its ``cluster`` may name several, separated by commas.
        model: the model.
        cluster: the machines, instead of those that the config names.

    Raises:
        ConfigError, ClusterError, PlanError: for what can't be.
    """
    tokens = parse_count(config.tokens) or 0.0
    if tokens <= 0:
        raise ConfigError(f"tokens = {config.tokens!r}: write a number above 0, as 300B or 15T")
    solve = make_solver(config, model)
    texts = [text.strip() for text in config.cluster.split(",") if text.strip()]
    clusters = [cluster] if cluster is not None else [_cluster_named(config, text) for text in texts or [""]]
    budgets: list[Budget] = []
    for machines in clusters:
        question = question_of(dataclasses.replace(config, cluster="", hostfile="", device=""), model, machines)
        if spans_devices(config):
            counts = sizes(config.devices, question.cluster.devices)
        elif config.days and not config.devices:
            counts = cluster_sizes(question)
        else:
            budgets.append(make_budget(solve_case(str(question.cluster), question, solve), tokens))
            continue
        budgets += budgets_within(question, tokens, config.days or 0.0, counts, solve)
    return BudgetResult(
        tokens=tokens,
        days=config.days or 0.0,
        objective=config.objective,
        budgets=tuple(budgets),
        chosen=cheapest_budget(budgets, config.days or 0.0, config.objective),
    )


def _cluster_named(config: PlanConfig, text: str) -> Cluster:
    return read_cluster(dataclasses.replace(config, cluster=text))


def plan_largest(config: PlanConfig, model: PlannableModel, cluster: Cluster | None = None) -> LargestModel:
    """Finds the largest model of the given one's family that fits, by sizes alone.

    Raises:
        ConfigError, ClusterError, PlanError: for what can't be, or when nothing fits.
    """
    unmeasured = dataclasses.replace(model, measure=None)
    question = question_of(config, unmeasured, cluster)
    return largest_model(question, make_solver(config, unmeasured), make_fits(unmeasured))


def plan_longest(config: PlanConfig, model: PlannableModel, cluster: Cluster | None = None) -> LongestRows:
    """Finds the longest rows that some layout fits, by sizes alone, in as many rows.

    Raises:
        ConfigError, ClusterError, PlanError: for what can't be, or when nothing fits.
    """
    unmeasured = dataclasses.replace(model, measure=None)
    question = question_of(config, unmeasured, cluster)
    return longest_rows(question, make_solver(config, unmeasured), make_fits(unmeasured))


def plan_batch(config: PlanConfig, model: PlannableModel, cluster: Cluster | None = None) -> BatchCurve:
    """Plans for doublings of the global batch, until the throughput is flat.

    Raises:
        ConfigError, ClusterError, PlanError: for what can't be.
    """
    question = question_of(config, model, cluster)
    return batch_curve(question, batch_sizes(question.cluster.devices), make_solver(config, model))


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIfResult:
    """The same question on a changed cluster."""

    today: PlannedCase
    """On the cluster as it is."""
    changed: tuple[PlannedCase, ...]
    """With all changes; of several also with each alone."""

    @property
    def is_met(self) -> bool:
        """Whether something fits with all changes."""
        return self.changed[0].best is not None

    def to_json(self) -> dict[str, object]:
        """Returns the answer as plain values."""
        return {"today": self.today.to_json(), "changed": [case.to_json() for case in self.changed]}


def plan_what_if(config: PlanConfig, model: PlannableModel, cluster: Cluster | None = None) -> WhatIfResult:
    """Plans for the cluster as it is and with ``config.what_if``.

    Raises:
        ConfigError, ClusterError: for what can't be changed.
    """
    question, factors = question_of(config, model, cluster), parse_factors(config.what_if)
    solve = make_solver(config, model)
    changes: list[Mapping[str, float]] = [factors]
    if len(factors) > 1:
        changes += [{figure: factor} for figure, factor in factors.items()]
    changed = []
    for change in changes:
        other = dataclasses.replace(question, cluster=changed_cluster(question.cluster, change))
        changed.append(solve_case(",".join(f"{key}={value:g}x" for key, value in change.items()), other, solve))
    return WhatIfResult(today=solve_case("today", question, solve), changed=tuple(changed))


def plan_measured(config: PlanConfig, model: PlannableModel, cluster: Cluster | None = None) -> MeasuredRun:
    """Returns the utilisation of ``config.layout`` at ``config.measured_s`` a step, and where it loses.

    Raises:
        ConfigError, ClusterError, PlanError: for what can't be.
    """
    if config.measured_s is None:
        raise ConfigError("measured_s isn't given; say how many seconds a step took, as --measured-s 6.5")
    question, measure = with_modules(question_of(config, model, cluster), model)
    layout = named_layout(config.layout[0], question)
    return measure_run(question, layout, config.measured_s, make_solver(config, model), measure)


def plan_reshape(config: PlanConfig, model: PlannableModel, cluster: Cluster | None = None) -> Reshape:
    """Plans nearby sizes of the model, and returns those with more FLOP/s, by sizes alone.

    Raises:
        ConfigError, ClusterError, PlanError: for what can't be, or when the model doesn't fit.
    """
    unmeasured = dataclasses.replace(model, measure=None)
    return reshape(question_of(config, unmeasured, cluster), make_solver(config, unmeasured))


def plan_walls(config: PlanConfig, model: PlannableModel, cluster: Cluster | None = None) -> Walls:
    """Returns which of compute, memory and network bounds the plan.

    Raises:
        ConfigError, ClusterError, PlanError: for what can't be, when nothing fits, or for a measured cluster.
    """
    question = question_of(config, model, cluster)
    if question.cluster.calibration is not None:
        raise ClusterError(
            "walls doubles figures of a description, and this cluster's times are measured; name it without its "
            "calibration, as --cluster 8xh100"
        )
    return find_walls(question, make_solver(config, model), make_fits(model))


def plan_emit(config: PlanConfig, model: PlannableModel, cluster: Cluster | None = None) -> Emitted:
    """Writes the plan, or the fastest other layout that is found which the framework can express, for ``config.emit``.

    Raises:
        ConfigError, ClusterError, PlanError: for what can't be, when nothing fits, or when it can express none.
    """
    result = plan_model(config, model, cluster)
    question, candidates = result.question, [*result.choice.best, *result.choice.more]
    # Where the framework lacks what the plan has, the search is made again without that.
    with contextlib.suppress(PlanError):
        measure = None if model.measure is None else model.measure(config.sequence, question.job.precision)
        narrowed = narrowed_question(config.emit, question)
        choice = choose_finalists(narrowed, config.show, measure, config.allow)
        others = [*choice.best, *choice.more]
        whole = recomputed_whole([candidate.layout for candidate in others])
        others += price_possible(narrowed, whole, lambda layout: price_layout(narrowed, layout, measure))
        others = [candidate for candidate in others if candidate.price.peak <= question.usable_bytes]
        candidates += sorted(others, key=lambda candidate: candidate.price.step_s)
    return emit_plan(config.emit, question, candidates)


Answer = BudgetResult | LargestModel | LongestRows | BatchCurve | WhatIfResult | MeasuredRun | Reshape | Walls | Emitted
"""The answer to a question of `PlanConfig.question`."""
_ANSWERS: Mapping[str, Callable[[PlanConfig, PlannableModel, Cluster | None], Answer]] = {
    "tokens": plan_budget,
    "largest": plan_largest,
    "longest": plan_longest,
    "batch": plan_batch,
    "what_if": plan_what_if,
    "measured_s": plan_measured,
    "reshape": plan_reshape,
    "walls": plan_walls,
    "emit": plan_emit,
}


def answer_question(config: PlanConfig, model: PlannableModel, cluster: Cluster | None = None) -> Answer:
    """Answers the question that a request asks.

    Args:
        config: with one question.
        model: the model.
        cluster: the machines, instead of those that the config names.

    Raises:
        ConfigError, ClusterError, PlanError: for what can't be.
    """
    return _ANSWERS[config.question](config, model, cluster)
