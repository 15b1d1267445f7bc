"""Sizes of well-known models, to begin a question with. Source: their papers and public config.json files."""

from __future__ import annotations

from collections.abc import Mapping

_LLAMA3 = {"kv_heads": 8, "vocab": 128256}
_QWEN3 = {"head_size": 128, "vocab": 151936}

PRESETS: Mapping[str, Mapping[str, int | bool]] = {
    "GPT-2 1.5B": {"layers": 48, "width": 1600, "heads": 25, "vocab": 50304, "gated": False, "tied": True},
    "GPT-3 175B": {"layers": 96, "width": 12288, "heads": 96, "vocab": 51200, "gated": False, "tied": True},
    "Llama 3 8B": {"layers": 32, "width": 4096, "heads": 32, "ffn": 14336, **_LLAMA3},
    "Llama 3 70B": {"layers": 80, "width": 8192, "heads": 64, "ffn": 28672, **_LLAMA3},
    "Llama 3 405B": {"layers": 126, "width": 16384, "heads": 128, "ffn": 53248, **_LLAMA3},
    "Qwen3 8B": {"layers": 36, "width": 4096, "heads": 32, "kv_heads": 8, "ffn": 12288, **_QWEN3},
    "Qwen3 30B-A3B": {
        "layers": 48, "width": 2048, "heads": 32, "kv_heads": 4, "experts": 128, "active_experts": 8,
        "expert_ffn": 768, **_QWEN3,
    },
    "Mixtral 8x7B": {
        "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "vocab": 32000, "experts": 8, "active_experts": 2,
        "expert_ffn": 14336,
    },
}  # fmt: skip
"""Name to the sizes of `PlanQuestion`; the others are 0, ``gated`` true and ``tied`` false."""


def preset_sizes(name: str) -> dict[str, int | bool]:
    """Returns all sizes of a preset that a `PlanQuestion` has."""
    unset = dict.fromkeys(("kv_heads", "head_size", "ffn", "experts", "active_experts", "expert_ffn", "shared_ffn"), 0)
    return {**unset, "dense_layers": 0, "gated": True, "tied": False, **PRESETS[name]}
