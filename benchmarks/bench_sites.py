"""Two sites, one at half speed: wall-clock time to the loss of synchronous rounds, by the outer server's mode.

    python benchmarks/bench_sites.py recipes/shakespeare-chars.toml --data tinyshakespeare.txt --out FOLDER
        [--steps 600] [--every 10] [--seeds 1,2,3] [--step-s 0.2] [--json OUT]

For each seed two sites of a device each dial in at an outer server. Under ``sync`` both take `steps` steps, and each
round waits for the slow site. Under ``bounded`` (staleness 4) the slow site's rounds are half as long, nobody waits for
anybody, and the fast site may take 1.5 times the steps, the slow one half of these. Told are the validation loss that
``sync`` ends with and its seconds, and after how many seconds and steps the fast site's evaluations under ``bounded``
have come to that loss. A step sleeps for `step-s` on the fast site and twice as long on the slow one: far longer than
it computes, so that the figures say what the modes do and not what else the machine does. A run that FOLDER holds
already isn't made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

from bench_quality import finished, read_lines
from processes import become_subreaper, kill_descendants

MODES = {"sync": (), "bounded": ("--outer.mode", "bounded", "--outer.staleness", "4")}
MORE_STEPS = 1.5
"""Times the steps of ``sync`` that the fast site may take under ``bounded``."""
LIMIT_S = 6 * 3600.0


def main() -> int:
    """Runs what is missing and prints a line for each run, then the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=10, help="steps of a round, an even number")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--momentum", default="0.5", help="of the outer step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    become_subreaper()
    rows = []
    try:
        for seed in options.seeds.split(","):
            curves = {mode: train(options, mode, seed) for mode in MODES}
            rows.append({"seed": seed, **compare(curves["sync"], curves["bounded"])})
            print(f"seed {seed}: {describe(rows[-1])}", flush=True)
    finally:
        kill_descendants()
    reached = [row for row in rows if row["bounded_s"] is not None]
    if reached:
        share = mean(row["bounded_s"] / row["sync_s"] for row in reached)
        print(f"{len(reached)} of {len(rows)} seeds came to the loss of sync, in {share:.0%} of its time")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


def train(options: argparse.Namespace, mode: str, seed: str) -> list[dict[str, Any]]:
    """Trains two sites under a mode; returns the fast site's evaluations with step, seconds since its start, loss."""
    folder = options.out / f"{mode}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    sites = [folder / f"site-{site}" for site in range(2)]
    if not all(finished(site) for site in sites):
        server = folder / "server"
        (server / "address.json").unlink(missing_ok=True)
        common = ["--outer.sites", "2", "--outer.momentum", options.momentum, *MODES[mode]]
        serving = start(folder / "server.log", "serve-outer", "--listen", "127.0.0.1:0", "--run", str(server), *common)
        while not (server / "address.json").exists():
            if serving.poll() is not None:
                raise SystemExit(f"the server ended; see {folder}/server.log")
            time.sleep(0.1)
        port = json.loads((server / "address.json").read_text())["port"]
        common += ["--outer.meet", f"127.0.0.1:{port}", "--outer.key-file", str(server / "key"), "--train.seed", seed]
        running = [start(site.with_suffix(".log"), *words(options, mode, number, site), *common)
                   for number, site in enumerate(sites)]  # fmt: skip
        for process, site in zip(running, sites):
            if process.wait(LIMIT_S):
                raise SystemExit(f"a site ended with {process.returncode}; see {site.with_suffix('.log')}")
        serving.terminate()
        serving.wait(60.0)
    lines = list(read_lines(sites[0] / "events.jsonl"))
    began = next(line["time"] for line in lines if line["kind"] == "run_started")
    curve = [
        {"step": line["step"], "seconds": line["time"] - began, "loss": line["loss"]}
        for line in lines
        if line["kind"] == "evaluated"
    ]
    print(f"  {mode}, seed {seed}: loss {curve[-1]['loss']:.4f} after {curve[-1]['seconds']:.0f} s", flush=True)
    return curve


def words(options: argparse.Namespace, mode: str, site: int, run: Path) -> list[str]:
    """Returns the command of a site: 0 is fast, 1 takes twice as long for a step."""
    steps, every, seconds = options.steps, options.every, options.step_s * (1 + site)
    if mode != "sync":
        # Half as many steps in the same time, in rounds that take as long as the fast site's.
        steps, every = round(MORE_STEPS * steps / (1 + site)), every // (1 + site)
    settings = {
        "--train.steps": steps, "--outer.every": every, "--outer.site": site, "--evaluation.every": 2 * options.every,
        "--recovery.faults": f"slow:rank=0,step=1,seconds={seconds}", "--devices": 1, "--run": run,
        "--monitor.display": "none",
    }  # fmt: skip
    flags = [str(word) for pair in settings.items() for word in pair]
    return ["train", options.recipe, "--data", options.data, "--train.no-prove", "--schedule.shape", "constant", *flags]


def start(log: Path, *more: str) -> subprocess.Popen[bytes]:
    """Starts ``meshwright`` with some words, its output in a log."""
    with log.open("ab") as output:
        return subprocess.Popen([sys.executable, "-m", "meshwright", *more], stdout=output, stderr=output)


def compare(sync: list[dict[str, Any]], bounded: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the loss and seconds of ``sync``, and when ``bounded`` had come to that loss; None where it never did."""
    aim = sync[-1]
    reached = next((point for point in bounded if point["loss"] <= aim["loss"]), None)
    return {
        "sync_loss": aim["loss"], "sync_s": aim["seconds"], "sync_steps": aim["step"],
        "bounded_s": reached and reached["seconds"], "bounded_steps": reached and reached["step"],
        "bounded_loss": bounded[-1]["loss"],
    }  # fmt: skip


def describe(row: dict[str, Any]) -> str:
    """Returns a seed's comparison in a line."""
    aim = f"sync comes to {row['sync_loss']:.4f} in {row['sync_s']:.0f} s"
    if row["bounded_s"] is None:
        return f"{aim}, bounded never, and ends with {row['bounded_loss']:.4f}"
    ratio = row["bounded_steps"] / row["sync_steps"]
    return f"{aim}, bounded in {row['bounded_s']:.0f} s ({ratio:.2f} times the steps)"


if __name__ == "__main__":
    raise SystemExit(main())
