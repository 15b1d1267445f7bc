"""On a real Ray of three raylets on this machine: watched, a node killed and back, ended in each way, nothing left."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ray_cluster
from tests.committed import committed_before_restore
from tests.faults.test_slurm_cluster import curve_rounded, left_over
from tests.ray_cluster import RayTestCluster
from tests.runs import Running, events, last_step, wait_until, warm, words, write_corpus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(ray_cluster.missing()), reason=ray_cluster.missing() or "-"),
]
THREE = "shard=3,zero=2,rows=3x2-2,precision=float64"
STARTED_S = 400.0
"""Three interpreters import torch beside each other, on two cores that do other things too."""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayTestCluster]:
    write_corpus(tmp_path / "corpus.txt")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with RayTestCluster(tmp_path / "ray") as cluster:
        yield cluster


def command(root: Path, cluster: RayTestCluster, *more: str) -> list[str]:
    ray = ("--on", "ray", "--ray.address", cluster.address, "--ray.nodes", "3")
    recovery = ("--recovery.snapshot-every", "1", "--recovery.idle-s", "0", "--checkpoint.every", "0")
    slow = ("--train.steps", "100000", "--recovery.faults", "slow:rank=0,step=3,seconds=0.3,generation=0")
    return words(root, "run", *ray, *recovery, *slow, *more, layout=THREE, devices=3)


def meshwright(root: Path, *argv: str) -> str:
    running = Running(argv, root / "command.log")
    assert running.wait() == 0, running.text()
    return running.text()


def checkpoints(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()} if (run / "checkpoints").exists() else set()


def test_a_run_survives_its_nodes_and_leaves_nothing(cluster: RayTestCluster, tmp_path: Path) -> None:
    run, root = tmp_path / "run", tmp_path
    warm()
    bad = Running([*command(root, cluster), "--ray.gpus-per-node", "8"], root / "bad.log")
    assert bad.wait() == 2 and "the cluster has 0 such nodes" in bad.text(), bad.text()
    assert not (run / "launch" / "job.json").exists()

    driver = Running(command(root, cluster), root / "driver.log")
    wait_until(lambda: last_step(run) >= 5 or driver_ended(driver), STARTED_S)
    shown = meshwright(root, "status", str(run))
    assert "RUNNING, on 127.0.0." in shown and "ray" in shown, shown
    second = Running(command(root, cluster), root / "second.log")
    assert second.wait() == 2 and "trains there" in second.text()

    # The power of a node fails: its raylet, its actor, its supervisor and its rank are gone at once.
    seen, killed_at = last_step(run), time.monotonic()
    cluster.kill_node(1)
    committed = committed_before_restore(run)
    wait_until(lambda: events(run, "recovered"), 60.0)
    print(f"went on {time.monotonic() - killed_at:.1f} s after the loss")
    (restored,) = events(run, "restored")
    assert restored["step"] == committed and committed >= seen - 1, "no committed step is lost"
    assert restored["tier"] in ("memory", "peer")
    wait_until(lambda: "lost, asked for again" in meshwright(root, "status", str(run)), 60.0)
    ready = len(events(run, "node_ready"))
    back_at = time.monotonic()
    cluster.start_node(1)
    wait_until(lambda: len(events(run, "recovered")) >= 2, STARTED_S)
    print(f"grew {time.monotonic() - back_at:.1f} s after the start of a raylet")
    assert len(events(run, "node_ready")) > ready, "it joined by itself"

    reached = last_step(run)
    assert "ended after step" in meshwright(root, "cancel", str(run), "--wait", "240")
    assert driver.wait() == 1, driver.text()
    assert json.loads(meshwright(root, "status", str(run), "--json"))["state"] == "interrupted"
    before = checkpoints(run)
    assert before, "with a checkpoint"
    # Each step that was done twice came out the same.
    assert sorted(curve_rounded(run)) == list(range(1, max(curve_rounded(run)) + 1)) and last_step(run) >= reached
    printed = meshwright(root, "logs", str(run))
    assert "interrupted after step" in printed and "interrupted after step" in driver.text()
    wait_until(lambda: not left_over(run), 30.0)

    # The same command goes on; SIGTERM ends it with another checkpoint.
    reached = last_step(run)
    driver = Running(command(root, cluster), root / "driver.log")
    wait_until(lambda: last_step(run) > reached or driver_ended(driver), STARTED_S)
    driver.kill(signal.SIGTERM)
    assert driver.wait() == 143, driver.text()
    assert checkpoints(run) - before
    wait_until(lambda: not left_over(run), 30.0)

    # A driver that is killed takes all supervisors with it.
    reached = last_step(run)
    driver = Running(command(root, cluster), root / "driver.log")
    wait_until(lambda: last_step(run) > reached or driver_ended(driver), STARTED_S)
    killed_at = time.monotonic()
    driver.kill(signal.SIGKILL)
    wait_until(lambda: not left_over(run), 30.0)
    print(f"nothing was left {time.monotonic() - killed_at:.1f} s after the driver's end")
    driver.wait()
    assert "nobody trains" in meshwright(root, "cancel", str(run))


def driver_ended(driver: Running) -> bool:
    """Fails with what the driver printed when it has ended too early."""
    assert driver.pid in driver.alive(), driver.text()
    return False
