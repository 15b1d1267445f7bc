"""Prices layouts in full, many at once, as the finalists of a search are priced."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from meshwright.errors import PlanError
from meshwright.planner.candidate import Candidate
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.cost.pipeline_simulation import simulated_prices
from meshwright.planner.cost.prices import Price
from meshwright.planner.device_limits import check_host, job_for
from meshwright.planner.question import Question
from meshwright.planner.utilization import data_sheet_flops, model_flops_per_s
from meshwright.spec.layout import Layout


def price_candidate(question: Question, layout: Layout) -> Candidate:
    """Prices one layout in full.

    Raises:
        PlanError: for state in host memory without room for it; for a precision that devices have no rate for.
    """
    return price_candidates(question, [layout])[0]


def price_candidates(question: Question, layouts: Sequence[Layout]) -> list[Candidate]:
    """Prices layouts in full, many at once.

    Raises:
        PlanError: for state in host memory without room for it; for a precision that devices have no rate for.
    """
    cluster, layouts_of_job = question.cluster, dict[PricedJob, dict[Layout, None]]()
    for layout in layouts:
        job = job_for(question.job, layout, cluster)
        check_host(job, layout, cluster, question.runtime)
        layouts_of_job.setdefault(job, {})[layout] = None
    candidates: dict[Layout, Candidate] = {}
    for job, priced in layouts_of_job.items():
        prices = simulated_prices(job, list(priced), question.machine, question.runtime)
        job_question = dataclasses.replace(question, job=job)
        candidates |= {layout: priced_candidate(job_question, layout, price) for layout, price in zip(priced, prices)}
    return [candidates[layout] for layout in layouts]


def priced_candidate(question: Question, layout: Layout, layout_price: Price) -> Candidate:
    """Returns a layout with its price, and the rates that follow from its seconds a step."""
    tokens, step_s = question.job.rows * question.job.sequence, layout_price.step_s
    dollars, watts = question.cluster.price_per_hour, question.cluster.watts
    job = job_for(question.job, layout, question.cluster)
    return Candidate(
        layout=layout,
        price=layout_price,
        tokens_per_s=tokens / step_s,
        cost_per_mtoken=None if dollars is None else dollars / 3600.0 * step_s / tokens * 1e6,
        joules_per_token=watts * step_s / tokens if watts else None,
        flops_per_device=model_flops_per_s(job, step_s) / question.cluster.devices,
        mfu=model_flops_per_s(job, step_s) / data_sheet_flops(question.cluster, job.dtype),
    )


def price_ahead(question: Question, layouts: Iterable[Layout]) -> None:
    """Prices at once, as finalists are, layouts that are then priced one by one; what can't be is left to that."""
    job = question.job
    # Islands, and compiled layers that are still to be measured, make another question of it.
    alike = [
        layout
        for layout in layouts
        if layout.islands == 1 and not (layout.compile and job.activations and job.compiled_activations is None)
    ]
    with contextlib.suppress(PlanError):
        price_candidates(question, alike)


def price_possible(
    question: Question, layouts: Iterable[Layout], price_one: Callable[[Layout], Candidate]
) -> list[Candidate]:
    """Returns the prices of variants that can run; one that a host, say, has no room for is left out.

    Args:
        question: what is planned.
        layouts: variants that are tried, not job_question for.
        price_one: prices one, or raises `PlanError` where it can't run.
    """
    variants, candidates = list(layouts), []
    price_ahead(question, variants)
    for layout in variants:
        with contextlib.suppress(PlanError):
            candidates.append(price_one(layout))
    return candidates
