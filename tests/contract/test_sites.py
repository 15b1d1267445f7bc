"""Sites that dial in at an outer server: equal to islands of one run, and to a replay of the server's log."""

from __future__ import annotations

import json
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


class Served:
    """An outer server under way."""

    def __init__(self, root: Path, *more: str, sites: int = 2, listen: str = "127.0.0.1:0") -> None:
        self.dir = root / "server"
        (self.dir / "address.json").unlink(missing_ok=True)
        argv = ["serve-outer", "--listen", listen, "--run", str(self.dir), "--outer.sites", str(sites), *more]
        self.process = Running(argv, root / "server.log")
        wait_until(lambda: (self.dir / "address.json").exists() or self.process.status is not None)
        self.port = json.loads((self.dir / "address.json").read_text())["port"]
        self.flags = ("--outer.meet", f"127.0.0.1:{self.port}", "--outer.key-file", str(self.dir / "key"))

    def stop(self) -> int:
        self.process.kill(15)
        status = self.process.wait()
        self.process.no_orphans()
        return status


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
def test_two_sites_of_other_layouts_equal_two_islands_of_one_run(root: Path) -> None:
    steps = ("--train.steps", "9", "--outer.every", "4", "--recovery.no-enabled")
    islands = ("--model.heads", "4", "--schedule.shape", "constant", *steps)
    status, text = call(
        words(root, "islands", *islands, layout="islands=2,precision=float64", devices=2), root / "islands.log"
    )
    assert not status, text
    server = Served(root, "--shards", "2", "--save-every", "1")
    sites = [
        Running(site_words(root, server, 0, *steps, layout="tp=2,precision=float64", devices=2), root / "site0.log"),
        Running(site_words(root, server, 1, *steps, layout="precision=float64", devices=1), root / "site1.log"),
    ]
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
