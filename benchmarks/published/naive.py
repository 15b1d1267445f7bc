"""The predictor to beat: one constant of achieved TFLOP/s for each kind of device and data type."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.published.rows import Case


class Naive:
    """One rate per device and data type: the median over the rows that it is fitted to.

    Args:
        cases: rows with a measured time; those of one file where a file is judged. It is fitted to what it is judged
            on, which flatters it.
    """

    def __init__(self, cases: Sequence[Case]) -> None:
        found: dict[tuple[str, str], list[float]] = {}
        for case in cases:
            if case.time_s is not None:
                found.setdefault(_key(case), []).append(_work(case) / case.time_s)
        self._rates = {key: float(np.median(values)) for key, values in found.items()}

    def seconds(self, case: Case) -> float:
        """Returns the step time it predicts; device types without any row count 40 % of the peak."""
        fallback = 0.4 * case.machine.device.peak(case.job.dtype)
        return _work(case) / self._rates.get(_key(case), fallback)


def _key(case: Case) -> tuple[str, str]:
    return case.machine.device.name, case.job.dtype


def _work(case: Case) -> float:
    """Model FLOPs of a step for one device."""
    tokens = case.job.rows * case.job.sequence
    ranks = 1.0
    for axis in ("pp", "tp", "cp", "replicate", "shard"):
        ranks *= case.columns[axis]
    return tokens * case.job.shape.train_flops_per_token(case.job.sequence) / ranks
