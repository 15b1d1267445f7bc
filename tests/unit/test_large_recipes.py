"""Recipes of large runs: their sizes are the public models', their layouts fit, their comments say what is planned."""

from __future__ import annotations

import re
import tomllib

import pytest

from meshwright.cli.main import main
from meshwright.jobs.plan_model import preset_model, question_of
from meshwright.jobs.requests import PlanConfig
from meshwright.models.config import ModelConfig
from meshwright.models.family import family_config
from meshwright.planner.candidate_prices import price_candidate
from meshwright.planner.chances import candidate_chances
from meshwright.planner.measured_price import use_counted_bytes
from meshwright.planner.presets import presets
from meshwright.spec.layout import Layout
from meshwright.train.run_config import RunConfig
from tests.house.source import ROOT

RECIPES = {"llama-8b": "llama-3-8b", "llama-70b": "llama-3-70b", "mixtral-8x7b": "mixtral-8x7b"}


@pytest.mark.parametrize(("name", "public"), RECIPES.items())
def test_a_large_recipe_is_what_its_comment_says(name: str, public: str) -> None:
    text = (ROOT / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    config = RunConfig.from_dict(tomllib.loads(text))
    config.check_all()
    sizes, layout = presets()[public].sizes, Layout.parse(config.layout)
    model = family_config(config.model, None, config.data.sequence)
    assert (model.num_hidden_layers, model.hidden_size, model.vocab_size) == (sizes.layers, sizes.width, sizes.vocab)
    assert (model.num_attention_heads, model.num_key_value_heads) == (sizes.heads, sizes.kv_heads)
    assert model.intermediate_size == (sizes.expert_ffn or sizes.ffn)
    assert (getattr(model, "num_local_experts", 0), getattr(model, "num_experts_per_tok", 0)) == (
        (sizes.experts, sizes.active_experts)
    )
    assert layout.world == config.devices == config.slurm.nodes * (config.slurm.gpus_per_node or 0)
    layout.check_batch(config.train.batch)
    (words,) = re.findall(r"meshwright plan --model (\S+) --cluster (\S+) --batch (\d+) --sequence (\d+)", text)
    assert words == (public, f"{config.devices}xh100", str(config.train.batch), str(config.data.sequence))
    plannable = preset_model(ModelConfig(name=public))
    assert plannable is not None and plannable.preset is not None
    question = question_of(PlanConfig(cluster=words[1], batch=int(words[2]), sequence=int(words[3])), plannable)
    question = use_counted_bytes(question, plannable.preset)
    candidate = price_candidate(question, layout)
    chances = candidate_chances(question, candidate)
    assert chances.fits >= config.fits
    said = re.search(
        r"The plan: ([\d.]+) s a step \(80 % between ([\d.]+) and ([\d.]+) s\), MFU ([\d.]+) %, ([\d.]+) GiB", text
    )
    assert said is not None and candidate.mfu is not None
    planned = (candidate.price.step_s, chances.step_low_s, chances.step_high_s, 100 * candidate.mfu)
    assert [f"{value:.1f}" for value in (*planned, candidate.price.peak / 2**30)] == [*said.groups()]
    tokens = config.train.steps * config.train.batch * config.data.sequence
    assert 0.95e12 < tokens < 1.1e12, "1 T tokens"


@pytest.mark.parametrize("name", RECIPES)
def test_a_large_recipe_starts_on_slurm(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(ROOT / "recipes" / f"{name}.toml")
    assert main(["train", recipe, "--on", "slurm", "--run", "/shared/run", "--dry-run"]) == 0
    assert f"--nodes={32 if name == 'llama-70b' else 8}" in capsys.readouterr().out
