"""`prepare` on a real Slurm and a real Ray of three nodes: killed twice in the middle, the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.data import stages
from meshwright.data.config import DataConfig
from meshwright.data.filters import FilterConfig
from meshwright.data.prepare import prepare
from tests import ray_cluster, slurm_cluster
from tests.prepare_runs import FILTERS_LACK, FinishedFiles, check_filtered, contents, write_filtered_texts, write_texts
from tests.ray_cluster import RayTestCluster
from tests.slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1500)]
STARTED_S = 400.0
"""Interpreters start beside each other, on two cores that do other things too."""
SCRIPT = """
import json, sys
import meshwright
from meshwright.data import stages
from meshwright.jobs.prepare_engines import PrepareConfig
stages.UNIT_BYTES, stages.GROUP_BYTES = {units}, {group}
meshwright.prepare(PrepareConfig.from_dict(json.loads(sys.argv[1])), sys.argv[2])
"""
UNITS, GROUP = (1 << 16, 1 << 16), 1 << 16


class Case:
    """A text, its set by the own pipeline, and the command that prepares it by an engine."""

    def __init__(
        self, root: Path, engine: dict[str, object], text: str = "", filters: FilterConfig | None = None
    ) -> None:
        text = text or write_texts(root / "text", most_lines=4000)
        filters = filters or FilterConfig()
        self.config = DataConfig(paths=(text,), vocab_size=400, validation_share=0.2, filters=filters)
        self.out, self.root = root / "set", root
        self.units = self.shards = 0
        self.own = prepare(self.config, root / "own", self._count, workers=2)
        settings = {name: value for name, value in self.config.to_dict().items() if name != "workers"} | engine
        self._command = [sys.executable, "-c", SCRIPT.format(units=UNITS, group=GROUP), json.dumps(settings)]
        self.finished = FinishedFiles(root / "set.partial")

    def _count(self, progress: stages.Progress) -> None:
        folder = self.root / "own.partial"
        self.shards, self.units = len(list(folder.glob("read-*.documents"))), len(list(folder.glob("unit-*.bin")))

    def start(self) -> subprocess.Popen[bytes]:
        with (self.root / "command.log").open("ab") as log:
            return subprocess.Popen([*self._command, str(self.out)], stdout=log, stderr=log)

    def wait_for(self, process: subprocess.Popen[bytes], condition: Callable[[], object]) -> None:
        end = time.monotonic() + STARTED_S
        while not condition():
            assert process.poll() is None and time.monotonic() < end, self.log()
            time.sleep(0.01)

    def log(self) -> str:
        partial = "".join(path.read_text()[-1500:] for path in (self.root / "set.partial").glob("slurm-*.out"))
        return (self.root / "command.log").read_text()[-3000:] + partial

    def kill(self, process: subprocess.Popen[bytes], pattern: str, expected: int) -> None:
        """Kills the command in the middle of a stage, and notes what was finished."""
        process.kill()
        assert process.wait(60.0) == -signal.SIGKILL
        assert 2 <= len(self.finished.list(pattern)) < expected, "in the middle"
        self.finished.remember(pattern)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "UNIT_BYTES", UNITS)
    monkeypatch.setattr(stages, "GROUP_BYTES", GROUP)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def kill_twice_and_finish(case: Case, lose_a_node: Callable[[], None]) -> None:
    """Kills the command while it reads; starts it again, takes a node and then the command while it encodes."""
    process = case.start()
    case.wait_for(process, lambda: len(case.finished.list("read-*.documents")) >= 2)
    case.kill(process, "read-*.documents", case.shards)
    process = case.start()
    case.wait_for(process, lambda: len(case.finished.list("unit-*.bin")) >= 2)
    lose_a_node()
    case.wait_for(process, lambda: len(case.finished.list("unit-*.bin")) >= 4)
    case.kill(process, "unit-*.bin", case.units)
    process = case.start()
    # Until the last stage has deleted the working directory.
    remembered = case.finished.remembered()
    seen: dict[Path, tuple[int, int]] = {}
    while process.poll() is None:
        seen |= case.finished.identities(remembered)
        time.sleep(0.05)
    assert process.returncode == 0, case.log()
    assert len(seen) == len(remembered) and seen == remembered, "no finished task ran again"
    assert contents(case.out) == contents(case.own.path)


def filter_and_compare(root: Path, engine: dict[str, object]) -> None:
    """Prepares with every filter, a file a task, and compares with one process."""
    case = Case(root, engine, *write_filtered_texts(root, files=32))
    assert case.shards >= 4, "tasks on several nodes"
    process = case.start()
    assert process.wait(2 * STARTED_S) == 0, case.log()
    check_filtered(case.out)
    assert contents(case.out) == contents(case.own.path)


def lose_and_start(cluster: SlurmCluster) -> None:
    cluster.kill_node(1)
    cluster.start_node(1)


@pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "-")
def test_slurm_gives_the_same_bytes_after_two_kills_and_a_lost_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SlurmCluster(tmp_path / "slurm") as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        case = Case(tmp_path, {"engine": "slurm", "slurm": {"jobs": 6, "time": "30"}})
        refused = subprocess.run(
            [sys.executable, "-m", "meshwright", "prepare", case.config.paths[0], "--engine", "slurm", "--to",
             str(tmp_path / "no"), "--slurm.partition", "none"],
            capture_output=True, text=True, timeout=STARTED_S,
        )  # fmt: skip
        assert refused.returncode == 1 and "Slurm refuses the job" in refused.stderr, refused.stderr
        kill_twice_and_finish(case, lambda: lose_and_start(cluster))
        assert cluster.call("squeue", "-h") == ""

        # SIGTERM ends the jobs with the command.
        (tmp_path / "set").rename(tmp_path / "first")
        process = case.start()
        case.wait_for(process, lambda: len(case.finished.list("read-*.documents")) >= 1)
        process.terminate()
        assert process.wait(STARTED_S) != 0 and cluster.call("squeue", "-h") == ""
        if not FILTERS_LACK:
            filter_and_compare(tmp_path / "filtered", {"engine": "slurm", "slurm": {"jobs": 3, "time": "30"}})


@pytest.mark.skipif(bool(ray_cluster.missing()), reason=ray_cluster.missing() or "-")
def test_ray_gives_the_same_bytes_after_two_kills_and_a_lost_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with RayTestCluster(tmp_path / "ray") as cluster:
        case = Case(tmp_path, {"engine": "ray", "ray": {"address": cluster.address}})
        kill_twice_and_finish(case, lambda: cluster.kill_node(1))
        if not FILTERS_LACK:
            filter_and_compare(tmp_path / "filtered", {"engine": "ray", "ray": {"address": cluster.address}})
