"""A site's side of the outer server: dialling in and committing (first rank), movements and versions (every rank)."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.records import RecordError
from meshwright.sites.boxes import NamedBox
from meshwright.sites.messages import (
    CODEC,
    MOST_HELLO_BYTES,
    VERSION,
    Alive,
    Commit,
    Declaration,
    Done,
    Goodbye,
    Hello,
    Pull,
    Push,
    Refused,
    Released,
    Welcome,
)
from meshwright.transport.connection import Connection, connect
from meshwright.transport.key import RunKey
from meshwright.transport.seal import Channel

CONNECT_S = 5.0
"""Limit of a connection attempt."""
ANSWER_S = 120.0
"""Limit of a shard's answer."""
BATCH_BYTES = 32 << 20
"""Bytes of boxes in one request, beyond which a rank begins another."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_NO_ROUND = -2


class RefusedError(Exception):
    """The server refuses what a site asked for.

    Args:
        why: its reason.
        final: whether it is in vain to ask again.
    """

    def __init__(self, why: str, final: bool) -> None:
        super().__init__(why)
        self.final = final


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where the server listens, and the key."""

    host: str
    port: int
    key: RunKey


class Backoff:
    """Pauses between attempts to reach the server, doubled each time, with jitter."""

    def __init__(self) -> None:
        self._pause_s = _FIRST_PAUSE_S

    def next_pause_s(self) -> float:
        """Returns the next pause in seconds."""
        # Sites that lost the server together must not come back together.
        pause_s = self._pause_s * (0.5 + 0.5 * random.random())
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        return pause_s


class SiteClient:
    """The first rank's connection to the coordinator.

    Args:
        address: of the server.
        site: number of this site.
        run: names its run.
        declaration: of what it trains.
    """

    def __init__(self, address: ServerAddress, site: int, run: str, declaration: Declaration) -> None:
        self._address, self._site, self._run, self._declaration = address, site, run, declaration
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._round = _NO_ROUND
        self._closed = threading.Event()
        self.welcome: Welcome | None = None
        """The present session; None where there is none."""
        self._committing_session = 0
        self._alive = threading.Thread(target=self._stay_alive, daemon=True)

    @property
    def connected(self) -> bool:
        """Whether the connection was there when it was last used."""
        return self._connection is not None

    def probe(self, limit_s: float) -> None:
        """Asks whether this site could dial in.

        Raises:
            RefusedError: when it couldn't.
            OSError: when the server can't be reached, doesn't answer in time, or hasn't the key.
        """
        self._greet(limit_s, claims=False, probe=True)[0].close()

    def dial(self, limit_s: float, claims: bool = False) -> Welcome:
        """Connects and begins a session; returns the server's answer.

        Args:
            limit_s: for the answer, which comes once the server has first weights.
            claims: whether a round was committed, and what became of it isn't known.

        Raises:
            RefusedError: when the server refuses this site.
            OSError: when it can't be reached, doesn't answer in time, or hasn't the key.
        """
        self.hang_up()
        connection, answer = self._greet(limit_s, claims)
        with self._lock:
            self._connection, self.welcome = connection, answer
        if not self._alive.is_alive() and not self._closed.is_set():
            self._alive.start()
        return answer

    def _greet(self, limit_s: float, claims: bool, probe: bool = False) -> tuple[Connection, Welcome]:
        """Connects and says hello; returns the connection and the server's answer."""
        address = self._address
        connection = connect((address.host, address.port), address.key, Channel.SITES, min(CONNECT_S, limit_s))
        try:
            connection.limit(limit_s)
            hello = Hello(
                version=VERSION,
                site=self._site,
                run=self._run,
                declaration=self._declaration,
                previous_session=self._committing_session if claims else 0,
                previous_round=self._round if claims else _NO_ROUND,
                probe=probe,
            )
            connection.send(CODEC.dumps(hello))
            answer = self._receive(connection)
            if not isinstance(answer, Welcome):
                raise ConnectionError(f"a {type(answer).__name__} came where a Welcome was due")
        except BaseException:
            connection.close()
            raise
        return connection, answer

    def commit(self, commit: Commit) -> None:
        """Sends a commit; `wait` returns what becomes of it.

        Raises:
            OSError: when the connection has ended.
        """
        self._round = commit.round
        self._committing_session = commit.session
        self._send(commit)

    def wait(self, limit_s: float) -> Released | None:
        """Returns the release of the committed round; None when it doesn't come within ``limit_s``.

        Raises:
            RefusedError: when the server refuses the round.
            OSError: when the connection has ended.
        """
        connection = self._connection
        if connection is None:
            raise ConnectionError("the connection ended")
        deadline = time.monotonic() + limit_s
        while True:
            # Readable first, so that a limit never ends a message in the middle.
            if not connection.readable(max(0.0, deadline - time.monotonic())):
                return None
            try:
                connection.limit(ANSWER_S)
                answer = self._receive(connection)
            except OSError:
                self.hang_up()
                raise
            if isinstance(answer, Released) and answer.round == self._round:
                return answer

    def _receive(self, connection: Connection) -> object:
        try:
            answer = CODEC.loads(connection.receive(MOST_HELLO_BYTES))
        except RecordError as error:
            raise ConnectionError(str(error)) from None
        if isinstance(answer, Refused):
            raise RefusedError(answer.why, answer.final)
        return answer

    def _send(self, record: object) -> None:
        with self._lock:
            if self._connection is None:
                raise ConnectionError("the connection ended")
            try:
                self._connection.send(CODEC.dumps(record))
            except OSError:
                self._connection.close()
                self._connection = None
                raise

    def _stay_alive(self) -> None:
        """Tells the server that this site lives, often enough that it isn't forgotten."""
        while not self._closed.wait(self.welcome.grace_s / 5 if self.welcome is not None else 1.0):
            with contextlib.suppress(OSError):
                self._send(Alive(round=self._round))

    def leave(self) -> None:
        """Says goodbye and ends."""
        if self.welcome is not None:
            with contextlib.suppress(OSError):
                self._send(Goodbye(session=self.welcome.session))
        self.close()

    def hang_up(self) -> None:
        """Ends the connection; the session can be taken up by another."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Ends the connection and its thread."""
        self._closed.set()
        self.hang_up()
        if self._alive.is_alive():
            self._alive.join(CONNECT_S)


@dataclass(frozen=True, slots=True)
class RankSession:
    """What a rank needs to reach the shards within a session."""

    address: ServerAddress
    site: int
    session: int
    ports: tuple[int, ...]


def push(
    session: RankSession,
    shard: int,
    round_number: int,
    number_format: str,
    boxes: Sequence[tuple[NamedBox, memoryview]],
) -> None:
    """Sends boxes of a movement to a shard.

    Args:
        session: of the site.
        shard: index of it.
        round_number: `SEED_ROUND` for the first weights.
        number_format: of all bytes.
        boxes: each with its bytes.

    Raises:
        RefusedError: when the shard refuses them.
        OSError: when it can't be reached or doesn't answer.
    """
    with _connect(session, shard) as connection:
        for batch in _batches([len(data) for _, data in boxes]):
            selected = boxes[batch]
            request = Push(
                site=session.site,
                session=session.session,
                round=round_number,
                format=number_format,
                boxes=tuple((named.name, named.box) for named, _ in selected),
            )
            connection.send(CODEC.dumps(request))
            connection.send_parcel(memoryview(b"".join(data for _, data in selected)))
            _expect_done(connection)


def pull(session: RankSession, shard: int, version: int, boxes: Sequence[tuple[NamedBox, memoryview]]) -> None:
    """Fetches boxes of a version from a shard.

    Args:
        session: of the site.
        shard: index of it.
        version: that the server released to this site.
        boxes: each with the memory that its bytes fill.

    Raises:
        RefusedError: when the shard doesn't have them.
        OSError: when it can't be reached or doesn't answer.
    """
    with _connect(session, shard) as connection:
        for batch in _batches([len(data) for _, data in boxes]):
            selected = boxes[batch]
            named = tuple((each.name, each.box) for each, _ in selected)
            request = Pull(site=session.site, session=session.session, version=version, boxes=named)
            connection.send(CODEC.dumps(request))
            _expect_done(connection)
            for _, data in selected:
                connection.receive_parcel(data)


def _connect(session: RankSession, shard: int) -> Connection:
    address = (session.address.host, session.ports[shard])
    connection = connect(address, session.address.key, Channel.MOVEMENTS, CONNECT_S)
    connection.limit(ANSWER_S)
    return connection


def _expect_done(connection: Connection) -> None:
    try:
        answer = CODEC.loads(connection.receive(MOST_HELLO_BYTES))
    except RecordError as error:
        raise ConnectionError(str(error)) from None
    if isinstance(answer, Refused):
        raise RefusedError(answer.why, answer.final)
    if not isinstance(answer, Done):
        raise ConnectionError(f"a {type(answer).__name__} came where Done was due")


def _batches(sizes: Sequence[int]) -> Iterator[slice]:
    """Yields runs of boxes of at most `BATCH_BYTES`, or of one."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > BATCH_BYTES:
            yield slice(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))
