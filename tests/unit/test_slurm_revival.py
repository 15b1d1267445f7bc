"""A job's keeper on simulated nodes: who is started again, how often, and when a job whose srun hangs ends."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from meshwright.launch import slurm_job, slurm_node
from meshwright.launch.config import SlurmConfig
from meshwright.launch.slurm import SlurmLauncher, SlurmPlace
from meshwright.launch.slurm_job import SlurmJob
from meshwright.launch.slurm_node import LifeSigns, NodeRevival
from meshwright.resilience.run_lock import RunLock, has_locks, lock_stamps

PROGRAM = """#!/bin/sh
echo "$(basename $0) $*" >> {log}
case $(basename $0) in
  squeue) echo "n0 n[0-2]" ;;
  srun) exec sleep 600 ;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm whose srun never ends, and the file of the commands that were called."""
    log = tmp_path / "calls"
    log.touch()
    (tmp_path / "bin").mkdir()
    for name in ("srun", "squeue", "scancel", "scontrol"):
        program = tmp_path / "bin" / name
        program.write_text(PROGRAM.format(log=log))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return log


class Nodes:
    """Supervisors whose presence a test moves."""

    def __init__(self, folder: Path, job: str = "7") -> None:
        self.live, self.stamp, self.owned = {0, 1, 2}, 0, True
        self.said: list[str] = []
        launcher = SlurmLauncher(config=SlurmConfig(nodes=3), folder=folder, name="run", rank_count=3)
        self.place = SlurmPlace(job=job, nodes=3, names=("n0", "n1", "n2"), is_batch=True)
        signs = LifeSigns(presence=self.read, is_owned=lambda: self.owned, start_s=0.5)
        self.revival = NodeRevival(self.place, ("train",), launcher, signs, self.said.append)
        self._stamps = dict.fromkeys(range(3), 0)

    def read(self, nodes: Iterable[int]) -> Mapping[int, int]:
        self.stamp += 1
        self._stamps |= dict.fromkeys(self.live, self.stamp)
        return {node: self._stamps[node] for node in nodes}

    def poll(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.revival.poll()
            time.sleep(0.05)

    def sruns(self) -> list[subprocess.Popen[bytes]]:
        return [restart.step for restart in self.revival._restarts.values()]


def started(calls: Path) -> list[str]:
    return [line for line in calls.read_text().splitlines() if line.startswith("srun ")]


def test_a_node_that_is_lost_twice_is_started_twice(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_node, "_MISSING_S", 0.4)
    monkeypatch.setattr(slurm_node, "_MOST_PAUSE_S", 0.2)
    nodes = Nodes(tmp_path)
    nodes.poll(0.5)
    assert started(calls) == [] and nodes.sruns() == []
    nodes.live = {0, 2}
    nodes.poll(1.0)
    (first,) = nodes.sruns()
    assert len(started(calls)) == 1 and "--nodelist=n1" in started(calls)[0] and "--jobid=7" in started(calls)[0]
    nodes.live = {0, 1, 2}
    nodes.poll(0.8)
    assert nodes.sruns() == [first] and first.poll() is None, "the node trains under it"
    # Lost again: the srun of the first time waits for a task that is gone.
    nodes.live = {0, 2}
    nodes.poll(1.5)
    (second,) = nodes.sruns()
    assert first.poll() is not None and second is not first and second.poll() is None
    assert len(started(calls)) == 2 and len(nodes.said) == 2
    second.kill()
    second.wait()


def test_a_node_that_never_lives_is_tried_again(tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_node, "_MISSING_S", 0.3)
    monkeypatch.setattr(slurm_node, "_MOST_PAUSE_S", 0.1)
    monkeypatch.setattr(slurm_node, "_LATE_S", 0.6)
    nodes = Nodes(tmp_path)
    nodes.live = {0, 2}
    nodes.poll(2.5)
    assert len(started(calls)) >= 2 and len(nodes.sruns()) <= 1
    for step in nodes.sruns():
        step.kill()
        step.wait()


@pytest.mark.parametrize("ends_in_order", [True, False])
def test_a_job_ends_although_srun_waits_for_a_lost_task(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, ends_in_order: bool
) -> None:
    monkeypatch.setattr(slurm_job, "_LOOK_S", 0.1)
    monkeypatch.setattr(slurm_node, "_OVER_S", 1.5)
    nodes = Nodes(tmp_path)
    job = SlurmJob(nodes.place, ("train",), SlurmConfig(nodes=3), lambda: True, nodes.said.append, nodes.revival)
    nodes.revival.poll()
    nodes.revival.poll()
    nodes.live, nodes.owned = set(), not ends_in_order
    began = time.monotonic()
    assert job.run() == 0
    took_s = time.monotonic() - began
    assert took_s < 1.4 if ends_in_order else 1.4 < took_s < 10.0
    assert len(started(calls)) == 1, "nobody is started again where nobody lives"


def test_a_directory_is_owned_until_its_command_lets_go(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert not has_locks(run)
    with RunLock(run, node=0):
        with RunLock(run, node=1):
            assert has_locks(run)
            before = lock_stamps(run)
            assert before.keys() == {0, 1}
            end = time.monotonic() + 20.0
            while any(lock_stamps(run)[node] == before[node] for node in before):
                assert time.monotonic() < end, "each is renewed about once a second"
                time.sleep(0.1)
        assert has_locks(run) and lock_stamps(run).keys() == {0}
    assert not has_locks(run) and lock_stamps(run) == {}
    (run / "owner").mkdir(parents=True)
    (run / "owner" / "node-1-000001").write_text("{}")
    assert has_locks(run), "one that was killed never lets go"
