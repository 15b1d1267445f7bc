"""Fits a few named constants to measured rows: damped Gauss-Newton steps on logarithms, each held by how sure it is.

Rows of one model share what the form gets wrong of it, so many rows are no many witnesses. A constant is held to its
prior as firmly as that is known (its spread), and rows move it only where what they say of it is more than that: what
they can't tell, such as the rate of large products from small ones, stays where specifications put it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.published import framework_profiles
from benchmarks.published.predict import figures, with_engines
from benchmarks.published.rows import Case
from meshwright.planner.cost import kernels
from meshwright.planner.cost.framework_profile import FrameworkProfile

Bounds = tuple[float, float]
Found = tuple[np.ndarray, np.ndarray]
"""A place, and the rows' errors there."""
SPREAD = 0.5
"""Standard deviation of a constant's logarithm about its prior, where none is given: a factor of 1.6."""
PULL = 0.002
"""Mean error that it costs to put one constant `SPREAD`s away: mean |error| + pull x sum of squares of these."""
LEVEL = 0.12
"""Standard deviation of what the rows of one framework have in common beside its constants, as a logarithm: of ten
frameworks that were left out, the medians of their errors scatter so. What one framework alone says of a device is for
the larger part its own. It was chosen on these very errors: what is judged by them is a bit kinder for it."""
MOST_ERROR = 0.7
"""Logarithmic error beyond which a row doesn't count for more: its columns miss what slowed it."""
STEP = 0.02
"""Change of a logarithm by which slopes are measured."""
LEAPS = (0.3, -0.3, 0.6, -0.6)
"""Changes of one logarithm that are tried where no small one gains."""
MOST_DAMPING = 1e3
"""Beyond it a step is too small to gain."""
SMALL = 0.005
"""Logarithmic error under which the loss is round, so that it has a slope at 0."""


class Knobs:
    """Constants by name: ``rates/hopper/sustained``, ``nanotron/runtime/host_layer_s``; set for a with-block or kept.

    Engines that share a part, such as one framework before and after a repair, go on sharing it.

    Args:
        names: which.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def read(self) -> np.ndarray:
        """Returns their values."""
        return np.asarray([_read(name) for name in self.names])

    def write(self, values: Iterable[float]) -> None:
        """Sets them, in the tables of this process."""
        for name, value in zip(self.names, values):
            _write(name, float(value))


def known_engines() -> dict[str, FrameworkProfile]:
    """Returns the engines by name."""
    return {item.name: item for item in vars(framework_profiles).values() if isinstance(item, FrameworkProfile)}


def _place(name: str) -> tuple[str, list[str]]:
    owner, *path = name.split("/")
    return owner, path


def _read(name: str) -> float:
    owner, path = _place(name)
    shared: dict[str, object] = {"rates": kernels.RATES, "products": kernels.PRODUCTS}
    value = shared[owner] if owner in shared else known_engines()[owner]
    for step in path:
        key = step.split(":")
        value = value[key[0]] if isinstance(value, dict) else getattr(value, key[0])  # type: ignore[index]
        if len(key) > 1:
            value = value[int(key[1])]  # type: ignore[index]
    return float(value)  # type: ignore[arg-type]


def _write(name: str, value: float) -> None:
    owner, path = _place(name)
    if owner == "products":
        kernels.PRODUCTS = dataclasses.replace(kernels.PRODUCTS, **{path[0]: value})
        return
    if owner == "rates":
        kernels.RATES[path[0]] = dataclasses.replace(kernels.RATES[path[0]], **{path[1]: value})
        return
    key = path[-1].split(":")
    part = known_engines()[owner]
    holder = getattr(part, path[0]) if len(path) > 1 else part
    changed: Any = value
    if len(key) > 1:
        pair = list(getattr(holder, key[0]))
        pair[int(key[1])] = value
        changed = tuple(pair)
    if len(path) > 1:
        changed = dataclasses.replace(holder, **{key[0]: changed})
    for variable, item in list(vars(framework_profiles).items()):
        if isinstance(item, FrameworkProfile) and _has(item, owner, path, holder):
            setattr(
                framework_profiles,
                variable,
                dataclasses.replace(item, **{path[0] if len(path) > 1 else key[0]: changed}),
            )


def _has(item: FrameworkProfile, owner: str, path: Sequence[str], holder: object) -> bool:
    """Whether an engine has this very part, or is the owner itself."""
    return item.name == owner if len(path) == 1 else getattr(item, path[0]) is holder


def _touched(name: str, cases: Sequence[Case]) -> np.ndarray:
    """Which cases a constant has a say in."""
    owner, path = _place(name)
    if owner == "products":
        return np.ones(len(cases), dtype=bool)
    if owner == "rates":
        kind = kernels.RATES[path[0]]
        return np.asarray([bool(case.kinds) or kernels.rates(case.machine.device) is kind for case in cases])
    known = known_engines()
    part = known[owner]
    holder = getattr(part, path[0]) if len(path) > 1 else part
    names = {key for key, item in known.items() if _has(item, owner, path, holder)}
    return np.asarray([case.engine.name in names for case in cases])


def errors(cases: Sequence[Case], what: str) -> np.ndarray:
    """Returns the logarithms of predicted over measured, of ``time`` or ``memory``."""
    chosen = [case for case in cases if measured(case, what)]
    found = figures(with_engines(chosen, known_engines()), what)
    return np.log(found) - np.log([measured(case, what) or 1.0 for case in chosen])


def measured(case: Case, what: str) -> float | None:
    """Returns what was measured, ``time`` or ``memory``; None where it isn't to be compared."""
    return case.time_s if what == "time" else case.memory_bytes


class _Fit:
    """A fit at work; places are logarithms of constants over their starts, then the levels of files.

    Args:
        cases: rows with what is measured.
        knobs: the constants.
        what: ``time`` or ``memory``.
        spreads: of each constant.
        pull: see `PULL`.
        levels: whether each file has a level of its own, see `LEVEL`.
    """

    def __init__(
        self, cases: Sequence[Case], knobs: Knobs, what: str, spreads: np.ndarray, pull: float, levels: bool
    ) -> None:
        self.cases, self.knobs, self.what = cases, knobs, what
        self.start = knobs.read()
        files = sorted({case.file for case in cases}) if levels else []
        self.of_file = np.asarray([[case.file == name for name in files] for case in cases], dtype=float)
        self.hold = pull / np.concatenate([spreads, np.full(len(files), LEVEL)]) ** 2
        self.low, self.high = np.full(len(self.hold), -np.inf), np.full(len(self.hold), np.inf)
        self.touched = [_touched(name, cases) for name in knobs.names]

    def values(self, place: np.ndarray) -> np.ndarray:
        """Returns the constants of a place."""
        return np.asarray(self.start * np.exp(place[: len(self.start)]))

    def errors(self, place: np.ndarray) -> np.ndarray:
        """Returns the rows' errors there."""
        self.knobs.write(self.values(place))
        return errors(self.cases, self.what) + self.of_file @ place[len(self.start) :]

    def loss(self, place: np.ndarray, found: np.ndarray) -> float:
        """Returns what is to be least."""
        return float(np.mean(np.minimum(np.abs(found), MOST_ERROR)) + (self.hold * place**2).sum())

    def nudged(self, place: np.ndarray, found: np.ndarray, column: int, far: float) -> Found:
        """Returns the place with one constant moved, and the errors there; rows that it has no say in aren't priced."""
        moved, there, constants = place.copy(), found.copy(), len(self.start)
        moved[column] += far
        if column >= constants:
            return moved, there + far * self.of_file[:, column - constants]
        rows = self.touched[column]
        if rows.any():
            self.knobs.write(self.values(moved))
            level = self.of_file[rows] @ place[constants:]
            there[rows] = errors([case for case, yes in zip(self.cases, rows) if yes], self.what) + level
        return moved, there

    def slopes(self, place: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Returns how each row's error changes with each constant, (rows, constants)."""
        columns = [self.nudged(place, found, column, STEP)[1] - found for column in range(len(place))]
        return np.stack(columns, axis=1) / STEP

    def descend(self, place: np.ndarray, found: np.ndarray, rounds: int) -> Found:
        """Takes steps downhill until they gain nothing, and returns where they end."""
        least, damping = self.loss(place, found), 0.01
        for _ in range(rounds):
            before, table = least, self.slopes(place, found)
            while damping < MOST_DAMPING:
                tried = np.clip(place + self._step(place, found, table, damping), self.low, self.high)
                there = self.errors(tried)
                if self.loss(tried, there) < least:
                    place, found, least, damping = tried, there, self.loss(tried, there), damping / 4
                    break
                damping *= 6
            if least > before - 1e-5:
                break
            damping = min(max(damping, 1e-3), 10.0)
        return place, found

    def leap(self, place: np.ndarray, found: np.ndarray) -> Found:
        """Moves one constant after the other far, where that gains: the host's time under the device's has no slope."""
        for column in range(len(place)):
            for far in LEAPS:
                least, most = self.low[column] - place[column], self.high[column] - place[column]
                tried, there = self.nudged(place, found, column, float(np.clip(far, least, most)))
                if self.loss(tried, there) < self.loss(place, found) - 1e-5:
                    place, found = tried, there
        return place, found

    def _step(self, place: np.ndarray, found: np.ndarray, table: np.ndarray, damping: float) -> np.ndarray:
        """Returns a damped Gauss-Newton step on absolute errors, which are squares over their own size."""
        size = np.abs(found)
        weight = np.where(size < MOST_ERROR, 1.0 / np.maximum(size, SMALL), 0.0) / len(found)
        slope = table.T @ (weight * found) + 2 * self.hold * place
        curve = (table.T * weight) @ table + np.diag(2 * self.hold)
        curve += damping * np.diag(np.diag(curve) + 1e-9)
        free = ~(((place <= self.low) & (slope > 0)) | ((place >= self.high) & (slope < 0)))
        step = np.zeros(len(place))
        if free.any():
            step[free] = -np.linalg.solve(curve[np.ix_(free, free)], slope[free])
        return np.clip(step, -1.0, 1.0)


def fit(
    cases: Sequence[Case],
    names: Sequence[str],
    what: str = "time",
    bounds: Mapping[str, Bounds] | None = None,
    rounds: int = 10,
    spreads: Mapping[str, float] | None = None,
    pull: float = PULL,
    leaps: bool = True,
    levels: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, float]:
    """Sets constants so that the mean of the absolute logarithmic error and of what holds them is least.

    Args:
        cases: rows to fit to; those without what is measured don't count.
        names: the constants; those at 0 stay there.
        what: ``time`` or ``memory``.
        bounds: least and most of some.
        rounds: steps at most.
        spreads: standard deviation of the logarithm of some about where they start; `SPREAD` of the others.
        pull: how firmly they are held.
        leaps: whether constants are tried far off after the steps; without, the fit is ten times as fast.
        levels: whether the rows of each file may lie above or below by a level of their own, which isn't returned.
        tell: is told how it goes.

    Returns:
        The constants.
    """
    knobs, limits = Knobs(names), bounds or {}
    chosen = [case for case in cases if measured(case, what)]
    wide = np.asarray([(spreads or {}).get(name, SPREAD) for name in names])
    work = _Fit(chosen, knobs, what, wide, pull, levels)
    floor = np.maximum(work.start, 1e-12)
    low, high = (
        np.log(np.maximum([limits.get(name, (0.0, np.inf))[side] for name in names], 1e-12) / floor) for side in (0, 1)
    )
    constants = slice(len(names))
    work.low[constants], work.high[constants] = np.minimum(low, 0.0), np.maximum(high, 0.0)
    place = np.zeros(len(work.hold))
    found = work.errors(place)
    least = np.inf
    while work.loss(place, found) < least - 1e-4:
        least = work.loss(place, found)
        place, found = work.descend(place, found, rounds)
        if leaps:
            place, found = work.leap(place, found)
        told = "  ".join(f"{name}={value:.4g}" for name, value in zip(names, work.values(place)))
        tell(f"{work.loss(place, found):.4f}  {told}")
        if not leaps:
            break
    knobs.write(work.values(place))
    return dict(zip(names, map(float, work.values(place))))
