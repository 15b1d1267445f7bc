"""Predicts every row of files of published runs and prints how far off: ``python -m benchmarks.published FILE...``."""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.published.folds import FOLDS, run
from benchmarks.published.models import Unpriced
from benchmarks.published.naive import Naive
from benchmarks.published.predict import Predicted, predict, refused, whole_number
from benchmarks.published.rows import UNREADABLE, Case, read_case, read_file
from benchmarks.published.stats import lines, stats_of
from meshwright.planner.uncertainty import Evidence, fitted_spreads

SEEN = Evidence(framework=True, device=True)
"""What the constants in use were fitted to."""
Read = tuple[list[Case], list[str], list[dict[str, str]]]


def read_cases(path: Path, nominal: bool = False) -> Read:
    """Returns a file's cases, the reasons of what is skipped, and its rows, each with a case's index or a reason.

    Args:
        path: the CSV.
        nominal: links have the catalogue's rates, whatever a row measured of them.
    """
    cases: list[Case] = []
    skipped: list[str] = []
    rows = read_file(path)
    for row in rows:
        try:
            cases.append(read_case(row, path.stem, nominal))
            row["_case"] = str(len(cases) - 1)
        except Unpriced as why:
            skipped.append(str(why))
            row["_skipped"] = str(why)
    return cases, skipped, rows


def _priceable(cases: list[Case], skipped: list[str], rows: list[dict[str, str]]) -> Read:
    """Moves what can't be priced to the skipped: all rows together first, one by one only where that fails."""
    try:
        if all(whole_number(item) for item in predict(cases)):
            return cases, skipped, rows
    except UNREADABLE:
        pass
    reasons = [refused(case) for case in cases]
    number = -1
    for row in rows:
        if "_case" in row:
            why = reasons[int(row.pop("_case"))]
            if why:
                row["_skipped"] = why
                continue
            number += 1
            row["_case"] = str(number)
    kept = [case for case, why in zip(cases, reasons) if not why]
    return kept, [*skipped, *(why for why in reasons if why)], rows


def report(
    paths: Sequence[Path], nominal: bool = False
) -> tuple[dict[str, Any], dict[str, tuple[list[Predicted], list[dict[str, str]]]]]:
    """Returns the statistics of files, and their predictions with their rows."""
    stems = [path.stem for path in paths]
    names = [path.stem if stems.count(path.stem) == 1 else str(path) for path in paths]
    read = {name: _priceable(*read_cases(path, nominal)) for name, path in zip(names, paths)}
    everything = [case for cases, _, _ in read.values() for case in cases]
    naive = Naive(everything)
    found = {name: predict(cases) for name, (cases, _, _) in read.items()}
    files = {name: stats_of(found[name], read[name][1], Naive(cases)) for name, (cases, _, _) in read.items()}
    reasons = [why for _, skipped, _ in read.values() for why in skipped]
    stats = {"files": files, "all": stats_of([item for items in found.values() for item in items], reasons, naive)}
    return stats, {name: (found[name], read[name][2]) for name in read}


def write_rows(path: Path, found: dict[str, tuple[list[Predicted], list[dict[str, str]]]]) -> None:
    """Writes every row with what was predicted for it."""
    written: list[dict[str, Any]] = []
    for name, (items, rows) in found.items():
        for row in rows:
            plain = {key: value for key, value in row.items() if not key.startswith("_")}
            extra: dict[str, Any] = {"file": name, "skipped": row.get("_skipped", "")}
            if "_case" in row:
                extra |= _columns(items[int(row["_case"])])
            written.append(extra | plain)
    names = list(dict.fromkeys(key for row in written for key in row))
    with path.open("w", encoding="utf-8", newline="") as text:
        out = csv.DictWriter(text, names, restval="", lineterminator="\n")
        out.writeheader()
        out.writerows(written)


def _columns(item: Predicted) -> dict[str, Any]:
    told = {
        "predicted_step_s": f"{item.step_s:.5g}",
        "predicted_memory_gib": f"{item.memory_bytes / 2**30:.4g}",
        "predicted_peak_gib": f"{item.peak_bytes / 2**30:.4g}",
        "predicted_fits": int(item.fits),
        "chance_fits": f"{_chance_fits(item):.4f}",
        "time_factor_80": f"{fitted_spreads().time.factor(SEEN):.4f}",
        "time_error": "" if item.time_error is None else f"{item.time_error:.4f}",
        "memory_error": "" if item.memory_error is None else f"{item.memory_error:.4f}",
        "engine": item.case.engine.name,
        "left_out": "; ".join(item.case.left_out),
    }
    return told | {f"part_{name}": f"{value:.5g}" for name, value in item.parts.items()}


def _chance_fits(item: Predicted) -> float:
    room_bytes = item.room_bytes or item.case.machine.device.memory_bytes
    return fitted_spreads().memory.chance(math.log(room_bytes / item.peak_bytes), SEEN, counted=False)


def _fold_line(one: Mapping[str, Any]) -> str:
    told = f"{one['fold']}: {one['what']} on {one['rows']} rows not fitted: signed {one['signed_median']:+.1%}  "
    told += f"median {one['median']:.1%}  p90 {one['p90']:.1%}"
    if one["naive_median"] is not None:
        told += f"  naive median {one['naive_median']:.1%}"
    lost, fits = one["regret"], one["fits"]
    if lost and lost["groups"]:
        told += f"  regret of {lost['groups']} groups: median {lost['median']:.1%}  p90 {lost['p90']:.1%}"
    if fits and fits["accuracy"] is not None:
        told += f"  fits: {fits['n']} rows, {fits['accuracy']:.1%} right, {fits['false_fits']:.1%} false"
    return f"{told}  (fitted to {one['fitted_rows']} rows; from the priors alone {one['unfitted_median']:.1%})"


def _cross_validate(paths: Sequence[Path], plain: bool, word: str) -> int:
    cases = [case for path in paths for case in read_cases(path)[0]]
    found = []
    for one in run(cases, [fold for fold in FOLDS if word in fold.name]):
        found.append(one)
        if not plain:
            print(_fold_line(one), flush=True)
    if plain:
        print(json.dumps(found, indent=2))
    return 0 if found else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; a file of which no row can be used is reported like any other."""
    parser = argparse.ArgumentParser(prog="benchmarks.published", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    parser.add_argument(
        "--cross-validate",
        nargs="?",
        const="",
        metavar="WORD",
        help="fit constants to some models or files and judge on others (minutes); only divisions named with WORD",
    )
    parser.add_argument(
        "--nominal", action="store_true", help="ignore the rates that rows measured of their machine's links"
    )
    parser.add_argument("--rows", type=Path, metavar="OUT.csv", help="write every row with its prediction")
    chosen = parser.parse_args(arguments)
    if chosen.cross_validate is not None:
        return _cross_validate(chosen.files, chosen.json, chosen.cross_validate)
    try:
        stats, found = report(chosen.files, chosen.nominal)
    except (OSError, csv.Error) as fault:
        parser.error(str(fault))
    if chosen.rows:
        write_rows(chosen.rows, found)
    if chosen.json:
        print(json.dumps(stats, indent=2))
    else:
        for name, one in [*stats["files"].items(), ("all", stats["all"])]:
            print("\n".join(lines(name, one)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
