"""What carries snapshots between nodes dies or stops, and networks part so that most nodes are away from the leader."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from meshwright.train.faults import COURIER
from tests.faults import test_recovery_nodes as over_nodes
from tests.faults.test_recovery_nodes import HELD, SOON_S, THREE, TWO, Network, Nodes, close
from tests.runs import curve, rows, wait_until

pytestmark = pytest.mark.slow
root, whole, nodes, network = over_nodes.root, over_nodes.whole, over_nodes.nodes, over_nodes.network
AGAIN = over_nodes.AGAIN.replace("generation=1", "generation=2")
"""Gives the leader that was alone time to join those after it."""


def test_a_courier_that_dies_is_replaced_and_one_within_a_sending_costs_a_snapshot(
    nodes: Callable[..., Nodes], whole: dict
) -> None:
    """First a courier is killed while it sends; then a node dies while its courier does: half a copy is none."""
    # A courier sends the newest snapshot alone: ranks give it time for those of steps 6 and 11, and wait behind 12's.
    held = "slow:rank=0,step=6,seconds=1,generation=0;hang:rank=0,step=13,phase=forward,generation=0"
    faults = f"kill:rank={COURIER},step=6,phase=send;stop:rank={COURIER - 1},step=12,phase=send;{held}"
    run = nodes("courier", 2, TWO, "--checkpoint.every", "0", "--recovery.faults", faults).start()
    wait_until(lambda: list(run.run.glob("chaos/stop-*")))
    run.lose(1)
    run.finish()
    assert [row["node"] for row in run.told("courier_lost")] == [0]
    assert [row["node"] for row in run.told("node_lost")] == [1] and not run.told("rank_lost")
    (restored,) = run.told("restored")
    assert restored["tier"] == "peer" and restored["step"] == 11
    state = rows(run.run)[-1]["memory"]
    assert restored["bytes"] < 1.1 * (state["parameters"] + state["optimizer"]), (
        "each part is copied once, not each copy"
    )
    close(curve(run.run), whole)


def test_most_nodes_go_on_though_the_leader_is_on_the_other_side(
    network: Network, nodes: Callable[..., Nodes], whole: dict
) -> None:
    """One of three leads, and loses sight of the two others: it gives way, they train, and it joins them again."""
    run = nodes("most", 3, THREE, "--recovery.faults", f"{HELD};{AGAIN}", "--checkpoint.every", "0")
    run.meet, run.enter = network.addresses[0], lambda node: network.enter(min(node, 1))
    run.start()
    run.held()
    network.forward(False)
    began = time.monotonic()
    wait_until(lambda: run.told("recovered"))
    assert time.monotonic() - began < SOON_S
    planned = run.told("planned")[-1]
    assert planned["nodes"] == [1, 2], "the leader was alone"
    assert [(row["node"], row["reached"]) for row in run.told("gave_way")] == [(0, [0])]
    # No rank: the supervisor, what renews its lock, and what lets others read its states.
    wait_until(lambda: len(run.nodes[0].alive()) <= 3)
    network.forward(True)
    run.finish()
    assert run.told("growing")[0]["nodes"] == [0]
    close(curve(run.run), whole)
