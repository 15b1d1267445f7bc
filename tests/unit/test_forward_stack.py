"""A module's wrappers lie in the declared order, whatever order they come in, and can be read off it."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from meshwright.parallel.forward_stack import ForwardLayer, describe, wrap_forward, wrappers

LAYERS = (ForwardLayer.TENSOR, ForwardLayer.DROPOUT, ForwardLayer.RECOMPUTE, ForwardLayer.COMPILE)


def noting(seen: list[str], name: str):
    def wrap(plain):
        def forward(x):
            seen.append(f"enter {name}")
            y = plain(x)
            seen.append(f"leave {name}")
            return y

        return forward

    return wrap


@pytest.mark.parametrize("order", list(itertools.permutations(LAYERS)))
def test_layers_lie_in_their_order_however_installed(order) -> None:
    seen: list[str] = []
    module = nn.Linear(2, 2)
    for layer in order:
        wrap_forward(module, layer, layer.name, noting(seen, layer.name))
    module(torch.zeros(1, 2))
    assert seen == [f"enter {layer.name}" for layer in reversed(LAYERS)] + [f"leave {layer.name}" for layer in LAYERS]
    assert [wrapper.layer for wrapper in wrappers(module)] == list(LAYERS)


def test_of_one_layer_the_later_lies_outside() -> None:
    seen: list[str] = []
    module = nn.Linear(2, 2)
    wrap_forward(module, ForwardLayer.CONTEXT, "a", noting(seen, "a"))
    wrap_forward(module, ForwardLayer.CONTEXT, "b", noting(seen, "b"))
    module(torch.zeros(1, 2))
    assert seen[:2] == ["enter b", "enter a"]


def test_a_forward_that_somebody_else_put_there_is_kept_inside() -> None:
    seen: list[str] = []
    module = nn.Linear(2, 2)
    wrap_forward(module, ForwardLayer.TENSOR, "a", noting(seen, "a"))
    ours = module.forward
    module.forward = noting(seen, "theirs")(ours)  # type: ignore[method-assign]
    wrap_forward(module, ForwardLayer.STAGE, "b", noting(seen, "b"))
    module(torch.zeros(1, 2))
    assert seen[:3] == ["enter b", "enter theirs", "enter a"]


def test_a_forward_that_somebody_else_put_there_is_described() -> None:
    module = nn.Linear(2, 2)
    wrap_forward(module, ForwardLayer.TENSOR, "a", noting([], "a"))
    module.forward = noting([], "theirs")(nn.Identity())  # type: ignore[method-assign]
    assert wrappers(module) == ()
    assert describe(module) == ["forward     tests.unit.test_forward_stack.noting.wrap.forward"]


def test_a_shallow_copy_has_a_stack_of_its_own() -> None:
    seen: list[str] = []
    module = nn.Linear(2, 2)
    wrap_forward(module, ForwardLayer.TENSOR, "a", noting(seen, "a"))
    other = copy.copy(module)
    wrap_forward(other, ForwardLayer.PROBE, "b", noting(seen, "b"))
    assert len(wrappers(module)) == 1 and len(wrappers(other)) == 2


class Counting:
    """A forward that is an object, as a dispatcher of tokens is: a deep copy of its module has its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def test_a_deep_copy_calls_its_own_objects() -> None:
    module, counting = nn.Linear(2, 2), Counting()
    wrap_forward(module, ForwardLayer.EXAMPLE, "counts", lambda _plain: counting)
    duplicate = copy.deepcopy(module)
    wrap_forward(duplicate, ForwardLayer.STAGE, "b", noting([], "b"))
    duplicate(torch.zeros(1, 2))
    assert counting.calls == 0


def test_a_stack_can_be_read() -> None:
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda *_: None)
    wrap_forward(module, ForwardLayer.RECOMPUTE, "recompute=full", noting([], "x"))
    wrap_forward(module, ForwardLayer.TENSOR, "its output is summed over ranks", noting([], "x"))
    lines = describe(module)
    assert lines[0].startswith("pre-hook") and "test_a_stack_can_be_read" in lines[0]
    assert lines[1:] == [
        "wrapper     recompute: recompute=full",
        "wrapper     tensor: its output is summed over ranks",
        "forward     torch.nn.modules.linear.Linear.forward",
    ]
