"""Networks of this machine joined by wires whose rate and delay are held: namespaces, a bridge, ``tc``. Needs root.

Each node has one wire to a switch. ``tc tbf`` holds the rate of both its directions. The delay of what a node sends is
``tc netem``'s where the kernel has it; elsewhere this module, run as a program, holds frames back between two TAP
devices, whose frames are as long as a network card's segments (65,000 bytes) so that it is seldom awake.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FIRST_ADDRESS = "10.79.0.1"
"""Of the first node; the others follow."""
LONG_MTU = 65000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET = 0x40000000


@contextmanager
def networks(rate: str, delay: str = "0ms", nodes: int = 2) -> Iterator[list[str]]:
    """Yields the names of networks that are joined by a switch.

    Args:
        rate: of each direction of a node's wire, as tc writes it; ``none`` for an unlimited one.
        delay: of what a node sends, as in ``20ms``.
        nodes: networks.
    """
    names, hub = [f"slow{os.getpid()}n{node}" for node in range(nodes)], f"slow{os.getpid()}hub"
    relay: subprocess.Popen[bytes] | None = None
    try:
        for name in [*names, hub]:
            run_ip("netns", "add", name)
            run_ip("-n", name, "link", "set", "lo", "up")
        run_ip("-n", hub, "link", "add", "switch", "type", "bridge")
        run_ip("-n", hub, "link", "set", "switch", "up")
        relays = delay != "0ms" and not _has_netem(hub)
        for node, name in enumerate(names):
            _add_wire(name, hub, node, relays)
            if delay != "0ms" and not relays:
                _run_tc(name, "wire", "root handle 1: netem limit 100000 delay", delay)
            if rate != "none":
                place = "parent 1:1 handle 10:" if delay != "0ms" and not relays else "root"
                _run_tc(name, "wire", f"{place} tbf burst 256kb latency 100ms rate", rate)
                _run_tc(hub, f"port{node}", "root tbf burst 256kb latency 100ms rate", rate)
        if relays:
            relay = subprocess.Popen([sys.executable, __file__, delay, hub, *names])
        yield names
    finally:
        if relay is not None:
            relay.terminate()
            relay.wait(10)
        for name in [*names, hub]:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def run_ip(*words: str) -> None:
    """Runs ``ip`` with some words; raises where it fails."""
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


def _run_tc(network: str, device: str, words: str, value: str) -> None:
    run_ip("netns", "exec", network, "tc", "qdisc", "add", "dev", device, *words.split(), value)


def _has_netem(network: str) -> bool:
    """Returns whether the kernel delays packets by itself, tried on a network's loopback."""
    try:
        _run_tc(network, "lo", "root netem delay", "1ms")
    except subprocess.CalledProcessError:
        return False
    run_ip("netns", "exec", network, "tc", "qdisc", "delete", "dev", "lo", "root")
    return True


def _add_wire(name: str, hub: str, node: int, relays: bool) -> None:
    """Adds a node's device ``wire`` and its end at the switch, ``portN``: a pair, or two that a relay joins."""
    port, prefix = f"port{node}", FIRST_ADDRESS.rpartition(".")[0]
    if relays:
        for network, device in ((name, "wire"), (hub, port)):
            run_ip("-n", network, "tuntap", "add", "dev", device, "mode", "tap")
            run_ip("-n", network, "link", "set", device, "mtu", str(LONG_MTU))
    else:
        run_ip("link", "add", "wire", "netns", name, "type", "veth", "peer", "name", port, "netns", hub)
    run_ip("-n", hub, "link", "set", port, "master", "switch")
    run_ip("-n", name, "address", "add", f"{prefix}.{node + 1}/24", "dev", "wire")
    run_ip("-n", name, "link", "set", "wire", "up")
    run_ip("-n", hub, "link", "set", port, "up")


def main(delay: str, hub: str, *names: str) -> None:
    """Carries frames between each node's ``wire`` and its port until it is killed; what nodes send waits ``delay``."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: dies with the benchmark
    delay_s = float(delay.removesuffix("ms")) / 1e3
    target: dict[int, tuple[int, float]] = {}
    for node, name in enumerate(names):
        wire, port = _open_tap(name, "wire"), _open_tap(hub, f"port{node}")
        target[wire], target[port] = (port, delay_s), (wire, 0.0)
    waiting: deque[tuple[float, int, bytes]] = deque()  # all wait equally long, so the first is due first
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(list(target), [], [], left_s)
        for source in ready:
            other, wait_s = target[source]
            frame = os.read(source, LONG_MTU + 64)
            if wait_s:
                waiting.append((time.monotonic() + wait_s, other, frame))
            else:
                _send(other, frame)
        while waiting and waiting[0][0] <= time.monotonic():
            _send(*waiting.popleft()[1:])


def _send(device: int, frame: bytes) -> None:
    try:
        os.write(device, frame)
    except OSError as error:  # a link that isn't up yet loses frames, as a wire does
        print(f"frame lost: {error}", file=sys.stderr)


def _open_tap(network: str, device: str) -> int:
    """Returns a file of a TAP device of a network; this process then belongs to that network."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/var/run/netns", network).open("rb") as space:
        if libc.setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {network}")
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
    return tap


if __name__ == "__main__":
    main(*sys.argv[1:])
