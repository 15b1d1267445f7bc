"""A shard process of the outer server: takes movements in, hands versions out, and obeys the coordinator."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from meshwright.records import RecordError
from meshwright.sites.boxes import Box, NamedBox, fits, relative_slices
from meshwright.sites.decode import WIRE_FORMATS, decode_values, encoded_bytes
from meshwright.sites.messages import (
    CODEC,
    MOST_HELLO_BYTES,
    SEED_ROUND,
    Admit,
    Apply,
    CommitStaged,
    Declare,
    Done,
    Drop,
    Pin,
    Pull,
    Push,
    Refused,
    Save,
)
from meshwright.sites.outer_state import OuterWeights, StageError
from meshwright.sites.pipe import Pipe
from meshwright.transport.connection import Connection
from meshwright.transport.gate import Gate
from meshwright.transport.key import RunKey
from meshwright.transport.seal import Channel

IDLE_S = 120.0
"""Longest silence of a rank within a connection, which lasts as long as a join."""
_MOST_CONNECTIONS = 4096


class Shard:
    """One shard.

    Args:
        index: of it.
        shards: number of shards.
        listener: where ranks connect.
        pipe: to the coordinator.
        key: of the server.
    """

    def __init__(self, index: int, shards: int, listener: socket.socket, pipe: Pipe, key: RunKey) -> None:
        self._index, self._shards, self._pipe = index, shards, pipe
        self._gate = Gate(listener, key, Channel.MOVEMENTS)
        self._lock = threading.Lock()
        self._state: OuterWeights | None = None
        self._connections = 0

    def serve(self) -> None:
        """Serves until the coordinator ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ, self._pipe)
            selector.register(self._gate, selectors.EVENT_READ, self._gate)
            while True:
                for key, _ in selector.select(1.0):
                    if key.data is self._pipe:
                        self._pipe.send(self._obey(self._pipe.receive()))
                for connection in self._gate.poll():
                    self._start_thread(connection)

    def _start_thread(self, connection: Connection) -> None:
        if self._connections >= _MOST_CONNECTIONS:
            connection.close()
            return
        with self._lock:
            self._connections += 1
        threading.Thread(target=self._serve_rank, args=(connection,), daemon=True).start()

    def _obey(self, order: object) -> Done | Refused:
        """Does what the coordinator asks for."""
        try:
            with self._lock:
                return Done(value=self._do(order))
        except (StageError, OSError, ValueError) as error:
            return Refused(why=str(error), final=False)

    def _do(self, order: object) -> float:
        if isinstance(order, Declare):
            self._state = OuterWeights(order.shapes, order.dtype, self._index, self._shards)
            if order.folder:
                self._state.load(Path(order.folder), order.version, order.saved_shards)
            return 0.0
        state = self._state
        if state is None:
            raise StageError("no weights are declared")
        match order:
            case Admit():
                state.admit(order.site, order.session)
            case CommitStaged():
                squares = state.commit(order.site, order.session, order.round)
                if order.round == SEED_ROUND:
                    state.seed(order.site, order.session, order.round)
                return squares
            case Apply():
                return state.apply(order)
            case Pin():
                state.pin(order.site, order.version)
            case Drop():
                state.drop(order.site)
            case Save():
                state.save(Path(order.folder))
            case _:
                raise StageError(f"a {type(order).__name__} isn't an order")
        return 0.0

    def _serve_rank(self, connection: Connection) -> None:
        """Serves one rank's connection until it ends, is silent for too long, or sends what isn't valid."""
        try:
            with connection:
                connection.limit(IDLE_S)
                while True:
                    request = CODEC.loads(connection.receive(MOST_HELLO_BYTES))
                    if isinstance(request, Push):
                        answer: Done | Refused = self._take_push(connection, request)
                        connection.send(CODEC.dumps(answer))
                    elif isinstance(request, Pull):
                        self._answer_pull(connection, request)
                    else:
                        return
        except (OSError, RecordError):
            return
        finally:
            with self._lock:
                self._connections -= 1

    def _boxes(self, named: Sequence[tuple[str, Box]]) -> list[NamedBox]:
        """Returns boxes that lie on this shard.

        Raises:
            RecordError: for others.
        """
        state = self._state
        if state is None:
            raise RecordError("no weights are declared")
        for name, box in named:
            if name not in state.shapes or not fits(box, state.shapes[name], state.rows[name]):
                raise RecordError(f"{name} {box} isn't a box of this shard")
        return [NamedBox(name, box) for name, box in named]

    def _take_push(self, connection: Connection, push: Push) -> Done | Refused:
        boxes, state = self._boxes(push.boxes), self._state
        if state is None or push.format not in WIRE_FORMATS:
            raise RecordError(f"format {push.format[:20]}")
        sizes = [encoded_bytes(named.elements, push.format, state.dtype.itemsize) for named in boxes]
        # Overlapping boxes must not make this process allocate more than it holds.
        if sum(named.elements for named in boxes) > state.elements:
            raise RecordError("more elements than this shard has")
        data = memoryview(bytearray(sum(sizes)))
        connection.receive_parcel(data)
        try:
            with self._lock:
                staged = state.open_stage(push.site, push.session, push.round)
                offset = 0
                for named, size in zip(boxes, sizes):
                    part = data[offset : offset + size]
                    state.write(staged, named, decode_values(part, named.elements, push.format, state.dtype))
                    offset += size
        except StageError as error:
            return Refused(why=str(error), final=False)
        return Done()

    def _answer_pull(self, connection: Connection, pull: Pull) -> None:
        boxes, state = self._boxes(pull.boxes), self._state
        assert state is not None
        try:
            with self._lock:
                arrays = state.pinned(pull.site, pull.session, pull.version)
        except StageError as error:
            connection.send(CODEC.dumps(Refused(why=str(error), final=False)))
            return
        connection.send(CODEC.dumps(Done()))
        for named in boxes:
            # A version's arrays never change: they are read without the lock.
            values = arrays[named.name][relative_slices(named.box, state.rows[named.name])]
            connection.send_parcel(memoryview(values.tobytes()))


def run_shard(index: int, shards: int, listener: socket.socket, sock: socket.socket, key: RunKey) -> int:
    """Runs a shard in this process, which a fork made, until the coordinator ends; returns an exit status."""
    # A terminal's Ctrl-C reaches the whole group: the coordinator saves first, and ends this process by the pipe.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        Shard(index, shards, listener, Pipe(sock), key).serve()
    os.close(listener.fileno())
    return 0
