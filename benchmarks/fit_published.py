"""Fits the cost model's constants to published runs again, from their priors, beside those in use.

    python -m benchmarks.fit_published benchmarks/truth/*.csv [--only hopper] [--rounds 5]

Nothing is written: a constant is changed by hand in ``meshwright/planner/cost/`` (`kernels.RATES`, `engines`), so that
a reader sees what moved and why. Constants that aren't listed come from specifications or from the frameworks' code.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.published.__main__ import read_cases
from benchmarks.published.fitting import Knobs, errors, fit
from benchmarks.published.folds import (
    BEFORE_MEMORY,
    COMPOSER,
    DEEPSPEED,
    LEAST_MOST,
    MEGATRON,
    NANOTRON,
    NANOTRON_MEMORY,
    RATES,
    prior,
)
from benchmarks.published.rows import Case

MOST_ROWS = 250
"""Rows of a file that a group is fitted to; of more they are drawn."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Constants that are fitted together, and the files whose rows they are fitted to."""

    name: str
    files: tuple[str, ...]
    devices: tuple[str, ...]
    knobs: tuple[str, ...]
    what: str = "time"

    def takes(self, case: Case) -> bool:
        """Whether a row belongs to it."""
        measured = case.time_s if self.what == "time" else case.memory_bytes
        fits = case.file.startswith(self.files) and case.machine.device.name.startswith(self.devices)
        return bool(measured) and fits


GROUPS = (
    Group(
        name="hopper",
        files=("hf_", "mpt_", "mlperf", "torchtitan"),
        devices=("h100", "h200"),
        knobs=RATES["hopper"] + NANOTRON + COMPOSER,
    ),
    Group(
        name="ampere",
        files=("vtrain", "mpt_", "bigscience", "megatron_sc21", "korthikanti", "megatron_readme"),
        devices=("a100",),
        knobs=RATES["ampere"] + DEEPSPEED + COMPOSER + MEGATRON,
    ),
    Group(
        name="blackwell",
        files=("megatron_bridge", "simumax", "mlperf"),
        devices=("b200", "gb200"),
        knobs=RATES["blackwell"]
        + ("bridge/runtime/pass_width", "bridge/runtime/route_bytes", "bridge/runtime/ep_overlap")
        + ("megatron-te/runtime/accumulate_bytes",),
    ),
    Group(
        name="memory",
        files=("hf_",),
        devices=("h100",),
        knobs=NANOTRON_MEMORY + BEFORE_MEMORY,
        what="memory",
    ),
)
"""All of them."""


def refit(group: Group, cases: Sequence[Case], rounds: int) -> None:
    """Fits a group from its priors and prints what came of it; the constants are as before afterwards."""
    rows = [case for case in cases if group.takes(case)]
    chosen: list[Case] = []
    for name in sorted({case.file for case in rows}):
        own = [case for case in rows if case.file == name]
        chosen += random.Random(0).sample(own, min(MOST_ROWS, len(own)))
    knobs = Knobs(group.knobs)
    before, used = knobs.read(), np.abs(np.exp(errors(rows, group.what)) - 1)
    knobs.write([prior(name) for name in group.knobs])
    limits = {name: LEAST_MOST[key] for name in group.knobs if (key := name.rpartition("/")[2]) in LEAST_MOST}
    found = fit(chosen, group.knobs, group.what, limits, rounds=rounds)
    again = np.abs(np.exp(errors(rows, group.what)) - 1)
    knobs.write(before)
    told = f"median {np.median(used):.1%} in use, {np.median(again):.1%} refitted"
    print(f"{group.name}: {len(rows)} rows, {group.what}: {told}")
    for name, value in zip(group.knobs, before):
        print(f"    {name:46s} prior {prior(name):<10.4g} in use {value:<10.4g} refitted {found[name]:.4g}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="benchmarks.fit_published", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--only", choices=[group.name for group in GROUPS], help="fit one group")
    parser.add_argument("--rounds", type=int, default=5, help="passes over all constants (5)")
    chosen = parser.parse_args(arguments)
    cases = [case for path in chosen.files for case in read_cases(path)[0]]
    for group in GROUPS:
        if chosen.only in (None, group.name):
            refit(group, cases, chosen.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
