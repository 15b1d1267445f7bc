"""What may change between a run and the command that resumes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.jobs.prepare import text_config
from meshwright.train.run_config import RunConfig

FREE_TO_CHANGE = {
    *("layout", "trials", "model.sharding", "devices", "run", "launch", "monitor", "checkpoint", "evaluation"),
    *("recovery", "train.prove", "train.prove_s"),
}
"""What a resumed run may set anew, since the curve doesn't depend on it; ``train.steps`` too, to go on longer."""


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Returns in words which settings differ that a resumed run may not set anew.

    Args:
        old: that of the run directory.
        new: that of the command.
    """
    return _differing(*_alike(old, new))


def _alike(old: RunConfig, new: RunConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns two configs as plain values; where one alone leaves a setting to its default, the default is spelled out.

    A run may be resumed by naming what it took by itself.
    """
    configs = [old, new]
    if (old.schedule.warmup is None) != (new.schedule.warmup is None):
        schedules = [replace(one.schedule, warmup=one.schedule.warmup_steps(one.train.steps)) for one in configs]
        configs = [replace(one, schedule=schedule) for one, schedule in zip(configs, schedules)]
    if (old.data.tokenizer == "auto") != (new.data.tokenizer == "auto"):
        configs = [replace(one, data=text_config(one.model, one.data)) for one in configs]
    return configs[0].to_dict(), configs[1].to_dict()


def _differing(old: dict[str, Any], new: dict[str, Any], where: str = "") -> list[str]:
    found: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        path = f"{where}.{key}" if where else key
        if path in FREE_TO_CHANGE or path == "train.steps":
            continue
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += _differing(before, after, path)
        elif before != after:
            found.append(f"{path} was {before!r}, is {after!r}")
    return found
