"""What the live page costs: a simulated run of 64 ranks and 10,000 steps grows while a page looks at it.

    python benchmarks/bench_live_page.py [--steps 10000] [--ranks 64] [--seconds 20] [--browser] [--json OUT]

The page's first document, all of its sections, and then its updates as a browser asks for them: after each answer's own
pause. The run's files grow meanwhile by a step each half second, a recorded step every ten and a sample of eight nodes'
health every ten seconds. CPU is this thread's. `--browser` serves the page by `meshwright watch`, opens it in headless
Chromium as the server begins and once more, and asks when it painted first and how much CPU browser and server take.
`--training PAIRS` instead trains: two runs of two ranks beside each other, one of which serves its page to a reader.
What that costs is its own process, as a share of the cores beside the other run's command, and what a rank does for a
page, recording one step in so many: how much longer such a step and the one after it take than those around them, as a
share of all steps. The same of steps half way between two recorded ones says how far that can be trusted. Bar 0.5 %.

Bars: first document and paint under 1 s, updates under 100 ms of CPU a second and under 0.5 % of the machine's cores.
Exit status 1 when one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import aiohttp

from meshwright.doctor.nvml import GpuState
from meshwright.monitor import live_page
from meshwright.monitor.config import PAGE_TIMELINE
from tests import runs, simulated_run

FIRST_BAR_S, UPDATE_BAR_S, SHARE_BAR = 1.0, 0.1, 0.005
STEP_EVERY_S, RECORDED_EVERY, HEALTH_EVERY = 0.5, 10, 20
NODES = 8
TRAINED = (50, 650)
"""Steps between which processor seconds are counted."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def main() -> int:
    """Measures and prints a table; returns 1 when a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--browser", action="store_true")
    parser.add_argument(
        "--training", type=int, default=0, metavar="PAIRS", help="pairs of runs with and without a page"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.training:
        return compare_training(options.training)
    with tempfile.TemporaryDirectory() as temporary:
        run = simulated_run.write(Path(temporary) / "run", options.steps, ranks=options.ranks, every=500)
        growth = Growth(run, options.steps, options.ranks)
        growth.write_health(60)
        growth.start()
        try:
            result = measure(run, options.seconds)
            if options.browser:
                result |= in_browser(run, Path(temporary), options.seconds)
        finally:
            growth.stop()
    width = max(map(len, result))
    for name, value in result.items():
        print(f"{name:<{width}}  {value:>10.4g}")
    missed = [name for name, bar in BARS.items() if name in result and not result[name] < bar]
    print(f"missed: {', '.join(missed)}" if missed else "all bars held")
    if options.json:
        options.json.write_text(json.dumps(result | {"missed": missed, "load": os.getloadavg()[0]}, indent=1))
    return 1 if missed else 0


BARS = {
    "first document CPU s": FIRST_BAR_S,
    "browser, server begins: first paint s": FIRST_BAR_S,
    "browser, server has read: first paint s": FIRST_BAR_S,
    "updates: CPU s a second": UPDATE_BAR_S,
    "browser: updates, CPU s a second": UPDATE_BAR_S,
    "browser: updates, server's CPU s a second": UPDATE_BAR_S,
    "updates: share of the cores": SHARE_BAR,
}


def measure(run: Path, seconds: float) -> dict[str, float]:
    """Returns seconds of the first document and of updates, and the bytes that they send."""
    page = live_page.LivePage(run, 0.25)
    begun, cpu = time.monotonic(), time.thread_time()
    document = page.document()
    result = {
        "first document s": time.monotonic() - begun,
        "first document CPU s": time.thread_time() - cpu,
        "first document MB": len(document.encode()) / 1e6,
    }
    cpu, version = time.thread_time(), 0
    for _ in range(2):
        version = page.sections_since(version)["version"]
    result["all sections, CPU s"] = time.thread_time() - cpu
    begun, cpu, answers, size, slowest = time.monotonic(), time.thread_time(), 0, 0, 0.0
    while time.monotonic() < begun + seconds:
        before = time.thread_time()
        answer = page.sections_since(version)
        text = json.dumps(answer)
        slowest = max(slowest, time.thread_time() - before)
        version, answers, size = answer["version"], answers + 1, size + len(text)
        time.sleep(answer["pause_ms"] / 1e3)
    wall_s, cpu_s = time.monotonic() - begun, time.thread_time() - cpu
    return result | {
        "updates": float(answers),
        "updates: slowest CPU s": slowest,
        "updates: CPU s a second": cpu_s / wall_s,
        "updates: share of the cores": cpu_s / wall_s / (os.cpu_count() or 1),
        "updates: seconds between": wall_s / answers,
        "updates: kB each": size / answers / 1e3,
    }


def in_browser(run: Path, folder: Path, seconds: float) -> dict[str, float]:
    """Returns when a browser painted the page, and the CPU that it and the page's server take.

    The page is opened twice: as its server begins, which has yet to read the run's files, and when it has read them.

    Args:
        run: the run directory.
        folder: for the browser's profile.
        seconds: for which updates are watched.
    """
    if CHROMIUM is None:
        raise SystemExit("no Chromium here; leave --browser out")
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--window-size=1200,2400")
    browser = subprocess.Popen(
        [CHROMIUM, *flags, f"--user-data-dir={folder / 'profile'}", "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    server = None
    try:
        port_file, end = folder / "profile" / "DevToolsActivePort", time.monotonic() + 60
        while not port_file.exists() or len(port_file.read_text().split()) < 2:
            assert browser.poll() is None and time.monotonic() < end, "the browser doesn't start"
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        command = [sys.executable, "-m", "meshwright", "watch", str(run), "--port", "0"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
        assert server.stderr is not None
        addresses = re.findall(r"http://\S+", server.stderr.readline())
        assert addresses, "the page isn't served"
        return asyncio.run(_watch_page(port, addresses[0], seconds, browser.pid, server.pid))
    finally:
        for process in (browser, server):
            if process is not None:
                process.terminate()
                process.wait(30)


_FIRST_SCREEN = """JSON.stringify({
  paint: (performance.getEntriesByName('first-contentful-paint')[0] || {startTime: -1}).startTime,
  curves: document.querySelector('#course svg') ? performance.now() : -1,
  all: document.querySelector('#last-recorded-step svg') ? performance.now() : -1})"""
"""When the first paint was, and since when at the latest the curves and the step of all ranks are there."""


async def _watch_page(port: str, address: str, seconds: float, browser_pid: int, server_pid: int) -> dict[str, float]:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            tab = next(entry for entry in await answer.json() if entry["type"] == "page")
        async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            numbers = itertools.count(1)

            async def call(method: str, **params: object) -> dict[str, Any]:
                number = next(numbers)
                await socket.send_json({"id": number, "method": method, "params": params})
                while (message := await socket.receive_json()).get("id") != number:
                    continue
                return dict(message["result"])

            async def open_page(name: str) -> dict[str, float]:
                server_s, browser_s = _cpu_s(server_pid), _cpu_s(browser_pid)
                await call("Page.navigate", url=address)
                end, seen = time.monotonic() + 60, {"paint": -1.0, "curves": -1.0, "all": -1.0}
                while min(seen.values()) < 0 and time.monotonic() < end:
                    await asyncio.sleep(0.05)
                    value = (await call("Runtime.evaluate", expression=_FIRST_SCREEN))["result"]["value"]
                    seen = {
                        key: was if was >= 0 else now
                        for (key, was), now in zip(seen.items(), json.loads(value).values())
                    }
                return {
                    f"browser, {name}: first paint s": seen["paint"] / 1e3,
                    f"browser, {name}: curves s": seen["curves"] / 1e3,
                    f"browser, {name}: all s": seen["all"] / 1e3,
                    f"browser, {name}: server's CPU s until then": _cpu_s(server_pid) - server_s,
                    f"browser, {name}: browser's CPU s until then": _cpu_s(browser_pid) - browser_s,
                }

            result = await open_page("server begins")
            result |= await open_page("server has read")
            await asyncio.sleep(5.0)
            begun, browser_s, server_s = time.monotonic(), _cpu_s(browser_pid), _cpu_s(server_pid)
            await asyncio.sleep(seconds)
            wall_s = time.monotonic() - begun
            return result | {
                "browser: updates, CPU s a second": (_cpu_s(browser_pid) - browser_s) / wall_s,
                "browser: updates, server's CPU s a second": (_cpu_s(server_pid) - server_s) / wall_s,
            }


def _cpu_s(pid: int) -> float:
    """Returns user and system seconds so far of a process and of those below it that still run."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    below = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(map(_cpu_s, map(int, below)))


def compare_training(pairs: int) -> int:
    """Trains with and without a page and prints what it costs; returns 1 when the bar is missed."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        runs.write_corpus(folder / "corpus.txt", sentences=3000)
        runs.warm()
        processes, recorded, between = [], list[float](), list[float]()
        for number in range(pairs):
            processes.append(_train_pair(folder, number))
            run = folder / f"page-{number}"
            recorded += _excesses(run, 0.0)
            between += _excesses(run, 0.5)
            print(f"{number + 1}: page's process, of the cores {processes[-1]:+.2%}", flush=True)
    every = PAGE_TIMELINE
    costs = {
        "page's process, of the cores": statistics.median(processes),
        "recording, of a step": statistics.median(recorded) / every,
        "the same between recorded steps": statistics.median(between) / every,
    }
    print("median: " + ", ".join(f"{name} {value:+.3%}" for name, value in costs.items()))
    print(f"a recorded step and the next: {statistics.median(recorded):+.1%} of a step, {len(recorded)} of them")
    return 1 if costs["page's process, of the cores"] + costs["recording, of a step"] >= SHARE_BAR else 0


def _excesses(run: Path, offset: float) -> list[float]:
    """Returns by how many usual steps a recorded step and the next one took longer than usual.

    Args:
        run: its run directory.
        offset: 0 for recorded steps; else steps so far behind them, as a share of what lies between two.
    """
    seconds = {row["step"]: row["step_s"] for row in runs.rows(run, "metrics.jsonl")}
    every = PAGE_TIMELINE
    recorded = [row["step"] for row in runs.rows(run, "timeline/rank-00000.jsonl") if row["step"] % every == 0]
    found = []
    for step in recorded:
        step += round(offset * every)
        around = [seconds[near] for near in range(step - every // 4, step + every // 4) if near in seconds]
        if {step, step + 1} <= seconds.keys() and len(around) == 2 * (every // 4):
            usual_s = statistics.median(around)
            found.append((seconds[step] + seconds[step + 1]) / usual_s - 2)
    return found


def _reaches(run: Path, step: int) -> Callable[[], bool]:
    """Returns whether a run has done a step, each time that it is asked."""
    return lambda: runs.last_step(run) >= step


def _train_pair(folder: Path, number: int) -> float:
    """Trains a run with a page beside one without; returns the share of the cores that the page's process takes."""
    first, last = TRAINED
    # What a run costs more because it began first is the other's turn in the next pair.
    names = ["page", "none"] if number % 2 else ["none", "page"]
    started = {}
    for name in names:
        more = ["--train.steps", str(10 * last), "--model.width", "128", "--checkpoint.every", "0"]
        more += ["--monitor.port", "0"] if name == "page" else []
        argv = runs.words(folder, f"{name}-{number}", *more, layout="shard=2,zero=2", devices=2)
        started[name] = runs.Running(argv, folder / f"{name}-{number}.log")
    reader = Reader(started["page"].output)
    try:
        for name in names:
            runs.wait_until(_reaches(folder / f"{name}-{number}", first), 600.0)
        reader.start()
        before = {name: _spent(started[name], folder / f"{name}-{number}") for name in names}
        for name in names:
            runs.wait_until(_reaches(folder / f"{name}-{number}", last), 600.0)
        after = {name: _spent(started[name], folder / f"{name}-{number}") for name in names}
    finally:
        reader.stop()
        for running in started.values():
            running.end()
            running.wait()
    assert reader.answers > 1, "nobody looked at the page"
    spent = {name: {title: after[name][title] - before[name][title] for title in after[name]} for name in names}
    beside = {name: spent[name]["all processes"] - spent[name]["ranks"] for name in names}
    page_s = beside["page"] - beside["none"] * spent["page"]["steps"] / spent["none"]["steps"]
    return page_s / spent["page"]["wall"] / (os.cpu_count() or 1)


def _spent(running: runs.Running, run: Path) -> dict[str, float]:
    """Returns the steps so far, and processor seconds of the ranks and of the whole command."""
    ranks = [event["pid"] for event in runs.rows(run, "events.jsonl") if event["kind"] == "rank_started"]
    return {
        "wall": time.monotonic(),
        "steps": float(runs.last_step(run)),
        "ranks": sum(map(_cpu_s, ranks)),
        "all processes": _cpu_s(running.pid),
    }


class Reader(threading.Thread):
    """Asks a page for what has changed, as a browser's script does.

    Args:
        log: of the command that serves it, which says its address.
    """

    def __init__(self, log: Path) -> None:
        super().__init__(daemon=True)
        self._log, self._ended, self.answers = log, threading.Event(), 0

    def run(self) -> None:
        """Asks until it is stopped."""
        address = re.search(r"http://\S+", self._log.read_text())
        assert address is not None
        version, pause_s = 0, 0.0
        while not self._ended.wait(pause_s):
            with urllib.request.urlopen(f"{address[0]}api/sections?since={version}", timeout=120) as answer:
                news = json.load(answer)
            version, pause_s, self.answers = news["version"], news["pause_ms"] / 1e3, self.answers + 1

    def stop(self) -> None:
        """Ends it."""
        self._ended.set()
        if self.is_alive():
            self.join()


class Growth(threading.Thread):
    """Lets a run grow as one that trains does.

    Args:
        run: the run directory.
        steps: that it has.
        ranks: of it.
    """

    def __init__(self, run: Path, steps: int, ranks: int) -> None:
        super().__init__(daemon=True)
        self._run, self._step, self._ranks = run, steps, ranks
        self._draw, self._ended = random.Random(1), threading.Event()

    def run(self) -> None:
        """Adds a step each half second."""
        while not self._ended.wait(STEP_EVERY_S):
            self._step += 1
            self._append("metrics.jsonl", simulated_run.record(self._step, self._draw))
            if self._step % RECORDED_EVERY == 0:
                for rank in range(self._ranks):
                    line = simulated_run.timeline(rank, self._step, time.time(), rank == 37, self._ranks, self._draw)
                    self._append(f"timeline/rank-{rank:05d}.jsonl", line)
            if self._step % HEALTH_EVERY == 0:
                self.write_health(1)

    def write_health(self, samples: int) -> None:
        """Adds samples of all nodes' GPUs."""
        (self._run / "health").mkdir(exist_ok=True)
        for number in range(samples):
            tokens = (self._step + number) * 4_194_304
            for node in range(NODES):
                gpus = [
                    dataclasses.asdict(GpuState(index=gpu, error="", name="H100", joules=7e3 * (self._step + number)))
                    for gpu in range(self._ranks // NODES)
                ]
                sample = {"time": time.time(), "host": f"node-{node}", "step": self._step, "tokens": tokens}
                rest = {"gpus": gpus, "nics": {"eth0": 0}, "cpu_joules": 400.0 * (self._step + number), "visible": None}
                self._append(f"health/node-{node}.jsonl", sample | rest)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with (self._run / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def stop(self) -> None:
        """Ends it."""
        self._ended.set()
        self.join()


if __name__ == "__main__":
    raise SystemExit(main())
