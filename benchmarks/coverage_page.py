"""Writes docs/coverage.md from what `coverage.py` found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

LAYOUTS = {
    "tp=2": "tp",
    "pp=2,microbatches=2": "pp",
    "pp=2,tp=2,microbatches=2": "pp x tp",
    "shard=2,zero=3": "zero 3",
    "cp=2": "cp",
    "ep=2,shard=2,zero=1": "ep",
}
"""Layout to the name of its column."""
WORDS = {
    **{"passed": "yes", "none": "", "refused": "no", "wrong": "**WRONG**"},
    **{"crashed": "crash", "timeout": "slow", "whole": "unsplit"},
}
FAULTS = ("its code doesn't run on a part", "computed in parts it gives something else")
"""How reasons begin of matrices that divide by their structure, but whose trial failed."""

HEAD = """# Which models train under which layouts

Every causal-LM type of transformers, as a tiny random model (4 layers, width 64, 4 heads), under two or four ranks
against plain PyTorch on one device: losses, gradient norm, every gradient and every weight after a step, in float64 to
a relative error of 1e-9. Written by `python benchmarks/coverage.py`; the numbers are in `coverage.json`.

**yes**: the same training. **no**: refused before a rank starts, with the reason below. **unsplit**: the same training,
but `tp` left whole what it was asked to split (no matrix of the layers is divided, or the trial of a part failed), so
`verify` refuses it unless `--allow-whole` is given, and it is not a pass. **split** is the share of the layers'
parameters that `tp=2` divides; the rest is held whole by both ranks, and is right. An empty cell under `ep`: the model
has no experts that could travel. **?**: not run yet.

Cells without a number of rows in `coverage.json` (`"lengths"`) are of rows of 16 tokens and one step; newer ones are of
rows of 48 and 16 tokens. Both are counted by the rule above.

"""


def write_page(known: dict[str, Any], out: Path) -> str:
    """Writes the page and returns its table of counts."""
    built = {name: found for name, found in sorted(known.items()) if "unbuilt" not in found}
    for found in built.values():
        recount(found)
    counts = _counts(built)
    notes: dict[str, int] = {}
    table = ["| type | split | " + " | ".join(LAYOUTS.values()) + " |", "|---" * (len(LAYOUTS) + 2) + "|"]
    for name, found in built.items():
        share = f"{found['share']:.0%}" if "share" in found else ""
        cells = [_cell(found["cells"].get(layout), notes) for layout in LAYOUTS]
        table.append(f"| {name} | {share} | " + " | ".join(cells) + " |")
    lines = [HEAD + counts, "", *table, "", "## Reasons", ""]
    lines += [f"{number}. {why}" for why, number in notes.items()]
    unbuilt = {name: found["unbuilt"] for name, found in sorted(known.items()) if "unbuilt" in found}
    if unbuilt:
        lines += ["", "## Types that can't be built from sizes alone", ""]
        lines += [f"- `{name}`: {why}" for name, why in unbuilt.items()]
    lines += ["", "## What stays whole under tp", ""]
    lines += _whole(built)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines) + "\n")
    return counts


def recount(found: dict[str, Any]) -> None:
    """Takes a pass under ``tp`` from a type of which nothing was split, or a trial of a part failed; in place."""
    faults = [f"{name}: {why}" for name, why in found.get("whole", {}).items() if why.startswith(FAULTS)]
    if found.get("share", 1.0) > 0 and not faults:
        return
    why = faults[0] if faults else "no matrix of its layers is split"
    for layout, cell in found["cells"].items():
        if "tp=" in layout and cell["outcome"] == "passed":
            cell |= {"outcome": "whole", "why": why}


def _counts(built: dict[str, Any]) -> str:
    """A table of outcomes per column."""
    outcomes = {
        layout: Counter(found["cells"].get(layout, {}).get("outcome") for found in built.values()) for layout in LAYOUTS
    }
    kinds = ("passed", "whole", "refused", "wrong", "crashed", "timeout")
    named = [WORDS["whole"] if kind == "whole" else kind for kind in kinds]
    lines = [f"{len(built)} types.", "", "| layout | " + " | ".join(named) + " |", "|---" * (len(kinds) + 1) + "|"]
    for layout, found in outcomes.items():
        lines.append(f"| `{layout}` | " + " | ".join(str(found[kind]) for kind in kinds) + " |")
    shares = [found["share"] for found in built.values() if "share" in found]
    if shares:
        most = sum(share >= 0.9 for share in shares)
        lines += ["", f"Under `tp=2`, {most} of {len(shares)} types split at least 90% of their layers' parameters; "]
        lines[-1] += f"the mean over types is {sum(shares) / len(shares):.0%}."
    return "\n".join(lines)


def _cell(cell: dict[str, Any] | None, notes: dict[str, int]) -> str:
    if cell is None:
        return "?"
    word = WORDS[cell["outcome"]]
    why = cell.get("why")
    return f"{word} [{notes.setdefault(why.replace('|', '/'), len(notes) + 1)}]" if why else word


def _whole(built: dict[str, Any]) -> list[str]:
    """Matrices that stay whole, by reason: which, and in which types."""
    found: dict[str, dict[str, set[str]]] = {}
    for name, facts in built.items():
        for part, why in facts.get("whole", {}).items():
            found.setdefault(why, {}).setdefault(name, set()).add(part.rpartition(".")[2] or "everything")
    lines = []
    for why, types in sorted(found.items(), key=lambda item: -len(item[1])):
        parts = ", ".join(f"{name} ({', '.join(sorted(names))})" for name, names in sorted(types.items()))
        lines.append(f"- {why}: {parts}")
    return lines
