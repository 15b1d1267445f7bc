"""Public models by name have the sizes of public configs and the parameters that their model cards state."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from meshwright.errors import ConfigError
from meshwright.jobs.plan_model import preset_model
from meshwright.models.config import ModelConfig
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.presets import presets

# Parameters by the metadata of the weights on Hugging Face, or by the paper where three digits stand.
PUBLISHED = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-3-175b": 174.6e9,
    "megatron-530b": 530e9,
    "palm-540b": 540.35e9,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-1b": 1_011_781_632,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65.7e9,
    "bloom-7b": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "falcon-180b": 179.5e9,
    "mpt-7b": 6_649_286_656,
    "nemotron-4-340b": 341e9,
    "llama-7b": 6_738_415_616,
    "llama-2-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-2-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large-123b": 122_610_069_504,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "yi-6b": 6_061_035_520,
    "yi-34b": 34_388_917_248,
    "glm-4-9b": 9_399_951_360,
    "command-r-35b": 34_980_831_232,
    "command-r-plus-104b": 103_810_674_688,
    "olmo-2-7b": 7.30e9,
    "olmo-2-13b": 13.7e9,
    "olmoe-7b-a1b": 6.92e9,
    "dbrx-132b": 131_596_523_520,
    "grok-1-314b": 314e9,
    "gpt-oss-20b": 20.9e9,
    "gpt-oss-120b": 116.8e9,
    "deepseek-67b": 67.4e9,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "deepseek-r1": 671_026_419_200,
    "kimi-k2": 1.026e12,
}
# Parameters that a token visits, by the model card, in billions; embeddings are counted by some and not by others.
ACTIVE = {
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
    "dbrx-132b": 36,
    "deepseek-v2": 21,
    "deepseek-v3": 37,
    "kimi-k2": 32,
    "gpt-oss-20b": 3.6,
    "gpt-oss-120b": 5.1,
}


def test_parameters_are_those_of_the_model_cards() -> None:
    assert set(PUBLISHED) == set(presets())
    for name, preset in presets().items():
        # Three digits are published to half of the last one; the rest are exact but for norms and some biases.
        published = PUBLISHED[name]
        tolerance = 0.006 if isinstance(published, float) else 0.0005
        assert shape_from_sizes(preset.sizes).parameters == pytest.approx(published, rel=tolerance), name
        assert preset.source


def test_active_parameters_are_those_of_the_model_cards() -> None:
    for name, billions in ACTIVE.items():
        shape = shape_from_sizes(presets()[name].sizes)
        visited = shape.matmul_parameters + shape.vocab * shape.width
        # The cards differ in whether the embedding's row counts.
        assert shape.matmul_parameters * 0.97 < billions * 1e9 < visited * 1.03, name


def test_names_hide_no_family() -> None:
    """A family such as ``gpt2`` goes on being one."""
    assert not set(presets()) & set(CONFIG_MAPPING_NAMES)


def test_sizes_of_a_preset_can_be_changed_and_nothing_else_is_ignored() -> None:
    model = preset_model(ModelConfig(name="llama-3-8b", layers=16))
    assert model is not None and model.shape.layers == 16
    assert preset_model(ModelConfig(name="llama")) is None
    with pytest.raises(ConfigError, match=r"model\.dropout can't be set for llama-3-8b"):
        preset_model(ModelConfig(name="llama-3-8b", dropout=0.1))


SIZES = json.loads((Path(__file__).parents[1] / "data" / "public_models.json").read_text(encoding="utf-8"))
"""Sizes of public models as other projects' code and published configs have them, each with its source."""
WITHOUT_WITNESS = {"command-r-plus-104b", "mistral-small-24b", "palm-540b", "yi-6b"}
"""Models whose sizes are held to their published parameters alone, or to transformers' defaults."""
DEFAULTS = {
    "command-r-35b": "CohereConfig",
    "deepseek-v3": "DeepseekV3Config",
    "gemma-7b": "GemmaConfig",
    "glm-4-9b": "GlmConfig",
    "gpt-j-6b": "GPTJConfig",
    "gpt-neox-20b": "GPTNeoXConfig",
    "gpt-oss-120b": "GptOssConfig",
    "gpt2-small": "GPT2Config",
    "llama-7b": "LlamaConfig",
    "mixtral-8x7b": "MixtralConfig",
    "phi-3-mini": "Phi3Config",
}
"""Models whose sizes are the defaults of their family in transformers."""


def effective(sizes: TableSizes) -> dict[str, object]:
    """The sizes with what isn't given filled in, as a config states them."""
    return dataclasses.asdict(sizes) | {
        "kv_heads": sizes.kv_heads or sizes.heads,
        "head_size": sizes.head_size or sizes.width // sizes.heads,
        "ffn": sizes.ffn or 4 * sizes.width,
    }


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_those_of_public_configs(name: str) -> None:
    witness, found = SIZES[name], effective(presets()[name].sizes)
    assert witness["source"] and len(witness["sizes"]) >= 4
    assert {key: found[key] for key in witness["sizes"]} == witness["sizes"], witness["source"]


def test_every_model_has_a_witness_or_is_named() -> None:
    assert set(presets()) - set(SIZES) - set(DEFAULTS) == WITHOUT_WITNESS


@pytest.mark.parametrize("name", DEFAULTS)
def test_sizes_are_the_defaults_of_transformers(name: str) -> None:
    config = getattr(transformers, DEFAULTS[name])()
    found = effective(presets()[name].sizes)
    is_mixture, latent = bool(found["experts"]), presets()[name].sizes.latent
    expected = {
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "vocab": config.vocab_size,
        "tied": config.tie_word_embeddings,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    }
    ffn = getattr(config, "intermediate_size", None)
    if is_mixture:
        expected |= {
            "experts": getattr(config, "n_routed_experts", None) or config.num_local_experts,
            "active_experts": config.num_experts_per_tok,
            "expert_ffn": getattr(config, "moe_intermediate_size", None) or ffn,
            "dense_layers": getattr(config, "first_k_dense_replace", 0),
        }
        if (getattr(config, "n_group", None) or 1) > 1:
            expected |= {"expert_groups": config.n_group, "chosen_groups": config.topk_group}
    elif ffn:
        expected["ffn"] = ffn
    assert {key: found[key] for key in expected} == expected
    if latent is not None:
        assert (latent.query_rank, latent.kv_rank) == (config.q_lora_rank, config.kv_lora_rank)
        assert (latent.rope_size, latent.nope_size) == (config.qk_rope_head_dim, config.qk_nope_head_dim)
        assert latent.value_size == config.v_head_dim
