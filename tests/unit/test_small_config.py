"""A clone of a model from a directory is as narrow as that of a family's preset, so that a trial takes as little."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from transformers import DeepseekV3Config, LlamaConfig, OPTConfig, PreTrainedConfig

from meshwright.models.analysis.clone import make_clone
from meshwright.models.analysis.small_config import narrow_config, shrink_config
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig

HEADS = 16
WIDE: dict[str, tuple[PreTrainedConfig, float]] = {
    "llama": (
        LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=HEADS,
                    num_key_value_heads=4, vocab_size=1000),
        1.5e6,
    ),
    "opt": (
        OPTConfig(hidden_size=4096, ffn_dim=16384, num_hidden_layers=32, num_attention_heads=HEADS, vocab_size=1000,
                  word_embed_proj_dim=4096),
        2e6,
    ),
    "deepseek_v3": (
        DeepseekV3Config(hidden_size=4096, intermediate_size=14336, num_hidden_layers=12, num_attention_heads=HEADS,
                         num_key_value_heads=HEADS, vocab_size=1000, n_routed_experts=128, n_group=8, topk_group=4,
                         num_experts_per_tok=4, moe_intermediate_size=2048),
        4e6,
    ),
}  # fmt: skip
"""A config of a wide model, and the weights that its clone may have."""


def wide_model(name: str, folder: Path) -> BuiltModel:
    WIDE[name][0].save_pretrained(folder)
    return build_meta(ModelConfig(name=str(folder), fresh=True))


@pytest.mark.parametrize("name", list(WIDE))
def test_a_directorys_clone_is_narrow_throughout_and_runs(name: str, tmp_path: Path) -> None:
    built = wide_model(name, tmp_path)
    clone = make_clone(built)
    assert not clone.full_size
    assert sum(parameter.numel() for parameter in clone.module.parameters()) < WIDE[name][1]
    assert clone.run(rows=2).isfinite().all()
    small = narrow_config(built)
    assert (small.heads, small.width) == (HEADS, 8 * HEADS)
    proven = build_meta(shrink_config(built.config), 64, 64)
    assert sum(parameter.numel() for parameter in proven.module.parameters()) < WIDE[name][1]


def test_routing_by_groups_keeps_its_groups_with_experts_to_choose_from(tmp_path: Path) -> None:
    built = wide_model("deepseek_v3", tmp_path)
    hf = build_meta(narrow_config(built), 64, 64).hf_config
    assert hf is not None
    assert (hf.n_group, hf.topk_group, hf.num_experts_per_tok) == (8, 4, 2)
    assert hf.n_routed_experts == 32
    kinds = [type(built.module.get_submodule(layer).mlp).__name__ for layer in built.structure.layers]
    small = build_meta(narrow_config(built), 64, 64)
    found = [type(small.module.get_submodule(layer).mlp).__name__ for layer in small.structure.layers]
    assert set(pairwise(found)) == set(pairwise(kinds)), "every kind of layer beside its neighbours"
