"""What rounding and islands cost in validation loss: the same tokens, seeds and steps under several layouts.

    python benchmarks/bench_quality.py recipes/shakespeare-chars.toml --data tinyshakespeare.txt --seeds 1,2,3
        --ways "replicate=2;replicate=2,compress=int8;islands=2 --outer.every 30" --out FOLDER

Each way is a layout and further words of `meshwright train`; the others are compared with the first, seed by seed. A
run that FOLDER holds already isn't made again, so that a comparison can be stopped and go on. Told for each way are
the validation loss after the last step over all held-out text, its distance from the first way's (mean over seeds,
least and most), and the bytes that rank 0 sent.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any


def main() -> int:
    """Runs what is missing, then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--data", help="text; none means the Python source text of the interpreter")
    parser.add_argument("--ways", required=True, help="with ; between them")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--words", default="", help="further words of `meshwright train` for every run")
    options = parser.parse_args()
    ways = [way.strip() for way in options.ways.split(";")]
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for seed in options.seeds.split(","):
        for way in ways:
            run = options.out / f"seed-{seed}" / way.replace(" ", "_").replace("--", "").replace("=", "-")
            result = train(options.recipe, options.data, way, seed, run, shlex.split(options.words))
            results[way].append(result)
            print(f"seed {seed}, {way}: {describe(result)}", flush=True)
    print_table(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


def train(recipe: str, data: str | None, way: str, seed: str, run: Path, rest: list[str]) -> dict[str, Any]:
    """Trains once, unless `run` holds a finished run; returns its last evaluation and the bytes it sent."""
    layout, *words = shlex.split(way)
    if not finished(run):
        command = [sys.executable, "-m", "meshwright", "train", recipe, "--layout", layout, *words]
        command += ["--data", data] if data else []
        command += ["--run", str(run), "--train.seed", seed, "--monitor.display", "none", *rest]
        log = run.with_name(f"{run.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as output:
            status = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
        if status or not finished(run):
            raise SystemExit(f"{shlex.join(command)} ended with {status}; see {log}")
    evaluations = [line for line in read_lines(run / "events.jsonl") if line["kind"] == "evaluated"]
    metrics = list(read_lines(run / "metrics.jsonl"))
    sent = sum(operation["bytes"] for line in metrics for operation in line["comm"])
    return {"loss": evaluations[-1]["loss"], "bytes": sent, "seconds": sum(line["step_s"] for line in metrics)}


def finished(run: Path) -> bool:
    """Returns whether a run has come to its last step."""
    events = run / "events.jsonl"
    return events.exists() and any(line["kind"] == "run_finished" for line in read_lines(events))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file of JSON values."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def describe(result: dict[str, Any]) -> str:
    """Returns a run's figures in a line."""
    return f"loss {result['loss']:.4f}, {result['bytes'] / 1e6:.1f} MB sent, {result['seconds']:.0f} s of steps"


def print_table(results: dict[str, list[dict[str, Any]]]) -> None:
    """Prints each way's loss, its distance from the first way's, and how many times fewer bytes it sent."""
    exact = next(iter(results.values()))
    for way, rows in results.items():
        off = [row["loss"] / other["loss"] - 1 for row, other in zip(rows, exact)]
        fewer = mean(other["bytes"] for other in exact) / max(1.0, mean(row["bytes"] for row in rows))
        loss, away = mean(row["loss"] for row in rows), f"{mean(off):+.2%} ({min(off):+.2%} to {max(off):+.2%})"
        print(f"{way:<60} {loss:.4f}  {away}  {fewer:5.1f} x fewer bytes")


if __name__ == "__main__":
    raise SystemExit(main())
