"""Random faults: the same draws for the same seed and ranks, bounds, and the end of the run."""

from __future__ import annotations

import json
import math
import threading
import time
from itertools import islice, pairwise
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.errors import ConfigError
from meshwright.jobs.fault_injection import inject_faults
from meshwright.jobs.random_faults import DEFAULT_KINDS, World, draw_faults
from meshwright.monitor.progress import PROGRESS, ProgressWriter, node_progress, reset_progress
from tests.runs import wait_until


def test_draws_follow_from_seed_and_world() -> None:
    def drawn(seed: int, ranks: int = 4, every_s: float = 30.0) -> list[object]:
        return list(islice(draw_faults(World(ranks=ranks), seed, every_s), 50))

    assert drawn(7) == drawn(7) and drawn(7) != drawn(8) and drawn(7) != drawn(7, ranks=5)
    draws = list(islice(draw_faults(World(ranks=4), 7, 30.0), 500))
    gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(draws)]
    assert (
        min(gaps) >= 15.0 - 1e-2 and max(gaps) <= 45.0 + 1e-2 and draws[-1].at_s == pytest.approx(500 * 30.0, abs=7.6)
    )
    assert {draw.target for draw in draws} == set(range(4)) and {draw.kind for draw in draws} == set(DEFAULT_KINDS)


def test_the_first_draws_of_a_seed_stay_as_they_are() -> None:
    """Written down, so that a seed in somebody's notes means the same in a later version."""
    draws = [(draw.at_s, draw.kind, draw.target) for draw in islice(draw_faults(World(ranks=4), 7, 30.0), 3)]
    assert draws == FIRST_OF_SEED_7


FIRST_OF_SEED_7 = [(27.357, "exit", 3), (62.264, "kill", 0), (87.985, "kill", 1)]


def test_draws_by_steps_are_steps_of_the_run() -> None:
    draws = list(islice(draw_faults(World(ranks=4), 7, 40, by_steps=True), 3))
    # Turns of the times above, times 40 / 30.
    assert [(draw.at_step, draw.kind, draw.target) for draw in draws] == [
        (36, "exit", 3),
        (83, "kill", 0),
        (117, "kill", 1),
    ]
    steps = [draw.at_step for draw in islice(draw_faults(World(ranks=4), 7, 1, by_steps=True), 200)]
    assert all(later > earlier >= 1 for earlier, later in pairwise(steps))


def test_a_step_that_is_over_and_an_absent_rank_are_said(tmp_path: Path) -> None:
    """The run stands in step 50 of rank 0 alone: earlier draws can't strike, and nobody waits for them."""
    reset_progress(tmp_path / PROGRESS, 1)
    writer = ProgressWriter(tmp_path / PROGRESS, 0)
    writer.stamp("forward", 50)
    world = World(ranks=2)
    draws = [draw for draw in islice(draw_faults(world, 0, 10, ["kill"], by_steps=True), 4) if draw.at_step < 50]
    lines: list[str] = []
    answers = inject_faults(tmp_path, iter(draws), world, until=math.inf, count=9, wait_s=5.0, say=lines.append)
    assert [answer.answer for answer in answers] == [("missed", "absent")[draw.target] for draw in draws]
    assert {draw.target for draw in draws} == {0, 1} and len(lines) == len(draws)
    assert not list((tmp_path / "chaos").iterdir()), "requests that nobody answered are withdrawn"
    writer.close()


def test_every_and_for_have_one_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "none", "--random", "--every", "40steps", "--for", "10m", "--dry-run", "--ranks", "2"]) == 2
    assert "differ in their units" in capsys.readouterr().err


def test_nodes_are_targets_where_there_are_several() -> None:
    world = World(ranks=4, nodes=((0, 1), (2, 3)))
    nodes = {draw.target for draw in islice(draw_faults(world, 1, 1.0), 200) if draw.kind == "node"}
    assert nodes == {0, 1}
    with pytest.raises(ConfigError, match="the run is on one node"):
        next(draw_faults(World(ranks=4), 1, 1.0, ["node"]))
    with pytest.raises(ConfigError, match="did you mean 'kill'"):
        next(draw_faults(World(ranks=4), 1, 1.0, ["kil"]))


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert main(["chaos", *words, "--dry-run", "--json"]) == 0
    rows: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return rows


def test_a_dry_run_lists_what_a_run_would_get(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reset_progress(tmp_path / PROGRESS, 4)
    writers = [ProgressWriter(tmp_path / PROGRESS, rank) for rank in range(4)]
    words = [str(tmp_path), "--random", "--seed", "7", "--every", "30s"]
    rows = listed(capsys, *words, "--count", "3")
    assert [(row["at_s"], row["kind"], row["target"]) for row in rows] == FIRST_OF_SEED_7
    assert listed(capsys, str(tmp_path / "none"), *words[1:], "--count", "3", "--ranks", "4") == rows
    assert [row["at_s"] for row in listed(capsys, *words, "--for", "70s")] == [27.357, 62.264]
    assert not (tmp_path / "chaos").exists()
    for writer in writers:
        writer.close()
    assert main(["chaos", *words, "--dry-run"]) == 2, "a run that has ended"
    assert "holds no run that is under way" in capsys.readouterr().err


class DyingRun(threading.Thread):
    """A run that a fault ends: it happens, and no rank goes on."""

    def __init__(self, run: Path, happens: bool) -> None:
        super().__init__(daemon=True)
        self._run_dir, self._happens = run, happens
        reset_progress(run / PROGRESS, 1)
        self._writer = ProgressWriter(run / PROGRESS, 0)
        self._writer.stamp("forward", 5)
        self.start()

    def run(self) -> None:
        wait_until(lambda: list((self._run_dir / "chaos").glob("*.ask")), 20.0)
        (request,) = (self._run_dir / "chaos").glob("*.ask")
        if self._happens:
            request.with_suffix("").touch()
        self._writer.close()


@pytest.mark.parametrize("happens", [True, False])
@pytest.mark.parametrize("words", [["--kill", "rank=0"], ["--random", "--every", "0.1s", "--kinds", "kill"]])
def test_the_end_of_the_run_ends_the_wait(
    words: list[str], happens: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_s = time.monotonic()
    DyingRun(tmp_path, happens)
    status = main(["chaos", str(tmp_path), *words, "--wait", "600"])
    assert time.monotonic() - start_s < 30.0
    assert status == (1 if happens or "--kill" in words else 0)
    expected = "run ended" if "--random" in words else "the run ended"
    assert expected in capsys.readouterr().err


def test_nodes_are_read_off_the_stamps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for node in range(2):
        reset_progress(tmp_path / node_progress(node), 4)
        for rank in (2 * node, 2 * node + 1):
            ProgressWriter(tmp_path / node_progress(node), rank).stamp("forward", 1)
    kinds = {row["kind"] for row in listed(capsys, str(tmp_path), "--random", "--count", "60")}
    assert kinds == {*DEFAULT_KINDS, "node"}
