"""Runs the planner's best layouts for a few steps each, and says which was fastest."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.arguments import say
from meshwright.errors import LaunchError, MeshwrightError, PlanError, RankError
from meshwright.launch.choice import choose_launcher
from meshwright.spec.plan import Plan
from meshwright.units import format_seconds

if TYPE_CHECKING:
    from meshwright.train.model_analysis import ModelAnalysis
    from meshwright.train.session import TrainJob

STEPS = 10
"""Of a trial; the first ones, in which caches fill, don't count."""


def fastest(job: TrainJob, offers: Sequence[tuple[Plan, ModelAnalysis]]) -> tuple[int, list[dict[str, Any]]]:
    """Runs each offer for `STEPS` steps in ranks of its own.

    Args:
        job: of the run; its plan and facts are replaced.
        offers: plans with what they need of the model, best first.

    Returns:
        Which offer was fastest, and for each ``layout``, ``planned_s`` and ``measured_s`` or ``why`` it didn't run.

    Raises:
        PlanError: when none ran.
    """
    from meshwright.monitor.drift import measure
    from meshwright.monitor.rundir import read_run
    from meshwright.train.session import run_rank

    config, rows = job.config, list[dict[str, Any]]()
    quiet = dataclasses.replace(config.monitor, display="none", tensorboard=False, report=False)
    short = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=STEPS, sample_tokens=0),
        schedule=dataclasses.replace(config.schedule, warmup=1),
        evaluation=dataclasses.replace(config.evaluation, every=0),
        checkpoint=dataclasses.replace(config.checkpoint, every=0),
        monitor=quiet,
    )
    folder = job.run_dir / "trials"
    for number, (plan, facts) in enumerate(offers):
        run_dir = folder / str(number)
        run_dir.mkdir(parents=True, exist_ok=True)
        row: dict[str, Any] = {"layout": str(plan.layout), "planned_s": plan.prediction.step_s}
        try:
            launcher = choose_launcher(config.devices, config=config.launch)
            launcher.run(run_rank, dataclasses.replace(job, config=short, plan=plan, analysis=facts, run_dir=run_dir))
            row["measured_s"] = measure(read_run(run_dir).steps)["step_s"]
        except (LaunchError, RankError, MeshwrightError) as error:
            row["why"] = str(error).splitlines()[0]
        rows.append(row)
        say(f"trial {number + 1} of {len(offers)}: {row['layout']}: {_told(row)}")
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    ran = [at for at, row in enumerate(rows) if row.get("measured_s")]
    if not ran:
        raise PlanError(f"none of the {len(rows)} layouts that were tried ran: {rows[0].get('why')}; name one")
    return min(ran, key=lambda at: rows[at]["measured_s"]), rows


def _told(row: dict[str, Any]) -> str:
    if "why" in row:
        return f"didn't run: {row['why']}"
    told = f"{format_seconds(row['measured_s'])} a step"
    return told + (f", planned {format_seconds(row['planned_s'])}" if row["planned_s"] else "")


def written(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    """Keeps what the trials found in the run's directory."""
    import json

    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "trials.json").write_text(json.dumps(rows, indent=2), encoding="utf-8")
