"""Trials run the planner's best layouts for a few steps each, and find which was fastest."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import LaunchError, MeshwrightError, PlanError, RankError
from meshwright.jobs.progress import Say, to_stderr
from meshwright.launch.choice import choose_launcher
from meshwright.monitor.drift import measure
from meshwright.monitor.rundir import read_run
from meshwright.spec.plan import Plan
from meshwright.train.model_analysis import ModelAnalysis
from meshwright.train.run_config import RunConfig
from meshwright.train.session import TrainJob, run_rank
from meshwright.units import format_seconds

STEPS = 10
"""Steps of a trial; the first ones, in which caches fill, don't count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A layout that was tried: its planned and its measured time, or why it didn't run."""

    layout: str
    """Text form."""
    planned_s: float | None
    """Seconds of a step by the plan; None where the plan has no time."""
    measured_s: float | None = None
    """Median seconds of a step; None where it didn't run."""
    why: str = ""
    """First line of the error that ended it."""

    def __str__(self) -> str:
        """Says how the trial went."""
        if self.why:
            return f"didn't run: {self.why}"
        planned = f", planned {format_seconds(self.planned_s)}" if self.planned_s else ""
        return f"{format_seconds(self.measured_s or 0.0)} a step{planned}"

    def to_json(self) -> dict[str, object]:
        """Returns ``layout``, ``planned_s`` and ``measured_s``, or ``why`` in place of the last."""
        outcome_fields: dict[str, object] = {"why": self.why} if self.why else {"measured_s": self.measured_s}
        return {"layout": self.layout, "planned_s": self.planned_s} | outcome_fields


def run_trials(job: TrainJob, offers: Sequence[tuple[Plan, ModelAnalysis]], say: Say = to_stderr) -> list[Trial]:
    """Runs each offer for `STEPS` steps in ranks of its own, in the order given.

    Args:
        job: of the run; its plan and analysis are replaced.
        offers: plans with what they need of the model, best first.
        say: takes a line for each trial.
    """
    config = _short_config(job)
    trials: list[Trial] = []
    for number, (plan, analysis) in enumerate(offers):
        run_dir = job.run_dir / "trials" / str(number)
        run_dir.mkdir(parents=True, exist_ok=True)
        trial = Trial(layout=str(plan.layout), planned_s=plan.prediction.step_s)
        try:
            # Ranks of its own: a layout that runs out of memory ends them, and not the next trial.
            launcher = choose_launcher(config.devices, config=config.launch)
            launcher.run(
                run_rank, dataclasses.replace(job, config=config, plan=plan, analysis=analysis, run_dir=run_dir)
            )
            trial = dataclasses.replace(trial, measured_s=measure(read_run(run_dir).steps)["step_s"])
        except (LaunchError, RankError, MeshwrightError) as error:
            trial = dataclasses.replace(trial, why=str(error).splitlines()[0])
        trials.append(trial)
        say(f"trial {number + 1} of {len(offers)}: {trial.layout}: {trial}")
        # Only the metrics are of use afterwards.
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    return trials


def fastest(trials: Sequence[Trial]) -> int:
    """Returns the index of the fastest trial.

    Raises:
        PlanError: when none ran.
    """
    times = {index: trial.measured_s for index, trial in enumerate(trials) if trial.measured_s}
    if not times:
        raise PlanError(f"none of the {len(trials)} layouts that were tried ran: {trials[0].why}; name one")
    return min(times, key=lambda index: times[index])


def _short_config(job: TrainJob) -> RunConfig:
    """Returns the run's config for `STEPS` steps that show, evaluate, measure and save nothing."""
    config = job.config
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=STEPS, sample_tokens=0, noise_scale=0),
        # First steps that islands take as one would be all of a trial.
        outer=dataclasses.replace(config.outer, warmup=0),
        schedule=dataclasses.replace(config.schedule, warmup=1),
        evaluation=dataclasses.replace(config.evaluation, every=0),
        checkpoint=dataclasses.replace(config.checkpoint, every=0),
        monitor=config.monitor.without_output(),
    )


def write_trials(run_dir: Path, trials: Sequence[Trial]) -> None:
    """Writes the trials' times into the run's directory."""
    run_dir.mkdir(parents=True, exist_ok=True)
    rows = [trial.to_json() for trial in trials]
    (run_dir / "trials.json").write_text(json.dumps(rows, indent=2), encoding="utf-8")
