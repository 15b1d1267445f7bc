"""A copy of a module has containers of its own, empty ones too, and parts that were one object stay one."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.parallel.stage import copy_module


def test_a_copy_shares_no_container_and_keeps_its_own_identities() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model.append(model[0])
    model[1].__dict__["notes"] = model[0].__dict__["notes"] = {}
    duplicate = copy_module(model)
    assert duplicate[0] is duplicate[2] is not model[0]
    for module, other in zip(model.modules(), duplicate.modules(), strict=True):
        assert vars(module).keys() == vars(other).keys()
        for name, value in vars(module).items():
            if isinstance(value, (dict, set)):
                assert vars(other)[name] is not value and type(vars(other)[name]) is type(value), name
                assert len(vars(other)[name]) == len(value), name
    assert duplicate[1].notes is duplicate[0].notes
    # What is added to the copy isn't seen by the model.
    duplicate[0].register_forward_hook(lambda *_: torch.zeros(2))
    duplicate[0].register_buffer("extra", torch.ones(1), persistent=False)
    assert not model[0]._forward_hooks and not model[0]._buffers and not model[0]._non_persistent_buffers_set
    assert model(torch.ones(2)).abs().sum() > 0


def test_shared_weights_are_the_same_tensors() -> None:
    model = nn.Linear(2, 2)
    assert copy_module(model, share=True).weight is model.weight is not copy_module(model).weight
