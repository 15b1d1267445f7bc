"""Manifests of a run on Kubernetes: a JobSet or a TrainJob, whose pods start a supervisor each."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import yaml

from meshwright.errors import ConfigError
from meshwright.json_types import Json
from meshwright.launch.kubernetes_config import KubernetesConfig, toleration

Manifest: TypeAlias = dict[str, Json]
"""An object of Kubernetes, or a part of it."""
RUN_LABEL = "meshwright/run"
"""Label of everything of a run: a digest of its directory's path."""
RUN_ANNOTATION = "meshwright/run-directory"
"""Annotation with that path."""
RECIPE = "/etc/meshwright/recipe.toml"
"""The recipe in the pods."""
KEY_FILE = "/etc/meshwright-key/key"
"""The run's key in the pods, where a Secret holds it."""
NODES_VARIABLE, ADDRESSES_VARIABLE, KEY_VARIABLE = "MESHWRIGHT_PODS", "MESHWRIGHT_POD_IPS", "MESHWRIGHT_KEY"
"""Variables of a pod: number of pods, its own addresses, file of the run's key."""
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
"""Set by Kubernetes in the pods of an Indexed Job: the pod's number."""
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
"""Label of the pods of a JobSet: its name. A TrainJob makes a JobSet of its own name."""
_GROUP = "node"
_EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
_ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
_QUEUE = "kueue.x-k8s.io/queue-name"
_LOST_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_LABEL_LENGTH = 63
_RECIPE_BYTES = 2**20 - 2**12
"""A ConfigMap holds 1 MiB. Source: Kubernetes, MaxConfigMapSize."""
_INT32 = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PodCommand:
    """What each pod of a run executes."""

    name: str
    """Name of the job."""
    argv: tuple[str, ...]
    """Words after ``meshwright``."""
    run_dir: str
    """The run directory in the pods."""
    digest: str
    """Digest of that path, as a label's value."""
    recipe: str
    """Text of the recipe; empty without one."""
    grace_s: int
    """Seconds from SIGTERM to SIGKILL, within which the run ends with a checkpoint."""


def render_manifests(config: KubernetesConfig, command: PodCommand) -> list[Manifest]:
    """Returns the objects of a run: what the job needs first, the job last.

    Args:
        config: what is asked for.
        command: what the pods execute.

    Raises:
        ConfigError: for a name or a recipe that Kubernetes can't take.
    """
    pod_name = f"{command.name}-{_GROUP}-0-{config.nodes - 1}"
    # Kubernetes adds five characters to a pod's name; JobSet's webhook counts the name without them.
    if len(pod_name) > _LABEL_LENGTH:
        raise ConfigError(
            f"the name {command.name} makes pods of {len(pod_name)} characters ({pod_name}), and {_LABEL_LENGTH} may "
            "be; give a shorter --kubernetes.name"
        )
    if len(command.recipe.encode()) > _RECIPE_BYTES:
        raise ConfigError("the recipe is over 1 MiB, more than a ConfigMap holds; lay the text elsewhere")
    objects: list[Manifest] = []
    if command.recipe:
        metadata = _metadata(config, command, recipe_name(command))
        data: Manifest = {"recipe.toml": command.recipe}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    if config.kind == "jobset":
        job: Manifest = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(config, command, command.name, queue=True),
            "spec": _jobset_spec(config, command),
        }
        return [*objects, job]
    objects.append(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainingRuntime",
            "metadata": _metadata(config, command, command.name),
            "spec": {"mlPolicy": {"numNodes": config.nodes}, "template": {"spec": _jobset_spec(config, command)}},
        }
    )
    trainer: Manifest = {"image": config.image, "numNodes": config.nodes, "resourcesPerNode": _resources(config)}
    # The rest of the pod isn't a TrainJob's to say: volumes, grace and restarts stand in the runtime.
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(config, command, command.name, queue=True),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": command.name},
            "trainer": trainer,
        },
    }
    return [*objects, job]


def recipe_name(command: PodCommand) -> str:
    """Returns the name of the ConfigMap with the recipe."""
    return f"{command.name}-recipe"


def _metadata(config: KubernetesConfig, command: PodCommand, name: str, queue: bool = False) -> Manifest:
    labels = {RUN_LABEL: command.digest} | ({_QUEUE: config.queue} if queue and config.queue else {})
    metadata: Manifest = {"name": name, "labels": labels, "annotations": {RUN_ANNOTATION: command.run_dir}}
    return metadata | ({"namespace": config.namespace} if config.namespace else {})


def _jobset_spec(config: KubernetesConfig, command: PodCommand) -> Manifest:
    template_metadata: Manifest = {"labels": {_ANCESTOR: "trainer"}} if config.kind == "trainjob" else {}
    if config.exclusive:
        template_metadata["annotations"] = {_EXCLUSIVE: config.topology}
    job: Manifest = {
        "spec": {
            "parallelism": config.nodes,
            "completions": config.nodes,
            "completionMode": "Indexed",
            # Containers restart in place, and restarts of all pods count here.
            "backoffLimit": min(config.restarts * config.nodes, _INT32),
            "template": {"metadata": {"labels": {RUN_LABEL: command.digest}}, "spec": _pod_spec(config, command)},
        }
    }
    if template_metadata:
        job["metadata"] = template_metadata
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        # A lost pod is replaced alone by its Job; the other supervisors go on meanwhile.
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": _GROUP, "replicas": 1, "template": job}],
    }


def _pod_spec(config: KubernetesConfig, command: PodCommand) -> Manifest:
    lost: list[Manifest] = [
        {"key": taint, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": config.lost_s}
        for taint in _LOST_TAINTS
    ]
    spec: Manifest = {
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": command.grace_s,
        # As process 1 a supervisor would ignore SIGTERM until its handler stands, and look the same after a restart.
        "shareProcessNamespace": True,
        "containers": [_container(config, command)],
        "volumes": _volumes(config, command),
        "tolerations": [*lost, *(toleration(text) for text in config.tolerations)],
    }
    if config.topology and not config.exclusive:
        term: Manifest = {"labelSelector": {"matchLabels": {RUN_LABEL: command.digest}}, "topologyKey": config.topology}
        spec["affinity"] = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    if config.node_selector:
        spec["nodeSelector"] = dict(text.split("=", 1) for text in config.node_selector)
    if config.user is not None:
        # No fsGroup: it would open the run's key to the group, and such a key is refused.
        spec["securityContext"] = {"runAsUser": config.user, "runAsGroup": config.user}
    if config.pull_secret:
        spec["imagePullSecrets"] = [{"name": config.pull_secret}]
    for key, text in (("serviceAccountName", config.service_account), ("priorityClassName", config.priority)):
        if text:
            spec[key] = text
    return spec


def _container(config: KubernetesConfig, command: PodCommand) -> Manifest:
    variables: list[Manifest] = [
        {"name": NODES_VARIABLE, "value": str(config.nodes)},
        {"name": ADDRESSES_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "status.podIPs"}}},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    ]
    mounts: list[Manifest] = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "run", "mountPath": config.mount}]
    if command.recipe:
        mounts.append({"name": "recipe", "mountPath": RECIPE.rpartition("/")[0], "readOnly": True})
    if config.key_secret:
        variables.append({"name": KEY_VARIABLE, "value": KEY_FILE})
        mounts.append({"name": "key", "mountPath": KEY_FILE.rpartition("/")[0], "readOnly": True})
    for text in config.env:
        name, _, value = text.partition("=")
        variables.append({"name": name, "value": _escape(value)})
    container: Manifest = {
        "name": _GROUP,
        "image": config.image,
        "command": [_escape(word) for word in _words(config, command)],
        "workingDir": config.workdir or config.mount,
        "env": variables,
        "resources": _resources(config),
        "volumeMounts": mounts,
        # The last lines of a failed container become its message, which status shows.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if config.env_secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in config.env_secrets]
    return container


def _words(config: KubernetesConfig, command: PodCommand) -> Sequence[str]:
    words = (config.python, "-m", "meshwright", *command.argv)
    if not config.setup:
        return words
    return ("/bin/sh", "-c", "\n".join([*config.setup, f"exec {shlex.join(words)}"]))


def _escape(text: str) -> str:
    """Returns a text that Kubernetes, which writes variables for ``$(NAME)``, passes on as it is."""
    return text.replace("$", "$$")


def _volumes(config: KubernetesConfig, command: PodCommand) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": config.shm}},
        {"name": "run", "persistentVolumeClaim": {"claimName": config.claim}},
    ]
    if command.recipe:
        volumes.append({"name": "recipe", "configMap": {"name": recipe_name(command)}})
    if config.key_secret:
        volumes.append({"name": "key", "secret": {"secretName": config.key_secret}})
    return volumes


def _resources(config: KubernetesConfig) -> Manifest:
    limits: Manifest = {}
    if config.gpus_per_node:
        limits[config.gpu_resource] = config.gpus_per_node
    for text in config.resources:
        key, _, count = text.partition("=")
        limits[key] = int(count) if count.isdigit() else count
    if config.memory:
        limits["memory"] = config.memory
    # No limit of cores: a throttled rank makes all others wait.
    requests: Manifest = limits | ({"cpu": config.cpus_per_node} if config.cpus_per_node else {})
    return {name: values for name, values in (("limits", limits), ("requests", requests)) if values}


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and equal parts each time."""

    def ignore_aliases(self, data: object) -> bool:
        """Returns True: a reader of the manifest follows no anchors."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def dump_yaml(objects: Sequence[Manifest]) -> str:
    """Returns manifests as a stream of YAML documents."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120, explicit_start=len(objects) > 1)
