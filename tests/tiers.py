"""Which cases of a test `make test` tries, and which `make extended`, `make long` and `make soak` alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(
    values: Iterable[Any], each_time: Collection[int | str] = (0,), extended: Collection[int | str] = ()
) -> list[Any]:
    """Returns the values of a parametrised test, with the mark `long` or `extended` on all but some.

    Args:
        values: what `pytest.mark.parametrize` takes: tuples where there are several names.
        each_time: places, or first names, of the values that `make test` tries too.
        extended: the same of those that `make extended` tries too.
    """
    found = []
    for place, value in enumerate(values):
        is_marked = isinstance(value, type(pytest.param()))
        parts = value.values if is_marked else value if isinstance(value, tuple) else (value,)
        keys = {place, parts[0]} if isinstance(parts[0], str) else {place}
        mark = pytest.mark.extended if keys.intersection(extended) else pytest.mark.long
        marks = () if keys.intersection(each_time) else (mark,)
        found.append(pytest.param(*parts, marks=(*(value.marks if is_marked else ()), *marks)))
    return found


def further(values: Iterable[Any], each_time: Collection[int | str] = (0,)) -> list[Any]:
    """Returns the values of a test, which holds one claim for each of them, with the mark `extended` on all but some.

    Args:
        values: as in `cases`.
        each_time: as in `cases`; one or more.
    """
    values = list(values)
    found = cases(values, each_time, range(len(values)))
    assert any(pytest.mark.extended not in param.marks for param in found), f"make test tries none of {values}"
    return found


def seeds(values: Iterable[int], in_long: int) -> list[Any]:
    """Returns a test's seeds, the first ``in_long`` with the mark `long`, the others with `soak`."""
    marks = (pytest.mark.long, pytest.mark.soak)
    return [pytest.param(value, marks=marks[place >= in_long]) for place, value in enumerate(values)]
