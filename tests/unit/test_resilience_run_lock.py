"""One command at a time trains in a run directory: the second is refused, a dead one's place is taken at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.errors import ConfigError
from meshwright.resilience import run_lock
from meshwright.resilience.run_lock import FOLDER, Owner, RunLock

FORK = multiprocessing.get_context("fork")


def hold(run: Path, held: object, node: int | None = None) -> None:
    with RunLock(run, node=node):
        held.set()  # type: ignore[attr-defined]
        time.sleep(60)


def holder(run: Path, node: int | None = None) -> multiprocessing.Process:
    held = FORK.Event()
    process = FORK.Process(target=hold, args=(run, held, node))
    process.start()
    assert held.wait(20)
    return process  # type: ignore[return-value]


def test_a_second_command_is_told_who_trains_there(tmp_path: Path) -> None:
    process = holder(tmp_path / "run")
    try:
        with pytest.raises(ConfigError, match=rf"process {process.pid} on .* trains there since 20.*owner_s"):
            RunLock(tmp_path / "run")
    finally:
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    began = time.monotonic()
    with RunLock(tmp_path / "run"):
        assert time.monotonic() - began < 2, "killed on this host: taken over at once"
    assert not (tmp_path / "run").exists(), "nothing is left of a run that wrote nothing"


def test_waiting_for_the_end_of_another(tmp_path: Path) -> None:
    process = holder(tmp_path / "run")
    signal.signal(signal.SIGALRM, lambda *_: os.kill(process.pid or 0, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    # The dead holder is reaped by nobody until here: a zombie doesn't train.
    with RunLock(tmp_path / "run", wait_s=20):
        pass
    process.join()


@pytest.mark.parametrize("lives", [True, False])
def test_an_owner_on_another_host_is_judged_by_its_lease(
    lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "LEASE_S", 2.5)
    process = holder(tmp_path)
    try:
        (path,) = [path for path in (tmp_path / FOLDER).iterdir() if path.name.isdigit()]
        told = json.loads(path.read_text()) | {"machine": "another", "host": "elsewhere"}
        assert Owner(**told).host == "elsewhere"
        path.write_text(json.dumps(told))
        if lives:
            with pytest.raises(ConfigError, match="on elsewhere trains there"):
                RunLock(tmp_path)
    finally:
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    if not lives:
        with RunLock(tmp_path):
            pass


def test_of_many_at_once_one_takes_the_place_of_a_dead_one(tmp_path: Path) -> None:
    process = holder(tmp_path)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    queue = FORK.Queue()

    def race() -> None:
        try:
            with RunLock(tmp_path):
                queue.put("took")
                time.sleep(3)
        except ConfigError:
            queue.put("refused")

    racers = [FORK.Process(target=race) for _ in range(6)]
    for racer in racers:
        racer.start()
    found = sorted(queue.get(timeout=30) for _ in racers)
    for racer in racers:
        racer.join()
    assert found == ["refused"] * 5 + ["took"]


def test_nodes_own_their_numbers_and_keep_a_command_of_one_node_out(tmp_path: Path) -> None:
    """A node that was lost takes its own number again at once; one that lives is neither doubled nor joined."""
    processes = [holder(tmp_path / "run", node) for node in (0, 1)]
    try:
        for node, process in enumerate(processes):
            with pytest.raises(ConfigError, match=rf"process {process.pid} on .* as node {node} of several since"):
                RunLock(tmp_path / "run", node=node)
        with pytest.raises(ConfigError, match=r"trains there as node \d of several since"):
            RunLock(tmp_path / "run")
        os.kill(processes[1].pid or 0, signal.SIGKILL)
        processes[1].join()
        began = time.monotonic()
        with RunLock(tmp_path / "run", node=1):
            assert time.monotonic() - began < 2
    finally:
        for process in processes:
            process.kill()
            process.join()
    with RunLock(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists(), "what dead nodes left is gone as well"


@pytest.mark.parametrize("first", [None, 0])
def test_a_second_command_on_several_nodes_ends_with_status_2_on_each(
    first: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether a command of one node trains there, or the same nodes do."""
    run = tmp_path / "run"
    processes = [holder(run, None if first is None else node) for node in range(1 if first is None else 2)]
    try:
        for node in range(2):
            place = ["--nodes", "2", "--node", str(node), "--meet", "127.0.0.1", "--devices", "2"]
            assert main(["train", "--model", "gpt2", "--data", "missing.txt", "--run", str(run), *place]) == 2
            told = capsys.readouterr().err
            assert f"process {processes[node if first is not None else 0].pid} on " in told and " since 20" in told
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_a_directory_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"it can't be written \(Not a directory: .*; give another --run"):
        RunLock(tmp_path / "file" / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FOLDER).write_text("")
    with pytest.raises(ConfigError, match=rf"it can't be written \(File exists: .*{FOLDER}\)"):
        RunLock(tmp_path / "run")
