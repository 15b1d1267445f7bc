"""`meshwright chaos` against a run that a test plays: what is refused, and when the story is over."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.monitor.progress import PROGRESS, ProgressWriter, node_progress, reset_progress
from tests.runs import wait_until


def stamp_ranks(path: Path, ranks: range, world: int, generation: int = 0) -> None:
    reset_progress(path, world)
    for rank in ranks:
        ProgressWriter(path, rank, generation).stamp("forward", 5)


class PlayedRun(threading.Thread):
    """Makes the first fault that is asked for happen, and writes the events of its recovery."""

    def __init__(self, run: Path, *kinds: str) -> None:
        super().__init__(daemon=True)
        self._run, self._kinds = run, kinds
        self.start()

    def run(self) -> None:
        wait_until(lambda: list((self._run / "chaos").glob("*.ask")), 20.0)
        (request,) = (self._run / "chaos").glob("*.ask")
        request.with_suffix("").touch()
        with (self._run / "events.jsonl").open("a") as file:
            file.writelines(json.dumps({"kind": kind, "rank": 0, "time": 1.0}) + "\n" for kind in self._kinds)


@pytest.mark.parametrize("wait", ["10m", "0", "nan", "-3", "inf"])
def test_a_wait_is_a_number_of_seconds(wait: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stamp_ranks(tmp_path / PROGRESS, range(1), 1)
    assert main(["chaos", str(tmp_path), "--kill", "rank=0", "--wait", wait]) == 2
    assert f"--wait {wait}: give seconds above 0" in capsys.readouterr().err


def test_an_unknown_flag_is_named_with_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stamp_ranks(tmp_path / PROGRESS, range(1), 1)
    for words, message in (
        (["--kil", "rank=0"], "unknown flag --kil; did you mean '--kill'?"),
        (["--kill", "rank=0", "--wiat", "60"], "unknown flag --wiat; did you mean '--wait'?"),
    ):
        assert main(["chaos", str(tmp_path), *words]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "chaos").exists()


def test_a_gradient_that_is_computed_again_is_the_end_of_the_story(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stamp_ranks(tmp_path / PROGRESS, range(1), 1)
    PlayedRun(tmp_path, "evaluated", "step_repeated")
    assert main(["chaos", str(tmp_path), "--nan", "rank=0", "--wait", "20", "--json"]) == 0
    assert [event["kind"] for event in json.loads(capsys.readouterr().out)] == ["step_repeated"]


def test_a_rank_of_another_node_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each node stamps its own ranks; what fewer ranks of earlier generations stamped doesn't count."""
    stamp_ranks(tmp_path / PROGRESS, range(9), 9, generation=7)
    os.utime(tmp_path / PROGRESS, (1.0, 1.0))
    stamp_ranks(tmp_path / node_progress(2), range(4, 6), 6, generation=1)
    stamp_ranks(tmp_path / node_progress(0), range(2), 4, generation=2)
    stamp_ranks(tmp_path / node_progress(1), range(2, 4), 4, generation=2)
    assert main(["chaos", str(tmp_path), "--kill", "rank=4"]) == 2
    assert "the run has ranks 0 to 3" in capsys.readouterr().err
    PlayedRun(tmp_path, "node_lost", "fenced", "planned", "recovered")
    assert main(["chaos", str(tmp_path), "--kill", "rank=3", "--wait", "20", "--json"]) == 0
    story = [event["kind"] for event in json.loads(capsys.readouterr().out)]
    assert story == ["node_lost", "fenced", "planned", "recovered"]


def test_a_process_beside_the_ranks_has_no_recovery_to_wait_for(tmp_path: Path) -> None:
    stamp_ranks(tmp_path / PROGRESS, range(1), 1)
    PlayedRun(tmp_path)
    assert main(["chaos", str(tmp_path), "--kill", "rank=-1", "--at", "step=9", "--wait", "20"]) == 0


def test_a_folder_without_ranks_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", str(tmp_path), "--kill", "rank=0"]) == 2
    assert "holds no run that is under way" in capsys.readouterr().err
