"""The end of a run: sample, baselines, report, and what the run was beside its plan."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.data.tokens import TokenSet, compression_baselines
from meshwright.events import Event
from meshwright.jobs.machines import Machines, ledger_here
from meshwright.jobs.train_result import TrainResult
from meshwright.jobs.trained_model import open_run
from meshwright.monitor.drift import measure
from meshwright.monitor.report import write_report
from meshwright.monitor.rundir import read_run
from meshwright.monitor.sinks import JsonlSink
from meshwright.planner.run_history import record
from meshwright.spec.plan import Plan
from meshwright.train.run_config import RunConfig


def ended_elsewhere(outcome: Mapping[str, Any], run_dir: Path) -> TrainResult:
    """Returns the result of a node that doesn't lead when the run ends."""
    finished, terminated = bool(outcome["finished"]), bool(outcome["terminated"])
    return TrainResult(finished=finished, terminated=terminated, leads=False, run=str(run_dir))


def conclude(
    config: RunConfig,
    run_dir: Path,
    token_set: TokenSet,
    plan: Plan,
    outcome: Mapping[str, Any],
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
    known = {item.name for item in dataclasses.fields(TrainResult)}
    result = TrainResult(**{name: outcome[name] for name in outcome if name in known}, run=str(run_dir))
    sink = JsonlSink(run_dir, metrics=False)
    try:
        if result.finished:
            if config.train.sample_tokens:
                prompt, text = _sample(config, run_dir, token_set)
                result = dataclasses.replace(result, prompt=prompt, sample=text)
                data = {"step": result.step, "prompt": prompt, "text": text}
                sink.event(Event(kind="sampled", rank=-1, data=data))
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
    result = dataclasses.replace(result, state=_state(run_dir), time=_time(run_dir))
    if result.finished and result.time:
        _remember(plan, result.time, machines.fewer(plan.ranks))
    return result


def _state(run_dir: Path) -> dict[str, dict[str, int]]:
    """Returns bytes of model state of rank 0 by part, planned and measured, and the ZeRO paper's total."""
    read = read_run(run_dir)
    planned = read.plan.get("prediction", {})
    # A run may have had other layouts before this one.
    rows = (step.get("memory", {}) for step in reversed(read.steps) if step.get("layout") == read.layout)
    measured: Mapping[str, int] = next((row for row in rows if "parameters" in row), {})
    parts = {
        part: {"planned": int(size), "measured": int(measured[part])}
        for part, size in planned.get("memory", {}).items()
        if part in measured
    }
    if not parts:
        return {}
    total = {key: sum(row[key] for row in parts.values()) for key in ("planned", "measured")}
    return parts | {"total": total | {"zero_paper": int(planned["formula"]["zero_paper_bytes"])}}


def _time(run_dir: Path) -> dict[str, float]:
    """Returns the median seconds of a step, planned and measured; empty where one of them isn't known."""
    read = read_run(run_dir)
    planned = (read.plan.get("prediction") or {}).get("step_s")
    measured = measure([step for step in read.steps if step.get("layout") == read.layout])["step_s"]
    return {"planned": planned, "measured": measured} if planned and measured else {}


def _remember(plan: Plan, time_s: Mapping[str, float], machines: Machines) -> None:
    """Adds the run to what this machine has taught; a cache that can't be written is no reason to fail a run."""
    path, machine = ledger_here(machines)
    row = {"layout": str(plan.layout), "priced_s": time_s["planned"] / plan.prediction.learned}
    with contextlib.suppress(OSError):
        record(path, machine, row | {"measured_s": time_s["measured"]})


def _sample(config: RunConfig, run_dir: Path, token_set: TokenSet) -> tuple[str, str]:
    trained = open_run(run_dir, trust=True)  # its config is what this command was given
    prompt = config.train.sample or token_set.held_out_text(256).decode("utf-8", errors="ignore")[:64]
    return prompt, trained.complete(prompt, max_tokens=config.train.sample_tokens)
