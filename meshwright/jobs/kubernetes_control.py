"""A run on Kubernetes seen and ended from outside: what the cluster says of its job and its pods."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import LaunchError
from meshwright.jobs.kubernetes import run_digest
from meshwright.jobs.launch_record import LaunchRecord
from meshwright.json_types import JsonObject
from meshwright.launch.kubernetes import (
    RESOURCES,
    KubernetesJob,
    end_condition,
    find_job,
    read_job,
    read_logs,
    read_pods,
    run_kubectl,
    true_conditions,
)

GONE, UNKNOWN, ENDING = "gone", "UNKNOWN", "ENDING"
"""States of a job that isn't in the cluster, that nobody can be asked about, and whose pods end."""
_EXEC_S = 120.0


def record_of_job(run_dir: Path) -> LaunchRecord | None:
    """Returns the record of a run that has none here, by the label of its job; None without a job, or a cluster."""
    if not run_dir.is_absolute():
        return None
    try:
        job = find_job(run_digest(str(run_dir)))
    except LaunchError:
        return None
    if job is None:
        return None
    return LaunchRecord(
        launcher="kubernetes", job=f"{job.kind}/{job.name}", nodes=0, submitted="", namespace=job.namespace
    )  # fmt: skip


def job_of(record: LaunchRecord) -> KubernetesJob:
    """Returns the job that a record names.

    Raises:
        LaunchError: when it names no kind of job.
    """
    kind, _, name = record.job.partition("/")
    if kind not in RESOURCES:
        raise LaunchError(f"{record.job} is no job of Kubernetes; remove launch/job.json of the run")
    return KubernetesJob(kind=kind, name=name, namespace=record.namespace)


def describe_job(record: LaunchRecord) -> tuple[str, str, str]:
    """Returns a job's state, its machines, and why it waits or failed; the state is unknown where nobody answers."""
    job = job_of(record)
    try:
        found, pods = read_job(job), read_pods(job)
    except LaunchError as error:
        return UNKNOWN, "", str(error)
    machines = sorted({str(pod["spec"]["nodeName"]) for pod in pods if pod.get("spec", {}).get("nodeName")})
    running = sum(pod.get("status", {}).get("phase") == "Running" for pod in pods)
    shown = f"{running} of {len(pods)} pods, {', '.join(machines)}" if machines else ""
    reason = "; ".join(dict.fromkeys(filter(None, (_pod_reason(pod) for pod in pods))))
    if found is None or found.get("metadata", {}).get("deletionTimestamp"):
        return (ENDING if pods or found is not None else GONE), shown, reason
    ended = end_condition(found)
    if ended:
        message = next((text for kind, text in true_conditions(found) if kind == ended), "")
        return ("FAILED" if ended == "Failed" else "COMPLETED"), shown, message if ended == "Failed" else ""
    if any(kind == "Suspended" for kind, _ in true_conditions(found)):
        return "SUSPENDED", shown, reason
    return ("RUNNING" if running else "PENDING"), shown, reason


def _pod_reason(pod: JsonObject) -> str:
    """Returns why a pod doesn't run, or why its container was started again; empty when it just runs."""
    status: Mapping[str, Any] = pod.get("status") or {}
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        # The kubelet's word for what every container does first.
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            text = f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
            last = ((container.get("lastState") or {}).get("terminated") or {}).get("message", "")
            return f"{text}; it printed {last.strip().splitlines()[-1]}" if last.strip() else text
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("message") or condition.get("reason") or "")
    return ""


def status_in_pod(record: LaunchRecord, run_dir: Path) -> JsonObject | None:
    """Returns what ``meshwright status`` says in a pod of the run, where its directory is; None without such a pod."""
    job = job_of(record)
    try:
        for pod in read_pods(job):
            if (pod.get("status") or {}).get("phase") != "Running":
                continue
            python = _interpreter(pod)
            words = ("exec", pod["metadata"]["name"], *job.scope, "--container=node", "--", python, "-m", "meshwright")
            values = json.loads(run_kubectl(*words, "status", str(run_dir), "--json", limit_s=_EXEC_S))
            return values if isinstance(values, dict) else None
    except (LaunchError, ValueError):
        return None
    return None


def _interpreter(pod: JsonObject) -> str:
    """Returns the interpreter of a pod's command; with lines of setup it is the shell's last word but the command's."""
    command = [str(word) for word in pod["spec"]["containers"][0].get("command") or ["python"]]
    if command[:2] == ["/bin/sh", "-c"]:
        return command[2].rpartition("\nexec ")[2].partition(" ")[0]
    return command[0]


def job_output(record: LaunchRecord, since: dict[str, str]) -> Iterator[str]:
    """Yields the lines that the job's containers have printed since the last call; none where nobody answers.

    Args:
        record: of the run.
        since: the last time stamp by pod, which the call renews.
    """
    try:
        yield from read_logs(job_of(record), since)
    except LaunchError:
        return
