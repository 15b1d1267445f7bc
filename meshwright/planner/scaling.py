"""How the best plan changes with the number of devices: where more stop paying, which of those left are worth it."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np

from meshwright.errors import PlanError
from meshwright.planner.choose import Candidate, Choice, Question, choose, chosen, searched
from meshwright.planner.search import SearchResult
from meshwright.planner.space import divisors

IDLE = 1 / 16
"""Share of the devices that may stand idle when nodes were lost."""
KNEE = 0.8
"""Share of its part that a doubling of the devices must bring: 1.6 times the tokens a second for twice the devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The best plan for a number of devices."""

    devices: int
    best: Candidate | None
    """None where nothing fits or can be."""
    why: str = ""
    """Why nothing does."""
    efficiency: float = 0.0
    """Tokens a second and device over those of the smallest number that works."""


def sizes(text: str, available: int) -> list[int]:
    """Reads ``8..512`` as 8, 16, ... 512; ``8,24,64`` as itself.

    Raises:
        PlanError: for anything else, or more devices than there are.
    """
    first, dots, last = text.partition("..")
    try:
        if dots:
            found, top = [int(first)], int(last)
            while found[-1] * 2 <= top:
                found.append(found[-1] * 2)
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError:
        raise PlanError(f"--devices {text}: write a number, 8..512, or 8,24,64") from None
    if min(found) < 1 or (dots and int(last) < int(first)):
        raise PlanError(f"--devices {text}: numbers of devices go up from 1")
    if max(found) > available:
        raise PlanError(f"--devices {text}: the cluster has {available}; name a larger one with --cluster")
    return found


def curve(question: Question, counts: list[int]) -> list[Point]:
    """Returns the best plan for each number of devices, with the same batch."""
    points: list[Point] = []
    for count in counts:
        part = dataclasses.replace(question, cluster=question.cluster.restricted(count))
        try:
            points.append(Point(devices=count, best=choose(part, 1).best[0]))
        except PlanError as error:
            points.append(Point(devices=count, best=None, why=str(error)))
    first = next((point for point in points if point.best), None)
    if first is None or first.best is None:
        return points
    alone = first.best.tokens_per_s / first.devices
    return [
        dataclasses.replace(point, efficiency=point.best.tokens_per_s / point.devices / alone if point.best else 0.0)
        for point in points
    ]


def knee(points: list[Point]) -> int | None:
    """Returns the last number of devices up to which every growth brought `KNEE` of its part; None where all did."""
    works = [point for point in points if point.best]
    for before, after in itertools.pairwise(works):
        if after.efficiency < before.efficiency * KNEE:
            return before.devices
    return None


def replan(question: Question, show: int = 3) -> tuple[Question, Choice]:
    """Returns the best plan on what is left of a cluster, and the question with the devices that it uses.

    Degrees must divide devices, rows and layers, so a plan for a few nodes fewer may be faster than the best for all
    that are left: up to `IDLE` of them are left out where it is.

    Args:
        question: its cluster is what is left.
        show: most layouts in the answer.

    Raises:
        PlanError: when no such number of devices has a layout that fits.
    """
    best: tuple[Question, SearchResult] | None = None
    under = np.inf
    for part in _parts(question):
        try:
            found = searched(part, under)
        except PlanError:
            continue
        if found.best is None:
            continue
        step_s = float(found.best[1].step_s[0])
        if best is None or step_s * (1 + question.same) < under:
            best, under = (part, found), step_s * (1 + question.same)
    if best is None:
        return question, choose(question, show)
    return best[0], chosen(*best, show)


def _parts(question: Question) -> list[Question]:
    """The question for each number of devices that may do, whole nodes: those with the most divisors first."""
    cluster = question.cluster
    node = cluster.groups[0].node.count
    counts = range(cluster.devices, max(0, int(cluster.devices * (1 - IDLE)) - 1), -node)
    ordered = sorted(counts, key=lambda count: (-len(divisors(count)), -count))
    return [dataclasses.replace(question, cluster=cluster.restricted(count)) for count in ordered]
