"""A hostile peer at every port of a run over two nodes, which trains on along the same curve, to the bit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import resource
import socket
import struct
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshwright.resilience.claims import Claims
from meshwright.resilience.local_node import LocalNode
from meshwright.resilience.messages import NodeReport
from meshwright.train import faults
from meshwright.transport.connection import connect
from meshwright.transport.key import RunKey
from meshwright.transport.seal import Channel, ClientChallenge, FrameKind, frame_header, make_notice
from tests.runs import Running, call, curve, events, warm, words, write_corpus

pytestmark = pytest.mark.slow
LAYOUT = "replicate=2,precision=float64"
STEPS = 24
GROWTH_BYTES = 128 << 20
Address = tuple[str, int]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ports")
    write_corpus(root / "corpus.txt")
    warm()
    return root


def report_ports(path: Path) -> Callable[[], None]:
    """Returns what makes a node write down where it listens, and wait in each slow step until the crowd is there."""

    crowded, plain_sleep = path.parent / "crowded", time.sleep

    def sleep(seconds: float) -> None:
        """A slow step lasts until all strangers are there, whatever the machine; seconds bound it, far below a hang."""
        end = time.monotonic() + 4.0
        plain_sleep(seconds)
        while not crowded.exists() and time.monotonic() < end:
            plain_sleep(0.02)

    def before() -> None:
        plain = LocalNode.report
        faults.time = types.SimpleNamespace(sleep=sleep, time_ns=time.time_ns)  # type: ignore[assignment]

        def report(self: LocalNode) -> NodeReport:
            found = plain(self)
            with path.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(found.ports)) + "\n")
            return found

        LocalNode.report = report  # type: ignore[method-assign]

    return before


def said(address: Address, data: bytes, wait_s: float = 0.2) -> bytes:
    """Connects, sends, and returns what came back."""
    found = b""
    with contextlib.suppress(OSError), socket.create_connection(address, 2.0) as stranger:
        stranger.settimeout(wait_s)
        stranger.sendall(data)
        found = stranger.recv(4096)
    return found


def noise(address: Address, draw: random.Random) -> None:
    """Bytes of any length, lines of the old protocol, and the beginnings of others."""
    data = [os.urandom(draw.randrange(1, 5000)), b"hello\n", b'{"kind":"ready","node":1}\n{"kind":"beat"}\n']
    data += [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00"]
    data += [struct.pack("<qq", 0, 2**40), struct.pack("<qqqqq", 0, 5, 0, 0, 64)]
    said(address, draw.choice(data))


def forged(address: Address, draw: random.Random) -> None:
    """Challenges of another key, answers that are repeated, frames without an answer, and notices."""
    wire, key = draw.choice(list(Channel)), RunKey.fresh()
    kind = draw.randrange(5)
    if kind == 0:
        with contextlib.suppress(OSError):
            connect(address, key, wire, 1.0).close()
    elif kind == 1:
        with contextlib.suppress(OSError), socket.create_connection(address, 2.0) as stranger:
            stranger.settimeout(0.5)
            stranger.sendall(ClientChallenge(key, wire).hello)
            challenge = stranger.recv(64)
            stranger.sendall(challenge[32:] + frame_header(FrameKind.MESSAGE, 2**32 - 1))
            assert stranger.recv(10) == b""
    elif kind == 2:
        said(
            address,
            ClientChallenge(key, wire).hello + b"\0" * 32 + frame_header(FrameKind.PARCEL, 1 << 20) + b"x" * 4096,
        )
    elif kind == 3:
        said(address, make_notice(key, wire, b"\0" * 24))
    else:
        said(address, ClientChallenge(key, wire).hello[: draw.randrange(1, 42)])


class Siege:
    """Strangers at every port that nodes told of, until it is lifted."""

    def __init__(self, ports: list[Path]) -> None:
        self._ports, self._end = ports, threading.Event()
        self._run = ports[0].parent / "besieged"
        self._silent: list[socket.socket] = []
        self.attacks = self.connections = 0
        self._threads = [threading.Thread(target=self._attack, args=(number,)) for number in range(2)]
        self._threads.append(threading.Thread(target=self._crowd))
        for thread in self._threads:
            thread.start()

    def _addresses(self) -> list[Address]:
        found = set()
        for path in self._ports:
            for line in path.read_text().splitlines() if path.exists() else ():
                # The store is torch's own, which knows no key (docs/security.md).
                found |= {("127.0.0.1", port) for name, port in json.loads(line).items() if name != "store"}
        claims = Claims(self._run) if (self._run / "generations").is_dir() else None
        if claims is not None and (newest := claims.newest()) is not None:
            found.add((newest.host, newest.port))
        return sorted(found)

    def _attack(self, number: int) -> None:
        draw = random.Random(number)
        while not self._end.wait(0.01):
            for address in self._addresses():
                draw.choice((noise, forged))(address, draw)
                self.attacks += 1

    def _crowd(self) -> None:
        """A thousand connections that say nothing, and hold on."""
        while not self._end.wait(0.05):
            for address in self._addresses():
                for _ in range(40):
                    if self.connections >= 1000:
                        (self._run.parent / "crowded").touch()
                        return
                    with contextlib.suppress(OSError):
                        one = socket.create_connection(address, 1.0)
                        one.setblocking(False)
                        self._silent.append(one)
                        self.connections += 1

    def lift(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(20.0)
        for one in self._silent:
            one.close()


@pytest.fixture
def siege() -> Iterator[Callable[[list[Path]], Siege]]:
    made: list[Siege] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))

    def make(ports: list[Path]) -> Siege:
        made.append(Siege(ports))
        return made[-1]

    yield make
    for one in made:
        one.lift()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def memory_of(pids: list[int]) -> dict[int, int]:
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            found[pid] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return found


def test_a_run_under_siege_trains_on_as_if_nobody_were_there(root: Path, siege: Callable[[list[Path]], Siege]) -> None:
    status, text = call(words(root, "whole", layout=LAYOUT, devices=2), root / "whole.log")
    assert status == 0, text
    ports = [root / f"ports-{node}" for node in range(2)]
    more = ("--recovery.snapshot-every", "1", "--recovery.idle-s", "0")
    more += ("--recovery.faults", "slow:rank=0,step=2,seconds=0.7")
    nodes = []
    for node in range(2):
        place = ("--nodes", "2", "--node", str(node), "--meet", "127.0.0.1")
        argv = words(root, "besieged", *place, *more, layout=LAYOUT, devices=2)
        nodes.append(Running(argv, root / f"besieged-{node}.log", before=report_ports(ports[node])))
    strangers = siege(ports)
    grown: dict[int, list[int]] = {}
    try:
        end = time.monotonic() + 150.0
        while any(node.alive() for node in nodes) and time.monotonic() < end:
            for pid, size in memory_of([node.pid for node in nodes]).items():
                grown.setdefault(pid, []).append(size)
            time.sleep(0.2)
        for node in nodes:
            assert node.wait(20.0) == 0, node.text()
            assert "Traceback" not in node.text()
    finally:
        strangers.lift()
        for node in nodes:
            for pid in node.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
    run = root / "besieged"
    assert curve(run) == curve(root / "whole"), "to the bit"
    assert strangers.attacks > 100 and strangers.connections == 1000
    for kind in ("node_lost", "leader_lost", "rank_lost", "courier_lost"):
        assert not events(run, kind), kind
    refused = events(run, "connection_refused")
    assert {row["wire"] for row in refused} >= {"supervisors", "courier", "shelf"}
    assert len(refused) < 100, "seldom, with a count"
    assert sum(row["count"] for row in refused) > 100
    for sizes in grown.values():
        assert max(sizes) - sizes[0] < GROWTH_BYTES
