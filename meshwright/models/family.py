"""Our size names onto the attribute names of each transformers family, with what depends on them kept consistent."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshwright.errors import ConfigError, nearest
from meshwright.models.config import ModelConfig

SYNONYMS: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    "width": ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "dense_intermediate_size"),
    "vocab": ("vocab_size",),
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

_PLAIN_FFN = ("n_inner", "ffn_dim", "decoder_ffn_dim")
_EXPERT_FFN = ("moe_intermediate_size", "expert_ffn_hidden_size")
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")


def family_config(config: ModelConfig, vocab: int | None, context: int | None) -> PreTrainedConfig:
    """Builds the transformers config of a model type in the wanted size.

    Args:
        config: a config whose ``name`` is a model type.
        vocab: vocabulary where the config is silent.
        context: longest sequence in tokens where the config is silent.

    Raises:
        ConfigError: for an unknown type, an unknown override, or a setting that the family hasn't.
    """
    if config.name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        hint = nearest(config.name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        hint = hint if hint.startswith("; did") else "; transformers' causal-LM types are known, such as gpt2 or llama"
        raise ConfigError(f"model.name = '{config.name}' is no directory, function or model type{hint}")
    kind = CONFIG_MAPPING[config.name]
    try:
        default = kind()
    except Exception as error:  # families whose config has required parts
        raise ConfigError(f"model.name = '{config.name}': transformers can't make its config alone: {error}") from error
    return _sized(config, default, vocab, context, preset=True)


def directory_config(config: ModelConfig, vocab: int | None, context: int | None) -> PreTrainedConfig:
    """Reads the transformers config of a directory, with ``fresh`` resized to the fields that are set.

    Raises:
        ConfigError: when there is no readable ``config.json``, or as `family_config`.
    """
    try:
        found = AutoConfig.from_pretrained(config.name, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.name = '{config.name}' holds no transformers config: {error}") from error
    if config.fresh:
        return _sized(config, found, vocab, context, preset=False)
    _apply(found.get_text_config(decoder=True), {name: config.dropout for name in DROPOUTS})
    _override(config, found)
    return found


def _sized(
    config: ModelConfig, default: PreTrainedConfig, vocab: int | None, context: int | None, preset: bool
) -> PreTrainedConfig:
    """Makes a config again from its class, so that whatever its constructor derives fits the new sizes."""
    text = default.get_text_config(decoder=True)
    known = set(text.to_dict())
    for key in config.sizes:
        if not known & set(SYNONYMS[key]):
            raise ConfigError(f"model.{key} = {config.sizes[key]} has no effect on '{config.name}'; drop it")
    if config.dropout and not known & set(DROPOUTS):
        raise ConfigError(f"model.dropout = {config.dropout} has no effect on '{config.name}': it has none; drop it")
    values = _values(config, text, known, vocab, context, preset)
    values |= {key: None for key in _SPECIAL if key in known and preset}
    values |= {key: config.dropout for key in DROPOUTS if key in known}
    values |= {} if config.tie is None else {"tie_word_embeddings": config.tie}
    base = {} if preset else {key: item for key, item in text.to_dict().items() if key not in _derived(text)}
    try:
        sized = type(text)(**(base | values | _known_overrides(config, known)))
    except Exception as error:
        raise ConfigError(f"model '{config.name}' refuses these sizes: {error}") from error
    if text is default:
        return sized
    part = next(key for key, item in vars(default).items() if item is text)
    setattr(default, part, sized)
    if config.tie is not None:
        default.tie_word_embeddings = config.tie
    return default


def _derived(text: PreTrainedConfig) -> set[str]:
    lists = {key for key, item in text.to_dict().items() if isinstance(item, list) and len(item) == _layers(text)}
    return lists | {"head_dim", "transformers_version", "model_type", "architectures"}


def _layers(text: PreTrainedConfig) -> int:
    return next((getattr(text, key) for key in SYNONYMS["layers"] if isinstance(getattr(text, key, None), int)), 0)


def _values(
    config: ModelConfig, text: PreTrainedConfig, known: set[str], vocab: int | None, context: int | None, preset: bool
) -> dict[str, Any]:
    """Attribute values for every size, our preset where nothing is set."""

    def current(key: str) -> int | None:
        return next((getattr(text, name) for name in SYNONYMS[key] if getattr(text, name, None) is not None), None)

    def pick(key: str, otherwise: int | None) -> int | None:
        return getattr(config, key) or (otherwise if preset else current(key))

    width = pick("width", 256) or 256
    heads = pick("heads", _preset_heads(width)) or 1
    sizes = {
        "layers": pick("layers", 4),
        "width": width,
        "heads": heads,
        "kv_heads": config.kv_heads or (heads if preset else min(heads, current("kv_heads") or heads)),
        "vocab": config.vocab or vocab or pick("vocab", 512),
        "context": config.context or context or pick("context", 256),
        "experts": pick("experts", 4),
    }
    values = {name: size for key, size in sizes.items() for name in SYNONYMS[key] if name in known and size}
    gated, plain = max(64, round(width * 8 / 3 / 64) * 64), 4 * width
    for name in SYNONYMS["ffn"]:
        if name in known:
            values[name] = pick("ffn", plain if name in _PLAIN_FFN else gated)
    if "head_dim" in known and (preset or config.width or config.heads) and getattr(text, "head_dim", None):
        values["head_dim"] = width // heads
        values |= {"query_pre_attn_scalar": width // heads} if "query_pre_attn_scalar" in known else {}
    if preset or config.experts:
        values |= {name: (config.ffn or gated // 2) for name in _EXPERT_FFN if name in known}
        values |= {name: min(2, sizes["experts"] or 2) for name in ACTIVE_EXPERTS if name in known}
    return values


def _preset_heads(width: int) -> int:
    wanted = max(4, width // 64)
    return next(heads for heads in range(wanted, 0, -1) if width % heads == 0)


def _known_overrides(config: ModelConfig, known: set[str]) -> dict[str, Any]:
    for key in config.extra:
        if key not in known:
            raise ConfigError(f"model.overrides.{key} is no attribute of '{config.name}'{nearest(key, known)}")
    return config.extra


def _override(config: ModelConfig, found: PreTrainedConfig) -> None:
    text = found.get_text_config(decoder=True)
    _apply(text, _known_overrides(config, set(text.to_dict())))
    if config.tie is not None:
        found.tie_word_embeddings = text.tie_word_embeddings = config.tie


def _apply(text: PreTrainedConfig, values: dict[str, Any]) -> None:
    for key, value in values.items():
        if key in text.to_dict():
            setattr(text, key, value)
