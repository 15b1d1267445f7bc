"""Torchtitan's flags of 2026 and its TOML files of before.

Source: torchtitan b5bcd76 (config/configs.py, components/optimizer), and the train_configs of its releases up to 0.2.
"""

from __future__ import annotations

from meshwright.errors import ConfigError
from meshwright.jobs.migrate.foreign import Foreign, Migration, divided
from meshwright.jobs.migrate.torchtitan_model import read_torchtitan_model
from meshwright.planner.emit import TORCHTITAN_SCHEDULES
from meshwright.spec.layout_fields import DEFAULT_SCHEDULE

_P, _T, _AC = "parallelism.", "training.", "activation_checkpoint."
TORCHTITAN = Foreign(
    name="torchtitan",
    settings={
        "optimizer.lr": "optimizer.lr",
        "optimizer.beta1": "optimizer.beta1",
        "optimizer.beta2": "optimizer.beta2",
        "optimizer.eps": "optimizer.eps",
        "optimizer.weight_decay": "optimizer.weight_decay",
        f"{_T}max_norm": "optimizer.clip",
        f"{_T}steps": "train.steps",
        f"{_T}seed": "train.seed",
        "debug.seed": "train.seed",
        "lr_scheduler.warmup_steps": "schedule.warmup",
        "lr_scheduler.min_lr_factor": "schedule.floor",
        "lr_scheduler.lr_min": "schedule.floor",
        "lr_scheduler.decay_ratio": "schedule.decay_share",
        "checkpoint.interval": "checkpoint.every",
        "checkpoint.keep_latest_k": "checkpoint.keep",
        "validation.freq": "evaluation.every",
        "validator.freq": "evaluation.every",
        "metrics.log_freq": "monitor.every",
    },
    needless={
        "job.*": "a run has a directory of its own; --run names it",
        "profiling.*": "monitor.timeline records phases and waits of chosen steps",
        "profiler.*": "monitor.timeline records phases and waits of chosen steps",
        "metrics.enable_tensorboard": "tensorboard/ is always written",
        "metrics.*": "metrics.jsonl and tensorboard/ are in the run directory",
        "checkpoint.*": "checkpoints are in the run directory, written while training goes on; any layout loads them",
        "validation.*": "the last evaluation takes all held-out text",
        "comm.*": "launch has limits of waiting; hangs are named",
        f"{_T}gc_*": "a setting of Python's garbage collection",
        f"{_T}disable_cuda_graphs": "no step is captured as a CUDA graph",
        f"{_P}enable_fsdp_symm_mem": "a choice of how gathers travel there",
        "compile.enable_async_tensor_parallel": "tp_overlap=4 in the layout does the like",
        "dump_folder": "a run has a directory of its own; --run names it",
        "loss.*": "loss_chunk in the layout says how many logits exist at once",
        "validator.*": "the last evaluation takes all held-out text",
        f"{_T}mixed_precision_reduce": "sums are of float32; compress=bf16 in the layout rounds them",
        f"{_P}disable_loss_parallel": "with tp the loss is over parts of the vocabulary; its numbers are the same",
        f"{_P}enable_compiled_autograd": "layers are compiled one by one",
        f"{_P}fsdp_reshard_after_forward": "no ranks share the state",
        f"{_P}num_pp_microbatches": "no pipeline",
        f"{_P}pipeline_parallel_*": "no pipeline, or stages are balanced by cost; split= in the layout says otherwise",
        f"{_P}spmd_backend": "a choice of how it is built there",
        f"{_P}context_parallel_*": "causal rows are balanced under gather and ring",
        f"{_P}expert_parallel_comm_backend": "ep_node=8 in the layout sends a token once to each node of 8",
        f"{_P}hybridep*": "ep_node=8 in the layout sends a token once to each node of 8",
        f"{_P}expert_tensor_parallel_degree": "ep divides the ranks of shard x cp x tp a second time",
        "experimental.enable_async_tensor_parallel": "tp_overlap=4 in the layout does the like",
        f"{_P}enable_async_tensor_parallel": "tp_overlap=4 in the layout does the like",
        "compile.*": "layers are compiled one by one, by the inductor",
        "optimizer.implementation": "optimizer.implementation is fused, and single on request",
        "optimizer.fused": "the fused kernel runs",
        "optimizer.early_step_in_backward": "the update runs after the norm is known, which clipping needs",
        f"{_AC}selective_ac_option": "recompute=selective keeps products of matrices; selective:K in K layers",
        f"{_AC}*": "recompute in the layout says what is kept",
        "model.print_after_conversion": "meshwright inspect shows the model",
        "debug.deterministic*": "runs on one layout repeat where torch's kernels do",
        "debug.print_config": "the run directory has the config",
        "debug.save_config_file": "the run directory has the config",
        "debug.enable_structured_logging": "the run directory has the log",
        "debug.spmd_typechecking": "meshwright verify is for that",
        "debug.detect_anomaly": "a step that isn't finite is skipped, and told",
        "float8.enable_fsdp_float8_all_gather": "compress_weights=fp8 in the layout does the like",
        "float8.*": "precision=fp8 or fp8_rowwise in the layout",
    },
    missing={
        "job.custom_config_module": "code of its own can't be brought along",
        "metrics.enable_wandb": 'write trackers = ["wandb"] under [monitor]',
        "checkpoint.initial_load_path": "weights come from a directory in Hugging Face format as model.name",
        "checkpoint.load_step": "a run goes on from its newest checkpoint",
        "checkpoint.exclude_from_loading": "a run goes on from its own directory with all of its state",
        "checkpoint.last_save_in_hf": "meshwright export converts a checkpoint to the Hugging Face format",
        "validation.dataset": "data.validation_share is the share held out",
        "validation.dataset_path": "data.validation_share is the share held out",
        "validation.steps": "evaluation.rows are the rows of an evaluation",
        "validator.dataloader.*": "data.validation_share is the share held out",
        "validator.steps": "evaluation.rows are the rows of an evaluation",
        f"{_P}pipeline_parallel_schedule_csv": "schedule= in the layout takes a schedule by its name",
        f"{_T}debug_moe_force_load_balance": "routing is the model type's own code",
        "debug.moe_force_load_balance": "routing is the model type's own code",
        "debug.batch_invariant": "kernels are torch's, which may sum in another order for another batch",
        "float8.filter_fqns": "precision=fp8 is of all the layers' products, and never of the head",
        f"{_T}dataset": 'write paths = ["..."] of text under [data]',
        f"{_T}dataset_path": 'write paths = ["..."] of text under [data]',
        "dataloader.*": 'write paths = ["..."] of text under [data]',
        "model.*path*": "a directory in Hugging Face format is model.name, or data.tokenizer",
        f"{_P}module_fqns_per_model_part": "split= in the layout takes the layers of each stage, as 5-7-6-6",
        "model_spec.*": "sizes follow where they are public; else write them under [model]",
        "override.*": "code of its own can't be brought along",
        "tokenizer.*": "a directory in Hugging Face format is data.tokenizer",
        "hf_assets_path": "a directory in Hugging Face format is data.tokenizer",
        "model.flavor": "no public sizes are known by that name; write layers, width and heads under [model]",
        "model.name": "no public sizes are known by that name; write the Hugging Face type under [model]",
        "model.norm_type": "the norm is the model type's",
        "optimizer.name": "AdamW is the only optimizer; its rate and decay want values of their own",
        "optimizer.*": "AdamW is the only optimizer, with one group of settings",
        "lr_scheduler.total_steps": "the schedule goes over train.steps",
        f"{_T}gradient_accumulation_steps": "microbatches in the layout",
        f"{_T}dtype": "master weights are float32; bf16 alone, without them, isn't trained",
        f"{_T}deterministic": "runs on one layout repeat where torch's kernels do",
        "fault_tolerance.*": "recovery is on; islands and outer.* are DiLoCo",
        "experimental.custom_import": "code of its own can't be brought along",
        "experimental.custom_args_module": "code of its own can't be brought along",
        "quantize.*filter_fqns": "precision=fp8 is of all the layers' products, and never of the head",
        "quantize.*enable_fsdp_float8_all_gather": "compress_weights=fp8 in the layout does the like",
        "quantize.*precompute_float8_*": "compress_weights=fp8 in the layout does the like",
        "mx.*": "precision=fp8 in the layout; MX formats aren't there",
        "quantize.*": "precision=fp8 in the layout",
        "ema.*": "no average of the weights is kept",
    },
    defaults={
        "optimizer.lr": 8e-4,
        "optimizer.decay": "all",
        "train.steps": 10000,
        "schedule.shape": "linear",
        "schedule.floor": 0.0,
        "schedule.warmup": 200,
    },
    layout_keys={
        "parallelism.data_parallel_replicate_degree": "`layout: replicate`",
        "parallelism.data_parallel_shard_degree": "`layout: shard`; -1 by `--devices`",
        "parallelism.fsdp_reshard_after_forward": "`layout: zero=3`; 2 for `never`, or `default` with a pipeline",
        "parallelism.tensor_parallel_degree": "`layout: tp`",
        "parallelism.enable_sequence_parallel": "`layout: sequence=true`, unless off",
        "parallelism.context_parallel_degree": "`layout: cp, attention=gather`",
        "parallelism.context_parallel_rotate_method": "`layout: attention`: allgather gather, alltoall ring",
        "parallelism.expert_parallel_degree": "`layout: ep`",
        "parallelism.pipeline_parallel_degree": "`layout: pp`",
        "parallelism.pipeline_parallel_schedule": "`layout: schedule`; one that isn't there is left out",
        "parallelism.pipeline_parallel_layers_per_stage": "`layout: stages`",
        "parallelism.num_pp_microbatches": "`layout: microbatches`",
        "parallelism.pipeline_parallel_microbatch_size": "`layout: microbatches`",
        "training.num_tokens_per_microbatch_per_dp_rank": "`layout: microbatches`",
        "training.num_tokens_per_train_step": "`train.batch`, by the rows' length",
        "training.max_context_length": "`data.sequence`",
        "training.seq_len": "`data.sequence`",
        "training.local_batch_size": "`train.batch`",
        "training.batch_size": "`train.batch`",
        "training.global_batch_size": "`train.batch`, `layout: microbatches`",
        "training.mixed_precision_param": "`layout: precision`",
        "training.enable_cpu_offload": "`layout: offload=parameters`",
        "training.compile": "`layout: compile=true`",
        "compile.enable": "`layout: compile=true`",
        "activation_checkpoint.mode": "`layout: recompute`",
        "job.config_file": "refused: give that file to `--from`",
        "quantize.linear.float8.recipe_name": "`layout: precision=fp8_rowwise` for rowwise",
        "float8.recipe_name": "`layout: precision=fp8_rowwise` for rowwise",
        "config": "left out: a function of torchtitan's Python; sizes follow where they are public",
        "module": "left out: where that function is",
        "model.converters": "`layout: precision=fp8` for float8",
        "model.name": "`model.name`",
        "model.flavor": "the model's sizes, where they are public",
        "optimizer.name": "AdamW; any other is left out",
        "lr_scheduler.decay_type": "`schedule.shape`; sqrt is left out",
    },
)


def read_torchtitan(config: Migration, path: str) -> None:
    """Answers the keys that a layout, a batch and a model are made of.

    Args:
        config: the file's keys.
        path: of the file, for messages.

    Raises:
        ConfigError: when degrees or batch sizes contradict each other, or nothing says how many devices there are.
    """
    if (other := config.take("job.config_file")) is not None:
        raise ConfigError(
            f"{path}: the settings are in {str(other)[:200]}; give that file to --from, and put the flags into it"
        )
    # Older files have pp under [experimental] and degrees under [training].
    for name in list(config.values):
        section, _, key = name.rpartition(".")
        if section in ("experimental", "training") and key.endswith(("_degree", "_schedule")):
            if _P + key in config.values:
                raise ConfigError(f"{name} and {_P}{key} are one setting; leave one of them")
            config.values[_P + key] = config.values.pop(name)
    layers = read_torchtitan_model(config)
    readers, shard, pp = _read_degrees(config, path)
    if shard > 1:
        reshard = config.word(f"{_P}fsdp_reshard_after_forward")
        zero = 2 if reshard == "never" or (pp > 1 and reshard != "always") else 3
        config.lay("zero", zero, f"{_P}fsdp_reshard_after_forward", why="FSDP2")
    _read_batch(config, readers, pp)
    if pp > 1:
        _read_pipeline(config, pp, layers)
    _read_choices(config)


def _read_degrees(config: Migration, path: str) -> tuple[int, int, int]:
    """Answers the degrees; returns the readers of rows, the ranks that share the state, and the pipeline's."""
    keys = {
        axis: f"{_P}{word}_parallel_degree" for axis, word in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline"))
    }
    tp, cp, pp = (config.lay_degree(axis, config.count(key), key) for axis, key in keys.items())
    ep_key, copies_key, shard_key = (
        f"{_P}{word}_degree" for word in ("expert_parallel", "data_parallel_replicate", "data_parallel_shard")
    )
    config.lay_degree("ep", config.count(ep_key), ep_key)
    copies = config.count(copies_key) or 1
    shard = config.number(shard_key)
    inner = tp * cp * pp
    if shard is None or shard < 1:  # -1, and its default: what is left
        ranks = config.require_devices(path)
        shard = divided(ranks, inner * copies, f"devices = {ranks} over the degrees")
    shard = int(shard)
    if config.devices not in (None, inner * copies * shard):
        raise ConfigError(
            f"the degrees of {path} multiply to {inner * copies * shard} devices, not {config.devices}; leave "
            f"--devices out, or set {shard_key} to -1 there"
        )
    config.devices = inner * copies * shard
    config.lay_degree("replicate", copies, copies_key)
    config.lay_degree("shard", shard, shard_key)
    if "shard" in config.layout and not config.origin(shard_key):
        config.lay("shard", shard, why="what the other degrees leave")
    sequence_key = f"{_P}enable_sequence_parallel"
    if tp > 1 and config.take(sequence_key) in (None, True, "true"):
        config.lay("sequence", "true", sequence_key, why="torchtitan's tp splits tokens too")
    else:
        config.drop("off", sequence_key)
    method = config.word(f"{_P}context_parallel_rotate_method", "experimental.context_parallel_rotate_method")
    if cp > 1:
        config.lay("attention", "ring" if method == "alltoall" else "gather", keys["cp"])
        if shard == 1:
            config.tell_state_over_cp()
    config.drop(
        "attention in the layout", f"{_P}context_parallel_rotate_method", "experimental.context_parallel_rotate_method"
    )
    return copies * shard, shard, pp


def _read_batch(config: Migration, readers: int, pp: int) -> None:
    """Answers rows, tokens and micro-batches, in tokens (2026) or in rows (before)."""
    sequence_keys = (f"{_T}max_context_length", f"{_T}seq_len")
    sequence = config.count(*sequence_keys) or 2048
    config.set("data.sequence", sequence, *sequence_keys, why="default of torchtitan")
    pp_key = f"{_P}num_pp_microbatches"
    in_tokens = (f"{_T}num_tokens_per_train_step", f"{_T}num_tokens_per_microbatch_per_dp_rank")
    if any(key in config.values for key in in_tokens):
        step, part = config.number(in_tokens[0]) or -1, config.count(in_tokens[1]) or 16384
        piped = (config.count(pp_key) or 1) if pp > 1 else 1
        step = int(step) if step > 0 else part * piped * readers
        rows = divided(step, sequence, f"{in_tokens[0]} over {sequence} tokens a row")
        microbatches = divided(step, part * readers, f"{in_tokens[0]} over {readers} readers")
        config.drop("follows from the step's tokens", pp_key)
        config.set("train.batch", rows, *in_tokens)
        names: tuple[str, ...] = in_tokens
    else:
        local_keys, part_key = (f"{_T}local_batch_size", f"{_T}batch_size"), f"{_P}pipeline_parallel_microbatch_size"
        local = config.count(*local_keys) or 8
        whole = config.number(f"{_T}global_batch_size") or -1
        whole = int(whole) if whole > 0 else local * readers
        names = (f"{_T}global_batch_size", *local_keys)
        microbatches = divided(whole, local * readers, f"global_batch_size over {readers} readers of {local} rows")
        if pp > 1:
            part = config.count(part_key) or 1
            microbatches *= config.count(pp_key) or divided(local, part, f"local_batch_size over {part_key}")
            names += (part_key, pp_key)
        config.set("train.batch", whole, *names, why="default of torchtitan, 8 rows of each reader")
    if microbatches > 1:
        config.lay("microbatches", microbatches, *names)


def _read_pipeline(config: Migration, pp: int, layers: int) -> None:
    """Answers schedule and stages."""
    name = f"{_P}pipeline_parallel_schedule"
    written = config.word(name)
    schedule = next((ours for ours, theirs in TORCHTITAN_SCHEDULES.items() if theirs.lower() == written), "")
    if schedule == DEFAULT_SCHEDULE:
        config.drop(f"{schedule} runs where a layout names none", name)
    elif schedule:
        config.lay("schedule", schedule, name)
    else:
        config.leave(f"schedules of both are {', '.join(TORCHTITAN_SCHEDULES)}; 1f1b runs", name)
    each = config.count(f"{_P}pipeline_parallel_layers_per_stage")
    if each and layers and (stages := -(-layers // each)) > pp:
        config.lay("stages", divided(stages, pp, "stages over pp"), f"{_P}pipeline_parallel_layers_per_stage")
    else:
        config.drop("stages follow from the schedule", f"{_P}pipeline_parallel_layers_per_stage")


def _read_choices(config: Migration) -> None:
    """Answers precision, recompute, compile, offload, optimizer and schedule."""
    converters = str(config.take("model.converters") or "")
    if "float8" in converters:
        names = ("quantize.linear.float8.recipe_name", "float8.recipe_name")
        scales = config.word(*names)
        config.lay("precision", "fp8_rowwise" if scales == "rowwise" else "fp8", "model.converters", *names)
        if scales not in ("", "none", "tensorwise", "rowwise"):
            config.leave("precision=fp8 has a scale for each tensor, fp8_rowwise for each row", *names)
    else:
        if converters not in ("", "[]"):
            config.leave("precision=fp8 in the layout; other converters aren't there", "model.converters")
        config.drop("none", "model.converters")
        if config.word(f"{_T}mixed_precision_param") != "float32":
            config.lay("precision", "bf16", f"{_T}mixed_precision_param", why="default of torchtitan")
    config.drop("precision in the layout", f"{_T}mixed_precision_param")
    mode = config.word(f"{_AC}mode", "activation-checkpoint")
    names = (f"{_AC}mode", "activation-checkpoint")
    if mode in ("full", "selective", ""):
        config.lay("recompute", mode or "selective", *names, why="default of torchtitan")
    elif mode == "none":
        config.drop("off", *names)
    else:
        config.leave("recompute is none, full or selective", *names)
    for keys, choice, value in (
        (("compile.enable", f"{_T}compile"), "compile", "true"),
        ((f"{_T}enable_cpu_offload",), "offload", "parameters"),
    ):
        if config.flag(*keys):
            config.lay(choice, value, *keys)
        else:
            config.drop("off", *keys)
    if config.word("optimizer.name") in ("adamw", "adam"):
        config.drop("AdamW is the optimizer", "optimizer.name")
    elif config.origin("optimizer.name"):
        config.leave(TORCHTITAN.missing["optimizer.name"], "optimizer.name")
    _read_warmup(config)
    for name in ("checkpoint.load_step", "validation.steps", "validator.steps"):
        if str(config.values.get(name)) == "-1":
            config.take(name)
            config.drop("the newest checkpoint, and all held-out text at the end", name)
    for section in ("validation", "validator"):
        if not config.flag(f"{section}.enable"):
            for name in [name for name in config.values if name.startswith(f"{section}.")]:
                config.take(name)
                config.drop(f"{section}.enable is off", name)
        config.drop("evaluation.every says it", f"{section}.enable")
    decay = config.word("lr_scheduler.decay_type")
    ratio = config.values.get("lr_scheduler.decay_ratio")
    if ratio is not None:
        config.set("schedule.shape", "wsd", "lr_scheduler.decay_type", why="lr_scheduler.decay_ratio")
    elif decay in ("linear", "cosine"):
        config.set("schedule.shape", decay, "lr_scheduler.decay_type")
    if decay and (decay not in ("linear", "cosine") or (ratio is not None and decay != "linear")):
        config.leave("shapes are cosine, linear and wsd, which decays linearly", "lr_scheduler.decay_type")


def _read_warmup(config: Migration) -> None:
    """Answers a warm-up that is longer than the schedule, which torchtitan shortens to it."""
    name = "lr_scheduler.warmup_steps"
    steps = config.values.get("lr_scheduler.total_steps") or config.values.get(f"{_T}steps", 10000)
    warmup = config.values.get(name, 200)
    if isinstance(steps, int) and isinstance(warmup, int) and warmup > steps:
        config.take(name)
        config.set("schedule.warmup", steps, name, why="torchtitan shortens a warm-up to its steps")
