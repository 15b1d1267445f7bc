"""What the live page costs: a simulated run of 64 ranks and 10,000 steps grows while a page looks at it.

    python benchmarks/bench_live_page.py [--steps 10000] [--ranks 64] [--seconds 20] [--browser] [--json OUT]

The page's first document, and then its updates as a browser asks for them: after each answer's own pause. The run's
files grow meanwhile by a step each half second, a recorded step every ten and a sample of eight nodes' health every ten
seconds. CPU is this thread's. `--browser` opens the page in headless Chromium and asks it when it painted first, and
how much CPU its updates take. Bars: first document and paint under 1 s, updates under 100 ms of CPU a second and under
0.5 % of the machine's cores. Exit status 1 when one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import aiohttp

from meshwright.doctor.nvml import GpuState
from meshwright.jobs.watch import make_server
from meshwright.monitor import live_page
from tests import simulated_run

FIRST_BAR_S, UPDATE_BAR_S, SHARE_BAR = 1.0, 0.1, 0.005
STEP_EVERY_S, RECORDED_EVERY, HEALTH_EVERY = 0.5, 10, 20
NODES = 8
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def main() -> int:
    """Measures and prints a table; returns 1 when a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--browser", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
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
    "browser: first paint s": FIRST_BAR_S,
    "updates: CPU s a second": UPDATE_BAR_S,
    "browser: updates, CPU s a second": UPDATE_BAR_S,
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
    begun, cpu, version, answers, size, slowest = time.monotonic(), time.thread_time(), 0, 0, 0, 0.0
    while time.monotonic() < begun + seconds:
        before = time.thread_time()
        answer: dict[str, Any] = page.sections_since(version)
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
    """Returns when a browser painted the served page first, and the CPU that its updates then take there.

    Args:
        run: the run directory.
        folder: for the browser's profile.
        seconds: for which updates are watched.
    """
    if CHROMIUM is None:
        raise SystemExit("no Chromium here; leave --browser out")
    server = make_server(run, ("127.0.0.1", 0), None, 0.25)
    threading.Thread(target=server.serve, daemon=True).start()
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--window-size=1200,2400")
    browser = subprocess.Popen(
        [CHROMIUM, *flags, f"--user-data-dir={folder / 'profile'}", "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port_file, end = folder / "profile" / "DevToolsActivePort", time.monotonic() + 60
        while not port_file.exists() or len(port_file.read_text().split()) < 2:
            assert browser.poll() is None and time.monotonic() < end, "the browser doesn't start"
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        return asyncio.run(_watch_page(port, address, seconds))
    finally:
        browser.terminate()
        browser.wait(30)
        server.shutdown()
        server.server_close()


async def _watch_page(port: str, address: str, seconds: float) -> dict[str, float]:
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

            async def script_s() -> float:
                metrics = {item["name"]: item["value"] for item in (await call("Performance.getMetrics"))["metrics"]}
                return float(metrics["TaskDuration"])

            async def first_paint_ms() -> float:
                expression = "(performance.getEntriesByName('first-contentful-paint')[0] || {startTime: -1}).startTime"
                return float((await call("Runtime.evaluate", expression=expression))["result"]["value"])

            await call("Performance.enable")
            await call("Page.navigate", url=address)
            end = time.monotonic() + 60
            while (paint_ms := await first_paint_ms()) < 0 and time.monotonic() < end:
                await asyncio.sleep(0.1)
            painted_s = await script_s()
            await asyncio.sleep(5.0)
            begun, before_s = time.monotonic(), await script_s()
            await asyncio.sleep(seconds)
            busy = (await script_s() - before_s) / (time.monotonic() - begun)
            return {
                "browser: first paint s": paint_ms / 1e3,
                "browser: CPU s until then": painted_s,
                "browser: updates, CPU s a second": busy,
            }


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
