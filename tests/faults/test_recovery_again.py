"""Ranks that die while others recover, several at once, at places drawn by lot: nothing is lost, nothing is left."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import Running, call, curve, events, words, write_corpus

pytestmark = pytest.mark.slow
PLACES = ("start", "restore", "data", "forward", "collective", "backward", "optimizer", "snapshot", "checkpoint")
RANKS, DEATHS = 3, len(PLACES)
LAYOUT = "replicate=3,rows=3x2-2"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("again")
    write_corpus(root / "corpus.txt")
    return root


def drawn(seed: int) -> tuple[list[str], list[int]]:
    """Returns faults, each place in a generation of its own, and the steps that were done for sure before each.

    Of one or two ranks; seed 0 has rank 0 among them at every place.
    """
    draw, step, faults, done = random.Random(seed), 2, [], []
    places = draw.sample(PLACES, DEATHS)
    while places[0] in ("start", "restore"):
        places.append(places.pop(0))
    for generation, place in enumerate(places):
        ranks = {draw.randrange(RANKS if seed else 1), draw.randrange(RANKS)}
        at, phase = 0, "" if place == "start" else place
        if place not in ("start", "restore"):
            step += draw.randint(1, 2) if place != "checkpoint" else 3 - step % 3
            step += place == "snapshot" and step % 3 == 0  # what is copied for the disk then is all
            at = step
        done.append(max(step if place in ("snapshot", "checkpoint") else at - 1, *done, 0))
        faults += [
            f"kill:rank={rank},step={at},generation={generation}" + (f",phase={phase}" if phase else "")
            for rank in ranks
        ]
    return faults, done


def held(running: Running) -> tuple[int, int]:
    """Returns how many segments of shared memory a supervisor holds, and at how many ports it listens."""
    listening = {
        line.split()[9]
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    }
    memory = ports = 0
    for fd in _descriptors(running.pid):
        memory += "memfd:meshwright" in fd
        ports += fd.removeprefix("socket:[").removesuffix("]") in listening
    return memory, ports


def _descriptors(pid: int) -> Iterator[str]:
    folder = Path(f"/proc/{pid}/fd")
    try:
        for one in folder.iterdir():
            try:
                yield os.readlink(one)
            except OSError:
                continue
    except OSError:
        return


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[int, tuple[float, float]]:
    status, text = call(words(root, "whole", layout=LAYOUT, devices=RANKS), root / "whole.log")
    assert status == 0, text
    return curve(root / "whole")


@pytest.mark.extended("test_recovery.py::test_killed_in_every_phase_of_a_step")
@pytest.mark.parametrize("seed", [0, 1])
def test_ranks_die_at_places_drawn_by_lot(seed: int, root: Path, expected: dict) -> None:
    """In starts, while the state is taken up, in the first steps after, two at once: no step that was copied is lost.

    The last generation is slow, so that what is held then can be counted: what the first one held, and states.
    """
    faults, done = drawn(seed)
    holds = [f"slow:rank=0,step={at},seconds=0.2,generation={generation}" for generation, at in ((0, 2), (DEATHS, 22))]
    options = ("--recovery.snapshot-every", "1", "--recovery.back-s", "0.01", "--recovery.attempts", "5")
    argv = words(root, f"lot{seed}", "--recovery.faults", ";".join(faults + holds), *options, layout=LAYOUT, devices=3)
    run = root / f"lot{seed}"
    running, least = Running(argv, root / f"lot{seed}.log"), dict[int, list[int]]()
    while running.pid in running.alive():
        generation, found = len(events(run, "recovered")), held(running)
        if found[0]:
            least[generation] = [min(pair) for pair in zip(least.get(generation, found), found)]
        time.sleep(0.05)
    assert running.wait() == 0, running.text()
    running.no_orphans()
    assert curve(run) == expected
    lost, restored = events(run, "rank_lost"), [row["step"] for row in events(run, "restored")]
    assert len(lost) == DEATHS
    assert all(had - 1 <= step for had, step in zip(done, restored)), f"{done}: {restored}"
    (memory, ports), (memory_then, ports_then) = least[0], least[max(least)]
    states = 3 * RANKS  # two snapshots of each rank and what it left for the disk, mapped once more
    assert memory_then <= memory + states and ports_then <= ports, f"more is held at the end: {least}"
