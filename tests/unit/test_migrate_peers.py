"""Files of today's peers: keys and defaults that their own code has, in files of our own words."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest

from meshwright.errors import ConfigError, PlanError
from meshwright.jobs.migrate.foreign import UNKNOWN
from meshwright.jobs.migrate.recipe import MigratedRecipe, migrate
from meshwright.spec.layout import Layout

MEGATRON = "python pretrain_gpt.py --lr 1e-3 --micro-batch-size 1 "
RING = "--context-parallel-size 2 --tensor-model-parallel-size 2 "


def migrated(tmp_path: Path, suffix: str, text: str, devices: int | None = 8) -> MigratedRecipe:
    path = tmp_path / f"theirs{suffix}"
    path.write_text(text, encoding="utf-8")
    return migrate(path, devices)


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        # Megatron-FSDP shards everything unless it is told otherwise.
        ("--use-megatron-fsdp", "shard=8,zero=3"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "shard=8,zero=2"),
        # The old name is of a time when it sharded nothing unless it was told to.
        ("--use-custom-fsdp", "replicate=8"),
        ("--use-custom-fsdp --data-parallel-sharding-strategy optim", "shard=8,zero=1"),
        ("--use-torch-fsdp2", "shard=8,zero=3"),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", "shard=8,zero=2"),
        # The strategy says nothing of plain copies.
        ("--data-parallel-sharding-strategy optim_grads_params", "replicate=8"),
        (f"{RING}", "replicate=2,cp=2,tp=2,attention=ring"),
        (f"{RING} --cp-comm-type all_gather", "replicate=2,cp=2,tp=2,attention=gather"),
        (f"{RING} --cp-comm-type a2a a2a a2a", "replicate=2,cp=2,tp=2,attention=heads"),
        ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise", "replicate=8,precision=fp8"),
    ],
)
def test_megatrons_flags_of_today(flags: str, layout: str, tmp_path: Path) -> None:
    recipe = migrated(tmp_path, ".sh", MEGATRON + flags)
    assert str(recipe.layout) == layout
    assert not any(line.endswith(UNKNOWN) for line in recipe.missing)


def test_what_megatron_does_otherwise_is_told(tmp_path: Path) -> None:
    flags = "--bf16 --fp8-format hybrid --fp8-recipe blockwise --context-parallel-size 8 --use-distributed-optimizer "
    recipe = migrated(tmp_path, ".sh", MEGATRON + flags + "--cp-comm-type p2p a2a")
    missing = "\n".join(recipe.missing)
    assert "fp8-recipe = blockwise: precision=fp8 has a scale for each tensor" in missing
    assert "cp-comm-type = p2p a2a: attention=heads, gather or ring" in missing
    assert "state over cp: its ranks share the state there" in missing and recipe.layout.zero == 0
    assert "bf16 = true: precision=fp8 computes all else in bf16" in recipe.text


def test_what_would_change_a_run_is_left_out(tmp_path: Path) -> None:
    flags = "--bf16 --fp8-format hybrid --exit-interval 200 --exit-duration-in-mins 230 --exit-signal-handler "
    flags += "--async-tensor-model-parallel-allreduce --check-for-spiky-loss --check-for-large-grads --async-save "
    flags += "--megatron-fsdp-main-params-dtype fp16 --megatron-fsdp-main-grads-dtype fp32 --decoder-seq-length 128 "
    recipe = migrated(tmp_path, ".sh", MEGATRON + flags)
    missing = "\n".join(recipe.missing)
    assert "exit-interval = 200: a run goes to train.steps" in missing
    assert "exit-duration-in-mins = 230: a run goes to train.steps; `timeout 3h`" in missing
    assert "fp8-recipe: not given, which is delayed there" in missing
    assert "megatron-fsdp-main-params-dtype = fp16: master weights are float32" in missing
    assert "decoder-seq-length = 128: models have no decoder" in missing
    for flag, why in {
        "exit-signal-handler": "Ctrl-C, SIGTERM",
        "async-tensor-model-parallel-allreduce": "tp_overlap=4",
        "check-for-spiky-loss": "recovery.learned_limits runs a step again whose loss",
        "check-for-large-grads": "recovery.learned_limits runs a step again whose gradient norm",
        "async-save": "checkpoints are written while training goes on",
    }.items():
        assert f"{flag} = true: {why}" in recipe.text and f"{flag} = " not in missing
    assert "megatron-fsdp-main-grads-dtype = fp32: float32 here too" in recipe.text
    known = migrated(tmp_path, ".sh", MEGATRON + "--fp8-format hybrid --fp8-recipe tensorwise")
    assert "delayed" not in known.text


@pytest.mark.parametrize(("is_corrected", "is_left_out"), [(True, False), (False, True)])
def test_moments_without_correction_are_told(is_corrected: bool, is_left_out: bool, tmp_path: Path) -> None:
    theirs = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"bias_correction": is_corrected}},
        "data_types": {"grad_accum_dtype": "fp32" if is_corrected else "bf16"},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "elasticity": {"enabled": not is_corrected, "max_train_batch_size": 2000},
    }
    recipe = migrated(tmp_path, ".json", json.dumps(theirs))
    missing = "\n".join(recipe.missing)
    for key in ("optimizer.params.bias_correction", "data_types.grad_accum_dtype", "elasticity.max_train_batch_size"):
        assert (f"{key} = " in missing) is is_left_out and f"{key} = " in recipe.text
    assert "stage3_gather_16bit_weights_on_model_save = true: meshwright export gathers" in recipe.text


def test_weights_that_torchtitan_starts_from_are_left_out(tmp_path: Path) -> None:
    text = """[job]
custom_config_module = "mine.config"
description = "a run"
[metrics]
enable_wandb = true
[checkpoint]
enable = true
initial_load_path = "weights"
load_step = -1
[parallelism]
data_parallel_shard_degree = 8
"""
    recipe = migrated(tmp_path, ".toml", text)
    missing = "\n".join(recipe.missing)
    for key in ("job.custom_config_module", "metrics.enable_wandb", "checkpoint.initial_load_path"):
        assert f"{key} = " in missing
    assert "checkpoint.load_step" not in missing and "job.description" not in missing
    off = migrated(tmp_path, ".toml", text.replace("enable = true", "enable = false"))
    assert "checkpoint.initial_load_path" not in "\n".join(off.missing)


def test_deepspeeds_old_names_and_ulysses(tmp_path: Path) -> None:
    old = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "cpu_offload": True}}
    recipe = migrated(tmp_path, ".json", json.dumps(old | {"bfloat16": {"enabled": True}}))
    assert str(recipe.layout) == "shard=8,zero=2,precision=bf16,offload=optimizer"
    first = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": True, "sequence_parallel_size": 4}
    recipe = migrated(tmp_path, ".json", json.dumps(first))
    assert str(recipe.layout) == "shard=2,cp=4,zero=1,attention=heads" and recipe.config.train.batch == 2
    both = {"bfloat16": {"enabled": True}, "bf16": {"enabled": False}, "train_batch_size": 8}
    with pytest.raises(ConfigError, match=r"bfloat16.enabled is the old name of bf16.enabled"):
        migrated(tmp_path, ".json", json.dumps(both))
    summed = {"train_micro_batch_size_per_gpu": 1, "gradient_allreduce_op": "sum", "fp16": {"loss_scale": 0}}
    summed["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True}
    missing = "\n".join(migrated(tmp_path, ".json", json.dumps(summed)).missing)
    assert "gradient_allreduce_op = sum: gradients are averaged" in missing and "loss_scale" not in missing
    assert "bf16.bf16_master_weights_and_grads = true: master weights" in missing


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        # Ulysses' degree splits the ranks too.
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nparallelism_config: "
            "{parallelism_config_dp_shard_size: 2, parallelism_config_sp_size: 2}\nnum_processes: 4",
            "shard=2,cp=2,zero=3,attention=heads",
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nparallelism_config: "
            "{parallelism_config_cp_size: 2, parallelism_config_cp_comm_strategy: alltoall}\nnum_processes: 8",
            "shard=4,cp=2,zero=3,attention=ring",
        ),
        (
            "distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_context_parallel_size: 2, "
            "megatron_lm_use_distributed_optimizer: true, megatron_lm_recompute_granularity: full}\nnum_processes: 8",
            "shard=4,cp=2,zero=1,recompute=full,attention=ring",
        ),
        # accelerate starts one process for NO, and reads the section of the job's own kind alone.
        ("distributed_type: 'NO'\nnum_processes: 8\nmixed_precision: bf16", "precision=bf16"),
        (
            "distributed_type: 'NO'\nnum_processes: 1\ndeepspeed_config: {deepspeed_config_file: none.json}\n"
            "fsdp_config: {fsdp_offload_params: true}",
            "replicate=1",
        ),
        ("distributed_type: MULTI_GPU\nfsdp_config: {fsdp_offload_params: true}\nnum_processes: 2", "replicate=2"),
    ],
)
def test_accelerates_kinds_of_jobs(text: str, layout: str, tmp_path: Path) -> None:
    recipe = migrated(tmp_path, ".yaml", text, None)
    assert str(recipe.layout) == layout and not any(line.endswith(UNKNOWN) for line in recipe.missing)


def test_processes_that_the_launch_says_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --devices N"):
        migrated(tmp_path, ".yaml", "distributed_type: MULTI_GPU\nnum_processes: -1", None)


def test_torchtitans_command_of_today(tmp_path: Path) -> None:
    command = "MODULE=llama3 CONFIG=llama3_8b NGPU=4 ./run_train.sh --training.steps 10 --compile.enable "
    command += (
        "--compile.enable_async_tensor_parallel --training.disable_cuda_graphs --parallelism.enable_fsdp_symm_mem"
    )
    recipe = migrated(tmp_path, ".sh", command, None)
    assert recipe.config.devices == 4 and recipe.config.train.steps == 10
    assert (recipe.config.model.layers, recipe.config.model.width) == (32, 4096)
    missing = "\n".join(recipe.missing)
    assert "config = llama3_8b: a function of torchtitan's Python has what these flags don't say" in missing
    assert not any(line.endswith(UNKNOWN) for line in recipe.missing)
    assert "enable_async_tensor_parallel = true: tp_overlap=4" in recipe.text
    alone = migrated(tmp_path, ".txt", "--module qwen3\n--config qwen3_debugmodel", 4)
    assert alone.framework == "torchtitan" and alone.layout.degree("shard") == 4
    with pytest.raises(ConfigError, match=r"the settings are in llama3\.toml"):
        migrated(tmp_path, ".sh", "CONFIG_FILE=llama3.toml ./run_train.sh", 4)
    over_tokens = migrated(tmp_path, ".txt", "--parallelism.context_parallel_degree 4\n--training.steps 9", 4)
    assert "state over cp" in "\n".join(over_tokens.missing) and over_tokens.layout.zero == 0


def test_a_warm_up_that_outlasts_the_steps_stays(tmp_path: Path) -> None:
    """A short run on a long run's schedule only climbs; torchtitan shortens the warm-up instead."""
    flags = "--train-iters 50 --lr-decay-iters 320000 --lr-warmup-fraction 0.01 --lr-decay-style cosine"
    recipe = migrated(tmp_path, ".sh", MEGATRON + flags)
    assert (recipe.config.schedule.shape, recipe.config.schedule.warmup) == ("constant", 3200)
    assert "schedule.shape: a warm-up of 3200 steps outlasts 50 steps, so that cosine never begins" in recipe.text
    schedule = migrated(tmp_path, ".toml", "[training]\nsteps = 20").config.schedule
    assert (schedule.shape, schedule.warmup) == ("constant", 20)


def test_a_script_of_another_program_is_refused(tmp_path: Path) -> None:
    command = "deepspeed main.py --model_name_or_path gpt2 --lr 1e-4 --seed 1"
    with pytest.raises(ConfigError, match="none of the flags that training with Megatron-LM has"):
        migrated(tmp_path, ".sh", command)
    with pytest.raises(ConfigError, match=r"the layout is in ds.json, .* give that file to --from"):
        migrated(tmp_path, ".sh", command + " --deepspeed_config ds.json")
    with pytest.raises(ConfigError, match="flux makes images"):
        migrated(tmp_path, ".toml", '[model]\nname = "flux"')


def test_conditions_of_a_script_are_told_flag_by_flag(tmp_path: Path) -> None:
    """A line's end would swallow the last of many; what is said without the condition too is no question."""
    flags = " ".join(f"--unknown-flag-number-{number} {number}" for number in range(40))
    script = (
        f"A=(--lr 1e-3 --micro-batch-size 1)\nif $X; then B=(--lr 1e-3 {flags}); fi\npython gpt.py ${{B[@]}} ${{A[@]}}"
    )
    missing = migrated(tmp_path, ".sh", script).missing
    assert "--unknown-flag-number-39 39: under a condition of the script, which isn't run" in missing
    assert not any(line.startswith("--lr") for line in missing)


def test_what_stands_for_nothing_is_off(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nnum_processes: 2\ndeepspeed_config: {}\nfsdp_config: {}"
    assert not migrated(tmp_path, ".yaml", text, None).missing
    recipe = migrated(tmp_path, ".toml", "[validation]\nfreq = 5\n[training]\nsteps = 900")
    assert "validation.freq = 5: validation.enable is off" in recipe.text
    on = migrated(tmp_path, ".toml", "[validation]\nenable = true\nfreq = 5\n[training]\nsteps = 900")
    assert on.config.evaluation.every == 5


def test_models_by_megatrons_flags(tmp_path: Path) -> None:
    sizes = "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64 "
    recipe = migrated(tmp_path, ".sh", MEGATRON + sizes + "--num-experts 4 --rotary-percent 1.0")
    assert (recipe.config.model.name, recipe.config.model.ffn) == ("mixtral", 1024)
    missing = "\n".join(recipe.missing)
    assert "swiglu: not given, which is GELU there" in missing and "rotary-percent" not in missing
    plain = migrated(tmp_path, ".sh", MEGATRON + sizes + "--kv-channels 32")
    assert "max-position-embeddings = 64: gpt2's positions follow from the data" in plain.text
    assert "kv-channels = 32: gpt2's heads share its width" in "\n".join(plain.missing)


def test_torchtitans_float8_by_its_recipe(tmp_path: Path) -> None:
    text = '[model]\nconverters = ["quantize.linear.float8"]\n[quantize.linear.float8]\nrecipe_name = "rowwise"'
    assert migrated(tmp_path, ".toml", text).layout.precision == "fp8_rowwise"


def test_the_launchers_last_flag_may_stand_before_the_program(tmp_path: Path) -> None:
    recipe = migrated(
        tmp_path, ".sh", f"torchrun --nnodes 2 --nproc_per_node 4 {MEGATRON.removeprefix('python ')}", None
    )
    assert recipe.config.devices == 8


def test_what_torchtitan_saved_of_a_run_is_read_whole(tmp_path: Path) -> None:
    """Written for this test in the form of `Config.to_dict`: one group of AdamW, policies known by their fields."""
    rates = {"lr": 3e-4, "betas": [0.9, 0.98], "eps": 1e-7, "weight_decay": 0.2}
    deep: dict[str, object] = {"norm": {"eps": 1e-5}}
    for name in ("attention", "block", "layers", "decoder", "model", "outer"):
        deep = {name: deep}
    saved: dict[str, object] = {
        "model_spec": {"name": "llama3", "flavor": "8B", "model": deep},
        "hf_assets_path": "./assets",
        "training": {"num_tokens_per_microbatch_per_dp_rank": 8192, "num_tokens_per_train_step": -1}
        | {"max_context_length": 4096, "steps": 700, "mixed_precision_param": "bfloat16"},
        "parallelism": {"data_parallel_shard_degree": -1, "tensor_parallel_degree": 2, "num_pp_microbatches": 1}
        | {"enable_sequence_parallel": True, "module_fqns_per_model_part": None},
        "optimizer": {"param_groups": [{"pattern": ".*", "optimizer_name": "AdamW", "optimizer_kwargs": rates}]},
        "lr_scheduler": {"warmup_steps": 20, "decay_ratio": None, "decay_type": "cosine", "total_steps": None},
        "activation_checkpoint": {"preserve_rng_state": True},
        "dataloader": {"dataset": deep, "num_workers": 0},
        "validator": {"enable": False, "freq": 10, "dataloader": None},
        "override": {"imports": []},
        "debug": {"seed": None},
    }
    recipe = migrated(tmp_path, ".json", json.dumps(saved))
    assert str(recipe.layout) == "shard=4,tp=2,zero=3,recompute=full,precision=bf16,sequence=true"
    config = recipe.config
    assert (config.optimizer.lr, config.optimizer.beta2, config.optimizer.eps) == (3e-4, 0.98, 1e-7)
    assert (config.train.batch, config.train.steps, config.schedule.shape) == (8, 700, "cosine")
    assert config.model.layers == 32 and not any(line.endswith(UNKNOWN) for line in recipe.missing)
    for key in ("dataloader.dataset", "model_spec.model"):
        assert any(line.startswith(f"{key} = settings of its own: ") for line in recipe.missing)
    saved["activation_checkpoint"] = {"force_recompute_mm_shapes_by_fqns": []}
    saved["optimizer"] = {"param_groups": [{"pattern": "a"}, {"pattern": "b"}]}
    recipe = migrated(tmp_path, ".json", json.dumps(saved))
    assert str(recipe.layout.recompute) == "selective" and any("param_groups" in line for line in recipe.missing)
    saved["activation_checkpoint"] = None
    assert not migrated(tmp_path, ".json", json.dumps(saved)).layout.recompute


CONTEXTS = ("", "replicate=2,", "shard=2,", "shard=2,zero=3,", "cp=2,", "tp=2,", "pp=2,microbatches=4,")
CONTEXTS += ("shard=16,zero=1,ep=16,",)
"""Beginnings of layouts, in one of which every option may stand."""


def is_option(option: str) -> bool:
    """Returns whether some layout has an option, such as ``compress=int8``."""
    for context in CONTEXTS:
        with contextlib.suppress(ConfigError, PlanError):
            Layout.parse(context + option)
            return True
    return False


def test_options_that_answers_name_are_those_of_a_layout() -> None:
    text = (Path(__file__).parents[2] / "docs/migrating.md").read_text(encoding="utf-8")
    answers = [line.split("|")[2] for line in text.splitlines() if line.startswith("| `")]
    named = {option for answer in answers for option in re.findall(r"\b[a-z_]+=[a-z0-9_:]*[a-z0-9]\b", answer)}
    assert len(named) > 20 and not is_option("compress=int4")
    assert [option for option in sorted(named) if not is_option(option)] == []
