"""Memory that runs out under the planner's own choice: the run goes on under the next plan that needs less."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.events import StepRecord
from meshwright.resilience.generation_ranks import GenerationRanks
from meshwright.train.launched_step import LaunchedStep
from meshwright.train.step_recorder import StepRecorder
from tests.runs import call, curve, events, words, write_corpus


def runs_out_under_the_first_plan(run: Path, step: int) -> Callable[[], None]:
    """Returns what makes rank 1 run out of memory at the end of a step, while the first plan is the run's."""

    def plant() -> None:
        whole = StepRecorder.record

        def record(self: StepRecorder, launched: LaunchedStep, *args: Any, **counts: Any) -> StepRecord:
            first = "ran out of memory" not in (run / "plan.json").read_text(encoding="utf-8")
            if launched.step + 1 == step and self._deps.rank == 1 and first:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return whole(self, launched, *args, **counts)

        StepRecorder.record = record  # type: ignore[method-assign]

    return plant


@pytest.mark.slow
def test_the_next_plan_that_needs_less_is_taken(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt")
    run = tmp_path / "short"
    argv = words(tmp_path, run.name, "--recovery.snapshot-every", "1", "--train.steps", "6", layout="auto", devices=2)
    status, text = call(argv, tmp_path / "short.log", before=runs_out_under_the_first_plan(run, 3))
    assert status == 0, text
    (dropped,) = events(run, "plan_dropped")
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    (planned,) = events(run, "planned")
    assert planned["layout"] == dropped["next"] != dropped["layout"]
    assert f"{dropped['layout']} ran out of memory, and this one needs less" in plan["reason"]
    assert f"the next plan that needs less is {dropped['next']}, which is started" in text
    assert "Tried to allocate 2.00 GiB" in dropped["reason"]
    # What was trained stays trained: the steps before the failure are not done again.
    assert events(run, "restored")[0]["step"] >= 1 and sorted(curve(run)) == list(range(1, 7))


@pytest.mark.parametrize(("status", "kills", "summary", "short"), [
    (-9, 1, "was killed by SIGKILL", True),
    (-9, 0, "was killed by SIGKILL", False),
    (-11, 1, "was killed by SIGSEGV", False),
    (1, 0, "RankError: out of memory in step 1, forward: Tried to allocate 2.00 GiB", True),
    (1, 1, "ZeroDivisionError: planted", False),
])  # fmt: skip
def test_a_rank_that_the_kernel_killed_for_memory_is_told_from_others(
    status: int, kills: int, summary: str, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshwright.launch.failure import RankFailure

    class Launcher:
        failures = (RankFailure(rank=0, summary=summary, status=status),)

    ranks = object.__new__(GenerationRanks)
    ranks.launcher, ranks._oom_kills = Launcher(), 4  # type: ignore[assignment]
    monkeypatch.setattr("meshwright.resilience.generation_ranks.count_oom_kills", lambda: 4 + kills)
    assert ranks.ran_out_of_memory is short
