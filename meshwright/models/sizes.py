"""What transformers' families call their sizes, and what else must change with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SYNONYMS: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    "width": ("hidden_size", "n_embd", "d_model", "emb_dim", "word_embed_proj_dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "ffn": (
        *("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "dense_intermediate_size"),
        *("dim_ff", "dff"),
    ),
    "vocab": ("vocab_size", "vocab_size_per_layer_input"),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
}
"""For each size field, the attributes that carry it; all that a family has are set."""

DROPOUTS = (
    *("attn_pdrop", "resid_pdrop", "embd_pdrop", "emb_pdrop", "dropout", "attention_dropout", "hidden_dropout"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout", "residual_dropout"),
    *("resid_dropout", "embed_dropout", "embedding_dropout", "mlp_dropout", "dropout_p"),
)
"""Attributes that are probabilities of a dropout."""

PLAIN_FFN = ("n_inner", "ffn_dim", "decoder_ffn_dim")
"""Feed-forward sizes of parts without a gate."""
EXPERT_FFN = (
    *("moe_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("shared_expert_intermediate_size", "shared_experts_intermediate_size"),
)
"""Feed-forward size of one expert, where it has its own attribute."""
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
"""Experts that one token visits."""
WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size", "local_attention_window", "window_size")
"""Tokens that a layer of local attention looks back on, or the size of the chunks in which it looks."""
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")
"""Ids of tokens that belong to a tokenizer, not to a preset."""


_SPARSE_FROM = 704
"""Tokens up to which block-sparse attention with the usual sizes falls back to full attention."""


def size_of(plain: Mapping[str, Any], key: str) -> int | None:
    """Returns the value of a size field in a family's plain config, None when it states none."""
    return next((plain[name] for name in SYNONYMS[key] if isinstance(plain.get(name), int)), None)


def layer_count(plain: Mapping[str, Any]) -> int:
    """Returns the number of layers in a family's plain config, 0 when it states none."""
    return size_of(plain, "layers") or 0


def preset_heads(width: int) -> int:
    """Returns heads of about 64 elements, at least 4, that divide the width."""
    return next(heads for heads in range(max(4, width // 64), 0, -1) if width % heads == 0)


def gated_ffn(width: int) -> int:
    """Returns 8/3 of the width in whole 64s: as many weights as a plain part of 4 times the width.

    Source: Touvron et al., LLaMA (2023), section 2.2.
    """
    return max(64, round(width * 8 / 3 / 64) * 64)


def dependent_values(plain: Mapping[str, Any], values: Mapping[str, Any], preset: bool) -> dict[str, Any]:
    """Returns the attributes that must follow the sizes, of those that a family has.

    Args:
        plain: the family's config as plain values, before.
        values: new sizes, by the family's attribute names.
        preset: whether the sizes are ours (token ids then belong to no tokenizer) or a directory's.
    """
    width, heads = size_of(values, "width") or 256, size_of(values, "heads")
    found: dict[str, Any] = {key: None for key in SPECIAL if preset}
    if "type_vocab_size" in plain and plain.get("pad_token_id") is not None:
        pad = found["pad_token_id"] = plain["pad_token_id"]  # these count positions from what isn't padding
        found |= {key: value + pad + 1 for key, value in values.items() if key in SYNONYMS["context"]}
    found["is_decoder"] = True  # else a family of encoders reads the tokens that it must predict
    same = not preset and (width, heads) == (size_of(plain, "width"), size_of(plain, "heads"))
    if same and "head_dim" in plain:
        found["head_dim"] = plain["head_dim"]
    elif heads is not None and "qk_rope_head_dim" not in plain:
        found |= {"head_dim": width // heads, "query_pre_attn_scalar": width // heads}
        found["rotary_dim"] = min(plain.get("rotary_dim") or width // heads, width // heads)
    elif heads is not None and preset:
        found |= _latent(plain, width, width // heads)
    if {"expand", "num_heads", "head_dim"} <= plain.keys():
        size = min(plain["head_dim"], width)
        found |= {"head_dim": size, "num_heads": width * plain["expand"] // size, "n_groups": 1}
    if preset:
        found |= _scans(plain, values, width)
        found |= {"n_group": 1, "topk_group": 1, "num_expert_group": 1}
        found |= {"first_k_dense_replace": layer_count(values) // 4}
        found |= {"dim_head": width // heads} if heads else {}
        found |= {"hidden_size_per_layer_input": min(plain.get("hidden_size_per_layer_input") or 0, width)}
        if set(plain.get("layer_types") or ()) == {"linear_attention"}:
            kinds = ("linear_attention", "full_attention")  # its code asks a layer of attention for the row's length
            found["layer_types"] = [kinds[place % 2] for place in range(layer_count(values))]
        if plain.get("num_kv_shared_layers", 0) >= layer_count(values):
            found["num_kv_shared_layers"] = 0
        found |= {"n_shared_experts": 1} if plain.get("n_shared_experts", 0) is None else {}
    if plain.get("attention_type") == "block_sparse" and (size_of(values, "context") or 0) <= _SPARSE_FROM:
        found["attention_type"] = "original_full"  # such rows get it anyway, by modules that are exchanged
    if "attention_types" in plain:
        layers = layer_count(values)
        found["attention_types"] = [[["global", "local"], layers // 2]] if layers % 2 == 0 else [[["global"], layers]]
    return {key: value for key, value in found.items() if key in plain}


def _scans(plain: Mapping[str, Any], values: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Sizes of state-space parts: small heads and states, and chunks no longer than a row."""
    context = size_of(values, "context") or 256
    found: dict[str, Any] = {
        key: min(plain[key], context) for key in ("chunk_size", "mamba_chunk_size") if isinstance(plain.get(key), int)
    }
    found |= {
        key: min(plain[key], max(16, width // 4))
        for key in ("state_size", "mamba_d_state", "ssm_state_size")
        if isinstance(plain.get(key), int)
    }
    heads = size_of(values, "heads") or 4
    found |= {"linear_num_key_heads": max(1, heads // 2), "linear_num_value_heads": heads, "linear_num_heads": heads}
    sizes = ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "swa_head_dim")
    found |= dict.fromkeys(sizes, width // heads)
    found |= {"swa_num_attention_heads": heads, "swa_num_key_value_heads": max(1, heads // 2)}
    if isinstance(plain.get("rel_extent"), int):
        found["rel_extent"] = min(plain["rel_extent"], context)
    if isinstance(plain.get("mamba_head_dim"), int):
        head = min(plain["mamba_head_dim"], width // 4)
        found |= {"mamba_head_dim": head, "mamba_num_heads": (plain.get("expand") or 2) * width // head}
    if isinstance(plain.get("mamba_d_head"), int):
        expand, head = plain.get("mamba_expand") or 2, min(plain["mamba_d_head"], width // 4)
        found |= {"mamba_d_head": head, "mamba_n_heads": expand * width // head}
        found |= {"mamba_d_ssm": expand * width}
    return found


def _latent(plain: Mapping[str, Any], width: int, head: int) -> dict[str, Any]:
    """Sizes of latent attention: half of each head turns with the position."""
    turned = max(2, head // 4 * 2)
    found = {"qk_rope_head_dim": turned, "qk_nope_head_dim": head, "v_head_dim": head, "qk_head_dim": head + turned}
    found |= {"head_dim": turned, "index_n_heads": width // head, "index_head_dim": 2 * head}
    ranks = {key: min(plain[key], width) for key in ("q_lora_rank", "kv_lora_rank") if isinstance(plain.get(key), int)}
    return found | ranks
