"""The model that torchtitan's keys name: its sizes where they are public, and what its blocks have that no key says.

Source: torchtitan b5bcd76 (models/llama3, models/qwen3, models/common/rope.py and rmsnorm.py).
"""

from __future__ import annotations

from types import MappingProxyType

from meshwright.errors import ConfigError
from meshwright.jobs.migrate.foreign import Migration
from meshwright.planner.presets import presets

FLAVORS = MappingProxyType({"llama3": "llama-3", "qwen3": "qwen3", "deepseek_v3": "deepseek-v3"})
"""Names of our presets begin so, where torchtitan's model has this name and a flavor follows."""

_BLOCKS: MappingProxyType[str, dict[str, object]] = MappingProxyType(
    {
        "llama3": {
            "rms_norm_eps": 1e-5,
            "rope_parameters": "{rope_type = 'llama3', rope_theta = 500000.0, factor = 8.0, low_freq_factor = 1.0, "
            "high_freq_factor = 4.0, original_max_position_embeddings = 8192}",
        },
        "qwen3": {"rms_norm_eps": 1e-6, "rope_parameters": "{rope_type = 'default', rope_theta = 1000000.0}"},
    }
)
"""Settings of torchtitan's blocks by its name of the model, under `model.overrides`; the defaults of Hugging Face's
types are other numbers."""

_FUNCTION = (
    "a function of torchtitan's Python has what these flags don't say (steps, rates, lengths, degrees), which stands "
    "here at torchtitan's defaults; set it, or give what --debug.save_config_file writes"
)


def read_torchtitan_model(config: Migration) -> int:
    """Answers the model where its sizes are public; returns its layers, 0 where they aren't known.

    Raises:
        ConfigError: for a model that is no causal language model.
    """
    if str(config.values.get("model.name", "")).startswith("flux"):
        raise ConfigError("model.name = flux makes images; causal language models are trained here")
    module, function = (str(config.take(key) or "") for key in ("module", "config"))
    config.leave(_FUNCTION, "config")
    config.leave("its Python isn't brought along", "module")
    name, flavor = (str(config.values.get(f"model.{key}", "")).lower() for key in ("name", "flavor"))
    if function.startswith(f"{module}_") and not name:
        # A function has an underscore where the flavor has a point: qwen3_0_6b is 0.6B.
        name, flavor = module.lower(), function.removeprefix(f"{module}_").lower().replace("_", ".")
    preset = presets().get(f"{FLAVORS.get(name, '?')}-{flavor}")
    if preset is None or not preset.sizes.gated or preset.sizes.latent or preset.sizes.experts:
        return 0
    config.take("model.name"), config.take("model.flavor")
    sizes = preset.sizes
    keys = ("model.name", "model.flavor", "config")
    config.set("model.name", "llama" if name == "llama3" else name, *keys)
    for field in ("layers", "width", "heads", "kv_heads", "ffn", "vocab"):
        if getattr(sizes, field):
            config.set(f"model.{field}", getattr(sizes, field), *keys)
    if sizes.head_size:
        config.set("model.overrides.head_dim", sizes.head_size, *keys)
    if sizes.tied:
        config.set("model.tie", True, *keys)
    for setting, value in _BLOCKS[name].items():
        config.set(f"model.overrides.{setting}", value, *keys)
    if name == "llama3":
        config.set("model.context", 131072, *keys)
        config.missing.append(
            "model.overrides.rope_parameters: positions are scaled as Llama 3.1's, which torchtitan does from 0.2 on; "
            "before, they were not: {rope_type = 'default', rope_theta = 500000.0}"
        )
    config.missing.append(
        "initial weights: torchtitan's projections back to the stream begin smaller in deeper layers; here weights "
        "begin as the model type's do"
    )
    return sizes.layers
