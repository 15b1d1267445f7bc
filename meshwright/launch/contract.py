"""The contract of launchers, and the context that each rank gets."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshwright.launch.signals import StopFlag


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """A rank's identity, device and rendezvous."""

    rank: int
    """Global rank, 0 to world - 1."""
    world: int
    """Number of ranks on all nodes."""
    local_rank: int
    """Index among the ranks of this node."""
    local_world: int
    """Number of ranks on this node."""
    device: str = "cpu"
    """``cpu`` or ``cuda:<i>``."""
    host: str = "127.0.0.1"
    """Host of the rendezvous store."""
    port: int = 0
    """Port of that store; 0 without a store."""
    listen_fd: int | None = None
    """Listening socket of the store, bound by the launcher so that no other process takes the port; rank 0 only."""
    agent_store: bool = False
    """True when torchrun's agent serves the store, and rank 0 must not."""
    generation: int = 0
    """Generation of these ranks: how often ranks of this run were started before."""
    run_id: str = "run"
    """Name of the run, part of every key in the store."""
    nodes: int = 1
    """Number of nodes."""
    node: int | None = None
    """Number of this node, where each has a supervisor of its own."""
    interface: str = ""
    """Network interface by which other nodes reach this one; empty for the library's own choice."""
    stop: StopFlag = field(default_factory=StopFlag, compare=False, repr=False)
    """Raised when the user asks the run to end."""


@dataclass(frozen=True, kw_only=True)
class NodeRanks:
    """A node's ranks within the world, and the rendezvous of all nodes."""

    node: int
    """Number of this node."""
    nodes: int
    """Nodes with ranks."""
    first: int
    """Global rank of this node's first rank."""
    world: int
    """Ranks on all nodes."""
    host: str
    """Host of the store."""
    port: int
    """Port of the store."""
    listener: socket.socket | None = None
    """The store's listening socket, on the node of rank 0; the launcher closes it."""
    interface: str = ""
    """Network interface by which the other nodes reach this one."""


Entry = Callable[..., Any]
"""A rank's function of the `RankContext` and the arguments of `Launcher.start`; it returns a picklable value."""


@dataclass(frozen=True, slots=True)
class HostCommand:
    """One command line that a launcher runs, as its dry run shows it."""

    host: str
    """Where it runs."""
    argv: tuple[str, ...]
    """The words of the command."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables set for it."""


class CommandLauncher(Protocol):
    """Starts a command on every node, which starts the ranks there; leaves no process behind."""

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""

    def start(self, argv: Sequence[str]) -> None:
        """Starts ``meshwright <argv>`` on every node and returns at once.

        Raises:
            LaunchError: when it can't be started; nothing is left running then.
        """

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until every node is done, ``timeout_s`` seconds at most.

        Raises:
            LaunchError: for the first node that failed; the others have been ended then.
        """

    def cancel(self, grace_s: float = 0.0) -> None:
        """Ends the command everywhere: by request, and after ``grace_s`` seconds by force."""

    def commands(self, argv: Sequence[str]) -> list[HostCommand]:
        """Returns the dry run: which commands would start ``meshwright <argv>`` and where."""


class Launcher(Protocol):
    """Starts the ranks of a run, waits for them, and leaves no process behind."""

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""

    @property
    def interrupted(self) -> bool:
        """True when the user asked the run to end while it was under way."""

    def start(self, entry: Entry, *args: Any) -> None:
        """Starts every rank with ``entry(context, *args)`` and returns at once.

        Raises:
            LaunchError: when the ranks can't be started; none is left running then.
        """

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """Waits until all ranks have ended.

        Args:
            timeout_s: limit in seconds; None waits as long as the ranks work.

        Returns:
            What each rank returned, by rank.

        Raises:
            MeshwrightError: the first failure; a rank's own `MeshwrightError` keeps its class. All ranks are gone then.
            KeyboardInterrupt: at the second Ctrl-C.
        """

    def cancel(self, grace_s: float = 0.0) -> None:
        """Ends all ranks: by request, and after ``grace_s`` seconds by force. Does nothing when none runs."""

    def commands(self, argv: Sequence[str]) -> list[HostCommand]:
        """Returns the dry run: which commands would start ``meshwright <argv>`` and where."""
