"""Sites that are killed and cut off at random: others wait for the grace window at most, and the log gives the weights.

The sites here train nothing: a round's movement is drawn from its site, session and number by the ranks' own client.
So the server's weights must be what a plain loop over its log makes of the same draws.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from meshwright.jobs.serve_outer import serve_outer
from meshwright.sites.boxes import NamedBox, cut_for_shard
from meshwright.sites.client import RankSession, RefusedError, ServerAddress, SiteClient, pull, push
from meshwright.sites.messages import SEED_ROUND, Commit, Declaration
from meshwright.train.config import OuterConfig
from meshwright.train.run_config import RunConfig
from meshwright.transport.key import read_key
from tests.runs import events, rows, wait_until
from tests.tiers import further, seeds

SHAPES: dict[str, tuple[int, ...]] = {"embed": (7, 3), "norm": (3,), "scale": (), "head": (5, 3)}
SITES, GRACE_S, LIMIT_S = 3, 1.0, 2.5
Weights = dict[str, NDArray[np.float64]]


def drawn(*key: int) -> Weights:
    """Values that any process can draw again."""
    return {
        name: np.random.default_rng([*key, index]).standard_normal(shape)
        for index, (name, shape) in enumerate(SHAPES.items())
    }


def forked(work: Callable[[], None], output: Path) -> int:
    """Runs something in a process of its own session; returns its id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            signal.setitimer(signal.ITIMER_REAL, 0)
            work()
            status = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    return pid


def ended(pid: int, limit_s: float = 60.0) -> int:
    """Waits for a process; returns its status."""
    end = time.monotonic() + limit_s
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"process {pid} didn't end")
        time.sleep(0.01)


class PlainSite:
    """One site of one rank: dials in, and commits drawn movements until it is killed."""

    def __init__(self, site: int, address: ServerAddress, pause_s: float, declaration: Declaration) -> None:
        self.site, self.address, self.pause_s = site, address, pause_s
        self.client = SiteClient(address, site, f"run{site}", declaration)

    def boxes(self, session: RankSession) -> Iterator[tuple[int, list[NamedBox]]]:
        for shard in range(len(session.ports)):
            parts = []
            for name, shape in SHAPES.items():
                box = cut_for_shard(tuple((0, size) for size in shape), shape, shard, len(session.ports))
                parts += [NamedBox(name, box)] if box is not None else []
            yield shard, parts

    def hand_over(self, session: RankSession, number: int, values: Weights) -> None:
        for shard, parts in self.boxes(session):
            data = []
            for named in parts:
                rows_of_box = slice(*named.box[0]) if named.box else ()
                data.append((named, memoryview(np.ascontiguousarray(values[named.name][rows_of_box]).tobytes())))
            push(session, shard, number, "raw", data)

    def fetch(self, session: RankSession, version: int) -> Weights:
        fetched = {name: np.full(shape, np.nan) for name, shape in SHAPES.items()}
        for shard, parts in self.boxes(session):
            buffers = [bytearray(8 * named.elements) for named in parts]
            pull(session, shard, version, [(named, memoryview(buffer)) for named, buffer in zip(parts, buffers)])
            for named, buffer in zip(parts, buffers):
                values = np.frombuffer(buffer)
                rows_of_box = slice(*named.box[0]) if named.box else ()
                fetched[named.name][rows_of_box] = values.reshape(fetched[named.name][rows_of_box].shape)
        return fetched

    def session(self) -> tuple[RankSession, int]:
        welcome = self.client.dial(20.0)
        return RankSession(self.address, self.site, welcome.session, welcome.ports), welcome.version

    def commit(self, session: RankSession, number: int, base: int, tokens: float) -> int | None:
        figures = {"tokens": tokens, "loss": 1.0, "steps": 1, "raw_bytes": 0, "sent_bytes": 0, "leaves": False}
        self.client.commit(Commit(session=session.session, round=number, base=base, **figures))  # type: ignore[arg-type]
        released = self.client.wait(30.0)
        return released.version if released is not None else None

    def run_forever(self) -> None:
        while True:
            try:
                session, version = self.session()
                if version < 0:
                    self.hand_over(session, SEED_ROUND, drawn(0))
                    version = self.commit(session, SEED_ROUND, SEED_ROUND, 0.0) or 0
                for number in range(10**9):
                    assert all(np.isfinite(array).all() for array in self.fetch(session, version).values())
                    time.sleep(self.pause_s)
                    self.hand_over(session, number, drawn(1, self.site, session.session, number))
                    released = self.commit(session, number, version, 10.0 * (self.site + 1))
                    assert released is not None and released > version
                    version = released
            except (OSError, RefusedError):
                time.sleep(0.05)


def replayed(lines: list[dict], mode: str, delay: int) -> Weights:
    """The outer weights after a log, by a plain loop; shares nothing with the server."""
    theta = drawn(0)
    momentum = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    gathered = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    lr, beta = 0.7, 0.6
    for position, line in enumerate(lines):
        assert line["version"] == position + 1
        movements = [(drawn(1, each["site"], each["session"], each["round"]), each) for each in line["rounds"]]
        for name in SHAPES:
            if mode == "sync":
                tokens = sum(each["tokens"] for _, each in movements)
                step = sum(each["tokens"] * values[name] for values, each in movements) / tokens
                momentum[name] = beta * momentum[name] + step
                theta[name] = theta[name] - lr * (step + beta * momentum[name])
                continue
            ((values, each),) = movements
            movement = each["weight"] * values[name]
            gathered[name] = gathered[name] + movement
            if (position + 1) % delay:
                theta[name] = theta[name] - lr * movement / delay
            else:
                momentum[name] = beta * momentum[name] + gathered[name] / delay
                theta[name] = theta[name] - lr * (movement / delay + beta * momentum[name])
                gathered[name] = np.zeros(SHAPES[name])
    return theta


def saved_weights(run_dir: Path) -> tuple[int, Weights]:
    folder = max((run_dir / "versions").glob("[0-9]*"))
    parts: dict[str, list[NDArray[np.float64]]] = {}
    for shard in range(2):
        for name, array in load_file(folder / f"shard-{shard}.safetensors").items():
            if name.startswith("weights/"):
                parts.setdefault(name.removeprefix("weights/"), []).append(array)
    return int(folder.name), {name: np.concatenate(arrays).reshape(SHAPES[name]) for name, arrays in parts.items()}


def free_ports(count: int) -> int:
    """Returns the first of some free ports in a row, below those that connections are given."""
    for first in range(20_000 + os.getpid() % 5000 * 2, 32_000, count):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")


def listening(port: int) -> socket.socket:
    """Returns a socket that listens at a port, once it is free."""
    found: list[socket.socket] = []

    def take() -> bool:
        with contextlib.suppress(OSError):
            found.append(socket.create_server(("127.0.0.1", port)))
        return bool(found)

    wait_until(take)
    return found[0]


class Story:
    """A server, its sites, and what befalls them."""

    def __init__(self, root: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.mode = ("sync", "async", "bounded")[seed % 3]
        self.root, self.run_dir = root, root / "server"
        outer = OuterConfig(mode=self.mode, sites=SITES, grace_s=GRACE_S, staleness=1)  # type: ignore[arg-type]
        self.config = RunConfig(run=str(self.run_dir), outer=outer)
        self.port = free_ports(3)
        self.server = 0
        self.pids: dict[int, int] = {}

    def serve(self, held: socket.socket | None = None) -> None:
        """Starts the server and waits for it; ``held`` is a socket of this process alone."""
        (self.run_dir / "address.json").unlink(missing_ok=True)
        listen = f"127.0.0.1:{self.port}"
        log = self.root / "server.log"

        def work() -> None:
            if held is not None:
                held.close()
            serve_outer(self.config, listen, shards=2, save_every=5)

        def is_up() -> bool:
            if (self.run_dir / "address.json").exists():
                return True
            if os.waitpid(self.server, os.WNOHANG)[0]:
                self.server = 0
                raise AssertionError(log.read_text())
            return False

        self.server = forked(work, log)
        wait_until(is_up)

    def kill_server(self) -> None:
        os.kill(self.server, signal.SIGKILL)
        ended(self.server)
        self.server = 0

    def start(self, site: int) -> None:
        address = ServerAddress("127.0.0.1", self.port, read_key(self.run_dir / "key"))
        declaration = Declaration(model="test", dtype="float64", shapes=SHAPES)
        pause_s = self.draw.uniform(0.0, 0.1)
        self.pids[site] = forked(
            lambda: PlainSite(site, address, pause_s, declaration).run_forever(), self.root / f"site{site}.log"
        )

    def befall(self) -> None:
        """Kills a site or cuts it off for a while, and brings it back."""
        site = self.draw.randrange(SITES)
        if self.draw.random() < 0.5:
            os.kill(self.pids[site], signal.SIGKILL)
            ended(self.pids[site])
            time.sleep(self.draw.choice((0.0, 0.3, 1.5 * GRACE_S)))
            self.start(site)
        else:
            # Its connections stay open and nothing comes, as behind a broken link.
            os.kill(self.pids[site], signal.SIGSTOP)
            time.sleep(self.draw.choice((0.3, 1.5 * GRACE_S)))
            os.kill(self.pids[site], signal.SIGCONT)
        time.sleep(self.draw.uniform(0.0, 0.4))

    def end(self) -> None:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            ended(pid)
        if self.server:
            os.kill(self.server, signal.SIGTERM)
            assert ended(self.server) == 0, (self.root / "server.log").read_text()

    def check(self) -> None:
        lines = rows(self.run_dir)
        version, weights = saved_weights(self.run_dir)
        assert version == len(lines) > 3
        expected = replayed(lines, self.mode, SITES)
        for name in SHAPES:
            assert np.allclose(weights[name], expected[name], rtol=1e-9, atol=1e-12), name
        for line in lines:
            assert line["grace_waited_s"] < GRACE_S + LIMIT_S
            assert all(each["waited_s"] < GRACE_S + LIMIT_S for each in line["rounds"])
        assert all(event["silent_s"] < GRACE_S + LIMIT_S for event in events(self.run_dir, "site_forgotten"))
        for event in events(self.run_dir, "site_released"):
            assert event["waited_s"] < GRACE_S + LIMIT_S
            assert self.mode != "bounded" or event["clock"] - event["slowest"] <= 1
        # Each committed round counts once.
        taken = [(each["site"], each["session"], each["round"]) for line in lines for each in line["rounds"]]
        assert len(set(taken)) == len(taken)


def play(root: Path, seed: int) -> None:
    story = Story(root, seed)
    story.serve()
    try:
        for site in range(SITES):
            story.start(site)
        wait_until(lambda: len(rows(story.run_dir)) > 2)
        for _ in range(3):
            story.befall()
        present = len(rows(story.run_dir))
        wait_until(lambda: len(rows(story.run_dir)) > present + 2)
    finally:
        story.end()
    story.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", further(range(3)))
def test_the_weights_are_the_replay_of_the_log_whatever_befalls_sites(tmp_path: Path, seed: int) -> None:
    play(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(range(10, 30), 3))
def test_more_stories_of_killed_and_cut_off_sites(tmp_path: Path, seed: int) -> None:
    play(tmp_path, seed)


@pytest.mark.slow
def test_a_killed_server_goes_on_from_its_last_saved_version(tmp_path: Path) -> None:
    story = Story(tmp_path, 1)
    story.serve()
    try:
        for site in range(SITES):
            story.start(site)
        wait_until(lambda: len(rows(story.run_dir)) > 12)
        story.kill_server()
        saved, _ = saved_weights(story.run_dir)
        # As if the kernel took as long to end the killed server's last shard.
        late = listening(story.port + 2)
        threading.Timer(0.5, late.close).start()
        story.serve(held=late)
        started = events(story.run_dir, "server_started")[-1]
        assert started["version"] == saved >= 10
        wait_until(lambda: len(rows(story.run_dir)) > saved + 10)
    finally:
        story.end()
    story.check()
