"""The check ``loopback``: ranks of one node can reach each other over the loopback interface, on free ports."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

from meshwright.doctor.contract import Check, Observation, Subject
from meshwright.launch.addresses import LOOPBACK, open_store_socket

_CONNECT_S = 3.0
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
RANK_FILES = 256
"""Descriptors of a rank: its log, data and checkpoint files, and pairs with its neighbours in some groups."""


def examine(subject: Subject) -> Observation:
    """Listens on a free port and connects to it, as the ranks' store does, and reads the limits."""
    findings = []
    try:
        with open_store_socket(subject.slots) as listener:
            socket.create_connection(listener.getsockname(), timeout=_CONNECT_S).close()
    except OSError as error:
        findings.append(
            f"a port of {LOOPBACK} can't be reached on this node itself ({error.strerror or error}), where the ranks "
            "meet; bring the interface up: ip link set lo up"
        )
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # A rank connects to every other one.
    required = RANK_FILES + 2 * subject.slots * subject.nodes
    if soft != resource.RLIM_INFINITY and soft < required:
        findings.append(f"a process may open {soft} files, and a rank takes up to {required}; try ulimit -n 65536")
    first, last = _port_range()
    return Observation(
        value=f"reachable; free ports {first}-{last}, open files {soft}",
        findings=tuple(findings),
        facts={"port_range": [first, last], "open_files": soft},
    )


def _port_range() -> tuple[int, int]:
    """Returns the first and last port that the kernel gives to sockets; IANA's range where it doesn't say."""
    try:
        first, last = _RANGE.read_text(encoding="ascii").split()
        return int(first), int(last)
    except (OSError, ValueError):
        return 49152, 65535


CHECK = Check(name="loopback", purpose="ranks of a node reach each other", limit_s=10.0, examine=examine)
