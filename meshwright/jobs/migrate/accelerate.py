"""Accelerate's YAML. Source: huggingface/accelerate of 2026 (commands/config/config_args.py, utils/dataclasses.py)."""

from __future__ import annotations

from meshwright.errors import ConfigError
from meshwright.jobs.migrate.deepspeed import read_offload
from meshwright.jobs.migrate.foreign import Foreign, Migration, divided

_FSDP, _DEEPSPEED = "fsdp_config.fsdp_", "deepspeed_config."
_MEGATRON, _PARALLEL = "megatron_lm_config.megatron_lm_", "parallelism_config.parallelism_config_"
ACCELERATE = Foreign(
    name="accelerate",
    settings={f"{_DEEPSPEED}gradient_clipping": "optimizer.clip", f"{_MEGATRON}gradient_clipping": "optimizer.clip"},
    needless={
        "compute_environment": "ranks start as --hostfile, --nodes, torchrun or --on say",
        "machine_rank": "--node says it",
        "main_process_ip": "--meet, or the launcher, says it",
        "main_process_port": "--meet, or the launcher, says it",
        "main_training_function": "meshwright has the loop",
        "main_process_*": "the launcher says it",
        "commands": "of TPUs alone",
        "command_file": "of TPUs alone",
        "rdzv_backend": "ranks meet over meshwright's own port",
        "same_network": "the cluster says it",
        "enable_cpu_affinity": "the launcher binds ranks",
        "num_machines": "--nodes or the hostfile says it",
        "gpu_ids": "CUDA_VISIBLE_DEVICES says it",
        "debug": "verify proves collectives before the first step",
        "use_cpu": "ranks are on GPUs where there are some",
        "tpu_*": "of TPUs alone",
        "downcast_bf16": "of TPUs alone",
        "dynamo_config.dynamo_*": "layers are compiled one by one, by the inductor",
        f"{_FSDP}version": "FSDP2",
        f"{_FSDP}auto_wrap_policy": "a repeated layer is a unit",
        f"{_FSDP}transformer_layer_cls_to_wrap": "the repeated layers are found when the model is read",
        f"{_FSDP}min_num_params": "a repeated layer is a unit",
        f"{_FSDP}backward_prefetch*": "the next layer travels while one computes",
        f"{_FSDP}forward_prefetch": "the next layer travels while one computes",
        f"{_FSDP}cpu_ram_efficient_loading": "each rank reads its own slices",
        f"{_FSDP}sync_module_states": "each rank reads its own slices of the same files",
        f"{_FSDP}state_dict_type": "a checkpoint is sharded, and any layout loads it",
        f"{_FSDP}use_orig_params": "FSDP2 keeps parameters as they are",
        f"{_DEEPSPEED}zero3_init_flag": "weights are built as a rank's own part only",
        f"{_DEEPSPEED}zero3_save_16bit_model": "meshwright export gathers and converts",
        f"{_DEEPSPEED}deepspeed_moe_layer_cls_names": "experts are found when the model is read",
        f"{_DEEPSPEED}deepspeed_multinode_launcher": "--hostfile, --on slurm and others start the nodes",
        f"{_DEEPSPEED}deepspeed_hostfile": "--hostfile reads that file",
        f"{_PARALLEL}cp_backend": "cp is torch's collectives",
        f"{_PARALLEL}sp_*": "the split of tokens for heads fits any length and any kernel of attention",
        f"{_DEEPSPEED}seq_parallel_communication_data_type": "tokens and heads travel in the layout's precision",
        f"{_MEGATRON}no_*_optim": "a run goes on from its own directory with all of its state",
        f"{_MEGATRON}attention_softmax_in_fp32": "the model's own code says it",
        f"{_MEGATRON}attention_backend": "model.attention takes torch's fused kernels where the family has them",
        f"{_MEGATRON}calculate_per_token_loss": "the loss is a mean over tokens",
        f"{_MEGATRON}overlap_cpu_optimizer_d2h_h2d": "copies travel beside the update",
        f"{_MEGATRON}expert_tensor_parallel_size": "ep divides the ranks of shard x cp x tp a second time",
    },
    missing={
        f"{_FSDP}ignored_modules": "all weights are sharded",
        f"{_DEEPSPEED}deepspeed_inclusion_filter": "leave the other nodes out of the hostfile",
        f"{_DEEPSPEED}deepspeed_exclusion_filter": "leave these nodes out of the hostfile",
        f"{_DEEPSPEED}offload_*_nvme_path": "nothing is offloaded to NVMe; offload=parameters keeps it in host memory",
        f"{_MEGATRON}decoder_last_pipeline_num_layers": "stages are balanced by cost; split= says otherwise",
        f"{_MEGATRON}eod_mask_loss": "data.mask_documents masks targets, attention and positions",
        f"{_MEGATRON}*_dropout": "model.dropout, where the model type has it",
        f"{_MEGATRON}recompute_method": "recompute=full:K in the layout recomputes K layers",
        f"{_MEGATRON}recompute_num_layers": "recompute=full:K in the layout recomputes K layers",
        f"{_MEGATRON}use_rotary_position_embeddings": "positions are those of the model type",
        f"{_MEGATRON}use_custom_fsdp": "shard=N,zero=3 in the layout",
        f"{_MEGATRON}use_precision_aware_optimizer": "master weights and moments are float32",
        "fp8_config.*": "precision=fp8 scales each tensor by its present values, fp8_rowwise each row",
        "ipex_config.*": "torch's own operators run",
        "mpirun_config.*": "--hostfile starts the nodes",
    },
    defaults={},
    layout_keys={
        "distributed_type": "FSDP, DEEPSPEED, MEGATRON_LM, MULTI_GPU, MULTI_CPU, NO; any other is refused",
        "num_processes": "`devices`; distributed_type NO starts one whatever it says",
        "mixed_precision": "`layout: precision`",
        "gradient_accumulation_steps": "`layout: microbatches`",
        "dynamo_config.dynamo_backend": "`layout: compile=true`",
        "fsdp_config.fsdp_sharding_strategy": "`layout: shard, zero`; HYBRID_SHARD `replicate` by `num_machines`",
        "fsdp_config.fsdp_reshard_after_forward": "`layout: zero=3`, or 2 where false",
        "fsdp_config.fsdp_offload_params": "`layout: offload=parameters`",
        "fsdp_config.fsdp_activation_checkpointing": "`layout: recompute=full`",
        "deepspeed_config.deepspeed_config_file": "refused: give that file to `--from`",
        "deepspeed_config.zero_stage": "`layout: shard, zero`",
        "deepspeed_config.gradient_accumulation_steps": "`layout: microbatches`",
        "deepspeed_config.offload_optimizer_device": "`layout: offload=optimizer`",
        "deepspeed_config.offload_param_device": "`layout: offload=parameters`",
        "parallelism_config.parallelism_config_dp_replicate_size": "`layout: replicate`",
        "parallelism_config.parallelism_config_dp_shard_size": "`layout: shard`",
        "parallelism_config.parallelism_config_tp_size": "`layout: tp`",
        "parallelism_config.parallelism_config_cp_size": "`layout: cp`",
        "parallelism_config.parallelism_config_cp_comm_strategy": "`layout: attention`; alltoall is ring",
        "parallelism_config.parallelism_config_sp_size": "`layout: cp, attention=heads` (Ulysses)",
        "megatron_lm_config.megatron_lm_tp_degree": "`layout: tp`",
        "megatron_lm_config.megatron_lm_pp_degree": "`layout: pp`",
        "megatron_lm_config.megatron_lm_context_parallel_size": "`layout: cp, attention=ring`",
        "megatron_lm_config.megatron_lm_expert_model_parallel_size": "`layout: ep`",
        "megatron_lm_config.megatron_lm_recompute_granularity": "`layout: recompute`",
        "megatron_lm_config.megatron_lm_optimizer_cpu_offload": "`layout: offload=optimizer`",
        "megatron_lm_config.megatron_lm_num_micro_batches": "`layout: microbatches`",
        "megatron_lm_config.megatron_lm_sequence_parallelism": "`layout: sequence=true`",
        "megatron_lm_config.megatron_lm_recompute_activations": "`layout: recompute=selective`",
        "megatron_lm_config.megatron_lm_use_distributed_optimizer": "`layout: shard, zero=1`",
    },
)
_ACCUMULATED = "gradient_accumulation_steps"
_KINDS = ("fsdp", "deepspeed", "megatron_lm", "multi_gpu", "multi_cpu", "no", "false", "")
_SECTIONS = {"fsdp": _FSDP, "deepspeed": _DEEPSPEED, "megatron_lm": _MEGATRON}
"""Where each kind of job has its keys; accelerate reads no other section."""
_STRATEGIES = {
    "full_shard": 3, "1": 3, "shard_grad_op": 2, "2": 2, "no_shard": 0, "3": 0, "hybrid_shard": 3, "4": 3,
    "hybrid_shard_zero2": 2, "5": 2,
}  # fmt: skip
"""ZeRO levels of FSDP's strategies, by name and number. Source: torch.distributed.fsdp, ShardingStrategy."""
_PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}


def read_accelerate(config: Migration, path: str) -> None:
    """Answers the keys that a layout is made of; optimizer, data and batch are in the user's script there.

    Args:
        config: the file's keys.
        path: of the file, for messages.

    Raises:
        ConfigError: for a kind of job that can't be, or another file that has the settings.
    """
    kind = config.word("distributed_type")
    if kind not in _KINDS:
        raise ConfigError(f"distributed_type: {kind.upper()} isn't trained here; FSDP, DEEPSPEED and MULTI_GPU are")
    config.drop("the layout says it", "distributed_type")
    for name in list(config.values) if kind else ():
        if any(name.startswith(prefix) for section, prefix in _SECTIONS.items() if section != kind):
            config.take(name)
            config.drop("not read there beside this distributed_type", name)
    other = config.take(f"{_DEEPSPEED}deepspeed_config_file")
    if other is not None:
        processes = config.take("num_processes")
        raise ConfigError(
            f"{path}: the settings are in {str(other)[:200]}; write meshwright new --from that file"
            + (f" --devices {processes}" if isinstance(processes, int) else "")
        )
    config.devices = ranks = _read_ranks(config, kind, path)
    machines = config.values.get("num_machines")
    _read_axes(config, kind, ranks, machines if isinstance(machines, int) and machines > 0 else 1)
    precision = config.word("mixed_precision")
    if precision in _PRECISIONS:
        config.lay("precision", _PRECISIONS[precision], "mixed_precision")
    elif precision not in ("no", "false", ""):
        config.leave(f"precision is one of {', '.join(_PRECISIONS)} in the layout", "mixed_precision")
    else:
        config.drop("float32", "mixed_precision")
    names = (_ACCUMULATED, f"{_DEEPSPEED}{_ACCUMULATED}", f"{_MEGATRON}num_micro_batches")
    microbatches = config.count(*names) or 1
    if microbatches > 1:
        config.lay("microbatches", microbatches, *names)
    else:
        config.drop("one micro-batch", *names)
    if config.word("dynamo_config.dynamo_backend", "dynamo_backend") not in ("", "no"):
        config.lay("compile", "true", "dynamo_config.dynamo_backend", "dynamo_backend")
    else:
        config.drop("off", "dynamo_config.dynamo_backend", "dynamo_backend")


def _read_ranks(config: Migration, kind: str, path: str) -> int:
    """Returns the number of ranks: the user's, else the file's."""
    if config.values.get("num_processes") == -1:  # left to the launch
        config.take("num_processes")
        said = None
    else:
        said = config.count("num_processes")
    if kind in ("no", "false"):
        ranks = config.devices or 1
        config.drop("distributed_type NO starts one process; --devices N takes more", "num_processes")
        return ranks
    ranks = config.devices or said or config.require_devices(path)
    why = f"--devices {ranks} goes over it" if ranks != said else f"devices = {ranks} says it"
    config.drop(why, "num_processes")
    return ranks


def _read_axes(config: Migration, kind: str, ranks: int, machines: int) -> None:
    """Answers ZeRO, offload and degrees.

    Args:
        config: the file's keys.
        kind: of the job, in small letters.
        ranks: of the job.
        machines: that they stand on.
    """
    tp_names, pp_name = (f"{_PARALLEL}tp_size", f"{_MEGATRON}tp_degree"), f"{_MEGATRON}pp_degree"
    tp = config.lay_degree("tp", config.count(*tp_names), *tp_names)
    cp = _read_token_axis(config)
    pp = config.lay_degree("pp", config.count(pp_name), pp_name)
    ep_name = f"{_MEGATRON}expert_model_parallel_size"
    config.lay_degree("ep", config.count(ep_name), ep_name)
    if config.flag(f"{_MEGATRON}sequence_parallelism") and tp > 1:
        config.lay("sequence", "true", f"{_MEGATRON}sequence_parallelism")
    data_ranks = divided(ranks, tp * cp * pp, f"{ranks} processes over tp x cp x pp")
    copies = config.count(f"{_PARALLEL}dp_replicate_size") or 1
    shard = config.number(f"{_PARALLEL}dp_shard_size") or 0
    names = (f"{_PARALLEL}dp_replicate_size", f"{_PARALLEL}dp_shard_size")
    if shard > 0 and copies * shard != data_ranks:
        raise ConfigError(
            f"{config.origin(*names)}: they share out {int(copies * shard)} ranks, and {ranks} processes have "
            f"{data_ranks} that read rows; give --devices {int(copies * shard) * tp * cp * pp}"
        )
    strategy_name, reshard_name = f"{_FSDP}sharding_strategy", f"{_FSDP}reshard_after_forward"
    strategy, reshard = config.word(strategy_name), config.word(reshard_name)
    if reshard and str(config.values.get(f"{_FSDP}version")) == "2":
        strategy = ""  # of FSDP1, which FSDP2 doesn't read
    if (strategy or reshard) not in (*_STRATEGIES, "true", "false", ""):
        raise ConfigError(
            f"{config.origin(strategy_name, reshard_name)}: strategies are FULL_SHARD, SHARD_GRAD_OP, ..."
        )
    zero = _STRATEGIES.get(strategy or reshard, 2 if reshard == "false" else 3) if kind == "fsdp" else 0
    zero_name, optimizer_name = f"{_DEEPSPEED}zero_stage", f"{_MEGATRON}use_distributed_optimizer"
    if kind == "deepspeed":
        stage = config.count(zero_name, least=0)
        zero = 2 if stage is None else stage  # accelerate's default
    if config.flag(optimizer_name):
        zero = 1
    group = data_ranks // copies
    if (strategy or reshard).startswith("hybrid") or strategy in ("4", "5"):
        group = divided(data_ranks, machines, f"{data_ranks} ranks over num_machines")
    zero_names = (strategy_name, reshard_name, zero_name, optimizer_name)
    if zero and data_ranks == copies and cp > 1:
        config.tell_state_over_cp()
    config.lay_data_axes(zero, data_ranks, group, *names, *zero_names)
    if config.flag(f"{_FSDP}offload_params"):
        config.lay("offload", "parameters", f"{_FSDP}offload_params")
    else:
        config.drop("off", f"{_FSDP}offload_params")
    read_offload(config, f"{_DEEPSPEED}offload_optimizer_device", f"{_DEEPSPEED}offload_param_device")
    if config.flag(f"{_MEGATRON}optimizer_cpu_offload"):
        config.lay("offload", "optimizer", f"{_MEGATRON}optimizer_cpu_offload")
    else:
        config.drop("off", f"{_MEGATRON}optimizer_cpu_offload")
    _read_recompute(config)


def _read_token_axis(config: Migration) -> int:
    """Answers the three ways in which tokens of a row are split; returns the degree."""
    names = (f"{_PARALLEL}cp_size", f"{_PARALLEL}sp_size", f"{_MEGATRON}context_parallel_size")
    ways = dict(zip(names, ("gather", "heads", "ring"), strict=True))
    degrees = {name: config.count(name) or 1 for name in names}
    name = max(names, key=lambda key: degrees[key])
    if sum(degree > 1 for degree in degrees.values()) > 1:
        raise ConfigError(f"{config.origin(*names)}: only one of them splits the tokens; leave one")
    config.drop("off", *(key for key in names if key != name))
    strategy = f"{_PARALLEL}cp_comm_strategy"
    if config.lay_degree("cp", degrees[name], name) > 1:
        rotates = config.word(strategy) == "alltoall" and name == names[0]
        config.lay("attention", "ring" if rotates else ways[name], name, strategy)
    else:
        config.take(strategy)
        config.drop("no cp", strategy)
    return degrees[name]


def _read_recompute(config: Migration) -> None:
    granularity = f"{_MEGATRON}recompute_granularity"
    if (mode := config.word(granularity)) in ("full", "selective"):
        config.lay("recompute", mode, granularity)
    else:
        config.drop("off", granularity)
    for name, mode in (
        (f"{_FSDP}activation_checkpointing", "full"),
        (f"{_MEGATRON}recompute_activations", "selective"),
    ):
        if config.flag(name):
            config.lay("recompute", mode, name)
        else:
            config.drop("off", name)
