"""Shapes of published models from a row's columns, and what public configurations say beyond them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from meshwright.planner.closed_form import Latent, TableSizes, shape_from_sizes
from meshwright.spec.model_shape import ModelShape

Row = Mapping[str, str]
PLAIN = ("gpt", "mpt", "bloom", "opt", "neo", "megatron")
"""Families with a plain feed-forward part, LayerNorm and a tied head."""
DEEPSEEK3 = Latent(query_rank=1536, kv_rank=512, rope_size=64, nope_size=128, value_size=128)
"""Source: config.json of deepseek-ai/DeepSeek-V3 and V2 (the same low-rank sizes)."""
FAMILIES: dict[str, dict[str, object]] = {
    "deepseekv3": {"latent": DEEPSEEK3, "shared_ffn": 2048, "expert_ffn": 2048, "dense_layers": 3},
    "deepseekv2": {"latent": DEEPSEEK3, "shared_ffn": 3072, "expert_ffn": 1536, "dense_layers": 1},
    "qwen3": {"head_size": 128},
    "gptoss": {"head_size": 64, "window": 128, "gated": True, "biases": True, "sinks": True},
}
"""What rows don't carry. Source: the models' public config.json files."""
TRUNCATED_DENSE = 1
"""First layers without experts that a truncated mixture keeps. Source: SimuMax model configs."""


MOST = 1e15
"""Largest number that a column may hold."""
NOTHING = ("", "-", "--", "none", "null", "nan", "n/a", "na", "?", "false", "auto", "default", "unknown", "not stated")
"""What stands in a column that says nothing."""
MOST_LAYERS = 4096
"""Of a model that is priced; beyond, a column holds something else."""


class Unpriced(Exception):
    """Why a row can't be predicted."""


def number(row: Row, key: str, default: float | None = None) -> float:
    """Returns a column as a number; the first one in it where there is text around.

    Raises:
        Unpriced: when it is empty and there is no default, has no number in it, or one that nothing has.
    """
    text = (row.get(key) or "").replace(",", "").strip()
    found = re.search(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", text.lower())
    if found:
        value = float(found[0])
        if not 0 <= value <= MOST:
            raise Unpriced(f"{key} is out of range")
        return value
    if default is None or text.lower() not in NOTHING:
        raise Unpriced(f"{key} isn't a number" if text else f"no {key}")
    return default


def whole(row: Row, key: str, default: int | None = None) -> int:
    """Returns a column as a whole number; see `number`."""
    return round(number(row, key, default))


def counted(row: Row, key: str, default: int | None = None) -> int:
    """Returns a column as a whole number of at least 1; see `number`.

    Raises:
        Unpriced: when it is less.
    """
    value = whole(row, key, default)
    if value < 1:
        raise Unpriced(f"{key} is out of range")
    return value


def family(row: Row) -> str:
    """Returns the family of the row's model, letters and digits only."""
    return re.sub(r"[^a-z0-9]", "", row.get("model", "").lower())


def is_plain(row: Row) -> bool:
    """Whether the model is GPT's kind rather than Llama's."""
    name = family(row)
    return any(word in name for word in PLAIN) and "gptoss" not in name


def stated_parameters(row: Row) -> float:
    """Returns the billions of parameters that the row states, in its column or its model's name; 0 for none."""
    if row.get("params_b"):
        return number(row, "params_b")
    found = re.search(r"(\d+(?:\.\d+)?)\s*[GB]\b", row.get("model", ""))
    return float(found[1]) if found else 0.0


def shape_of(row: Row) -> ModelShape:
    """Returns the shape of a row's model.

    Raises:
        Unpriced: when a size is missing.
    """
    options = _options(row)
    if "tied" in options:
        return _shape(TableSizes(**options))  # type: ignore[arg-type]
    tied, untied = (_shape(TableSizes(**options, tied=choice)) for choice in (True, False))  # type: ignore[arg-type]
    stated = stated_parameters(row) * 1e9
    near = abs(tied.parameters - stated) < abs(untied.parameters - stated)
    return tied if stated and near else untied


@lru_cache(maxsize=512)
def _shape(sizes: TableSizes) -> ModelShape:
    return shape_from_sizes(sizes)


def _options(row: Row) -> dict[str, object]:
    width, heads = counted(row, "hidden"), counted(row, "heads")
    if counted(row, "layers") > MOST_LAYERS:
        raise Unpriced("layers is out of range")
    plain, name = is_plain(row), family(row)
    options: dict[str, object] = {
        "name": row.get("model", ""),
        "layers": whole(row, "layers"),
        "width": width,
        "heads": heads,
        "kv_heads": counted(row, "kv_heads", heads),
        "vocab": _padded(row),
        "gated": not plain,
        **_feed_forward(row, plain, width),
    }
    if plain:
        options |= _plain(row, name)
    elif row.get("tie_embeddings"):
        options["tied"] = row["tie_embeddings"] == "True"
    for key, facts in FAMILIES.items():
        if name.startswith(key):
            options |= {what: value for what, value in facts.items() if what not in ("dense_layers",)}
            if "dense_layers" in facts:
                cut = "truncated" in name
                options["dense_layers"] = TRUNCATED_DENSE if cut else facts["dense_layers"]
    return options


def _plain(row: Row, name: str) -> dict[str, object]:
    """GPT's kind: MPT has no biases and no dropout, BLOOM no positions."""
    mosaic, bloom = name.startswith("mpt"), whole(row, "vocab", 0) > 200_000
    return {
        "tied": True,
        "positions": 0 if bloom else whole(row, "seq_len", 2048),
        "biases": not mosaic,
        "dropout": not mosaic and not bloom and "Sailor" not in row.get("framework", ""),
    }


def _padded(row: Row) -> int:
    """The vocabulary as the run had it: Megatron pads to a multiple of 128 x tp; vTrain's model cuts it as it is.

    Source: VIA-Research/vTrain, src/model/gpt_modeling.py, ShardedGptEmbeddings.
    """
    vocab, tp = whole(row, "vocab"), whole(row, "tp", 1)
    if vocab < 1:
        raise Unpriced("vocab is out of range")
    if "egatron" in row.get("framework", "") and vocab % 128:
        if "vTrain" in row.get("source_ref", ""):
            return max(1, vocab // tp) * tp
        step = 128 * tp
        return -(-vocab // step) * step
    return vocab


def _feed_forward(row: Row, plain: bool, width: int) -> dict[str, object]:
    text = row.get("ffn_hidden") or ""
    values = {word: int(size) for size, word in re.findall(r"(\d+)\s*(dense|expert)?", text)}
    found: dict[str, object] = {"ffn": values.get("dense", values.get("", 4 * width if plain else 0))}
    if row.get("experts"):
        found |= {"experts": whole(row, "experts"), "active_experts": whole(row, "topk")}
        found["expert_ffn"] = values.get("expert", values.get("", 0))
        found["dense_layers"] = 0
    if not found["ffn"] and not row.get("experts"):
        raise Unpriced("no ffn_hidden")
    return found
