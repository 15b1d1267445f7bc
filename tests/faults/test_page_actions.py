"""The page's buttons act once on all ranks of a real run; the page ends with the run and changes no bit of it."""

from __future__ import annotations

import http.client
import json
import re
from pathlib import Path

import pytest

from tests.runs import Running, call, curve, events, last_step, wait_until, words, write_corpus
from tests.tiers import cases


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    write_corpus(root / "corpus.txt")
    return root


def ask(port: int, run: Path, action: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    token = (run / "page-token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    connection.request("POST", "/api/request", json.dumps({"action": action}), headers)
    assert connection.getresponse().status == 202
    connection.close()


@pytest.mark.parametrize(
    ("layout", "devices", "more"),
    cases(
        [
            ("replicate=2", 2, ()),
            ("islands=2", 2, ("--outer.every", "5", "--outer", "local_sgd")),
            ("replicate=1", 1, ("--recovery.no-enabled",)),
        ]
    ),
)
def test_buttons_act_on_all_ranks_once(layout: str, devices: int, more: tuple[str, ...], root: Path) -> None:
    run, plain = root / f"run-{layout}", root / f"plain-{layout}"
    options = ("--checkpoint.every", "0", "--schedule.shape", "constant", *more)
    assert call(words(root, plain.name, *options, layout=layout, devices=devices), root / "plain.log")[0] == 0
    page = ("--monitor.port", "0", "--monitor.timeline", "5", "--train.steps", "100000")
    running = Running(words(root, run.name, *options, *page, layout=layout, devices=devices), root / "run.log")
    wait_until(lambda: last_step(run) >= 24)
    log = (root / "run.log").read_text()
    port = int(re.search(r"page: http://127\.0\.0\.1:(\d+)/ \(its token", log)[1])  # type: ignore[index]
    token = (run / "page-token").read_text().strip()
    assert (run / "page-token").stat().st_mode & 0o077 == 0
    for action, kind in (("evaluate", "evaluated"), ("checkpoint", "checkpoint_saved"), ("stop", "interrupted")):
        ask(port, run, action)
        wait_until(lambda kind=kind: events(run, kind))  # type: ignore[misc]
    assert running.wait() == 1  # interrupted, as by Ctrl-C
    running.no_orphans()
    asked = [event["what"] for event in events(run, "requested")]
    assert asked == [["evaluate"], ["checkpoint"], ["stop"]]
    assert len(events(run, "evaluated")) == 1
    # One on demand, one at the end.
    assert len(events(run, "checkpoint_saved")) == 2
    with pytest.raises(OSError, match="refused"):
        ask(port, run, "stop")
    assert token not in (root / "run.log").read_text() + (run / "events.jsonl").read_text()
    assert list(curve(run).items())[:24] == list(curve(plain).items())
    ranks = {path.name for path in (run / "timeline").iterdir()}
    assert ranks == {f"rank-{rank:05d}.jsonl" for rank in range(devices)}
    assert not (plain / "timeline").exists() and not (plain / "page-token").exists()
