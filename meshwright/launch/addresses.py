"""Addresses, interfaces and listening sockets of this node: what ranks and agents need before they can meet."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
from pathlib import Path

from meshwright.errors import LaunchError

LOOPBACK = "127.0.0.1"
"""Address of a single node's store: host names may resolve slowly, wrongly or not at all."""
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
