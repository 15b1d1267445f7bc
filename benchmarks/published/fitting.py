"""Fits a few named constants to measured rows: a robust search along one constant at a time, in steps that shrink."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks.published.predict import predict, with_engines
from benchmarks.published.rows import Case
from meshwright.planner.cost import engines, kernels
from meshwright.planner.cost.engine import Engine

Bounds = tuple[float, float]


class Knobs:
    """Constants by name: ``rates.hopper.sustained``, ``nanotron.runtime.host_layer_s``; set for a with-block or kept.

    Args:
        names: which.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def read(self) -> np.ndarray:
        """Returns their values."""
        return np.asarray([_read(name) for name in self.names])

    def write(self, values: Sequence[float]) -> None:
        """Sets them, in the tables of this process."""
        for name, value in zip(self.names, values):
            _write(name, float(value))


def known_engines() -> dict[str, Engine]:
    """Returns the engines by name."""
    return {item.name: item for item in vars(engines).values() if isinstance(item, Engine)}


def _place(name: str) -> tuple[str, list[str]]:
    owner, *path = name.split("/")
    return owner, path


def _read(name: str) -> float:
    owner, path = _place(name)
    value: object = kernels.RATES if owner == "rates" else known_engines()[owner]
    for step in path:
        key = step.split(":")
        value = value[key[0]] if isinstance(value, dict) else getattr(value, key[0])  # type: ignore[index]
        if len(key) > 1:
            value = value[int(key[1])]  # type: ignore[index]
    return float(value)  # type: ignore[arg-type]


def _write(name: str, value: float) -> None:
    owner, path = _place(name)
    if owner == "rates":
        kernels.RATES[path[0]] = dataclasses.replace(kernels.RATES[path[0]], **{path[1]: value})
        return
    key = path[-1].split(":")
    part = known_engines()[owner]
    holder = getattr(part, path[0]) if len(path) > 1 else part
    changed: object = value
    if len(key) > 1:
        pair = list(getattr(holder, key[0]))
        pair[int(key[1])] = value
        changed = tuple(pair)
    option = "__".join([*path[:-1], key[0]])
    found = part.with_options(**{option: changed})
    for variable, item in list(vars(engines).items()):
        if isinstance(item, Engine) and item.name == owner:
            setattr(engines, variable, found)


def errors(cases: Sequence[Case], what: str) -> np.ndarray:
    """Returns the logarithms of predicted over measured, of ``time`` or ``memory``."""
    found = predict(with_engines(cases, known_engines()))
    if what == "time":
        return np.asarray([np.log(item.step_s / item.case.time_s) for item in found if item.case.time_s])
    return np.asarray([np.log(item.memory_bytes / item.case.memory_bytes) for item in found if item.case.memory_bytes])


def _moves(count: int, chance: np.random.Generator) -> list[np.ndarray]:
    """Returns directions to try: each constant up and down, and several at once, as they trade against another."""
    single = [sign * row for row in np.eye(count) for sign in (1.0, -1.0)]
    return single + [row for row in chance.integers(-1, 2, (count, count)).astype(float) if row.any()]


def fit(
    cases: Sequence[Case],
    names: Sequence[str],
    what: str = "time",
    bounds: Mapping[str, Bounds] | None = None,
    rounds: int = 6,
    prior: float = 0.002,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, float]:
    """Sets constants so that the mean of the absolute logarithmic error is least, and returns them.

    Args:
        cases: rows to fit to.
        names: the constants; those at 0 are tried from a small value on.
        what: ``time`` or ``memory``.
        bounds: least and most of some.
        rounds: passes over all constants; the step shrinks each time.
        prior: weight of staying near where a constant was.
        tell: is told how it goes.
    """
    knobs, limits = Knobs(names), bounds or {}
    start = knobs.read()
    best = start.copy()

    def loss(values: np.ndarray) -> float:
        knobs.write(values)
        size = np.abs(errors(cases, what))
        moved = np.log(np.maximum(values, 1e-9) / np.maximum(start, 1e-9))
        calm = np.where(start > 0, np.minimum(np.abs(moved), 3.0), 0.0).sum()
        return float(np.mean(np.minimum(size, 0.7)) + prior * calm)

    least = loss(best)
    chance = np.random.default_rng(0)
    low, high = (np.asarray([limits.get(name, (0.0, np.inf))[side] for name in names]) for side in (0, 1))
    for turn in range(rounds):
        step = 0.5 * 0.55**turn
        for move in _moves(len(names), chance):
            while True:
                tried = np.clip(best * (1.0 + step) ** move, low, high)
                found = np.inf if np.array_equal(tried, best) else loss(tried)
                if found >= least - 1e-6:
                    break
                best, least = tried, found
        tell(f"round {turn}: {least:.4f}  " + "  ".join(f"{name}={value:.4g}" for name, value in zip(names, best)))
    knobs.write(best)
    return dict(zip(names, map(float, best)))
