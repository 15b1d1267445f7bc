"""A node's ranks are closed however a generation ends there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast
from unittest.mock import MagicMock

import pytest

from meshwright.errors import CheckpointError
from meshwright.launch.devices import Devices
from meshwright.resilience import local_node
from meshwright.resilience.messages import Order
from meshwright.spec.layout import Layout
from meshwright.train.session import TrainJob


@pytest.mark.parametrize("start_fails", [False, True])
def test_ranks_are_closed_when_their_storage_fails(monkeypatch: pytest.MonkeyPatch, start_fails: bool) -> None:
    """The shared memory of ended ranks isn't left to a storage that can't stop."""
    ranks, storage = MagicMock(), MagicMock()
    ranks.furthest_step, ranks.launcher.failures = 3, ()
    ranks.all_segments.return_value = []
    monkeypatch.setattr(local_node, "GenerationRanks", lambda *_: ranks)
    storage.stop.side_effect = CheckpointError("the disk is full")
    if start_fails:
        storage.start.side_effect = RuntimeError("no room for the keeper")
    monkeypatch.setattr(local_node.dataclasses, "replace", lambda value, **_: value)
    monkeypatch.setattr(local_node, "retain_snapshots", lambda *_: ["newest"])
    plan, share = SimpleNamespace(layout=Layout.parse("replicate=2")), SimpleNamespace(slots=(), first_rank=0)
    order = SimpleNamespace(generation=0, plan=plan, nodes=(0,), state=None, share=lambda node: share)
    node = local_node.LocalNode(
        cast(TrainJob, MagicMock()),
        cast(Devices, MagicMock()),
        lambda *_: cast(TrainJob, MagicMock()),
        MagicMock(),
        storage,
    )
    order.lost_for_s = None
    with pytest.raises(CheckpointError, match="full"):
        node.run(cast(Order, order), lambda _ranks: None)
    ranks.close.assert_called_once()
    # What the ranks left is there all the same, and the store's port is free again, whoever would have closed it.
    assert node.snapshots == ["newest"]
    storage.place_ranks.return_value.listener.close.assert_called_once()
