"""What is known of a model from one layout serves another: the same analysis, and the clone is tried once."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.data.config import DataConfig
from meshwright.jobs.model_reading import read_model
from meshwright.models.config import ModelConfig
from meshwright.spec.layout import Layout
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
