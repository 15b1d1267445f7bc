"""Rendezvous of the ranks: the store's socket, and the process group on top of it."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import LaunchError
from meshwright.launch.contract import RankContext

if TYPE_CHECKING:
    import torch.distributed as dist

LOOPBACK = "127.0.0.1"
"""Address of a single node's store: host names may resolve slowly, wrongly or not at all."""
RECORDED = "2000"
"""Number of collectives that NCCL's flight recorder keeps: far more than are pending at any moment."""
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
"""Name of the loopback interface."""
_SIOCGIFADDR = 0x8915
"""Source: linux/sockios.h."""


def open_store_socket(ranks: int) -> socket.socket:
    """Binds the store's socket to a free port of this node before any rank starts, so that the port stays reserved.

    Args:
        ranks: how many clients may connect at once.

    Returns:
        The listening socket; rank 0 inherits it and serves the store on it.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    # All ranks connect at once: the backlog must hold them.
    listener.listen(max(128, 2 * ranks))
    return listener


def address_to(host: str, port: int = 9) -> str:
    """Returns this node's own address on the route to another one, without sending anything.

    Raises:
        LaunchError: when there is no route, or the name isn't known.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a UDP socket sends nothing, but selects the route.
            probe.connect((host, port or 9))
        except OSError as error:
            raise LaunchError(f"no route to {host}: {error.strerror or error}; give the address of node 0") from error
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Returns the name of the network interface with an address; empty when unknown (Linux only)."""
    if address.startswith("127."):
        return LOOPBACK_INTERFACE
    if not sys.platform.startswith("linux"):
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return ""


def link_bytes_s(address: str) -> float | None:
    """Returns the nominal bytes per second of the interface with an address; None when it states none."""
    try:
        speed = int(Path(f"/sys/class/net/{interface_of(address)}/speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    # Mbit/s; virtual interfaces report -1.
    return speed * 1e6 / 8 if speed > 0 else None


def listen_at(address: str, port: int = 0, backlog: int = 128) -> socket.socket:
    """Listens at an address of this node, on a free port for port 0.

    Raises:
        LaunchError: when the address isn't this node's, or the port is taken.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # A port of the previous generation may still have connections in TIME_WAIT.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise LaunchError(f"can't listen at {address}:{port}: {error.strerror}; give another port") from error
    listener.listen(backlog)
    return listener


def open_store(context: RankContext, timeout_s: float) -> dist.Store:
    """Connects to the run's store; rank 0 serves it unless an agent does.

    Args:
        context: this rank's context.
        timeout_s: limit for the connection and for every later wait on a key.

    Raises:
        LaunchError: when the others can't be reached in time.
    """
    import torch.distributed as dist

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
    import torch
    import torch.distributed as dist

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
