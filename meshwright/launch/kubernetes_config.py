"""Settings of ``--on kubernetes``: what is asked of the cluster for each node of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Literal

from meshwright.config import Config
from meshwright.errors import ConfigError

LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
"""A DNS label, without its limit of 63 characters. Source: RFC 1123, section 2.1."""
_SUBDOMAIN = re.compile(rf"{LABEL}(\.{LABEL})*")
_JOB_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""JobSet wants names of RFC 1035, which begin with a letter. Source: JobSet's validating webhook, IsDNS1035Label."""
_KEY_NAME = r"[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"({LABEL}(\.{LABEL})*/)?{_KEY_NAME}", re.ASCII)
"""Key of a label, a taint or a resource. Source: Kubernetes, IsQualifiedName."""
_VALUE = re.compile(rf"({_KEY_NAME})?", re.ASCII)
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
_SCALES = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
}  # fmt: skip
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_OWN_VARIABLES = ("JOB_COMPLETION_INDEX", "MESHWRIGHT_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_")
_OWN_RESOURCES = ("cpu", "memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesConfig(Config):
    """What ``--on kubernetes`` asks the cluster for: a pod a node of the run."""

    kind: Literal["jobset", "trainjob"] = "jobset"
    """``jobset``: a JobSet (jobset.x-k8s.io/v1alpha2); ``trainjob``: a TrainJob of Kubeflow Trainer
    (trainer.kubeflow.org/v1alpha1) with a TrainingRuntime of its own."""
    image: str = ""
    """Image of the containers, with meshwright in it."""
    nodes: int = 1
    """Nodes of the run, a pod with a supervisor each."""
    gpus_per_node: int | None = None
    """GPUs of a pod, and so its ranks; None for none."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource by which the cluster counts GPUs."""
    cpus_per_node: int | None = None
    """Cores that a pod asks for, and without GPUs its ranks; None for the namespace's default."""
    memory: str = ""
    """Memory of a pod, as ``480Gi``, snapshots and /dev/shm included; without a limit of ours when empty."""
    shm: str = "16Gi"
    """Size of /dev/shm, which lies in the pod's memory."""
    resources: tuple[str, ...] = ()
    """More resources of a pod: ``rdma/hca=1``."""
    claim: str = ""
    """PersistentVolumeClaim of the volume that all pods share (ReadWriteMany); the run directory lies on it."""
    mount: str = "/shared"
    """Where that volume is mounted in the pods."""
    workdir: str = ""
    """Working directory of the command; ``mount`` when empty. Relative paths of the recipe start here."""
    namespace: str = ""
    """Namespace; kubectl's current one when empty."""
    name: str = ""
    """Name of the job; that of the run's directory when empty."""
    python: str = "python"
    """Interpreter of the image."""
    setup: tuple[str, ...] = ()
    """Lines of shell before the command in each pod."""
    env: tuple[str, ...] = ()
    """Variables of the containers: ``NCCL_DEBUG=INFO``. No secrets: whoever may read the job reads them."""
    env_secrets: tuple[str, ...] = ()
    """Secrets whose entries become variables of the containers."""
    key_secret: str = ""
    """Secret whose entry ``key`` is the run's key (64 hexadecimal digits); the run directory's key when empty."""
    pull_secret: str = ""
    """Secret by which the image is pulled."""
    service_account: str = ""
    """Service account of the pods; the namespace's default when empty."""
    user: int | None = None
    """Numeric user of the containers; the image's when None."""
    priority: str = ""
    """PriorityClass of the pods."""
    queue: str = ""
    """LocalQueue of Kueue, which starts the job when there is room for all of its pods."""
    node_selector: tuple[str, ...] = ()
    """Labels that a machine must have: ``cloud.example/gpu=h100``."""
    tolerations: tuple[str, ...] = ()
    """Taints that pods bear: ``nvidia.com/gpu`` or ``key=value:NoSchedule``."""
    topology: str = ""
    """Label of machines within one of whose values all pods must lie: ``topology.kubernetes.io/zone``."""
    exclusive: bool = False
    """No other job's pods in that part of the topology (JobSet's annotation exclusive-topology)."""
    lost_s: int = 60
    """Seconds without a sign of life of a machine after which its pod is replaced on another."""
    gather_s: int = 300
    """Seconds for which pods wait for each other before a run begins; who comes later joins it."""
    restarts: int = 20
    """Restarts that the job allows for, times ``nodes``: more of them, counted over all pods, end it as failed."""

    def check(self) -> None:
        """Refuses what the cluster would refuse, or what would take the launcher's own settings away."""
        for name in ("nodes", "gpus_per_node", "cpus_per_node"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ConfigError(f"kubernetes.{name} = {count}: give at least 1, or leave it out")
        for name, least in (("lost_s", 0), ("gather_s", 0), ("restarts", 0), ("user", 0)):
            count = getattr(self, name)
            if count is not None and count < least:
                raise ConfigError(f"kubernetes.{name} = {count}: give {least} or more")
        self._check_names()
        self._check_paths()
        self._check_quantities()
        self._check_pairs()

    def _check_names(self) -> None:
        if self.name and (len(self.name) > 63 or not _JOB_NAME.fullmatch(self.name)):
            raise ConfigError(
                f"kubernetes.name = {self.name!r} is no name of a job: small letters, digits and -, a letter first, "
                "63 characters at most"
            )
        for name in ("namespace", "queue"):
            text = getattr(self, name)
            if text and (len(text) > 63 or not re.fullmatch(LABEL, text)):
                raise ConfigError(
                    f"kubernetes.{name} = {text!r} is no name by RFC 1123: small letters, digits and -, 63 at most"
                )
        named = [(name, getattr(self, name)) for name in ("claim", "key_secret", "pull_secret", "service_account")]
        named += [("priority", self.priority), *(("env_secrets", text) for text in self.env_secrets)]
        for name, text in named:
            if text and (len(text) > 253 or not _SUBDOMAIN.fullmatch(text)):
                raise ConfigError(
                    f"kubernetes.{name} = {text!r} is no name by RFC 1123: small letters, digits, - and . between them"
                )
        if self.image and not re.fullmatch(r"[A-Za-z0-9][\w./:@-]*", self.image, re.ASCII):
            raise ConfigError(f"kubernetes.image = {self.image!r} is no image; write it as registry/name:tag")

    def _check_paths(self) -> None:
        for name in ("mount", "workdir"):
            text = getattr(self, name)
            path = PurePosixPath(text)
            if (text or name == "mount") and (not path.is_absolute() or ".." in path.parts or ":" in text):
                raise ConfigError(f"kubernetes.{name} = {text!r}: give an absolute path in the pods, as /shared")
        taken = ("/", "/dev", "/dev/shm", "/etc", "/proc", "/sys", "/tmp")
        if str(PurePosixPath(self.mount)) in taken:
            raise ConfigError(f"kubernetes.mount = {self.mount} would hide the image's own; give another, as /shared")

    def _check_quantities(self) -> None:
        for name in ("memory", "shm"):
            text = getattr(self, name)
            if text and not quantity_bytes(text):
                raise ConfigError(f"kubernetes.{name} = {text!r}: write a number and a unit, as 480Gi")
        if not self.shm:
            raise ConfigError("kubernetes.shm is empty: ranks need shared memory; write 16Gi, say")
        if self.memory and quantity_bytes(self.shm) > quantity_bytes(self.memory):
            raise ConfigError(
                f"kubernetes.shm = {self.shm} lies in the pod's memory, which is kubernetes.memory = {self.memory}; "
                "give less of it, or more memory"
            )
        if not _KEY.fullmatch(self.gpu_resource) or "/" not in self.gpu_resource:
            raise ConfigError(f"kubernetes.gpu_resource = {self.gpu_resource!r} is no resource, as nvidia.com/gpu")
        for text in self.resources:
            key, _, count = text.partition("=")
            if not _KEY.fullmatch(key) or not quantity_bytes(count):
                raise ConfigError(f"kubernetes.resources: {text!r} is no resource and its number, as rdma/hca=1")
            if key in (*_OWN_RESOURCES, self.gpu_resource):
                raise ConfigError(f"kubernetes.resources: {text} is set by other settings of kubernetes")

    def _check_pairs(self) -> None:
        for text in self.env:
            variable, equals, _ = text.partition("=")
            if not equals or not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):
                raise ConfigError(f"kubernetes.env: {text!r} is no variable, as NCCL_DEBUG=INFO")
            if variable.startswith(_OWN_VARIABLES):
                raise ConfigError(f"kubernetes.env: {variable} is set by the launcher, or tells another one")
        for text in self.node_selector:
            key, equals, value = text.partition("=")
            if not equals or not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
                raise ConfigError(f"kubernetes.node_selector: {text!r} is no label, as cloud.example/gpu=h100")
        for text in self.tolerations:
            toleration(text)
        if self.topology and not _KEY.fullmatch(self.topology):
            raise ConfigError(f"kubernetes.topology = {self.topology!r} is no label's key, as kubernetes.io/hostname")
        if self.exclusive and not self.topology:
            raise ConfigError("kubernetes.exclusive needs kubernetes.topology, the part that no other job may use")


def quantity_bytes(text: str) -> Decimal:
    """Returns a quantity of Kubernetes as a number; 0 for what is none."""
    match = _QUANTITY.fullmatch(text)
    return Decimal(match[1]) * _SCALES[match[2] or ""] if match else Decimal(0)


def toleration(text: str) -> dict[str, str]:
    """Returns the toleration that ``key[=value][:Effect]`` stands for.

    Raises:
        ConfigError: for another text.
    """
    pair, colon, effect = text.partition(":")
    key, equals, value = pair.partition("=")
    if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value) or (colon and effect not in _EFFECTS):
        raise ConfigError(
            f"kubernetes.tolerations: {text!r} is none; write key, key=value or key=value:NoSchedule, by the taint"
        )
    tolerated = {"key": key, "operator": "Equal" if equals else "Exists"}
    return tolerated | ({"value": value} if equals else {}) | ({"effect": effect} if effect else {})
