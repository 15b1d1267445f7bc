"""Planned against measured on this machine: seconds of a step and bytes of state, for layouts of 1, 2 and 4 ranks.

    meshwright calibrate            # once for each number of ranks: --devices 1, 2, 4
    python benchmarks/bench_plan.py [--models llama,gpt2] [--ranks 1,2,4] [--every 1] [--steps 6] [--json OUT]

Every layout that a proof would try is run for some steps on made-up tokens, all in new processes, and its price stands
beside it. At the end: the error of the prediction, and what the planner's first choice would have cost against the best
that was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import warnings
from dataclasses import dataclass
from pathlib import Path

from processes import ForeignLoad, wait_until_quiet

from meshwright.cli.inputs import Machines, cluster_here, ledger_here, measure_of, model_parts
from meshwright.errors import MeshwrightError
from meshwright.launch.devices import Devices, count_cores
from meshwright.launch.fork import ForkLauncher
from meshwright.measure.practice import WARM_UP, practise
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.plan import Layout
from meshwright.planner.choose import Question, candidate, choose
from meshwright.planner.cost.job import Job
from meshwright.planner.ledger import learn
from meshwright.planner.measured import corrected, informed, recosted
from meshwright.planner.predict import prediction
from meshwright.proof.layouts import all_layouts
from meshwright.runtime.build import check
from meshwright.train.facts import check_shapes, read_facts

MODELS = {
    "llama": ModelConfig(name="llama", layers=8, width=384, heads=6, ffn=1024, vocab=8000, context=128),
    "gpt2": ModelConfig(name="gpt2", layers=6, width=384, heads=6, vocab=24000, context=128),
}
ROWS, TOKENS = 8, 128
LIMIT_S = 180.0


@dataclass(frozen=True)
class Row:
    """One layout, planned and measured."""

    model: str
    ranks: int
    layout: str
    planned_s: float
    measured_s: float
    planned_bytes: int
    measured_bytes: int
    foreign: float


def main() -> int:
    """Prints a line for each layout, then the errors and the regret."""
    options = _options()
    warnings.filterwarnings("ignore")
    rows: list[Row] = []
    for model in options.models.split(","):
        for ranks in (int(word) for word in options.ranks.split(",")):
            rows += _measured(model, ranks, options)
            if options.json:
                options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    _conclude(rows)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama,gpt2")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--every", type=int, default=1, help="only every so many of the layouts")
    parser.add_argument("--steps", type=int, default=6, help=f"timed steps; {WARM_UP} more go before them")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser.parse_args()


def _measured(model: str, ranks: int, options: argparse.Namespace) -> list[Row]:
    config = MODELS[model]
    devices = Devices(kind="cpu", count=ranks, found=count_cores(), cores=count_cores())
    machines = Machines(devices=devices, ranks=ranks)
    question = Question(
        job=Job(shape=measure_shape(build_meta(config)), sequence=TOKENS, rows=ROWS, precision="float32"),
        cluster=cluster_here(machines),
        lesson=learn(*ledger_here(machines)),
    )
    measure = measure_of(build_meta(config), TOKENS, "float32")
    question = informed(question, measure)
    chosen = str(recosted(question, choose(question), measure).best[0].layout)
    layouts = {str(layout): layout for layout in all_layouts(ranks)}
    picked = [layout for at, layout in enumerate(layouts.values()) if at % options.every == 0]
    picked += [] if chosen in map(str, picked) else [Layout.parse(chosen)]
    print(f"{model}, {ranks} ranks: {len(picked)} of {len(layouts)} layouts; first choice {chosen}", flush=True)
    rows = []
    for layout in picked:
        try:
            rows.append(_row(model, config, layout, question, devices, options.steps))
        except MeshwrightError as error:
            print(f"  {layout}: {str(error)[:100]}", flush=True)
            continue
        print(_line(rows[-1]), flush=True)
    times = {row.layout: row.measured_s for row in rows}
    if chosen in times:
        best = min(times, key=lambda text: times[text])
        print(f"  first choice {times[chosen] / times[best] - 1:+.1%} against the best measured, {best}", flush=True)
    return rows


def _row(
    model: str, config: ModelConfig, layout: Layout, question: Question, devices: Devices, steps: int
) -> Row:
    built = build_meta(config)
    check(layout, "cpu", len(built.anatomy.layers))
    facts = read_facts(built, layout)
    check_shapes(facts, layout, ROWS, TOKENS)
    one = corrected(question, candidate(question, layout), measure_of(built, TOKENS, "float32"))
    planned = prediction(question, one, model_parts(built, facts))
    wait_until_quiet()
    meter = ForeignLoad()
    found = ForkLauncher(layout.world, devices=devices).run(
        practise, config, layout, facts, ROWS, steps, LIMIT_S, timeout_s=LIMIT_S
    )
    fullest = max(sum(held.values()) for _, held in found)
    state = sum(planned.memory[name] for name in ("parameters", "gradients", "optimizer"))
    assert planned.step_s is not None
    return Row(
        model=model,
        ranks=layout.world,
        layout=str(layout),
        planned_s=planned.step_s,
        measured_s=statistics.median(max(times) for times in zip(*(times for times, _ in found))),
        planned_bytes=state,
        measured_bytes=fullest,
        foreign=meter.read(),
    )


def _line(row: Row) -> str:
    return (
        f"  {row.layout:<62} planned {row.planned_s * 1e3:7.0f} ms, measured {row.measured_s * 1e3:7.0f} ms "
        f"({row.planned_s / row.measured_s - 1:+.0%}); state {row.planned_bytes / row.measured_bytes - 1:+.1%}; "
        f"foreign {row.foreign:.2f}"
    )


def _conclude(rows: list[Row]) -> None:
    """Prints medians and 90th percentiles of the absolute errors."""
    for name, errors in (
        ("step time", [abs(row.planned_s / row.measured_s - 1) for row in rows]),
        ("bytes of state", [abs(row.planned_bytes / row.measured_bytes - 1) for row in rows]),
    ):
        ordered = sorted(errors)
        high = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
        print(f"{name}: {len(rows)} layouts, median error {statistics.median(errors):.1%}, 90th percentile {high:.1%}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
