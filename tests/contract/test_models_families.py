"""What every family must do: keep documents apart or say so, come back from its files slice by slice, export."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from meshwright.errors import ConfigError
from meshwright.models.analysis.document_masks import check_documents, document_leak
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.deferred import materialise
from meshwright.models.export import export_hf
from meshwright.models.forward import model_forward
from meshwright.models.generate import generate_tokens
from tests.tiers import further

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

APART = ["gpt2", "llama", "qwen3", "mixtral", "gemma3_text", "olmo2", "gpt_neox"]
TOGETHER = ["bloom", "mpt", "mamba", "opt"]


def tiny(name: str) -> ModelConfig:
    return ModelConfig(name=name, layers=2, width=32)


@pytest.mark.parametrize("name", further(APART, (0, 3)))
def test_a_changed_document_leaves_the_next_one_alone(name):
    assert document_leak(tiny(name)) < 1e-12
    check_documents(build_meta(tiny(name), 64, 32))


@pytest.mark.parametrize("name", TOGETHER)
def test_families_that_mix_documents_are_refused(name):
    with pytest.raises(ConfigError, match=r"data.mask_documents = false"):
        check_documents(build_meta(tiny(name), 64, 32))


def test_a_family_that_transformers_mended_is_refused_as_long_as_it_mixes():
    """Falcon mixes documents up to transformers 5.23 and not from 5.24 on."""
    if document_leak(tiny("falcon")) < 1e-12:
        check_documents(build_meta(tiny("falcon"), 64, 32))
    else:
        with pytest.raises(ConfigError, match=r"data.mask_documents = false"):
            check_documents(build_meta(tiny("falcon"), 64, 32))


@pytest.mark.parametrize("name", further(["gpt2", "llama", "gemma3_text"]))
def test_a_document_reads_the_same_alone_and_packed(name):
    built = build_meta(tiny(name), 64, 32)
    module = materialise(built.module.double(), built.recipe, 1).eval()
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    starts = torch.zeros(2, 12, dtype=torch.bool)
    starts[0, 5] = starts[0, 9] = starts[1, 0] = True
    index = torch.arange(12).expand(2, 12)
    positions = index - torch.where(starts, index, 0).cummax(dim=1).values
    packed = model_forward(module, built.structure, tokens, positions, True)
    alone = model_forward(module, built.structure, tokens[:1, 5:9])
    assert torch.allclose(packed[:1, 5:9], alone, rtol=0, atol=1e-12)
    free = model_forward(module, built.structure, tokens)
    assert (free[:1, 5:9] - alone).abs().max() > 1e-6
    assert torch.allclose(free[1], packed[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", further(["gpt2", "llama", "mixtral", "gemma3_text", "mamba"], (0, 4)))
def test_export_load_and_sample_agree_with_transformers(name, tmp_path: Path):
    built = build_meta(tiny(name), 64, 32)
    module = materialise(build_meta(tiny(name), 64, 32).module, built.recipe, built.config.seed).eval()
    weights = [(key, built.tensor(key)) for key, _ in built.module.named_parameters()]
    export_hf(built, weights, tmp_path / "out")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    assert torch.equal(reference(tokens).logits, model_forward(module, built.structure, tokens))
    sample = generate_tokens(module, built.structure, [1, 2, 3], max_tokens=5, temperature=0)
    expected = reference.generate(tokens.new_tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert sample == expected[0, 3:].tolist()

    loaded = build_meta(ModelConfig(name=str(tmp_path / "out")))
    for key, parameter in reference.named_parameters():
        box = tuple((size // 3, size) for size in parameter.shape)
        part = loaded.tensor(key, box, torch.float64)
        assert torch.equal(part, parameter[tuple(slice(*edge) for edge in box)].double()), key
    for group in loaded.structure.ties:
        assert torch.equal(loaded.tensor(group[0]), loaded.tensor(group[1]))


@pytest.mark.parametrize("name", ["jamba", "recurrent_gemma"])
def test_a_hybrid_whose_cache_is_refused_or_missing_is_sampled_without(name, monkeypatch):
    """transformers can't count the tokens in a cache without an attention layer; recurrent_gemma returns none."""
    built = build_meta(ModelConfig(name=name, layers=4, width=64, heads=4), 60, 32)
    module = materialise(built.module, built.recipe, 1)
    sample = generate_tokens(module, built.structure, [1, 2, 3], max_tokens=6, temperature=0)
    monkeypatch.setattr("meshwright.models.generate._cache_name", lambda _: None)
    assert sample == generate_tokens(module, built.structure, [1, 2, 3], max_tokens=6, temperature=0)


def test_forward_builds_a_cache_only_when_asked_and_an_export_asks_again(tmp_path: Path):
    built = build_meta(tiny("granitemoe"), 64, 32)
    assert "use_cache" not in built.structure.arguments  # so that nothing else can switch it off
    module = materialise(build_meta(tiny("granitemoe"), 64, 32).module, built.recipe, built.config.seed)
    tokens = torch.arange(8).unsqueeze(0)
    assert module(tokens).past_key_values is None
    assert module(tokens, use_cache=True).past_key_values is not None
    export_hf(built, [(key, built.tensor(key)) for key, _ in built.module.named_parameters()], tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"] is True
