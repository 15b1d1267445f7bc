"""Maps size fields to the attributes of each transformers family, with the attributes that depend on them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.errors import ConfigError, nearest
from meshwright.models.config import ModelConfig
from meshwright.models.hugging_face import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    AutoConfig,
    PreTrainedConfig,
)
from meshwright.models.sizes import (
    ACTIVE_EXPERTS,
    DROPOUTS,
    EXPERT_FFN,
    PLAIN_FFN,
    SPECIAL,
    SYNONYMS,
    dependent_values,
    gated_ffn,
    layer_count,
    preset_heads,
    size_of,
)


def family_config(config: ModelConfig, vocab: int | None, context: int | None) -> PreTrainedConfig:
    """Builds the transformers config of a model type in the configured size.

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
    return _resized(config, default, vocab, context, preset=True)


def directory_config(config: ModelConfig, vocab: int | None, context: int | None) -> PreTrainedConfig:
    """Reads the transformers config of a directory, with ``fresh`` resized to the fields that are set.

    Raises:
        ConfigError: when there is no readable ``config.json``, or as `family_config`.
    """
    try:
        # local_files_only: a name that is no directory must not reach the hub
        hf_config = AutoConfig.from_pretrained(config.name, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged one meets whatever its class does with it
        raise ConfigError(f"model.name = '{config.name}' holds no transformers config: {str(error)[:500]}") from error
    # It says how released files are stored (`weights.py` refuses those), not what is trained and exported here.
    if hasattr(hf_config, "quantization_config"):
        del hf_config.quantization_config
    if config.fresh:
        return _resized(config, hf_config, vocab, context, preset=False)
    _set_known(hf_config.get_text_config(decoder=True), dict.fromkeys(DROPOUTS, config.dropout))
    _override(config, hf_config)
    return hf_config


def check_kernels(name: str, config: PreTrainedConfig) -> None:
    """Refuses a config whose attention or experts are a kernel of the hub, which transformers would fetch and run.

    Args:
        name: of the model, for the message.
        config: as it was read.

    Raises:
        ConfigError: names the field.
    """
    for sub_config in (config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))):
        for field in ("_attn_implementation", "_experts_implementation"):
            value = getattr(sub_config, field, None)
            # a kernel of the hub is named owner/repository
            if any("/" in str(item) for item in (value.values() if isinstance(value, dict) else (value,))):
                raise ConfigError(
                    f"the config of model '{name}' names code of the hub as its kernel: {field} = {value!r}; remove "
                    "the field, or set model.attention"
                )


def _resized(
    config: ModelConfig, default: PreTrainedConfig, vocab: int | None, context: int | None, preset: bool
) -> PreTrainedConfig:
    """Builds a config anew from its class, so that the attributes that its constructor derives fit the new sizes."""
    text = default.get_text_config(decoder=True)
    text_key = next((key for key, value in vars(default).items() if value is text), None)
    text = text if text_key is not None else default
    text_fields = text.to_dict()
    for key in config.sizes:
        if not text_fields.keys() & set(SYNONYMS[key]):
            raise ConfigError(f"model.{key} = {config.sizes[key]} has no effect on '{config.name}'; drop it")
    if config.dropout and not text_fields.keys() & set(DROPOUTS):
        raise ConfigError(f"model.dropout = {config.dropout} has no effect on '{config.name}': it has none; drop it")
    values = _size_values(config, text_fields, vocab, context, preset)
    values |= dependent_values(text_fields, values, preset)
    values |= {key: config.dropout for key in DROPOUTS if key in text_fields}
    values |= {} if config.tie is None else {"tie_word_embeddings": config.tie}
    # a directory's other attributes stay, except those that the old sizes determined
    inherited = (
        {}
        if preset
        else {key: value for key, value in text_fields.items() if key not in _derived_attributes(text_fields)}
    )
    sized = _construct(config, type(text), inherited | values | _known_overrides(config, text_fields), text_fields)
    if text_key is None:
        default = sized
    else:
        setattr(default, text_key, sized)
    if preset:
        _shorten(default, sized)
    if config.tie is not None:
        default.tie_word_embeddings = config.tie
    return default


def _shorten(config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """Gives image and sound encoders few layers: tokens alone never reach them."""
    for sub_config in vars(config).values():
        if isinstance(sub_config, PreTrainedConfig) and sub_config is not text:
            for key in SYNONYMS["layers"]:
                # one layer each is the least that their constructors accept
                if isinstance(getattr(sub_config, key, None), int) and getattr(sub_config, key) > 1:
                    setattr(sub_config, key, 1)


def _construct(
    config: ModelConfig, kind: type[PreTrainedConfig], values: dict[str, Any], plain: dict[str, Any]
) -> PreTrainedConfig:
    """Calls the config's class; a special token that must be a number becomes 0, lists by layer follow their number."""
    layers, old_layers = layer_count(values), layer_count(plain)
    lists = {
        key: value
        for key, value in plain.items()
        if isinstance(value, list) and old_layers and len(value) == old_layers
    }
    error: Exception | None = None
    # each attempt repairs one reason of a refusal, so their number bounds the attempts
    for _ in range(len(SPECIAL) + 2):
        try:
            return kind(**values)
        except Exception as failure:
            error = failure
        # transformers' strict configs name the field that they refuse
        field = re.search(r"field '(\w+)'", str(error))
        if field and field[1] in SPECIAL and values.get(field[1], 0) is None:
            values[field[1]] = 0
        elif lists:
            values = {key: (item * (layers // old_layers + 1))[:layers] for key, item in lists.items()} | values
            lists = {}
        else:
            break
    raise ConfigError(f"model '{config.name}' refuses these sizes: {error}") from error


def _derived_attributes(plain: dict[str, Any]) -> set[str]:
    """Returns the attributes that a constructor derives from sizes, which mustn't be inherited."""
    # lists by layer have the old number of layers
    lists = {key for key, value in plain.items() if isinstance(value, list) and len(value) == layer_count(plain)}
    return lists | {"head_dim", "transformers_version", "model_type", "architectures"}


def _size_values(
    config: ModelConfig, text_fields: dict[str, Any], vocab: int | None, context: int | None, preset: bool
) -> dict[str, Any]:
    """Returns attribute values for every size field, our preset where nothing is set."""

    def pick(key: str, default: int) -> int:
        return getattr(config, key) or (default if preset else size_of(text_fields, key) or default)

    width = pick("width", 256)
    heads = pick("heads", preset_heads(width))
    sizes = {
        "layers": pick("layers", 4),
        "width": width,
        "heads": heads,
        "kv_heads": config.kv_heads or _key_heads(heads, None if preset else size_of(text_fields, "kv_heads")),
        "vocab": config.vocab or vocab or pick("vocab", 512),
        "context": config.context or context or pick("context", 256),
        "experts": pick("experts", 4),
    }
    # a family may store one size under several attributes: all are set
    values = {name: size for key, size in sizes.items() for name in SYNONYMS[key] if name in text_fields}
    for name in SYNONYMS["ffn"]:
        if name in text_fields:
            values[name] = pick("ffn", 4 * width if name in PLAIN_FFN else gated_ffn(width))
    if preset or config.experts:
        values |= {name: (config.ffn or gated_ffn(width) // 2) for name in EXPERT_FFN if name in text_fields}
        for name in ACTIVE_EXPERTS:
            if name in text_fields:
                values[name] = min(2, sizes["experts"], text_fields[name] or 2)
    return values


def _key_heads(heads: int, own_key_heads: int | None) -> int:
    """Returns the largest number of key heads that divides the query heads, up to the config's own."""
    limit = min(heads, own_key_heads or heads)
    return next(count for count in range(limit, 0, -1) if heads % count == 0)


def _known_overrides(config: ModelConfig, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the overrides; refuses one that is no attribute of the family."""
    for key in config.extra:
        if key not in attributes:
            raise ConfigError(f"model.overrides.{key} is no attribute of '{config.name}'{nearest(key, attributes)}")
    return config.extra


def _override(config: ModelConfig, hf_config: PreTrainedConfig) -> None:
    """Sets the configured overrides on a directory's config, in place."""
    text = hf_config.get_text_config(decoder=True)
    _set_known(text, _known_overrides(config, text.to_dict()))
    # a composite config stores the flag at both levels
    if config.tie is not None:
        hf_config.tie_word_embeddings = text.tie_word_embeddings = config.tie


def _set_known(text: PreTrainedConfig, values: dict[str, Any]) -> None:
    """Sets the values whose attributes the config has."""
    for key, value in values.items():
        if key in text.to_dict():
            setattr(text, key, value)
