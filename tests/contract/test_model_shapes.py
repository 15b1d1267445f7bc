"""A model's shape, read off its modules, is the closed form's: a plan may start from either."""

from __future__ import annotations

import pytest

from meshwright.models.analysis.table import sharding_table
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.spec.model_shape import ModelShape
from tests.tiers import further

LLAMA = {"layers": 3, "width": 256, "heads": 4, "vocab": 512}
CASES = {
    "llama": TableSizes(name="llama", **LLAMA, ffn=704),
    "qwen3": TableSizes(name="qwen3", **LLAMA, ffn=704),
    "gpt2": TableSizes(name="gpt2", **LLAMA, gated=False, positions=128, tied=True),
    "mixtral": TableSizes(name="mixtral", **LLAMA, experts=4, active_experts=2, expert_ffn=704),
}


def measured(name: str) -> ModelShape:
    config = ModelConfig(name=name, layers=3, width=256, heads=4)
    return measure_shape(build_meta(config, vocab=512, context=128))


@pytest.mark.parametrize("name", further(list(CASES), (0, 3)))
def test_the_closed_form_is_what_the_modules_are(name: str) -> None:
    sizes = CASES[name]
    closed, real = shape_from_sizes(sizes), measured(name)
    assert len(closed.blocks) == len(real.blocks) == 3
    if name != "qwen3":  # which norms each head's queries and keys besides
        assert closed.parameters == real.parameters and closed.layer_parameters == real.layer_parameters
    assert closed.matmul_parameters == real.matmul_parameters
    for ours, found in zip(closed.blocks, real.blocks):
        assert ours.forward_flops_per_token() == found.forward_flops_per_token()
        for split in ("columns", "rows", ""):
            weights = [
                sum(item.inner * item.outer for item in block.products if item.split == split)
                for block in (ours, found)
            ]
            assert weights[0] == weights[1], split
        for field in ("width", "heads", "kv_heads", "head_size", "ffn", "gated", "norm", "experts", "active_experts",
                      "expert_ffn", "expert_parameters"):  # fmt: skip
            assert getattr(ours, field) == getattr(found, field), field


def test_low_ranks_are_not_split() -> None:
    block = measured("deepseek_v3").blocks[0]
    assert block.latent == sum(item.outer for item in block.products if "_a_proj" in item.name) > 0
    assert all(item.split == "" for item in block.products if "_a_proj" in item.name)


def test_windows_follow_the_layers() -> None:
    config = ModelConfig(name="gemma3_text", layers=12, width=256, heads=4, overrides={"sliding_window": 32})
    blocks = measure_shape(build_meta(config, vocab=512, context=128)).blocks
    assert {block.window for block in blocks} == {0, 32}
    assert ModelShape.from_json(measured("mixtral").to_json()) == measured("mixtral")


@pytest.mark.parametrize(
    "name", further(["gemma3", "llama", "olmo2", "olmo3", "gemma2", "glm4", "exaone4", "gpt_neox"])
)
def test_a_norm_is_behind_the_products_where_a_layer_saves_something_behind_them(name: str) -> None:
    """The sizes know it by names, the sharding table by counting the tensors that a layer saves while it runs."""
    built = build_meta(ModelConfig(name=name, layers=2, width=32, heads=4, ffn=64), vocab=64, context=16)
    table = sharding_table(built, 2)
    assert table is not None
    counted = {layer: rows.saves_after_sums for layer, rows in table.layers.items()}
    named = dict(zip(built.structure.layers, (block.norm_behind for block in measure_shape(built).blocks), strict=True))
    assert counted == named
    assert any(counted.values()) == (name not in ("llama", "gpt_neox"))
