"""Training over a slow network between machines: exposed communication and efficiency, planned and measured.

    sudo python benchmarks/bench_slow_train.py [--rates 100mbit,1gbit] [--delay 0ms] [--nodes 2] [--steps 12]
        [--ways "replicate=2;replicate=2,compress=int8;islands=2 --outer.every 30"] [--mixture] [--batch 16]
        [--rounds 1] [--json OUT]

Network namespaces on this machine, a rank each, joined by wires of a rate and a delay (`slow_wire.py`). Each has a core
of its own; where there are more nodes than cores, each has an equal share of nine tenths of them (a cgroup's quota), as
the rank that trains alone does. All calibrate together over the wires. Then each way, a layout and further words of
`meshwright train`, is trained by all nodes as a user would, for some steps (islands for a whole round after the first);
``auto`` leaves the layout to the planner, as in ``auto --allow islands``; where that leaves it how islands join too,
the run is told to be long, and is ended after two of the rounds that the plan says. A round is one rank alone and each
way. Told are the mean step, its share in which rank 0 stood still for communication, the median step beside the planned
one (of islands without the join), the efficiency against one rank alone with the same batch in the same round, and rank
0's processor seconds of a step: of the thread that computes, and of all its threads. What a step takes beyond these and
the wait is neither: a core that other programs have.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench_slow_link import PORT
from processes import CoreShare, kill_descendants
from slow_wire import FIRST_ADDRESS, networks

from meshwright.spec.layout import Layout

WAYS = (
    "replicate={n}", "replicate={n},compress=bf16", "replicate={n},compress=int8", "shard={n},zero=3",
    "shard={n},zero=3,compress_weights=int8", "islands={n} --outer.every 30",
    "islands={n} --outer.every 30 --outer.compress int8", "auto", "auto --allow lossy",
    "auto --allow islands --outer.every 30 --outer.compress int8", "auto --allow islands", "auto --allow islands lossy",
)  # fmt: skip
DENSE = """
[model]
name = "gpt2"
layers = 6
width = 256
heads = 4
"""
MIXTURE = """
[model]
name = "qwen3_moe"
layers = 4
width = 256
heads = 4
kv_heads = 2
ffn = 128
experts = 32
[model.overrides]
num_experts_per_tok = 8
"""
RECIPE = """
[data]
limit_bytes = 4000000
vocab_size = 2048
sequence = 128
[train]
batch = {batch}
sample_tokens = 0
prove = false
[evaluation]
every = 0
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
LONG_RUN = 4000
"""Steps of a run whose rounds the planner chooses: it leaves a run enough of them."""
LIMIT_S = 900.0


def main() -> int:
    """Prints a table for each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="100mbit", help="as tc writes them; none for an unlimited wire")
    parser.add_argument("--delay", default="0ms", help="of the wire, one way")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--mixture", action="store_true", help="train a mixture: 32 experts, 8 of a token")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step, of all nodes together")
    parser.add_argument("--ways", default=";".join(WAYS), help="with ; between them; {n} stands for the nodes")
    parser.add_argument("--steps", type=int, default=12, help="counted ones; a way of islands counts its round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if os.geteuid() or subprocess.run(["which", "tc", "ip"], capture_output=True, check=False).returncode:
        print("needs root, ip and tc, to make networks and slow the wires between them")
        return 0
    ways = options.ways.replace("{n}", str(options.nodes)).split(";")
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rate in options.rates.split(","):
                with networks(rate, options.delay, options.nodes) as names, CoreShare(options.nodes) as cores:
                    print(f"wire: {rate}, {options.delay}, {options.nodes} nodes", flush=True)
                    recipe = (MIXTURE if options.mixture else DENSE) + RECIPE.format(batch=options.batch)
                    wire = Wire(names, cores, Path(folder) / rate, recipe)
                    results[rate] = wire.measure(ways, options.steps, options.rounds)
                    if options.json:
                        options.json.write_text(json.dumps(results, indent=1))
        finally:
            kill_descendants()
    return 0


class Wire:
    """Nodes on one wire.

    Args:
        names: networks.
        cores: what each node may compute with.
        folder: of runs, caches and logs.
        recipe: what is trained.
    """

    def __init__(self, names: list[str], cores: CoreShare, folder: Path, recipe: str) -> None:
        self._names, self._cores, self._folder, self._port, self._recipe = names, cores, folder, PORT, recipe

    def measure(self, ways: list[str], steps: int, rounds: int) -> list[dict[str, Any]]:
        """Calibrates, then trains alone and each way in turn; prints a line each and returns a row each."""
        self._folder.mkdir()
        recipe = self._folder / "recipe.toml"
        recipe.write_text(self._recipe)
        self._run(["calibrate", "--devices", str(len(self._names))])
        rows = []
        for number in range(1, rounds + 1):
            alone = self._folder / f"alone-{number}"
            words = ["train", str(recipe), "--devices", "1", "--train.steps", str(WARM_UP + steps), "--run", str(alone)]
            self._run(words, nodes=1)
            row = {**read_run(alone, WARM_UP), "way": "alone"}
            alone_s = row["step_s"]
            processor_ms = row["thread_s"] * 1e3
            print(f"  one rank alone: {alone_s * 1e3:.0f} ms a step, processor {processor_ms:.0f} ms", flush=True)
            rows.append(row)
            for way in ways:
                rows.append(self._train(recipe, way, steps, alone_s))
        return rows

    def _train(self, recipe: Path, way: str, steps: int, alone_s: float) -> dict[str, Any]:
        """Trains one way; prints its line and returns its row."""
        layout, *more = shlex.split(way)
        run = self._folder / f"way-{self._port}"
        # A round of islands is as long as --outer.every says; its first is for warming up.
        every = int(more[more.index("--outer.every") + 1]) if "--outer.every" in more else 0
        words = ["train", str(recipe), "--layout", layout, *more, "--run", str(run)]
        if "islands" in more and not every:
            self._run([*words, "--train.steps", str(LONG_RUN)], run, steps)
            every = planned_round(run)
        else:
            self._run([*words, "--train.steps", str(2 * every if every else WARM_UP + steps)])
        row = {"way": way, **read_run(run, every or WARM_UP)}
        row["efficiency"] = alone_s / (len(self._names) * row["step_s"])
        off = row["planned_s"] / row["median_s"] - 1
        mean_off = (row["planned_s"] + row["planned_join_s"]) / row["step_s"] - 1
        if layout == "auto":
            print(f"  {way}: the plan is {row['layout']} {row['outer'] or ''}")
        print(
            f"  {way:<52} {row['step_s'] * 1e3:6.0f} ms, exposed {row['exposed']:4.0%}, efficiency "
            f"{row['efficiency']:4.0%}; median {row['median_s'] * 1e3:6.0f} ms, planned {row['planned_s'] * 1e3:6.0f} "
            f"({off:+.0%}), with joins {mean_off:+.0%}; processor {row['thread_s'] * 1e3:.0f} ms, with other threads "
            f"{row['rank_s'] * 1e3:.0f}",
            flush=True,
        )
        return row

    def _run(self, words: list[str], ended: Path | None = None, steps: int = 0, nodes: int | None = None) -> None:
        """Runs ``meshwright`` with some words on all nodes, or the first ``nodes``; raises where one fails.

        Args:
            words: of the command.
            ended: a run's directory; it is ended, as by Ctrl-C, after two rounds, or the warm-up and ``steps``.
            steps: counted ones of a run without rounds.
            nodes: how many run it.
        """
        names = self._names[:nodes]
        self._port += 1
        processes = []
        for node, name in enumerate(names):
            # Not by `ip netns exec`: that hides the cgroups, and with them what a quota leaves of a core.
            network = ["nsenter", f"--net=/run/netns/{name}"]
            command = [*self._cores.prefix(node), *network, sys.executable, "-m", "meshwright"]
            command += words
            if len(names) > 1:
                command += ["--nodes", str(len(names)), "--node", str(node), "--slots", "1"]
                command += ["--meet", f"{FIRST_ADDRESS}:{self._port}"]
            variables = {**os.environ, "XDG_CACHE_HOME": str(self._folder / f"cache-{node}")}
            log = (self._folder / f"node-{node}.log").open("a")
            processes.append(subprocess.Popen(command, cwd=self._folder, env=variables, stdout=log, stderr=log))
        if ended is not None:
            wait_for_steps(ended, steps, processes[0])
            for process in processes:
                process.send_signal(signal.SIGINT)
        for node, process in enumerate(processes):
            if process.wait(LIMIT_S) and ended is None:
                log_lines = (self._folder / f"node-{node}.log").read_text().splitlines()
                raise SystemExit(f"{shlex.join(words)}: node {node} ended with {process.returncode}: {log_lines[-3:]}")


def planned_round(run: Path) -> int:
    """Returns the steps of a run's rounds as planned; 0 without islands, and before there is a plan."""
    plan = run / "plan.json"
    return int((json.loads(plan.read_text()).get("outer") or {}).get("every", 0)) if plan.exists() else 0


def wait_for_steps(run: Path, steps: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until a run has two rounds as planned, or without rounds the warm-up and ``steps``; or until it ended."""
    metrics, deadline_s = run / "metrics.jsonl", time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if lines >= (2 * planned_round(run) or WARM_UP + steps) and lines:
            return
        time.sleep(0.2)
    raise SystemExit(f"{run} ended, or had too few steps in {LIMIT_S:.0f} s")


def read_run(run: Path, warm_up: int) -> dict[str, Any]:
    """Returns the mean step after the warm-up and its exposed share on rank 0, the median and the planned step."""
    # A step that was trained again after a rank was lost has several lines, of which the last counts.
    by_step = {row["step"]: row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
    rounds = max(by_step) // warm_up * warm_up if planned_round(run) == warm_up else max(by_step)
    lines = [by_step[step] for step in sorted(by_step) if warm_up < step <= rounds]
    plan = json.loads((run / "plan.json").read_text())
    seconds, exposed = [line["step_s"] for line in lines], [exposed_s(line) for line in lines]
    # A round's mean holds its join; of steps that are alike the median leaves out disturbed ones.
    middle = mean if any(line["outer"] for line in lines) else median
    return {
        "step_s": middle(seconds),
        "exposed": middle(exposed) / middle(seconds),
        "median_s": median(seconds),
        "thread_s": median(line["processor_s"]["thread"] for line in lines),
        "rank_s": median(line["processor_s"]["rank"] for line in lines),
        "layout": str(Layout.from_json(plan["layout"])),
        "outer": plan.get("outer") or {},
        "planned_s": plan["prediction"]["step_s"],
        "planned_join_s": plan["prediction"].get("join_s", 0.0),
        "sent_bytes": mean(sum(entry["bytes"] for entry in line["comm"]) for line in lines),
    }


def exposed_s(line: dict[str, Any]) -> float:
    """Returns the seconds of a step in which rank 0 stood still for communication."""
    return float(sum(entry["exposed_s"] for entry in line["comm"]))


if __name__ == "__main__":
    raise SystemExit(main())
