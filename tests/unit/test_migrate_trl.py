"""TRL's SFT becomes a recipe: every field of its classes is answered, and its defaults hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from transformers import TrainingArguments

from meshwright.errors import ConfigError
from meshwright.jobs.migrate.foreign import UNKNOWN
from meshwright.jobs.migrate.recipe import MigratedRecipe, migrate

# Written for this test, in the form of the files that people publish.
SFT = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: some/conversations
learning_rate: 1.0e-5
num_train_epochs: 2
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: false
assistant_only_loss: true
packing: true
max_length: 2048
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_ratio: 0.03
eval_strategy: steps
eval_steps: 50
accelerate_config: zero2
report_to: [wandb, tensorboard]
optim: adamw_torch
unheard_of: 3
"""
OF_SFT = {
    "trust_remote_code": False, "router_aux_loss_coef": None, "chat_template_path": None, "dataset_text_field": "text",
    "dataset_kwargs": None, "dataset_num_proc": None, "eos_token": None, "max_length": 1024,
    "truncation_mode": "keep_start", "shuffle_dataset": False, "packing": False, "packing_strategy": "bfd",
    "padding_free": False, "pad_to_multiple_of": "auto", "eval_packing": None, "completion_only_loss": None,
    "assistant_only_loss": False, "loss_type": "nll", "activation_offloading": False, "pad_token": None,
    "model_init_kwargs": None, "model_revision": "main", "dtype": "float32", "attn_implementation": None,
    "use_peft": False, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": None,
    "lora_modules_to_save": None, "lora_task_type": "CAUSAL_LM", "use_rslora": False, "use_dora": False,
    "load_in_8bit": False, "load_in_4bit": False, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": False,
    "dataset_name": None, "dataset_config": None, "dataset_train_split": "train", "dataset_test_split": "test",
    "dataset_streaming": False, "ignore_bias_buffers": False,
}  # fmt: skip
"""Fields of trl 1.16's SFTConfig, ModelConfig and ScriptArguments with their defaults, which aren't Trainer's."""


def migrated(tmp_path: Path, text: str, suffix: str = ".yaml", devices: int | None = 4) -> MigratedRecipe:
    path = tmp_path / f"theirs{suffix}"
    path.write_text(text, encoding="utf-8")
    return migrate(path, devices)


def test_a_published_form_is_a_recipe(tmp_path: Path) -> None:
    recipe = migrated(tmp_path, SFT)
    config = recipe.config
    assert str(recipe.layout) == "shard=4,zero=2,microbatches=4,precision=bf16"
    assert (config.train.batch, config.train.epochs, config.optimizer.lr) == (2 * 4 * 4, 2.0, 1e-5)
    assert (config.data.targets, config.data.packing, config.data.sequence) == ("answers", "whole", 2048)
    assert (config.schedule.shape, config.schedule.floor, config.schedule.warmup_share) == ("cosine", 0.1, 0.03)
    assert (config.evaluation.every, config.monitor.trackers) == (50, ("wandb",))
    assert config.optimizer.implementation == "foreach"
    missing = "\n".join(recipe.missing)
    assert "model_name_or_path = Qwen/Qwen3-0.6B: no such directory is here" in missing
    assert "dataset_name = some/conversations: no set is downloaded" in missing and "unheard_of = 3" in missing
    assert len(recipe.missing) == 3


def test_every_field_of_the_two_is_answered(tmp_path: Path) -> None:
    """With the values that they have by default: none is unknown, and of those few ask for what isn't here."""
    theirs = OF_SFT | {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(TrainingArguments)
    }
    recipe = migrated(tmp_path, yaml.safe_dump(json.loads(json.dumps(theirs, default=str))))
    assert not [line for line in recipe.missing if line.endswith(UNKNOWN)]
    told = {line.split(" = ")[0].split(":")[0] for line in recipe.missing}
    assert told == {"completion_only_loss"}
    with_peft = migrated(tmp_path, "output_dir: x\nuse_peft: true\nlora_r: 8\nloss_type: dft")
    missing = "\n".join(with_peft.missing)
    assert all(
        f"{name}: a module:function that returns a model of peft" in missing
        for name in ("use_peft = true", "lora_r = 8")
    )
    assert "loss_type = dft: the loss is cross-entropy" in missing


def test_defaults_hold(tmp_path: Path) -> None:
    """Of an all but empty file: Trainer's, by its own class, and those that SFTConfig sets otherwise."""
    config = migrated(tmp_path, "output_dir: x").config
    trainer, optimizer = (
        {field.name: field.default for field in dataclasses.fields(TrainingArguments)},
        config.optimizer,
    )
    assert optimizer.lr == 2e-5 and optimizer.weight_decay == trainer["weight_decay"]
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == tuple(
        trainer[name] for name in ("adam_beta1", "adam_beta2", "adam_epsilon")
    )
    assert optimizer.clip == trainer["max_grad_norm"] and config.train.epochs == trainer["num_train_epochs"]
    assert config.train.batch == 4 * trainer["per_device_train_batch_size"]
    assert (config.schedule.shape, config.schedule.floor) == (trainer["lr_scheduler_type"], 0.0)
    assert config.schedule.warmup == trainer["warmup_steps"] and config.checkpoint.every == trainer["save_steps"]
    assert config.evaluation.every == 0 and config.data.sequence == 1024 and config.data.packing == "single"
    assert config.layout == "replicate=4,recompute=full,precision=bf16"


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("fsdp: full_shard auto_wrap", "shard=4,zero=3"),
        ("fsdp: [shard_grad_op, offload]", "shard=4,zero=2,offload=parameters"),
        ("fsdp: true\nfsdp_config: {reshard_after_forward: false, activation_checkpointing: true}", "zero=2"),
        ("deepspeed: ds_z2.json", "shard=4,zero=3"),
        ("accelerate_config: multi_gpu", "replicate=4"),
        ("fsdp: true\nparallelism_config: {tp_size: 2, dp_shard_size: 2}", "shard=2,tp=2,zero=3"),
        ("parallelism_config: {cp_size: 4}", "cp=4"),
        ("parallelism_config: {sp_size: 2, dp_replicate_size: 2}", "replicate=2,cp=2,attention=heads"),
        ("torch_compile: true", "compile=true"),
        ("fp16: true", "precision=fp16"),
    ],
    ids=range(10),
)
def test_a_key_is_this_part_of_the_layout(text: str, layout: str, tmp_path: Path) -> None:
    found = str(migrated(tmp_path, f"output_dir: x\n{text}").layout).split(",")
    assert set(layout.split(",")) <= set(found), found


@pytest.mark.parametrize("name", ["~nobody-here/model", "a\\0b", "[1, 2]", "/etc/hostname", "x" * 9000])
def test_a_models_name_is_a_directory_here_or_left_out(name: str, tmp_path: Path) -> None:
    recipe = migrated(tmp_path, f'model_name_or_path: "{name}"')
    assert recipe.config.model.name == "llama" and "no such directory is here" in "".join(recipe.missing)
    assert migrated(tmp_path, f"model_name_or_path: {tmp_path}/.").layout.world == 4


def test_commands_are_read(tmp_path: Path) -> None:
    assert migrated(tmp_path, "output_dir: x\nmax_seq_length: 96").config.data.sequence == 96
    script = (
        "accelerate launch --config_file fsdp.yaml --num_processes 2 trl/scripts/sft.py --model_name_or_path q \\\n"
        "    --max-steps 100 --warmup_steps 10 --packing --packing_strategy wrapped --dataset_name d"
    )
    recipe = migrated(tmp_path, script, ".sh", None)
    assert recipe.config.devices == 2 and recipe.config.data.packing == "stream"
    # The first step has a rate here, and 0 there.
    assert (recipe.config.train.steps, recipe.config.schedule.warmup) == (100, 9)
    assert any("--config_file fsdp.yaml: its layout isn't read" in line for line in recipe.missing)
    command = "CUDA_VISIBLE_DEVICES=0 trl sft --model_name_or_path q --num_processes 1 --completion_only_loss true"
    recipe = migrated(tmp_path, command, ".sh", None)
    assert recipe.config.devices == 1 and recipe.config.data.targets == "answers"


@pytest.mark.parametrize(
    ("text", "suffix", "why"),
    [
        ("model_name_or_path: q\nbeta: 0.1", ".yaml", "beta: preferences, rewards and teachers"),
        ("trl dpo --model_name_or_path q --dataset_name d", ".sh", "dpo: preferences, rewards and teachers"),
        ("python examples/scripts/grpo.py --model_name_or_path q --dataset_name d", ".sh", "grpo: preferences"),
        ("trl sft --config mine.yaml --output_dir x", ".sh", "the settings are in mine.yaml"),
        ("output_dir: x\nparallelism_config: {tp_size: 3}", ".yaml", "4 doesn't divide by 3"),
        ("output_dir: x\nmax_steps: many", ".yaml", "is to be a number"),
        ("output_dir: x\nmax_length: 10.5", ".yaml", "it is to be a whole number"),
    ],
    ids=range(7),
)
def test_what_cant_be_is_refused(text: str, suffix: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        migrated(tmp_path, text, suffix)
