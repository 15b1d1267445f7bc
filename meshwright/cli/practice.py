"""Short runs of a small model under each axis, as the last part of a calibration: what the runtime takes beside."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from meshwright.cli.inputs import Machines, cluster_here, ledger_here, measure_of, model_parts
from meshwright.errors import MeshwrightError
from meshwright.launch.devices import Devices
from meshwright.launch.fork import ForkLauncher
from meshwright.models.config import ModelConfig
from meshwright.plan import Layout
from meshwright.planner.choose import Question, candidate
from meshwright.planner.ledger import record
from meshwright.planner.measured import corrected, informed
from meshwright.planner.predict import prediction
from meshwright.units import format_seconds

MODEL = ModelConfig(name="llama", layers=4, width=384, heads=6, ffn=1024, vocab=8000, context=128)
ROWS, STEPS = 8, 8
LIMIT_S = 60.0


def layouts(ranks: int) -> list[Layout]:
    """Returns what is tried: each axis alone over all ranks, and, over four and more, each pair of model and data."""
    if ranks == 1:
        texts = ["replicate=1", "microbatches=2"]
    else:
        texts = [
            f"replicate={ranks}",
            f"shard={ranks},zero=2",
            f"shard={ranks},zero=3",
            f"tp={ranks}" if ranks in (2, 3, 6) else "tp=2,replicate=" + str(ranks // 2),
            f"pp={ranks},microbatches={ranks}" if ranks in (2, 4) else "",
            f"cp={ranks},attention=gather",
        ]
    return [Layout.parse(text) for text in texts if text]


def practise_all(devices: Devices, ranks: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Runs each layout for some steps, and remembers what it took over its price.

    Args:
        devices: of this node.
        ranks: of each layout.
        tell: told of each.

    Returns:
        For each layout that ran ``layout``, ``priced_s`` and ``measured_s``.
    """
    from meshwright.measure.practice import practise
    from meshwright.models.build import build_meta
    from meshwright.models.measure import measure_shape
    from meshwright.planner.cost.job import Job
    from meshwright.train.facts import check_shapes, read_facts

    precision = "bf16" if devices.kind == "cuda" else "float32"
    tokens, machines = int(MODEL.context or 0), Machines(devices=devices, ranks=ranks)
    built = build_meta(MODEL)
    job = Job(shape=measure_shape(built), sequence=tokens, rows=ROWS, precision=precision)
    measure = measure_of(built, tokens, precision)
    asked = Question(job=job, cluster=cluster_here(machines), base=Layout(precision=precision))
    question = informed(asked, measure)
    path, machine = ledger_here(machines)
    found = []
    for layout in (Layout.parse(f"{layout},precision={precision}") for layout in layouts(ranks)):
        try:
            facts = read_facts(built, layout)
            check_shapes(facts, layout, ROWS, tokens)
            one = corrected(question, candidate(question, layout), measure)
            planned = prediction(question, one, model_parts(built, facts)).step_s
            ran = ForkLauncher(ranks, devices=devices.only(range(ranks))).run(
                practise, MODEL, layout, facts, ROWS, STEPS, LIMIT_S, timeout_s=LIMIT_S
            )
        except MeshwrightError as error:
            tell(f"{layout}: {str(error).splitlines()[0]}")
            continue
        took = statistics.median(max(times) for times in zip(*(times for times, _ in ran)))
        row = {"layout": str(layout), "priced_s": planned, "measured_s": took}
        record(path, machine, row)
        found.append(row)
        tell(f"{layout}: a step takes {format_seconds(took)}, priced {format_seconds(planned or 0.0)}")
    return found
