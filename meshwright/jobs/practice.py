"""Short runs of a small model under each axis, the last step of a calibration: measured beside priced step times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from meshwright.calibrate.practice import practise_paced
from meshwright.errors import MeshwrightError
from meshwright.jobs.machines import Machines, cluster_of_machines, run_history_file
from meshwright.jobs.model_reading import make_measure, model_parts
from meshwright.jobs.progress import Say
from meshwright.launch.devices import Devices
from meshwright.launch.fork import ForkLauncher
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.measured_price import measure_activations, price_layout
from meshwright.planner.predict import prediction
from meshwright.planner.question import Question
from meshwright.planner.run_history import record
from meshwright.spec.layout import Layout
from meshwright.train.model_analysis import analyse_model, check_shapes
from meshwright.units import format_seconds

MODEL = ModelConfig(name="llama", layers=4, width=384, heads=6, ffn=1024, vocab=8000, context=128)
GPU_MODEL = ModelConfig(name="llama", layers=4, width=2048, heads=16, ffn=5632, vocab=32000, context=2048)
"""The same on GPUs: of a small model they would time the launches alone, by which no other is to be corrected."""
ROWS_EACH, STEPS = 2, 4
"""Rows of the batch for each rank, and steps of a run."""
LIMIT_S = 60.0


def layouts(ranks: int) -> list[Layout]:
    """Returns the layouts to run: each axis over all ranks; ``tp`` beside ``replicate`` but on 2, 3 and 6 ranks."""
    if ranks == 1:
        texts = ["replicate=1", "microbatches=2"]
    else:
        texts = [
            f"replicate={ranks}",
            f"shard={ranks},zero=3",
            f"tp={ranks}" if ranks in (2, 3, 6) else "tp=2,replicate=" + str(ranks // 2),
            f"pp={ranks},microbatches={ranks}" if ranks in (2, 4) else "",
            f"cp={ranks},attention=gather",
        ]
    return [Layout.parse(text) for text in texts if text]


def practise_all(devices: Devices, ranks: int, rounds: int, say: Say) -> list[dict[str, object]]:
    """Runs each layout for some steps, and records its measured step time beside its price in the run history.

    The measured time is normalised to the machine's speed during calibration: the median over the half of the steps
    with the nearest pace, each multiplied by its relative speed (`calibrate.pace`).

    Args:
        devices: of this node.
        ranks: of each layout.
        rounds: times that each layout runs, all of them in each round.
        say: takes a line for each.

    Returns:
        For each layout and round that ran ``layout``, ``flops``, ``priced_s``, ``measured_s`` and ``paced``, which is
        true.
    """
    path, machine = run_history_file(Machines(devices=devices, ranks=ranks))
    precision = "bf16" if devices.kind == "cuda" else "float32"
    runner = _Runner(devices, ranks, precision)
    timed_rows = []
    for _ in range(rounds):
        for layout in (Layout.parse(f"{layout},precision={precision}") for layout in layouts(ranks)):
            try:
                row = runner.run(layout)
            except MeshwrightError as error:
                say(f"{layout}: {str(error).splitlines()[0]}")
                continue
            record(path, machine, row)
            timed_rows.append(row)
            took, priced = format_seconds(row["measured_s"]), format_seconds(row["priced_s"])
            say(f"{layout}: a step takes {took}, priced {priced}")
    return timed_rows


class _Runner:
    """Prices layouts of the model and runs them.

    Args:
        devices: of this node.
        ranks: of each layout.
        precision: of compute.
    """

    def __init__(self, devices: Devices, ranks: int, precision: str) -> None:
        self._model = GPU_MODEL if devices.kind == "cuda" else MODEL
        self._tokens, self._rows = int(self._model.context or 0), ROWS_EACH * max(ranks, 2)
        machines = Machines(devices=devices, ranks=ranks)
        self._built = build_meta(self._model)
        self._measure = make_measure(self._built, self._tokens, precision)
        job = PricedJob(shape=measure_shape(self._built), sequence=self._tokens, rows=self._rows, precision=precision)
        question = Question(job=job, cluster=cluster_of_machines(machines), base=Layout(precision=precision))
        self._question = measure_activations(question, self._measure)
        self._launcher = ForkLauncher(ranks, devices=devices.only(range(ranks)))

    def run(self, layout: Layout) -> dict[str, Any]:
        """Returns the row of a layout.

        Raises:
            MeshwrightError: where the model can't run under it.
        """
        analysis = analyse_model(self._built, layout, tokens=self._tokens)
        check_shapes(analysis, layout, self._rows, self._tokens)
        candidate = price_layout(self._question, layout, self._measure)
        planned = prediction(self._question, candidate, model_parts(self._built, analysis)).step_s
        rank_results = self._launcher.run(
            practise_paced, self._model, layout, analysis, self._rows, STEPS, LIMIT_S, timeout_s=LIMIT_S
        )
        calibration = self._question.cluster.calibration
        # Where ranks share cores the pace says who was scheduled when, not how fast the machine is.
        paced = calibration is not None and calibration.crowd == 1.0
        step_s = steady_s([steps for steps, _ in rank_results], calibration.pace_s if calibration and paced else 0.0)
        flops = self._question.job.step_flops
        return {"layout": str(layout), "flops": flops, "priced_s": planned, "measured_s": step_s, "paced": True}


def steady_s(ranks: Sequence[Sequence[tuple[float, float, float]]], pace_s: float) -> float:
    """Returns seconds of a step at the machine's calibrated speed.

    Args:
        ranks: for each rank (seconds, pace around it, processor seconds) of each step.
        pace_s: the pace while calibrating; 0 where it isn't known, and steps count as they are.
    """
    steps = []
    for rank_steps in zip(*ranks):
        now_s = statistics.mean(step[1] for step in rank_steps)
        steps.append((max(step[0] for step in rank_steps), pace_s / now_s if pace_s and now_s else 1.0))
    nearest_pace = sorted(steps, key=lambda step: abs(math.log(step[1])))[: max(1, (len(steps) + 1) // 2)]
    return statistics.median(seconds * speed for seconds, speed in nearest_pace)
