"""The job ``run --sweep``: a recipe once for each combination of some settings' values, and one table of them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from meshwright.errors import ConfigError
from meshwright.jobs.progress import Say, to_stderr
from meshwright.monitor.rundir import read_run

TABLE = "sweep.json"
"""In a sweep's directory: its rows."""
_UNSAFE = str.maketrans("/\\ :", "----")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    """A run of a sweep."""

    settings: Mapping[str, str]
    """Value of each swept key."""
    run: str
    """The run's directory."""
    state: str
    """``finished``, ``interrupted`` or ``failed``."""
    step: int
    """Optimizer steps done."""
    loss: float | None
    """Training loss of the last step, nats a token; None without a step."""
    validation_loss: float | None
    """Over all held-out text; None without one."""
    step_s: float | None
    """Median seconds of a step; None without a step."""
    message: str = ""
    """Why it failed."""

    def to_json(self) -> dict[str, object]:
        """Returns plain values under the names of the fields."""
        return {name: getattr(self, name) for name in self.__slots__} | {"settings": dict(self.settings)}


def parse_sweep(words: Sequence[str]) -> list[dict[str, str]]:
    """Returns the combinations of ``KEY=VALUE,VALUE`` texts, the first key slowest.

    Raises:
        ConfigError: for a text of another form, or a key or value that is there twice.
    """
    values_by_key: dict[str, list[str]] = {}
    for word in words:
        key, equals, values = word.partition("=")
        key = key.removeprefix("--")
        choices = values.split(",")
        if not key or not equals or "" in choices or len(set(choices)) < len(choices) or key in values_by_key:
            raise ConfigError(
                f"--sweep {word}: write KEY=VALUE,VALUE with different values, each key once, as in "
                "--sweep optimizer.lr=1e-3,3e-4"
            )
        values_by_key[key] = choices
    return [dict(zip(values_by_key, choice)) for choice in itertools.product(*values_by_key.values())]


def sweep_flags(settings: Mapping[str, str]) -> list[str]:
    """Returns the flags of a combination."""
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


def run_sweep(
    words: Sequence[str], combinations: Sequence[Mapping[str, str]], folder: Path, say: Say = to_stderr
) -> list[SweepRow]:
    """Runs ``meshwright run`` once for each combination, one after the other, each in a directory of its own.

    A run that failed doesn't end the others. Finished ones are left out, so the same call goes on where it stopped.

    Args:
        words: recipe and flags of every run.
        combinations: value of each swept key.
        folder: of the sweep.
        say: takes a line of progress.

    Returns:
        A row for each, the lowest validation loss first; also written to ``sweep.json``.
    """
    rows: list[SweepRow] = []
    for number, settings in enumerate(combinations, 1):
        label = ",".join(f"{key}={value}" for key, value in settings.items())
        run_dir = folder / label.translate(_UNSAFE)
        say(f"sweep: run {number} of {len(combinations)}: {label}")
        status, message = _run(words, settings, run_dir)
        rows.append(_read_row(settings, run_dir, status, message))
        folder.mkdir(parents=True, exist_ok=True)
        ordered = sort_rows(rows)
        (folder / TABLE).write_text(json.dumps([row.to_json() for row in ordered], indent=2), encoding="utf-8")
        # One that was asked to end ends the sweep.
        if rows[-1].state == "interrupted":
            break
    return sort_rows(rows)


def sort_rows(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Returns the rows with the lowest validation loss first, those without one last."""
    return sorted(rows, key=lambda row: (row.validation_loss is None, row.validation_loss or 0.0))


def _run(words: Sequence[str], settings: Mapping[str, str], run_dir: Path) -> tuple[int, str]:
    """Runs a combination in a process of its own; returns its exit status and the last line of its error."""
    command = [sys.executable, "-m", "meshwright", "run", *words, *sweep_flags(settings), "--run", str(run_dir)]
    error = ""
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        while True:
            try:
                for line in process.stderr:
                    sys.stderr.write(line)
                    error = line.strip() if line.startswith("error: ") else error
                return process.wait(), error.removeprefix("error: ")
            except KeyboardInterrupt:
                # The run, of the same terminal, was interrupted too: it writes its state and ends by itself.
                continue


def _read_row(settings: Mapping[str, str], run_dir: Path, status: int, message: str) -> SweepRow:
    run_data = read_run(run_dir)
    final, steps = run_data.final(), run_data.steps
    state = "finished" if status == 0 else ("failed" if message else "interrupted")
    return SweepRow(
        settings=settings,
        run=str(run_dir),
        state=state,
        step=int(steps[-1]["step"]) if steps else 0,
        loss=steps[-1]["loss"] if steps else None,
        validation_loss=final.get("validation_loss"),
        step_s=median(step["step_s"] for step in steps) if steps else None,
        message=message,
    )
