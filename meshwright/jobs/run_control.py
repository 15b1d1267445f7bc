"""A run seen and ended from outside: its state, what it printed, its end, whichever launcher started it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from meshwright.errors import ConfigError, LaunchError
from meshwright.events import Event
from meshwright.jobs.kubernetes_control import (
    ENDING,
    UNKNOWN,
    describe_job,
    job_of,
    job_output,
    record_of_job,
    status_in_pod,
)
from meshwright.jobs.launch_output import LaunchOutput
from meshwright.jobs.launch_record import LaunchRecord, SchedulerState, read_record
from meshwright.jobs.ray import ask_to_end, ray_state
from meshwright.jobs.run_directory import CONFIG
from meshwright.jobs.slurm import slurm_state
from meshwright.json_types import JsonObject
from meshwright.launch.kubernetes import delete_job
from meshwright.launch.slurm import call_slurm, cancel_replacements, job_nodes
from meshwright.monitor.display import event_line
from meshwright.monitor.rundir import RunFiles, meter_runs, read_run
from meshwright.monitor.sinks import EVENTS, METRICS, read_lines
from meshwright.resilience.run_lock import Owner, living_owners

_POLL_S = 0.5
_CLUSTER_POLL_S = 2.0
_SSH_S = 30.0
_QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED")
_LOSSES = ("rank_lost", "node_lost", "leader_lost")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """Where a run stands."""

    run: str
    """The run's directory."""
    state: str
    """``queued``, ``starting``, ``running``, ``finished``, ``interrupted``, ``failed``, or ``ended`` without a word."""
    step: int
    """Steps done."""
    steps: int | None
    """Steps of the run; None before its settings are written."""
    loss: float | None
    """Loss of the last step."""
    tokens_per_s: float | None
    """Target tokens a second in the last step."""
    layout: str
    """Layout of the ranks."""
    owners: tuple[str, ...]
    """Who trains: host and process, with the node's number where there are several."""
    recoveries: int
    """How often the run went on after a failure."""
    last_loss: str
    """The last failure, as a line; empty without any."""
    job: SchedulerState | None
    """The scheduler's job; None where no scheduler started the run."""

    def to_json(self) -> JsonObject:
        """Returns the fields as plain values."""
        return asdict(self)


def run_status(run_dir: Path) -> RunStatus:
    """Reads where a run stands.

    Raises:
        ConfigError: when the directory holds no run, and none was submitted for it.
    """
    record = _record_of(run_dir)
    if record is not None and not (run_dir / CONFIG).is_file() and (remote := _status_in_pod(record, run_dir)):
        return replace(remote, job=_ask_scheduler(run_dir, record))
    files = read_run(run_dir)
    state, owners, job = _find_state(files, record)
    last = files.steps[-1] if files.steps else {}
    losses = files.of_kind(*_LOSSES)
    return RunStatus(
        run=str(run_dir),
        state=state,
        step=int(last.get("step", 0)),
        steps=files.last_step,
        loss=last.get("loss"),
        tokens_per_s=last.get("tokens_per_s"),
        layout=files.layout,
        owners=tuple(_describe_owner(owner) for owner in owners),
        recoveries=len(files.of_kind("recovered")),
        last_loss=(_event_text(losses[-1]) or "") if losses else "",
        job=job,
    )


def find_state(files: RunFiles) -> tuple[str, list[Owner], SchedulerState | None]:
    """Returns a run's state as in `RunStatus`, who trains there, and its scheduler's job.

    Raises:
        ConfigError: when the directory holds no run, and none was submitted for it.
    """
    return _find_state(files, _record_of(files.path))


def _find_state(files: RunFiles, record: LaunchRecord | None) -> tuple[str, list[Owner], SchedulerState | None]:
    job = _ask_scheduler(files.path, record) if record is not None else None
    owners = living_owners(files.path)
    return _state(files, bool(owners) or meter_runs(files.path), job), owners, job


def _record_of(run_dir: Path) -> LaunchRecord | None:
    record = read_record(run_dir)
    if record is None and not run_dir.exists():
        # The volume of the run may be mounted in its pods alone.
        record = record_of_job(run_dir)
    if record is None and not (run_dir / CONFIG).is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no {CONFIG}; give the directory of a run")
    return record


def _state(files: RunFiles, owned: bool, job: SchedulerState | None) -> str:
    if owned:
        return "running" if files.steps else "starting"
    if job is not None and job.state in _QUEUED:
        return "queued"
    # Where nobody can be asked about the job, it may still run: nobody shall clean up behind it.
    if job is not None and job.state in ("RUNNING", ENDING, UNKNOWN) and files.state == "running":
        return "starting"
    # Nobody trains, and the run never said how it ended: it was killed.
    return "ended" if files.state == "running" else files.state


def _describe_owner(owner: Owner) -> str:
    node = "" if owner.node is None else f"node {owner.node}: "
    return f"{node}process {owner.pid} on {owner.host} since {owner.since}"


def _status_in_pod(record: LaunchRecord, run_dir: Path) -> RunStatus | None:
    """Returns a run's status as one of its pods sees it; None without one, or where it answers something else."""
    values = status_in_pod(record, run_dir) if record.launcher == "kubernetes" else None
    if values is None or values.keys() != {field.name for field in fields(RunStatus)}:
        return None
    try:
        return RunStatus(**{**values, "owners": tuple(values["owners"]), "job": None})
    except TypeError:
        return None


def _ask_scheduler(run_dir: Path, record: LaunchRecord) -> SchedulerState:
    if record.launcher == "kubernetes":
        state, nodes, reason = describe_job(record)
        return SchedulerState(
            launcher=record.launcher, job=record.job, state=state, nodes=nodes, time_left="", reason=reason
        )  # fmt: skip
    return ray_state(run_dir, record) if record.launcher == "ray" else slurm_state(record)


def run_output(run_dir: Path, follow: bool) -> Iterator[str]:
    """Yields what a run printed, else its steps and events, as lines; with ``follow`` until the run has ended.

    Raises:
        ConfigError: when the directory holds no run, and none was submitted for it.
    """
    record = _record_of(run_dir)
    output, positions = LaunchOutput(run_dir), dict[Path, int]()
    since: dict[str, str] = {}
    while True:
        # Asked before reading: what an ended run printed last is read after its end.
        ended = not follow or not _is_active(run_dir, record)
        yield from output.lines(ended)
        if record is not None and record.launcher == "kubernetes":
            yield from job_output(record, since)
        if not output.paths() and not since:
            yield from _record_lines(run_dir, positions)
        if ended:
            return
        time.sleep(_POLL_S if record is None or record.launcher != "kubernetes" else _CLUSTER_POLL_S)


def _is_active(run_dir: Path, record: LaunchRecord | None) -> bool:
    # Where the directory isn't, its state would take an interpreter in a pod each time.
    if record is not None and record.launcher == "kubernetes":
        return _ask_scheduler(run_dir, record).state in ("PENDING", "RUNNING", "SUSPENDED", ENDING)
    return run_status(run_dir).state in ("queued", "starting", "running")


def _record_lines(run_dir: Path, positions: dict[Path, int]) -> Iterator[str]:
    """Yields new events and steps of a run whose output went to a terminal, by time."""
    for name in (EVENTS, METRICS):
        path = run_dir / name
        rows = list(read_lines(path)) if path.exists() else []
        for row in rows[positions.get(path, 0) :]:
            text = _event_text(row) if name == EVENTS else f"step {row.get('step')}: loss {row.get('loss')}"
            if text:
                yield text
        positions[path] = len(rows)


def _event_text(row: JsonObject) -> str | None:
    data = {key: value for key, value in row.items() if key not in ("kind", "rank", "pid", "host", "time")}
    return event_line(Event(kind=str(row.get("kind")), rank=0, data=data))


def cancel_run(run_dir: Path, now: bool, limit_s: float) -> str:
    """Ends a run: with a checkpoint, or at once; waits until nobody trains there.

    Args:
        run_dir: its directory.
        now: without a checkpoint.
        limit_s: how long to wait.

    Returns:
        How it ended, as a sentence.

    Raises:
        ConfigError: when the directory holds no run.
        LaunchError: when it goes on, or can't be reached.
    """
    record = _record_of(run_dir)
    job = _ask_scheduler(run_dir, record) if record is not None else None
    owners = living_owners(run_dir)
    if job is not None and job.state == UNKNOWN:
        raise LaunchError(f"{job.job}: {job.reason}")
    if record is not None and job is not None and job.state != "gone":
        if record.launcher == "ray":
            ask_to_end(run_dir, now)
        else:
            _cancel_job(record, now or job.state in _QUEUED)
    elif owners:
        # A node without ranks, as one that is drained, would leave alone.
        with_ranks = (read_run(run_dir).of_kind("planned") or [{}])[-1].get("nodes")
        owners.sort(key=lambda owner: isinstance(with_ranks, list) and owner.node not in with_ranks)
        _signal_owners(owners, now)
    else:
        return f"nobody trains in {run_dir}"
    deadline = time.monotonic() + limit_s
    while living_owners(run_dir) or (record is not None and _lives(_ask_scheduler(run_dir, record))):
        if time.monotonic() > deadline:
            raise LaunchError(f"{run_dir} still runs after {limit_s:g} s; --now ends it without a checkpoint")
        time.sleep(_POLL_S)
    if not run_dir.is_dir():
        return "ended; its directory isn't here"
    return f"ended after step {run_status(run_dir).step}"


def _lives(job: SchedulerState) -> bool:
    return job.state not in ("gone", "COMPLETING")


def _cancel_job(record: LaunchRecord, now: bool) -> None:
    if record.launcher == "kubernetes":
        delete_job(job_of(record), now)
        return
    if now:
        call_slurm("scancel", record.job)
        cancel_replacements(record.job, record.nodes)
        return
    current = job_nodes(record.job)
    # The batch script passes it on once to the nodes, and leaves the queue; where its node is lost, the nodes are told.
    script_lives = current is not None and current[0] in current[1]
    options = ("--batch", "--signal=INT") if script_lives else ("--signal=TERM",)
    if call_slurm("scancel", *options, record.job) is None:
        raise LaunchError(f"scancel can't reach job {record.job}; run this where Slurm's commands are")


def _signal_owners(owners: list[Owner], now: bool) -> None:
    """Sends a signal to one supervisor, which ends the run on all nodes, or to all of them."""
    # Of several nodes SIGTERM may ask one alone to leave (`resilience.departure`).
    number = signal.SIGTERM if len(owners) == 1 else signal.SIGINT
    number = signal.SIGKILL if now else number
    for owner in owners if now else owners[:1]:
        if owner.host == socket.gethostname() and owner.lives:
            os.kill(owner.pid, number)
            continue
        command = ("ssh", "-o", "BatchMode=yes", owner.host, f"kill -{int(number)} {owner.pid}")
        try:
            status = subprocess.run(command, timeout=_SSH_S, stdin=subprocess.DEVNULL).returncode
        except (OSError, subprocess.TimeoutExpired):
            status = 1
        if status:
            raise LaunchError(f"process {owner.pid} on {owner.host} can't be reached by ssh; end it there")
