from __future__ import annotations

import json
import math
import random
from html.parser import HTMLParser
from pathlib import Path

from meshwright.events import CommTotals, Event, StepRecord
from meshwright.monitor.charts import envelope, smoothed, tick_text, ticks
from meshwright.monitor.report import write_report

PLAN = {
    "layout": {"text": "replicate=2,shard=2,zero=3,microbatches=4,recompute=full"},
    "prediction": {
        "memory": {"parameters": 1_600_000, "gradients": 1_600_000, "optimizer": 3_200_000, "activations": 9_000_000},
        "formula": {
            "parameters": "4 B x 800,000 / shard 2",
            "gradients": "4 B x 800,000 / shard 2",
            "optimizer": "8 B x 800,000 / shard 2",
        },
        "step_s": 0.1,
        "parts": {"data": 0.001, "forward": 0.03, "backward": 0.06, "reduce": 0.005, "optimizer": 0.004},
        "traffic": {"shard": 3_000_000, "replicate": 1_600_000},
    },
    "ranks": 4,
    "reason": "asked for by --layout",
    "rejected": {"replicate=4": "needs 12.2 MiB a rank where 8.0 MiB are left"},
}
CONFIG = '[model]\nfamily = "gpt2"\nlayers = 4\nwidth = 128\n\n[data]\npaths = ["tinyshakespeare.txt"]\n'


JOIN = {"island_losses": [3.0, 2.5], "consensus_distance": 0.5, "pseudo_gradient_norm": 1.0,
        "sent_bytes": 2 << 20, "raw_bytes": 4 << 20, "wait_s": 0.25}  # fmt: skip


def record(step: int, draw: random.Random, skipped: bool = False) -> StepRecord:
    loss = 1.5 + 2.7 * math.exp(-step / 250) + draw.gauss(0, 0.06)
    parts = {"data": 0.001, "forward": 0.031, "backward": 0.058, "reduce": 0.012, "optimizer": 0.006, "other": 0.001}
    parts = {name: seconds * draw.uniform(0.9, 1.25) for name, seconds in parts.items()}
    step_s = sum(parts.values())
    return StepRecord(
        step=step,
        loss=loss,
        grad_norm=math.inf if skipped else abs(draw.gauss(1, 0.2)) + (30 if step == 700 else 0),
        lr=1e-3 * min(step / 100, 0.55 + 0.45 * math.cos(math.pi * step / 2000)),
        tokens=768,
        tokens_total=768 * step,
        tokens_per_s=768 / step_s,
        step_s=step_s,
        parts=parts,
        memory={"peak": 21_000_000, "parameters": 1_600_000, "gradients": 1_700_000, "optimizer": 3_200_000},
        layout=PLAN["layout"]["text"],
        accuracy=min(0.55, 0.1 + step / 3000),
        mfu=0.41 + draw.gauss(0, 0.01),
        skipped=skipped,
        comm=(
            CommTotals(axis="shard", op="all_gather", calls=12, bytes=2_000_000, seconds=0.012, exposed_s=0.003),
            CommTotals(axis="shard", op="reduce_scatter", calls=6, bytes=1_000_000, seconds=0.008, exposed_s=0.001),
            CommTotals(axis="replicate", op="all_reduce", calls=6, bytes=1_600_000, seconds=0.009, exposed_s=0.006),
        ),
        epoch=step / 800,
        outer=JOIN if step % 30 == 0 else {},
    )


def events(steps: int) -> list[Event]:
    start = 1_760_000_000.0
    found = [
        Event(
            kind="run_started", rank=0, time=start, pid=100, host="box",
            data={"model": "gpt2: 4 layers, width 128, 800 k parameters", "data": "tinyshakespeare.txt, 1.1 M tokens",
                  "devices": "4 x CPU core", "torch": "2.13.0", "<b>": "<script>alert(1)</script>"},
        )
    ]  # fmt: skip
    for rank in range(4):
        data = {"device": f"cpu:{rank}"}
        found.append(Event(kind="rank_started", rank=rank, time=start + 1, pid=101 + rank, host="box", data=data))
    for step in range(0, steps + 1, max(1, steps // 20)):
        data = {"step": step, "loss": 1.6 + 2.6 * math.exp(-step / 260), "accuracy": min(0.5, 0.1 + step / 3500)}
        found.append(Event(kind="evaluated", rank=0, time=start + 2 + step / 9, pid=101, host="box", data=data))
    path = {"step": steps // 2, "path": "checkpoints/step-1000", "seconds": 0.31}
    found.append(Event(kind="checkpoint_saved", rank=0, time=start + 120, pid=101, host="box", data=path))
    found.append(Event(kind="resumed", rank=0, time=start + 130, pid=201, host="box", data={"step": steps // 2}))
    text = {"step": steps, "prompt": "ROMEO:", "text": "ROMEO:\nWhat <light> through yonder & window breaks?"}
    found.append(Event(kind="sampled", rank=0, time=start + 230, pid=201, host="box", data=text))
    data = {"step": steps, "loss": 1.61, "bits_per_byte": 2.32, "gzip_bits_per_byte": 3.41, "xz_bits_per_byte": 3.02}
    found.append(Event(kind="run_finished", rank=0, time=start + 231, pid=201, host="box", data=data))
    return found


def make_run(folder: Path, steps: int) -> Path:
    draw = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG)
    (folder / "plan.json").write_text(json.dumps(PLAN))
    records = (record(step, draw, step in (3, 40, 41)) for step in range(1, steps + 1))
    lines = (json.dumps(one.to_json()).replace("Infinity", "null") for one in records)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "events.jsonl").write_text("\n".join(json.dumps(event.to_json()) for event in events(steps)) + "\n")
    return folder


class Tags(HTMLParser):
    """Collects tags and addresses, and checks that every element that must be closed is."""

    VOID = ("meta", "br", "line", "rect", "path", "circle", "input", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append(tag)

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        assert self.open.pop() == tag


def parsed(path: Path) -> tuple[str, Tags]:
    text, tags = path.read_text(), Tags()
    tags.feed(text)
    assert tags.open == []
    return text, tags


def test_a_long_run_gives_a_small_whole_page_that_loads_nothing(tmp_path):
    text, tags = parsed(write_report(make_run(tmp_path / "run", 2000)))
    assert tags.addresses == [] and "script" not in tags.found and "url(http" not in text
    assert tags.found.count("svg") >= 10
    assert len(text) < 400_000
    for words in ("Loss", "Gradient norm", "Learning rate", "Throughput", "rank 3", "replicate 1", "resumed",
                  "skipped step (3)", "4 B x 800,000 / shard 2", "reduce_scatter", "gzip", "2.320", "slowest 1 %",
                  "value above the frame", "island 1", "Consensus distance", "2.00 MiB a join"):  # fmt: skip
        assert words in text, words


def test_text_from_files_is_escaped(tmp_path):
    text, _ = parsed(write_report(make_run(tmp_path / "run", 20)))
    assert "<script>" not in text and "&lt;script&gt;" in text
    assert "What &lt;light&gt; through yonder &amp; window" in text


class Strings(HTMLParser):
    """Collects elements, attributes' names and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_every_string_of_a_run_directory_is_data(tmp_path):
    """Each string and key of each file becomes hostile: the page has no other elements and attributes than before."""
    hostile = "\"'></text></title></style></pre><img src=x onerror=alert(1)>{{ 7 * 7 }}{% raw %}&lt;"

    def spoil(value: object, keys: bool) -> object:
        if isinstance(value, dict):
            known = ("kind", "step", "rank", "axis", "op", "text", "layout", "time")
            return {
                (key + hostile if keys and key not in known else key): spoil(item, keys)
                if key not in ("kind", "layout")
                else item
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [spoil(item, keys) for item in value]
        return value + hostile if isinstance(value, str) else value

    plain = Strings()
    plain.feed(write_report(make_run(tmp_path / "plain", 40)).read_text())
    for keys in (False, True):
        run = make_run(tmp_path / f"run <b onclick=x> {keys}", 40)
        for name in ("plan.json", "metrics.jsonl", "events.jsonl"):
            lines = [json.dumps(spoil(json.loads(line), keys)) for line in (run / name).read_text().splitlines()]
            (run / name).write_text("\n".join(lines) + "\n")
        (run / "config.toml").write_text(CONFIG.replace("tinyshakespeare.txt", "</pre><script>x</script>{{ 7 * 7 }}"))
        spoiled = Strings()
        text = write_report(run).read_text()
        spoiled.feed(text)
        assert spoiled.tags <= plain.tags and spoiled.attributes <= plain.attributes
        # What looks like a template in data is text, rendered once.
        assert "{{ 7 * 7 }}" in text and "{% raw %}&amp;lt;" in text and ">49" not in text


def test_damaged_steps_spoil_their_own_sections_alone(tmp_path):
    run = make_run(tmp_path / "run", 12)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "comm": [3], "parts": {"forward": "long"}}\n' * 2)
    text, _ = parsed(write_report(run))
    assert text.count("damaged (") >= 2
    assert "ROMEO" in text and "rank_started" in text


def test_parts_that_are_missing_are_left_out(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    text, _ = parsed(write_report(empty))
    assert "No step was recorded" in text
    for name in ("plan.json", "events.jsonl", "metrics.jsonl", "config.toml"):
        run = make_run(tmp_path / name, 12)
        (run / name).unlink()
        parsed(write_report(run))
    run = make_run(tmp_path / "damaged", 12)
    (run / "plan.json").write_text("{")
    (run / "config.toml").write_text("= not toml")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n{"step": 2, "lo')
    (run / "events.jsonl").write_text('[1]\n{"kind": "failed", "rank": 1}\n')
    text, _ = parsed(write_report(run))
    assert "failed" in text


def test_drift_beyond_the_bound_is_marked(tmp_path):
    run = make_run(tmp_path / "run", 40)
    text, _ = parsed(write_report(run, bound=0.25))
    row = text[text.index("parts.reduce") :]
    assert 'class="bad word">beyond' in row[: row.index("</tr>")]
    row = text[text.index("memory.parameters") :]
    assert "within" in row[: row.index("</tr>")]


def test_many_ranks_and_many_resumes_stay_readable(tmp_path):
    run = make_run(tmp_path / "run", 12)
    (run / "plan.json").write_text(json.dumps({"layout": {"text": "replicate=32,shard=16,zero=3"}}))
    with (run / "events.jsonl").open("a") as file:
        for step in range(6):
            file.write(json.dumps({"kind": "resumed", "rank": 0, "time": 1_760_000_400.0 + step, "step": step}) + "\n")
    text, _ = parsed(write_report(run))
    assert "512 ranks" in text and "the first 256 are drawn" in text and text.count('class="cell"') == 256
    assert "ranks 0-3" in text and "resumed 7 times" in text
    assert text.count('class="mark"') > text.count("resumed 7 times</text>") > 0


def test_axes_have_round_ticks():
    assert ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert [tick_text(value, 2e-4) for value in (0, 2e-4, 1e-3)] == ["0", "2e-4", "1e-3"]
    assert [tick_text(value, 5000) for value in (5000, 10_000, 2_500_000)] == ["5000", "10k", "2.500M"]
    assert ticks(3.0, 3.0) == [3.0]


def test_no_spike_is_lost_and_the_mean_keeps_its_ends():
    x = list(range(10_000))
    y = [1.0] * 10_000
    y[7777] = 50.0
    short_x, short_y = envelope(x, y, 100)
    assert len(short_x) <= 202 and 50.0 in short_y and short_x == sorted(short_x)
    assert smoothed([float(value) for value in range(100)]) == [float(value) for value in range(100)]
    assert smoothed([1.0, math.nan, 1.0, 1.0]) == [1.0] * 4
