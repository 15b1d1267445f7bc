"""Takes a node or a device out of a run under way, and gives it back."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import ConfigError, LaunchError
from meshwright.jobs.run_control import run_status
from meshwright.json_types import JsonObject
from meshwright.monitor.rundir import RunFiles, read_run
from meshwright.resilience.drain_requests import DrainRequest, read_requests, withdraw_request, write_request

_POLL_S = 0.3
_LIVE = ("starting", "running")


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainAnswer:
    """What a run made of a request."""

    text: str
    """As a sentence."""
    step: int | None
    """Step after which its ranks went on without or with the devices; None while they don't."""

    def to_json(self) -> JsonObject:
        """Returns the fields as plain values."""
        return {"text": self.text, "step": self.step}


def list_requests(run_dir: Path) -> list[DrainRequest]:
    """Returns what a run is asked to do without.

    Raises:
        ConfigError: when the directory holds no run.
    """
    run_status(run_dir)
    return read_requests(run_dir)


def drain(run_dir: Path, request: DrainRequest, back: bool, limit_s: float) -> DrainAnswer:
    """Asks a run to go on without a node or a device, or with it again, and waits for its answer.

    Args:
        run_dir: the run directory.
        request: names the devices.
        back: lets them come back.
        limit_s: seconds to wait for the answer.

    Raises:
        ConfigError: when the directory holds no run, it can't be written, nothing was asked before, a custom loop
            recorded it, or a run that isn't under way never had the node or device.
        LaunchError: when the run refuses, or doesn't answer in time. A refused request is withdrawn.
    """
    state = run_status(run_dir).state
    files = read_run(run_dir)
    if isinstance(files.config.get("meter"), dict):
        raise ConfigError(f"{run_dir} is what a custom loop recorded; the ranks of such a loop are its own to stop")
    recovery = files.config.get("recovery")
    if isinstance(recovery, dict) and recovery.get("enabled") is False:
        raise ConfigError(
            f"{run_dir} runs with recovery.enabled = false: nobody would start its ranks again; cancel it"
        )
    before = time.time()
    if not back and state not in _LIVE:
        _check_recorded(files, request)
    if back:
        if not withdraw_request(run_dir, request):
            raise ConfigError(f"{_name(request)} of {run_dir} isn't drained; meshwright drain {run_dir} lists what is")
    elif not write_request(run_dir, request):
        raise ConfigError(f"{_name(request)} of {run_dir} is drained already; --undo lets it come back")
    if state not in _LIVE:
        return DrainAnswer(text=f"the run is {state}; it holds from its next start on", step=None)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for event in read_run(run_dir).of_kind("drained", "drain_refused", "run_finished", "interrupted"):
            if float(event.get("time", 0.0)) < before:
                continue
            if event["kind"] == "drain_refused" and (event["node"], event["device"]) == (request.node, request.device):
                withdraw_request(run_dir, request)
                raise LaunchError(f"{_name(request)} can't leave: {event['why']}")
            if event["kind"] == "drained" and _answers(event, request, back):
                way = "with" if back else "without"
                return DrainAnswer(
                    text=f"goes on {way} {_name(request)} after step {event['step']}", step=event["step"]
                )
            if event["kind"] in ("run_finished", "interrupted"):
                return DrainAnswer(text="the run ended meanwhile", step=None)
        time.sleep(_POLL_S)
    raise LaunchError(f"{run_dir} didn't answer within {limit_s:g} s; the request stands, --undo withdraws it")


def _check_recorded(files: RunFiles, request: DrainRequest) -> None:
    """Refuses what a run that isn't under way never had; a live run answers for itself.

    Raises:
        ConfigError: for a node without an event, or a device beyond those of its node.
    """
    ranks = {event.get("node"): event.get("ranks") for event in files.of_kind("node_ready")}
    found = (*ranks, *(event.get("node") for event in files.of_kind("leading")))
    nodes = {node for node in found if isinstance(node, int)}
    if not nodes and not files.of_kind("rank_started"):
        return  # It never started, so no file says which nodes it will have.
    nodes = nodes or {0}
    if request.node not in nodes:
        numbers = ", ".join(map(str, sorted(nodes)))
        raise ConfigError(f"node {request.node} was never part of {files.path}; its nodes were {numbers}")
    devices = ranks.get(request.node, files.config.get("devices"))
    if request.device is not None and isinstance(devices, int) and 0 < devices <= request.device:
        raise ConfigError(
            f"{_name(request)} was never part of {files.path}; the highest device it can have is {devices - 1}"
        )


def _answers(event: JsonObject, request: DrainRequest, back: bool) -> bool:
    devices = event["back" if back else "devices"]
    return any(request.covers((node, device)) for node, device in devices)


def _name(request: DrainRequest) -> str:
    return f"node {request.node}" if request.device is None else f"device {request.device} of node {request.node}"
