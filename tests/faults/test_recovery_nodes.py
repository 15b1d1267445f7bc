"""Nodes die, stop, come back or lose sight of each other: the others go on, from memory, on the same curve."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshwright.resilience import peers
from meshwright.train.faults import WRITER
from tests.runs import Running, call, curve, events, happened, last_step, wait_until, warm, words, write_corpus
from tests.tiers import cases, further

pytestmark = pytest.mark.slow
STEPS = 24
SOON_S = 45.0
"""From a failure to the next step, on a machine that does other things beside, and less than any limit of a hang."""
ONE = "replicate=1,precision=float64"
TWO = "replicate=2,precision=float64"
HELD = "hang:rank=0,step=7,phase=forward,generation=0"
"""Holds the first ranks until their node is lost, or the others know that one is."""
AGAIN = "slow:rank=0,step=10,seconds=3,generation=1"
"""Gives a node that comes back 45 s to join those after them."""
THREE = "shard=3,zero=2,rows=3x2-2,precision=float64"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nodes")
    write_corpus(root / "corpus.txt")
    warm()
    return root


@pytest.fixture(scope="module")
def whole(root: Path) -> dict[int, tuple[float, float]]:
    """The curve of one undisturbed rank."""
    status, text = call(words(root, "whole", layout=ONE), root / "whole.log")
    assert status == 0, text
    return curve(root / "whole")


class Nodes:
    """A run on several nodes of this machine, each a session of processes of its own."""

    def __init__(self, root: Path, name: str, count: int, layout: str, *more: str, ranks: int = 0) -> None:
        self.root, self.run, self._count = root, root / name, count
        self._words = ("--recovery.snapshot-every", "1", "--recovery.idle-s", "0", *more)
        self._layout, self._ranks = layout, ranks or count
        self.meet = "127.0.0.1"
        self.enter: Callable[[int], None] = lambda node: None
        self._starts = 0
        self.nodes: dict[int, Running] = {}

    def start(self, *which: int) -> Nodes:
        for node in which or range(self._count):
            place = ("--nodes", str(self._count), "--node", str(node), "--meet", self.meet)
            argv = words(self.root, self.run.name, *place, *self._words, layout=self._layout, devices=self._ranks)
            self._starts += 1
            log = self.root / f"{self.run.name}-{node}-{self._starts}.log"
            self.nodes[node] = Running(argv, log, before=lambda node=node: self.enter(node))  # type: ignore[misc]
        return self

    def signal(self, node: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the supervisor of a node and all that it has started."""
        for pid in self.nodes[node].alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def lose(self, node: int) -> None:
        """Kills everything of a node at once."""
        self.signal(node)
        self.nodes[node].wait()
        self.nodes.pop(node).no_orphans()

    def finish(self) -> None:
        """Waits for the run's end on every node, and that nothing is left of it."""
        try:
            for node, running in self.nodes.items():
                assert running.wait() == 0, f"node {node}: {running.text()}"
                running.no_orphans()
        finally:
            self.close()

    def close(self) -> None:
        for node in list(self.nodes):
            self.signal(node)

    def reaches(self, step: int) -> None:
        wait_until(lambda: last_step(self.run) >= step)

    def told(self, kind: str) -> list[dict]:
        return events(self.run, kind)

    def held(self) -> None:
        """Waits until a planted ``hang`` holds the run where it is."""
        wait_until(lambda: happened(self.run, "hang"))


@pytest.fixture
def nodes(root: Path) -> Iterator[Callable[..., Nodes]]:
    """Makes runs, of which nothing outlives the test."""
    made: list[Nodes] = []

    def make(*args: object, **more: object) -> Nodes:
        made.append(Nodes(root, *args, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


def close(found: dict[int, tuple[float, float]], expected: dict[int, tuple[float, float]]) -> None:
    assert sorted(found) == sorted(expected)
    for step, pair in expected.items():
        assert found[step] == pytest.approx(pair, rel=1e-9), step


def recovered(run: Nodes, count: int = 1) -> None:
    found = run.told("recovered")
    assert len(found) == count and all(row["seconds"] < SOON_S for row in found), found


def test_a_killed_rank_is_replaced_on_its_node(nodes: Callable[..., Nodes], whole: dict) -> None:
    layout = "shard=2,replicate=2,zero=3,precision=float64"
    faults = ("--recovery.faults", "kill:rank=2,step=6,phase=backward;kill:rank=1,step=12,phase=checkpoint")
    run = nodes("rank", 2, layout, *faults, ranks=4).start()
    run.finish()
    assert [(row["node"], row["lost"], row["step"]) for row in run.told("rank_lost")] == [(1, 2, 6), (0, 1, 12)]
    first, second = run.told("restored")
    assert first["tier"] == second["tier"] == "memory"
    assert first["step"] in (4, 5), "a copy counts once its checksums are made, moments after the step"
    assert second["step"] == 11, "by the last sum of the step that followed it"
    assert not run.told("node_lost")
    recovered(run, 2)
    close(curve(run.run), whole)


@pytest.mark.parametrize("lost", further([1, 0], (1,)))
def test_a_killed_node_costs_no_step(lost: int, nodes: Callable[..., Nodes], whole: dict) -> None:
    """Of two, the follower or the leader; the other holds copies of all that the dead one held alone."""
    options = ("--checkpoint.every", "0", "--recovery.faults", HELD)
    run = nodes(f"node{lost}", 2, "shard=2,zero=3,precision=float64", *options).start()
    run.held()
    run.lose(lost)
    run.finish()
    assert [row["node"] for row in run.told("node_lost")] == [lost]
    (planned,) = run.told("planned")
    assert planned["nodes"] == [1 - lost] and planned["generation"] == 1
    (restored,) = run.told("restored")
    assert restored["tier"] == "peer" and restored["step"] >= 4
    recovered(run)
    close(curve(run.run), whole)


@pytest.mark.parametrize("lost", cases([0, 1]))
def test_two_of_three_go_on(lost: int, nodes: Callable[..., Nodes], whole: dict) -> None:
    """Ranks read from the other node what theirs doesn't hold."""
    run = nodes(f"three{lost}", 3, THREE, "--checkpoint.every", "0", "--recovery.faults", HELD).start()
    run.held()
    run.lose(lost)
    run.finish()
    (planned,) = run.told("planned")
    assert planned["ranks"] == 2 and planned["nodes"] == sorted({0, 1, 2} - {lost})
    (restored,) = run.told("restored")
    assert restored["tier"] == "peer" and restored["step"] >= 4
    leaders = [row["node"] for row in run.told("leading")]
    assert leaders == [0] if lost else len(leaders) == 2 and leaders[1] in (1, 2), "the lowest, or who was quicker"
    recovered(run)
    close(curve(run.run), whole)


def test_a_node_that_comes_back_is_used_again(nodes: Callable[..., Nodes], whole: dict) -> None:
    run = nodes("back", 2, TWO, "--recovery.faults", f"{HELD};{AGAIN}").start()
    run.held()
    run.lose(1)
    wait_until(lambda: run.told("recovered"))
    run.start(1)
    run.finish()
    (grown,) = run.told("growing")
    assert grown["nodes"] == [1]
    assert [row["ranks"] for row in run.told("planned")] == [1, 2]
    assert [row["step"] for row in run.told("restored")][1] == grown["step"], "none is lost"
    close(curve(run.run), whole)


def test_an_interrupt_on_any_node_ends_the_run_on_all(nodes: Callable[..., Nodes]) -> None:
    run = nodes("asked", 2, TWO, "--train.steps", "2000").start()
    run.reaches(4)
    run.nodes[1].kill(signal.SIGINT)
    for running in run.nodes.values():
        assert running.wait() == 1, running.text()
        running.no_orphans()
    (interrupted,) = run.told("interrupted")
    assert run.told("checkpoint_saved")[-1]["step"] == interrupted["step"] == last_step(run.run)


@pytest.mark.parametrize("stopped", cases([0, 1]))
def test_a_stopped_node_finds_itself_fenced(stopped: int, nodes: Callable[..., Nodes], whole: dict) -> None:
    """Stopped where its writer is about to write; awake again, it must not, and joins the others."""
    faults = f"stop:rank={WRITER - stopped},step=6,phase={'checkpoint.rename' if stopped == 0 else 'checkpoint.write'}"
    run = nodes(f"stop{stopped}", 2, TWO, "--recovery.faults", f"{faults};{AGAIN}").start()
    wait_until(lambda: happened(run.run, "stop"))
    run.signal(stopped, signal.SIGSTOP)
    began = time.monotonic()
    wait_until(lambda: run.told("recovered"))
    assert time.monotonic() - began < SOON_S
    run.signal(stopped, signal.SIGCONT)
    run.finish()
    assert [row["node"] for row in run.told("node_lost")] == [stopped]
    assert run.told("growing")[0]["nodes"] == [stopped]
    folders = sorted(path.name for path in (run.run / "checkpoints").iterdir() if not path.name.startswith("."))
    assert folders == [f"step-{step:08d}" for step in (18, 21, 24)][-len(folders) :], folders
    close(curve(run.run), whole)


def patient(node: int) -> None:
    """Lets the others be silent for long, in runs that lose a node by its end alone: a starved machine is no fault."""
    peers.SILENCE_S = 60.0


class Network:
    """Two machines as network namespaces, and a router between them that can stop to forward."""

    def __init__(self) -> None:
        self._names = [f"mesh{os.getpid()}{end}" for end in ("a", "b", "r")]
        self.addresses = ["10.77.0.2", "10.77.1.2"]

    def build(self) -> Network:
        for name in self._names:
            self._ip("netns", "add", name)
            self._ip("-n", name, "link", "set", "lo", "up")
        for at, name in enumerate(self._names[:2]):
            router = self._names[2]
            self._ip("-n", router, "link", "add", f"to{at}", "type", "veth", "peer", "name", "out", "netns", name)
            for where, link, address in ((router, f"to{at}", f"10.77.{at}.1"), (name, "out", self.addresses[at])):
                self._ip("-n", where, "address", "add", f"{address}/24", "dev", link)
                self._ip("-n", where, "link", "set", link, "up")
            self._ip("-n", name, "route", "add", "default", "via", f"10.77.{at}.1")
        self.forward(True)
        return self

    def forward(self, on: bool) -> None:
        self._ip("netns", "exec", self._names[2], "sysctl", "-qw", f"net.ipv4.ip_forward={int(on)}")

    def enter(self, node: int) -> None:
        """Moves the calling process to a machine."""
        with open(f"/run/netns/{self._names[node]}", "rb") as file:
            assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) == 0

    def close(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@pytest.fixture
def network() -> Iterator[Network]:
    found = Network()
    try:
        try:
            yield found.build()
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
    finally:
        found.close()


def test_only_one_half_of_a_parted_network_trains(network: Network, nodes: Callable[..., Nodes], whole: dict) -> None:
    """The other ends its ranks, and joins again when it can."""
    run = nodes("parted", 2, TWO, "--recovery.faults", f"{HELD};{AGAIN}")
    run.meet, run.enter = network.addresses[0], network.enter
    run.start()
    run.held()
    network.forward(False)
    began = time.monotonic()
    wait_until(lambda: run.told("recovered"))
    assert time.monotonic() - began < SOON_S
    (planned,) = run.told("planned")
    other = 1 - planned["nodes"][0]
    wait_until(lambda: len(run.nodes[other].alive()) <= 2)  # no rank: the supervisor, and what renews its lock
    network.forward(True)
    run.finish()
    assert run.told("growing")[0]["nodes"] == [other]
    assert [row["ranks"] for row in run.told("planned")] == [1, 2]
    close(curve(run.run), whole)
