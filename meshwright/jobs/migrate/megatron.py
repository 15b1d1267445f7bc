# long: a framework's flags and what reads them are one view of it
"""Megatron-LM's flags. Source: Megatron-LM d98e8a6 (megatron/training/arguments.py, core/model_parallel_config.py)."""

from __future__ import annotations

from meshwright.errors import ConfigError
from meshwright.jobs.migrate.foreign import Foreign, Migration, divided
from meshwright.planner.emit import FSDP_STRATEGIES

MEGATRON = Foreign(
    name="megatron",
    settings={
        "lr": "optimizer.lr",
        "adam-beta1": "optimizer.beta1",
        "adam-beta2": "optimizer.beta2",
        "adam-eps": "optimizer.eps",
        "weight-decay": "optimizer.weight_decay",
        "clip-grad": "optimizer.clip",
        "seed": "train.seed",
        "seq-length": "data.sequence",
        "num-layers": "model.layers",
        "hidden-size": "model.width",
        "num-attention-heads": "model.heads",
        "num-experts": "model.experts",
        "save-interval": "checkpoint.every",
        "eval-interval": "evaluation.every",
        "log-interval": "monitor.every",
    },
    needless={
        "overlap-*": "communication always goes on under compute",
        "tp-comm-overlap*": "tp_overlap=4 in the layout does the like",
        "use-mcore-models": "the model is read, not written anew",
        "transformer-impl": "kernels are torch's",
        "attention-backend": "model.attention takes torch's fused kernels where the family has them",
        "use-flash-attn": "model.attention takes flash attention on GPUs",
        "*-fusion": "kernels are torch's; compile=true in the layout fuses layers",
        "manual-gc*": "a setting of Python's garbage collection",
        "empty-unused-memory-level": "memory comes in segments that grow",
        "distributed-*": "launch has limits of waiting; hangs are named",
        "num-workers": "rows are memory-mapped and prefetched",
        "no-mmap-bin-files": "token files are memory-mapped",
        "no-create-attention-mask-in-dataloader": "masks are the model's",
        "mmap-*": "token files are memory-mapped",
        "data-cache-path": "prepared text is kept in a cache; data.cache names another",
        "tensorboard-*": "tensorboard/ is always written",
        "log-*": "metrics.jsonl has every step",
        "timing-log-*": "metrics.jsonl has the parts of each step",
        "profile*": "monitor.timeline records phases and waits of chosen steps",
        "use-pytorch-profiler": "monitor.timeline records phases and waits of chosen steps",
        "save": "checkpoints are in the run directory; --run names it",
        "async-save": "checkpoints are written while training goes on",
        "ckpt-*": "any layout loads any checkpoint",
        "use-dist-ckpt": "any layout loads any checkpoint",
        "dist-ckpt-*": "any layout loads any checkpoint",
        "auto-detect-ckpt-format": "any layout loads any checkpoint",
        "exit-*": "Ctrl-C, SIGTERM and meshwright cancel end a run with a checkpoint",
        "accumulate-allreduce-grads-in-fp32": "gradients are summed in float32",
        "attention-softmax-in-fp32": "the model's own code says it",
        "grad-reduce-in-bf16": "gradients are summed in float32; compress=bf16 in the layout rounds them",
        "loss-scale-window": "the scale doubles after 1000 steps without overflow",
        "initial-loss-scale": "the scale starts at 2^16",
        "min-loss-scale": "the scale is bounded by itself",
        "hysteresis": "the scale halves at each overflow",
        "no-gradient-accumulation-fusion": "kernels are torch's",
        "no-async-tensor-model-parallel-allreduce": "without tp_overlap in the layout every sum is waited for",
        "moe-token-dispatcher-type": "tokens travel by all-to-all",
        "moe-grouped-gemm": "experts of a rank are one grouped product where torch has it",
        "moe-permute-fusion": "kernels are torch's",
        "expert-tensor-parallel-size": "ep divides the ranks of shard x cp x tp a second time",
        "check-for-nan-in-loss-and-grad": "a step that isn't finite is skipped, and told",
        "no-check-for-nan-in-loss-and-grad": "a step that isn't finite is skipped, and told",
        "no-load-*": "a run goes on from its own directory with all of its state",
        "no-save-*": "a run goes on from its own directory with all of its state",
        "calculate-per-token-loss": "the loss is a mean over tokens",
        "apply-query-key-layer-scaling": "a choice of numerics of fp16 there",
        "make-vocab-size-divisible-by": "the vocabulary is split unevenly where it doesn't divide",
        "fp8-amax-*": "scales follow from present values",
        "fp8-recipe": "precision=fp8 has a scale for each tensor, fp8_rowwise for each row",
        "fp8-margin": "scales follow from present values",
        "deterministic-mode": "runs on one layout repeat where torch's kernels do",
        "no-pipeline-*": "a choice of kernels there",
        "local-rank": "the launcher says it",
        "wandb-*": 'trackers = ["wandb"] under [monitor]',
    },
    missing={
        "data-path": "write paths = [\"...\"] of text under [data]; Megatron's .bin files aren't read",
        "*-data-path": "write paths = [\"...\"] of text under [data]; Megatron's .bin files aren't read",
        "mock-data": "without paths the text is the Python source of the interpreter",
        "data-args-path": 'write paths = ["..."] of text under [data]',
        "split": "data.validation_share is the share held out",
        "tokenizer-*": 'write tokenizer = "DIRECTORY" under [data]; a Hugging Face tokenizer is read',
        "vocab-file": 'write tokenizer = "DIRECTORY" under [data]; a Hugging Face tokenizer is read',
        "merge-file": 'write tokenizer = "DIRECTORY" under [data]; a Hugging Face tokenizer is read',
        "tiktoken-*": 'write tokenizer = "DIRECTORY" under [data]; a Hugging Face tokenizer is read',
        "load": "weights come from a directory in Hugging Face format as model.name",
        "pretrained-checkpoint": "weights come from a directory in Hugging Face format as model.name",
        "finetune": "a directory in Hugging Face format as model.name is trained on",
        "eval-iters": "evaluation.rows are the rows of an evaluation",
        "rotary-percent": "model.overrides.partial_rotary_factor, where the model type has it",
        "rotary-*": "the model type's rotary positions hold",
        "use-rope-scaling": "model.overrides.rope_parameters",
        "rope-scaling-factor": "model.overrides.rope_parameters",
        "norm-epsilon": "gpt2's is 1e-5; model.overrides.layer_norm_epsilon",
        "layernorm-epsilon": "model.overrides.layer_norm_epsilon",
        "apply-layernorm-1p": "norms are those of the model type",
        "qk-layernorm": 'model.name = "qwen3" has norms of queries and keys',
        "normalization": "gpt2 has LayerNorm",
        "disable-bias-linear": "gpt2 has biases",
        "add-qkv-bias": "biases are those of the model type",
        "no-position-embedding": "positions are those of the model type",
        "position-embedding-type": "positions are those of the model type",
        "squared-relu": "the activation is the model type's",
        "window-size": 'model.name = "mistral" has a window; model.overrides.sliding_window',
        "multi-latent-attention": 'model.name = "deepseek_v3" has latent attention',
        "moe-*": "routing is the model type's own code",
        "mtp-*": "no layer for multi-token prediction is built",
        "decoupled-lr": "one learning rate holds for all weights",
        "decoupled-min-lr": "one learning rate holds for all weights",
        "rampup-batch-size": "the batch is the same in all steps; a longer schedule.warmup keeps the first ones small",
        "lr-warmup-init": "a warm-up begins at 0",
        "lr-wsd-*": "schedule.decay_share is the share of the steps that decays, linearly",
        "override-opt*": "the recipe's schedule holds",
        "use-checkpoint-opt*": "the recipe's schedule holds",
        "start-weight-decay": "weight decay stays as it is",
        "end-weight-decay": "weight decay stays as it is",
        "weight-decay-incr-style": "weight decay stays as it is",
        "no-weight-decay-*": "optimizer.decay says what decays",
        "optimizer-offload-fraction": "offload takes all of the state",
        "main-*-dtype": "master weights and moments are float32",
        "exp-avg*-dtype": "moments are float32",
        "use-precision-aware-optimizer": "master weights and moments are float32",
        "fp8-param-gather": "compress_weights=fp8 in the layout does the like",
        "loss-scale": "the scale of fp16 is dynamic",
        "freeze-*": "all weights are trained",
        "enable-ft*": "recovery is on without a flag",
        "encoder-*": "models have no encoder",
        "decoder-*": "stages are balanced by cost; split= in the layout says otherwise",
        "account-for-*-in-pipeline-split": "stages are balanced by cost, embedding and head included",
        "cpu-offloading*": "activations aren't offloaded; recompute=full keeps fewer",
        "hierarchical-context-parallel-sizes": "attention=heads in the layout where the heads divide, else gather",
    },
    defaults={
        "optimizer.beta2": 0.999,
        "optimizer.weight_decay": 0.01,
        "schedule.shape": "linear",
        "schedule.warmup": 0,
        "train.seed": 1234,
    },
    layout_keys={
        "tensor-model-parallel-size": "`layout: tp`",
        "pipeline-model-parallel-size": "`layout: pp`",
        "context-parallel-size": "`layout: cp`",
        "cp-comm-type": "`layout: attention`: a2a heads, allgather gather, p2p ring",
        "expert-model-parallel-size": "`layout: ep`",
        "sequence-parallel": "`layout: sequence=true`",
        "num-virtual-stages-per-pipeline-rank": "`layout: schedule=interleaved, stages`",
        "num-layers-per-virtual-pipeline-stage": "`layout: schedule=interleaved, stages`",
        "pipeline-model-parallel-layout": "`layout: split`, where stages hold decoder layers alone",
        "micro-batch-size": "`layout: microbatches`",
        "global-batch-size": "`train.batch`",
        "use-distributed-optimizer": "`layout: shard, zero=1`",
        "num-distributed-optimizer-instances": "`layout: replicate`",
        "use-megatron-fsdp": "`layout: shard, zero`",
        "use-torch-fsdp2": "`layout: shard, zero=3`",
        "data-parallel-sharding-strategy": "`layout: zero`",
        "bf16": "`layout: precision=bf16`",
        "fp16": "`layout: precision=fp16`",
        "fp8-format": "`layout: precision=fp8`",
        "recompute-granularity": "`layout: recompute`",
        "recompute-activations": "`layout: recompute=selective`",
        "recompute-method": "`layout: recompute=full`, or full:K for `block`",
        "recompute-num-layers": "`layout: recompute=full:K` for `block`",
        "recompute-modules": "left out: selective recompute keeps products here",
        "optimizer-cpu-offload": "`layout: offload=optimizer`",
        "optimizer": "AdamW; any other is left out",
        "train-iters": "`train.steps`",
        "train-samples": "`train.steps`, by the batch",
        "min-lr": "`schedule.floor`, by lr",
        "lr-decay-style": "`schedule.shape`: cosine, linear, constant, WSD; inverse-square-root is left out",
        "lr-decay-iters": "the schedule goes over train.steps; left out where it differs",
        "lr-decay-samples": "the schedule goes over train.steps; left out where it differs",
        "lr-warmup-iters": "`schedule.warmup`",
        "lr-warmup-samples": "`schedule.warmup`, by the batch",
        "lr-warmup-fraction": "`schedule.warmup`",
        "attention-dropout": "`model.dropout`; left out where hidden-dropout differs",
        "hidden-dropout": "`model.dropout`",
        "max-position-embeddings": "`model.context`; gpt2's follows from the data",
        "init-method-std": "`model.overrides.initializer_range`",
        "rotary-base": "`model.overrides.rope_parameters`",
        "kv-channels": "`model.overrides.head_dim`",
        "norm-epsilon": "`model.overrides.rms_norm_eps`",
        "moe-router-topk": "`model.overrides.num_experts_per_tok`",
        "moe-aux-loss-coeff": "`model.overrides.router_aux_loss_coef`",
        "swiglu": '`model.name = "llama"`, `"mixtral"` with experts; without it gpt2',
        "untie-embeddings-and-output-weights": "`model.tie`",
        "vocab-size": "`model.vocab`",
        "group-query-attention": "`model.kv_heads`: num-query-groups, or 1",
        "num-query-groups": "`model.kv_heads`, beside group-query-attention",
        "ffn-hidden-size": "`model.ffn`",
        "moe-ffn-hidden-size": "`model.ffn` of mixtral, whose layers all have experts",
        "use-rotary-position-embeddings": "rotary positions, as llama and mixtral have",
        "reset-position-ids": "`data.mask_documents`",
        "reset-attention-mask": "`data.mask_documents`",
        "eod-mask-loss": "`data.mask_documents`",
    },
)
_ATTENTIONS = {"a2a": "heads", "allgather": "gather", "p2p": "ring"}
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
    kind = config.word("cp-comm-type")
    if cp > 1:
        if kind in _ATTENTIONS or not kind:
            config.lay("attention", _ATTENTIONS.get(kind, "ring"), "cp-comm-type", why="p2p, default of megatron")
        else:
            config.leave("attention=heads, gather or ring in the layout", "cp-comm-type")
    else:
        config.drop("no cp", "cp-comm-type")
    zero = 1 if config.flag("use-distributed-optimizer") else 0
    strategy = config.word("data-parallel-sharding-strategy")
    if config.flag("use-torch-fsdp2"):
        zero = 3
    elif config.flag("use-megatron-fsdp"):
        if strategy and strategy not in FSDP_STRATEGIES:
            raise ConfigError(f"data-parallel-sharding-strategy {strategy[:40]}: known: {', '.join(FSDP_STRATEGIES)}")
        zero = FSDP_STRATEGIES.index(strategy or "no_shard")
    copies = config.count("num-distributed-optimizer-instances") or 1
    group = divided(readers, copies, f"num-distributed-optimizer-instances = {copies} over {readers} readers")
    keys = ("use-distributed-optimizer", "use-megatron-fsdp", "use-torch-fsdp2", "data-parallel-sharding-strategy")
    config.lay_data_axes(zero, readers, group, *keys, "num-distributed-optimizer-instances")
    return readers, pp


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
    for name, precision in (("bf16", "bf16"), ("fp16", "fp16"), ("fp8-format", "fp8")):
        if config.flag(name) or (precision == "fp8" and config.origin(name)):
            if precision == "fp16" and "precision" in config.layout:
                raise ConfigError("bf16 and fp16: only one of them can hold; leave bf16")
            config.lay("precision", precision, name)
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
    for name in () if gated else ("group-query-attention", "num-query-groups", "num-experts"):
        if config.take(name) is not None:
            config.leave("gpt2 has none; take a model type that has, as mixtral", name)


def _read_block(config: Migration, experts: bool) -> None:
    """Answers what a block of llama and mixtral has, by its keys or by the framework's defaults."""
    rotary = "use-rotary-position-embeddings"
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
    gated, experts = config.flag("swiglu"), "num-experts" in config.values
    name = "gpt2" if not gated else "mixtral" if experts else "llama"
    config.set("model.name", name, "swiglu", why="no --swiglu")
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
        config.set("model.ffn", int(width * 8 / 3 / 64) * 64, why="default of megatron")
    vocab = config.count("vocab-size")
    if vocab:
        config.set("model.vocab", vocab, "vocab-size")
    hidden, attention = config.number("hidden-dropout"), config.number("attention-dropout")
    dropouts = ("hidden-dropout", "attention-dropout")
    if gated:
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
