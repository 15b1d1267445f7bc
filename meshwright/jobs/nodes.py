"""A run over several nodes, a command on each: which node this is, and where the nodes meet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.launch.addresses import LOOPBACK, address_to, interface_of, listen_at
from meshwright.launch.contract import NodeRanks
from meshwright.launch.devices import Devices, found_devices
from meshwright.launch.fork import ForkLauncher
from meshwright.train.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class ResolvedNode:
    """What `NodeOptions` say, completed by what this machine has."""

    node: int
    """Its number, from 0."""
    nodes: int
    """Number of nodes of the run."""
    slots: int
    """Ranks on this node."""
    ranks: int
    """Ranks on all nodes."""
    address: str
    """Address by which the other nodes reach this one."""
    port: int
    """Port on which it listens; any free port for 0."""
    devices: Devices
    """This node's devices, one rank each."""
    key_file: Path | None = None
    """Where this node has the run's key; None for the run directory's."""


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Identifies this node in a run over several: ``NodeOptions(nodes=2, node=1, meet="10.0.0.1:29500")``."""

    nodes: int
    """Number of nodes of the run."""
    node: int
    """Number of this node, from 0."""
    slots: int | None = None
    """Ranks on this node; all of its devices when None."""
    meet: str
    """Address of node 0, with or without a port: ``HOST:PORT``."""
    key_file: Path | None = None
    """Where this node has the run's key; None for the run directory's."""

    def resolve(self, config: RunConfig) -> ResolvedNode:
        """Returns the options completed by this machine's devices and address.

        Raises:
            ConfigError: when the options contradict the config.
            ClusterError: when more GPUs are asked for than there are.
        """
        if not config.run:
            raise ConfigError("--nodes needs --run, the same on every node, in a folder that all of them share")
        if config.trials:
            raise ConfigError("trials start ranks of their own, on one node; drop trials")
        if self.slots is None and config.devices is not None and config.devices % self.nodes:
            raise ConfigError(f"devices = {config.devices} on {self.nodes} nodes: give each node's --slots")
        devices_per_node = config.devices // self.nodes if config.devices is not None else None
        devices = found_devices(self.slots or devices_per_node)
        host, _, port = self.meet.partition(":")
        return ResolvedNode(
            node=self.node,
            nodes=self.nodes,
            slots=devices.count,
            ranks=config.devices or devices.count * self.nodes,
            # The other nodes' own addresses follow from the route to node 0.
            address=(host if self.node == 0 else address_to(host)) if host else LOOPBACK,
            port=int(port or 0) if self.node == 0 else 0,
            devices=devices,
            key_file=self.key_file,
        )

    def group_launcher(self, slots: int) -> ForkLauncher:
        """Returns a launcher of this node's ranks of one process group over all nodes, without a supervisor.

        Args:
            slots: ranks on each node.

        Raises:
            ConfigError: when ``meet`` has no port: without a supervisor no node can announce a free one.
            LaunchError: when node 0 can't listen there, or there is no route to it.
            ClusterError: when more GPUs are asked for than there are.
        """
        host, _, port = self.meet.partition(":")
        if not host or not port:
            raise ConfigError(f"--meet {self.meet}: give address and port of node 0, as --meet 10.0.0.1:29500")
        address = host if self.node == 0 else address_to(host)
        listener = listen_at(address, int(port)) if self.node == 0 else None
        node_ranks = NodeRanks(
            node=self.node,
            nodes=self.nodes,
            first=self.node * slots,
            world=self.nodes * slots,
            host=host,
            port=int(port),
            listener=listener,
            interface=interface_of(address),
        )
        return ForkLauncher(slots, devices=found_devices(slots), run_id="together", node_ranks=node_ranks)
