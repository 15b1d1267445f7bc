"""Trials of layouts: what of a run's config holds in them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.errors import RankError
from meshwright.jobs import trials
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import OuterConfig, TrainConfig
from meshwright.train.model_analysis import ModelAnalysis
from meshwright.train.run_config import RunConfig
from meshwright.train.session import TrainJob


def test_islands_train_by_themselves_in_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial of first steps that islands take as one would time copies; one that measures, two steps in one."""
    tried: list[TrainJob] = []

    def run(work: object, job: TrainJob) -> None:
        tried.append(job)
        raise RankError("no ranks here")

    monkeypatch.setattr(trials, "choose_launcher", lambda *_, **__: SimpleNamespace(run=run))
    config = RunConfig(train=TrainConfig(noise_scale=2), outer=OuterConfig(warmup=500, every=4))
    chosen = {"every": 9, "fragments": 2, "delay": 1, "compress": "int8"}
    plan = Plan(layout=Layout.parse("islands=2"), prediction=Prediction(memory={}), ranks=2, reason="", outer=chosen)
    job = TrainJob(
        config=config, plan=plan, model=None, analysis=ModelAnalysis(), run_dir=tmp_path, data_dir=tmp_path,
        fingerprint="", header={}, hooks=(), flops_per_token=1.0,
    )  # type: ignore[arg-type]  # fmt: skip
    (trial,) = trials.run_trials(job, [(plan, ModelAnalysis())], say=lambda _: None)
    assert trial.why == "no ranks here"
    (short,) = tried
    assert (short.outer.warmup, short.config.train.noise_scale) == (0, 0)
    # Else as the plan says, where the user doesn't.
    assert short.outer == OuterConfig(every=4, fragments=2, delay=1, compress="int8")
