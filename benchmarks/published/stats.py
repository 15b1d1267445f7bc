"""Errors, classification and regret of predictions, as the report prints them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.published.naive import Naive
from benchmarks.published.predict import Predicted


def stats_of(found: Sequence[Predicted], skipped: Sequence[str], naive: Naive | None = None) -> dict[str, Any]:
    """Returns the statistics of one file, or of all.

    Args:
        found: rows that were predicted.
        skipped: for each row that wasn't, the reason.
        naive: beside whose figures these stand.
    """
    times = [item.time_error for item in found if item.time_error is not None]
    memories = [item.memory_error for item in found if item.memory_error is not None]
    stats: dict[str, Any] = {
        "rows_used": len(found),
        "rows_skipped": len(skipped),
        "skipped": dict(Counter(skipped).most_common()),
        "time": _errors(times),
        "memory": _errors(memories),
        "fits": fits(found),
        "regret": regret(found, lambda item: item.step_s),
        "not_compared": dict(Counter(why for item in found for why in item.case.left_out).most_common()),
    }
    if naive is not None:
        plain = [naive.seconds(item.case) for item in found]
        timed = [(one, item.case.time_s) for one, item in zip(plain, found) if item.case.time_s]
        stats["naive"] = {
            "time": _errors([one / other - 1 for one, other in timed]),
            "regret": regret(found, lambda item: naive.seconds(item.case)),
        }
        ours, theirs = stats["time"]["median"], stats["naive"]["time"]["median"]
        stats["skill"] = None if ours is None or not theirs else 1 - ours / theirs
    return stats


def _errors(errors: Sequence[float]) -> dict[str, float | None]:
    if not errors:
        return {"signed_median": None, "median": None, "p90": None}
    size = np.abs(errors)
    return {
        "signed_median": float(np.median(errors)),
        "median": float(np.median(size)),
        "p90": float(np.percentile(size, 90)),
    }


def fits(found: Sequence[Predicted]) -> dict[str, float | int | None]:
    """Returns the share of rows told rightly, and of all rows those said to fit that didn't; None where none failed."""
    known = [(item.fits, item.case.fits) for item in found if item.case.fits is not None]
    if not any(not fits for _, fits in known):
        return {"n": len(known), "accuracy": None, "false_fits": None}
    right = sum(told == fits for told, fits in known)
    false = sum(told and not fits for told, fits in known)
    return {"n": len(known), "accuracy": right / len(known), "false_fits": false / len(known)}


def regret(found: Sequence[Predicted], rank: Callable[[Predicted], float]) -> dict[str, float | int | None]:
    """Returns how much slower the first choice was than the best measured, over groups that differ in layout alone."""
    groups: dict[tuple[str, ...], list[Predicted]] = {}
    for item in found:
        if item.case.time_s is not None:
            groups.setdefault((item.case.file, *item.case.group), []).append(item)
    lost, three = [], []
    for items in groups.values():
        if len({layout_of(item) for item in items}) < 2:
            continue
        best = min(item.case.time_s or np.inf for item in items)
        # Ties by what has nothing to do with the time: files may list their rows from the fastest on.
        order = sorted(items, key=lambda item: (rank(item), zlib.crc32(repr(layout_of(item)).encode())))
        lost.append((order[0].case.time_s or 0) / best - 1)
        three.append(min(item.case.time_s or np.inf for item in order[:3]) / best - 1)
    if not lost:
        return {"groups": 0, "median": None, "p90": None, "max": None, "best_of_three": None}
    return {
        "groups": len(lost),
        "median": float(np.median(lost)),
        "p90": float(np.percentile(lost, 90)),
        "max": float(max(lost)),
        "best_of_three": float(np.mean(three)),
    }


def layout_of(item: Predicted) -> tuple[object, ...]:
    """Returns what tells a layout from others of its group."""
    columns = item.case.columns
    names = ("pp", "tp", "cp", "ep", "replicate", "shard", "zero", "microbatches", "recompute", "sequence", "stages")
    return tuple(columns.get(name) for name in names)


def lines(name: str, stats: dict[str, Any]) -> Iterable[str]:
    """Yields the report of a file as text."""
    yield f"{name}: {stats['rows_used']} rows used, {stats['rows_skipped']} skipped"
    for why, count in stats["skipped"].items():
        yield f"    skipped {count:5d}  {why}"
    for why, count in stats["not_compared"].items():
        yield f"    left out {count:4d}  {why}"
    naive = stats.get("naive", {})
    for key in ("time", "memory"):
        if stats[key]["median"] is not None:
            one = stats[key]
            beside = naive.get(key, {}).get("median")
            told = f"   naive median {beside:.1%}, skill {stats['skill']:.0%}" if beside is not None else ""
            sizes = f"median {one['median']:.1%}  p90 {one['p90']:.1%}"
            yield f"    {key:7s} signed {one['signed_median']:+.1%}  {sizes}{told}"
    fits = stats["fits"]
    if fits["accuracy"] is not None:
        right, false = fits["accuracy"], fits["false_fits"]
        yield f"    fits    {fits['n']} rows, {right:.1%} right, {false:.1%} said to fit and didn't"
    lost = stats["regret"]
    if lost["groups"]:
        beside = naive.get("regret", {}).get("median") or 0.0
        yield (
            f"    regret  {lost['groups']} groups, median {lost['median']:.1%}  p90 {lost['p90']:.1%}  "
            f"max {lost['max']:.1%}  best of three {lost['best_of_three']:.1%}   naive median {beside:.1%}"
        )
