"""Ranks started by torchrun: every process reads its rank from the environment and runs the same command."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import LaunchError, MeshwrightError
from meshwright.forking import die_with_parent
from meshwright.launch.contract import Entry, HostCommand, Launcher, RankContext
from meshwright.launch.devices import count_gpus
from meshwright.launch.failure import RankLabel, prefixed, rank_prefix
from meshwright.launch.signals import STOP_SIGNAL

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets. Source: torch.distributed.run, Environment Variables."""


def torchrun_context(environment: Mapping[str, str] | None = None, gpus: int | None = None) -> RankContext | None:
    """Reads this process's context from torchrun's environment variables.

    Args:
        environment: variables; the process's own when None.
        gpus: GPUs of this node; counted when None.

    Returns:
        The context, or None when torchrun did not start this process.

    Raises:
        LaunchError: when the variables are incomplete or contradict each other, or when the agent's restarts would
            rendezvous at a store that still holds the addresses of the previous ranks.
    """
    values = os.environ if environment is None else environment
    missing = [name for name in PLACE if name not in values]
    # Other launchers set some of these variables too: only both mean torchrun.
    if "RANK" in missing or "WORLD_SIZE" in missing:
        return None
    if missing:
        raise LaunchError(
            f"RANK and WORLD_SIZE are set, but {', '.join(missing)} not; start with torchrun, which sets all of "
            f"{', '.join(PLACE)}, or unset RANK and WORLD_SIZE"
        )
    rank, world, local_rank, local_world, port = (_number(values, name) for name in PLACE if name != "MASTER_ADDR")
    if not (0 <= rank < world and 0 <= local_rank < local_world <= world):
        raise LaunchError(
            f"RANK={rank}, WORLD_SIZE={world}, LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_world} contradict "
            "each other: a rank is below its world's size; start with torchrun"
        )
    agent_store = values.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    _check_restarts(values, agent_store)
    gpu_count = count_gpus() if gpus is None else gpus
    if 0 < gpu_count < local_world:
        raise LaunchError(
            f"{local_world} ranks on this node, but it has {gpu_count} usable GPUs; run torchrun with --nproc-per-node="
            f"{gpu_count}, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
        )
    return RankContext(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        device=f"cuda:{local_rank}" if gpu_count else "cpu",
        host=values["MASTER_ADDR"],
        port=port,
        agent_store=agent_store,
        generation=int(values.get("TORCHELASTIC_RESTART_COUNT", "0")),
        run_id=values.get("TORCHELASTIC_RUN_ID", "torchrun"),
        # GROUP_WORLD_SIZE is the agent's number of nodes; without it, assume equal nodes.
        nodes=max(1, int(values.get("GROUP_WORLD_SIZE", "0")) or -(-world // local_world)),
    )


def _number(values: Mapping[str, str], name: str) -> int:
    try:
        return int(values[name])
    except ValueError:
        raise LaunchError(f"{name}={values[name]!r} is not a whole number; torchrun sets it: use it") from None


def _check_restarts(values: Mapping[str, str], shared: bool) -> None:
    if shared and int(values.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise LaunchError(
            f"torchrun may restart the ranks (--max-restarts={values['TORCHELASTIC_MAX_RESTARTS']}) at a store that "
            "keeps the addresses of the dead ones, where a restart fails or hangs; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, or --max-restarts=0"
        )


class TorchrunLauncher(Launcher):
    """Runs this process's rank in this process; torchrun watches it and the others. A `Launcher`."""

    def __init__(self, context: RankContext, *, label: RankLabel | None = None) -> None:
        """Wraps the context of `torchrun_context`; ``label`` names a rank's coordinates."""
        self.context = context
        self.label = label
        """Names a rank's coordinates for messages; may be set until `wait`."""
        self._work: tuple[Entry, tuple[Any, ...]] | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.context.world

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.context.nodes

    @property
    def interrupted(self) -> bool:
        """True when this rank was asked to end."""
        return self.context.stop.requested

    def commands(self, argv: Sequence[str]) -> list[HostCommand]:
        """Returns the torchrun command of this node."""
        context = self.context
        command = (
            *(sys.executable, "-m", "torch.distributed.run"),
            f"--nproc-per-node={context.local_world}",
            *((f"--nnodes={context.nodes}",) if context.nodes > 1 else ("--standalone",)),
            *("-m", "meshwright", *argv),
        )
        return [HostCommand("localhost", command)]

    def start(self, entry: Entry, *args: Any) -> None:
        """Ties this process's life to the agent's, and handles the agent's signals; `wait` does the work."""
        die_with_parent()
        # The agent forwards its signals: Ctrl-C as SIGINT, the end of the job as SIGTERM.
        self.context.stop.install(STOP_SIGNAL, signal.SIGINT, signal.SIGTERM)
        self._work = entry, args

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """Runs this rank's work here; the agent ends it when another rank fails.

        Returns:
            A list with what this rank returned, alone.

        Raises:
            MeshwrightError: as the entry raised it, with the rank's prefix.
        """
        if self._work is None:
            raise LaunchError("nothing was started; call start first")
        entry, args = self._work
        try:
            return [entry(self.context, *args)]
        except MeshwrightError as error:
            raise prefixed(error, rank_prefix(self.context.rank, self.label)) from error

    def run(self, entry: Entry, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Starts and waits; see `start` and `wait`."""
        self.start(entry, *args)
        return self.wait(timeout_s)

    def cancel(self, grace_s: float = 0.0) -> None:
        """Asks this rank to end; the agent ends the others."""
        self.context.stop.request()
