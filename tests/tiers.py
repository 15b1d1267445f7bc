"""Which cases of a test are run each time, in the long round alone (`make long`), and in `make soak` alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(values: Iterable[Any], each_time: Collection[int | str] = (0,)) -> list[Any]:
    """Returns the values of a parametrised test, with the mark `long` on all but some.

    Args:
        values: what `pytest.mark.parametrize` takes: tuples where there are several names.
        each_time: places, or first names, of the values that `make test` tries too.
    """
    found = []
    for place, value in enumerate(values):
        parts = value if isinstance(value, tuple) else (value,)
        often = place in each_time or (isinstance(parts[0], str) and parts[0] in each_time)
        found.append(pytest.param(*parts, marks=() if often else pytest.mark.long))
    return found


def seeds(values: Iterable[int], in_long: int) -> list[Any]:
    """Returns a test's seeds, the first ``in_long`` with the mark `long`, the others with `soak`."""
    marks = (pytest.mark.long, pytest.mark.soak)
    return [pytest.param(value, marks=marks[place >= in_long]) for place, value in enumerate(values)]
