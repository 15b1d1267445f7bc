"""A Ray cluster as a launcher sees it: its nodes' resources, a node reserved and started, a node lost.

Nothing else imports Ray, which is an optional package.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from meshwright.errors import LaunchError
from meshwright.launch.ray_node import RayNode, ReadyNode, SharedFile

_METHODS = 4
"""Methods of an actor that run beside each other: the supervisor's, a report, a request to end."""
_POLL_S = 0.1
_SHOWN_KINDS = 6


class NodeLost(Exception):
    """A node's actor is gone, with its worker, its raylet or its host."""


class ClusterNode(Protocol):
    """An actor on one node of a cluster."""

    def address(self) -> str | None:
        """Returns the node's address once its actor is ready; None before.

        Raises:
            NodeLost: when the actor is gone.
            LaunchError: when no supervisor can run there.
        """

    def run(self, argv: Sequence[str], environment: Mapping[str, str], workdir: str) -> None:
        """Starts the supervisor, and returns at once."""

    def status(self) -> int | None:
        """Returns the supervisor's exit status; None while it runs.

        Raises:
            NodeLost: when the actor is gone.
            LaunchError: when the supervisor can't be started.
        """

    def terminate(self) -> None:
        """Asks the supervisor to end the run with a checkpoint."""

    def kill(self) -> None:
        """Ends the actor at once, and the supervisor with it."""


class NodeCluster(Protocol):
    """A cluster that nodes are asked of."""

    def node_resources(self) -> list[dict[str, float]]:
        """Returns the resources of each live node, used or not."""

    def reserve(self, bundle: Mapping[str, float], nodes: int) -> None:
        """Asks for nodes with these resources each."""

    def is_reserved(self) -> bool:
        """Whether all nodes are there; waits a moment."""

    def start_node(self, node: int, shared: SharedFile, output: str) -> ClusterNode:
        """Asks for an actor on a node that was reserved.

        Args:
            node: its number in the run.
            shared: by which it checks the run directory.
            output: file for what its supervisor prints.
        """


class RayCluster(NodeCluster):
    """A connection to a Ray cluster; a context manager that leaves no actor behind.

    Args:
        address: ``auto``, ``HOST:PORT`` or ``ray://HOST:PORT``.

    Raises:
        LaunchError: when Ray isn't installed, or no cluster answers there.
    """

    def __init__(self, address: str) -> None:
        self._ray = connect_to_ray(address)
        self._actors: list[_RayActor] = []
        self._group: Any = None
        self._bundle: dict[str, float] = {}

    @property
    def job(self) -> str:
        """Ray's id of this job."""
        return str(self._ray.get_runtime_context().get_job_id())

    def node_resources(self) -> list[dict[str, float]]:
        """Returns the resources of each live node, used or not."""
        return [dict(node["Resources"]) for node in self._ray.nodes() if node["Alive"]]

    def reserve(self, bundle: Mapping[str, float], nodes: int) -> None:
        """Asks for a placement group of a bundle a node."""
        self._bundle = dict(bundle)
        # STRICT_SPREAD: no two bundles on one node. A lost node's bundle is placed again by Ray, where there is room.
        self._group = self._ray.util.placement_group([self._bundle] * nodes, strategy="STRICT_SPREAD")

    def is_reserved(self) -> bool:
        """Whether the placement group stands; waits a moment."""
        return bool(self._group.wait(_POLL_S))

    def start_node(self, node: int, shared: SharedFile, output: str) -> ClusterNode:
        """Asks for an actor in a node's bundle."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=node
        )
        others = {name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")}
        # Never restarted by Ray: a new actor is asked for, so that this process knows which supervisor it speaks of.
        options = self._ray.remote(RayNode).options(
            num_cpus=self._bundle["CPU"], num_gpus=self._bundle.get("GPU", 0), resources=others, max_restarts=0,
            max_task_retries=0, max_concurrency=_METHODS, scheduling_strategy=strategy,
        )  # fmt: skip
        actor = _RayActor(self._ray, options.remote(node, output), shared)
        self._actors.append(actor)
        return actor

    def __enter__(self) -> Self:
        """Returns the connection."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kills the actors, removes the placement group and disconnects."""
        # What is lost meanwhile can't be ended any more; Ray itself ends what a job leaves.
        for actor in self._actors:
            actor.kill()
        with contextlib.suppress(Exception):
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
        with contextlib.suppress(Exception):
            self._ray.shutdown()


class _RayActor(ClusterNode):
    def __init__(self, ray: Any, handle: Any, shared: SharedFile) -> None:
        self._ray, self._handle = ray, handle
        self._report = handle.report.remote(shared)
        self._status: Any = None

    def address(self) -> str | None:
        """Returns the node's address once its actor is ready."""
        report: ReadyNode | None = self._result(self._report)
        if report is None:
            return None
        if report.problem:
            raise LaunchError(f"{report.host} {report.problem}")
        return report.address

    def run(self, argv: Sequence[str], environment: Mapping[str, str], workdir: str) -> None:
        """Starts the supervisor."""
        self._status = self._handle.run.remote(list(argv), dict(environment), workdir)

    def status(self) -> int | None:
        """Returns the supervisor's exit status; None while it runs."""
        status: int | None = self._result(self._status)
        return status

    def terminate(self) -> None:
        """Asks the supervisor to end the run."""
        with contextlib.suppress(Exception):
            self._handle.terminate.remote()

    def kill(self) -> None:
        """Ends the actor's process."""
        with contextlib.suppress(Exception):
            self._ray.kill(self._handle, no_restart=True)

    def _result(self, reference: Any) -> Any:
        """Returns what a method returned; None while it runs."""
        ready, _ = self._ray.wait([reference], timeout=0)
        if not ready:
            return None
        try:
            return self._ray.get(reference)
        # Unavailable is taken for lost: whether the actor lives is only known when it answers again.
        except self._ray.exceptions.RayActorError as error:
            raise NodeLost(first_sentence(error)) from None
        except self._ray.exceptions.RayError as error:
            raise LaunchError(f"a node's actor failed: {_last_line(error)}") from None


def missing_nodes(resources: Sequence[Mapping[str, float]], bundle: Mapping[str, float], nodes: int) -> str:
    """Returns what a cluster lacks for some nodes, and what it has; an empty text when it has them.

    Args:
        resources: of each of its nodes.
        bundle: what each node of the run needs.
        nodes: how many the run needs.
    """
    large_enough = sum(all(node.get(name, 0.0) >= amount for name, amount in bundle.items()) for node in resources)
    if large_enough >= nodes:
        return ""
    kinds = Counter(format_resources({name: node.get(name, 0.0) for name in bundle}) for node in resources)
    texts = [f"{count} x {kind}" for kind, count in kinds.most_common(_SHOWN_KINDS)]
    texts += [f"{len(kinds) - _SHOWN_KINDS} more kinds of nodes"] if len(kinds) > _SHOWN_KINDS else []
    return (
        f"ray.nodes = {nodes} need {format_resources(bundle)} each, and the cluster has {large_enough} such nodes, "
        f"among {', '.join(texts) or 'none'}"
    )


def format_resources(resources: Mapping[str, float]) -> str:
    """Returns resources as ``8 CPU + 8 GPU``."""
    return " + ".join(f"{amount:g} {name}" for name, amount in resources.items())


def connect_to_ray(address: str) -> Any:
    """Returns Ray's module, connected to a cluster.

    Args:
        address: ``auto``, ``HOST:PORT`` or ``ray://HOST:PORT``.

    Raises:
        LaunchError: when Ray isn't installed, or no cluster answers there.
    """
    try:
        import ray
    except ImportError as error:
        raise LaunchError(f"Ray isn't installed here ({error}): pip install 'meshwright[ray]'") from None
    try:
        # Never a cluster of this machine alone, which ray.init starts where no address is given.
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except Exception as error:
        raise LaunchError(
            f"no Ray cluster answers at ray.address = {address}: {first_sentence(error)}; ray start --head starts one"
        ) from None
    return ray


def first_sentence(error: Exception) -> str:
    """Returns the first sentence of an error's message."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line.partition(". ")[0].rstrip(".")


def _last_line(error: Exception) -> str:
    """Returns the line of a remote traceback that names the exception."""
    return next(reversed(str(error).strip().splitlines()), type(error).__name__)
