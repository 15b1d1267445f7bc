"""A flipped bit on one of several nodes: the leader has all of them go back to the last state that agreed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults import test_recovery_nodes as over_nodes
from tests.faults.test_recovery_nodes import TWO, Nodes, close
from tests.runs import curve

pytestmark = pytest.mark.slow
root, whole, nodes = over_nodes.root, over_nodes.whole, over_nodes.nodes


@pytest.mark.parametrize("of", ["weights", pytest.param("moments", marks=pytest.mark.long)])
def test_all_nodes_go_back_from_a_flip_on_one(of: str, nodes: Callable[..., Nodes], whole: dict) -> None:
    fault = f"flip:rank=1,step=9,phase=forward,of={of},bit=25,seed=4"
    run = nodes(f"flip-{of}", 2, TWO, "--recovery.faults", fault, "--recovery.back-s", "1e-6").start()
    run.finish()
    (damaged,), (repaired,) = run.told("damaged"), run.told("damage_repaired")
    assert damaged["step"] == 9 and damaged["back_to"] == 8
    assert repaired["damaged"] == [1]
    (restored,) = run.told("restored")
    assert restored["step"] == 8, "of which both nodes had sound snapshots"
    assert not run.told("node_lost") and not run.told("leader_lost") and not run.told("rank_lost")
    close(curve(run.run), whole)
