"""Where a run's time went that was broken again and again: what each failure cost, by cause, from what the run wrote.

Useful time is steps x the median time of a step under the whole layout, away from first steps after a start; a step on
fewer ranks that took less, as where ranks outnumber cores, counts as what it took. All other time was lost, to one of
`CAUSES`. Lines of ``metrics.jsonl`` of steps that were done again are gone by then, so steps
that were lost are counted by the stamps of the ranks that failed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CAUSES = {
    "detect": "from the fault to its being seen",
    "start": "ending the ranks, planning, starting others, building, restoring",
    "first step": "first steps after a start, beyond the median",
    "redo": "steps done again, and the part of a step that the fault cut off",
    "grow": "ending and starting ranks to take devices back",
    "fewer ranks": "steps on fewer ranks, beyond the median",
    "copies": "snapshots and checkpoints: what they held up",
    "slower steps": "all other steps, beyond the median",
    "between": "what is left: between steps, and what was misjudged above",
}
Row = Mapping[str, Any]


AFTERWARDS = ("record", "evaluate", "checkpoint", "snapshot", "sample", "export", "done")
"""Phases that follow a step, and are stamped with it."""


@dataclass(kw_only=True)
class Break:
    """A time without steps: from a fault, or from the end of ranks that made room for more, to the next step's end."""

    kind: str
    """Of the fault; ``grow``, or ``other`` for a failure that nobody asked for."""
    at: float
    """time.time() of the fault."""
    seen: float
    done: int = 0
    """Steps that were done."""
    cut: float = 0.0
    """Share of a step that was under way."""
    ended: float = 0.0
    """End of the first step after it; 0 while there is none."""
    first: int = 0
    """That step."""
    base: int = 0
    """Steps done of the state that was taken up."""


@dataclass(kw_only=True)
class Account:
    """What a run lost."""

    wall_s: float
    steps: int
    step_s: float
    """Median."""
    useful_s: float = 0.0
    lost_s: dict[str, float] = field(default_factory=dict)
    by_kind: dict[str, list[float]] = field(default_factory=dict)
    """Seconds that each fault cost from its moment to the end of the next first step, and in steps done again."""

    @property
    def goodput(self) -> float:
        """Share of the time that was useful."""
        return self.useful_s / self.wall_s


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the whole lines of a file; none when it isn't there."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def account(run: Path, began: float, ended: float, first: int, last: int) -> Account:
    """Reads a run's files.

    Args:
        run: its directory.
        began: time.time() at which ``first`` steps were done.
        ended: time.time() at which ``last`` steps were.
        first: as said.
        last: as said.
    """
    rows = read_lines(run / "metrics.jsonl")
    full = rows[0]["layout"]
    kept = {row["step"]: row for row in rows if first < row["step"] <= last}
    events = [event for event in read_lines(run / "events.jsonl") if began <= event["time"] <= ended]
    happened = [path for path in (run / "chaos").glob("*-*") if path.suffix != ".ask"]
    marks = [(path.stat().st_mtime, path.name.partition("-")[0]) for path in happened]
    breaks = find_breaks(events, sorted(marks))
    # The line of a step is that of the last ranks that did it.
    firsts = {one.first for at, one in enumerate(breaks) if all(later.base >= one.first for later in breaks[at + 1 :])}
    plain = [row["step_s"] for step, row in kept.items() if row["layout"] == full and step not in firsts]
    found = Account(wall_s=ended - began, steps=last - first, step_s=statistics.median(plain))
    lost = found.lost_s = dict.fromkeys(CAUSES, 0.0)
    for one in breaks:
        took = kept[one.first]["step_s"] if one.first in firsts and one.first in kept else found.step_s
        again = (max(0, one.done - one.base) + one.cut) * found.step_s if one.ended else 0.0
        started = (one.ended - took if one.ended else ended) - one.seen
        lost["detect"] += one.seen - one.at
        lost["grow" if one.kind == "grow" else "start"] += started
        lost["first step"] += took - found.step_s if one.ended else 0.0
        lost["redo"] += again
        found.by_kind.setdefault(one.kind, []).append(one.seen - one.at + started + again)
    for step, row in kept.items():
        lost["copies"] += row["parts"].get("snapshot", 0.0)
        over = row["step_s"] - found.step_s if step not in firsts else 0.0
        fewer = row["layout"] != full
        lost["fewer ranks" if fewer else "slower steps"] += max(over, 0.0) if fewer else over
        found.useful_s += found.step_s + (min(over, 0.0) if fewer else 0.0)
    lost["between"] = found.wall_s - found.useful_s - sum(lost.values())
    return found


def find_breaks(events: Sequence[Row], marks: Sequence[tuple[float, str]]) -> list[Break]:
    """Returns the breaks that events tell of, the last perhaps without an end.

    Args:
        events: lines of ``events.jsonl``, in order.
        marks: time and kind of each fault that happened, in order.
    """
    found: list[Break] = []
    left = list(marks)
    for event in events:
        going = not found or found[-1].ended > 0.0
        if event["kind"] == "rank_lost" and going:
            mine = [mark for mark in left if mark[0] <= event["time"]]
            at, kind = mine[-1] if mine else (event["time"], "other")
            left = left[len(mine) :]
            after = event["phase"] in AFTERWARDS
            done, cut = event["step"] - (not after), 0.0 if after else 0.5
            found.append(Break(kind=kind, at=at, seen=event["time"], done=done, cut=cut))
        elif event["kind"] == "fenced" and found and not found[-1].first:
            found[-1].seen = max(found[-1].at, min(found[-1].seen, event["time"] - event["seconds"]))
        elif event["kind"] == "growing" and going:
            found.append(Break(kind="grow", at=event["time"], seen=event["time"], done=event["step"]))
        elif event["kind"] in ("restored", "resumed") and not going:
            found[-1].base = event["step"]
        elif event["kind"] == "recovered" and not going:
            found[-1].ended, found[-1].first = event["time"], event["step"]
    return found


def tell(found: Account) -> None:
    """Prints goodput, what was lost by cause, and what each kind of fault cost."""
    text = f"goodput {found.goodput:.1%}: {found.steps} steps of {found.step_s:.4f} s (median) in {found.wall_s:.0f} s"
    print(text)
    for cause, meaning in CAUSES.items():
        seconds = found.lost_s[cause]
        print(f"  {seconds:8.2f} s  {seconds / found.wall_s:6.2%}  {cause:<13} {meaning}")
    for kind, costs in sorted(found.by_kind.items()):
        print(f"  {kind:<6} {len(costs):3d} times, {statistics.mean(costs):.2f} s each, {max(costs):.2f} s at most")
