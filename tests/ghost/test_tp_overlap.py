"""Products in chunks on simulated GPUs: so many collectives more, the same bytes, and no wait of the host for any."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.ghost.runs import GhostRun, has_ghost, train
from tests.runs import rows

pytestmark = [pytest.mark.skipif(not has_ghost(), reason="runs under the simulated GPU: make ghost")]
LAYERS, CHUNKS, STEPS = 2, 3, 5
QUIET = ("--checkpoint.every", "0", "--recovery.snapshot-every", "0", "--recovery.compare-every", "100")
MOVEMENTS = {"": 2 * 2, ",sequence=true": 2 * 4}
"""Movements of a layer that come in chunks: of each of two groups, forward's sum and backward's; with split tokens
forward's gather and sum, and backward's."""


def step_traffic(run: GhostRun) -> tuple[int, int]:
    """Returns the calls and bytes of tp in the last step."""
    (calls, sizes), last = (Counter[str](), Counter[str]()), [row for row in rows(run.folder) if "comm" in row][-1]
    for row in last["comm"]:
        calls[row["axis"]] += row["calls"]
        sizes[row["axis"]] += row["bytes"]
    return calls["tp"], sizes["tp"]


@pytest.mark.parametrize("more", ["", ",sequence=true", ",sequence=true,recompute=selective"])
def test_chunks_are_collectives_of_their_own(root: Path, more: str) -> None:
    runs = []
    for name, chunks in (("plain", ""), ("chunks", f",tp_overlap={CHUNKS}")):
        folder = f"{name}-{more.count(',')}"
        runs.append(train(root, folder, "llama", 2, *QUIET, layout=f"tp=2,precision=bf16{more}{chunks}", steps=STEPS))
        assert runs[-1].status == 0, runs[-1].text
        assert runs[-1].disagreements == []
    plain, chunked = runs
    (calls, size), (more_calls, same_size) = map(step_traffic, runs)
    assert size == same_size
    if "recompute" not in more:
        assert more_calls - calls == LAYERS * MOVEMENTS[more] * (CHUNKS - 1)
    print([(run.steps[-2]["launches"], run.steps[-2]["syncs"]) for run in runs])
    assert chunked.steps[-2]["syncs"] == plain.steps[-2]["syncs"]
