"""Prices layouts of islands: one island's layout on its share of devices and rows, and the join of all once a round.

Inside an island a step is that of the layout without islands. The join is an all-reduce of each rank's movement between
islands, whose seconds the steps of a round share; none of it is hidden. Source: Douillard et al., DiLoCo (2023).
"""

from __future__ import annotations

import dataclasses
import math

from meshwright.cluster import traffic
from meshwright.errors import PlanError
from meshwright.planner.choose import Candidate, Choice, Question, choose, pareto_front, priced_candidate
from meshwright.planner.cost.element_bytes import master_bytes
from meshwright.planner.rounds import JOIN, OUTER, OUTER_TENSORS
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.groups import round_axes, row_axes
from meshwright.spec.layout import Layout


def island_question(question: Question, layout: Layout) -> Question:
    """Returns the question of one island: its share of the devices and of the rows.

    Raises:
        PlanError: when the layout doesn't fit the devices or the rows.
    """
    layout.check_ranks(question.cluster.devices)
    layout.check_batch(question.job.rows)
    fixed = {name: degree for name, degree in question.limits.get("fixed", {}).items() if name not in round_axes()}
    return dataclasses.replace(
        question,
        job=dataclasses.replace(question.job, rows=question.job.rows // layout.islands),
        cluster=question.cluster.restricted(question.cluster.devices // layout.islands),
        limits=question.limits | {"fixed": fixed} if question.limits else {},
    )


def fixed_islands(question: Question) -> Layout | None:
    """Returns the layout of the islands that the question fixes and of copies inside them; None for one island."""
    fixed = question.limits.get("fixed", {})
    degrees = {name: fixed[name] for name in round_axes() if fixed.get(name, 1) > 1}
    if not degrees:
        return None
    islands = math.prod(degrees.values())
    devices, rest = divmod(question.cluster.devices, islands)
    if rest:
        Layout(degrees=degrees).check_ranks(question.cluster.devices)
    return Layout(degrees=degrees | {row_axes(Holds.COPY)[0]: devices})


def choose_islands(question: Question, islands: Layout, show: int) -> Choice:
    """Searches the layouts of one island and returns the answer for all of them.

    Args:
        question: which fixes the islands.
        islands: as `fixed_islands` returns it.
        show: most layouts in the answer.

    Raises:
        PlanError: when no layout exists or fits.
    """
    one = island_question(question, Layout(degrees={name: islands.degree(name) for name in islands.degrees}))
    choice = choose(one, show)

    def outside(candidate: Candidate) -> Candidate:
        degrees = {name: islands.degree(name) for name in round_axes()} | dict(candidate.layout.degrees)
        return with_joins(question, dataclasses.replace(candidate.layout, degrees=degrees), candidate)

    best, more = (
        tuple(each for each in map(outside, candidates) if each.price.peak <= question.usable_bytes)
        for candidates in (choice.best, choice.more)
    )
    if not best:
        raise PlanError(
            f"no layout of {question.cluster} has room for the outer weights and momentum of {islands.islands} islands "
            "beside the state of one; nearest that would: --fix islands=1"
        )
    front = pareto_front([*best, *more])
    return dataclasses.replace(choice, best=best, more=more, front=front)


def with_joins(question: Question, layout: Layout, candidate: Candidate) -> Candidate:
    """Returns the price of a layout of islands from that of one island.

    Args:
        question: of all islands.
        layout: with the islands.
        candidate: the layout of one island, priced on its share (`island_question`).
    """
    price, elements = candidate.price, _rank_elements(question, layout)
    outer_bytes = OUTER_TENSORS * master_bytes(layout.precision) * elements
    stages = tuple(
        dataclasses.replace(stage, memory={**stage.memory, OUTER: outer_bytes}, peak=stage.peak + outer_bytes)
        for stage in price.stages
    )
    join_s = join_seconds(question, layout) / question.rounds.steps
    joined = dataclasses.replace(
        price,
        step_s=price.step_s + join_s,
        parts={**price.parts, JOIN: join_s},
        stages=stages,
        memory={**price.memory, OUTER: outer_bytes},
        peak=price.peak + outer_bytes,
    )
    return priced_candidate(question, layout, joined)


def join_seconds(question: Question, layout: Layout) -> float:
    """Returns seconds of a join: an all-reduce of each rank's movement, or a gather of it in rounded numbers."""
    fabric, islands = question.cluster.fabric(), layout.islands
    inside, nodes, sharing = traffic.span(layout.world // islands, islands, fabric.devices, layout.world)
    elements = _rank_elements(question, layout)
    if rounded_bytes := question.rounds.rounded_bytes:
        return float(traffic.all_gather_s(rounded_bytes * elements * islands, inside, nodes, fabric, sharing))
    return float(traffic.all_reduce_s(master_bytes(layout.precision) * elements, inside, nodes, fabric, sharing))


def _rank_elements(question: Question, layout: Layout) -> float:
    """Returns the parameters that a rank updates, on average over ranks."""
    shape = question.job.shape
    experts = sum(block.expert_parameters for block in shape.blocks)
    split = layout.degree(Mechanics.STAGES) * layout.degree(Mechanics.MATRICES) * layout.state_shards
    # Ranks of a block hold other experts, or other shards of the same.
    spread = layout.degree(Mechanics.STAGES) * max(
        layout.degree(Mechanics.EXPERTS), layout.degree(Mechanics.MATRICES) * layout.state_shards
    )
    return (shape.parameters - experts) / split + experts / spread
