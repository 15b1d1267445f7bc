"""Model settings: what they mean for a family, and what is refused."""

import subprocess
import sys
from typing import Any

import pytest

from meshwright.errors import ConfigError
from meshwright.models.analysis.document_masks import check_documents
from meshwright.models.analysis.small_config import shrink_config
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig


def test_config_imports_no_torch():
    code = "import sys, meshwright.models.config; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "lama"}, "did you mean 'llama'"),
        ({"name": "./nowhere"}, "no such directory"),
        ({"name": "gpt2", "experts": 4}, "model.experts = 4 has no effect on 'gpt2'"),
        ({"name": "gpt2", "overrides": {"resid_pdorp": 0.1}}, "did you mean 'resid_pdrop'"),
        ({"name": "mamba", "heads": 4}, "no effect"),
        ({"name": "mamba", "dropout": 0.1}, "no effect"),
        ({"name": "llama", "width": 65, "heads": 4}, "does not divide"),
        ({"name": "llama", "heads": 4, "kv_heads": 3}, "does not divide"),
        ({"name": "llama", "layers": 0}, "1 or more"),
        ({"name": "llama", "fresh": True}, "no effect"),
        ({"name": "nowhere_at_all:make"}, "can't import"),
        ({"name": "./lib/mine.py:make"}, r"named with dots from .*; write lib\.mine:make$"),
        ({"name": "../mine.py:make"}, r"named with dots from .*; write FOLDER\.MODULE:make$"),
        ({"name": "math:nothing"}, "no function"),
    ],
)
def test_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        build_meta(ModelConfig(**values), 64, 32)


def test_sizes_reach_the_family():
    config = ModelConfig(
        name="gpt2", layers=3, width=48, heads=6, dropout=0.25, overrides={"scale_attn_by_inverse_layer_idx": "true"}
    )
    found = build_meta(config, vocab=70, context=33).hf_config
    assert (found.n_layer, found.n_embd, found.n_head, found.vocab_size, found.n_positions) == (3, 48, 6, 70, 33)
    assert (found.resid_pdrop, found.attn_pdrop, found.embd_pdrop) == (0.25, 0.25, 0.25)
    assert found.scale_attn_by_inverse_layer_idx is True
    assert found.eos_token_id is None


def test_mixture_and_sliding_windows_stay_consistent():
    mixture = build_meta(ModelConfig(name="mixtral", experts=3, layers=1, width=32), 50, 16).hf_config
    assert (mixture.num_local_experts, mixture.num_experts_per_tok) == (3, 2)
    sliding = build_meta(ModelConfig(name="gemma3_text", layers=7, width=32), 50, 16).hf_config
    assert len(sliding.layer_types) == 7 and sliding.head_dim == 8


def test_a_row_longer_than_learned_positions_is_refused():
    with pytest.raises(ConfigError, match="learned positions"):
        build_meta(ModelConfig(name="gpt2", layers=1, width=32, context=16), 50, 32)
    with pytest.raises(ConfigError, match="vocabulary of 90"):
        build_meta(ModelConfig(name="gpt2", layers=1, width=32, vocab=50), 90, 32)


def test_shrink_keeps_the_family():
    small = shrink_config(ModelConfig(name="llama", layers=40, width=4096, heads=32, kv_heads=8, tie=True))
    assert (small.name, small.layers, small.width, small.tie) == ("llama", 2, 64, True)


def test_tie_is_obeyed():
    tied = build_meta(ModelConfig(name="llama", layers=1, width=32, tie=True), 50, 16)
    assert tied.structure.ties == (("model.embed_tokens.weight", "lm_head.weight"),)
    loose = build_meta(ModelConfig(name="gpt2", layers=1, width=32, tie=False), 50, 16)
    assert loose.structure.ties == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 32, "overrides": {"hidden_size": 48}}, "model.width = 32, and model.overrides.hidden_size = 48"),
        ({"layers": 2, "overrides": {"num_hidden_layers": "0"}}, "model.overrides.num_hidden_layers = 0: both"),
        ({"overrides": {"dtype": "bfloat16"}}, "has no effect: weights .* precision=bf16"),
        ({"seed": 10**26}, r"from -2\^63 to 2\^64 - 1"),
    ],
)
def test_what_nothing_would_follow_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(name="llama", **fields).check_all()


def test_an_override_may_repeat_a_size_or_set_one_of_its_own() -> None:
    ModelConfig(name="llama", width=32, overrides={"hidden_size": "32"}).check_all()
    ModelConfig(name="opt", width=32, overrides={"word_embed_proj_dim": 16}).check_all()


def test_documents_of_a_model_that_does_not_run_in_float64_are_refused_in_a_sentence() -> None:
    built = build_meta(ModelConfig(name="xglm", layers=1, width=32), 50, 16)
    with pytest.raises(ConfigError, match=r"a small clone doesn't run in float64: .*; set data.mask_documents = false"):
        check_documents(built)
