"""Asks the planner for large published runs: its first choice beside the layout that the team chose.

    python -m benchmarks.published.runs [--only WORD] [--json FILE]

Both stand in the planner's own price, which is of this project's runtime on the catalogue's devices, beside the speed
that was published. ``runs.toml`` has the questions with their sources.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cluster.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.planner.candidate import Candidate
from meshwright.planner.candidate_prices import price_possible
from meshwright.planner.chances import candidate_chances
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.expert_exchange import keeping_forms
from meshwright.planner.finalists import choose_finalists
from meshwright.planner.measured_price import price_layout, use_counted_bytes
from meshwright.planner.presets import presets
from meshwright.planner.question import Question
from meshwright.planner.utilization import data_sheet_flops, model_flops_per_s
from meshwright.spec.axis import Mechanics
from meshwright.spec.layer_graph import END_STAGES
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import Recompute

FILE = Path(__file__).with_name("runs.toml")
NEAR = 1.1
"""The published layout is near the first choice where it takes at most this many times its seconds."""
RECOMPUTED = (0.25, 0.5, 0.75, 1.0)
"""Shares of the layers that may recompute in a layout whose source doesn't say."""


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A question, the layout that was run, and its speed."""

    name: str
    question: Question
    layout: str
    """In our notation; what it leaves out isn't known."""
    mfu: float | None
    """Share of the dense peak of its precision; None without a public figure."""
    source: str


def read_runs(path: Path = FILE) -> list[PublishedRun]:
    """Returns the runs of a file."""
    return [_read_run(table) for table in tomllib.loads(path.read_text(encoding="utf-8"))["run"]]


def _read_run(table: Mapping[str, Any]) -> PublishedRun:
    preset = table.get("preset")
    sizes = presets()[preset].sizes if preset else TableSizes(name=table["name"], **table["sizes"])
    counted = presets()[preset].counted if preset else None
    precision, cluster = table.get("precision", "bf16"), Cluster.parse(table["cluster"])
    base = Layout(precision=precision)
    job = PricedJob(
        shape=shape_from_sizes(sizes),
        sequence=table["sequence"],
        rows=table["rows"],
        precision=base.compute_precision,
        products=base.product_precision,
    )
    mfu, step_s = table.get("mfu"), table.get("step_s")
    if "tokens_per_s" in table:
        step_s = job.rows * job.sequence / table["tokens_per_s"] / cluster.devices
    if step_s is not None:
        # All by one count of FLOPs: sources differ in whether attention and the head are in theirs.
        mfu = model_flops_per_s(job, step_s) / data_sheet_flops(cluster, job.dtype)
    question = Question(job=job, cluster=cluster, base=base)
    return PublishedRun(
        name=table["name"],
        question=question if counted is None else use_counted_bytes(question, counted),
        layout=table["layout"],
        mfu=mfu,
        source=table["source"],
    )


def forms(run: PublishedRun) -> Iterator[Layout]:
    """Yields the forms of the published layout: what its source leaves open takes every value."""
    experts = [block.experts for block in run.question.job.shape.blocks]
    layers = len(experts)
    layout = dataclasses.replace(Layout.parse(run.layout), precision=run.question.base.precision)
    if layout.degree(Mechanics.MATRICES) > 1:
        layout = dataclasses.replace(layout, sequence=True)
    scheduled = [layout]
    if layout.degree(Mechanics.STAGES) > 1 and not layout.schedule:
        scheduled = [dataclasses.replace(layout, schedule="1f1b"), *_interleaved(layout, layers)]
    for option in scheduled:
        yield option
        if "recompute" in run.layout:
            continue
        for mode in ("selective", "full"):
            for share in RECOMPUTED:
                count = round(share * layers)
                recomputing = dataclasses.replace(option, recompute=Recompute(mode, count if count < layers else 0))
                yield from (recomputing, *keeping_forms([recomputing], experts))


def _interleaved(layout: Layout, layers: int) -> list[Layout]:
    ranks = layout.degree(Mechanics.STAGES)
    if layout.microbatches % ranks:
        return []
    most = (layers + END_STAGES) // ranks
    return [dataclasses.replace(layout, schedule="interleaved", stages=stages) for stages in range(2, most + 1)]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A run with the planner's first choice and its price of the published layout."""

    run: PublishedRun
    choice: Candidate
    mfu_range: tuple[float, float]
    """MFU of the first choice between which it lies with 80 %."""
    chance_fits: float
    """Of the first choice."""
    published: Candidate
    """The fastest form of the published layout that fits; the leanest where none does."""

    @property
    def ratio(self) -> float:
        """Seconds of the published layout over those of the first choice, both as the planner prices them."""
        return self.published.price.step_s / self.choice.price.step_s

    @property
    def published_fits(self) -> bool:
        """Whether the published layout is predicted to fit the device, whatever a plan may fill of it."""
        return self.published.price.peak <= self.run.question.cluster.memory_bytes

    @property
    def reached(self) -> str:
        """How the published MFU lies to the interval of the first choice."""
        if self.run.mfu is None:
            return ""
        low, high = self.mfu_range
        return "inside" if low <= self.run.mfu <= high else "below" if self.run.mfu < low else "above"

    def to_json(self) -> dict[str, Any]:
        """Returns the comparison as plain values."""
        return {
            "name": self.run.name,
            "source": self.run.source,
            "published_layout": str(self.published.layout),
            "published_mfu": self.run.mfu,
            "published_priced_mfu": self.published.mfu,
            "published_priced_step_s": self.published.price.step_s,
            "published_peak_bytes": self.published.price.peak,
            "published_fits": self.published_fits,
            "choice": str(self.choice.layout),
            "choice_step_s": self.choice.price.step_s,
            "choice_mfu": self.choice.mfu,
            "choice_mfu_range": self.mfu_range,
            "choice_fits": self.chance_fits,
            "ratio": self.ratio,
            "reached": self.reached,
        }


def compare(run: PublishedRun) -> Compared:
    """Plans a run and prices its published layout.

    Raises:
        PlanError: when nothing fits, or no form of the published layout can be priced.
    """
    question = run.question
    choice = choose_finalists(question, 10, None).best[0]
    chances = candidate_chances(question, choice)
    priced = price_possible(question, forms(run), lambda layout: price_layout(question, layout, None))
    if not priced:
        raise PlanError(f"{run.name}: {run.layout} can't be priced")
    fitting = [candidate for candidate in priced if candidate.price.peak <= question.usable_bytes]
    fitting = fitting or [candidate for candidate in priced if candidate.price.peak <= question.cluster.memory_bytes]
    published = min(
        fitting or priced, key=lambda candidate: candidate.price.step_s if fitting else candidate.price.peak
    )
    per_second = choice.mfu * choice.price.step_s
    return Compared(
        run=run,
        choice=choice,
        mfu_range=(per_second / chances.step_high_s, per_second / chances.step_low_s),
        chance_fits=chances.fits,
        published=published,
    )


def table(found: Sequence[Compared]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    lines = [
        "| run | first choice | its MFU (80 %) | published layout | published MFU | published layout in our price: "
        "MFU, seconds over the first choice's |",
        "|---" * 6 + "|",
    ]
    for item in found:
        low, high = item.mfu_range
        mfu = "none" if item.run.mfu is None else f"{item.run.mfu:.0%}, {item.reached}"
        fits = "" if item.published_fits else ", doesn't fit"
        lines.append(
            f"| {item.run.name} | `{item.choice.layout}` | {item.choice.mfu:.0%} ({low:.0%}-{high:.0%}) "
            f"| `{item.published.layout}` | {mfu} | {item.published.mfu:.0%}, {item.ratio:.2f}{fits} |"
        )
    known = [item for item in found if item.run.mfu is not None]
    inside, near = sum(item.reached == "inside" for item in known), sum(item.ratio <= NEAR for item in found)
    lines += ["", f"Published MFU inside the interval of the first choice: {inside} of {len(known)}; published layout "
              f"within {NEAR - 1:.0%} of the first choice: {near} of {len(found)}."]  # fmt: skip
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="benchmarks.published.runs", description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="runs whose name has it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every comparison")
    chosen = parser.parse_args(arguments)
    found = [compare(run) for run in read_runs() if chosen.only in run.name]
    if chosen.json:
        chosen.json.write_text(json.dumps([item.to_json() for item in found], indent=2) + "\n", encoding="utf-8")
    print("\n".join(table(found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
