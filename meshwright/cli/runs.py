"""``meshwright runs``: lists the runs of a folder, compares some, removes checkpoints or whole runs."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.arguments import align_columns, print_result, take_flag, take_value
from meshwright.errors import ConfigError
from meshwright.jobs.clean_runs import Removal, find_removals, remove_runs
from meshwright.jobs.progress import to_stderr
from meshwright.jobs.runs import RunComparison, RunSummary, compare_runs, list_runs, short_names
from meshwright.units import format_bytes, format_count

USAGE = """usage: meshwright runs [FOLDER] [--json]
       meshwright runs compare RUN RUN ... [--html FILE] [--json]
       meshwright runs clean RUN|FOLDER ... [--whole] [--yes] [--json]

Lists the runs at and below FOLDER (runs/): state, step, losses, layout, devices, tokens/s and when they began.
compare prints the settings that differ and the runs' figures side by side, and writes a page of their curves.
clean removes the checkpoints of runs but the newest that is whole, and what killed saves have left.

  --json         print the result as JSON on standard output
  --html FILE    the page to write (comparison.html)
  --whole        remove the runs themselves; each must be named
  --yes          remove without asking; it asks on a terminal, and elsewhere removes nothing

A run that is queued or under way, a folder that is no run's, and whatever a link leads to stay as they are.

  meshwright runs compare runs/a runs/b
  meshwright runs clean runs/ --yes

Exit status: 0, 1 something couldn't be removed, 2 refused.
"""
_MOST_CELL = 36
"""Characters of a setting's value in the table."""


def run(argv: Sequence[str]) -> int:
    """Lists, compares or cleans."""
    args = list(argv)
    if {"-h", "--help"} & set(args):
        print_result(USAGE.rstrip())
        return 0
    as_json = take_flag(args, "--json")
    if args[:1] == ["compare"]:
        return _compare(args[1:], as_json)
    if args[:1] == ["clean"]:
        return _clean(args[1:], as_json)
    _refuse_flags(args)
    if len(args) > 1:
        raise ConfigError("runs takes one folder; to compare, meshwright runs compare RUN RUN")
    rows = list_runs(Path(args[0] if args else "runs"))
    print_result(json.dumps([row.to_json() for row in rows]) if as_json else _list_text(rows))
    return 0


def _refuse_flags(args: Sequence[str]) -> None:
    for arg in args:
        if arg.startswith("-"):
            raise ConfigError(f"'{arg}' is not known here; meshwright runs --help lists what is")


def _list_text(rows: Sequence[RunSummary]) -> str:
    has_energy = any(row.joules_per_token is not None for row in rows)
    energy_heading = ("J/token, planned",) if has_energy else ()
    table = [("run", "state", "step", "loss", "validation", "tokens/s", *energy_heading, "devices", "layout", "began")]
    for row in rows:
        began = "" if row.started is None else _format_time(row.started)
        speed = "" if row.tokens_per_s is None else format_count(row.tokens_per_s)
        step = str(row.step) if row.steps is None else f"{row.step}/{row.steps}"
        losses = ("" if loss is None else f"{loss:.4f}" for loss in (row.loss, row.validation_loss))
        energy = (_energy_text(row),) if has_energy else ()
        table.append((row.name, row.state, step, *losses, speed, *energy, row.devices, row.layout, began))
    return "\n".join(align_columns(table, range(2, 7 if has_energy else 6))) if rows else "no runs"


def _energy_text(row: RunSummary) -> str:
    figures = (
        "" if joules is None else f"{joules:.3g}" for joules in (row.joules_per_token, row.planned_joules_per_token)
    )
    return ", ".join(filter(None, figures)) if row.joules_per_token is not None else ""


def _format_time(seconds: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, OSError, ValueError):  # beyond the calendar: a damaged file
        return ""


def _compare(args: list[str], as_json: bool) -> int:
    page = Path(take_value(args, "--html") or "comparison.html")
    _refuse_flags(args)
    comparison = compare_runs([Path(arg) for arg in args], page)
    print_result(json.dumps(comparison.to_json()) if as_json else _comparison_text(comparison))
    return 0


def _comparison_text(comparison: RunComparison) -> str:
    names = short_names([Path(row.run) for row in comparison.runs])
    rows = [("", *names), *((key, *map(_shorten, values)) for key, values in comparison.settings.items())]
    rows += [("", *("" for _ in names)), *((name, *values) for name, values in comparison.figures.items())]
    return "\n".join([*align_columns(rows), "", f"page: {comparison.page}"])


def _shorten(text: str) -> str:
    return text if len(text) <= _MOST_CELL else text[: _MOST_CELL - 3] + "..."


def _clean(args: list[str], as_json: bool) -> int:
    whole, yes = take_flag(args, "--whole"), take_flag(args, "--yes")
    _refuse_flags(args)
    if not args:
        raise ConfigError("runs clean needs the directories of runs, or a folder with runs; meshwright runs --help")
    removals = find_removals([Path(arg) for arg in args], whole)
    to_stderr("\n".join(_removal_lines(removals)))
    removed: list[Removal] = []
    if any(removal.paths for removal in removals):
        if not yes and not _agrees():
            raise ConfigError("nothing was removed: answer yes, or write --yes where nobody can be asked")
        removed = remove_runs(removals, whole, to_stderr)
        for removal in removed:
            to_stderr(f"{removal.run}: {removal.refused or f'{len(removal.paths)} folders removed'}")
    if as_json:
        print_result(json.dumps([removal.to_json() for removal in removed]))
    return 1 if any(removal.refused for removal in removed) else 0


def _removal_lines(removals: Sequence[Removal]) -> list[str]:
    rows = [("run", "to remove", "", "why not, or what stays")]
    for removal in removals:
        count = f"{len(removal.paths)} folders" if removal.paths else "nothing"
        size = format_bytes(removal.size_bytes) if removal.paths else ""
        rows.append((removal.run, count, size, removal.refused or (removal.kept and f"{removal.kept} stays")))
    return align_columns(rows, (2,))


def _agrees() -> bool:
    """Asks on a terminal; returns whether a person said yes."""
    if not sys.stdin.isatty():
        return False
    sys.stderr.write("remove them? [no]: ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
