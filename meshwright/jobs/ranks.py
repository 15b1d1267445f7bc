"""The job ``launch_ranks``: runs a function on ranks of this node, within a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import torch.distributed as dist

from meshwright.launch.choice import choose_launcher
from meshwright.launch.contract import RankContext
from meshwright.launch.rendezvous import init_group

R = TypeVar("R")


def launch_ranks(
    work: Callable[..., R],
    ranks: int | None = None,
    *args: object,
    kind: Literal["cpu", "cuda"] | None = None,
    timeout_s: float | None = None,
) -> list[R]:
    """Calls ``work(context, *args)`` on each rank, in torch's default process group, and returns what each returned.

    The ranks are forked from this process, which must have run neither a backward pass nor CUDA. Under torchrun this
    process is one of the ranks, and the list holds its own result alone.

    Example::

        def work(context):
            strategy = meshwright.HybridParallelStrategy("shard=2,zero=3")
            ...

        meshwright.launch_ranks(work, 2, kind="cpu")

    Args:
        work: what a rank does; its result must be picklable.
        ranks: how many; all GPUs, else all cores, when None.
        *args: handed to every rank.
        kind: what they run on; GPUs when there are any, when None.
        timeout_s: limit for all of it; None waits as long as the ranks work.

    Raises:
        ClusterError: when there are fewer GPUs than ranks.
        RankError: when a rank failed; all ranks are gone then.
    """
    return choose_launcher(ranks, kind=kind).run(_on_rank, work, args, timeout_s=timeout_s)


def _on_rank(context: RankContext, work: Callable[..., R], args: tuple[object, ...]) -> R:
    """Runs a rank's work in its process group; where the work fails, no rank waits for the others."""
    init_group(context)
    result = work(context, *args)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return result
