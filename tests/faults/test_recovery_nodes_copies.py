"""Neighbouring nodes go at once: with as many copies of each node's state as that, the rest goes on from memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults import test_recovery_nodes as over_nodes
from tests.faults.test_recovery_nodes import AGAIN, HELD, THREE, TWO, Nodes, close, patient
from tests.runs import curve, wait_until

pytestmark = pytest.mark.slow
root, whole, nodes = over_nodes.root, over_nodes.whole, over_nodes.nodes


@pytest.mark.parametrize("lost", [(1, 2), pytest.param((0, 1), marks=pytest.mark.long)])
def test_two_of_three_go_at_once_and_the_third_goes_on(
    lost: tuple[int, int], nodes: Callable[..., Nodes], whole: dict
) -> None:
    """Two followers, or the leader and the one that would have followed it; nothing is on disk to go back to."""
    options = ("--checkpoint.every", "0", "--recovery.copies", "2", "--recovery.faults", HELD)
    run = nodes(f"copies{lost[0]}", 3, THREE, *options)
    run.enter = patient
    run.start()
    run.held()
    for node in lost:
        run.signal(node)
    for node in lost:
        run.lose(node)
    run.finish()
    (left,) = {0, 1, 2} - set(lost)
    assert run.told("planned")[-1]["nodes"] == [left] and run.told("planned")[-1]["ranks"] == 1
    restored = run.told("restored")
    # Held in step 7, all ranks have begun their copies of step 5, and so have those of step 4 on both other nodes.
    assert restored and all(row["tier"] == "peer" and row["step"] >= 4 for row in restored), restored
    assert not run.told("resumed") and not run.told("gave_way") and not run.told("copies_reduced")
    close(curve(run.run), whole)


def test_a_node_lost_right_after_the_run_grew_costs_no_step(nodes: Callable[..., Nodes], whole: dict) -> None:
    """It ran alone, so that it alone had the state; what came back has copied it before the first step of both."""
    faults = f"{HELD};{AGAIN};hang:rank=0,step=0,generation=2"
    run = nodes("grown", 2, TWO, "--checkpoint.every", "0", "--recovery.faults", faults)
    run.enter = patient
    run.start()
    run.held()
    run.lose(1)
    wait_until(lambda: run.told("recovered"))
    run.start(1)
    wait_until(lambda: run.told("state_copied"))
    (grown,), (copied,) = run.told("growing"), run.told("state_copied")
    assert (copied["node"], copied["step"], copied["ranks"]) == (1, grown["step"], [0])
    run.lose(0)
    run.finish()
    restored = run.told("restored")
    assert [(row["tier"], row["step"]) for row in restored][-1] == ("peer", grown["step"]) and not run.told("resumed")
    close(curve(run.run), whole)
