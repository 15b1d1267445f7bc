"""A page that lays the curves of several runs over each other, from their run directories alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from statistics import median

from markupsafe import Markup

from meshwright.errors import PlanError
from meshwright.json_types import JsonObject
from meshwright.monitor.charts import COLOURS, Series, line_chart
from meshwright.monitor.page import Section, note, page, table, title, two_columns
from meshwright.monitor.report import main_figures, render_safely
from meshwright.monitor.rundir import RunFiles, column, number
from meshwright.spec.layout import Layout
from meshwright.units import format_count

_CURVES = (
    ("grad_norm", "Gradient norm", "2-norm before clipping", False),
    ("lr", "Learning rate", "learning rate", True),
    ("tokens_per_s", "Throughput", "tokens/s", True),
    ("step_s", "Step time", "seconds", True),
)
"""Field of a step, title, quantity, and whether the axis starts at zero."""


def flatten_settings(config: JsonObject, prefix: str = "") -> dict[str, object]:
    """Returns a config's settings by dotted key: ``{"optimizer": {"lr": 1.0}}`` gives ``{"optimizer.lr": 1.0}``."""
    settings: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            settings |= flatten_settings(value, f"{prefix}{key}.")
        else:
            settings[f"{prefix}{key}"] = value
    return settings


def differing_settings(runs: Sequence[RunFiles]) -> dict[str, tuple[str, ...]]:
    """Returns each setting that isn't the same in all runs: by dotted key its value in each, empty where it isn't set.

    Values are JSON. The key ``run``, which names a run's own directory, is left out.
    """
    settings = [flatten_settings(run.config) for run in runs]
    rows = {}
    for key in sorted(set().union(*settings) - {"run"}):
        values = tuple(json.dumps(flat[key], default=str) if key in flat else "" for flat in settings)
        if len(set(values)) > 1:
            rows[key] = values
    return rows


def compared_figures(runs: Sequence[RunFiles]) -> dict[str, tuple[str, ...]]:
    """Returns the runs' state, layout and main figures as text by name; empty where a run has none."""
    columns = []
    for run in runs:
        figures = {"State": run.state, "Steps": str(run.steps[-1]["step"]) if run.steps else "0", "Layout": run.layout}
        try:
            figures |= {name: value for name, value, _ in main_figures(run)}
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
            figures["Damaged"] = "its files hold values of other types"
        columns.append(figures)
    names = dict.fromkeys(name for figures in columns for name in figures)
    figures_by_name = {name: tuple(figures.get(name, "") for figures in columns) for name in names}
    return figures_by_name | scaling_figures(runs)


def scaling_figures(runs: Sequence[RunFiles]) -> dict[str, tuple[str, ...]]:
    """Returns the factors of the runs' speeds as text by name, where they have different numbers of devices.

    Tokens/s are those of one device of the smallest run, times the devices, times the efficiency; the speed-up is the
    product of the last two. Empty for a run without a layout or steps, and wholly where fewer than two sizes have both.
    """
    sizes = [(_devices(run), _median_speed(run)) for run in runs]
    known_sizes = [(devices, speed) for devices, speed in sizes if devices and speed > 0]
    if len({devices for devices, _ in known_sizes}) < 2:
        return {}
    fewest_devices, base_speed = min(known_sizes, key=lambda size: (size[0], -size[1]))
    columns = []
    for devices, speed in sizes:
        if devices and speed > 0:
            device_speed = base_speed / fewest_devices
            speedup = speed / device_speed
            columns.append((format_count(device_speed), str(devices), f"{speedup:.2f}", f"{speedup / devices:.1%}"))
        else:
            columns.append(("", "", "", ""))
    names = (f"Tokens/s of one device, of {fewest_devices}", "Devices", "Speed-up over one device", "Efficiency")
    return dict(zip(names, zip(*columns), strict=True))


def _devices(run: RunFiles) -> int:
    """Returns the ranks of a run's layout; 0 where it has none that can be read."""
    try:
        return Layout.parse(run.layout).world if run.layout else 0
    except (PlanError, ValueError, TypeError):
        return 0


def _median_speed(run: RunFiles) -> float:
    """Returns the median tokens/s of a run's steps; 0 where none is known."""
    speeds = [speed for step in run.steps if math.isfinite(speed := number(step.get("tokens_per_s")))]
    return median(speeds) if speeds else 0.0


def comparison_page(names: Sequence[str], runs: Sequence[RunFiles]) -> str:
    """Renders the page: differing settings, main figures side by side, curves over each other.

    Args:
        names: of the runs, as the page writes them; at most `COLOURS`.
        runs: their contents, in the same order.
    """
    heads = [title("Runs side by side", " · ".join(names))]
    settings, figures = differing_settings(runs), compared_figures(runs)
    sections: list[Section] = [
        ("", heads),
        ("Settings that differ", [_side_by_side("setting", names, settings)] if settings else [note("None.", "none")]),
        ("Figures", [_side_by_side("", names, figures)]),
        ("Curves", render_safely(lambda: _curves(names, runs))),
    ]
    return page("Runs side by side · meshwright", sections)


def _side_by_side(heading: str, names: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Markup:
    return table((heading, *names), [(name, *values) for name, values in rows.items()], range(1, len(names) + 1))


def _curves(names: Sequence[str], runs: Sequence[RunFiles]) -> list[Markup]:
    """Renders a chart for each field, with a curve for each run."""

    def overlay(field: str, heading: str, unit: str, from_zero: bool, width: int = 504) -> Markup:
        curves = [
            Series(
                label=name, x=column(run.steps, "step"), y=column(run.steps, field),
                colour=index % COLOURS, smooth=field != "lr",
            )
            for index, (name, run) in enumerate(zip(names, runs, strict=True))
        ]  # fmt: skip
        return line_chart(curves, heading, unit, from_zero=from_zero, width=width)

    loss = overlay("loss", "Training loss", "nats per token", False, 1046)
    return [loss, _validation(names, runs), two_columns([overlay(*curve) for curve in _CURVES])]


def _validation(names: Sequence[str], runs: Sequence[RunFiles]) -> Markup:
    """Renders the validation losses over steps."""
    curves = []
    for index, (name, run) in enumerate(zip(names, runs, strict=True)):
        evaluated = [event for event in run.of_kind("evaluated") if math.isfinite(number(event.get("step")))]
        evaluated.sort(key=lambda event: number(event["step"]))
        x, y = column(evaluated, "step"), column(evaluated, "loss")
        curves.append(Series(label=name, x=x, y=y, colour=index % COLOURS, dots=len(x) < 60))
    return line_chart(curves, "Validation loss", "nats per token", width=1046)
