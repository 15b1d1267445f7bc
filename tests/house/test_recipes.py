"""The code of CONTRIBUTING.md's recipes does what the recipes say."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from meshwright.cluster import catalogue
from meshwright.cluster.device import Device
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.simulate import simulate
from meshwright.schedules.spec import ScheduleSpec, find_schedule
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Axis
from meshwright.spec.groups import gradient_axes, reader
from tests.house.source import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def run_block(name: str) -> Any:
    """Runs the block of Python that defines a name, and returns the value."""
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if f"\n{name} = " in code]
    values: dict[str, Any] = {}
    exec(compile(block, name, "exec"), values)
    return values[name]


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 1), (2, 8), (4, 3), (4, 16)])
def test_the_schedule_runs_and_keeps_what_it_states(ranks: int, microbatches: int) -> None:
    spec: ScheduleSpec = run_block("SCHEDULE")
    schedule, plain = (item.build(ranks, 1, microbatches) for item in (spec, find_schedule("gpipe")))
    assert [set(row) for row in schedule.actions] == [set(row) for row in plain.actions]
    ones = (1.0,) * ranks
    simulation = simulate(schedule, ActionCosts(forward_s=ones, backward_s=ones, input_s=ones, weight_s=ones))
    assert max(simulation.peak_live_rank) <= spec.peak_live(ranks, 1, microbatches)


def test_the_axis_reads_rows_of_its_own_and_sums_gradients() -> None:
    axis: Axis = run_block("AXIS")
    axes = dict(sorted({**known_axes(), axis.name: axis}.items(), key=lambda item: item[1].order))
    assert [reader(rank, {axis.name: 2, "shard": 2}, axes) for rank in range(4)] == [(rank, 4) for rank in range(4)]
    assert axis.name in gradient_axes(("shard", "cp"), axes)


def test_the_positions_that_the_recipe_names_are_those_of_the_axes() -> None:
    sentence = re.search(r"outermost first: (.*?)\)", TEXT, re.DOTALL)
    assert sentence is not None
    orders = {name: int(order) for name, order in re.findall(r"`(\w+)`\s(\d+)", sentence[1])}
    assert orders == {name: axis.order for name, axis in known_axes().items()}


def test_the_device_has_every_field_that_it_needs() -> None:
    (table,) = re.findall(r"```toml\n(\[devices.*?)```", TEXT, re.DOTALL)
    ((name, fields),) = tomllib.loads(table)["devices"].items()
    names = {key: fields.pop(key) for key in ("family", "gb", "form", "node")}
    assert Device(name=name, **fields).peak("bf16") == 364.2e12
    assert names["node"] in catalogue.nodes() and set(names["form"]) <= catalogue.FORMS
