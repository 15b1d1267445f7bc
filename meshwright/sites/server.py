"""The coordinator of the outer server: admits sites, orders versions, and writes down what it decided."""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.records import RecordError
from meshwright.sites.admission import refusal_of
from meshwright.sites.messages import (
    CODEC,
    MOST_HELLO_BYTES,
    MOST_SHARDS,
    SEED_ROUND,
    Admit,
    Alive,
    Apply,
    Commit,
    CommitStaged,
    Declaration,
    Declare,
    Drop,
    Goodbye,
    Hello,
    Pin,
    Refused,
    Released,
    Save,
    Welcome,
)
from meshwright.sites.round_book import Forget, NewVersion, Release, RoundBook
from meshwright.sites.saved_state import read_state, save_state
from meshwright.sites.server_log import ServerLog
from meshwright.sites.settings import ServerSettings
from meshwright.sites.shard_group import OrderRefusedError, ShardGroup, listen
from meshwright.transport.connection import Connection
from meshwright.transport.gate import Gate
from meshwright.transport.key import RunKey
from meshwright.transport.seal import Channel
from meshwright.units import format_bytes

_TICK_S = 0.05
_MOST_LINKS = 1024
"""Most connections of sites at once."""
_HELLO_S = 60.0
"""Limit of a site's first message."""
_LATER_BYTES = 1 << 16
"""Most bytes of a message after a site's first."""


@dataclass(eq=False, slots=True)
class _Link:
    """A site's connection."""

    connection: Connection
    site: int = -1
    session: int = 0


class OuterServer:
    """Serves sites until it is asked to stop.

    Args:
        settings: how versions are made.
        run_dir: where state and log lie.
        host: address to listen at.
        port: of the coordinator, shards have the next ones; 0 for any free ones.
        shards: number of processes that share the weights.
        save_every: versions between two saved ones.
        key: that sites have too.
        say: prints a line.
    """

    def __init__(
        self,
        settings: ServerSettings,
        run_dir: Path,
        *,
        host: str,
        port: int,
        shards: int,
        save_every: int,
        key: RunKey,
        say: Callable[[str], None],
    ) -> None:
        if not 1 <= shards <= MOST_SHARDS:
            raise ConfigError(f"--shards {shards}: give 1 to {MOST_SHARDS}")
        self._settings, self._run_dir, self._save_every, self._say = settings, run_dir, save_every, say
        saved = read_state(run_dir)
        self._declaration: Declaration | None = saved.declaration if saved is not None else None
        version = saved.version if saved is not None else -1
        self._saved_version = version
        delayed = saved.delayed if saved is not None else 0
        self.book = RoundBook(settings, version, delayed, time.monotonic())
        self._links: dict[int, _Link] = {}
        self._seeder: _Link | None = None
        self._waiting_hellos: list[tuple[_Link, Hello]] = []
        self._inbox: queue.Queue[tuple[_Link, object, float]] = queue.Queue()
        self._link_count = 0
        self._listener = listen(host, port)
        self.port = int(self._listener.getsockname()[1])
        """Port of the coordinator."""
        try:
            # Before any thread runs here: the shards are forks.
            self._shards = ShardGroup(shards, host, self.port + 1 if port else 0, key, self._listener)
        except BaseException:
            self._listener.close()
            raise
        self._log = ServerLog(run_dir, version, say)
        self._gate = Gate(self._listener, key, Channel.SITES, self._log.event)
        if saved is not None:
            shapes, dtype = saved.declaration.shapes, saved.declaration.dtype
            where = {"folder": str(saved.folder), "version": version, "saved_shards": saved.shards}
            self._shards.order(Declare(shapes=shapes, dtype=dtype, **where))  # type: ignore[arg-type]
        self._log.event("server_started", version=version, port=self.port, shards=list(self._shards.ports))

    def serve(self, stopped: Callable[[], bool]) -> None:
        """Serves until ``stopped``, then saves; processes and sockets are closed whatever happens.

        Raises:
            LaunchError: when a shard ended.
            OSError: when the log can't be written.
        """
        stopping = threading.Event()
        door = threading.Thread(target=self._admit_connections, args=(stopping,), daemon=True)
        door.start()
        try:
            while not stopped():
                self._handle_all(_TICK_S)
                # One at a time: carrying it out may take long, and messages come meanwhile.
                while (decision := self.book.next_decision(time.monotonic())) is not None:
                    self._carry_out(decision)
                    self._handle_all()
            self._save()
        finally:
            stopping.set()
            door.join()
            self.close()

    def close(self) -> None:
        """Ends connections and shards."""
        self._gate.close()
        self._listener.close()
        for link in [*self._links.values(), *(link for link, _ in self._waiting_hellos)]:
            link.connection.close()
        self._shards.close()
        self._log.close()

    def _admit_connections(self, stopping: threading.Event) -> None:
        while not stopping.is_set():
            for connection in self._gate.poll(_TICK_S):
                if self._link_count >= _MOST_LINKS:
                    connection.close()
                    continue
                self._link_count += 1
                threading.Thread(target=self._read_link, args=(_Link(connection),), daemon=True).start()

    def _read_link(self, link: _Link) -> None:
        """Puts a site's messages into the inbox, until its connection ends; what isn't valid ends it."""
        try:
            link.connection.limit(_HELLO_S)
            self._put(link, CODEC.loads(link.connection.receive(MOST_HELLO_BYTES)))
            # From here on the round book forgets who is silent.
            link.connection.limit(None)
            while True:
                self._put(link, CODEC.loads(link.connection.receive(_LATER_BYTES)))
        except (OSError, RecordError):
            self._put(link, None)

    def _put(self, link: _Link, record: object) -> None:
        # The time counts at which it came: while a version is saved, nobody falls silent.
        self._inbox.put((link, record, time.monotonic()))

    def _handle_all(self, wait_s: float = 0.0) -> None:
        """Waits for a message, and handles all that have come."""
        with contextlib.suppress(queue.Empty):
            self._handle(*(self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()))
            while True:
                self._handle(*self._inbox.get_nowait())

    def _handle(self, link: _Link, record: object, received_s: float) -> None:
        """Handles a message, or the end of a connection."""
        match record:
            case None:
                self._end_link(link)
            case Hello() if link.site < 0:
                self._dial_in(link, record)
            case Alive() if self._is_current(link):
                self.book.hear(link.site, received_s)
            case Commit() if self._is_current(link):
                self._commit(link, record)
            case Goodbye() if self._is_current(link):
                self.book.leave(link.site)
                self._order(Drop(site=link.site))
                self._log.event("site_left", site=link.site)
            case _:
                link.connection.close()

    def _is_current(self, link: _Link) -> bool:
        """Whether a connection is its site's present one, and the site live."""
        return self._links.get(link.site) is link and (link.site in self.book.sites or link is self._seeder)

    def _end_link(self, link: _Link) -> None:
        link.connection.close()
        self._link_count -= 1
        self._waiting_hellos = [pair for pair in self._waiting_hellos if pair[0] is not link]
        if self._links.get(link.site) is link:
            del self._links[link.site]
        if self._seeder is link:
            self._seeder = None
            self._seat_waiting()

    def _send(self, link: _Link, record: object) -> None:
        # A connection that ends here is noticed by its thread.
        with contextlib.suppress(OSError):
            link.connection.send(CODEC.dumps(record))

    def _refuse(self, link: _Link, why: str, final: bool) -> None:
        self._log.event("site_refused", site=link.site, address=link.connection.address, why=why)
        self._send(link, Refused(why=why, final=final))

    def _dial_in(self, link: _Link, hello: Hello) -> None:
        """Admits a site, or says why not."""
        why, final = refusal_of(hello, self._declaration, self._settings, self.book.owner(hello.site))
        if why:
            self._refuse(link, why, final)
            return
        if hello.probe:
            self._send(link, self._welcome(0, committed=False))
            return
        if self._declaration is None:
            self._declaration = hello.declaration
            shapes, dtype = hello.declaration.shapes, hello.declaration.dtype
            self._order(Declare(shapes=shapes, dtype=dtype, folder="", version=-1, saved_shards=0))
        if self.book.version < 0 and self._seeder is not None:
            # Its thread tells when it goes.
            self._waiting_hellos.append((link, hello))
            return
        if self.book.version < 0:
            self._seeder = link
        older = self._links.get(hello.site)
        if older is not None:
            older.connection.close()
        link.site, link.session = hello.site, 1 + secrets.randbits(48)
        self._links[link.site] = link
        committed = self.book.is_committed(hello.site, hello.previous_session, hello.previous_round)
        now_s = time.monotonic()
        self.book.dial_in(hello.site, hello.run, link.session, now_s)
        if committed:
            self.book.reclaim(hello.site, hello.previous_session, hello.previous_round, now_s)
        self._order(Admit(site=link.site, session=link.session))
        if self.book.version >= 0:
            self._order(Pin(site=link.site, version=self.book.version))
        clock = self.book.sites[link.site].clock
        self._log.event("site_dialled_in", site=link.site, version=self.book.version, clock=clock, again=committed)
        self._send(link, self._welcome(link.session, committed))

    def _welcome(self, session: int, committed: bool) -> Welcome:
        version, grace_s = self.book.version, self._settings.grace_s
        return Welcome(session=session, version=version, ports=self._shards.ports, grace_s=grace_s, committed=committed)

    def _seat_waiting(self) -> None:
        """Admits the sites that waited for the first weights."""
        waiting, self._waiting_hellos = self._waiting_hellos, []
        for link, hello in waiting:
            self._dial_in(link, hello)

    def _order(self, record: object) -> None:
        """Gives the shards an order that none has a reason to refuse."""
        self._shards.order(record)

    def _commit(self, link: _Link, commit: Commit) -> None:
        """Takes in a round, if all shards have it."""
        # The base may be a version that a killed server made and didn't save.
        valid = commit.session == link.session and 0 <= commit.tokens < float("inf") and commit.base >= SEED_ROUND
        try:
            if not valid or (commit.round == SEED_ROUND) != (link is self._seeder) or commit.round < SEED_ROUND:
                raise OrderRefusedError(f"round {commit.round} isn't one of this connection's")
            self._shards.order(CommitStaged(site=link.site, session=link.session, round=commit.round))
        except OrderRefusedError as error:
            self._refuse(link, str(error), final=False)
            return
        if commit.round != SEED_ROUND:
            self.book.commit(link.site, commit, time.monotonic())
            if commit.leaves:
                self._order(Drop(site=link.site))
                self._log.event("site_left", site=link.site)
            return
        self.book.version, self._seeder = 0, None
        self._save()
        self._log.event("first_weights", site=link.site)
        self._order(Pin(site=link.site, version=0))
        sites = len(self.book.sites)
        self._send(link, Released(round=SEED_ROUND, version=0, staleness=0, sites=sites, waited_s=0.0))
        self._seat_waiting()

    def _carry_out(self, decision: NewVersion | Release | Forget) -> None:
        match decision:
            case NewVersion():
                self._make_version(decision)
            case Release():
                self._release(decision)
            case Forget():
                self._order(Drop(site=decision.site))
                self._log.event("site_forgotten", site=decision.site, silent_s=decision.silent_s)
                link = self._links.pop(decision.site, None)
                if link is not None:
                    # It dials in again when it can.
                    link.connection.close()

    def _release(self, release: Release) -> None:
        self._order(Pin(site=release.site, version=self.book.version))
        sites = len(self.book.sites)
        fields = {"round": release.round, "version": self.book.version, "staleness": release.staleness}
        times = {"waited_s": release.waited_s, "clock": release.clock, "slowest": release.slowest}
        self._log.event("site_released", site=release.site, sites=sites, **fields, **times)
        if (link := self._links.get(release.site)) is not None:
            self._send(link, Released(sites=sites, waited_s=release.waited_s, **fields))  # type: ignore[arg-type]

    def _make_version(self, decision: NewVersion) -> None:
        """Has the shards make a version, writes it down, and saves where that is due."""
        settings, version, now_s = self._settings, self.book.version + 1, time.monotonic()
        square = self._shards.order(
            Apply(
                version=version,
                movements=tuple(
                    (each.site, each.commit.session, each.commit.round, weight)
                    for each, weight in zip(decision.rounds, decision.weights)
                ),
                momentum_every=0 if settings.mode == "sync" else settings.momentum_every,
                takes_momentum=decision.takes_momentum,
                lr=settings.lr,
                momentum=settings.momentum,
                nesterov=settings.nesterov,
            )
        )
        staleness = self.book.versioned(decision, version)
        rounds = [
            {
                "site": each.site,
                "session": each.commit.session,
                "round": each.commit.round,
                "base": each.commit.base,
                "weight": weight,
                "staleness": stale,
                "tokens": each.commit.tokens,
                "loss": each.commit.loss,
                "steps": each.commit.steps,
                "clock": each.clock,
                "waited_s": now_s - each.at,
                "raw_bytes": each.commit.raw_bytes,
                "sent_bytes": each.commit.sent_bytes,
            }
            for each, weight, stale in zip(decision.rounds, decision.weights, staleness)
        ]
        sites = len(self.book.sites)
        fields = {"version": version, "time": time.time(), "mode": settings.mode, "sites": sites, "rounds": rounds}
        grace = {"grace_waited_s": now_s - decision.quorum_at, "momentum": decision.takes_momentum}
        losses = ", ".join(f"site {each.site} {each.commit.loss:.3f}" for each in decision.rounds)
        sent_bytes = sum(each.commit.sent_bytes for each in decision.rounds)
        text = f"version {version}: {losses}, staleness {max(staleness)}, {sites} sites, {format_bytes(sent_bytes)} in"
        self._log.version(fields | grace | {"pseudo_gradient_norm": square**0.5}, text)
        if version % self._save_every == 0:
            self._save()

    def _save(self) -> None:
        """Saves the present version; where the disk doesn't take it, the server goes on and says so."""
        version, declaration = self.book.version, self._declaration
        if declaration is None or version < 0 or version == self._saved_version:
            return
        try:
            save_state(
                self._run_dir,
                version,
                self.book.delayed,
                self._shards.count,
                declaration,
                lambda folder: self._order(Save(folder=str(folder))),
            )
        except (OSError, OrderRefusedError) as error:
            self._say(f"version {version} couldn't be saved: {error}")
            self._log.event("save_failed", version=version, why=str(error))
            return
        self._saved_version = version
        self._log.event("saved", version=version)
