"""Which settings may change between a run and the command that resumes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.jobs.prepare import text_config
from meshwright.json_types import JsonObject
from meshwright.train.run_config import RunConfig

FREE_TO_CHANGE = {
    *("layout", "trials", "model.sharding", "devices", "run", "launch", "slurm", "kubernetes", "ray", "monitor"),
    *("checkpoint", "evaluation", "recovery", "train.prove", "train.prove_s", "train.sample", "train.sample_tokens"),
    *("outer.meet", "outer.key_file", "outer.wait_s", "outer.quorum", "outer.grace_s"),
}
"""Settings that a resumed run may change, since the loss curve doesn't depend on them; ``train.steps`` and what
is counted as those, ``train.epochs``, too."""


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Returns a message for each differing setting that a resumed run may not change.

    Args:
        old: that of the run directory.
        new: that of the command.
    """
    # What can't have an effect was accepted once: it must not keep a run from being resumed without it.
    return _differing_settings(*_with_resolved_defaults(old.without_idle_settings(), new.without_idle_settings()))


def _with_resolved_defaults(old: RunConfig, new: RunConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns two configs as plain values; where only one leaves a setting to its default, the default is resolved.

    So a run may be resumed by naming the value that it had by default.
    """
    # Epochs count as the steps that the run had.
    configs = [
        replace(each, train=replace(each.train, steps=old.train.steps)) if each.train.epochs else each
        for each in (old, new)
    ]
    if (old.schedule.warmup is None) != (new.schedule.warmup is None):
        schedules = [
            replace(each.schedule, warmup=each.schedule.warmup_steps(each.train.steps), warmup_share=0.0)
            for each in configs
        ]
        configs = [replace(config, schedule=schedule) for config, schedule in zip(configs, schedules)]
    if (old.data.tokenizer == "auto") != (new.data.tokenizer == "auto"):
        configs = [replace(config, data=text_config(config.model, config.data)) for config in configs]
    return configs[0].to_dict(), configs[1].to_dict()


def _differing_settings(old: JsonObject, new: JsonObject, section: str = "") -> list[str]:
    messages: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        path = f"{section}.{key}" if section else key
        # A prefix frees its whole section, since recursion stops here.
        if path in FREE_TO_CHANGE or path in ("train.steps", "train.epochs"):
            continue
        old_value, new_value = old.get(key), new.get(key)
        if isinstance(old_value, dict) and isinstance(new_value, dict):
            messages += _differing_settings(old_value, new_value, path)
        elif old_value != new_value:
            messages.append(f"{path} was {old_value!r}, is {new_value!r}")
    return messages
