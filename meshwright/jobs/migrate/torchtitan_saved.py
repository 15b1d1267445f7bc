"""A configuration that torchtitan saved of itself (``--debug.save_config_file NAME.json``), as the flags of its run.

Since 2026 torchtitan's settings are functions of its Python, which nobody else can read; what such a function returned
is in this file. Source: torchtitan b5bcd76 (trainer.py, ``Config.to_dict``; components/optimizer/optimizer.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.jobs.migrate.foreign import flatten

_TREES = (("model_spec", "model"), ("dataloader", "dataset"), ("validator", "dataloader"))
"""Parts that hold further configurations of any depth: modules, sources of text."""
_OF_GROUPS = ("optimizer", "param_groups")


def is_saved_torchtitan(tree: Mapping[str, object]) -> bool:
    """Returns whether a JSON file is one that torchtitan saved."""
    return all(isinstance(tree.get(name), Mapping) for name in ("training", "parallelism", "lr_scheduler"))


def saved_values(tree: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings by torchtitan's flags, nested ones with dots.

    Args:
        tree: of a file that `is_saved_torchtitan`.

    Raises:
        ConfigError: for more levels than torchtitan's configuration has.
    """
    top = dict(tree)
    collapsed: dict[str, object] = {}
    for section, name in (*_TREES, _OF_GROUPS):
        part = top.get(section)
        if isinstance(part, Mapping) and name in part:
            top[section] = {key: value for key, value in part.items() if key != name}
            collapsed[f"{section}.{name}"] = part[name]
    checkpointing = top.pop("activation_checkpoint", None)
    values = flatten(top)
    for name, value in collapsed.items():
        if name == ".".join(_OF_GROUPS):
            values |= _optimizer(value)
        else:
            values[name] = "settings of its own" if value else None
    for key in ("name", "flavor"):
        if (value := values.pop(f"model_spec.{key}", None)) is not None:
            values[f"model.{key}"] = value
    values["activation_checkpoint.mode"] = _recompute(checkpointing)
    return values


def _optimizer(groups: object) -> dict[str, object]:
    """Returns the settings of the one group that all parameters are in; several stay one key, for the list."""
    group = groups[0] if isinstance(groups, list) and len(groups) == 1 else None
    if not isinstance(group, Mapping) or not isinstance(group.get("optimizer_kwargs"), Mapping):
        return {"optimizer.param_groups": groups}
    settings = dict(group["optimizer_kwargs"])
    betas = settings.pop("betas", None)
    if isinstance(betas, list) and len(betas) == 2:
        settings |= {"beta1": betas[0], "beta2": betas[1]}
    return {f"optimizer.{key}": value for key, value in settings.items()} | {
        "optimizer.name": group.get("optimizer_name")
    }


def _recompute(policy: object) -> str:
    """Returns the policy's word: a saved one has its fields alone, by which its kind is known."""
    if not isinstance(policy, Mapping):
        return "none"
    if "memory_budget" in policy:
        return "memory-budget"
    return "selective" if "force_recompute_mm_shapes_by_fqns" in policy else "full"
