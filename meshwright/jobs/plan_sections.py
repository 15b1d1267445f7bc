"""A plan as sections of a page: what it takes, the layouts beside it, memory, the pipeline, the knee.

The figures are those of `PlanResult.to_json`, so that page and JSON can't differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from meshwright.jobs.plan_charts import Bar, bars, equal_runs, memory_bars, pipeline, step_kinds
from meshwright.jobs.plan_model import PlanResult, ScalingResult
from meshwright.json_types import JsonObject
from meshwright.monitor.charts import scatter_chart
from meshwright.monitor.page import Section, breakable, folded, note, table, tiles, title
from meshwright.planner.cost.prices import layer_span
from meshwright.planner.explain import NAMES, against
from meshwright.planner.scaling import KNEE
from meshwright.planner.timeline import timeline
from meshwright.spec.axis import Mechanics
from meshwright.units import format_bytes, format_count, format_seconds

MOST_BARS = 24
"""Stages that have a bar of their own; of more, every so many."""
MOST_SPANS = 20000
"""Actions up to which a timeline is drawn: browsers crawl over more."""
_LEAST_SHARE = 0.002
"""Share of a step from which a part has a line of its own."""

HEAD, LAYOUTS, MEMORY, PIPELINE, FRONT, YOURS, NOTES = (
    "",
    "The best layouts",
    "Memory of a rank of each stage",
    "The pipeline of one step",
    "Time against memory",
    "Your layouts",
    "Notes",
)
SCALING = "More or fewer devices"


def plan_sections(result: PlanResult, *, most_spans: int = MOST_SPANS) -> list[Section]:
    """Returns the sections of a plan.

    Args:
        result: the planner's answer.
        most_spans: actions up to which the pipeline is drawn.
    """
    answer = result.to_json()
    candidates: list[JsonObject] = list(answer["best"])  # type: ignore[call-overload]
    reasons = [(breakable(layout), why) for layout, why in result.compared.items()]
    compared = [table(("layout", "why"), reasons)] if reasons else []
    return [
        (HEAD, [*_headline(result), _summary_tiles(result, candidates[0])]),
        (LAYOUTS, _alternatives(result, candidates)),
        (YOURS, compared),
        (MEMORY, [_memory_figure(result)]),
        (PIPELINE, _pipeline_figure(result, most_spans)),
        (FRONT, _front_figure(result)),
        (NOTES, [note(text) for text in result.choice.notes]),
    ]


def step_interval(candidate: JsonObject) -> tuple[float, float] | None:
    """Returns the interval of a layout's seconds a step, where the plan carries one.

    Args:
        candidate: an entry of ``best`` of a plan's JSON; ``step_interval`` is (low, high) in seconds.
    """
    interval = candidate.get("step_interval")
    if not isinstance(interval, Sequence) or len(interval) != 2:
        return None
    low, high = (float(end) for end in interval)
    return (low, high) if math.isfinite(low + high) and 0 <= low <= high else None


def _step_text(candidate: JsonObject) -> str:
    """Returns seconds of a step in words, with their interval."""
    text, interval = format_seconds(candidate["price"]["step_s"]), step_interval(candidate)
    return text if interval is None else f"{text} ({' to '.join(map(format_seconds, interval))})"


def _headline(result: PlanResult) -> list[Markup]:
    question = result.question
    shape, job = question.job.shape, question.job
    # Of sizes alone there is no name to show.
    model = f"{format_count(shape.parameters)} parameters" if shape.name == "sizes" else shape.name
    facts = f"{format_count(shape.parameters)} parameters, {job.rows} rows of {job.sequence} tokens: {result.layout}"
    return [title(f"{model} on {question.cluster}", breakable(facts)), note(f"It is {result.reason}.")]


def _summary_tiles(result: PlanResult, best: JsonObject) -> Markup:
    question, choice, job = result.question, result.choice, result.question.job
    index, device_bytes = question.tightest_stage(choice.best[0])
    needed_bytes = choice.best[0].price.stages[index].peak
    interval = step_interval(best)
    expected = f"{' to '.join(map(format_seconds, interval))}" if interval else "predicted"
    peak_tflops = best["tflops_per_device"] / best["mfu"]
    # A device without units for a precision computes it in another one.
    dtype = question.cluster.device.computes_in(job.dtype)
    entries = [
        ("a step", format_seconds(best["price"]["step_s"]), expected),
        ("tokens a second", format_count(best["tokens_per_s"]), f"on {question.cluster.devices} devices"),
        ("MFU", f"{best['mfu']:.1%}", f"model FLOP/s over {peak_tflops:.0f} TFLOP/s, dense {dtype}"),
        ("a device", f"{best['tflops_per_device']:.1f} TFLOP/s", "of the model; recomputed work doesn't count"),
        ("fullest rank", format_bytes(needed_bytes), f"{format_bytes(device_bytes - needed_bytes)} free"),
    ]
    if result.choice.best[0].price.host:
        entries.append(("in host memory", format_bytes(choice.best[0].price.host), "of a rank"))
    if best["cost_per_mtoken"] is not None:
        entries.append(("a million tokens", f"${best['cost_per_mtoken']:.4f}", "at the catalogue's price"))
    if best["joules_per_token"] is not None:
        entries.append(("a token", f"{best['joules_per_token']:.3f} J", "at the power under load"))
    counts = f"{choice.priced:,} priced in {format_seconds(choice.search_s)}"
    return tiles([*entries, ("layouts", format_count(choice.considered), counts)])


def _alternatives(result: PlanResult, candidates: Sequence[JsonObject]) -> list[Markup]:
    """Draws the shown layouts beside each other, with a table of the same figures."""
    question, choice = result.question, result.choice
    rows = [
        Bar(
            label=f"{position}. {_short(result, candidate)}",
            values={name: max(0.0, seconds) for name, seconds in candidate["price"]["parts"].items()},
            total=_step_text(candidate),
            interval=step_interval(candidate),
        )
        for position, candidate in enumerate(candidates, start=1)
    ]
    figure = bars(rows, "Seconds of a step", step_kinds(), format_seconds, NAMES)
    cells = []
    for option, candidate in zip(choice.shown, candidates):
        comparison = (
            against(option, choice.best[0], question.tie_tolerance) if option is not choice.best[0] else "the plan"
        )
        rates = (format_count(candidate["tokens_per_s"]), f"{candidate['mfu']:.1%}")
        memory = format_bytes(candidate["price"]["peak"])
        name = breakable(_short(result, candidate))
        cells.append((name, _step_text(candidate), *rates, memory, comparison))
    headings = ("layout", "step", "tokens/s", "MFU", "fullest rank", "against the first")
    parts = candidates[0]["price"]["parts"]
    step_s = candidates[0]["price"]["step_s"]
    shares = [
        (NAMES[name], format_seconds(seconds), f"{seconds / step_s:.1%}")
        for name, seconds in sorted(parts.items(), key=lambda item: -item[1])
        if seconds > _LEAST_SHARE * step_s
    ]
    return [
        figure,
        table(headings, cells, (1, 2, 3, 4)),
        folded("The parts of the first layout's step, as a table", [table(("part", "time", "share"), shares, (1, 2))]),
    ]


def _short(result: PlanResult, candidate: JsonObject) -> str:
    """Returns a layout's text without what all layouts share, or a name for one without any choice."""
    fields, precision = str(candidate["layout"]["text"]).split(","), f"precision={result.question.job.precision}"
    return ",".join(field for field in fields if field != precision) or "one device"


def _memory_figure(result: PlanResult) -> Markup:
    question, stages = result.question, result.choice.best[0].price.stages
    ranks_per_stage = max(1, question.cluster.devices // len(stages))
    room = [question.cluster.device_of(index * ranks_per_stage).memory_bytes for index in range(len(stages))]
    # Stages of equal bytes, to the megabyte, share a bar: a hundred stages have a handful of kinds.
    runs = equal_runs(
        [(room[index], *(round(value, -6) for value in stage.memory.values())) for index, stage in enumerate(stages)]
    )
    stride = math.ceil(len(runs) / MOST_BARS)
    rows = []
    for first, last in runs[::stride]:
        name = f"stage {first}" if first == last else f"stages {first} to {last}"
        layers = f"layers {layer_span(stages[first], stages[last])}"
        label = f"{name}: {layers}" if len(stages) > 1 else "every rank"
        rows.append((label, dict(stages[first].memory), float(room[first])))
    return memory_bars(rows, float(max(room)), question.usable_share)


def _pipeline_figure(result: PlanResult, most_spans: int) -> list[Markup]:
    question, layout = result.question, result.layout
    if layout.degree(Mechanics.STAGES) == 1 or not question.cluster.uniform:
        return []
    actions = 2 * layout.degree(Mechanics.STAGES) * layout.stages_per_rank * layout.microbatches
    if actions > most_spans:
        return [note(f"Its {actions:,} actions and more are too many to draw.")]
    simulated = timeline(question.job, layout, question.machine, question.runtime)
    return [] if simulated is None else [pipeline(simulated)]


def _front_figure(result: PlanResult) -> list[Markup]:
    """Draws the Pareto front of the layouts: seconds of a step against bytes of the fullest rank."""
    texts = [(text, format_seconds(step), format_bytes(peak)) for step, peak, text in result.choice.front]
    cells = [(breakable(text), *figures) for text, *figures in texts]
    points = [
        (step, float(peak), f"{text}: {seconds}, {memory}")
        for (step, peak, _), (text, seconds, memory) in zip(result.choice.front, texts)
    ]
    labels = ("seconds of a step", "bytes of the fullest rank")
    formats = (format_seconds, format_bytes)
    figure = scatter_chart(points, "Time against memory", labels, formats, result.question.cluster.memory_bytes)
    return [figure, folded("As a table", [table(("layout", "step", "fullest rank"), cells, (1, 2))])]


def scaling_section(result: ScalingResult) -> Section:
    """Returns the section of the best plan for each number of devices, with the knee."""
    answer = result.to_json()
    rows: list[JsonObject] = list(answer["points"])  # type: ignore[call-overload]
    feasible = [row for row in rows if row["best"]]
    if not feasible:
        return SCALING, [note(f"No number of devices up to {rows[-1]['devices']} has a layout that fits.")]
    drawn, cells = [], []
    for row in rows:
        best, devices = row["best"], f"{row['devices']} device{'s' if row['devices'] > 1 else ''}"
        if best is None:
            cells.append((devices, "", "", "", "", "", _first_sentence(str(row["why"]))))
            continue
        mark = ", the knee" if row["devices"] == result.knee else ""
        drawn.append(
            Bar(
                label=f"{devices}{mark}",
                values={"tokens": best["tokens_per_s"]},
                total=f"{format_count(best['tokens_per_s'])} tokens/s, {row['efficiency']:.0%} a device",
            )
        )
        cost = "" if best["cost_per_mtoken"] is None else f"${best['cost_per_mtoken']:.4f}"
        energy = "" if best["joules_per_token"] is None else f"{best['joules_per_token']:.3f} J"
        rates = (_step_text(best), f"{best['mfu']:.1%}", f"{row['efficiency']:.0%}", cost, energy)
        cells.append((devices + mark, *rates, breakable(str(best["layout"]["text"]))))
    kinds = {"tokens": step_kinds()["matmul"]}
    figure = bars(drawn, "Tokens a second with the same batch", kinds, format_count)
    headings = ("devices", "step", "MFU", "tokens/s a device", "a million tokens", "a token", "layout")
    return SCALING, [note(_knee_sentence(result, feasible)), figure, table(headings, cells, (1, 2, 3, 4, 5))]


def _knee_sentence(result: ScalingResult, feasible: Sequence[JsonObject]) -> str:
    if result.knee is not None:
        return f"The knee is at {result.knee} devices: beyond it a doubling brings less than {KNEE:.0%} of its part."
    most = feasible[-1]["devices"]
    return f"No knee up to {most} devices: every growth brought at least {KNEE:.0%} of its part."


def _first_sentence(text: str) -> str:
    return text.partition("; nearest")[0]
