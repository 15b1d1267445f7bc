"""What two halves of a micro-batch, or passes of a pair, wait for is reported with the layer of each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.models.build import build_meta
from meshwright.monitor.progress import ProgressWriter, read_progress
from meshwright.parallel.row_exchange import Leg
from meshwright.parallel.stage_module import Stamp
from meshwright.proof.verify import random_batches
from meshwright.spec.layout import Layout
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import analyse_model
from meshwright.train.rank_progress import RankProgress
from tests.contract.test_expert_parallel import config
from tests.contract.test_node_dispatch import TOKENS, VOCAB
from tests.fake.recorder import build_rank
from tests.ranks.group import run_ranks
from tests.tiers import further

ROWS = 12
Place = tuple[str, int]
"""Phase and layer."""


def places(text: str, folder: Path, layers: int) -> list[list[tuple[Place, Place]]]:
    """Returns of each rank, for every exchange with experts that it waits for, where that is and where it stands."""
    layout, model = Layout.parse(text), build_meta(config("mixtral", layers=layers), vocab=VOCAB, context=TOKENS)
    facts = analyse_model(model, layout, None)

    def work(rank: int) -> list[tuple[Place, Place]]:
        program = build_rank(model, layout, facts)
        (batch,) = random_batches(1, ROWS, TOKENS, VOCAB, documents=False)
        first, last = layout.span(rank, ROWS)
        rows = (last - first) // layout.microbatches
        pairs = zip(batch.tokens[first:last].split(rows), batch.targets[first:last].split(rows))
        batches = [MicroBatch(tokens, targets, None) for tokens, targets in pairs]
        program.forward_backward(batches, 1, (0, 0))  # its trial forward is no part of a step
        path = folder / f"{rank}.bin"
        standing = RankProgress(ProgressWriter(path, 0), None, lambda: 0)
        standing.attach(program)
        entered: dict[str, int] = {}
        legs: list[tuple[Leg, int]] = []
        awaited: list[Place] = []
        found: list[tuple[Place, Place]] = []

        def enter(layer: int) -> None:
            entered[threading.current_thread().name] = layer
            standing.enter(layer)

        def begin(leg: Leg, tensor: Any) -> Any:
            if all(leg is not other for other, _ in legs):
                legs.extend((way, entered[threading.current_thread().name]) for way in (leg, leg.of_gradients()))
            return plain_begin(leg, tensor)

        def end(leg: Leg) -> Any:
            (layer,) = {layer for other, layer in legs if other is leg}
            # A recomputed layer waits in backward for what its forward sends.
            in_backward = torch._C._current_graph_task_id() != -1
            awaited.append(("backward" if in_backward else "forward", layer))
            result = plain_end(leg)
            awaited.pop()
            return result

        def waits(operation: str, number: int, size: int) -> None:
            standing.waits(operation, number, size)
            (stamp,) = read_progress(path)
            if operation and awaited:
                found.append((awaited[-1], (stamp.phase, stamp.layer)))

        plain_begin, plain_end = Leg.begin, Leg.end
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Leg, "begin", begin)
            patch.setattr(Leg, "end", end)
            assert program.mesh is not None
            program.progress_hooks.listener, program.mesh.log.on_wait = enter, waits
            program.forward_backward(batches, 1, (0, 1), Stamp(phase=standing.phase))
        return found

    return run_ranks(layout.world, work, timeout=250)


def check(found: Sequence[tuple[Place, Place]], layers: set[int]) -> None:
    assert {layer for (_, layer), _ in found} == layers and {phase for (phase, _), _ in found} == {
        "forward",
        "backward",
    }
    assert [stands for _, stands in found] == [awaits for awaits, _ in found]


@pytest.mark.parametrize("more", further(["ep=2", "ep=2,recompute=full", "ep=2,ep_node=1"]))
def test_of_halves(more: str, tmp_path: Path) -> None:
    for found in places(f"shard=2,zero=1,{more},ep_halves=true", tmp_path, 3):
        check(found, {0, 1, 2})


def test_of_halves_in_a_pipeline(tmp_path: Path) -> None:
    halved = places("pp=2,shard=2,zero=1,ep=2,ep_halves=true,microbatches=2", tmp_path, 4)
    for rank, found in enumerate(halved):
        check(found, {0, 1} if rank < 2 else {2, 3})


def test_of_pairs(tmp_path: Path) -> None:
    paired = places("pp=2,shard=2,zero=1,ep=2,microbatches=6,schedule=dualpipev", tmp_path, 4)
    for rank, found in enumerate(paired):
        check(found, {0, 3} if rank < 2 else {1, 2})
