"""Finds tensors with a gradient that a model's forward leaves in attributes, as for a loss that is made up later."""

from __future__ import annotations

import torch

from meshwright.models.analysis.clone import make_clone, with_objective
from meshwright.models.analysis.objective import Objective, nothing_dropped
from meshwright.models.build import BuiltModel
from meshwright.parallel.keyed_random import seed_all
from meshwright.torch_compat.tensors import tree_leaves


def find_stored_tensor(built: BuiltModel, objective: Objective) -> str:
    """Returns the name of one, "" where a forward in training leaves none.

    Args:
        built: on meta; it stays unchanged.
        objective: the model's own loss.
    """
    clone = with_objective(make_clone(built), objective)
    with nothing_dropped():
        seed_all(0)
        clone.run(2, clone.module.train())
    for name, module in clone.module.named_modules():
        for key, value in vars(module).items():
            # its modules' own dicts hold parameters, which are leaves
            if any(isinstance(item, torch.Tensor) and item.grad_fn is not None for item in tree_leaves(value)):
                return f"{name}.{key}" if name else key
    return ""
