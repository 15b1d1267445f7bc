"""Reads Megatron-LM's flags that layout, batch, schedule and model are made of. Source: as in `megatron_flags`."""

from __future__ import annotations

from meshwright.errors import ConfigError
from meshwright.jobs.migrate.foreign import Migration, divided
from meshwright.planner.emit import FSDP_STRATEGIES

_ATTENTIONS = {"a2a": "heads", "allgather": "gather", "p2p": "ring"}
_ZERO_FLAGS = (
    "use-distributed-optimizer", "use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2",
    "torch-fsdp2-no-reshard-after-forward", "data-parallel-sharding-strategy",
)  # fmt: skip
_ROTARY = "{{rope_type = 'default', rope_theta = {}}}"
_SHAPES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "wsd"}


def read_megatron(config: Migration, path: str) -> None:
    """Answers the flags that a layout, a batch, a schedule and a model are made of.

    Args:
        config: the file's flags.
        path: of the file, for messages.

    Raises:
        ConfigError: when degrees or batch sizes contradict each other, or nothing says how many devices there are.
    """
    layers = config.values.get("num-layers", 0)
    layers = layers if isinstance(layers, int) and layers > 0 else 0
    readers, pp = _read_degrees(config, path)
    rows = _read_batch(config, readers)
    if pp > 1:
        _read_pipeline(config, pp, layers)
    _read_choices(config, layers)
    _read_schedule(config, rows)
    _read_model(config)


def _read_degrees(config: Migration, path: str) -> tuple[int, int]:
    """Answers degrees and ZeRO; returns the readers of rows and the pipeline's degree."""
    names = {axis: f"{word}-parallel-size" for axis, word in (("tp", "tensor-model"), ("cp", "context"))}
    tp, cp = (config.lay_degree(axis, config.count(name), name) for axis, name in names.items())
    pp = config.lay_degree("pp", config.count(name := "pipeline-model-parallel-size"), name)
    config.lay_degree("ep", config.count(name := "expert-model-parallel-size"), name)
    ranks = config.require_devices(path)
    readers = divided(ranks, tp * cp * pp, f"devices = {ranks}, of {path} or --devices, over tp x cp x pp")
    if config.flag("sequence-parallel") and tp > 1:
        config.lay("sequence", "true", "sequence-parallel")
    else:
        config.drop("off without tp", "sequence-parallel")
    # One for all layers, or one for each; Transformer Engine's word is all_gather, the help text's allgather.
    kinds = set(config.word("cp-comm-type").replace("_", "").split())
    kind = kinds.pop() if len(kinds) == 1 else " ".join(kinds)
    if cp > 1:
        if kind in _ATTENTIONS or not kind:
            config.lay("attention", _ATTENTIONS.get(kind, "ring"), "cp-comm-type", why="p2p, default of megatron")
        else:
            config.leave("attention=heads, gather or ring in the layout", "cp-comm-type")
    else:
        config.drop("no cp", "cp-comm-type")
    zero = _read_zero(config)
    if zero and readers == 1 and cp > 1:
        config.tell_state_over_cp()
    copies = config.count("num-distributed-optimizer-instances") or 1
    group = divided(readers, copies, f"num-distributed-optimizer-instances = {copies} over {readers} readers")
    config.lay_data_axes(zero, readers, group, *_ZERO_FLAGS, "num-distributed-optimizer-instances")
    return readers, pp


def _read_zero(config: Migration) -> int:
    """Answers which flags share the state; returns the ZeRO level."""
    zero = 1 if config.flag("use-distributed-optimizer") else 0
    strategy = config.word("data-parallel-sharding-strategy")
    keeps = config.flag("torch-fsdp2-no-reshard-after-forward")
    if config.flag("use-torch-fsdp2"):
        return 2 if keeps else 3
    is_old = "use-megatron-fsdp" not in config.values
    if config.flag("use-megatron-fsdp", "use-custom-fsdp"):
        if strategy and strategy not in FSDP_STRATEGIES:
            raise ConfigError(f"data-parallel-sharding-strategy {strategy[:40]}: known: {', '.join(FSDP_STRATEGIES)}")
        # The default became the last on 2026-04-02 (3499efef80), after the old name had gone (2025-08-21, af28b5a559).
        return FSDP_STRATEGIES.index(strategy or FSDP_STRATEGIES[0 if is_old else -1])
    return zero


def _read_batch(config: Migration, readers: int) -> int:
    """Answers rows and micro-batches; returns the rows."""
    micro = config.count("micro-batch-size") or 1
    rows = config.count("global-batch-size") or micro * readers
    names = ("global-batch-size", "micro-batch-size")
    microbatches = divided(rows, micro * readers, f"{' over '.join(names)} of {readers} readers")
    config.set("train.batch", rows, *names, why="a micro-batch of each reader")
    if microbatches > 1:
        config.lay("microbatches", microbatches, *names)
    return rows


def _read_pipeline(config: Migration, pp: int, layers: int) -> None:
    """Answers virtual stages and the layers of each stage."""
    stages_name, layers_name = "num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"
    stages, each = config.count(stages_name), config.count(layers_name)
    if each and not layers:
        config.leave("the file doesn't say how many layers there are; stages=N in the layout", layers_name)
    elif each:
        stages = divided(layers, pp * each, f"num-layers over {layers_name} x pp")
    if (stages or 1) > 1:
        config.lay("schedule", "interleaved", stages_name, layers_name)
        config.lay("stages", stages, stages_name, layers_name)
    name = "pipeline-model-parallel-layout"
    text = str(config.take(name) or "")
    parts = [part.strip("EL") for part in text.split("|")]
    if text and all(set(part) <= {"t"} for part in parts) and text.count("E") == text.count("L") == 1:
        config.lay("split", "-".join(str(len(part)) for part in parts), name)
    elif text:
        config.leave("split= in the layout takes the layers of each stage, as 5-7-6-6", name)


def _read_choices(config: Migration, layers: int) -> None:
    """Answers precision, recompute and offload."""
    for name in [name for name, value in config.values.items() if name.endswith("-dtype") and value == "fp32"]:
        if name.startswith(("main-", "exp-avg", "megatron-fsdp-")):
            config.take(name)
            config.drop("float32 here too", name)
    for name, precision in (("bf16", "bf16"), ("fp16", "fp16"), ("fp8-format", "fp8")):
        if config.flag(name) or (precision == "fp8" and config.origin(name)):
            if precision == "fp16" and "precision" in config.layout:
                raise ConfigError("bf16 and fp16: only one of them can hold; leave bf16")
            config.lay("precision", precision, name)
    has_fp8 = "precision" in config.layout and config.layout["precision"].value == "fp8"
    if has_fp8:
        config.drop("precision=fp8 computes all else in bf16", "bf16", "fp16")
    scaling, recipe = "precision=fp8 has a scale for each tensor, of its present values", config.word("fp8-recipe")
    if recipe == "tensorwise" or not has_fp8:
        config.drop(scaling, "fp8-recipe")
    elif recipe:
        config.leave(scaling, "fp8-recipe")
    else:
        config.missing.append(f"fp8-recipe: not given, which is delayed there, of the steps before; {scaling}")
    names = ("recompute-granularity", "recompute-activations")
    mode = config.word(names[0]) or ("selective" if config.flag(names[1]) else "")
    method, count = config.word("recompute-method"), config.count("recompute-num-layers")
    modules = config.take("recompute-modules")
    if mode == "full":
        pp = config.layout["pp"].value if "pp" in config.layout else 1
        stages = config.layout["stages"].value if "stages" in config.layout else 1
        whole = (count or 0) * int(str(pp)) * int(str(stages))
        part = f":{whole}" if method == "block" and layers > whole > 0 else ""
        config.lay("recompute", f"full{part}", *names, "recompute-method", "recompute-num-layers")
    elif mode == "selective":
        config.lay("recompute", "selective", *names)
        config.drop("recompute=selective says it", "recompute-method", "recompute-num-layers")
    elif mode:
        config.leave("recompute is none, full or selective", *names)
    if modules is not None:
        config.leave("recompute=selective keeps products of matrices and runs all else again", "recompute-modules")
    if config.flag("optimizer-cpu-offload"):
        config.lay("offload", "optimizer", "optimizer-cpu-offload")
    if config.word("optimizer") in ("", "adam", "adamw"):
        config.drop("AdamW is the optimizer", "optimizer")
    else:
        config.leave("AdamW is the only optimizer; its rate and decay want values of their own", "optimizer")


def _read_schedule(config: Migration, rows: int) -> None:
    """Answers steps, warm-up and decay, which may be in steps, samples or a share."""
    steps, samples = config.count("train-iters"), config.count("train-samples")
    if samples and not steps:
        steps = max(1, samples // rows)
    if steps:
        config.set("train.steps", steps, "train-iters", "train-samples")
    style = config.word("lr-decay-style")
    if style in _SHAPES:
        config.set("schedule.shape", _SHAPES[style], "lr-decay-style")
    elif style:
        config.leave("shapes are cosine, linear, wsd and constant", "lr-decay-style")
    decay = config.count("lr-decay-iters")
    decay_samples = config.count("lr-decay-samples")
    span = decay or (decay_samples // rows if decay_samples else steps)
    if span == steps:
        config.drop("the schedule goes over train.steps", "lr-decay-iters", "lr-decay-samples")
    else:
        config.leave("the schedule goes over train.steps", "lr-decay-iters", "lr-decay-samples")
    names = ("lr-warmup-iters", "lr-warmup-samples", "lr-warmup-fraction")
    warmup, warmup_samples = config.count(names[0], least=0), config.count(names[1], least=0)
    fraction = config.number(names[2])
    if warmup is None and warmup_samples is not None:
        warmup = warmup_samples // rows
    if warmup is None and fraction is not None and span:
        warmup = int(fraction * span)
    if warmup is not None:
        config.set("schedule.warmup", warmup, *names)
    rate, least = config.values.get("lr"), config.number("min-lr") or 0.0
    if isinstance(rate, (int, float)) and rate > 0:
        config.set("schedule.floor", least / rate, "min-lr", why="default of megatron")
    else:
        config.leave("schedule.floor is a share of the peak, which the file doesn't say", "min-lr")


def _read_overrides(config: Migration, gated: bool, experts: bool) -> None:
    """Answers what a model type's config has under names of its own, and what one of its blocks always has."""
    settings = {"init-method-std": "overrides.initializer_range"}
    if gated:
        settings |= {"max-position-embeddings": "context", "rotary-base": "overrides.rope_parameters"}
        settings |= {"kv-channels": "overrides.head_dim", "norm-epsilon": "overrides.rms_norm_eps"}
    if gated and experts:
        settings["moe-router-topk"] = "overrides.num_experts_per_tok"
        settings["moe-aux-loss-coeff"] = "overrides.router_aux_loss_coef"
    for name, setting in settings.items():
        if (value := config.number(name)) is not None:
            # A string that is a value of TOML is one there.
            written = _ROTARY.format(value) if name == "rotary-base" else value
            config.set(f"model.{setting}", written, name)
    if gated:
        _read_block(config, experts)
    if not gated:
        config.count("max-position-embeddings")
        config.drop("gpt2's positions follow from the data", "max-position-embeddings")
        config.count("kv-channels")
        config.leave("gpt2's heads share its width out evenly", "kv-channels")
    for name in () if gated else ("group-query-attention", "num-query-groups", "num-experts"):
        if config.take(name) is not None:
            config.leave("gpt2 has none; take a model type that has, as mixtral", name)


def _read_block(config: Migration, experts: bool) -> None:
    """Answers what a block of llama and mixtral has, by its keys or by the framework's defaults."""
    rotary = "use-rotary-position-embeddings"
    if config.values.get("rotary-percent") == 1:
        config.take("rotary-percent")
        config.drop("all of a head turns", "rotary-percent")
    if config.flag(rotary):
        config.values.setdefault("position-embedding-type", "rope")
    config.drop("a block of llama and mixtral has it", rotary)
    for name, own, default in (
        ("normalization", "rmsnorm", "LayerNorm"),
        ("position-embedding-type", "rope", "learned_absolute"),
        ("disable-bias-linear", "true", "biases"),
    ):
        if str(config.values.get(name, "")).lower() == own:
            config.take(name)
            config.drop("a block of llama and mixtral has it", name)
        elif name not in config.values:
            config.missing.append(f"{name}: not given, which is {default} there; llama and mixtral have {own}")
    groups = config.count("num-query-groups")
    if config.flag("group-query-attention"):
        config.set("model.kv_heads", groups or 1, "group-query-attention", "num-query-groups")
    else:
        config.drop("no effect without group-query-attention", "num-query-groups")
    defaults: dict[str, object] = {"model.overrides.rms_norm_eps": 1e-5}
    if experts:
        defaults |= {"model.overrides.rope_parameters": _ROTARY.format(10000)}
        defaults["model.overrides.router_aux_loss_coef"] = 0.0
    for setting, value in defaults.items():
        if setting not in config.settings:
            config.set(setting, value, why="default of megatron")


def _read_model(config: Migration) -> None:
    """Answers the model's type and what Megatron says of it by flags."""
    swiglu, experts = config.flag("swiglu"), config.values.get("num-experts", 0) not in (0, "0")
    gated = swiglu or experts
    name = "gpt2" if not gated else "mixtral" if experts else "llama"
    config.set("model.name", name, "swiglu", why="no --swiglu")
    if experts and not swiglu:
        config.missing.append(
            "swiglu: not given, which is GELU there; mixtral's experts are gated, with a third matrix"
        )
    _read_overrides(config, gated, experts)
    config.set(
        "model.tie",
        not config.flag("untie-embeddings-and-output-weights"),
        "untie-embeddings-and-output-weights",
        why="default of megatron",
    )
    ffn, expert_ffn = config.count("ffn-hidden-size"), config.count("moe-ffn-hidden-size")
    width = config.values.get("hidden-size")
    if expert_ffn and name == "mixtral":
        config.set("model.ffn", expert_ffn, "moe-ffn-hidden-size")
        config.drop("no layer of mixtral is without experts", "ffn-hidden-size")
    elif ffn:
        config.set("model.ffn", ffn, "ffn-hidden-size")
        config.drop("no effect without experts", "moe-ffn-hidden-size")
    elif gated and isinstance(width, int):
        config.set("model.ffn", int(width * 8 / 3 / 64) * 64 if swiglu else 4 * width, why="default of megatron")
    vocab = config.count("vocab-size")
    if vocab:
        config.set("model.vocab", vocab, "vocab-size")
    hidden, attention = config.number("hidden-dropout"), config.number("attention-dropout")
    dropouts = ("hidden-dropout", "attention-dropout")
    if gated:
        absent = [key for key, value in zip(dropouts, (hidden, attention), strict=True) if value is None]
        config.missing.extend(f"{key}: not given, which is 0.1 there; {name} has no dropout" for key in absent)
        config.missing.append(
            "initial weights: Megatron's projections back to the stream begin sqrt(2 layers) times smaller; here all "
            "begin with one deviation"
        )
        if hidden or attention:
            config.leave(f"{name} has no dropout", *dropouts)
        else:
            config.drop(f"{name} has no dropout", *dropouts)
    else:
        config.set("model.dropout", 0.1 if hidden is None else hidden, "hidden-dropout", why="default of megatron")
        same = (0.1 if attention is None else attention) == (0.1 if hidden is None else hidden)
        (config.drop if same else config.leave)("model.dropout is every dropout's", "attention-dropout")
    names = ("reset-attention-mask", "reset-position-ids", "eod-mask-loss")
    flags = [config.flag(key) for key in names]
    config.set("data.mask_documents", any(flags), *names, why="default of megatron")
    if any(flags) and not all(flags):
        config.leave("data.mask_documents is all three: masks, positions and targets end with a document", *names)
