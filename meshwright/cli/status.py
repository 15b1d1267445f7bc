"""``meshwright status``: where a run stands, by its directory and by the scheduler that started it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.arguments import print_result, take_flag
from meshwright.errors import ConfigError
from meshwright.jobs.run_control import RunStatus, run_status


def run(argv: Sequence[str]) -> int:
    """Prints a run's state; exit status 0 whatever it is."""
    args = list(argv)
    as_json = take_flag(args, "--json")
    if len(args) != 1:
        raise ConfigError("status takes the directory of one run; meshwright status --help")
    status = run_status(Path(args[0]))
    print_result(json.dumps(status.to_json()) if as_json else "\n".join(_lines(status)))
    return 0


def _lines(status: RunStatus) -> list[str]:
    step = f"{status.step} of {status.steps}" if status.steps is not None else str(status.step)
    if status.loss is not None:
        step += f", loss {status.loss:.4f}"
    if status.tokens_per_s is not None:
        step += f", {status.tokens_per_s:,.0f} tokens/s"
    rows = [("run", status.run), ("state", status.state), ("step", step), ("layout", status.layout)]
    if status.job is not None:
        job = status.job
        facts = [f"on {job.nodes}" if job.nodes else "", f"{job.time_left} left" if job.time_left else "", job.reason]
        rows.append(("job", f"{job.launcher} {job.job}: {', '.join([job.state, *filter(None, facts)])}"))
    rows += [("trains", owner) for owner in status.owners]
    if status.recoveries or status.last_loss:
        rows.append(("recovered", f"{status.recoveries} times; last: {status.last_loss}"))
    return [f"{name:<11}{text}" for name, text in rows if text]
