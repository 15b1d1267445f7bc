"""Chooses how islands join where they are allowed: the settings with which a step is short, and no further apart.

Every setting that nobody gave is tried with every other: steps of a round, fragments, delay, and with ``--allow lossy``
the number format. Of those within `SLACK` of the fastest it takes the mildest: the least age, H + D steps, after which
all islands have what one trained; then exact numbers; then the fewest fragments.
Source of the ranges: Douillard et al., Streaming DiLoCo (2025), sections 2.3 and 3: rounds of 30 and 100 steps, and
delays of up to 5, with losses about those of DiLoCo.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from meshwright.planner.candidate import Candidate
from meshwright.planner.islands import hiding_step_s, outer_bytes, price_exchange
from meshwright.planner.question import Question
from meshwright.planner.rounds import JOIN, OUTER, Rounds

SLACK = 0.05
"""Fewer islands, and milder joins, are taken where a step takes at most this share longer."""
ROUND_STEPS = (10, 20, 30, 60, 100)
"""Steps of a round that are tried."""
FRAGMENTS = (1, 2, 4)
"""Fragments that are tried, of which a model has no more than layers."""
DELAYS = (0, 1, 2, 3, 4, 5)
"""Delays that are tried, of which each is at most a sixth of its round."""
ROUND_DELAYS = 6
"""Longest delays that a round has room for."""


def choose_rounds(question: Question, candidate: Candidate, lossy: bool) -> Rounds:
    """Returns how the islands of a candidate join: as the user said, and else the mildest that is about the fastest.

    Args:
        question: of all islands.
        candidate: a layout of islands.
        lossy: whether numbers may be rounded.
    """
    layout, priced = candidate.layout, []
    free_bytes = question.usable_bytes - (candidate.price.peak - candidate.price.memory[OUTER])
    hiding_s = hiding_step_s(question, layout, candidate.price)
    for kind in _exchanges(question.rounds, len(question.job.shape.layer_parameters), lossy):
        exchange = price_exchange(dataclasses.replace(question, rounds=kind), layout)
        for rounds in _paces(kind):
            if outer_bytes(dataclasses.replace(question, rounds=rounds), layout) <= free_bytes:
                priced.append((exchange.join(rounds, hiding_s).step_s, rounds))
    if not priced:
        return question.rounds
    step_s = candidate.price.step_s - candidate.price.parts[JOIN]
    limit_s = (step_s + min(join_s for join_s, _ in priced)) * (1 + SLACK) - step_s
    return min((rounds for join_s, rounds in priced if join_s <= limit_s), key=_distance)


def _distance(rounds: Rounds) -> tuple[int, bool, int, int]:
    """Returns by what settings are ordered, the mildest first."""
    return rounds.age, rounds.compress != "none", rounds.fragments, rounds.delay


def _exchanges(rounds: Rounds, layers: int, lossy: bool) -> Iterator[Rounds]:
    """Yields fragments and number formats that may be chosen."""
    # Weights that go to single peers are neither rounded nor sent in fragments, nor late.
    streams = not rounds.direct_peers
    formats = ("none", "int8") if streams and lossy and "compress" in rounds.free else (rounds.compress,)
    fragments = FRAGMENTS if streams and "fragments" in rounds.free else (rounds.fragments,)
    for compress in formats:
        for count in fragments:
            if count <= max(layers, rounds.fragments):
                yield dataclasses.replace(rounds, compress=compress, fragments=count)


def _paces(rounds: Rounds) -> Iterator[Rounds]:
    """Yields steps and delays that may be chosen."""
    delays = DELAYS if "delay" in rounds.free and not rounds.direct_peers else (rounds.delay,)
    tried = ROUND_STEPS if rounds.most_steps is None else [n for n in ROUND_STEPS if n <= rounds.most_steps]
    for steps in (tried or ROUND_STEPS[:1]) if "every" in rounds.free else (rounds.steps,):
        for delay in delays:
            fits = delay * ROUND_DELAYS <= steps if "delay" in rounds.free else delay < steps
            if fits and rounds.fragments <= steps:
                yield dataclasses.replace(rounds, steps=steps, delay=delay)
