"""The private names of torch that the package rests on are there, and do what they are used for."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from meshwright import torch_compat
from meshwright.torch_compat import PrivateName, pipelining, tensors

MODULES = [
    importlib.import_module(f"{torch_compat.__name__}.{m.name}") for m in pkgutil.iter_modules(torch_compat.__path__)
]
NAMES = [name for module in MODULES for name in module.PRIVATE_NAMES]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_torch_has_the_name(name: PrivateName) -> None:
    assert name.resolve() is not None
    assert name.reason


def test_a_name_that_torch_drops_is_noticed() -> None:
    with pytest.raises(AttributeError):
        PrivateName("torch:Tensor._no_such_name", "made up").resolve()


def test_views_are_told_from_tensors_of_their_own() -> None:
    x = torch.zeros(4, requires_grad=True) * 1.0
    assert tensors.is_view(x.view(2, 2)) and not tensors.is_view(x)
    assert tensors.local_tensor(x) is x


def test_a_recomputed_forward_knows_that_it_runs_in_backward() -> None:
    seen: list[bool] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(tensors.in_backward())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    torch_checkpoint.checkpoint(forward, x, use_reentrant=False).sum().backward()
    assert seen == [False, True]


def test_modes_are_seen_and_left() -> None:
    mode = TorchFunctionMode()
    with mode:
        assert tensors.function_modes()[-1] is mode
    with FlopCounterMode(display=False) as counter:
        assert tensors.dispatch_mode() is not None
        with tensors.without_dispatch_mode():
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert counter.get_total_flops() == 0
        torch.ones(2, 2) @ torch.ones(2, 2)
        assert counter.get_total_flops() == 16
    assert tensors.dispatch_mode() is None


def test_backward_runs_without_the_module_around_it() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * torch.arange(3.0)).sum()
    (grad,) = tensors.run_backward(
        (loss,), (torch.ones(()),), True, False, (weight,), allow_unreachable=False, accumulate_grad=False
    )
    assert grad.tolist() == [0.0, 1.0, 2.0]


def test_factories_make_tensors_on_a_device() -> None:
    factories = tensors.tensor_factories()
    assert torch.zeros in factories and torch.arange in factories and torch.tensor in factories


def test_batch_norms_have_one_base() -> None:
    assert all(isinstance(norm(3), tensors.BatchNormBase) for norm in (nn.BatchNorm1d, nn.BatchNorm3d))


def test_many_tensors_in_one_kernel_are_the_same_as_one_by_one() -> None:
    values = [torch.full((3,), 2.0), torch.full((2,), 3.0)]
    assert [float(norm) for norm in tensors.foreach_norm(values, 2)] == pytest.approx([12.0**0.5, 18.0**0.5])
    tensors.foreach_mul_(values, 2.0)
    assert values[0].tolist() == [4.0] * 3
    tensors.foreach_copy_(values, [torch.zeros(3), torch.zeros(2)])
    assert float(torch.cat(values).abs().sum()) == 0.0


def test_actions_can_be_run() -> None:
    assert pipelining.unsupported() == ""
