"""The choice of a launcher: torchrun's environment if it is set, else forks on this node."""

from __future__ import annotations

from typing import Literal

from meshwright.errors import ClusterError
from meshwright.launch.config import LaunchConfig
from meshwright.launch.devices import found_devices
from meshwright.launch.failure import RankLabel
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.torchrun import TorchrunLauncher, torchrun_context


def choose_launcher(
    ranks: int | None = None,
    *,
    kind: Literal["cpu", "cuda"] | None = None,
    label: RankLabel | None = None,
    config: LaunchConfig | None = None,
    run_id: str | None = None,
) -> ForkLauncher | TorchrunLauncher:
    """Returns the launcher for this command's ranks.

    Args:
        ranks: number on all nodes; all devices of this node, or torchrun's world, when None.
        kind: of devices; GPUs if any, when None.
        label: names a rank's coordinates in the mesh for messages.
        config: limits.
        run_id: name of the run.

    Raises:
        ClusterError: when there are fewer GPUs than ranks, or torchrun started another number of ranks.
    """
    context = torchrun_context(gpus=0 if kind == "cpu" else None)
    if context is None:
        return ForkLauncher(ranks, devices=found_devices(ranks, kind), label=label, config=config, run_id=run_id)
    # Under torchrun the number of ranks is already fixed.
    if ranks is not None and ranks != context.world:
        raise ClusterError(
            f"devices = {ranks}, but torchrun started {context.world} ranks; leave devices out under torchrun"
        )
    return TorchrunLauncher(context, label=label)
