"""What is known of a model from one layout serves another: the same analysis, and the clone is tried once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from meshwright.data.config import DataConfig
from meshwright.jobs import model_reading
from meshwright.jobs.model_reading import read_model
from meshwright.jobs.plan import plannable_model
from meshwright.models.build import BuiltModel
from meshwright.models.config import ModelConfig
from meshwright.spec.layout import Layout
from meshwright.spec.model_shape import ModelWork
from meshwright.train import model_analysis
from meshwright.train.model_analysis import analyse_model
from meshwright.train.run_config import RunConfig

TOKENS = 32
# fmt: off
LAYOUTS = (
    "replicate=2", "shard=2,zero=2", "pp=2,microbatches=2", "tp=2", "tp=2,sequence=true", "cp=2,attention=gather",
    "cp=2", "tp=2,cp=2", "shard=2,ep=2", "replicate=1",
)
# fmt: on


def test_analyses_after_others_equal_fresh_ones_and_try_the_clone_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(
        model=ModelConfig(name="mixtral", layers=2, width=32, heads=4),
        data=DataConfig(paths=("corpus.txt",), sequence=TOKENS),
    )
    fresh = [analyse_model(read_model(config, 64, TOKENS).built, Layout.parse(text), tokens=TOKENS) for text in LAYOUTS]
    trials = []
    try_forward = model_analysis.try_forward
    monkeypatch.setattr(model_analysis, "try_forward", lambda built: trials.append(built) or try_forward(built))
    model = read_model(config, 64, TOKENS)
    for text, expected in zip(LAYOUTS, fresh):
        found = model.analyse(Layout.parse(text), TOKENS)
        # An analysis may know more than its own layout needs.
        known = {name: value for name, value in dataclasses.asdict(expected).items() if value}
        assert {name: dataclasses.asdict(found)[name] for name in known} == known, text
        assert found.attention == expected.attention, text
    assert len(trials) == 1


def test_all_plans_of_a_model_share_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    measure_model = model_reading.measure_model

    def counted(built: BuiltModel, rows: int, *rest: Any) -> ModelWork:
        calls.append(rows)
        return measure_model(built, rows, *rest)

    monkeypatch.setattr(model_reading, "measure_model", counted)
    sizes, layout = ModelConfig(name="gpt2", layers=2, width=32, heads=4), Layout()
    model = read_model(RunConfig(model=sizes), 64, TOKENS)
    other = dataclasses.replace(model.built, config=dataclasses.replace(model.built.config, attention="varlen"))
    works = [model.measure(model.built, TOKENS, "float32")(layout, 1) for _ in range(2)]
    assert works[0] is works[1] is not None and calls == [1]
    # Other tokens, another precision, another way to attend and other rows are measured by themselves.
    model.measure(model.built, TOKENS // 2, "float32")(layout, 1)
    model.measure(model.built, TOKENS, "bf16")(layout, 1)
    model.measure(other, TOKENS, "float32")(layout, 1)
    model.measure(model.built, TOKENS, "float32")(layout, 3)
    assert calls == [1, 1, 1, 1, 3]
    shown = plannable_model(sizes, TOKENS)
    assert shown.measure is not None
    works = [shown.measure(TOKENS, "float32")(layout, 2) for _ in range(2)]
    assert works[0] is works[1] is not None and calls[5:] == [2]
