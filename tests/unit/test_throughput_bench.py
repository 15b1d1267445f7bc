"""What the throughput benchmark reads off a run's ranks from outside, on a process whose memory is known."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
MIB = 2**20
RANK = """
import mmap, os, sys
own = bytearray(b"x") * (int(sys.argv[1]) << 20)
print(flush=True)
input()
file = os.memfd_create("meshwright-snapshot")
os.ftruncate(file, int(sys.argv[2]) << 20)
snapshots = mmap.mmap(file, int(sys.argv[2]) << 20, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
print(flush=True)
input()
"""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module("processes")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads what Linux tells of a process")
def test_a_peak_counts_every_rank_and_no_snapshot(tmp_path: Path, processes: ModuleType) -> None:
    sizes = {"small": ("40", "90"), "large": ("100", "30")}
    ranks = {
        name: subprocess.Popen(
            [sys.executable, "-c", RANK, *each], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name, each in sizes.items()
    }
    try:
        events = [json.dumps({"kind": "rank_started", "pid": rank.pid}) + "\n" for rank in ranks.values()]
        (tmp_path / "events.jsonl").write_text("".join(events))
        watch = processes.RankWatch(tmp_path, (1, 2))
        watch.start()
        for step in (1, 2):
            for rank in ranks.values():
                assert rank.stdin and rank.stdout
                rank.stdout.readline()
            watch.peak_bytes.clear()
            with (tmp_path / "metrics.jsonl").open("a") as metrics:
                metrics.write("{}\n")
            deadline = time.monotonic() + 20
            while len(watch.peak_bytes) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            for name, rank in ranks.items():
                own = int(sizes[name][0]) * MIB
                assert own < watch.peak_bytes[rank.pid] < own + 25 * MIB, (step, name)
                assert rank.stdin
                rank.stdin.write("\n")
                rank.stdin.flush()
        assert watch.end() >= 0.0
    finally:
        for rank in ranks.values():
            rank.kill()
            rank.communicate()
