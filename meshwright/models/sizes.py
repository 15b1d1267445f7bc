"""Maps size fields to attribute names of transformers' families, and computes the attributes that follow from them."""

from __future__ import annotations

from typing import Any

from meshwright.json_types import JsonObject

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
"""Sizes of feed-forward modules without a gate."""
EXPERT_FFN = (
    *("moe_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("shared_expert_intermediate_size", "shared_experts_intermediate_size"),
)
"""Feed-forward size of one expert, where it has its own attribute."""
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
"""Experts that one token visits."""
WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size", "local_attention_window", "window_size")
"""Window of local attention in tokens, or the size of its chunks."""
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")
"""Ids of tokens that belong to a tokenizer, not to a preset."""


_SPARSE_FROM = 704
"""Tokens up to which block-sparse attention with the usual sizes falls back to full attention."""


def size_of(plain: JsonObject, key: str) -> int | None:
    """Returns the value of a size field in a family's plain config, None when it has none."""
    return next((plain[name] for name in SYNONYMS[key] if isinstance(plain.get(name), int)), None)


def layer_count(plain: JsonObject) -> int:
    """Returns the number of layers in a family's plain config, 0 when it has none."""
    return size_of(plain, "layers") or 0


def preset_heads(width: int) -> int:
    """Returns a number of heads of about 64 elements each, at least 4, that divides the width."""
    return next(heads for heads in range(max(4, width // 64), 0, -1) if width % heads == 0)


def gated_ffn(width: int) -> int:
    """Returns 8/3 of the width in whole 64s: as many weights as an ungated feed-forward of 4 times the width.

    Source: Touvron et al., LLaMA (2023), section 2.2.
    """
    return max(64, round(width * 8 / 3 / 64) * 64)


def preset_ffn(plain: JsonObject, width: int) -> int:
    """Returns the feed-forward size that a preset has at a width, by whether a family's plain config names a gate."""
    names = [name for name in SYNONYMS["ffn"] if isinstance(plain.get(name), int)]
    return 4 * width if any(name in PLAIN_FFN for name in names) else gated_ffn(width)


def dependent_values(plain: JsonObject, values: JsonObject, preset: bool) -> dict[str, Any]:
    """Returns the attributes that must follow the sizes, of those that a family has.

    Args:
        plain: the family's config as plain values, before.
        values: new sizes, by the family's attribute names.
        preset: whether the sizes are ours (token ids then belong to no tokenizer) or a directory's.
    """
    width, heads = size_of(values, "width") or 256, size_of(values, "heads")
    derived: dict[str, Any] = {key: None for key in SPECIAL if preset}
    if "type_vocab_size" in plain and plain.get("pad_token_id") is not None:
        # these families count positions from the padding id on
        pad_id = derived["pad_token_id"] = plain["pad_token_id"]
        derived |= {key: value + pad_id + 1 for key, value in values.items() if key in SYNONYMS["context"]}
    # else a family of encoders reads the tokens that it must predict
    derived["is_decoder"] = True
    keeps_width_and_heads = not preset and (width, heads) == (size_of(plain, "width"), size_of(plain, "heads"))
    # a head size may differ from width / heads, which a directory's config states
    if keeps_width_and_heads and "head_dim" in plain:
        derived["head_dim"] = plain["head_dim"]
    # latent attention (qk_rope_head_dim) has sizes of its own below
    elif heads is not None and "qk_rope_head_dim" not in plain:
        derived |= {"head_dim": width // heads, "query_pre_attn_scalar": width // heads}
        derived["rotary_dim"] = min(plain.get("rotary_dim") or width // heads, width // heads)
    elif heads is not None and preset:
        derived |= latent_attention_values(plain, width, width // heads)
    # Mamba2: heads follow from the expanded width
    if {"expand", "num_heads", "head_dim"} <= plain.keys():
        size = min(plain["head_dim"], width)
        derived |= {"head_dim": size, "num_heads": width * plain["expand"] // size, "n_groups": 1}
    if preset:
        derived |= _state_space_values(plain, values, width)
        derived |= {"n_group": 1, "topk_group": 1, "num_expert_group": 1}
        derived |= {"first_k_dense_replace": layer_count(values) // 4}
        derived |= {"dim_head": width // heads} if heads else {}
        derived |= {"hidden_size_per_layer_input": min(plain.get("hidden_size_per_layer_input") or 0, width)}
        if set(plain.get("layer_types") or ()) == {"linear_attention"}:
            # its code asks a layer of attention for the row's length
            kinds = ("linear_attention", "full_attention")
            derived["layer_types"] = [kinds[layer_index % 2] for layer_index in range(layer_count(values))]
        # layers that reuse an earlier layer's keys need an earlier layer
        if plain.get("num_kv_shared_layers", 0) >= layer_count(values):
            derived["num_kv_shared_layers"] = 0
        derived |= {"n_shared_experts": 1} if plain.get("n_shared_experts", 0) is None else {}
    if plain.get("attention_type") == "block_sparse" and (size_of(values, "context") or 0) <= _SPARSE_FROM:
        # such rows get it anyway, by modules that are exchanged
        derived["attention_type"] = "original_full"
    if "attention_types" in plain:
        layers = layer_count(values)
        derived["attention_types"] = [[["global", "local"], layers // 2]] if layers % 2 == 0 else [[["global"], layers]]
    return {key: value for key, value in derived.items() if key in plain}


def _state_space_values(plain: JsonObject, values: JsonObject, width: int) -> dict[str, Any]:
    """Returns sizes of state-space modules: small heads and states, and chunks no longer than a row."""
    context = size_of(values, "context") or 256
    derived: dict[str, Any] = {
        key: min(plain[key], context) for key in ("chunk_size", "mamba_chunk_size") if isinstance(plain.get(key), int)
    }
    derived |= {
        key: min(plain[key], max(16, width // 4))
        for key in ("state_size", "mamba_d_state", "ssm_state_size")
        if isinstance(plain.get(key), int)
    }
    heads = size_of(values, "heads") or 4
    derived |= {"linear_num_key_heads": max(1, heads // 2), "linear_num_value_heads": heads, "linear_num_heads": heads}
    sizes = ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "swa_head_dim")
    derived |= dict.fromkeys(sizes, width // heads)
    derived |= {"swa_num_attention_heads": heads, "swa_num_key_value_heads": max(1, heads // 2)}
    if isinstance(plain.get("rel_extent"), int):
        derived["rel_extent"] = min(plain["rel_extent"], context)
    if isinstance(plain.get("mamba_head_dim"), int):
        head_size = min(plain["mamba_head_dim"], width // 4)
        derived |= {"mamba_head_dim": head_size, "mamba_num_heads": (plain.get("expand") or 2) * width // head_size}
    if isinstance(plain.get("mamba_d_head"), int):
        expand, head_size = plain.get("mamba_expand") or 2, min(plain["mamba_d_head"], width // 4)
        derived |= {"mamba_d_head": head_size, "mamba_n_heads": expand * width // head_size}
        derived |= {"mamba_d_ssm": expand * width}
    return derived


def latent_attention_values(plain: JsonObject, width: int, head_size: int) -> dict[str, Any]:
    """Returns sizes of latent attention: half of each head is rotary."""
    rotary_size = max(2, head_size // 4 * 2)
    derived = {
        "qk_rope_head_dim": rotary_size,
        "qk_nope_head_dim": head_size,
        "v_head_dim": head_size,
        "qk_head_dim": head_size + rotary_size,
    }
    derived |= {"head_dim": rotary_size, "index_n_heads": width // head_size, "index_head_dim": 2 * head_size}
    lora_ranks = {
        key: min(plain[key], width) for key in ("q_lora_rank", "kv_lora_rank") if isinstance(plain.get(key), int)
    }
    return derived | lora_ranks
