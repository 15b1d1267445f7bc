"""A slow network between two machines, planned and measured: what each layout loses to it, and what the planner says.

    sudo python benchmarks/bench_slow_link.py [--rates 100mbit,none] [--slots 1] [--models gpt2,llama]
        [--layouts "replicate=2;replicate=2,compress=int8"] [--json OUT]

Two network namespaces on this machine, joined by a wire whose rate is held down in both directions (``tc tbf``); the
ranks of each run on cores of their own. Both first calibrate together. Then each layout runs for some steps beside its
prediction. Efficiency is tokens a second and rank against one rank alone; the share of communication is what the step
takes beyond the same layout on the wire of the last rate, ``none`` by default, which is as fast as the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from processes import kill_descendants
from slow_wire import FIRST_ADDRESS, networks

from meshwright import CalibrateConfig, NodeOptions, calibrate
from meshwright.calibrate.practice import practise_paced
from meshwright.errors import MeshwrightError
from meshwright.jobs.machines import Machines, cluster_of_machines
from meshwright.jobs.model_reading import make_measure, model_parts
from meshwright.jobs.progress import silently
from meshwright.launch.devices import found_devices
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.preload import prepare_environment
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.planner.choose import choose
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.measured_price import measure_activations, price_layout, reprice_choice
from meshwright.planner.predict import prediction
from meshwright.planner.question import Question
from meshwright.spec.layout import Layout
from meshwright.train.model_analysis import analyse_model, check_shapes

MODELS = {
    "gpt2": ModelConfig(name="gpt2", layers=6, width=256, heads=4, vocab=2048, context=128),
    "llama": ModelConfig(name="llama", layers=6, width=256, heads=4, ffn=704, vocab=2048, context=128),
}
LAYOUTS = {
    2: (
        "replicate=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2,zero=3", "tp=2", "cp=2,attention=heads",
        "pp=2,microbatches=4,schedule=1f1b", "pp=2,microbatches=8,schedule=1f1b",
        "replicate=2,compress=bf16", "replicate=2,compress=int8", "shard=2,zero=3,compress_weights=int8",
    ),
    4: (
        "replicate=4", "shard=4,zero=3", "replicate=2,shard=2,zero=2", "replicate=2,tp=2", "pp=2,tp=2,microbatches=4",
        "pp=2,replicate=2,microbatches=4", "pp=2,shard=2,zero=1,microbatches=4", "pp=4,microbatches=8,schedule=1f1b",
        "replicate=4,compress=int8:2", "replicate=2,shard=2,zero=2,compress=int8",
    ),
}  # fmt: skip
ROWS, TOKENS = 16, 128
TRAFFIC = ("tp", "cp", "ep", "send", "gather", "reduce")
"""Parts of a predicted step that are exposed communication."""
PORT = 29610
LIMIT_S = 120.0


def main() -> int:
    """Prints a table for each rate; as a node of its own, runs that node's ranks."""
    options = _options()
    if options.node is not None:
        return _node(options)
    if os.geteuid() or subprocess.run(["which", "tc", "ip"], capture_output=True, check=False).returncode:
        print("needs root, ip and tc, to make two networks and slow the wire between them")
        return 0
    found: dict[str, Any] = {}
    for rate in options.rates.split(","):
        with networks(rate) as names:
            print(f"wire: {rate}", flush=True)
            found[rate] = _run(names, options)
    _shares(found, options.rates.split(","))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="100mbit,none", help="as tc writes them; none for an unlimited wire")
    parser.add_argument("--slots", type=int, default=1, help="ranks of each of the two machines")
    parser.add_argument("--models", default="gpt2,llama")
    parser.add_argument("--layouts", default="", help="with ; between them; all of the benchmark's when not given")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs both nodes and returns the rows that the first has written."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        nodes = []
        for at, name in enumerate(names):
            own = ",".join(map(str, cores[at::2] or cores))
            words = ["ip", "netns", "exec", name, "taskset", "-c", own, sys.executable, __file__, "--node", str(at)]
            words += ["--slots", str(options.slots), "--models", options.models, "--steps", str(options.steps)]
            words += ["--layouts", options.layouts]
            variables = {**os.environ, "XDG_CACHE_HOME": f"{folder}/{at}"}
            more = {"stdout": None if at == 0 else subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            nodes.append(subprocess.Popen([*words, "--out", str(out)], env=variables, **more))  # type: ignore[call-overload]
        try:
            for node in nodes:
                if node.wait(1800):
                    raise SystemExit(f"a node ended with {node.returncode}")
        finally:
            kill_descendants()
        return list(json.loads(out.read_text()))


def _node(options: argparse.Namespace) -> int:
    """Measures on one of the two machines, in step with the other."""
    prepare_environment()
    ranks = 2 * options.slots
    words = NodeOptions(nodes=2, node=options.node, slots=options.slots, meet=f"{FIRST_ADDRESS}:{PORT}")
    calibrate(CalibrateConfig(devices=ranks, practice=0), nodes=words, say=silently)
    calibrate(CalibrateConfig(devices=1, practice=0), say=silently)
    rows: list[dict[str, Any]] = []
    port = PORT
    for name in options.models.split(","):
        alone = _row(name, Layout(), ForkLauncher(1), Machines(devices=found_devices(1), ranks=1), options.steps)
        rows.append(alone)
        told = options.node == 0
        if told:
            print(f"{name}: one rank alone {_told(alone)}", flush=True)
        machines = Machines(devices=found_devices(options.slots), ranks=ranks, nodes=2)
        chosen = str(_chosen(name, machines))
        given = [text for text in options.layouts.split(";") if text]
        for text in dict.fromkeys((*(given or LAYOUTS[ranks]), chosen)):
            port += 1
            place = NodeOptions(nodes=2, node=options.node, slots=options.slots, meet=f"{FIRST_ADDRESS}:{port}")
            try:
                row = _row(name, Layout.parse(text), place.group_launcher(options.slots), machines, options.steps)
            except MeshwrightError as error:
                if told:
                    print(f"  {text}: {str(error).splitlines()[0][:100]}", flush=True)
                continue
            row |= {"efficiency": alone["measured_s"] / (ranks * row["measured_s"]), "chosen": text == chosen}
            rows.append(row)
            if told:
                print(f"  {text:<44} {_told(row)}, efficiency {row['efficiency']:.0%}", flush=True)
        if told:
            _conclude([row for row in rows if row["model"] == name and row["ranks"] > 1])
    if options.node == 0:
        options.out.write_text(json.dumps(rows))
    return 0


def _asked(name: str, machines: Machines) -> Question:
    built = build_meta(MODELS[name])
    job = PricedJob(shape=measure_shape(built), sequence=TOKENS, rows=ROWS, precision="float32")
    return measure_activations(
        Question(job=job, cluster=cluster_of_machines(machines)), make_measure(built, TOKENS, "float32")
    )


def _chosen(name: str, machines: Machines) -> Layout:
    asked = _asked(name, machines)
    return (
        reprice_choice(asked, choose(asked), make_measure(build_meta(MODELS[name]), TOKENS, "float32")).best[0].layout
    )


def _row(name: str, layout: Layout, launcher: ForkLauncher, machines: Machines, steps: int) -> dict[str, Any]:
    """Predicts a layout's step and measures it."""
    built = build_meta(MODELS[name])
    facts = analyse_model(built, layout)
    check_shapes(facts, layout, ROWS, TOKENS)
    asked = _asked(name, machines)
    one = price_layout(asked, layout, make_measure(built, TOKENS, "float32"))
    planned = prediction(asked, one, model_parts(built, facts)).step_s
    assert planned is not None
    found = launcher.run(practise_paced, MODELS[name], layout, facts, ROWS, steps, LIMIT_S, timeout_s=LIMIT_S)
    return {
        "model": name,
        "ranks": layout.world,
        "layout": str(layout),
        "planned_s": planned,
        "measured_s": statistics.median(
            max(seconds for seconds, _, _ in timed) for timed in zip(*(timed for timed, _ in found))
        ),
        "planned_traffic": sum(one.price.parts[part] for part in TRAFFIC) / one.price.step_s,
    }


def _told(row: dict[str, Any]) -> str:
    off = row["planned_s"] / row["measured_s"] - 1
    return f"measured {row['measured_s'] * 1e3:6.0f} ms, planned {row['planned_s'] * 1e3:6.0f} ms ({off:+.0%})"


def _conclude(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    errors = sorted(abs(row["planned_s"] / row["measured_s"] - 1) for row in rows)
    best = min(rows, key=lambda row: row["measured_s"])
    print(f"  off by {statistics.median(errors):.1%} in the median of {len(rows)}, {errors[-1]:.1%} at most")
    for row in rows:
        if row["chosen"]:
            behind = row["measured_s"] / best["measured_s"] - 1
            print(
                f"  first choice {row['layout']}: {behind:+.1%} against the best measured, {best['layout']}", flush=True
            )


def _shares(found: dict[str, Any], rates: list[str]) -> None:
    """Prints, for each rate but the last, what share of a step the wire takes beyond the last one's."""
    free = {(row["model"], row["layout"]): row["measured_s"] for row in found[rates[-1]]}
    for rate in rates[:-1]:
        print(f"communication at {rate}: share of a step, measured and planned; efficiency")
        for row in found[rate]:
            base = free.get((row["model"], row["layout"]))
            if row["ranks"] > 1 and base is not None:
                row["traffic"] = max(0.0, 1.0 - base / row["measured_s"])
                print(
                    f"  {row['model']:<6} {row['layout']:<44} {row['traffic']:5.0%} {row['planned_traffic']:5.0%} "
                    f"{row['efficiency']:5.0%}"
                )


if __name__ == "__main__":
    raise SystemExit(main())
