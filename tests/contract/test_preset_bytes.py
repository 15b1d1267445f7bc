"""Public models that are planned by their sizes take the bytes that their modules take."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.count_presets import count_model, family_of
from meshwright.jobs.plan import plannable_model
from meshwright.jobs.plan_model import plan_model, preset_model
from meshwright.jobs.requests import PlanConfig
from meshwright.models.config import ModelConfig
from meshwright.planner.measured_price import price_layout
from meshwright.planner.preset_bytes import FIGURES, CountedModel
from meshwright.planner.presets import presets
from meshwright.spec.layout import Layout
from tests.tiers import further

STANDARD = {"gpt-3-175b", "megatron-530b", "palm-540b", "grok-1-314b", "dbrx-132b"}
"""Models whose family transformers hasn't, or can't be built at their sizes: planned as a standard transformer."""


def test_every_model_of_a_known_family_was_counted() -> None:
    assert {name for name, preset in presets().items() if preset.counted is None} == STANDARD


@pytest.mark.parametrize("name", further(["qwen3-0.6b", "smollm2-135m", "gpt2-small", "olmoe-7b-a1b"], (0,)))
def test_the_file_has_what_modules_take(name: str) -> None:
    preset = presets()[name]
    assert preset.counted is not None
    found = count_model(preset.sizes, str(family_of(name)))
    for stated, counted in zip(preset.counted.lengths, found, strict=True):
        assert stated.is_near(counted) and stated.tokens == counted.tokens
        assert [layer.count for layer in stated.layers] == [layer.count for layer in counted.layers]


@pytest.mark.extended("test_the_file_has_what_modules_take")
def test_bytes_between_two_lengths_of_rows_lie_on_a_line() -> None:
    """Attention with sinks has no fused kernel: its scores grow with the row."""
    preset = presets()["gpt-oss-20b"]
    assert preset.counted is not None
    sizes = dataclasses.replace(preset.sizes, layers=2)
    short, long = count_model(sizes, "gpt_oss")
    assert long.layers[0].saved[0] > 1.5 * short.layers[0].saved[0]
    middle = count_model(dataclasses.replace(sizes, positions=2048), "gpt_oss")[-1]
    assert middle.tokens == 2048
    for stated, counted in zip(short.at(2048, long).layers, middle.layers, strict=True):
        assert stated.saved[0] == pytest.approx(counted.saved[0], rel=0.001)
        assert stated.moved == pytest.approx(counted.moved, rel=0.001)
        for name in FIGURES:
            assert getattr(stated, name) == pytest.approx(getattr(counted, name), rel=0.15), name
    assert isinstance(preset.counted.at(2048), CountedModel)


LAYOUTS = (
    "replicate=8",
    "shard=8,zero=3,recompute=selective",
    "shard=4,tp=2,zero=1,sequence=true",
    "pp=2,shard=4,zero=1,microbatches=4,recompute=full",
)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_public_model_is_planned_as_its_family_is(is_compiled: bool) -> None:
    """Qwen3 norms each head's queries and keys, which the formula of a standard transformer leaves out."""
    name = "qwen3-0.6b"
    sizes = presets()[name].sizes
    family = ModelConfig(
        name="qwen3", layers=sizes.layers, width=sizes.width, heads=sizes.heads, kv_heads=sizes.kv_heads,
        ffn=sizes.ffn, vocab=sizes.vocab, tie=True, overrides={"head_dim": sizes.head_size},
    )  # fmt: skip
    config = PlanConfig(cluster="8xh100", batch=64, sequence=2048, compile=is_compiled, show=1)
    by_name = preset_model(ModelConfig(name=name))
    assert by_name is not None
    models = (by_name, plannable_model(family, 2048), dataclasses.replace(by_name, preset=None))
    questions = [plan_model(config, model).question for model in models]
    missed = []
    for text in LAYOUTS:
        layout = dataclasses.replace(Layout.parse(f"{text},precision=bf16"), compile=is_compiled)
        found, real, standard = (price_layout(question, layout, None).price for question in questions)
        assert found.peak == pytest.approx(real.peak, rel=0.01), text
        # Modules have three products where the table has one of queries, keys and values.
        assert found.step_s == pytest.approx(real.step_s, rel=0.08), text
        assert found.parts["elementwise"] == pytest.approx(real.parts["elementwise"], rel=0.01), text
        missed.append(standard.peak / real.peak - 1)
    assert min(missed) < -0.03


def test_a_plan_that_compiles_is_as_fast_as_the_best_compiled_one() -> None:
    """Gemma 2's eager layers are slow in other ways than compiled ones, so that other layouts are first without."""
    model = preset_model(ModelConfig(name="gemma-2-27b"))
    assert model is not None
    free, asked = (
        plan_model(PlanConfig(cluster="256xh100", batch=1024, sequence=4096, steps=1000, compile=compiled), model)
        for compiled in (None, True)
    )
    assert free.layout.compile and free.step_s <= (1 + free.question.tie_tolerance) * asked.step_s
    assert free.choice.considered > asked.choice.considered
