"""Training on a Ray cluster: the driver's part, and what other commands see of it through the run directory."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.jobs.hosts import command_arguments, count_ranks
from meshwright.jobs.launch_output import LaunchOutput
from meshwright.jobs.launch_record import RECORD, LaunchRecord, SchedulerState, write_record
from meshwright.jobs.progress import Say
from meshwright.jobs.run_directory import LAUNCH
from meshwright.launch.ray_cluster import RayCluster, format_resources
from meshwright.launch.ray_job import EndRequest, RayJob, RunRecords
from meshwright.launch.ray_node import SharedFile, supervisor_environment
from meshwright.monitor.rundir import read_run
from meshwright.records import parse_json
from meshwright.resilience.claims import newest_ended_generation
from meshwright.resilience.run_lock import RunLock, living_owners
from meshwright.train.run_config import RunConfig

_DRIVER, _STATE, _REQUEST = "driver", "ray.json", "cancel"
"""In the launch folder: the driver's lock, how it says that the nodes stand, and a request to end the run."""
_LOOK_S = 1.0
_OWNER_S = 60
"""A node that took over waits so long for the end of one that Ray has lost and that still trains."""


def plan_lines(args: Sequence[str], config: RunConfig) -> list[str]:
    """Returns the dry run: what would be asked of Ray, and what would run on each node; connects to nothing.

    Args:
        args: words of the command after ``train``.
        config: these words as settings, with the run directory named.

    Raises:
        ConfigError, ClusterError, PlanError: for settings that would fail on the nodes.
    """
    ray = config.ray
    command = shlex.join(["python", "-m", "meshwright", *_node_arguments(args, config)])
    numbering = f" --nodes {ray.nodes} --node I --meet ADDRESS" if ray.nodes > 1 else ""
    variables = "".join(
        f"{name}={shlex.quote(value)} " for name, value in supervisor_environment(config.ray.environment).items()
    )
    return [
        f"cluster: {ray.address}",
        f"placement group: {ray.nodes} x ({format_resources(ray.bundle)}), STRICT_SPREAD: a bundle a node",
        f"waits: {ray.timeout:g} s for nodes that aren't free",
        f"on each: {variables}{command}{numbering}",
    ]


def _node_arguments(args: Sequence[str], config: RunConfig) -> list[str]:
    ray = config.ray
    ranks = count_ranks(config, "ray", ray.nodes, ray.gpus_per_node, ray.ranks_per_node)
    # A node that Ray calls dead may train on for a while, where the network is what failed.
    owner = ("--launch.owner-s", str(_OWNER_S)) if not config.launch.owner_s else ()
    return [*command_arguments(args, config, ranks), *owner, "--on", "local"]


def run_on_ray(args: Sequence[str], config: RunConfig, say: Say) -> int:
    """Trains on the nodes of a Ray cluster to the run's end; returns the exit status.

    Args:
        args: words of the command after ``train``.
        config: these words as settings, with the run directory named.
        say: takes a line for people.

    Raises:
        ConfigError, ClusterError, PlanError: before anything is started, for what can't be.
        LaunchError: without Ray or its cluster, or when no supervisor can be started.
    """
    run_dir = Path(config.run).absolute()
    config = dataclasses.replace(config, run=str(run_dir))
    argv = _node_arguments(args, config)
    if owners := living_owners(run_dir):
        raise ConfigError(
            f"run = {run_dir}: process {owners[0].pid} on {owners[0].host} trains there since {owners[0].since}; "
            "end it with meshwright cancel, or give another --run"
        )
    # Before Ray is imported, whose threads a fork would leave in the lock's helper process.
    with RunLock(run_dir / LAUNCH / _DRIVER), RayCluster(config.ray.address) as cluster:
        _request_path(run_dir).unlink(missing_ok=True)
        record = LaunchRecord.submitted_now("ray", cluster.job, config.ray.nodes)
        shared = SharedFile(path=str(run_dir / LAUNCH / RECORD), text=record.text, workdir=str(Path.cwd()))
        job = RayJob(
            cluster,
            argv,
            config.ray,
            supervisor_environment(config.ray.environment),
            shared,
            lambda node: str(run_dir / LAUNCH / f"node-{node}.out"),
            _DriverRecords(run_dir, say),
            start_s=config.launch.group_s,
            stop_s=config.launch.stop_s,
            say=say,
        )
        job.check_cluster()
        write_record(run_dir, record)
        return job.run()


def _request_path(run_dir: Path) -> Path:
    return run_dir / LAUNCH / _REQUEST


class _Pace:
    """Paces looks at files that may lie on another host."""

    def __init__(self) -> None:
        self._looked_at = -_LOOK_S

    def take_turn(self) -> bool:
        """Whether the last look was a while ago; then this is the next."""
        is_due = time.monotonic() - self._looked_at >= _LOOK_S
        if is_due:
            self._looked_at = time.monotonic()
        return is_due


class _DriverRecords(RunRecords):
    """The run directory as the driver reads and writes it."""

    def __init__(self, run_dir: Path, say: Say) -> None:
        self._run_dir, self._say = run_dir, say
        self._output = LaunchOutput(run_dir, from_now=True)
        self._ended_before = newest_ended_generation(run_dir)
        self._state: dict[str, object] = {}
        self._request, self._is_over = EndRequest.NONE, False
        self._request_pace, self._over_pace, self._output_pace = _Pace(), _Pace(), _Pace()

    def is_finished(self) -> bool:
        """Whether the run has reached its last step."""
        self._forward(ended=True)
        return read_run(self._run_dir).state == "finished"

    def is_over(self) -> bool:
        """Whether the nodes have recorded how the run ended."""
        if self._over_pace.take_turn():
            self._is_over = newest_ended_generation(self._run_dir) > self._ended_before
        return self._is_over

    def end_request(self) -> EndRequest:
        """Returns how another command asked the run to end."""
        if self._request_pace.take_turn():
            try:
                text = _request_path(self._run_dir).read_text(encoding="utf-8", errors="replace")
            except OSError:
                return self._request
            self._request = EndRequest.NOW if text.strip() == "now" else EndRequest.CHECKPOINT
        return self._request

    def report(self, state: str, nodes: Sequence[str], reason: str) -> None:
        """Records how the nodes stand, and passes on what their supervisors printed."""
        values: dict[str, object] = {"state": state, "nodes": list(nodes), "reason": reason}
        if values != self._state:
            self._state = values
            _replace_text(self._run_dir / LAUNCH / _STATE, json.dumps(values))
        if self._output_pace.take_turn():
            self._forward(ended=False)

    def _forward(self, ended: bool) -> None:
        for line in self._output.lines(ended):
            self._say(line)


def _replace_text(path: Path, text: str) -> None:
    temporary_path = path.with_name(f".{path.name}.new")
    temporary_path.write_text(text, encoding="utf-8")
    temporary_path.replace(path)


def ray_state(run_dir: Path, record: LaunchRecord) -> SchedulerState:
    """Returns what a run's driver says of its nodes; it needs neither Ray nor its cluster."""
    values: object = None
    if living_owners(run_dir / LAUNCH / _DRIVER):
        try:
            values = parse_json((run_dir / LAUNCH / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            values = {}
    fields = values if isinstance(values, dict) else {}
    nodes = fields.get("nodes")
    return SchedulerState(
        launcher=record.launcher,
        job=record.job,
        state="gone" if values is None else str(fields.get("state", "PENDING")),
        nodes=", ".join(map(str, nodes)) if isinstance(nodes, list) else "",
        time_left="",
        reason=str(fields.get("reason", "")),
    )


def ask_to_end(run_dir: Path, now: bool) -> None:
    """Asks a run's driver to end it, by a file that it looks for each second.

    Args:
        run_dir: the run's directory.
        now: without a checkpoint.
    """
    _replace_text(_request_path(run_dir), "now" if now else "checkpoint")
