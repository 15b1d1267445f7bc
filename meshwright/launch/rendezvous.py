"""Rendezvous of the ranks: the run's store, and the process group on top of it."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.errors import LaunchError
from meshwright.launch.addresses import LOOPBACK_INTERFACE
from meshwright.launch.contract import RankContext

RECORDED = "2000"
"""Number of collectives that NCCL's flight recorder keeps: far more than are pending at any moment."""


def open_store(context: RankContext, timeout_s: float) -> dist.Store:
    """Connects to the run's store; rank 0 serves it unless an agent does.

    Args:
        context: this rank's context.
        timeout_s: limit for the connection and for every later wait on a key.

    Raises:
        LaunchError: when the others can't be reached in time.
    """
    serve = context.rank == 0 and not context.agent_store
    try:
        store = dist.TCPStore(
            context.host,
            context.port,
            None if context.agent_store else context.world,
            is_master=serve,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=context.listen_fd if serve else None,
        )
    except RuntimeError as error:
        raise LaunchError(
            f"rank {context.rank} could not reach the store at {context.host}:{context.port} within {timeout_s:g} s: "
            f"{error}; check that rank 0 runs, that the port is open between the nodes, or raise launch.group_s"
        ) from error
    # Keys of another run or generation must not be mistaken for this one's.
    return dist.PrefixStore(f"{context.run_id}/{context.generation}", store)


def init_group(
    context: RankContext,
    backend: str | None = None,
    *,
    timeout_s: float = 600.0,
    group_s: float = 60.0,
    store: dist.Store | None = None,
) -> dist.Store:
    """Forms the default process group of this run.

    Args:
        context: this rank's context.
        backend: of `torch.distributed.init_process_group`; None for gloo on CPU ranks, and on GPU ranks gloo for CPU
            tensors with NCCL for GPU tensors.
        timeout_s: limit of a collective.
        group_s: limit for the ranks to find each other.
        store: an open store; for a second group, that of the first under another `PrefixStore`.

    Returns:
        The store of the rendezvous.

    Raises:
        LaunchError: when the group doesn't form in time, or there is one already.
    """
    if dist.is_initialized():
        raise LaunchError("this rank is in a process group already; destroy it before forming another")
    use_gpu = context.device.startswith("cuda")
    if context.node is not None:
        # TCPStore resolves the names of its clients, which costs 10 s by default when no name server answers.
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    if context.interface:
        # Gloo and NCCL otherwise choose an interface themselves, perhaps one that other nodes can't reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", context.interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", context.interface)
    elif context.nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    store = store if store is not None else open_store(context, group_s)
    if use_gpu:
        # NCCL's flight recorder must be enabled before the first communicator exists.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED)
        # At a collective's limit NCCL's watchdog would write the recorder's dump first, for which it waits for the
        # interpreter; seen on an H100: a rank at its end then hung for good. Here a supervisor asks for the dump.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        # The watchdog ends the process only when it has waited for that dump: 15 s and more by default, also where
        # none is written, in which a rank whose collective came after all went on.
        # Source: ProcessGroupNCCL.cpp, broadcastDumpSignal and the end of the watchdog's loop.
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1")
        torch.cuda.set_device(torch.device(context.device))
    try:
        dist.init_process_group(
            backend or ("cpu:gloo,cuda:nccl" if use_gpu else "gloo"),
            store=store,
            rank=context.rank,
            world_size=context.world,
            timeout=timedelta(seconds=timeout_s),
            device_id=torch.device(context.device) if use_gpu else None,
        )
    except (RuntimeError, ValueError) as error:
        raise LaunchError(f"rank {context.rank} of {context.world}: the process group did not form: {error}") from error
    return store
