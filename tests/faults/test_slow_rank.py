"""A whole run names the rank that a fault slows down, within twenty steps, and names nobody without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import call, events, rows, words, write_corpus

SLOW_S, FIRST_STEP, NAMED_STEPS = 0.3, 8, 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("slow")
    write_corpus(root / "corpus.txt")
    return root


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "devices", "slow"),
    [("replicate=2", 2, 1), ("shard=3,zero=3", 3, 0), ("replicate=2,tp=2", 4, 2)],
)
def test_a_whole_run_names_its_straggler(layout: str, devices: int, slow: int, root: Path) -> None:
    options = ("--train.steps", str(FIRST_STEP + NAMED_STEPS + 4), "--train.batch", "12", "--checkpoint.every", "0")
    fault = f"slow:rank={slow},step={FIRST_STEP},seconds={SLOW_S}"
    name = f"slow-{devices}"
    argv = words(root, name, *options, "--recovery.faults", fault, layout=layout, devices=devices)
    assert call(argv, root / f"{name}.log")[0] == 0, (root / f"{name}.log").read_text()
    named = events(root / name, "slow_rank")
    assert named, "nobody was named"
    assert {event["slow"] for event in named} == {slow}, named
    # The event has a time, and metrics' lines are in step with the file: steps done when it was first named.
    done = [row["step"] for row in rows(root / name) if row_time(root / name, row["step"]) <= named[0]["time"]]
    assert max(done, default=0) - FIRST_STEP < NAMED_STEPS, (done[-1:], named)


def row_time(run: Path, step: int) -> float:
    """Returns when a step ended, seconds since the epoch: of the run's start, and its steps' wall times since."""
    started = events(run, "run_started")[0]["time"]
    return float(started + sum(row["step_s"] for row in rows(run) if row["step"] <= step))
