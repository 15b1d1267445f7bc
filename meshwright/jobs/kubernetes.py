"""Training on Kubernetes: what is refused before a job is created, its creation, and the command of its pods."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from meshwright.config import read_toml
from meshwright.errors import ConfigError, LaunchError
from meshwright.jobs.epochs import with_counted_steps
from meshwright.jobs.hosts import command_arguments, count_ranks
from meshwright.jobs.launch_record import LaunchRecord, write_record
from meshwright.jobs.nodes import NodeOptions
from meshwright.jobs.prepare import prepare, text_config
from meshwright.jobs.progress import Say
from meshwright.jobs.run_directory import LAUNCH, claim_directory
from meshwright.launch.kubernetes import KubernetesLauncher, PodPlace
from meshwright.launch.kubernetes_manifest import RECIPE, dump_yaml
from meshwright.monitor.rundir import read_run
from meshwright.resilience.claims import read_presence
from meshwright.train.run_config import RunConfig

_GRACE_MARGIN_S = 30
"""Time beyond the ranks' own limit for the supervisor's end."""
_BEAT_S = 1.0
_SAY_S = 30.0


def run_digest(run_dir: str) -> str:
    """Returns the label's value for a run directory's path in the pods."""
    return hashlib.sha256(str(PurePosixPath(run_dir)).encode()).hexdigest()[:16]


def submit(args: Sequence[str], config: RunConfig, *, dry_run: bool, say: Say) -> tuple[str, str]:
    """Creates a run's job.

    Args:
        args: words of the command after ``train``.
        config: these words as settings.
        dry_run: create nothing.
        say: takes a line for people.

    Returns:
        The manifests as YAML, and the job's kind and name; empty for a dry run.

    Raises:
        ConfigError, ClusterError, PlanError: for settings that would fail in the pods.
        LaunchError: when the cluster refuses the job.
    """
    # Where the volume is mounted here too, another config's directory is seen before a pod sees it.
    claim_directory(config)
    words, recipe = _split_recipe(args)
    launcher = make_launcher(config, recipe)
    argv = _pod_arguments(words, config, launcher)
    manifests = dump_yaml(launcher.manifests(argv))
    for path in _paths_elsewhere(config):
        say(f"{path} isn't under kubernetes.mount = {config.kubernetes.mount}; the image must have it")
    if dry_run:
        return manifests, ""
    launcher.start(argv)
    _write_record(config, launcher)
    return manifests, f"{config.kubernetes.kind}/{launcher.name}"


def _split_recipe(args: Sequence[str]) -> tuple[list[str], str]:
    """Returns the words with the recipe's path in the pods, and the recipe's text."""
    words = list(args)
    if not words or words[0].startswith("-"):
        return words, ""
    path = Path(words[0])
    # Read as a recipe first, so that a file of another kind never becomes a ConfigMap.
    read_toml(path)
    return [RECIPE, *words[1:]], path.read_text(encoding="utf-8")


def _pod_arguments(words: Sequence[str], config: RunConfig, launcher: KubernetesLauncher) -> list[str]:
    argv = command_arguments(words, config, launcher.ranks)
    if config.launch.owner_s == 0:
        # The pod in a lost one's stead may start while that one still writes its checkpoint.
        argv += ["--launch.owner-s", str(launcher.grace_s)]
    return [*argv, "--on", "kubernetes"]


def make_launcher(config: RunConfig, recipe: str = "") -> KubernetesLauncher:
    """Returns the launcher of a run.

    Args:
        config: its settings.
        recipe: text of its recipe.

    Raises:
        ConfigError, ClusterError, PlanError: for settings that would fail in the pods.
    """
    kubernetes = config.kubernetes
    for name, example in (("image", "registry/meshwright:1"), ("claim", "shared-volume")):
        if not getattr(kubernetes, name):
            raise ConfigError(f"--on kubernetes needs --kubernetes.{name}, as {example}")
    _check_run_directory(config)
    per_node = kubernetes.gpus_per_node or kubernetes.cpus_per_node
    ranks = count_ranks(config, "kubernetes", kubernetes.nodes, kubernetes.gpus_per_node, per_node)
    if not ranks:
        # A container sees all cores of its machine, whatever it may use of them.
        raise ConfigError("how many ranks? give --kubernetes.gpus-per-node, --kubernetes.cpus-per-node or --devices")
    if not config.recovery.enabled and kubernetes.nodes > 1:
        raise ConfigError("pods meet by their supervisors; drop --recovery.enabled false")
    name = kubernetes.name or _job_name(config.run)
    return KubernetesLauncher(
        config=kubernetes, name=name, run_dir=config.run, digest=run_digest(config.run), recipe=recipe,
        grace_s=int(config.launch.stop_s) + _GRACE_MARGIN_S, rank_count=ranks,
    )  # fmt: skip


def _check_run_directory(config: RunConfig) -> None:
    mount, run = PurePosixPath(config.kubernetes.mount), PurePosixPath(config.run or "")
    if not config.run or not run.is_absolute() or ".." in run.parts or mount not in run.parents:
        raise ConfigError(
            f"run = {config.run or '(none)'} isn't under kubernetes.mount = {mount}, the volume that all pods share; "
            f"give --run {mount}/NAME, as the pods see it"
        )


def _job_name(run: str) -> str:
    """Returns the name of a job for a run directory: what RFC 1035 allows of the directory's name."""
    name = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(run).name.lower()).strip("-")
    return f"run-{name}".rstrip("-") if not name[:1].isalpha() else name


def _paths_elsewhere(config: RunConfig) -> list[str]:
    """Returns the absolute paths of text that lie outside of the volume."""
    mount = config.kubernetes.mount.rstrip("/") + "/"
    return [path for path in config.data.paths if path.startswith("/") and not path.startswith(mount)]


def _write_record(config: RunConfig, launcher: KubernetesLauncher) -> None:
    """Writes who started the run where the volume is mounted here too; elsewhere the job's label says it."""
    run_dir, job = Path(config.run), launcher.job
    if not Path(config.kubernetes.mount).is_dir():
        return
    with contextlib.suppress(OSError):
        (run_dir / LAUNCH).mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        record = LaunchRecord(
            launcher="kubernetes", job=f"{job.kind}/{job.name}", nodes=config.kubernetes.nodes, submitted=now,
            namespace=job.namespace,
        )  # fmt: skip
        write_record(run_dir, record)


def join_run(config: RunConfig, place: PodPlace, say: Say) -> NodeOptions | None:
    """Waits until all pods are present, or the run is under way.

    Args:
        config: settings of the command.
        place: which pod this is.
        say: takes a line for people.

    Returns:
        Which node of the run this is; None for a run of one.

    Raises:
        LaunchError: when the run's key can't be read.
    """
    if place.nodes == 1:
        return None
    key_file = _copy_key(place.key_file) if place.key_file else None
    _gather(place, Path(config.run), config.kubernetes.gather_s, say)
    # Nodes find the leader by its claim in the run directory, so each meets at its own address.
    return NodeOptions(nodes=place.nodes, node=place.node, meet=place.address, key_file=key_file)


def is_finished(config: RunConfig, say: Say) -> bool:
    """Whether the run has reached its last step, so that a pod in a lost one's stead has nothing to do.

    Args:
        config: settings of the command.
        say: takes a line for people where the text is looked at, for the steps of epochs.
    """
    run_data = read_run(Path(config.run))
    if config.train.epochs and run_data.state == "finished":
        config = with_counted_steps(config, prepare(text_config(config.model, config.data), say=say))
    return not config.train.epochs and run_data.has_done(config.train.steps)


def _copy_key(secret: str) -> Path:
    """Copies the key of a Secret into a file of this user alone; Kubernetes mounts links to files of root."""
    path = Path(f"/tmp/meshwright-{os.getuid()}.key")
    try:
        text = Path(secret).read_bytes()
    except OSError as error:
        raise LaunchError(f"the run's key can't be read ({error}); the Secret needs an entry named key") from None
    try:
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(text)
    except OSError as error:
        raise LaunchError(f"the run's key can't be copied to {path} ({error.strerror}); pods need /tmp") from None
    return path


def _gather(place: PodPlace, run_dir: Path, limit_s: float, say: Say) -> None:
    """Waits until all pods have started, a supervisor already works, or time is up.

    Each pod renews a file of its own; one whose file or whose supervisor's file changes is there. Clocks don't matter.
    """
    folder, numbers = run_dir / LAUNCH, range(place.nodes)
    folder.mkdir(parents=True, exist_ok=True)
    first_stamps: dict[str, int] = {}
    present = {place.node}
    deadline, said_at = time.monotonic() + limit_s, time.monotonic()
    while True:
        (folder / f"pod-{place.node}").write_text(f"{time.monotonic_ns()}\n", encoding="ascii")
        supervisors = read_presence(run_dir, numbers)
        if any(first_stamps.setdefault(f"node-{node}", stamp) != stamp for node, stamp in supervisors.items()):
            return
        for node in numbers:
            with contextlib.suppress(OSError, ValueError):
                stamp = int((folder / f"pod-{node}").read_text(encoding="ascii"))
                if first_stamps.setdefault(f"pod-{node}", stamp) != stamp:
                    present.add(node)
        if len(present) == place.nodes:
            # Once more, so that those who have just come see this pod's file change.
            time.sleep(2 * _BEAT_S)
            (folder / f"pod-{place.node}").write_text(f"{time.monotonic_ns()}\n", encoding="ascii")
            return
        missing = sorted(set(numbers) - present)
        if time.monotonic() > deadline:
            say(f"pods {', '.join(map(str, missing))} aren't there after {limit_s:g} s; they join when they come")
            return
        if time.monotonic() - said_at > _SAY_S:
            said_at = time.monotonic()
            say(f"waits for pods {', '.join(map(str, missing))}")
        time.sleep(_BEAT_S)
