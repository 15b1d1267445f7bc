"""Plans for several numbers of devices: where more devices stop paying, and which of those left are worth using."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import numpy as np

from meshwright.errors import PlanError
from meshwright.planner.candidate import Candidate, Choice
from meshwright.planner.cases import Solve
from meshwright.planner.choose import build_choice, choose, search_space
from meshwright.planner.question import Question
from meshwright.planner.search import SearchResult
from meshwright.planner.space import divisors

MAX_IDLE_SHARE = 1 / 16
"""Largest share of the devices that may stay idle after nodes were lost."""
KNEE = 0.8
"""Least efficiency of a growth step relative to the one before: 1.6 times the tokens a second for twice the devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The best plan for a number of devices."""

    devices: int
    best: Candidate | None
    """None where no layout exists or fits."""
    why: str = ""
    """The reason for that."""
    efficiency: float = 0.0
    """Tokens a second and device, relative to the smallest number of devices with a plan."""


def sizes(text: str, available: int) -> list[int]:
    """Parses ``8..512`` to 8, 16, ... 512, and ``64,8,24`` to 8, 24, 64.

    Raises:
        PlanError: for any other text, or for more devices than ``available``.
    """
    smallest, range_dots, largest = text.partition("..")
    try:
        if range_dots:
            counts, largest_count = [int(smallest)], int(largest)
            while 0 < counts[-1] * 2 <= min(largest_count, 2 * available):
                counts.append(counts[-1] * 2)
        else:
            # Efficiency is relative to the smallest, and the knee is between neighbours.
            counts = sorted({int(item) for item in text.split(",")})
    except ValueError:
        raise PlanError(f"--devices {text}: write a number, 8..512, or 8,24,64") from None
    if min(counts) < 1 or (range_dots and int(largest) < int(smallest)):
        raise PlanError(f"--devices {text}: numbers of devices go up from 1")
    if max(counts) > available:
        raise PlanError(f"--devices {text}: the cluster has {available}; name a larger one with --cluster")
    return counts


def curve(question: Question, counts: list[int], solve: Solve | None = None) -> list[Point]:
    """Returns the best plan for each number of devices, with the batch unchanged (strong scaling).

    Args:
        question: its cluster has the most devices.
        counts: numbers of devices, the smallest first.
        solve: plans; by the closed form where none is given.
    """
    solve = solve or (lambda smaller: choose(smaller, 1).best[0])
    points: list[Point] = []
    for count in counts:
        smaller = dataclasses.replace(question, cluster=question.cluster.restricted(count))
        try:
            points.append(Point(devices=count, best=solve(smaller)))
        except PlanError as error:
            points.append(Point(devices=count, best=None, why=str(error)))
    baseline = next((point for point in points if point.best), None)
    if baseline is None or baseline.best is None:
        return points
    baseline_rate = baseline.best.tokens_per_s / baseline.devices
    return [
        dataclasses.replace(
            point, efficiency=point.best.tokens_per_s / point.devices / baseline_rate if point.best else 0.0
        )
        for point in points
    ]


def knee(points: list[Point]) -> int | None:
    """Returns the last number of devices before growth stops paying; None if it pays up to the last one.

    Between neighbours tokens a second grow as devices ** a. A doubling that brings `KNEE` of its part has
    a = log2(2 KNEE), so steps of any size are held to the same exponent.
    """
    least_exponent = math.log2(2 * KNEE)
    feasible = [point for point in points if point.best]
    for smaller, larger in itertools.pairwise(feasible):
        ratio = larger.devices / smaller.devices
        growth = larger.efficiency * ratio / smaller.efficiency
        # The tolerance is of rounding: a doubling that brings exactly KNEE of its part pays.
        if growth < ratio**least_exponent * (1 - 1e-9):
            return smaller.devices
    return None


def best_size(points: list[Point], objective: str) -> int | None:
    """Returns the number of devices that the objective asks for.

    Args:
        points: plans for several numbers of devices.
        objective: ``cost`` and ``energy`` take the number with the fewest dollars or joules a token, ``time`` the knee.
    """
    if objective == "time":
        return knee(points)
    figures = {
        point.devices: point.best.cost_per_mtoken if objective == "cost" else point.best.joules_per_token
        for point in points
        if point.best
    }
    known = {devices: figure for devices, figure in figures.items() if figure is not None}
    return min(known, key=lambda devices: known[devices]) if known else None


def replan(question: Question, show: int = 3) -> tuple[Question, Choice]:
    """Returns the best plan on the remaining devices of a cluster, and the question with the devices that it uses.

    Degrees must divide devices, rows and layers, so a plan for a few nodes fewer may be faster than the best for all
    that are left: up to `MAX_IDLE_SHARE` of them are left out where it is.

    Args:
        question: its cluster has the remaining devices.
        show: most layouts in the answer.

    Raises:
        PlanError: when no such number of devices has a layout that fits.
    """
    best: tuple[Question, SearchResult] | None = None
    limit_s = np.inf
    for smaller in _smaller_questions(question):
        try:
            result = search_space(smaller, limit_s)
        except PlanError:
            continue
        if result.best is None:
            continue
        step_s = float(result.best[1].step_s[0])
        if best is None or step_s * (1 + question.tie_tolerance) < limit_s:
            best, limit_s = (smaller, result), step_s * (1 + question.tie_tolerance)
    if best is None:
        return question, choose(question, show)
    return best[0], build_choice(*best, show)


def _smaller_questions(question: Question) -> list[Question]:
    """Returns the question for each allowed number of full nodes, those with the most divisors first."""
    cluster = question.cluster
    node_devices = cluster.groups[0].node.count
    fewest = math.ceil(cluster.devices * (1 - MAX_IDLE_SHARE))
    counts = range(cluster.devices, fewest - 1, -node_devices)
    ordered = sorted(counts, key=lambda count: (-len(divisors(count)), -count))
    return [dataclasses.replace(question, cluster=cluster.restricted(count)) for count in ordered]
