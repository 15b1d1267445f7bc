"""Timelines of recorded steps: what a rank writes, what readers make of it, and the trace that Perfetto opens."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.monitor.report import write_report
from meshwright.monitor.rundir import RunReader, read_run
from meshwright.monitor.timeline import TIMELINE, TimelineReader, TimelineWriter
from meshwright.monitor.trace import EVENTS_PROCESS, write_trace
from meshwright.monitor.wait_history import WaitHistory
from tests import simulated_run


def test_a_rank_records_every_so_many_steps_whole(tmp_path):
    writer = TimelineWriter(tmp_path, 5, 4)
    for step in range(1, 10):
        writer.begin(step)
        writer.phase("data", 0)
        writer.phase("forward", 1)
        writer.wait("all_gather over shard of layer 3", 4096)
        time.sleep(0.02)
        writer.wait("", 0)
        writer.phase("optimizer", 0)
    writer.begin(10)
    writer.close()
    writer.close()
    steps = list(TimelineReader(tmp_path).read())
    assert [(timeline.rank, timeline.step) for timeline in steps] == [(5, 3), (5, 4), (5, 8)]
    for timeline in steps:
        assert [(span.name, span.number) for span in timeline.phases] == [("data", 0), ("forward", 1), ("optimizer", 0)]
        (wait,) = timeline.waits
        forward = timeline.phases[1]
        assert wait.number == 4096 and 0.02 <= wait.seconds <= forward.seconds
        assert forward.start_s <= wait.start_s and 0.3 < timeline.waiting_share <= 1.0
        # Phases leave no gap, or a trace would hide time.
        ends = [span.start_s + span.seconds for span in timeline.phases]
        assert all(abs(end - span.start_s) < 3e-6 for end, span in zip(ends, timeline.phases[1:]))


def test_a_reader_takes_whole_lines_once_and_no_others(tmp_path):
    folder = tmp_path / TIMELINE
    folder.mkdir()
    good = json.dumps({"step": 7, "start": 1.0, "phases": [["data", 0, 10, 0]], "waits": []})
    damaged = ["{", "[]", '{"step": 1}', '{"step":1,"start":1,"phases":[[1]],"waits":[]}', '{"step":1e999}', "null", ""]
    path = folder / "rank-00002.jsonl"
    path.write_text("\n".join([*damaged, good, good[:20]]))
    (folder / "rank-x.jsonl").write_text(good + "\n")
    reader = TimelineReader(tmp_path)
    assert [timeline.step for timeline in reader.read()] == [7]
    assert list(reader.read()) == []
    with path.open("a") as file:
        file.write(good[20:].replace("7", "8") + "\n")
    assert [timeline.rank for timeline in reader.read()] == [2]


def test_the_rank_that_the_others_wait_for_is_named(tmp_path):
    run = simulated_run.write(tmp_path / "run", 200, ranks=16, every=10, slow=11)
    history = WaitHistory.read(run)
    assert history.awaited()[0][0] == 11
    shares, steps = history.matrix(8, 16)
    assert shares.shape == (16, 8) and steps[0] == 3 and shares.mean(axis=1).argmin() == 11
    shares, _ = history.matrix(500, 4)
    assert shares.shape == (4, 21) and shares.mean(axis=1).argmin() == 2
    text = write_report(run).read_text()
    assert "rank 11" in text and "Last recorded step" in text and "data:image/png" in text and "<script" not in text


def test_a_trace_holds_every_recorded_span_once_and_nests(tmp_path):
    run = simulated_run.write(tmp_path / "run", 100, ranks=8, every=20)
    assert write_trace(read_run(run), tmp_path / "trace.json") == (8, 6)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    lines = [json.loads(line) for path in (run / TIMELINE).iterdir() for line in path.read_text().splitlines()]
    assert len(spans) == sum(1 + len(line["phases"]) + len(line["waits"]) for line in lines)
    assert min(span["ts"] for span in spans) == 0 and all(span["dur"] >= 0 for span in spans)
    for rank in range(8):
        for row in (0, 1, 2):
            own = sorted((span for span in spans if (span["pid"], span["tid"]) == (rank, row)), key=lambda s: s["ts"])
            # Spans of a row that overlap without nesting are drawn wrongly.
            assert own and all(a["ts"] + a["dur"] <= b["ts"] + 3 for a, b in itertools.pairwise(own))
    names = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"}
    assert (3, "rank 3") in names and (EVENTS_PROCESS, "supervisor") in names
    instants = {event["name"]: event for event in events if event["ph"] == "i"}
    assert instants["checkpoint_saved"]["pid"] == 0 and instants["slow_rank"]["pid"] == EVENTS_PROCESS


def test_a_run_without_timelines_says_what_to_switch_on(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"--monitor.timeline N"):
        write_trace(read_run(tmp_path), tmp_path / "trace.json")


def test_a_growing_run_reads_as_a_whole_one_also_after_it_was_cut(tmp_path):
    def lines(first: int, last: int, loss: float) -> str:
        return "".join(json.dumps({"step": step, "loss": loss, "step_s": 1.0}) + "\n" for step in range(first, last))

    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 11, 1.0))
    reader = RunReader(tmp_path)
    assert len(reader.read().steps) == 10
    with path.open("a") as file:
        file.write(lines(11, 13, 1.0)[:-5])
    assert [line["step"] for line in reader.read().steps][-1] == 11
    # Resumed after step 4 and beyond its old length between two looks.
    path.write_text(lines(1, 5, 1.0) + lines(5, 40, 2.0))
    assert reader.read().steps == read_run(tmp_path).steps and len(reader.read().steps) == 39


def test_a_long_run_is_thinned_without_its_spikes_and_its_sums(tmp_path):
    def line(step: int) -> str:
        norm = None if step == 333 else 50.0 if step == 402 else 1.0
        return json.dumps({"step": step, "grad_norm": norm, "step_s": 2.0, "skipped": step == 77}) + "\n"

    (tmp_path / "metrics.jsonl").write_text("".join(map(line, range(1, 1001))))
    run = RunReader(tmp_path, most_steps=500).read()
    steps = [entry["step"] for entry in run.steps]
    assert {77, 333, 402} <= set(steps) and steps[-500:] == list(range(501, 1001)) and len(steps) < 700
    assert run.thinned_steps == 1000 - len(steps) and run.thinned_s == 2.0 * run.thinned_steps


def test_recording_costs_little(tmp_path):
    """A recorded phase or wait takes microseconds, a step that isn't recorded next to nothing."""
    writer = TimelineWriter(Path(tmp_path), 0, 2)
    best = {1: 1.0, 2: 1.0}
    for round_ in range(20):
        for step in (2 * round_ + 5, 2 * round_ + 6):
            started = time.perf_counter()
            writer.begin(step)
            for micro in range(100):
                writer.phase("forward", micro)
                writer.wait("all_reduce over tp", 1)
                writer.wait("", 0)
            best[2 - step % 2] = min(best[2 - step % 2], (time.perf_counter() - started) / 300)
    writer.close()
    assert best[1] < 3e-6 and best[2] < 3e-5
