"""Prices layouts of islands: one island's layout on its share of devices and rows, and the join of all once a round.

Inside an island a step is that of the layout without islands. With B bytes of a rank's movement, n islands, F fragments
and D steps of delay, each fragment's exchange sends

    all-reduce   2 (n-1)/n B/F                  rounded   (n-1) b/F, b the rounded bytes
    gossip       p B/F, p = min(peers, n-1)

over B and b of the fragment's own layers. Its ranks stand still for max(0, exchange - min(D, H/F) step): fragments
start H/F steps apart, and one that takes the link for longer makes the next one wait. Where islands span nodes, the
seconds of a step in which these wait for each other are the link's own, and hide nothing. No delay hides the device's
own work: the outer step, rounding its movement and decoding those of all islands, and on processor cores what these do
for the wire, as far as they don't stand still anyway. The steps of a round share all of these.

First steps that all islands take as one (`outer.warmup`) wait for the sum of all gradients each: an all-reduce of B, or
with `outer.compress` an all-to-all and an all-gather of b, and the work of rounding both times; a step's price is the
mean over the run, where its length is known.
Source: Douillard et al., DiLoCo (2023); Douillard et al., Streaming DiLoCo (2025), section 2.3.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from meshwright.cluster import traffic
from meshwright.errors import NoRoomError
from meshwright.planner.candidate import Candidate, Choice, pareto_front
from meshwright.planner.candidate_prices import priced_candidate
from meshwright.planner.choose import choose
from meshwright.planner.cost.element_bytes import master_bytes
from meshwright.planner.cost.kernels import move_s
from meshwright.planner.cost.layout_batch import COMPRESSIONS, Array
from meshwright.planner.cost.prices import Price
from meshwright.planner.cost.rounding import RoundingTimes
from meshwright.planner.question import Question
from meshwright.planner.rounds import JOIN, OUTER, Rounds
from meshwright.planner.run_history import TRAFFIC
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.groups import round_axes, row_axes
from meshwright.spec.layout import Layout
from meshwright.spec.model_shape import ModelShape
from meshwright.units import format_bytes, format_seconds

UPDATE_ACCESSES = 35.0
"""Reads and writes of a value in memory that a join makes, beside those of rounding. Counted on `train.outer`: the
movement 5, its weight and the division 4, distances for the metrics 8, the outer step 11, the weights 2, and 5 where
bounds are looked at (`train.bounds`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinPrice:
    """The exchange of one fragment of the weights between islands, of which a round has ``fragments``."""

    every: int
    """Steps of a round."""
    fragments: int
    delay: int
    """Steps of compute between an exchange's start and its end."""
    sent_bytes: float
    """Bytes that a rank sends in an exchange, on average over fragments, as are all that follow."""
    exchange_s: float
    """Seconds of an exchange on the wire."""
    exposed_s: float
    """Seconds of it for which a rank stands still."""
    work_s: float
    """Seconds that a core itself works for the exchange beside these."""
    rounding_s: float
    """Seconds in which a rank rounds what it sends and decodes what it gets."""
    update_s: float
    """Seconds of the outer step, and of what leads up to it."""
    joint_share: float
    """Share of the run's steps that all islands take as one."""
    joint_s: float
    """Seconds that the sum of all islands' gradients takes a rank in each of these."""

    @property
    def step_s(self) -> float:
        """A step's share of what exchanges expose and compute, and of what first steps wait for: its mean over all."""
        join_s = self.fragments * (self.exposed_s + self.work_s + self.rounding_s + self.update_s) / self.every
        return (1.0 - self.joint_share) * join_s + self.joint_share * self.joint_s

    def note(self, step_s: float, advises: bool = True) -> str:
        """Returns a sentence on what joins send and expose, and what would hide them.

        Args:
            step_s: seconds of a step without joins.
            advises: whether to name a delay; not where the plan chose it.
        """
        count = f"{self.fragments} times in" if self.fragments > 1 else "once in"
        sentence = (
            f"{count} {self.every} steps islands exchange {format_bytes(self.sent_bytes)} a rank in "
            f"{format_seconds(self.exchange_s)}, of which {format_seconds(self.exposed_s)} are exposed"
        )
        delay = math.ceil(self.exchange_s / step_s)
        if advises and self.exposed_s > 0 and delay < self.every:
            sentence += f"; --outer.delay {delay} would hide it behind the steps between"
        if self.joint_share:
            sentence += f"; the {self.joint_share:.0%} of steps before wait {format_seconds(self.joint_s)} each"
        return sentence


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
        other_island_devices=question.cluster.devices - question.cluster.devices // layout.islands,
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
        NoRoomError: when none of the layouts fits.
        PlanError: when no layout exists.
    """
    island = island_question(question, Layout(degrees={name: islands.degree(name) for name in islands.degrees}))
    choice = choose(island, show)

    def with_all_islands(candidate: Candidate) -> Candidate:
        degrees = {name: islands.degree(name) for name in round_axes()} | dict(candidate.layout.degrees)
        return with_joins(question, dataclasses.replace(candidate.layout, degrees=degrees), candidate)

    best, more = (
        tuple(
            candidate
            for candidate in map(with_all_islands, candidates)
            if candidate.price.peak <= question.usable_bytes
        )
        for candidates in (choice.best, choice.more)
    )
    if not best:
        raise NoRoomError(
            f"no layout of {question.cluster} has room for the outer weights and momentum of {islands.islands} islands "
            "beside the state of one; nearest that would: --fix islands=1"
        )
    front = pareto_front([*best, *more])
    return dataclasses.replace(choice, best=best, more=more, front=front, kept=())


def with_joins(question: Question, layout: Layout, candidate: Candidate) -> Candidate:
    """Returns the price of a layout of islands from that of one island.

    Args:
        question: of all islands.
        layout: with the islands.
        candidate: the layout of one island, priced on its share (`island_question`).
    """
    price, held_bytes = candidate.price, outer_bytes(question, layout)
    stages = tuple(
        dataclasses.replace(
            stage,
            memory={**stage.memory, OUTER: held_bytes},
            peak=stage.peak + held_bytes,
            allocated=stage.allocated + held_bytes,
        )
        for stage in price.stages
    )
    join_s = price_join(question, layout, price).step_s
    joined = dataclasses.replace(
        price,
        step_s=price.step_s + join_s,
        parts={**price.parts, JOIN: join_s},
        stages=stages,
        memory={**price.memory, OUTER: held_bytes},
        peak=price.peak + held_bytes,
        allocated=price.allocated + held_bytes,
    )
    return dataclasses.replace(priced_candidate(question, layout, joined), rounds=question.rounds)


def outer_bytes(question: Question, layout: Layout) -> float:
    """Returns the bytes of the outer optimizer and of exchanges under way on a rank of a layout of islands."""
    tensors = question.rounds.outer_tensors + question.rounds.travelling_tensors
    return tensors * master_bytes(layout.precision) * _rank_elements(question, layout)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangePrice:
    """The exchanges of a round, one a fragment; arrays are (F,)."""

    sent_bytes: Array
    """Bytes that a rank sends."""
    wire_s: Array
    """Seconds on the wire."""
    core_s: Array
    """Seconds of them in which the core that computes works for the wire; 0 on devices that compute meanwhile."""
    rounding_s: Array
    """Seconds in which a rank rounds what it sends and decodes what it gets."""
    update_s: Array
    """Seconds of the outer step, and of what leads up to it."""
    joint_s: float
    """Seconds that the sum of all gradients takes a rank, in a step that all islands take as one."""

    def join(self, rounds: Rounds, hiding_s: float) -> JoinPrice:
        """Returns what the exchanges cost a rank.

        Args:
            rounds: how often and how late they are; of as many fragments, in the same number format.
            hiding_s: seconds of a step in which the link is free.
        """
        # A queue empties only while fragments start further apart than an exchange takes.
        steps = min(rounds.delay, rounds.steps / rounds.fragments)
        exposed_s = np.maximum(0.0, self.wire_s - steps * hiding_s)
        return JoinPrice(
            every=rounds.steps,
            fragments=rounds.fragments,
            delay=rounds.delay,
            sent_bytes=float(self.sent_bytes.mean()),
            exchange_s=float(self.wire_s.mean()),
            exposed_s=float(exposed_s.mean()),
            # A core that stands still works for the wire meanwhile.
            work_s=float(np.maximum(0.0, self.core_s - exposed_s).mean()),
            rounding_s=float(self.rounding_s.mean()),
            update_s=float(self.update_s.mean()),
            joint_share=rounds.joint_share,
            joint_s=self.joint_s,
        )


def price_exchange(question: Question, layout: Layout) -> ExchangePrice:
    """Returns the price of the exchanges between the islands of a layout.

    Args:
        question: of all islands; of its rounds, fragments and number format count.
        layout: with the islands.
    """
    fabric, islands, rounds = question.cluster.fabric(), layout.islands, question.rounds
    inside, nodes, sharing = traffic.span(layout.world // islands, islands, fabric.devices, layout.world)
    elements = _rank_elements(question, layout) * fragment_shares(question.job.shape, rounds.fragments)
    size, rounding_s = master_bytes(layout.precision) * elements, np.zeros_like(elements)
    joint_s = traffic.all_reduce_s(size.sum(), inside, nodes, fabric, sharing)
    if rounds.direct_peers:
        sent_bytes = min(rounds.direct_peers, islands - 1) * size
        # Every rank sends at once, whatever the number of its island's peers in its node.
        wire_s = traffic.send_s(sent_bytes, inside, nodes, fabric, sharing * inside)
    elif rounds.rounded_bytes:
        sent_bytes = (islands - 1) * rounds.rounded_bytes * elements
        gathered_bytes = islands * rounds.rounded_bytes * elements
        wire_s = traffic.all_gather_s(gathered_bytes, inside, nodes, fabric, sharing)
        times = question.machine.rounding or RoundingTimes.of(question.machine.device, None)
        code = np.array([COMPRESSIONS.index(rounds.compress)])
        rounding_s = times.gather_s(code, elements[None], islands * elements[None])[0]
        joint_bytes, joint_elements = rounds.rounded_bytes * elements.sum(), elements.sum().reshape(1, 1)
        joint_s = times.sum_s(code, joint_elements, np.array([islands])).item()
        for exchange_s in (traffic.all_to_all_s, traffic.all_gather_s):
            joint_s += exchange_s(joint_bytes, inside, nodes, fabric, sharing)
    else:
        sent_bytes = 2 * (islands - 1) / islands * size
        wire_s = traffic.all_reduce_s(size, inside, nodes, fabric, sharing)
    wire_s = np.asarray(wire_s, float)
    core_byte_s, runtime = question.machine.core_byte_s, question.runtime.runtime
    # Inside a node cores copy from memory to memory; over a network as calibration measured it.
    core_s = wire_s * (runtime.reduce_floor if not core_byte_s else 1.0)
    if core_byte_s and nodes > 1:
        core_s = sent_bytes * core_byte_s
    return ExchangePrice(
        sent_bytes=sent_bytes,
        wire_s=wire_s,
        core_s=core_s,
        rounding_s=rounding_s,
        update_s=_update_s(question, size),
        joint_s=float(joint_s),
    )


def _update_s(question: Question, size: Array) -> Array:
    """Returns seconds of the outer step of fragments of ``size: (F,)`` bytes, and of what leads up to it, (F,)."""
    calibration = question.cluster.calibration
    if calibration is None or not calibration.has_operation("copy"):
        return np.asarray(move_s(UPDATE_ACCESSES * size, question.machine.device))
    return np.asarray(UPDATE_ACCESSES * size / calibration.bandwidth_bytes_per_s(size))


def fragment_shares(shape: ModelShape, fragments: int) -> Array:
    """Returns each fragment's share of the parameters, (F,): layer l in fragment l mod F, the rest in the last."""
    values = np.zeros(fragments)
    for layer, parameters in enumerate(shape.layer_parameters):
        values[layer % fragments] += parameters
    values[-1] += shape.parameters - sum(shape.layer_parameters)
    return values / shape.parameters


def price_join(question: Question, layout: Layout, price: Price) -> JoinPrice:
    """Returns the price of the exchanges between the islands of a layout.

    Args:
        question: of all islands.
        layout: with the islands.
        price: of one island's layout, without joins.
    """
    return price_exchange(question, layout).join(question.rounds, hiding_step_s(question, layout, price))


def hiding_step_s(question: Question, layout: Layout, price: Price) -> float:
    """Returns the seconds of an island's step in which its link to the others is free; arguments of `price_join`."""
    in_node = layout.world // layout.islands <= question.machine.fabric.devices
    waits_s = 0.0 if in_node else sum(price.parts.get(name, 0.0) for name in TRAFFIC)
    return price.step_s - price.parts.get(JOIN, 0.0) - waits_s


def candidate_join(question: Question, candidate: Candidate) -> JoinPrice:
    """Returns the price of the exchanges between the islands of a candidate."""
    question = dataclasses.replace(question, rounds=candidate.rounds or question.rounds)
    return price_join(question, candidate.layout, candidate.price)


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
