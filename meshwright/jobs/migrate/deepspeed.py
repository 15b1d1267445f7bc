"""DeepSpeed's JSON configuration. Source: DeepSpeed edaa722 (runtime/config.py, runtime/zero/config.py)."""

from __future__ import annotations

from meshwright.errors import ConfigError
from meshwright.jobs.migrate.foreign import Foreign, Migration, divided

_ZERO = "zero_optimization."
_OPTIMIZER, _SCHEDULER = "optimizer.params.", "scheduler.params."
DEEPSPEED = Foreign(
    name="deepspeed",
    settings={
        "gradient_clipping": "optimizer.clip",
        f"{_OPTIMIZER}lr": "optimizer.lr",
        f"{_OPTIMIZER}eps": "optimizer.eps",
        f"{_OPTIMIZER}weight_decay": "optimizer.weight_decay",
        f"{_SCHEDULER}total_num_steps": "train.steps",
        f"{_SCHEDULER}warmup_num_steps": "schedule.warmup",
        "steps_per_print": "monitor.every",
        "seed": "train.seed",
    },
    needless={
        f"{_ZERO}overlap_comm": "communication always goes on under compute",
        f"{_ZERO}contiguous_gradients": "FSDP units have one buffer each",
        f"{_ZERO}reduce_scatter": "gradients of shards are always reduce-scattered",
        f"{_ZERO}*bucket_size": "a layer is a unit of communication",
        f"{_ZERO}allgather_partitions": "weights of shards are always gathered",
        f"{_ZERO}sub_group_size": "the update runs over a layer's shards at a time",
        f"{_ZERO}cpu_offload_use_pin_memory": "host memory is always pinned",
        f"{_ZERO}offload_*.max_in_cpu": "of NVMe alone",
        f"{_ZERO}offload_*.pipeline*": "of NVMe alone",
        f"{_ZERO}offload_*.cpuadam_cores_perc": "the update takes the host's cores",
        f"{_ZERO}offload_*.super_offload": "a choice of how DeepSpeed runs the update on the host",
        f"{_ZERO}max_*": "a layer is gathered when it runs; the next one travels meanwhile",
        f"{_ZERO}*_persistence_threshold": "a layer's small weights travel with its large ones",
        f"{_ZERO}leaf_module.*": "a repeated layer is a unit",
        f"{_ZERO}mics_hierarchical_params_gather": "a choice of how DeepSpeed gathers",
        f"{_ZERO}use_multi_rank_bucket_allreduce": "a layer is a unit of communication",
        f"{_ZERO}memory_efficient_linear": "products keep what autograd keeps",
        f"{_ZERO}legacy_stage1": "zero=1 is as it is now",
        f"{_ZERO}override_module_apply": "weights are built as a rank's own part only",
        f"{_ZERO}pipeline_loading_checkpoint": "each rank reads its own slices",
        f"{_ZERO}log_trace_cache_warnings": "a choice of what DeepSpeed prints",
        f"{_ZERO}enable_sanity_checks": "verify proves the layout",
        f"{_ZERO}stage3_gather_*_weights_on_model_save": "meshwright export gathers and converts",
        f"{_ZERO}stage3_*": "a layer is gathered when it runs; the next one travels meanwhile",
        f"{_ZERO}round_robin_gradients": "a rank's shard is a slice of every layer",
        f"{_ZERO}gather_16bit_weights_on_model_save": "meshwright export gathers and converts",
        f"{_ZERO}ignore_unused_parameters": "weights without a gradient are found when the model is read",
        f"{_ZERO}offload_*.pin_memory": "host memory is always pinned",
        f"{_ZERO}offload_*.buffer_*": "sizes follow from the layers",
        f"{_ZERO}offload_*.fast_init": "of NVMe alone",
        f"{_ZERO}elastic_checkpoint": "any layout loads any checkpoint",
        f"{_ZERO}load_from_fp32_weights": "checkpoints hold the float32 weights",
        "fp16.loss_scale_window": "the scale doubles after 1000 steps without overflow",
        "fp16.hysteresis": "the scale halves at each overflow",
        "fp16.min_loss_scale": "the scale is bounded by itself",
        "fp16.initial_scale_power": "the scale starts at 2^16",
        "fp16.auto_cast": "precision casts inputs",
        "bf16.immediate_grad_update": "gradients are added as they come",
        "bf16.check_grad_overflow": "a step that isn't finite is skipped, and told",
        "fp16.consecutive_hysteresis": "the scale halves at each overflow",
        "communication_data_type": "sums are of float32; compress=bf16 in the layout rounds them",
        "prescale_gradients": "gradients are averaged over tokens",
        "gradient_predivide_factor": "gradients are averaged over tokens",
        "zero_allow_untested_optimizer": "AdamW is the optimizer",
        "zero_force_ds_cpu_optimizer": "offload=optimizer runs torch's AdamW on the host",
        "wall_clock_breakdown": "metrics.jsonl has the parts of each step",
        "memory_breakdown": "metrics.jsonl has the peak of each step",
        "dump_state": "the run directory has the config",
        "flops_profiler.*": "MFU is in every line",
        "comms_logger.*": "metrics.jsonl has bytes and seconds by axis",
        "tensorboard.*": "tensorboard/ is always written",
        "csv_monitor.*": "metrics.jsonl is always written",
        "checkpoint.load_universal": "any layout loads any checkpoint",
        "checkpoint.*": "a setting of how DeepSpeed writes files",
        "aio.*": "of NVMe alone",
        "nebula.*": "checkpoints are written while training goes on",
        "datastates.*": "checkpoints are written while training goes on",
        "timers.*": "metrics.jsonl has the parts of each step",
        "dataloader_drop_last": "whole batches alone are trained",
        "disable_allgather": "a choice of how DeepSpeed gathers",
        "managed_gradient_accumulation": "the loop counts micro-batches",
        "seq_parallel_communication_data_type": "tokens and heads travel in the layout's precision",
        "use_data_before_expert_parallel*": "ep divides the ranks of shard x cp x tp a second time",
        "vocabulary_size": "of a warning there alone",
        "log_level": "a choice of what DeepSpeed prints",
        "graph_harvesting": "no step is captured as a CUDA graph",
        "optimizer.legacy_fusion": "torch's fused AdamW runs",
        "activation_checkpointing.partition_activations": "sequence=true in the layout splits what is kept over tp",
        "activation_checkpointing.*": "choices of how DeepSpeed keeps them; recompute in the layout says how much",
        "tensor_parallel.tp_overlap_comm": "tp_overlap=4 in the layout hides tp's sums under products",
        "tensor_parallel.*": "choices of how AutoTP finds weights; the model is read here",
        "expert_parallel.preset_model": "the model is read here",
        "optimizer.params.torch_adam": "torch's AdamW runs",
        "optimizer.params.fused": "torch's fused AdamW runs",
        "zero_allow_comm_data_type*": "sums are of float32",
    },
    missing={
        f"{_ZERO}zero_quantized_weights": "compress_weights=int8 in the layout does the like",
        f"{_ZERO}zero_quantized_gradients": "compress=int8 in the layout does the like over copies",
        f"{_ZERO}zero_quantized_nontrainable_weights": "all weights are trained here",
        f"{_ZERO}offload_*.nvme_path": "nothing is offloaded to NVMe; offload=parameters keeps it in host memory",
        f"{_ZERO}offload_*.ratio": "offload takes all of the state",
        f"{_ZERO}zenflow.*": "updates are never late here; offload=optimizer is exact",
        "fp16.loss_scale": "the scale of fp16 is dynamic",
        "fp16.fp16_master_weights_and_grads": "master weights and moments are float32",
        "bf16.bf16_master_weights_and_grads": "master weights and moments are float32",
        "bf16.bf16_optimizer_states": "master weights and moments are float32",
        f"{_ZERO}zeropp_loco_param.*": "compress=int8 in the layout rounds without bias, and keeps no error",
        f"{_ZERO}save_muon_momentum_buffer_in_memory": "AdamW is the only optimizer",
        "activation_checkpointing.cpu_checkpointing": "activations aren't offloaded; recompute=full keeps fewer",
        "elasticity.*": "recovery replans by itself; train.batch stays the same on any number of devices",
        "optimizer.params.max_grad_norm": "optimizer.clip",
        "optimizer.params.*": "a setting of that optimizer; AdamW is the only one",
        "scheduler.params.*": "a setting of that schedule; shapes are cosine, linear, wsd and constant",
        "pipeline.*": "pp=N in the layout",
        "eigenvalue.*": "models aren't pruned or quantised in training",
        "quantize_training.*": "models aren't pruned or quantised in training",
        "weight_quantization.*": "models aren't pruned or quantised in training",
        "expert_parallel.*": "experts and their routing are the model type's own code",
        "wandb.*": 'write trackers = ["wandb"] under [monitor]',
        "comet.*": "trackers are wandb, mlflow and trackio, under [monitor]",
        "data_efficiency.*": "rows keep their length and order",
        "curriculum_learning.*": "rows keep their length and order",
        "progressive_layer_drop.*": "all layers run in every step",
        "compression_training.*": "models aren't pruned or quantised in training",
        "sparse_attention.*": "attention is the model's own",
        "autotuning.*": "meshwright plan searches layouts in a second",
        "amp.*": "precision=bf16 in the layout",
        "torch_autocast.*": "precision=bf16 in the layout",
        "compile.*": "compile=true in the layout",
        "hybrid_engine.*": "no reinforcement learning here",
        "sparse_gradients": "gradients are dense",
    },
    defaults={"optimizer.clip": 0.0},
    layout_keys={
        "train_batch_size": "`train.batch`",
        "train_micro_batch_size_per_gpu": "`layout: microbatches`",
        "gradient_accumulation_steps": "`layout: microbatches`",
        "zero_optimization.stage": "`layout: shard, zero`",
        "zero_optimization.mics_shard_size": "`layout: shard` of that degree, the rest `replicate`",
        "zero_optimization.zero_hpz_partition_size": "`layout: secondary`",
        "zero_optimization.offload_optimizer.device": "`layout: offload=optimizer`; NVMe is left out",
        "zero_optimization.offload_param.device": "`layout: offload=parameters`; NVMe is left out",
        "zero_optimization": "true, of old files: `layout: shard, zero=1`",
        "zero_optimization.cpu_offload": "`layout: offload=optimizer`, the old key",
        "zero_optimization.cpu_offload_param*": "`layout: offload=parameters`, the old key",
        "data_types.grad_accum_dtype": "fp32, as here; any other is left out",
        "bfloat16.enabled": "bf16.enabled, the old key",
        "gradient_allreduce_op": "mean; `sum` is left out",
        "bf16.enabled": "`layout: precision=bf16`",
        "fp16.enabled": "`layout: precision=fp16`",
        "tensor_parallel.autotp_size": "`layout: tp`",
        "expert_parallel.autoep_size": "`layout: ep`",
        "sequence_parallel_size": "`layout: cp, attention=heads` (Ulysses)",
        "optimizer.type": "AdamW; any other is left out",
        "optimizer.params.betas": "`optimizer.beta1`, `optimizer.beta2`",
        "optimizer.params.bias_correction": "true, as AdamW's; false is left out",
        "optimizer.params.adam_w_mode": "AdamW's decay; Adam's is left out",
        "scheduler.type": "`schedule.shape`: WarmupLR constant, WarmupDecayLR linear, WarmupCosineLR cosine",
        "scheduler.params.warmup_max_lr": "`optimizer.lr`",
        "scheduler.params.warmup_min_lr": "0, where a warm-up begins here",
        "scheduler.params.warmup_type": "`linear`; `log`, its default, is left out",
        "scheduler.params.cos_min_ratio": "`schedule.floor`",
        "scheduler.params.warmup_min_ratio": "0, where a warm-up begins here",
    },
)
_DEFAULT = "default of deepspeed"
_SHAPES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
_ADAMS = ("adam", "adamw", "fusedadam", "deepspeedcpuadam")


def read_deepspeed(config: Migration, path: str) -> None:
    """Answers the keys that a layout and an optimizer are made of.

    Args:
        config: the file's keys.
        path: of the file, for messages.

    Raises:
        ConfigError: when its batch sizes contradict each other, or nothing says how many devices there are.
    """
    _rename_old_keys(config)
    _read_batch(config, path)
    if config.word(name := "gradient_allreduce_op") == "sum":
        config.leave("gradients are averaged over tokens", name)
    else:
        config.drop("gradients are averaged over tokens", name)
    read_precision(config, "bf16.enabled", "fp16.enabled")
    summed = config.word(name := "data_types.grad_accum_dtype") in ("", "fp32")
    (config.drop if summed else config.leave)("gradients are summed in float32", name)
    read_offload(config, f"{_ZERO}offload_optimizer.device", f"{_ZERO}offload_param.device")
    _read_optimizer(config)
    _read_scheduler(config)


def _rename_old_keys(config: Migration) -> None:
    """Gives keys of old files the names that DeepSpeed gives them.

    Raises:
        ConfigError: the new name is there too.
    """
    old: dict[str, tuple[str, object]] = {f"{_ZERO}cpu_offload": (f"{_ZERO}offload_optimizer.device", "cpu")}
    for name in (f"{_ZERO}cpu_offload_param", f"{_ZERO}cpu_offload_params"):
        old[name] = (f"{_ZERO}offload_param.device", "cpu")
    old |= {name: (f"bf16.{name.removeprefix('bfloat16.')}", None) for name in config.values if "bfloat16." in name[:9]}
    if config.values.get("zero_optimization") is True:
        old["zero_optimization"] = (f"{_ZERO}stage", 1)
    for name, (new, value) in old.items():
        if name not in config.values:
            continue
        if new in config.values:
            raise ConfigError(f"{name} is the old name of {new}, which is there too; leave one of them")
        if value is not None and not config.flag(name):
            config.drop("off", name)
            continue
        written = config.take(name)
        config.drop(f"the old name of {new}", name)
        config.values[new] = written if value is None else value


def _read_batch(config: Migration, path: str) -> None:
    """Answers batch sizes, ZeRO and the axes, which share one product."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    rows, micro, accumulated = (config.count(name) for name in names)
    tp = config.lay_degree(
        "tp", config.count("tensor_parallel.autotp_size", least=0) or 1, "tensor_parallel.autotp_size"
    )
    cp = config.lay_degree("cp", config.count("sequence_parallel_size"), "sequence_parallel_size")
    if cp > 1:
        config.lay("attention", "heads", "sequence_parallel_size")
    tp *= cp  # ranks that read the same rows
    if rows and micro and accumulated:
        ranks = divided(rows, micro * accumulated, " / ".join(names))
        if config.devices not in (None, ranks * tp):
            config.require_devices(path)
            ranks = divided(
                config.devices or 0, tp, "devices over tensor_parallel.autotp_size x sequence_parallel_size"
            )
            accumulated = divided(rows, micro * ranks, f"{names[0]} over {config.devices} devices")
        config.devices = ranks * tp
    else:
        ranks = divided(
            config.require_devices(path), tp, "devices over tensor_parallel.autotp_size x sequence_parallel_size"
        )
        if rows and (micro or accumulated):
            part = divided(
                rows, ranks * (micro or accumulated or 1), f"{names[0]} over micro-batches of {ranks} data ranks"
            )
            accumulated = part if micro else accumulated
        # Without an accumulation DeepSpeed runs one micro-batch.
        accumulated = accumulated or 1
        if not rows and micro:
            rows = micro * accumulated * ranks
    config.set("train.batch", rows or accumulated * ranks, *names, why="one row of each rank; set it")
    if accumulated > 1:
        config.lay("microbatches", accumulated, *names[1:])
    enabled = config.take("expert_parallel.enabled")
    size = config.count("expert_parallel.autoep_size") if enabled is not False else None
    config.drop("autoep_size says it", "expert_parallel.enabled")
    config.lay_degree("ep", size, "expert_parallel.autoep_size")
    stage, mics = f"{_ZERO}stage", f"{_ZERO}mics_shard_size"
    zero, shard = config.count(stage, least=0) or 0, config.number(mics) or 0
    config.lay_data_axes(zero, ranks, max(0, int(shard)), stage, mics)
    secondary = config.count(f"{_ZERO}zero_hpz_partition_size")
    if (secondary or 1) > 1 and zero == 3 and secondary != ranks:
        config.lay("secondary", secondary, f"{_ZERO}zero_hpz_partition_size")
    else:
        config.drop("all ranks that share the state", f"{_ZERO}zero_hpz_partition_size")


def read_precision(config: Migration, bf16: str, fp16: str) -> None:
    """Answers the keys of two low precisions, which are on or off.

    Raises:
        ConfigError: when both are on.
    """
    for key, precision in ((bf16, "bf16"), (fp16, "fp16")):
        if config.flag(key):
            if "precision" in config.layout:
                raise ConfigError(f"{config.origin(bf16, fp16)}: only one of them can hold; leave bf16")
            config.lay("precision", precision, key)
        else:
            config.drop("off", key)


def read_offload(config: Migration, optimizer: str, parameters: str) -> None:
    """Answers where optimizer state and parameters lie."""
    for key, choice in ((optimizer, "optimizer"), (parameters, "parameters")):
        device = config.word(key)
        if device == "cpu":
            config.lay("offload", choice, key)
        elif device == "nvme":
            config.leave(f"nothing is offloaded to NVMe; offload={choice} keeps it in host memory", key)
        else:
            config.drop("off", key)


def _read_optimizer(config: Migration) -> None:
    kind = config.word("optimizer.type")
    if kind in _ADAMS:
        config.drop("AdamW is the optimizer", "optimizer.type")
    elif kind:
        config.leave("AdamW is the only optimizer; its rate and decay want values of their own", "optimizer.type")
    if config.take("optimizer.params.adam_w_mode") is False:
        config.leave("weight decay is decoupled, as AdamW's", "optimizer.params.adam_w_mode")
    else:
        config.drop("weight decay is decoupled", "optimizer.params.adam_w_mode")
    if config.take(name := f"{_OPTIMIZER}bias_correction") in (False, "false"):
        config.leave("AdamW always corrects its moments; schedule.warmup shapes its first steps", name)
    else:
        config.drop("AdamW corrects its moments", name)
    betas = config.take("optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == 2:
        config.set("optimizer.beta1", betas[0], "optimizer.params.betas")
        config.set("optimizer.beta2", betas[1], "optimizer.params.betas")
    elif betas is not None:
        raise ConfigError(f"{config.origin('optimizer.params.betas')}: they are two numbers, as [0.9, 0.95]")
    elif kind in _ADAMS:
        config.set("optimizer.beta2", 0.999, why=_DEFAULT)
    if kind in _ADAMS and f"{_OPTIMIZER}weight_decay" not in config.values:
        config.set("optimizer.weight_decay", 0.0, why=_DEFAULT)
    if kind and "scheduler.type" not in config.values:
        config.missing.append(
            "scheduler: the file has none, so the rate stays unless the script changes it; shape, warmup and floor are "
            "those of [schedule]"
        )


def _read_scheduler(config: Migration) -> None:
    kind = config.word("scheduler.type")
    shape = _SHAPES.get(kind)
    if shape:
        config.set("schedule.shape", shape, "scheduler.type")
        floor = config.number(f"{_SCHEDULER}cos_min_ratio")
        if shape != "constant":
            default = 0.0001 if shape == "cosine" else 0.0
            config.set(
                "schedule.floor", default if floor is None else floor, f"{_SCHEDULER}cos_min_ratio", "scheduler.type"
            )
    elif kind:
        config.leave("shapes are cosine, linear, wsd and constant, after a linear warm-up", "scheduler.type")
    if shape and f"{_SCHEDULER}warmup_num_steps" not in config.values:
        config.set("schedule.warmup", 1000, why=_DEFAULT)
    if shape in ("constant", "linear") and f"{_SCHEDULER}warmup_max_lr" not in config.values:
        config.values[f"{_SCHEDULER}warmup_max_lr"] = 0.001  # its default, which goes over the optimizer's rate
    peak = config.number(f"{_SCHEDULER}warmup_max_lr")
    if peak is not None:
        config.set("optimizer.lr", peak, f"{_SCHEDULER}warmup_max_lr")
        if config.values.get(f"{_OPTIMIZER}lr") not in (None, "auto"):
            config.take(f"{_OPTIMIZER}lr")
            config.drop("the schedule's peak goes over it there", f"{_OPTIMIZER}lr")
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        if config.number(_SCHEDULER + name):
            config.leave("a warm-up begins at 0", _SCHEDULER + name)
        else:
            config.drop("a warm-up begins at 0", _SCHEDULER + name)
    warmup_type = config.word(f"{_SCHEDULER}warmup_type")
    if warmup_type == "linear":
        config.drop("a warm-up is linear", f"{_SCHEDULER}warmup_type")
    elif shape:
        why = "a warm-up is linear; deepspeed's is logarithmic unless warmup_type says linear"
        config.leave(why, "scheduler.type" if not warmup_type else f"{_SCHEDULER}warmup_type")
