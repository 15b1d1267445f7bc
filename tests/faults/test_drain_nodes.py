"""Nodes that leave a run of two on request, the one that leads too, and come back: no step is lost or done twice."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.cli.main import main
from tests.faults.test_recovery_nodes import ONE, TWO, Nodes, close, nodes, root, whole  # noqa: F401 (fixtures)
from tests.runs import curve, rows, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("node", [1, 0])
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
