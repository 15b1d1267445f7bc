"""TRL's SFT and transformers' Trainer, as YAML, JSON or flags."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import PurePath

from meshwright.errors import ConfigError
from meshwright.jobs.migrate.foreign import Migration, divided
from meshwright.jobs.migrate.trl_keys import FSDP, PARALLEL, RATES

_OF_OTHERS = (
    "beta", "precompute_ref_log_probs", "ref_model_name_or_path", "sync_ref_model", "max_prompt_length", "loss_weights",
    "num_generations", "reward_funcs", "reward_weights", "reward_model_name_or_path", "max_completion_length",
    "use_vllm", "desirable_weight", "center_rewards_coefficient", "lmbda", "teacher_model_name_or_path",
)  # fmt: skip
"""Keys that only TRL's trainers by preferences, rewards and teachers have."""
_OTHERS = ("dpo", "grpo", "kto", "reward", "rloo", "distillation", "gkd", "orpo", "cpo", "ppo", "online_dpo")
"""Their commands."""
_ADAM = {"adamw_torch": "foreach", "adamw_torch_fused": "fused", "adamw_hf": "single", "adamw": "fused"}
_SHAPES = {"linear": "linear", "cosine": "cosine", "cosine_with_min_lr": "cosine"}
_CONSTANT = ("constant", "constant_with_warmup")
_LEVELS = {"fsdp1": 3, "fsdp2": 3, "zero1": 1, "zero2": 2, "zero3": 3, "multi_gpu": 0, "single_gpu": 0}
"""ZeRO levels of the configurations that come with TRL."""
_TRACKERS = ("wandb", "mlflow", "trackio")
_KNOWN = {
    *("model_name_or_path", "dataset_name", "output_dir", "learning_rate", "num_train_epochs", "max_steps"),
    "per_device_train_batch_size",
}
"""Keys of which a configuration of the two has some, and that no other framework here has."""


def is_trl(names: Iterable[str], least: int = 1) -> bool:
    """Returns whether ``least`` keys are those of TRL or of transformers' Trainer and of nobody else."""
    return len(_KNOWN.intersection(names)) >= least


def check_program(program: str) -> None:
    """Refuses a command of a trainer that isn't SFT's, as ``trl dpo`` or ``examples/scripts/dpo.py``.

    Raises:
        ConfigError: for one.
    """
    name = PurePath(program.rpartition(" ")[2]).stem
    if name in _OTHERS:
        raise _other_trainer(name)


def _other_trainer(name: str) -> ConfigError:
    return ConfigError(
        f"{name}: preferences, rewards and teachers aren't a recipe's, which trains on text and answers as TRL's SFT "
        "does; write their loss in a loop of your own, as examples/dpo.py and grpo.py do (docs/strategy.md)"
    )


def read_trl(config: Migration, path: str) -> None:
    """Answers the keys that a layout, a batch, steps, rates and targets are made of.

    Args:
        config: the file's keys.
        path: of the file, for messages.

    Raises:
        ConfigError: for another trainer's file, or degrees that don't divide the devices.
    """
    if (file := config.take("config")) is not None:
        raise ConfigError(f"the settings are in {str(file)[:200]}; give that file to --from")
    for name in _OF_OTHERS:
        if name in config.values:
            raise _other_trainer(name)
    _read_model(config)
    readers = _read_axes(config, path)
    _read_precision(config)
    _read_batch(config, readers)
    _read_steps(config)
    _read_rates(config)
    _read_targets(config)
    _read_intervals(config)
    _drop_usual(config)


def _drop_usual(config: Migration) -> None:
    """Answers what is as it is here, and what has no effect there beside the other keys."""
    for name, usual in (("loss_type", ("nll", "chunked_nll")), ("truncation_mode", ("keep_start",))):
        if str(config.values.get(name)) in usual:
            config.take(name)
            config.drop("as here", name)
    if str(config.values.get("use_peft")).lower() in ("true", "yes", "1"):
        return
    for name in [name for name in config.values if name.startswith(("lora_", "bnb_", "use_rslora", "use_dora"))]:
        config.take(name)
        config.drop("no effect without use_peft", name)


def _read_model(config: Migration) -> None:
    """Answers the model's name: a directory is one here too, a name on the hub isn't."""
    name = config.take("model_name_or_path")
    if name is None:
        return
    if os.path.isdir(str(name)):
        config.set("model.name", str(name), "model_name_or_path")
    else:
        config.leave(
            "no such directory is here: `hf download NAME --local-dir DIR`, then --model DIR", "model_name_or_path"
        )


def _read_axes(config: Migration, path: str) -> int:
    """Answers ranks, degrees and ZeRO; returns the ranks that read rows of their own."""
    said = config.count("num_processes")
    preset = config.word("accelerate_config")
    if preset == "single_gpu" and config.devices is None and said is None:
        config.devices = 1
    config.devices = config.devices or said
    ranks = config.require_devices(path)
    config.devices = ranks
    config.drop(f"devices = {ranks}", "num_processes")
    tp = config.lay_degree("tp", config.count(f"{PARALLEL}tp_size"), f"{PARALLEL}tp_size")
    cp = 1
    for name, way in ((f"{PARALLEL}cp_size", "gather"), (f"{PARALLEL}sp_size", "heads")):
        degree = config.lay_degree("cp", config.count(name), name) if cp == 1 else 1
        if degree > 1:
            config.lay("attention", way, name)
            cp = degree
    readers = divided(ranks, tp * cp, f"{ranks} devices over tp x cp")
    names = (f"{PARALLEL}dp_replicate_size", f"{PARALLEL}dp_shard_size")
    copies, shard = config.count(names[0]) or 1, config.count(names[1]) or 0
    zero, why = _read_zero(config, preset, ranks)
    if shard > 1:
        zero = zero or 3
    config.lay_data_axes(zero, readers, shard or divided(readers, copies, f"{readers} ranks over copies"), *names, *why)
    return readers


def _read_zero(config: Migration, preset: str, ranks: int) -> tuple[int, tuple[str, ...]]:
    """Answers how state is sharded; returns ZeRO's level, and the keys that say so."""
    reshard = f"{FSDP}reshard_after_forward"
    keeps = str(config.take(reshard)).lower() == "false"
    fsdp, file = config.take("fsdp"), config.take("deepspeed")
    words = str(fsdp).lower() if fsdp not in (None, False, "", []) else ""
    if file not in (None, False, ""):
        config.leave(
            "its file isn't read, and zero=3 stands here; meshwright new --from that file says which it is", "deepspeed"
        )
        return 3, ()
    if words:
        if "offload" in words:
            config.lay("offload", "parameters", "fsdp")
        level = 0 if "no_shard" in words else 2 if "shard_grad_op" in words or keeps else 3
        if "hybrid" in words:
            config.missing.append("fsdp = hybrid_shard: copies of shards; write replicate=2,shard=... in the layout")
        return level, ("fsdp", reshard)
    config.drop("off", "fsdp", reshard, "deepspeed")
    if preset and preset not in _LEVELS:
        config.leave("its file isn't read; give it to --from for its layout", "accelerate_config")
        return 0, ()
    if not preset and ranks > 1:
        config.needless.append("copies: neither fsdp nor deepspeed is asked for; layout = auto lets the planner choose")
    return _LEVELS.get(preset, 0), ("accelerate_config",)


def _read_precision(config: Migration) -> None:
    """Answers what is computed in, what is kept for backward, and compilation."""
    is_half = config.flag("fp16")
    bf16 = config.take("bf16")
    if is_half:
        config.lay("precision", "fp16", "fp16")
        config.drop("fp16 goes over it", "bf16")
    elif str(bf16).lower() in ("false", "no"):
        config.drop("float32", "bf16", "fp16")
    else:
        config.lay("precision", "bf16", "bf16", why="TRL's default")
        config.drop("off", "fp16")
    for name in ("dtype", "torch_dtype"):
        if config.word(name) in ("", "auto", "float32", "torch.float32"):
            config.drop("weights are float32", name)
        else:
            config.leave("weights and moments are float32 beside what is computed in precision", name)
    names = ("gradient_checkpointing", "activation_checkpointing", f"{FSDP}activation_checkpointing")
    asked = [config.take(name) for name in names]
    if all(str(value).lower() not in ("true", "yes", "1") for value in asked) and asked[0] is not None:
        config.drop("off", *names)
    else:
        config.lay("recompute", "full", *names, why="TRL's default")
    if config.flag("torch_compile"):
        config.lay("compile", "true", "torch_compile")
    else:
        config.drop("off", "torch_compile")


def _read_batch(config: Migration, readers: int) -> None:
    """Answers the rows of a step."""
    rows, parts = "per_device_train_batch_size", "gradient_accumulation_steps"
    each, microbatches = config.count(rows) or 8, config.count(parts) or 1
    if microbatches > 1:
        config.lay("microbatches", microbatches, parts)
    else:
        config.drop("one micro-batch", parts)
    why = f"8 rows a device, TRL's default, on {readers}"
    config.set("train.batch", each * microbatches * readers, rows, parts, why=why)


def _read_steps(config: Migration) -> None:
    """Answers the length of the run."""
    steps = config.number("max_steps")
    if steps is None or steps < 1:
        config.drop("off", "max_steps")
        epochs = config.number("num_train_epochs")
        config.set("train.epochs", 3.0 if epochs is None else epochs, "num_train_epochs", why="TRL's default")
        return
    config.set("train.steps", int(steps), "max_steps")
    config.take("num_train_epochs")
    config.drop("max_steps goes over it", "num_train_epochs")


def _read_rates(config: Migration) -> None:
    """Answers optimizer, shape and warm-up of the rate."""
    optimizer = config.word("optim")
    if optimizer in _ADAM:
        config.set("optimizer.implementation", _ADAM[optimizer], "optim")
    elif not optimizer:
        config.drop("AdamW", "optim")
    else:
        config.leave("AdamW is the only optimizer", "optim")
    shape, floor_name = config.word("lr_scheduler_type").rpartition(".")[2], f"{RATES}min_lr_rate"
    floor = config.number(floor_name)
    names = ("lr_scheduler_type", floor_name)
    if shape in _CONSTANT:
        config.set("schedule.shape", "constant", *names)
    elif shape in _SHAPES or not shape:
        config.set("schedule.shape", _SHAPES.get(shape, "linear"), *names, why="TRL's default")
        config.set("schedule.floor", floor if floor is not None and shape == "cosine_with_min_lr" else 0.0, why="there")
    else:
        config.leave("schedule.shape is cosine, linear, wsd or constant", *names)
    warmups = ("warmup_steps", "warmup_ratio")
    warmup = config.number(*warmups) or 0
    if 0 < warmup < 1 and shape != "constant":
        config.set("schedule.warmup_share", warmup, *warmups)
        return
    if shape == "constant" and warmup:
        config.drop("a constant rate has none there", *warmups)
        warmup = 0
    # The first step has rate 0 there: each has the rate here that the next one has there.
    config.set("schedule.warmup", max(0, int(warmup) - 1), *warmups, why="TRL's default")


def _read_targets(config: Migration) -> None:
    """Answers which tokens are learned and how rows are filled."""
    names = ("assistant_only_loss", "completion_only_loss")
    completions = config.values.get(names[1])
    if config.flag(names[0]) | config.flag(names[1]):
        config.set("data.targets", "answers", *names)
    else:
        config.drop("all tokens are learned", *names)
        if completions is None:
            config.missing.append(
                f"{names[1]}: of prompts and completions TRL learns completions alone where it isn't said; for such "
                'records write targets = "answers" under [data]'
            )
    lengths = ("max_length", "max_seq_length")
    if (length := config.count(*lengths)) is not None:
        config.set("data.sequence", length, *lengths)
    packing, strategy = config.flag("packing"), config.word("packing_strategy")
    if packing and strategy == "wrapped":
        config.set("data.packing", "stream", "packing", "packing_strategy")
        return
    if packing and strategy == "bfd_split":
        config.leave("what is longer than a row is cut, not carried into another", "packing_strategy")
    if packing:
        config.set("data.packing", "whole", "packing", "packing_strategy")
        return
    config.drop("no packing", "packing_strategy")
    config.set(
        "data.packing", "single", "packing", why="TRL's default; whole puts as many in a row as fit, and is faster"
    )


def _read_intervals(config: Migration) -> None:
    """Answers how often a run is evaluated, saved and told."""
    shown = config.values.get("logging_steps")
    for key, setting, usual in (("eval", "evaluation.every", shown), ("save", "checkpoint.every", 500)):
        names = (f"{key}_strategy", f"{key}_steps")
        strategy = config.word(names[0]) or ("no" if key == "eval" else "steps")
        every = config.number(names[1])
        if strategy in ("no", "false"):
            config.set(setting, 0, *names, why="TRL's default")
        elif strategy == "steps" and (every is None or every >= 1):
            steps = every if every is not None else usual if isinstance(usual, int) else 10
            config.set(setting, int(steps), *names, why="TRL's default")
        else:
            config.leave(f"{setting} is in steps; the first lines of a run say how many an epoch has", *names)
    report = config.take("report_to")
    wanted = report if isinstance(report, list) else str(report).replace(",", " ").split() if report else []
    if trackers := [name for name in wanted if name in _TRACKERS]:
        config.set("monitor.trackers", trackers, "report_to")
        if (project := config.take("project")) is not None:
            config.set("monitor.project", str(project), "project")
    elif set(map(str, wanted)) <= {"none", "tensorboard"}:
        config.drop("tensorboard/ is always written", "report_to")
    else:
        config.leave(f"trackers are {', '.join(_TRACKERS)}", "report_to")
    config.take("project")
    config.drop("of a tracker", "project")
