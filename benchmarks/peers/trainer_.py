"""The same training through transformers' Trainer: ``--mode ddp``, or ``zero2``/``zero3`` (transformers' own FSDP2)."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from task import BETAS, CLIP, LEARNING_RATE, Record, build_model, decay_groups, rate_factor, read_task, windows
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

task = read_task()
record = Record(task)


class Rows(IterableDataset):
    """All ranks' rows; the Trainer hands each rank its own."""

    def __iter__(self) -> Any:
        """Yields one row at a time; the model shifts the labels by itself."""
        for tokens, _ in windows(task, 0, 1):
            for row in tokens:
                yield {"input_ids": row, "labels": row}


class Laps(TrainerCallback):
    """Times steps from one end to the next, as the other contenders do."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """The first step's data comes next."""
        record.begin()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """The loss of a step is known: the step has ended."""
        if "loss" in logs:
            record.lap(float(logs["loss"]))


def sharded_model(folder: str) -> torch.nn.Module:
    """Loads the model as transformers shards it by itself; the Trainer leaves it as it is then.

    Its ``fsdp`` argument would go through accelerate, which drops it on the CPU without a word.
    """
    build_model().save_pretrained(folder)
    style = "free_full_weight" if task.mode == "zero3" else "keep_full_weight"
    plan = {"transformer.wte": "keep_full_weight", "transformer.wpe": "keep_full_weight", "transformer.h.*": style}
    plan |= {"transformer.ln_f": "keep_full_weight", "lm_head": "keep_full_weight"}
    return AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(fsdp_size=2, fsdp_plan=plan), dtype=torch.float32
    )


def settings(folder: str) -> TrainingArguments:
    """Returns the Trainer's arguments: no saving, a logged loss each step."""
    return TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=task.steps,
        per_device_train_batch_size=task.rows // 2,
        max_grad_norm=CLIP,
        learning_rate=LEARNING_RATE,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        bf16=False,
    )


with tempfile.TemporaryDirectory() as folder:
    model = build_model() if task.mode == "ddp" else sharded_model(folder)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=LEARNING_RATE, betas=BETAS, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, task.steps))
    trainer = Trainer(
        model=model,
        args=settings(folder),
        train_dataset=Rows(),
        optimizers=(optimizer, schedule),
        callbacks=[Laps()],
    )
    trainer.train()
    record.show(trainer.model_wrapped, sharded=task.mode != "ddp")
torch.distributed.destroy_process_group()
