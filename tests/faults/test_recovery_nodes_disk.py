"""Processes that write a checkpoint of several nodes together are killed at every place of it: it is whole, or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.checkpoint.store import CheckpointStore
from meshwright.train.faults import WRITER
from tests.faults import test_recovery_nodes as over_nodes
from tests.faults.test_recovery_nodes import TWO, Nodes, close, patient
from tests.runs import curve

pytestmark = pytest.mark.slow
root, whole, nodes = over_nodes.root, over_nodes.whole, over_nodes.nodes
HEAD = ("open", "write", "written", "manifest", "rename", "renamed")
"""Of the writer that gives the checkpoint its name: before anything, before its files, after them, before the manifest,
after it, after the name."""
OTHER = ("open", "write", "written")
"""Of the other one, which has no part in what follows."""


def test_writers_of_two_nodes_are_killed_at_every_place_of_a_checkpoint(
    nodes: Callable[..., Nodes], whole: dict
) -> None:
    """What was being written gets no name, what stood stands, training goes on, and the next one is whole."""
    places = [(WRITER, place) for place in HEAD] + [(WRITER - 1, place) for place in OTHER]
    faults = [f"kill:rank={rank},step={2 * at},phase=checkpoint.{place}" for at, (rank, place) in enumerate(places, 1)]
    options = ("--checkpoint.every", "2", "--checkpoint.keep", "20", "--recovery.faults", ";".join(faults))
    run = nodes("writers", 2, TWO, *options)
    run.enter = patient
    run.start()
    run.finish()
    failed = {row["step"]: row["reason"] for row in run.told("checkpoint_failed")}
    assert sorted(failed) == [2 * at for at in range(1, len(places) + 1)]
    assert all("its writer was killed" in failed[2 * at] for at in range(1, len(HEAD) + 1)), failed
    others = [failed[2 * at] for at in range(len(HEAD) + 1, len(places) + 1)]
    assert all("lost contact with the writer of another node" in reason for reason in others), failed
    assert [row["step"] for row in run.told("checkpoint_saved")] == [20, 22, 24]
    folder = run.run / "checkpoints"
    named = [2 * len(HEAD), 20, 22, 24]
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:08d}" for step in named]
    for step in named:
        found = CheckpointStore(folder).find(step)
        assert found is not None and len(found.manifest.files) == 2, "from each node its ranks' files"
    assert not run.told("rank_lost") and not run.told("node_lost")
    close(curve(run.run), whole)
