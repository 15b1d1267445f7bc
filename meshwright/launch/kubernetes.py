"""Kubernetes: kubectl's commands that start a run's job, look at it and end it, and where in a job a pod stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import LaunchError
from meshwright.json_types import JsonObject
from meshwright.launch.contract import CommandLauncher, HostCommand
from meshwright.launch.kubernetes_config import KubernetesConfig
from meshwright.launch.kubernetes_manifest import (
    ADDRESSES_VARIABLE,
    INDEX_VARIABLE,
    JOBSET_LABEL,
    KEY_VARIABLE,
    NODES_VARIABLE,
    RUN_ANNOTATION,
    RUN_LABEL,
    Manifest,
    PodCommand,
    dump_yaml,
    render_manifests,
)

_CALL_S = 60.0
"""Limit of a kubectl command that asks the API server, which itself is given less."""
_REQUEST, _SEARCH = "--request-timeout=45s", "--request-timeout=10s"
_DELETE_S = 120.0
_DELETE_OPTIONS = ("--ignore-not-found", "--wait=false", _REQUEST)
RESOURCES = {"jobset": "jobsets.jobset.x-k8s.io", "trainjob": "trainjobs.trainer.kubeflow.org"}
"""Names by which kubectl finds the kinds of jobs, whatever else has the same short name."""
_PREFIXES = re.compile(r"(?m)^(error: |Error from server \(\w+\): (error when creating \"STDIN\": )?)")
_RUNTIMES = "trainingruntimes.trainer.kubeflow.org"
_ENDED = ("Completed", "Complete", "Failed")
"""Conditions of a job that is over. Source: JobSet's and Trainer's API types."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesJob:
    """Names a job of a cluster."""

    kind: str
    """``jobset`` or ``trainjob``."""
    name: str
    """Its name."""
    namespace: str = ""
    """Its namespace; kubectl's current one when empty."""

    @property
    def scope(self) -> tuple[str, ...]:
        """Kubectl's option for the namespace."""
        return ("--namespace", self.namespace) if self.namespace else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PodPlace:
    """Where this process stands in a job: what Kubernetes and the manifest say to a pod."""

    node: int
    """Number of this pod, and of its node in the run."""
    nodes: int
    """Pods of the job."""
    address: str
    """The pod's IPv4 address."""
    key_file: str = ""
    """File with the run's key; empty for the run directory's."""


def pod_place(environment: Mapping[str, str] | None = None) -> PodPlace | None:
    """Reads from the environment which pod of a run this is; None outside of such pods.

    Raises:
        LaunchError: when a variable isn't what the manifest sets, or the pod has no IPv4 address.
    """
    values = os.environ if environment is None else environment
    if NODES_VARIABLE not in values:
        return None
    try:
        nodes, node = int(values[NODES_VARIABLE]), int(values[INDEX_VARIABLE])
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"the environment of this pod isn't complete ({error}); it must be of an Indexed Job"
        ) from None
    if not 0 <= node < nodes:
        raise LaunchError(f"{INDEX_VARIABLE} = {node} in a job of {nodes} pods; parallelism and completions differ")
    addresses = [text.strip() for text in values.get(ADDRESSES_VARIABLE, "").split(",")]
    address = next((text for text in addresses if re.fullmatch(r"[\d.]+", text)), "")
    if not address:
        raise LaunchError(f"this pod has no IPv4 address ({','.join(addresses)}), by which ranks meet")
    return PodPlace(node=node, nodes=nodes, address=address, key_file=values.get(KEY_VARIABLE, ""))


def run_kubectl(*words: str, text: str | None = None, limit_s: float = _CALL_S) -> str:
    """Runs kubectl and returns what it printed.

    Args:
        words: its words.
        text: its standard input.
        limit_s: how long it may take.

    Raises:
        LaunchError: with kubectl's sentence when it fails; when it isn't installed, or nobody answers.
    """
    try:
        # Without input an empty one: kubectl would else read the terminal's.
        done = subprocess.run(("kubectl", *words), input=text or "", capture_output=True, text=True, timeout=limit_s)
    except OSError:
        raise LaunchError("kubectl isn't here; install it and choose a cluster by its context, or --on local") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"kubectl didn't answer within {limit_s:g} s; try kubectl cluster-info") from None
    if done.returncode != 0:
        sentence = _PREFIXES.sub("", done.stderr)
        raise LaunchError(f"Kubernetes refuses: {'; '.join(sentence.strip().splitlines()) or 'kubectl gave no reason'}")
    return done.stdout


def _get(job: KubernetesJob, resource: str, *words: str) -> JsonObject | None:
    """Returns an object, or a list of them, as JSON; None when there is none."""
    shown = run_kubectl("get", resource, *words, *job.scope, "--ignore-not-found", "--output=json", _REQUEST)
    return _decode(shown) if shown.strip() else None


def _decode(text: str) -> JsonObject:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise LaunchError("kubectl printed something else than JSON; try kubectl version")
    return values


def read_job(job: KubernetesJob) -> JsonObject | None:
    """Returns a job as the cluster has it; None when there is none.

    Raises:
        LaunchError: when kubectl fails.
    """
    return _get(job, RESOURCES[job.kind], job.name)


def read_pods(job: KubernetesJob) -> list[JsonObject]:
    """Returns a job's pods as the cluster has them, by name.

    Raises:
        LaunchError: when kubectl fails.
    """
    pods = _get(job, "pods", "--selector", f"{JOBSET_LABEL}={job.name}")
    items = [item for item in (pods or {}).get("items", ()) if isinstance(item, dict)]
    return sorted(items, key=lambda item: str(item.get("metadata", {}).get("name", "")))


def find_job(digest: str) -> KubernetesJob | None:
    """Returns the job of a run by its label, in any namespace where that may be asked, else in kubectl's; None without.

    Args:
        digest: of the run directory's path.

    Raises:
        LaunchError: when kubectl can't be run, or knows no kind of job.
    """
    refusals = []
    for kind, resource in RESOURCES.items():
        for scope in (("--all-namespaces",), ()):
            words = ("get", resource, *scope, "--selector", f"{RUN_LABEL}={digest}", "--output=json", _SEARCH)
            try:
                items = _decode(run_kubectl(*words)).get("items") or ()
            except LaunchError as error:
                refusals.append(error)
                continue
            for item in items:
                metadata = item["metadata"]
                return KubernetesJob(kind=kind, name=metadata["name"], namespace=metadata.get("namespace", ""))
            break
    # A cluster has one of the two kinds, as a rule: only if neither can be asked nobody knows.
    if len(refusals) == 2 * len(RESOURCES):
        raise refusals[0]
    return None


def end_condition(job: JsonObject) -> str:
    """Returns the condition by which a job is over: ``Completed``, ``Failed``; empty while it isn't."""
    return next((kind for kind, _ in true_conditions(job) if kind in _ENDED), "")


def true_conditions(object_: JsonObject) -> list[tuple[str, str]]:
    """Returns type and message of an object's conditions that are true."""
    conditions: Any = object_.get("status", {}).get("conditions") or ()
    return [
        (str(condition.get("type", "")), str(condition.get("message", "")))
        for condition in conditions
        if condition.get("status") == "True"
    ]


def delete_job(job: KubernetesJob, now: bool = False) -> None:
    """Deletes a job with all that belongs to it; its pods get SIGTERM and their grace, or a second with ``now``.

    Raises:
        LaunchError: when kubectl fails.
    """
    options = (*job.scope, *_DELETE_OPTIONS)
    run_kubectl("delete", RESOURCES[job.kind], job.name, *options)
    _delete_needs(job)
    if now:
        run_kubectl("delete", "pods", "--selector", f"{JOBSET_LABEL}={job.name}", "--now", *options)


def _delete_needs(job: KubernetesJob) -> None:
    if job.kind == "trainjob":
        run_kubectl("delete", _RUNTIMES, job.name, *job.scope, *_DELETE_OPTIONS)
    run_kubectl("delete", "configmaps", f"{job.name}-recipe", *job.scope, *_DELETE_OPTIONS)


def read_logs(job: KubernetesJob, since: dict[str, str]) -> list[str]:
    """Returns what a job's containers have printed since the last call, pod by pod.

    Args:
        job: the job.
        since: the last time stamp that was read, by pod; empty at first, and renewed by the call.

    Raises:
        LaunchError: when kubectl fails.
    """
    # Asked again and again instead of followed: --follow never turns to containers that start later.
    words = ["logs", "--selector", f"{JOBSET_LABEL}={job.name}", *job.scope, "--prefix", "--timestamps", "--tail=-1"]
    words += ["--ignore-errors", *((f"--since-time={min(since.values())}",) if since else ())]
    lines, newest = [], dict(since)
    for line in run_kubectl(*words).splitlines():
        # [pod/NAME/CONTAINER] TIME TEXT: the kubelet writes times with nine digits, which compare as text does.
        match = re.match(r"\[pod/([^/\]]+)/[^\]]*\] (\S+) ?(.*)", line)
        if match and match[2] > since.get(match[1], ""):
            newest[match[1]] = max(match[2], newest.get(match[1], ""))
            lines.append(f"{_short_name(job, match[1])}: {match[3]}")
    since.update(newest)
    return lines


def _short_name(job: KubernetesJob, pod: str) -> str:
    """Returns ``node 3`` for a pod's name ``NAME-node-0-3-x7k2p``."""
    match = re.fullmatch(r"-\w+-\d+-(\d+)-\w+", pod.removeprefix(job.name))
    return f"node {match[1]}" if match else pod


@dataclass
class KubernetesLauncher(CommandLauncher):
    """Creates a job whose pods run a command each; a `CommandLauncher`."""

    config: KubernetesConfig
    """What is asked for."""
    name: str
    """Name of the job."""
    run_dir: str
    """The run directory in the pods."""
    digest: str
    """Digest of that path."""
    recipe: str
    """Text of the recipe; empty without one."""
    grace_s: int
    """Seconds from SIGTERM to SIGKILL."""
    rank_count: int
    """Number of ranks on all nodes."""

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.rank_count

    @property
    def job(self) -> KubernetesJob:
        """The job's name in the cluster."""
        return KubernetesJob(kind=self.config.kind, name=self.name, namespace=self.config.namespace)

    def manifests(self, argv: Sequence[str]) -> list[Manifest]:
        """Returns the objects for ``meshwright <argv>``, the job last.

        Raises:
            ConfigError: for what Kubernetes can't take.
        """
        command = PodCommand(
            name=self.name, argv=tuple(argv), run_dir=self.run_dir, digest=self.digest, recipe=self.recipe,
            grace_s=self.grace_s,
        )  # fmt: skip
        return render_manifests(self.config, command)

    def commands(self, argv: Sequence[str]) -> list[HostCommand]:
        """Returns the dry run: the creation."""
        return [HostCommand("localhost", ("kubectl", "create", "--filename=-"))]

    def start(self, argv: Sequence[str]) -> None:
        """Creates the job, once the cluster says that it would take it.

        Raises:
            LaunchError: with the cluster's sentence when it refuses; nothing is left there then.
        """
        *needs, job = self.manifests(argv)
        self._make_way()
        # A TrainJob without its runtime would be refused even by a dry run.
        if self.config.kind == "jobset":
            self._create(job, "create", "--dry-run=server")
        try:
            for need in needs:
                self._create(need, "apply")
            created = _decode(self._create(job, "create", "--output=json"))
        except LaunchError:
            # The job itself isn't: one of that name may be another command's, which was faster.
            _delete_needs(self.job)
            raise
        # kubectl's current namespace may be another one later.
        metadata: Any = created.get("metadata", {})
        self.config = replace(self.config, namespace=str(metadata.get("namespace") or self.config.namespace))

    def _create(self, manifest: Manifest, *words: str) -> str:
        return run_kubectl(*words, *self.job.scope, "--filename=-", _REQUEST, text=dump_yaml([manifest]))

    def _make_way(self) -> None:
        """Removes an ended job of the same run, and refuses any other of the same name."""
        existing = read_job(self.job)
        if existing is None:
            return
        metadata: Any = existing.get("metadata", {})
        run_dir = (metadata.get("annotations") or {}).get(RUN_ANNOTATION, "")
        if run_dir != self.run_dir:
            owner = f"the run {run_dir}" if run_dir else "somebody else's"
            raise LaunchError(f"{self.config.kind} {self.name} is there, {owner}; give another --kubernetes.name")
        if not end_condition(existing):
            raise LaunchError(
                f"{self.config.kind} {self.name} is there and hasn't ended; meshwright cancel {self.run_dir} ends it"
            )
        delete_job(self.job)
        deadline = time.monotonic() + _DELETE_S
        while read_job(self.job) is not None or read_pods(self.job):
            if time.monotonic() > deadline:
                raise LaunchError(f"{self.config.kind} {self.name} of an earlier command won't go; try kubectl delete")
            time.sleep(1.0)

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns at once: a job outlives the command that created it."""

    def cancel(self, grace_s: float = 0.0) -> None:
        """Deletes the job."""
        delete_job(self.job)
