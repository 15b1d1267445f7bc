"""Action text, the choice of a schedule, files of the user, pictures, and the printed table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from torch.distributed.pipelining.schedules import _Action

import meshwright.schedules as folder
from meshwright.errors import PlanError
from meshwright.schedules import draw
from meshwright.schedules.__main__ import main
from meshwright.schedules.action import Action, ActionKind, Schedule, backward, backward_input, forward, overlap
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.file import build_schedule
from meshwright.schedules.simulate import simulate
from meshwright.schedules.spec import known_schedules

GOOD = "0F0,0F1,,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize("text", ["0F0", "1B3", "2I1", "12W10", "(0F1;1B0)OVERLAP_F_B"])
def test_text_is_torch_s(text: str) -> None:
    action, theirs = Action.parse(f" {text} "), _Action.from_str(text)
    assert str(action) == text == str(theirs)
    assert action.kind.value == theirs.computation_type.value
    assert action == Action.parse(str(theirs))


def test_a_pair_has_its_parts() -> None:
    pair = Action.parse("(0F1;3B0)OVERLAP_F_B")
    assert pair == overlap(forward(0, 1), backward(3, 0))
    assert pair.parts == (forward(0, 1), backward(3, 0))
    assert pair.kind is ActionKind.OVERLAP
    assert backward_input(1, 2).parts == (backward_input(1, 2),)


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X1", "0F0x", "1SEND_F0", "(0F0;0F1)OVERLAP_F_B", "(0F0;1B0)"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is no action: write stage"):
        Action.parse(text)


@pytest.mark.parametrize("text", ["{}", "[]", "no", '{"name": "x", "actions": 3}', '{"name": "x", "actions": [[1]]}'])
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="this JSON is no schedule"):
        Schedule.from_json(text)


def test_where_stages_stand() -> None:
    schedule = known_schedules()["zbv"].build(4, 2, 8)
    assert [schedule.stage_rank(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert schedule.rank_stages(1) == (1, 6)
    assert known_schedules()["interleaved"].build(4, 2, 8).rank_stages(1) == (1, 5)


def test_a_name_that_is_nearly_right() -> None:
    with pytest.raises(PlanError, match="did you mean 'interleaved'"):
        build_schedule("interleave", 4, 2, 8)
    assert build_schedule("gpipe", 2, 1, 4) == known_schedules()["gpipe"].build(2, 1, 4)


def test_the_nearest_that_works_does_work() -> None:
    for name in ("interleaved", "zerobubble"):
        with pytest.raises(PlanError, match=r"take 10 or 12$"):
            build_schedule(name, 4, 2, 11)
        for microbatches in (10, 12):
            build_schedule(name, 4, 2, microbatches)
    with pytest.raises(PlanError, match=r"take 8 or more$"):
        build_schedule("dualpipev", 4, 2, 7)
    build_schedule("dualpipev", 4, 2, 8)
    with pytest.raises(PlanError, match=r"needs 1 stages per rank, not 3; take 1, or a schedule for 3: .*interleaved"):
        build_schedule("gpipe", 4, 3, 8)
    with pytest.raises(PlanError, match="needs 2 stages per rank, not 3; take 2"):
        build_schedule("zbv", 4, 3, 8)


def test_a_new_file_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(folder.__file__).with_name("gpipe.py").read_text(encoding="utf-8")
    (tmp_path / "made_up.py").write_text(source.replace('name="gpipe"', 'name="made-up"'), encoding="utf-8")
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    found = known_schedules.__wrapped__()
    assert set(found) == {*known_schedules(), "made-up"}
    assert len(found["made-up"].build(2, 1, 3).actions[0]) == 6
    del sys.modules["meshwright.schedules.made_up"], folder.made_up


def test_a_file_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(GOOD)
    schedule = build_schedule(f"file:{path}", 2, 1, 2)
    assert [str(action) for action in schedule.actions[0]] == ["0F0", "0F1", "0B0", "0B1"]
    assert schedule.name == f"file:{path}"


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("0F0,0B0\n", "has 1 rows, the pipeline 2 ranks"),
        ("0F0,0B0\n1F0,1B0\n", "runs 1 micro-batches, the step has 2; take 1"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "deadlocks"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", "1B1 is on no rank"),
        ("0F0,0F1,0B0,0B1\n2F0,2B0,2F1,2B1\n", "1F0 is on no rank, and 2F0 waits for it"),
        ("0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n2F0,2B0,2F1,2B1\n", "needs 2 stages per rank, not 1; take 2"),
        ("0F0,hello\n", "'hello' is no action"),
        ("\n", "has no action"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, rows: str, says: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(rows)
    with pytest.raises(PlanError, match=says):
        build_schedule(f"file:{path}", 2, 1, 2)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="can't be read"):
        build_schedule(f"file:{tmp_path}/none.csv", 2, 1, 2)


@pytest.mark.parametrize("name", known_schedules())
def test_svg_has_a_box_for_every_part(name: str) -> None:
    spec = known_schedules()[name]
    schedule = spec.build(3, spec.least_stages, 6)
    seen = simulate(schedule, ActionCosts.uniform(schedule.stages))
    tree = ElementTree.fromstring(draw.svg(seen))
    boxes = [box for box in tree.iter("{http://www.w3.org/2000/svg}rect") if len(box)]
    assert len(boxes) == sum(len(span.action.parts) for span in seen.timeline)
    edges = [float(box.get("x")) + float(box.get("width")) for box in boxes]
    assert max(edges) == pytest.approx(960 - 4, abs=0.1)


def test_text_timeline() -> None:
    seen = simulate(Schedule.from_csv(GOOD), ActionCosts.uniform(2))
    lines = draw.text(seen, columns=9 + 18).splitlines()
    assert lines == ["rank 0 |F0F1....B0--..B1--|", "rank 1 |..F0B0--F1B1--....|"]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(found) == set(known_schedules())
    assert found["gpipe"]["bubble"] == pytest.approx(3 / 11)
    assert found["gpipe"]["peak_live"] == 8
    assert found["zbv"]["bubble"] == pytest.approx(3 / 51)
    assert main(["--microbatches", "6"]) == 0
    assert "take 8 or more" in capsys.readouterr().out


def test_one_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "zbv.csv"
    assert main(["--draw", "zbv", "--csv"]) == 0
    path.write_text(capsys.readouterr().out)
    assert main(["--draw", f"file:{path}", "--stages-per-rank", "2"]) == 0
    of_file = capsys.readouterr().out
    assert main(["--draw", "zbv"]) == 0
    assert capsys.readouterr().out == of_file
    assert main(["--draw", "zbv", "--svg"]) == 0
    assert capsys.readouterr().out.startswith("<svg")
    assert main(["--draw", "none"]) == 2
    assert "there is no such schedule" in capsys.readouterr().err


def test_the_room_needs_no_torch() -> None:
    code = (
        "import sys; from meshwright.schedules.file import build_schedule; build_schedule('zbv', 2, 2, 4); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=250).returncode == 0
