"""Hooks written for DistributedDataParallel: the gradients of torch's own wrapper, and what can't run is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, optimizer_overlap_hooks, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from meshwright.errors import ConfigError
from meshwright.parallel.comm_hook import CommHook, GradientBucket
from meshwright.strategy import HybridParallelStrategy
from tests.plain_model import PlainModel
from tests.ranks.group import run_ranks

VOCAB = 61


def noting(state: list[Any], bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A hook of a user's own, which halves nothing and notes what it is given."""
    shapes = [(gradient.shape, parameter.shape) for gradient, parameter in zip(bucket.gradients(), bucket.parameters())]
    assert all(gradient == parameter for gradient, parameter in shapes)
    assert sum(gradient.numel() for gradient in bucket.gradients()) == bucket.buffer().numel()
    state.append((bucket.index(), bucket.is_last()))
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


# Torch's wrapper takes no annotation that is a text.
noting.__annotations__.clear()
HOOKS: dict[str, Callable[[], tuple[Any, Callable[..., Any]]]] = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "noting": lambda: ([], noting),
}


def trained(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[torch.Tensor]:
    """Returns each step's gradient, (n,)."""
    tokens = torch.randint(0, VOCAB, (8, 11), generator=torch.Generator().manual_seed(1)).chunk(2)[rank]
    gradients = []
    for _ in range(steps):
        cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        named = sorted(model.named_parameters(), key=lambda item: item[0].removeprefix("module."))
        gradients.append(
            torch.cat([parameter.grad.flatten().clone() for _, parameter in named if parameter.grad is not None])
        )
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def ours(rank: int, name: str) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    strategy, (state, hook) = HybridParallelStrategy("replicate=2"), HOOKS[name]()
    model = strategy.shard(PlainModel(VOCAB, 8, 2))
    model.register_comm_hook(state, hook)
    return trained(rank, model, strategy.optimizer(torch.optim.SGD, lr=0.1)), state


def torchs(rank: int, name: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    plain, (state, hook) = PlainModel(VOCAB, 8, 2), HOOKS[name]()
    model = DistributedDataParallel(plain)
    model.register_comm_hook(state, hook)
    return trained(rank, model, torch.optim.SGD(model.parameters(), lr=0.1))


def compared(rank: int) -> dict[str, Any]:
    exact: list[torch.Tensor] = []
    found: dict[str, Any] = {}
    for name in HOOKS:
        gradients, state = ours(rank, name)
        exact = exact or gradients
        found[name] = gradients, exact
        if name == "noting":
            indices = [index for index, _ in state]
            count = len(set(indices))
            assert indices == list(range(count)) * 4 and count > 1
            assert [index for index, is_last in state if is_last] == [count - 1] * 4
        # Rounding value by value doesn't depend on which gradients share a bucket.
        for mine, theirs in zip(gradients, torchs(rank, name), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)
    return found


def test_hooks_of_torch_give_the_gradients_of_its_own_wrapper() -> None:
    first, second = run_ranks(2, compared, timeout=250)
    for name in HOOKS:
        (mine, exact), (other, _) = first[name], second[name]
        assert all(torch.equal(one, two) for one, two in zip(mine, other)), f"{name}: copies part"
        off = [float((one - two).norm() / two.norm()) for one, two in zip(mine, exact)]
        if name == "fp16":
            assert 1e-5 < off[0] < 1e-2, (name, off)


def refused(_rank: int, text: str, hook: Any = default_hooks.allreduce_hook, twice: bool = False) -> str:
    model = HybridParallelStrategy(text).shard(PlainModel(VOCAB, 8, 2))
    try:
        for _ in range(1 + twice):
            model.register_comm_hook(None, hook)
    except ConfigError as error:
        return str(error)
    return ""


def all_refused(rank: int) -> list[str]:
    torch.manual_seed(0)
    return [
        refused(rank, "shard=2,zero=1"),
        refused(rank, "tp=2"),
        refused(rank, "replicate=2,compress=int8"),
        refused(rank, "replicate=2,precision=bf16"),
        refused(rank, "replicate=2", post_localSGD_hook.post_localSGD_hook),
        refused(rank, "replicate=2", optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, None)),
        refused(rank, "replicate=2", powersgd.powerSGD_hook),
        refused(rank, "replicate=2", "powersgd"),
        refused(rank, "replicate=2", twice=True),
    ]


def test_what_a_hook_cannot_do_is_named() -> None:
    for texts in run_ranks(2, all_refused, timeout=250):
        wanted = ["replicate=2, or compress="] * 4 + [
            "islands=N",
            "after backward()",
            "compress=int8",
            "no function",
            "registered already",
        ]
        assert all(part in text for part, text in zip(wanted, texts, strict=True)), texts


def test_what_a_hook_keeps_stays_and_what_it_must_return_is_named() -> None:
    kept, bucket = torch.ones(3), GradientBucket(torch.zeros(3), [nn.Parameter(torch.zeros(3))], 0, True)

    def hook(result: Any, _bucket: GradientBucket) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(result)
        return future

    CommHook(kept, hook, 2).start(bucket).wait()
    assert kept.tolist() == [1.0] * 3 and bucket.buffer().tolist() == [2.0] * 3
    for result, reason in ((kept[:1], "1 values for 3"), (None, "a NoneType for 3")):
        with pytest.raises(ConfigError, match=f"holds {reason}; return a torch.futures.Future"):
            CommHook(result, hook, 2).start(bucket).wait()
    with pytest.raises(ConfigError, match=r"returned a Tensor; return a torch\.futures\.Future"):
        CommHook(None, lambda *_: kept, 2).start(bucket)  # type: ignore[arg-type, return-value]
