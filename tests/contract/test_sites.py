"""Sites that dial in at an outer server: equal to islands of one run, and to a replay of the server's log."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.store import CheckpointStore
from tests.runs import Running, call, events, rows, wait_until, words, write_corpus


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_corpus(tmp_path / "corpus.txt", 60)
    return tmp_path


@pytest.fixture
def commands() -> Iterator[contextlib.ExitStack]:
    """Ends the commands of a test that failed."""
    with contextlib.ExitStack() as stack:
        yield stack


class Served:
    """An outer server under way."""

    def __init__(self, commands: contextlib.ExitStack, root: Path, *more: str, listen: str = "127.0.0.1:0") -> None:
        self.dir = root / "server"
        (self.dir / "address.json").unlink(missing_ok=True)
        argv = ["serve-outer", "--listen", listen, "--run", str(self.dir), "--outer.sites", "2", *more]
        self.process = begin(commands, argv, root / "server.log")
        wait_until(lambda: (self.dir / "address.json").exists() or self.process.status is not None)
        self.port = json.loads((self.dir / "address.json").read_text())["port"]
        self.flags = ("--outer.meet", f"127.0.0.1:{self.port}", "--outer.key-file", str(self.dir / "key"))

    def stop(self) -> int:
        self.process.kill(15)
        status = self.process.wait()
        self.process.no_orphans()
        return status


def begin(commands: contextlib.ExitStack, argv: list[str], log: Path) -> Running:
    """Starts a command that ends with the test at the latest."""
    process = Running(argv, log)
    commands.callback(process.end)
    return process


def site_words(root: Path, server: Served, site: int, *more: str, layout: str, devices: int) -> list[str]:
    own = ("--outer.site", str(site), "--outer.sites", "2", *server.flags)
    common = ("--model.heads", "4", "--schedule.shape", "constant", "--train.batch", "4")
    return words(root, f"site{site}", *common, *own, *more, layout=layout, devices=devices)


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    store = CheckpointStore(run / "checkpoints", CheckpointConfig())
    found = store.find()
    assert found is not None
    return {name: value for name, value in store.read_full(found) if name.startswith("weights/")}


def worst(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max() / right[name].abs().max()) for name in left)


@pytest.mark.slow
def test_two_sites_of_other_layouts_equal_two_islands_of_one_run(root: Path, commands: contextlib.ExitStack) -> None:
    steps = ("--train.steps", "9", "--outer.every", "4", "--recovery.no-enabled")
    islands = ("--model.heads", "4", "--schedule.shape", "constant", *steps)
    status, text = call(
        words(root, "islands", *islands, layout="islands=2,precision=float64", devices=2), root / "islands.log"
    )
    assert not status, text
    server = Served(commands, root, "--shards", "2", "--save-every", "1")
    first = site_words(root, server, 0, *steps, layout="tp=2,precision=float64", devices=2)
    second = site_words(root, server, 1, *steps, layout="precision=float64", devices=1)
    sites = [begin(commands, first, root / "site0.log"), begin(commands, second, root / "site1.log")]
    for site in sites:
        assert site.wait() == 0, site.text()
    assert server.stop() == 0, server.process.text()
    expected: Any = [row["outer"]["island_losses"] for row in rows(root / "islands") if row["outer"]]
    for site in range(2):
        reports = [row["outer"] for row in rows(root / f"site{site}") if row["outer"]]
        assert [report["version"] for report in reports] == [1, 2, 3]
        assert [report["site_loss"] for report in reports] == pytest.approx(
            [losses[site] for losses in expected], rel=1e-9
        )
        assert worst(final_weights(root / f"site{site}"), final_weights(root / "islands")) < 1e-9
    assert [row["version"] for row in rows(server.dir)] == [1, 2, 3]
    assert [event["version"] for event in events(server.dir, "saved")] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.long
def test_a_site_that_is_killed_costs_the_others_the_grace_window_and_comes_back(
    root: Path, commands: contextlib.ExitStack
) -> None:
    """The other's rounds go on without it; its own command, typed again, goes on from its snapshot and the version."""
    grace_s, steps = 3.0, 100
    settings = ("--train.steps", str(steps), "--outer.every", "3", "--outer.quorum", "1", "--checkpoint.every", "3")
    settings += ("--outer.grace-s", str(grace_s))
    server = Served(commands, root, "--outer.quorum", "1", "--outer.grace-s", str(grace_s))
    argv = [site_words(root, server, site, *settings, layout="precision=float64", devices=1) for site in range(2)]
    # It trains on until the other is back.
    argv[0] += ["--recovery.faults", "slow:rank=0,step=3,seconds=0.5"]
    stays, goes = (begin(commands, argv[site], root / f"site{site}.log") for site in range(2))
    wait_until(lambda: any(len(row["rounds"]) == 2 and row["version"] >= 2 for row in rows(server.dir)))
    for pid in goes.alive():
        os.kill(pid, signal.SIGKILL)
    killed_at = time.time()
    goes.wait()
    wait_until(lambda: events(server.dir, "site_forgotten"))
    alone = len(rows(server.dir))
    wait_until(lambda: len(rows(server.dir)) >= alone + 2)
    again = begin(commands, argv[1], root / "site1-again.log")
    assert stays.wait() == 0, stays.text()
    assert again.wait() == 0, again.text()
    assert server.stop() == 0, server.process.text()
    log = rows(server.dir)
    (forgotten,) = events(server.dir, "site_forgotten")
    assert forgotten["site"] == 1 and forgotten["time"] - killed_at < 2 * grace_s + 2.0
    assert all(row["grace_waited_s"] < grace_s + 1.5 for row in log), "nobody waits longer than the window"
    both = [row["version"] for row in log if {each["site"] for each in row["rounds"]} == {0, 1}]
    assert both and [row for row in log if {each["site"] for each in row["rounds"]} == {0}]
    # It came back: rounds of both its sessions are in the log, and its run has all its steps.
    assert len({each["session"] for row in log for each in row["rounds"] if each["site"] == 1}) == 2
    assert sorted({row["step"] for row in rows(root / "site1")}) == list(range(1, steps + 1))
    versions = [row["outer"]["version"] for site in range(2) for row in rows(root / f"site{site}") if row["outer"]]
    assert max(versions) == log[-1]["version"]


@pytest.mark.slow
@pytest.mark.long
def test_a_site_that_is_asked_to_end_hands_over_its_round_and_nobody_waits_for_it(
    root: Path, commands: contextlib.ExitStack
) -> None:
    """SIGTERM, as a scheduler sends it before it takes a node away, drains a site: nothing of it is lost."""
    grace_s, every = 60.0, 4
    settings = ("--train.steps", "40", "--outer.every", str(every), "--outer.grace-s", str(grace_s))
    server = Served(commands, root, "--outer.grace-s", str(grace_s))
    argv = [site_words(root, server, site, *settings, layout="precision=float64", devices=1) for site in range(2)]
    # Slow enough that the request comes in the middle of a round.
    for words_of_site in argv:
        words_of_site += ["--recovery.faults", "slow:rank=0,step=2,seconds=0.4"]
    stays, leaves = (begin(commands, argv[site], root / f"site{site}.log") for site in range(2))
    wait_until(lambda: len(rows(root / "site1")) % every == 2 and len(rows(server.dir)) >= 1)
    leaves.kill(signal.SIGTERM)
    assert leaves.wait() == 143, leaves.text()
    asked = len(rows(server.dir))
    assert stays.wait() == 0, stays.text()
    assert server.stop() == 0, server.process.text()
    log, steps = rows(server.dir), {row["step"] for row in rows(root / "site1")}
    # Each token that the site trained on is in a round of the log, those of its open round too.
    trained = sum(row["tokens"] for row in rows(root / "site1"))
    taken = [each for row in log for each in row["rounds"] if each["site"] == 1]
    assert sum(each["tokens"] for each in taken) == trained and len(steps) % every
    # The others went on at once, by the clock of the server that would have waited.
    assert len(log) > asked + 2 and all(row["grace_waited_s"] < 0.25 * grace_s for row in log)
    assert all({each["site"] for each in row["rounds"]} == {0} for row in log[asked + 1 :])
