from __future__ import annotations

import io
import json
import time

import pytest
from rich.console import Console

from meshwright.events import Event, StepRecord
from meshwright.monitor.config import MonitorConfig
from meshwright.monitor.display import Course, PlainDisplay, RunHeader, event_line, step_line
from meshwright.monitor.live import LiveDisplay, braille, draw
from meshwright.monitor.monitor import Monitor
from meshwright.monitor.progress import ProgressWriter


def record(step: int, **changes) -> StepRecord:
    values = {
        "step": step, "loss": 4.0 / step, "grad_norm": 0.9, "lr": 1e-3, "tokens": 768, "tokens_total": 768 * step,
        "tokens_per_s": 12_345.0, "step_s": 0.5, "parts": {"forward": 0.2, "backward": 0.3},
        "memory": {"peak": 3 << 20, "parameters": 1 << 20}, "layout": "replicate=2", "mfu": 0.412,
    }  # fmt: skip
    return StepRecord(**(values | changes))


def header(**changes) -> RunHeader:
    return RunHeader(steps=100, rows={"model": "gpt2", "layout": "replicate=2"}, **changes)


def until(condition, limit_s: float = 100.0) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_plain_lines_say_the_step_and_come_every_few_steps():
    stream = io.StringIO()
    display = PlainDisplay(header(), every=10, wait_s=1.0, stream=stream)
    for step in range(1, 26):
        display.step(record(step))
        if step == 15:
            display.event(Event(kind="evaluated", rank=0, data={"step": 15, "loss": 2.123456, "rows": [1]}))
    display.event(Event(kind="rank_started", rank=3))
    display.close()
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["model    gpt2", "layout   replicate=2"]
    assert lines[2].startswith("step 1/100  loss 4.0000  grad 0.9  lr 1.00e-03  12.3 k tok/s  mfu 41.2%  mem 3.00 MiB")
    assert lines[4] == "evaluated at step 15: loss 2.1235"
    assert lines[5].startswith("step 20/100  loss 0.2000  val 2.1235") and lines[5].endswith("eta 40.0 s")
    assert len(lines) == 6


def test_the_end_of_a_run_is_where_its_last_step_sees_it():
    stream = io.StringIO()
    display = PlainDisplay(header(), every=10, wait_s=1.0, stream=stream)
    for step in range(1, 14):
        display.step(record(step, last_step=13 if step > 5 else 100))
    display.close()
    lines = [line.split() for line in stream.getvalue().splitlines()[2:]]
    assert [words[1] for words in lines] == ["1/100", "10/13", "13/13"] and lines[1][-3:] == ["eta", "1.5", "s"]
    console, course = terminal(), Course(header())
    course.step(record(10, last_step=13))
    console.print(draw(course, [], 0.0))
    assert "step 10/13" in console.file.getvalue() and "1.5 s to go" in console.file.getvalue()


def test_plain_lines_tell_a_long_wait_once(tmp_path):
    path, stream = tmp_path / "progress.bin", io.StringIO()
    ProgressWriter(path, 0).stamp("data", 3)
    ProgressWriter(path, 1).stamp("backward", 3, waits_for="all_reduce over replicate")
    display = PlainDisplay(header(progress=path), every=1, wait_s=0.005, stream=stream)
    assert until(lambda: "waits" in stream.getvalue())
    time.sleep(0.1)
    display.close()
    (line,) = [line for line in stream.getvalue().splitlines() if "waits" in line]
    assert "rank 1 waits in backward of step 3 for all_reduce over replicate" in line
    assert line.endswith("; rank 0 is in data")


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, color_system=None)


def test_the_panel_shows_the_run():
    console, course = terminal(), Course(header())
    for step in range(1, 51):
        course.step(record(step))
    course.event(Event(kind="evaluated", rank=0, data={"step": 50, "loss": 1.75}))
    console.print(draw(course, ["rank 1 waits"], 61.0))
    text = console.file.getvalue()
    for words in ("gpt2", "step 50/100", "25.0 s to go", "loss 0.0800", "val loss 1.7500 @ 50", "12.3 k", "41.2%",
                  "forward 40%", "parameters 1.00 MiB", "rank 1 waits"):  # fmt: skip
        assert words in text, words
    join = {"island_losses": [2.25, 2.5], "consensus_distance": 0.125, "sent_bytes": 1 << 20, "raw_bytes": 4 << 20}
    course.step(record(51, outer=join))
    course.step(record(52))
    joined = "islands 2.25 2.5, apart 0.125, sent 1.00 MiB for 4.00 MiB @ 51"
    console.print(draw(course, [], 61.0))
    assert joined in console.file.getvalue() and joined in step_line(record(52), course)
    assert any(0x2801 <= ord(letter) <= 0x28FF for letter in text)
    narrow = terminal(40)
    narrow.print(draw(course, [], 0.0))
    narrow.print(draw(Course(RunHeader(steps=0)), [], 0.0))
    assert max(map(len, narrow.file.getvalue().splitlines())) <= 40


def test_curves_keep_their_shape():
    assert braille([], 4, 1) == ["⠀⠀⠀⠀"]
    assert braille([1.0, 1.0], 1, 1) == ["⣀"]
    lines = braille([float("nan"), *range(1000)], 10, 5)
    assert lines[0].strip("⠀") and lines[4][0] != "⠀" and lines[4][9] == "⠀"


def test_what_a_display_remembers_stays_small():
    course = Course(header())
    for step in range(1, 20_001):
        course.step(record(step, loss=float(step <= 10_000)))
    assert 1000 < len(course.losses) <= 4096
    assert course.losses[0] == 1.0 and course.losses[-1] == 0.0


def test_the_panel_redraws_by_itself_and_gives_the_terminal_back(tmp_path):
    path = tmp_path / "progress.bin"
    ProgressWriter(path, 0).stamp("forward", 3, waits_for="all_gather over shard")
    console = terminal()
    display = LiveDisplay(header(progress=path), wait_s=0.05, console=console)
    display.step(record(3))
    assert until(lambda: "rank 0 waits in forward of step 3 for all_gather" in console.file.getvalue())
    display.event(Event(kind="sampled", rank=0, data={"step": 3, "text": "To [be]\nor not"}))
    display.close()
    display.close()
    text = console.file.getvalue()
    assert "| To [be]" in text
    assert text.rstrip().endswith("\x1b[?25h")


def test_a_panel_that_cannot_be_drawn_is_told_and_the_run_goes_on(tmp_path):
    class Gone(io.StringIO):
        broken = False

        def write(self, text: str) -> int:
            if self.broken:
                raise OSError("terminal went away")
            return super().write(text)

    stream, told = Gone(), []
    console = Console(file=stream, force_terminal=True, width=80)
    display = LiveDisplay(header(), 1.0, console, told.append)
    stream.broken = True
    assert until(lambda: told)
    display.step(record(1))
    display.close()
    assert isinstance(told[0], OSError)


def test_the_monitor_writes_everything_a_config_asks_for(tmp_path):
    config, stream = MonitorConfig(every=2), io.StringIO()
    (tmp_path / "plan.json").write_text(json.dumps({"prediction": {"memory": {"parameters": 10}}}))
    monitor = Monitor.build(config, tmp_path, header(), stream=stream)
    other = Monitor.build(config, tmp_path, header(), rank=1, stream=stream)
    for step in range(1, 5):
        monitor.step(record(step))
        other.step(record(step))
    other.event(Event(kind="noted", rank=1))
    other.close()
    monitor.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    assert list((tmp_path / "tensorboard").iterdir())
    assert "<svg" in (tmp_path / "report.html").read_text()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["noted", "drifted"]
    assert events[1]["parts"][0]["part"] == "memory.parameters"
    assert stream.getvalue().count("step ") == 3 and "\x1b" not in stream.getvalue()


def test_the_monitor_writes_nothing_that_was_not_asked_for(tmp_path):
    config, stream = MonitorConfig(display="none", tensorboard=False, report=False), io.StringIO()
    monitor = Monitor.build(config, tmp_path, header(), stream=stream)
    monitor.step(record(1))
    monitor.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl"]
    assert stream.getvalue() == ""


def test_a_resumed_run_goes_on_in_the_same_files(tmp_path):
    config = MonitorConfig(display="none", tensorboard=False, report=False)
    for resumed, steps in ((None, range(1, 8)), (4, range(5, 10))):
        monitor = Monitor.build(config, tmp_path, header(), resumed_step=resumed)
        for step in steps:
            monitor.step(record(step))
        monitor.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 10))


def test_a_sink_that_fails_is_dropped_with_an_event(tmp_path):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError("nobody reads")

    config = MonitorConfig(display="plain", tensorboard=True, report=True)
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    (tmp_path / "report.html").mkdir()
    monitor = Monitor.build(config, tmp_path, header(), stream=Closed())
    for step in (1, 2):
        monitor.step(record(step))
    monitor.close()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["monitor_failed"] * 3
    assert [event["part"] for event in events] == ["tensorboard", "display", "report"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("kind", ["rank_started", "step_skipped"])
def test_frequent_events_get_no_line(kind):
    assert event_line(Event(kind=kind, rank=0)) is None
