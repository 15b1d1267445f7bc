"""Planned against measured on this machine: seconds of a step and bytes of state, for layouts of 1, 2 and 4 ranks.

    meshwright calibrate --devices 2            # once for each number of ranks
    python benchmarks/bench_plan.py [--models llama,gpt2] [--ranks 1,2,4] [--every 1] [--rounds 2] [--steps 4]
        [--json OUT]

Every layout that a proof would try is run for some steps on made-up tokens, all in new processes, round after round, so
that no layout has a good or a bad minute to itself. Before each step all ranks do a fixed bit of work, which the
calibration timed too: the ratio of the two is how fast the machine is at that moment, and errors are printed with and
without it. At the end of each group: the errors, and what the planner's first choice cost against the best measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.calibrate.practice import WARM_UP, practise_paced
from meshwright.errors import MeshwrightError
from meshwright.jobs.machines import Machines, cluster_of_machines, run_history_file
from meshwright.jobs.model_reading import make_measure, model_parts
from meshwright.launch.devices import Devices, count_cores
from meshwright.launch.fork import ForkLauncher
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.parallel.build import check
from meshwright.planner.choose import choose
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.measured_price import Measure, measure_activations, price_layout, reprice_choice
from meshwright.planner.predict import prediction
from meshwright.planner.question import Question
from meshwright.planner.run_history import learn
from meshwright.proof.layouts import all_layouts
from meshwright.spec.layout import Layout
from meshwright.train.model_analysis import analyse_model, check_shapes

MODELS = {
    "llama": ModelConfig(name="llama", layers=8, width=384, heads=6, ffn=1024, vocab=8000, context=128),
    "gpt2": ModelConfig(name="gpt2", layers=6, width=384, heads=6, vocab=24000, context=128),
}
ROWS, TOKENS = 8, 128
LIMIT_S = 180.0


@dataclass
class Row:
    """One layout, planned and measured."""

    model: str
    ranks: int
    layout: str
    planned_s: float
    planned_busy_s: float
    """Of it, what a rank computes and sends: without the pipeline's bubble."""
    planned_bytes: int
    measured_bytes: int = 0
    steps: list[tuple[float, float, float]] = field(default_factory=list)
    """(seconds of the slowest rank, machine's speed over that while calibrating, processor seconds of a rank in the
    mean) of every step of every round."""

    @property
    def measured_s(self) -> float:
        """Seconds of a step, the median."""
        return statistics.median(step[0] for step in self.steps)

    @property
    def steady_s(self) -> float:
        """The same, had the machine been as fast as while calibrating: of the half of the steps that were calmest."""
        calm = sorted(self.steps, key=lambda step: abs(math.log(step[1])))[: max(1, (len(self.steps) + 1) // 2)]
        return statistics.median(step[0] * step[1] for step in calm)

    @property
    def busy_s(self) -> float:
        """Processor seconds of a rank in a step, times the ranks that share a core: other programs don't add to it."""
        return statistics.median(step[2] for step in self.steps) * max(1.0, self.ranks / count_cores())

    @property
    def errors(self) -> tuple[float, float, float, float]:
        """Of time, of time without drift, of processor time, of bytes; planned over measured, less one."""
        return (
            self.planned_s / self.measured_s - 1,
            self.planned_s / self.steady_s - 1,
            self.planned_busy_s / self.busy_s - 1,
            self.planned_bytes / self.measured_bytes - 1,
        )


def main() -> int:
    """Prints a line for each layout, then errors and regret of each group and of all."""
    options = _options()
    warnings.filterwarnings("ignore")
    rows: list[Row] = []
    for model in options.models.split(","):
        for ranks in (int(word) for word in options.ranks.split(",")):
            rows += _group(model, ranks, options)
            if options.json:
                options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    _conclude("all", rows)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama,gpt2")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--every", type=int, default=1, help="only every so many of the layouts")
    parser.add_argument("--rounds", type=int, default=2, help="times that each layout is run")
    parser.add_argument("--steps", type=int, default=4, help=f"timed steps of a round; {WARM_UP} more go before them")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser.parse_args()


def _group(model: str, ranks: int, options: argparse.Namespace) -> list[Row]:
    config = MODELS[model]
    devices = Devices(kind="cpu", count=ranks, found=count_cores(), cores=count_cores())
    machines = Machines(devices=devices, ranks=ranks)
    job = PricedJob(shape=measure_shape(build_meta(config)), sequence=TOKENS, rows=ROWS, precision="float32")
    question = Question(
        job=job,
        cluster=cluster_of_machines(machines),
        history=learn(*run_history_file(machines), job.step_flops, "float32"),
    )
    measure = make_measure(build_meta(config), TOKENS, "float32")
    question = measure_activations(question, measure)
    chosen = str(reprice_choice(question, choose(question), measure).best[0].layout)
    layouts = {str(layout): layout for layout in all_layouts(ranks)}
    picked = [layout for at, layout in enumerate(layouts.values()) if at % options.every == 0]
    picked += [] if chosen in map(str, picked) else [Layout.parse(chosen)]
    print(f"{model}, {ranks} ranks: {len(picked)} of {len(layouts)} layouts; first choice {chosen}", flush=True)
    rows: dict[str, Row] = {}
    for number in range(options.rounds):
        for layout in picked:
            if number and str(layout) not in rows:
                continue
            try:
                row = rows.get(str(layout)) or _planned(model, layout, question, measure)
                _run(row, layout, question, devices, options.steps)
            except MeshwrightError as error:
                print(f"  {layout}: {str(error)[:100]}", flush=True)
                continue
            rows[row.layout] = row
    found = list(rows.values())
    for row in found:
        print(_line(row), flush=True)
    _conclude(f"{model}, {ranks} ranks", found)
    _regret(found, chosen)
    return found


def _planned(model: str, layout: Layout, question: Question, measure: Measure) -> Row:
    built = build_meta(MODELS[model])
    check(layout, "cpu", len(built.structure.layers))
    facts = analyse_model(built, layout)
    check_shapes(facts, layout, ROWS, TOKENS)
    one = price_layout(question, layout, measure)
    planned = prediction(question, one, model_parts(built, facts))
    state = sum(planned.memory[name] for name in ("parameters", "gradients", "optimizer"))
    assert planned.step_s is not None
    return Row(
        model=model,
        ranks=layout.world,
        layout=str(layout),
        planned_s=planned.step_s,
        planned_busy_s=one.price.step_s - one.price.parts["bubble"],
        planned_bytes=state,
    )


def _run(row: Row, layout: Layout, question: Question, devices: Devices, steps: int) -> None:
    """Runs a layout once more, and adds what its steps took."""
    facts = analyse_model(build_meta(MODELS[row.model]), layout)
    found = ForkLauncher(layout.world, devices=devices).run(
        practise_paced, MODELS[row.model], layout, facts, ROWS, steps, LIMIT_S, timeout_s=LIMIT_S
    )
    row.measured_bytes = max(sum(held.values()) for _, held in found)
    calibration = question.cluster.calibration
    usual_s = calibration.pace_s if calibration else 0.0
    for timed in zip(*(ranks for ranks, _ in found)):
        pace_s = statistics.mean(step[1] for step in timed)
        own_s = statistics.mean(step[2] for step in timed)
        row.steps.append((max(step[0] for step in timed), usual_s / pace_s if usual_s else 1.0, own_s))


def _line(row: Row) -> str:
    time, steady, busy, size = row.errors
    speeds = [step[1] for step in row.steps]
    return (
        f"  {row.layout:<62} planned {row.planned_s * 1e3:6.0f} ms, measured {row.measured_s * 1e3:6.0f} ms "
        f"({time:+.0%}), steady {row.steady_s * 1e3:6.0f} ms ({steady:+.0%}), busy "
        f"{row.planned_busy_s * 1e3:6.0f} and {row.busy_s * 1e3:6.0f} ms ({busy:+.0%}); state {size:+.1%}; "
        f"speed {min(speeds):.2f} to {max(speeds):.2f}"
    )


def _conclude(name: str, rows: list[Row]) -> None:
    """Prints medians and 90th percentiles of the absolute errors, and the median of the signed ones."""
    for at, what in enumerate(("step time", "step time without drift", "processor time", "bytes of state")):
        signed = [row.errors[at] for row in rows]
        ordered = sorted(map(abs, signed))
        high = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
        print(
            f"{name}: {what}: {len(rows)} layouts, median error {statistics.median(ordered):.1%}, 90th percentile "
            f"{high:.1%}, signed {statistics.median(signed):+.1%}"
        )
    speeds = sorted(step[1] for row in rows for step in row.steps)
    low, high = speeds[len(speeds) // 10], speeds[-1 - len(speeds) // 10]
    print(f"{name}: speed over that while calibrating, 10th to 90th percentile: {low:.2f} to {high:.2f}")


def _regret(rows: list[Row], chosen: str) -> None:
    """Prints what the first choice cost against the best measured."""
    known = {row.layout: row for row in rows}
    if chosen not in known:
        return
    for what, read in (("as measured", lambda row: row.measured_s), ("without drift", lambda row: row.steady_s)):
        best = min(rows, key=read)
        print(f"  first choice {read(known[chosen]) / read(best) - 1:+.1%} against the best {what}, {best.layout}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
