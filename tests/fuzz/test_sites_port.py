"""Hostile peers at every port of an outer server, without its key and with it, while sites train on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import socket
from pathlib import Path

import pytest

from meshwright.sites.messages import CODEC, Commit, Declaration, Hello, Pull, Push
from meshwright.transport.connection import Connection, connect
from meshwright.transport.key import RunKey, read_key
from meshwright.transport.seal import Channel, FrameKind, frame_header
from tests.faults.test_sites import SHAPES, Story
from tests.runs import rows, wait_until

pytestmark = pytest.mark.slow
GROWTH_KB = 256 << 10


def server_kilobytes(pid: int) -> int:
    """Returns the peak resident memory of the server and its shards together."""
    pids = [pid, *(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    lines = [line for each in pids for line in Path(f"/proc/{each}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def frames(draw: random.Random, record: object) -> bytes:
    """A message with some bytes changed, or something else that is no message."""
    data = bytearray(CODEC.dumps(record))
    for _ in range(draw.randrange(1, 4)):
        choice = draw.randrange(4)
        if choice == 0:
            data[draw.randrange(len(data))] = draw.randrange(256)
        elif choice == 1:
            data = data[: draw.randrange(1, len(data))]
        elif choice == 2:
            number = str(draw.choice((-1, 2**80, 1e400, '"x"', "[]", "null", "true"))).encode()
            data = data.replace(b"0", number, draw.randrange(1, 3))
        else:
            data = bytearray(
                b'{"!":"' + draw.choice((b"tuple", b"Path", b"Hello", b"os.system")) + b'","items":[' + b"[" * 5000
            )
    return bytes(data)


def attack(draw: random.Random, address: tuple[str, int], key: RunKey, channel: Channel) -> None:
    """One hostile connection."""
    if draw.random() < 0.4:
        with socket.create_connection(address, 2.0) as stranger:
            stranger.sendall(draw.randbytes(draw.randrange(1, 400)))
        return
    if draw.random() < 0.2:
        with contextlib.suppress(OSError):
            connect(address, RunKey.fresh(), channel).close()
        return
    connection = connect(address, key, channel)
    with connection:
        connection.limit(0.3)
        if draw.random() < 0.2:
            # A header that announces more than is allowed, or nothing after it.
            connection.socket.sendall(frame_header(FrameKind.MESSAGE, draw.choice((2**32 - 1, 60 << 20))))
            return
        send_hostile(draw, connection, channel)


def send_hostile(draw: random.Random, connection: Connection, channel: Channel) -> None:
    declaration = Declaration(model="test", dtype="float64", shapes=SHAPES)
    hello = Hello(
        version=1,
        site=draw.choice((-1, 0, 7, 2**70)),
        run="evil",
        declaration=declaration,
        previous_session=0,
        previous_round=-2,
    )
    commit = Commit(
        **{"session": 0, "round": 0, "base": 0, "tokens": -1.0, "loss": 0.0, "steps": 0},  # type: ignore[arg-type]
        **{"raw_bytes": 0, "sent_bytes": 0, "leaves": True},  # type: ignore[arg-type]
    )
    box = draw.choice((((0, 7), (0, 3)), ((0, 10**12), (0, 3)), ((-5, 2), (0, 3)), (), ((3, 1), (0, 3))))
    boxes = (("embed", box),) * draw.choice((1, 50))
    pushed = Push(
        site=0, session=draw.choice((0, 5)), round=0, format=draw.choice(("raw", "int8", "x" * 99)), boxes=boxes
    )
    pulled = Pull(site=0, session=0, version=1, boxes=boxes)
    record = draw.choice((hello, commit) if channel is Channel.SITES else (pushed, pulled, commit))
    for _ in range(draw.randrange(1, 3)):
        with contextlib.suppress(OSError):
            connection.send(CODEC.dumps(record) if draw.random() < 0.4 else frames(draw, record))
            if draw.random() < 0.5:
                connection.send_parcel(memoryview(draw.randbytes(draw.randrange(1, 999))))
            connection.receive(1 << 20)


def test_hostile_bytes_change_no_weight_and_end_no_server(tmp_path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    story, draw = Story(tmp_path, 1), random.Random(7)
    story.serve()
    try:
        for site in range(3):
            story.start(site)
        wait_until(lambda: len(rows(story.run_dir)) > 3)
        started = json.loads((story.run_dir / "events.jsonl").read_text().splitlines()[0])
        ports = [(started["port"], Channel.SITES), *((port, Channel.MOVEMENTS) for port in started["shards"])]
        key, before = read_key(story.run_dir / "key"), server_kilobytes(story.server)
        for _ in range(150):
            port, channel = draw.choice(ports)
            with contextlib.suppress(OSError):
                attack(draw, ("127.0.0.1", port), key, channel)
            assert os.waitpid(story.server, os.WNOHANG) == (0, 0)
        present = len(rows(story.run_dir))
        wait_until(lambda: len(rows(story.run_dir)) > present + 6)
        assert server_kilobytes(story.server) < before + GROWTH_KB
    finally:
        story.end()
    story.check()
