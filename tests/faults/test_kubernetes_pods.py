"""The rendered command of pods as local processes: they meet, train, lose one, and it joins again in place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.cli.main import main
from tests.kubernetes_cluster import Pod, load, run_to_end
from tests.runs import curve, events, last_step, wait_until, words, write_corpus

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
TWO = "replicate=2,precision=float64"
STARTED_S, LIMIT_S = 400.0, 600.0
SLOW = "slow:rank=0,step=3,seconds=0.3,generation=0"
AGAIN = "slow:rank=0,step=10,seconds=6,generation=1"
"""Gives a container that is started again 80 s to import torch and join."""


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pod]]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    pods: list[Pod] = []
    yield pods
    for pod in pods:
        pod.kill()


def render(root: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[dict]:
    (root / "recipe.toml").write_text("[recovery]\nsnapshot_every = 1\nidle_s = 0.0\n")
    verb, *rest = words(root, "run", *more, layout=TWO, devices=2)
    kubernetes = ["--on", "kubernetes", "--kubernetes.image", "i", "--kubernetes.claim", "c", "--kubernetes.nodes", "2"]
    kubernetes += ["--kubernetes.mount", str(root), "--kubernetes.python", sys.executable]
    assert main([verb, str(root / "recipe.toml"), *rest, *kubernetes, "--dry-run"]) == 0
    return load(capsys.readouterr().out)


def test_pods_meet_train_and_one_that_is_killed_joins_again(
    tmp_path: Path, pods: list[Pod], capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "corpus.txt")
    run = tmp_path / "run"
    manifests = render(tmp_path, capsys, "--recovery.faults", f"{SLOW};{AGAIN}", "--checkpoint.every", "0")
    # Images are pulled at different speeds: the second pod comes later, and no run begins without it.
    pods.append(Pod(manifests, 0, tmp_path))
    wait_until(lambda: (run / "launch" / "pod-0").exists(), STARTED_S)
    pods.append(Pod(manifests, 1, tmp_path))
    wait_until(lambda: last_step(run) >= 5, STARTED_S)
    assert events(run, "run_started")[0]["layout"] == TWO, "no rank began alone"

    committed = last_step(run)
    pods[1].kill()
    assert pods[1].poll() is None and pods[1].starts == 2
    wait_until(lambda: events(run, "recovered"), STARTED_S)
    (restored,) = events(run, "restored")
    assert restored["step"] >= committed - 1 and restored["tier"] in ("memory", "peer")
    run_to_end(pods, LIMIT_S)
    assert (pods[0].starts, pods[1].starts) == (1, 2), "only the killed one was started again"
    assert [event["node"] for event in events(run, "node_ready")].count(1) >= 2, "it joined by itself"
    assert last_step(run) == 24 and not list(run.glob("owner/*"))


def test_an_end_by_request_leaves_a_checkpoint_and_the_same_pods_go_on(
    tmp_path: Path, pods: list[Pod], capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "corpus.txt")
    run = tmp_path / "run"
    manifests = render(tmp_path, capsys, "--checkpoint.every", "0", "--recovery.faults", SLOW)
    pods += [Pod(manifests, index, tmp_path) for index in range(2)]
    wait_until(lambda: last_step(run) >= 5, STARTED_S)
    # One pod is evicted, and its machine with it: the run ends in a checkpoint, all containers start again.
    assert pods[1].terminate() == 143
    assert any((run / "checkpoints").iterdir())
    run_to_end(pods, LIMIT_S)
    assert sorted(curve(run)) == list(range(1, 25))
    # A pod in the stead of one that was lost at the very end finds the run done.
    late = Pod(manifests, 1, tmp_path)
    pods.append(late)
    run_to_end([late], LIMIT_S)
    assert late.starts == 1 and "has reached its last step" in late.text() and sorted(curve(run)) == list(range(1, 25))
