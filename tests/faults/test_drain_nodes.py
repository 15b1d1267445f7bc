"""Nodes that leave a run of two on request, the one that leads too, and come back: no step is lost or done twice."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.cli.main import main
from tests.faults.test_recovery_nodes import ONE, TWO, Nodes, close, nodes, root, whole  # noqa: F401 (fixtures)
from tests.runs import curve, rows, wait_until
from tests.tiers import further

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("node", further([1, 0], (1,)))
def test_a_node_leaves_and_comes_back(
    node: int,
    nodes: Callable[..., Nodes],  # noqa: F811
    root: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = nodes(f"drain{node}", 2, TWO, "--checkpoint.every", "0", "--train.steps", "5000").start()
    run.reaches(4)
    assert main(["drain", str(run.run), "--node", str(node)]) == 0, capsys.readouterr().err
    left = len(rows(run.run))
    wait_until(lambda: len(rows(run.run)) > left + 3)
    assert main(["drain", str(run.run), "--node", str(1 - node)]) == 1, "nobody would be left"
    assert main(["drain", str(run.run), "--node", str(node), "--undo"]) == 0, capsys.readouterr().err
    left = len(rows(run.run))
    wait_until(lambda: len(rows(run.run)) > left + 3)
    assert main(["cancel", str(run.run)]) == 0
    planned = [(row["nodes"], row["ranks"]) for row in run.told("planned")]
    assert planned == [([1 - node], 1), ([0, 1], 2)]
    assert not run.told("node_lost") and not run.told("rank_lost") and run.told("restored")[0]["step"] > 0
    steps = [row["step"] for row in rows(run.run)]
    assert steps == list(range(1, len(steps) + 1))
    # The same steps, undisturbed, on one rank.
    alone = nodes(f"alone{node}", 1, ONE, "--checkpoint.every", "0", "--train.steps", "5000").start()
    alone.reaches(steps[-1])
    assert main(["cancel", str(alone.run)]) == 0
    expected = curve(alone.run)
    close(curve(run.run), {step: expected[step] for step in steps})


def test_a_drained_leader_may_end(nodes: Callable[..., Nodes], capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """It leaves alone, whatever ends it; the other elects itself, and no step is lost."""
    run = nodes("leaves", 2, TWO, "--checkpoint.every", "0", "--train.steps", "5000").start()
    run.reaches(4)
    assert main(["drain", str(run.run), "--node", "0"]) == 0, capsys.readouterr().err
    run.nodes[0].kill(signal.SIGTERM)
    assert run.nodes[0].wait() != 0 and "left the run, in which it had no rank" in run.nodes[0].text()
    wait_until(lambda: run.told("leader_lost"))
    left = len(rows(run.run))
    wait_until(lambda: len(rows(run.run)) > left + 3)
    assert main(["cancel", str(run.run)]) == 0
    steps = sorted(curve(run.run))
    assert steps == list(range(1, len(steps) + 1)) and not run.told("rank_lost")


ISLANDS = ("--outer.every", "5", "--checkpoint.every", "0", "--train.steps", "5000")


@pytest.mark.parametrize("node", further([1, 0], (1,)))
def test_a_node_of_islands_leaves_at_sigterm_and_the_others_go_on(
    node: int,
    nodes: Callable[..., Nodes],  # noqa: F811
) -> None:
    """Its island's open round ends with the others', so that nothing is trained twice; started again, it comes back."""
    run = nodes(f"island{node}", 2, "islands=2", *ISLANDS).start()
    run.reaches(7)
    run.nodes[node].kill(signal.SIGTERM)
    assert run.nodes[node].wait() == 143, run.nodes[node].text()
    assert "left the run at SIGTERM and nothing of its round is lost" in run.nodes[node].text()
    run.nodes.pop(node).no_orphans()
    left = len(rows(run.run))
    wait_until(lambda: len(rows(run.run)) > left + 3)
    drained = run.told("drained")[0]
    assert drained["devices"] == [[node, 0]] and drained["step"] % 5 == 0 and "SIGTERM" in drained["why"]
    assert next((row["nodes"], row["ranks"]) for row in run.told("planned")) == ([1 - node], 1)
    assert not run.told("rank_lost") and not (run.run / "drain" / f"node-{node}.json").exists()
    steps = [row["step"] for row in rows(run.run)]
    assert steps == list(range(1, len(steps) + 1))
    run.start(node)
    wait_until(lambda: len(run.told("planned")) > 1 and run.told("planned")[-1]["ranks"] == 2)
    left = len(rows(run.run))
    wait_until(lambda: len(rows(run.run)) > left + 3)
    assert main(["cancel", str(run.run)]) == 0


def test_a_node_of_islands_that_cannot_end_its_round_in_time_gives_it_up(nodes: Callable[..., Nodes]) -> None:  # noqa: F811
    run = nodes("late", 2, "islands=2", "--outer.every", "4000", *ISLANDS[2:], "--launch.stop-s", "3").start()
    run.reaches(7)
    asked_at = time.monotonic()
    run.nodes[1].kill(signal.SIGTERM)
    assert run.nodes[1].wait() == 143 and "gave its open round up" in run.nodes[1].text()
    wait_until(lambda: run.told("node_lost"))
    waited_s = time.monotonic() - asked_at
    left = len(rows(run.run))
    wait_until(lambda: len(rows(run.run)) > left + 3)
    assert 3 <= waited_s < 8 and not run.told("rank_lost")
    assert main(["cancel", str(run.run)]) == 0


def test_sigterm_to_all_nodes_of_islands_ends_the_run_with_a_checkpoint(nodes: Callable[..., Nodes]) -> None:  # noqa: F811
    """The one that led may leave first: the other, whose leave was refused, then leads to save what it holds."""
    run = nodes("both", 2, "islands=2", *ISLANDS).start()
    run.reaches(7)
    for node in (0, 1):
        run.nodes[node].kill(signal.SIGTERM)
    statuses = [run.nodes[node].wait() for node in (0, 1)]
    assert statuses == [143, 143], run.nodes[1].text()
    for node in (0, 1):
        run.nodes[node].no_orphans()
    steps = [row["step"] for row in rows(run.run)]
    assert steps == list(range(1, len(steps) + 1)) and (run.run / "checkpoints" / f"step-{steps[-1]:08d}").is_dir()
    assert not (run.run / "drain" / "node-0.json").exists() and not (run.run / "drain" / "node-1.json").exists()
    assert not run.told("rank_lost")
