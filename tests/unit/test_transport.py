"""Who can't show a run's key is dropped by every wire, at little cost, and the run goes on."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshwright.errors import LaunchError
from meshwright.launch.addresses import listen_at
from meshwright.records import RecordError
from meshwright.resilience.messages import VERSION, End, Ready, Reconfigure, decode, encode
from meshwright.resilience.peers import Hub, pump_until
from meshwright.train.outcome import TrainOutcome
from meshwright.transport.connection import Connection, connect, notify
from meshwright.transport.gate import MOST_STRANGERS, Gate
from meshwright.transport.key import RunKey, read_key, run_key
from meshwright.transport.seal import CHALLENGE_BYTES, Channel, ClientChallenge, FrameKind, WireError, frame_header

KEY = RunKey.fresh()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen_at("127.0.0.1") as one:
        yield one


def pair(listener: socket.socket, wire: Channel = Channel.COURIER) -> tuple[Connection, Connection]:
    """Two ends that have shown the key: who listened, who called."""
    gate = Gate(listener, KEY, wire)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(connect, listener.getsockname(), KEY, wire)
        server = gate.accept(10.0)
        gate.close()
        assert server is not None
        return server, calling.result()


def teller(told: list[dict]) -> Callable[..., None]:
    return lambda kind, **data: told.append({"kind": kind, **data})


def refused_by(listener: socket.socket, attack: Callable[[tuple[str, int]], None]) -> list[dict]:
    """Runs an attack on a hub, and returns the events that it led to; nobody got in."""
    told: list[dict] = []
    hub = Hub(listener, KEY, teller(told))
    try:
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(attack, listener.getsockname())
            assert pump_until(done.done, 20.0, lambda seconds: assert_nobody(hub.pump(seconds)))
            done.result()
            assert pump_until(lambda: bool(told), 10.0, lambda seconds: assert_nobody(hub.pump(seconds)))
    finally:
        hub.close()
    return told


def assert_nobody(pumped: tuple[list, list]) -> None:
    assert pumped == ([], [])


@pytest.mark.parametrize(
    "first", [b"hello\n" * 10, b'{"kind":"ready","node":1}\n' * 3, b"\0" * 64, b"meshwire\x01\x02" + b"x" * 90]
)
def test_first_bytes_that_are_none_of_this_wire_end_the_connection(listener: socket.socket, first: bytes) -> None:
    def attack(address: tuple[str, int]) -> None:
        with socket.create_connection(address, 5.0) as stranger:
            stranger.sendall(first)
            stranger.settimeout(5.0)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""

    (told,) = refused_by(listener, attack)
    assert told["kind"] == "connection_refused" and told["wire"] == "supervisors" and told["address"] == "127.0.0.1"


def test_another_key_is_noticed_by_both_ends(listener: socket.socket) -> None:
    def attack(address: tuple[str, int]) -> None:
        with pytest.raises(WireError, match="doesn't have this run's key"):
            connect(address, RunKey.fresh(), Channel.SUPERVISORS)
        # One that goes on without looking at the server's proof, and shows a wrong one.
        with socket.create_connection(address, 5.0) as stranger:
            stranger.sendall(ClientChallenge(KEY, Channel.SUPERVISORS).hello)
            assert len(stranger.recv(CHALLENGE_BYTES)) == CHALLENGE_BYTES
            stranger.sendall(os.urandom(32))
            stranger.settimeout(5.0)
            assert stranger.recv(100) == b""

    assert refused_by(listener, attack)


def test_a_proof_can_be_neither_reflected_nor_replayed(listener: socket.socket) -> None:
    """What the server sent is no proof of a client, nor what a client sent to another connection."""
    gate, seen = Gate(listener, KEY, Channel.SHELF), bytearray()

    def relay() -> None:
        with socket.create_connection(listener.getsockname(), 5.0) as stranger:
            stranger.settimeout(5.0)
            stranger.sendall(ClientChallenge(KEY, Channel.SHELF).hello)
            challenge = stranger.recv(CHALLENGE_BYTES)
            stranger.sendall(challenge[32:])
            assert stranger.recv(1) == b""
        honest = ClientChallenge(KEY, Channel.SHELF)
        with socket.create_connection(listener.getsockname(), 5.0) as first:
            first.sendall(honest.hello)
            answer, _ = honest.answer(first.recv(CHALLENGE_BYTES))
            seen.extend(answer)
        with socket.create_connection(listener.getsockname(), 5.0) as again:
            again.settimeout(5.0)
            again.sendall(honest.hello)
            again.recv(CHALLENGE_BYTES)
            again.sendall(bytes(seen))
            assert again.recv(1) == b""

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(relay)
        while not done.done():
            assert gate.poll(0.05) == []
        done.result()
    gate.close()


def test_silent_connections_are_few_and_short_lived_and_keep_nobody_out(listener: socket.socket) -> None:
    gate = Gate(listener, KEY, Channel.COURIER)
    silent = [socket.create_connection(listener.getsockname(), 5.0) for _ in range(100)]
    pump_until(lambda: gate.strangers >= MOST_STRANGERS, 10.0, lambda seconds: gate.poll(seconds) and None)
    assert gate.strangers == MOST_STRANGERS
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        calling = pool.submit(connect, listener.getsockname(), KEY, Channel.COURIER)
        server = gate.accept(5.0)
        assert server is not None and time.monotonic() - began < 4.0
        calling.result().close()
        server.close()
    for one in gate._strangers:
        one.deadline = 0.0
    gate.poll()
    assert gate.strangers == 0
    gate.close()
    for one in silent:
        one.close()


@pytest.mark.parametrize("at", [0, 1, 8, 20, -1])
def test_a_frame_that_was_changed_is_no_frame(listener: socket.socket, at: int) -> None:
    server, client = pair(listener)
    contents = b"x" * 100
    header = frame_header(FrameKind.MESSAGE, len(contents))
    frame = bytearray(header + contents + client.seals.sends.mac(header, contents))
    frame[at] ^= 1
    client.socket.sendall(frame)
    server.limit(5.0)
    with server, client, pytest.raises(WireError):
        server.receive(1000)


def test_a_frame_that_is_repeated_or_sent_back_is_no_frame(listener: socket.socket) -> None:
    server, client = pair(listener)
    server.limit(5.0)
    header = frame_header(FrameKind.MESSAGE, 2)
    frame = header + b"ok" + client.seals.sends.mac(header, b"ok")
    client.socket.sendall(frame + frame)
    assert server.receive(10) == b"ok"
    with server, client, pytest.raises(WireError, match="MAC is wrong"):
        server.receive(10)
    server, client = pair(listener)
    server.limit(5.0)
    server.send(b"ok")
    client.limit(5.0)
    client.socket.sendall(client.socket.recv(100))
    with server, client, pytest.raises(WireError, match="MAC is wrong"):
        server.receive(10)


def test_a_huge_length_allocates_nothing(listener: socket.socket) -> None:
    server, client = pair(listener)
    server.limit(5.0)
    client.socket.sendall(frame_header(FrameKind.MESSAGE, 2**32 - 1))
    with server, client, pytest.raises(WireError, match="4294967295 bytes came, where 1000 are allowed"):
        server.receive(1000)


def test_a_message_that_is_none_ends_the_line_and_not_the_process(listener: socket.socket) -> None:
    """Also of who has the key: its supervisor may be of another version, or broken."""
    for bad in (
        b"{",
        b"[]",
        encode(Reconfigure(1)).replace(b"1", b'"x"'),
        b'{"!":"Envelope","fields":[9,null]}',
        b"[" * 9000,
    ):
        told: list[dict] = []
        with listen_at("127.0.0.1") as place:
            hub = Hub(place, KEY, teller(told))
            with ThreadPoolExecutor(1) as pool:
                calling = pool.submit(connect, place.getsockname(), KEY, Channel.SUPERVISORS)
                pump_until(calling.done, 10.0, lambda seconds, hub=hub: hub.pump(seconds) and None)
                line = calling.result()
            line.send(bad)
            lost: list = []
            end = time.monotonic() + 10.0
            while not lost and time.monotonic() < end:
                lost += hub.pump(0.05)[1]
            assert len(lost) == 1 and lost[0].fault and told[0]["kind"] == "connection_refused"
            line.close()
            hub.close()


def test_messages_come_back_as_they_were_and_are_checked_field_by_field() -> None:
    outcome = TrainOutcome(step=5, loss=1.5, finished=True, metrics={"accuracy": 0.5})
    for message in (Reconfigure(3), End(outcome=outcome, error=""), End(outcome=None, error="gone")):
        assert decode(encode(message)) == message
    with pytest.raises(RecordError, match=r"Ready\.report is a dict unlike NodeReport"):
        decode(encode(Ready({"node": 1})))  # type: ignore[arg-type]
    with pytest.raises(RecordError, match="version"):
        of_another = encode(Reconfigure(1)).replace(b"[%d," % VERSION, b"[%d," % (VERSION + 1), 1)
        assert of_another != encode(Reconfigure(1))
        decode(of_another)
    with pytest.raises(RecordError, match="'RunKey' isn't among"):
        decode(b'{"!":"RunKey","fields":["x"]}')


def test_a_notice_needs_no_listener_at_work_but_the_key(listener: socket.socket) -> None:
    address = listener.getsockname()
    notify(address, RunKey.fresh(), Channel.WRITERS, b"f" * 24, 5.0)
    notify(address, KEY, Channel.SHELF, b"o" * 24, 5.0)
    notify(address, KEY, Channel.WRITERS, b"n" * 24, 5.0)
    gate = Gate(listener, KEY, Channel.WRITERS)
    pump_until(lambda: bool(gate.notices), 10.0, lambda seconds: gate.poll(seconds) and None)
    gate.poll(0.1)
    assert gate.notices == [b"n" * 24]
    gate.close()


def test_the_first_node_makes_the_key_and_the_others_read_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: run_key(tmp_path), range(8)))
    assert len(keys) == 1
    path = tmp_path / "key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and [item.name for item in tmp_path.iterdir()] == ["key"]
    assert repr(keys.pop()) == "RunKey()", "no message shows it"
    path.chmod(0o640)
    with pytest.raises(LaunchError, match=r"others may read or write the run's key .* \(mode 0640\).*chmod 600"):
        run_key(tmp_path)
    path.chmod(0o600)
    path.write_text("abc")
    with pytest.raises(LaunchError, match="holds no key of a run, 64 hexadecimal digits"):
        run_key(tmp_path)
    with pytest.raises(LaunchError, match="can't be read: No such file"):
        run_key(tmp_path, tmp_path / "mine")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(LaunchError, match="can't be read"):
        read_key(tmp_path / "link")
    assert threading.active_count() < 20
