"""Private names of torch's optimizers."""

from __future__ import annotations

import inspect

import torch

from meshwright.torch_compat import PrivateName

PRIVATE_NAMES = tuple(
    PrivateName(f"torch.optim:{name}._init_group", "a checkpoint before the first step holds the state's start values")
    for name in ("Adam", "NAdam", "ASGD", "Rprop")
)


def create_initial_state(optimizer: torch.optim.Optimizer) -> None:
    """Creates the state that torch's optimizers make in their first step, before that step has changed it.

    Args:
        optimizer: its parameters have gradients; of another class than torch's it stays unchanged.
    """
    init_group = getattr(optimizer, "_init_group", None)
    if init_group is None or not init_group.__func__.__module__.startswith("torch.optim."):
        return
    # Behind the group it takes lists, one for each kind of tensor, and appends to them.
    lists = len(inspect.signature(init_group).parameters) - 1
    for group in optimizer.param_groups:
        init_group(group, *([] for _ in range(lists)))


def starts_as_from_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Tests whether a first step is the same from no state and from what `create_initial_state` makes, zeros else.

    Of torch's optimizers all but SGD with ``dampening``, whose momentum begins at the first gradient, not damped. Of
    others nothing is known: False.
    """
    return type(optimizer).__module__.startswith("torch.optim.") and not any(
        group.get("dampening") for group in optimizer.param_groups
    )
