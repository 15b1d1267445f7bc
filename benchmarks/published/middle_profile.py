"""A profile between those of several frameworks, for runs on code that they share and of which no row was fitted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.published.other_profile import OtherProfile

SCALES = ("attention", "pass_width", "route_bytes", "cast_bytes", "host_step_s")
"""Constants whose factors are averaged: bytes, seconds and shares of a rate."""
SHARES = ("dp_overlap", "tp_overlap", "ep_overlap", "accumulate_bytes")
"""Constants that may be 0, which are averaged as they are."""


def middle_profile(name: str, frameworks: Sequence[Sequence[OtherProfile]], source: str) -> OtherProfile:
    """Returns the first profile with the mean constants of frameworks, each of which counts alike.

    Args:
        name: of the profile.
        frameworks: for each its profiles, whose mean is the framework's.
        source: why these share what they share.
    """

    def mean(values: Sequence[Sequence[float]]) -> float:
        return float(np.mean([np.mean(own) for own in values]))

    def values(field: str) -> list[list[float]]:
        return [[float(getattr(profile.runtime, field)) for profile in own] for own in frameworks]

    options: dict[str, float] = {field: mean(values(field)) for field in SHARES}
    for field in SCALES:
        options[field] = float(np.exp(mean([[float(np.log(value)) for value in own] for own in values(field)])))
    changes = {f"runtime__{field}": value for field, value in options.items()}
    return frameworks[0][0].with_options(name=name, source=source, **changes)
