"""Training over a slow network between two machines: exposed communication and efficiency, planned and measured.

    sudo python benchmarks/bench_slow_train.py [--rates 100mbit,1gbit] [--delay 0ms] [--steps 12] [--json OUT]
        [--ways "replicate=2;replicate=2,compress=int8;islands=2 --outer.every 30"]

Two network namespaces on this machine, a rank and a core each, joined by a wire whose rate is held down in both
directions. Both calibrate together over it. Then each way, a layout and further words of `meshwright train`, is
trained by two nodes as a user would, for some steps (islands for a whole round after the first); ``auto`` leaves the
layout to the planner, as in ``auto --allow islands``. Told are the mean
step, its share in which rank 0 stood still for communication, the median step beside the planned one (of islands
without the join), and the efficiency against one rank alone with the same batch.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench_slow_link import HOST, PORT, networks
from processes import kill_descendants

from meshwright.spec.layout import Layout

WAYS = (
    "replicate=2", "replicate=2,compress=bf16", "replicate=2,compress=int8", "shard=2,zero=3",
    "shard=2,zero=3,compress_weights=int8", "islands=2 --outer.every 30",
    "islands=2 --outer.every 30 --outer.compress int8", "auto", "auto --allow lossy",
    "auto --allow islands --outer.every 30 --outer.compress int8",
)  # fmt: skip
RECIPE = """
[model]
name = "gpt2"
layers = 6
width = 256
heads = 4
[data]
limit_bytes = 4000000
vocab_size = 2048
sequence = 128
[train]
batch = 16
sample_tokens = 0
prove = false
[evaluation]
every = 0
rows = 16
[checkpoint]
every = 0
[recovery]
snapshot_every = 0
[monitor]
display = "none"
tensorboard = false
report = false
"""
WARM_UP = 3
"""Steps at the start that aren't counted."""
LIMIT_S = 300.0


def main() -> int:
    """Prints a table for each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="100mbit", help="as tc writes them; none for an unlimited wire")
    parser.add_argument("--delay", default="0ms", help="of the wire, one way")
    parser.add_argument("--ways", default=";".join(WAYS))
    parser.add_argument("--steps", type=int, default=12, help="counted ones; a way of islands counts its round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if os.geteuid() or subprocess.run(["which", "tc", "ip"], capture_output=True, check=False).returncode:
        print("needs root, ip and tc, to make two networks and slow the wire between them")
        return 0
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rate in options.rates.split(","):
                with networks(rate, options.delay) as names:
                    print(f"wire: {rate}, {options.delay}", flush=True)
                    results[rate] = measure(names, options.ways.split(";"), options.steps, Path(folder) / rate)
        finally:
            kill_descendants()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


def measure(names: list[str], ways: list[str], steps: int, folder: Path) -> list[dict[str, Any]]:
    """Calibrates, trains alone and then each way over one wire; prints a line each."""
    folder.mkdir()
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    run_nodes(names, ["calibrate", "--devices", "2", "--practice", "0"], folder, PORT)
    alone = folder / "alone"
    words = ["train", str(recipe), "--devices", "1", "--train.steps", str(WARM_UP + steps), "--run", str(alone)]
    run_nodes(names[:1], words, folder, PORT)
    alone_s = read_run(alone, WARM_UP)["step_s"]
    print(f"  one rank alone: {alone_s * 1e3:.0f} ms a step", flush=True)
    rows = [{"way": "alone", "step_s": alone_s}]
    for number, way in enumerate(ways, 1):
        layout, *more = shlex.split(way)
        run = folder / f"way-{number}"
        # A round of islands is as long as --outer.every says; its first is for warming up.
        every = int(more[more.index("--outer.every") + 1]) if "--outer.every" in more else 0
        count = 2 * every if every else WARM_UP + steps
        words = ["train", str(recipe), "--layout", layout, *more, "--train.steps", str(count), "--run", str(run)]
        run_nodes(names, words, folder, PORT + number)
        row = {"way": way, **read_run(run, every or WARM_UP)}
        row["efficiency"] = alone_s / (len(names) * row["step_s"])
        rows.append(row)
        off = row["planned_s"] / row["median_s"] - 1
        if layout == "auto":
            print(f"  {way}: the plan is {row['layout']}")
        print(
            f"  {way:<52} {row['step_s'] * 1e3:6.0f} ms, exposed {row['exposed']:4.0%}, efficiency "
            f"{row['efficiency']:4.0%}; median {row['median_s'] * 1e3:6.0f} ms, planned {row['planned_s'] * 1e3:6.0f} "
            f"({off:+.0%})",
            flush=True,
        )
    return rows


def run_nodes(names: list[str], words: list[str], folder: Path, port: int) -> None:
    """Runs ``meshwright`` with some words in each network, on a core each; raises where one fails."""
    cores = sorted(os.sched_getaffinity(0))
    processes = []
    for node, name in enumerate(names):
        place = ["ip", "netns", "exec", name, "taskset", "-c", str(cores[node % len(cores)])]
        command = [*place, sys.executable, "-m", "meshwright", *words]
        if len(names) > 1:
            command += ["--nodes", str(len(names)), "--node", str(node), "--slots", "1", "--meet", f"{HOST}:{port}"]
        variables = {**os.environ, "XDG_CACHE_HOME": str(folder / f"cache-{node}")}
        log = (folder / f"node-{node}.log").open("a")
        processes.append(subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log))
    for node, process in enumerate(processes):
        if process.wait(LIMIT_S):
            log_lines = (folder / f"node-{node}.log").read_text().splitlines()
            raise SystemExit(f"{shlex.join(words)}: node {node} ended with {process.returncode}: {log_lines[-3:]}")


def read_run(run: Path, warm_up: int) -> dict[str, Any]:
    """Returns the mean step after the warm-up and its exposed share on rank 0, the median and the planned step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][warm_up:]
    plan = json.loads((run / "plan.json").read_text())
    seconds, exposed = [line["step_s"] for line in lines], [exposed_s(line) for line in lines]
    # A round's mean holds its join; of steps that are alike the median leaves out disturbed ones.
    middle = mean if any(line["outer"] for line in lines) else median
    return {
        "step_s": middle(seconds),
        "exposed": middle(exposed) / middle(seconds),
        "median_s": median(seconds),
        "layout": str(Layout.from_json(plan["layout"])),
        "planned_s": plan["prediction"]["step_s"],
        "sent_bytes": mean(sum(entry["bytes"] for entry in line["comm"]) for line in lines),
    }


def exposed_s(line: dict[str, Any]) -> float:
    """Returns the seconds of a step in which rank 0 stood still for communication."""
    return float(sum(entry["exposed_s"] for entry in line["comm"]))


if __name__ == "__main__":
    raise SystemExit(main())
