"""Counts what public models' own modules keep and move, beside the sizes by which they are planned.

    python -m benchmarks.count_presets                 # 15 minutes of a core; writes planner/preset_bytes.toml
    python -m benchmarks.count_presets qwen3-8b ...    # these alone

Each is built by transformers at its sizes, without weights, and runs on fake tensors as `meshwright plan` runs a model
that is given by its family. A model whose family transformers hasn't, or whose parameters there aren't those of its
sizes, is left out and named: it goes on being planned as a standard transformer.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from meshwright.errors import MeshwrightError
from meshwright.jobs.model_reading import make_measure
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.preset_bytes import FIGURES, FILE, CountedLayer, CountedModel, read_counted
from meshwright.planner.presets import FILE as PRESETS
from meshwright.planner.presets import presets
from meshwright.spec.layout import Layout
from meshwright.spec.model_shape import ModuleWork, Operator

FAMILIES = {
    "gpt2": "gpt2", "gpt-j": "gptj", "gpt-neox": "gpt_neox", "pythia": "gpt_neox", "opt": "opt", "bloom": "bloom",
    "falcon": "falcon", "mpt": "mpt", "nemotron": "nemotron", "llama": "llama", "tinyllama": "llama",
    "smollm2": "llama", "yi": "llama", "deepseek-67b": "llama", "mistral": "mistral", "mixtral": "mixtral",
    "qwen2.5": "qwen2", "qwen3": "qwen3", "qwen3-30b-a3b": "qwen3_moe", "qwen3-235b-a22b": "qwen3_moe",
    "gemma": "gemma", "gemma-2-": "gemma2", "phi-2": "phi", "phi-3": "phi3", "phi-4": "phi3", "glm-4": "glm",
    "command-r": "cohere", "olmo-2": "olmo2", "olmoe": "olmoe", "dbrx": "dbrx", "gpt-oss": "gpt_oss",
    "deepseek-v2": "deepseek_v2", "deepseek-v3": "deepseek_v3", "kimi": "deepseek_v3",
}  # fmt: skip
"""The family in transformers of each model, by how its name begins; the longest beginning counts."""
LONGEST = 4096
"""Tokens of the longer of two rows that are counted, of which the other has a quarter: two points of what grows with a
row's length, as unfused scores do."""
SHORT = 256
"""Tokens of a row whose scores are a small part of any moment's bytes."""
NEAR = 0.006
"""Relative difference of parameters up to which a family has the preset's sizes."""


def family_of(name: str) -> str | None:
    """Returns the family of a public model, None where transformers has none."""
    beginnings = [beginning for beginning in FAMILIES if name.startswith(beginning)]
    return FAMILIES[max(beginnings, key=len)] if beginnings else None


def config_of(sizes: TableSizes, family: str) -> ModelConfig:
    """Returns the config with which a family is built at these sizes."""
    known = CONFIG_MAPPING[family]().to_dict()
    fields: dict[str, Any] = {
        "head_dim": sizes.head_size or None,
        "tie_word_embeddings": sizes.tied,
        "moe_intermediate_size": sizes.expert_ffn or None,
        "num_experts_per_tok": sizes.active_experts or None,
        "first_k_dense_replace": sizes.dense_layers if sizes.experts else None,
        "n_shared_experts": sizes.shared_ffn // sizes.expert_ffn if sizes.expert_ffn else None,
        "n_group": sizes.expert_groups or None,
        "topk_group": sizes.chosen_groups or None,
        "sliding_window": sizes.window or None,
    }
    latent = sizes.latent
    if latent is not None:
        fields |= {"q_lora_rank": latent.query_rank or None, "kv_lora_rank": latent.kv_rank}
        fields |= {"qk_rope_head_dim": latent.rope_size, "qk_nope_head_dim": latent.nope_size}
        fields |= {"v_head_dim": latent.value_size, "head_dim": latent.rope_size}
    overrides = {name: value for name, value in fields.items() if name in known and value is not None}
    if latent is not None and not latent.query_rank:
        overrides["q_lora_rank"] = None
    # A mixture without dense layers has one size of feed-forward parts, and its family may have no name of its own.
    has_own = "moe_intermediate_size" in known
    ffn = sizes.expert_ffn if sizes.experts and not has_own else sizes.ffn
    is_usual = ffn in (0, 4 * sizes.width)  # some families have no other, and no name for it
    return ModelConfig(
        name=family,
        layers=sizes.layers,
        width=sizes.width,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads or None,
        ffn=None if is_usual else ffn,
        experts=sizes.experts or None,
        tie=sizes.tied,
        overrides=overrides,
    )


def count_model(sizes: TableSizes, family: str) -> list[CountedModel]:
    """Runs a public model's modules on fake tensors; returns one length of rows, or two where bytes depend on it.

    Raises:
        MeshwrightError: when the family can't be built at these sizes, or has other parameters then.
    """
    longest = min(sizes.positions or LONGEST, LONGEST)
    built = build_meta(config_of(sizes, family), vocab=sizes.vocab, context=longest)
    config: Any = built.module.config
    if sizes.head_size and not hasattr(CONFIG_MAPPING[family](), "head_dim"):
        # A config.json may state what the family's class doesn't name.
        with tempfile.TemporaryDirectory() as folder:
            stated_fields = config.to_dict() | {"head_dim": sizes.head_size}
            (Path(folder) / "config.json").write_text(json.dumps(stated_fields), encoding="utf-8")
            built = build_meta(ModelConfig(name=folder, fresh=True), vocab=None, context=longest)
    found, stated = measure_shape(built).parameters, shape_from_sizes(sizes).parameters
    if abs(found / stated - 1.0) > NEAR:
        raise MeshwrightError(f"{family} has {found / 1e9:.2f} G parameters at sizes of {stated / 1e9:.2f} G")
    measures = {tokens: make_measure(built, tokens, "bf16") for tokens in (SHORT, longest // 4, longest)}
    short, long = (_count(measures[tokens], tokens) for tokens in (longest // 4, longest))
    if sizes.latent is not None:
        return [_without_scores(short, long, _count(measures[SHORT], SHORT))]
    return [long] if short.is_near(long) else [short, long]


def _without_scores(short: CountedModel, long: CountedModel, shortest: CountedModel) -> CountedModel:
    """Returns the bytes without the scores of attention, which grow with a row's length.

    Cores have no fused kernel where values are narrower than queries, as in multi-head latent attention; GPUs have.
    What is at work at once is that of the moment that has most, so it lies on no line, and is taken from rows so short
    that their scores are a small part of it.
    """
    flat = short.at(0, long)
    layers = (
        dataclasses.replace(layer, working=few.working, compiled_working=few.compiled_working)
        for layer, few in zip(flat.layers, shortest.layers, strict=True)
    )
    return dataclasses.replace(flat, tokens=long.tokens, layers=tuple(layers))


def _count(measure: Any, tokens: int) -> CountedModel:
    work, compiled = (measure(Layout(compile=choice), 1) for choice in (False, True))
    if work is None or compiled is None:
        raise MeshwrightError("its code needs values")

    def moved(operators: Sequence[Operator]) -> float:
        return sum(operator.bytes for operator in operators if operator.kind == "element") / tokens

    def layer(count: int, eager: ModuleWork, fused: ModuleWork) -> CountedLayer:
        return CountedLayer(
            count=count,
            saved=tuple(size / tokens for size in eager.kept.saved),
            working=tuple(size / tokens for size in eager.kept.working),
            compiled_saved=tuple(size / tokens for size in fused.kept.saved),
            compiled_working=tuple(size / tokens for size in fused.kept.working),
            moved=(moved(eager.forward), moved(eager.backward)),
            compiled_moved=(moved(eager.fused_forward), moved(eager.fused_backward)),
        )

    layers = tuple(map(layer, work.counts, work.layers, compiled.layers))
    return CountedModel(tokens=tokens, outside=work.rest.kept.saved[0] / tokens, layers=layers)


def main(names: Sequence[str]) -> int:
    """Runs the command."""
    counted: dict[str, Sequence[CountedModel]] = {}
    own_names = tomllib.loads(PRESETS.read_text(encoding="utf-8"))  # without aliases
    chosen = {name: presets()[name].sizes for name in own_names if not names or name in names}
    for name, sizes in chosen.items():
        family = family_of(name)
        try:
            if family is None:
                raise MeshwrightError("transformers has no such family")
            counted[name] = count_model(sizes, family)
        except MeshwrightError as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
            continue
        print(name, file=sys.stderr)
    before = dict(read_counted()) if names and FILE.exists() else {}
    together = before | counted
    ordered = {name: together[name] for name in own_names if name in together}
    FILE.write_text(_text(ordered), encoding="utf-8")
    return 0


def _text(counted: Mapping[str, Sequence[CountedModel]]) -> str:
    """Returns the package's data file."""
    lines = ["# Bytes a token of public models, written by benchmarks/count_presets.py; planner/preset_bytes.py."]
    for name, lengths in counted.items():
        lines += ["", f'["{name}"]', "rows = ["]
        for model in lengths:
            lines.append(f"    {{ tokens = {model.tokens}, outside = {model.outside:.0f}, layers = [")
            for layer in model.layers:
                figures = [f"{key} = [{', '.join(f'{x:.0f}' for x in getattr(layer, key))}]" for key in FIGURES]
                lines.append(f"        {{ count = {layer.count}, {', '.join(figures)} }},")
            lines.append("    ] },")
        lines.append("]")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
