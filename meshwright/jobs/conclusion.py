"""The end of a run: sample, compression baselines, report, and measured figures beside the plan's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from meshwright.data.tokens import TokenSet, compression_baselines
from meshwright.events import Event
from meshwright.jobs.machines import Machines, run_history_file
from meshwright.jobs.sample import draw_sample
from meshwright.jobs.train_result import TrainResult
from meshwright.json_types import JsonObject
from meshwright.monitor.drift import measure, median_waits_s
from meshwright.monitor.energy import token_energy
from meshwright.monitor.health import read_health
from meshwright.monitor.report import write_report
from meshwright.monitor.rundir import read_run
from meshwright.monitor.sinks import JsonlSink
from meshwright.planner.run_history import record
from meshwright.spec.axis import Mechanics
from meshwright.spec.plan import Plan
from meshwright.train.run_config import RunConfig


def follower_result(outcome: JsonObject, run_dir: Path) -> TrainResult:
    """Returns the result of a node that doesn't lead when the run ends."""
    finished, terminated = bool(outcome["finished"]), bool(outcome["terminated"])
    return TrainResult(finished=finished, terminated=terminated, leads=False, run=str(run_dir))


def conclude(
    config: RunConfig,
    run_dir: Path,
    token_set: TokenSet,
    plan: Plan,
    outcome: JsonObject,
    machines: Machines,
) -> TrainResult:
    """Adds sample and baselines to a finished run, and rewrites its report.

    Args:
        config: of the run.
        run_dir: its directory.
        token_set: the prepared text.
        plan: under which it began.
        outcome: what rank 0 returned, with ``terminated``.
        machines: on which it ran.
    """
    result_fields = {item.name for item in dataclasses.fields(TrainResult)}
    result = TrainResult(**{name: outcome[name] for name in outcome if name in result_fields}, run=str(run_dir))
    sink = JsonlSink(run_dir, metrics=False)
    try:
        if result.finished:
            if config.train.sample_tokens:
                prompt, text = draw_sample(config.train, run_dir, token_set)
                result = dataclasses.replace(result, prompt=prompt, sample=text)
                event_fields = {"step": result.step, "prompt": prompt, "text": text}
                sink.event(Event(kind="sampled", rank=-1, data=event_fields))
            if token_set.validation.text_bytes:
                baselines = compression_baselines(token_set)
                result = dataclasses.replace(
                    result, gzip_bits_per_byte=baselines.get("gzip"), xz_bits_per_byte=baselines.get("xz")
                )
            numbers = {key: value for key, value in result.to_json().items() if isinstance(value, (int, float))}
            sink.event(Event(kind="run_finished", rank=-1, data=numbers))
    finally:
        sink.close()
    if config.monitor.report:
        result = dataclasses.replace(result, report=str(write_report(run_dir, config.monitor.drift_bound)))
    energy = token_energy(read_health(run_dir), read_run(run_dir).plan).to_json()
    if config.checkpoint.mirror:
        result = dataclasses.replace(result, not_mirrored=_copy_failure(run_dir))
    result = dataclasses.replace(result, nothing_left=_nothing_left(run_dir, result))
    result = dataclasses.replace(result, state=_state_bytes(run_dir), time=_step_times(run_dir), energy=energy)
    if result.finished and result.time:
        _record_history(plan, run_dir, result.time, machines.for_ranks(plan.ranks))
    return result


def _nothing_left(run_dir: Path, result: TrainResult) -> str | None:
    """Returns why the command had no step to train; None where it did some."""
    told = read_run(run_dir).of_kind("nothing_left")
    return told[-1]["reason"] if result.loss is None and told and told[-1].get("step") == result.step else None


def _copy_failure(run_dir: Path) -> str | None:
    """Returns why the newest checkpoint couldn't be copied to the mirror; None where it was."""
    saved = read_run(run_dir).of_kind("checkpoint_saved")
    return saved[-1].get("copy_failed") if saved else None


def _state_bytes(run_dir: Path) -> dict[str, dict[str, int]]:
    """Returns rank 0's bytes of model state by category, planned and measured, and the ZeRO paper's total."""
    run_data = read_run(run_dir)
    planned = run_data.plan.get("prediction", {})
    # A run may have had other layouts before this one.
    rows = (step.get("memory", {}) for step in reversed(run_data.steps) if step.get("layout") == run_data.layout)
    measured: Mapping[str, int] = next((row for row in rows if "parameters" in row), {})
    bytes_by_category = {
        category: {"planned": int(size), "measured": int(measured[category])}
        for category, size in planned.get("memory", {}).items()
        if category in measured
    }
    if not bytes_by_category:
        return {}
    total = {key: sum(row[key] for row in bytes_by_category.values()) for key in ("planned", "measured")}
    return bytes_by_category | {"total": total | {"zero_paper": int(planned["formula"]["zero_paper_bytes"])}}


def _step_times(run_dir: Path) -> dict[str, float]:
    """Returns the median seconds of a step, planned and measured; empty where one of them isn't known."""
    run_data = read_run(run_dir)
    planned = (run_data.plan.get("prediction") or {}).get("step_s")
    measured = measure([step for step in run_data.steps if step.get("layout") == run_data.layout])["step_s"]
    return {"planned": planned, "measured": measured} if planned and measured else {}


def _record_history(plan: Plan, run_dir: Path, time_s: Mapping[str, float], machines: Machines) -> None:
    """Adds the run to this machine's run history; a cache that can't be written is no reason to fail a run."""
    run_data = read_run(run_dir)
    if run_data.layout != str(plan.layout):
        return  # what was planned on the way is for fewer ranks, or for slow ones
    path, machine = run_history_file(machines)
    # The price before the history's own correction, or corrections would compound from run to run.
    row = {
        "layout": str(plan.layout),
        "flops": plan.prediction.flops,
        "priced_s": time_s["planned"] / plan.prediction.learned,
    }
    # What a pipeline's stages wait for each other isn't told apart from their traffic.
    if plan.layout.degree(Mechanics.STAGES) == 1:
        steps = [step for step in run_data.steps if step.get("layout") == run_data.layout]
        row |= {"waits_s": median_waits_s(steps), "priced_waits_s": plan.prediction.waits_s}
    with contextlib.suppress(OSError):
        record(path, machine, row | {"measured_s": time_s["measured"]})
