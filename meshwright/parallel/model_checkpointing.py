"""A model's own gradient checkpointing (`torch.utils.checkpoint` inside of its forward) under every layout.

What a checkpoint leaves out is computed again in backward, after the forward that gave it its random numbers, its
stage's input and the modes around it is over. Inside of `restoring_first_run` each checkpoint remembers these and has
them again. The reentrant variant becomes the other one there, with what torch documents of it: without an input that
needs a gradient its weights get none. Inside of `without_checkpoints` checkpoints keep everything, for trials that read
autograd's graph.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.torch_compat.tensors import function_modes, wrap_checkpoint_generator

Function = Callable[..., Any]
Snapshot = Callable[[], Callable[[], AbstractContextManager[Any]]]
"""Called at a checkpoint; returns what brings that moment's state back while the checkpoint is computed again."""


@dataclass(frozen=True, slots=True)
class _Policy:
    """What checkpoints do in this thread."""

    inline: bool = False
    fed: bool = False
    """Whether what needs a gradient may come inside of the checkpoint: a stage hands its first layer its input."""
    snapshots: tuple[Snapshot, ...] = ()


class _Local(threading.local):
    policy: _Policy | None = None


_LOCAL = _Local()


@contextlib.contextmanager
def _under_policy(policy: _Policy) -> Iterator[None]:
    _install()
    outer, _LOCAL.policy = _LOCAL.policy, policy
    try:
        yield
    finally:
        _LOCAL.policy = outer


def without_checkpoints() -> AbstractContextManager[None]:
    """Returns a context inside of which checkpoints keep everything; nothing is computed again in backward."""
    return _under_policy(_Policy(inline=True))


def restoring_first_run(*snapshots: Snapshot, fed: bool = False) -> AbstractContextManager[None]:
    """Returns a context inside of which a checkpoint's recompute sees the state of its first run.

    Args:
        snapshots: of states beyond torch's function modes, added to those of an enclosing `restoring_first_run`.
        fed: whether a checkpoint's input may get its gradient inside of it, as in a stage after the first.
    """
    outer = _LOCAL.policy or _Policy()
    return _under_policy(_Policy(outer.inline, outer.fed or fed, (*outer.snapshots, *snapshots)))


def restore_first_run_in(module: nn.Module, *snapshots: Snapshot) -> None:
    """Makes a module's forward run inside of `restoring_first_run`."""

    def repeating(plain: Forward) -> Forward:
        @functools.wraps(plain)
        def forward(*args: object, **kwargs: object) -> object:
            with restoring_first_run(*snapshots):
                return plain(*args, **kwargs)

        return forward

    wrap_forward(
        module, ForwardLayer.CHECKPOINT_STATE, "the model's own checkpoints see the state of their first run", repeating
    )


def _in_saved_state(function: Function, policy: _Policy) -> Function:
    """Returns a function that computes the same, in the present state whenever it is called."""
    restorers = [snapshot() for snapshot in policy.snapshots]
    # Taken at the first forward: backward runs outside of the modes that replaced its functions.
    modes = function_modes()

    def recompute(*args: object, **kwargs: object) -> object:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_under_policy(policy))
            for restore in restorers:
                stack.enter_context(restore())
            # Only the modes that aren't active again: backward may run inside of some.
            for mode in modes[len(function_modes()) :]:
                stack.enter_context(mode)
            return function(*args, **kwargs)

    return recompute


def _empty_generator() -> Generator[None, None, None]:
    """Stands for torch's generator around a checkpoint's first forward."""
    yield


def _run_reentrant(policy: _Policy, function: Function, preserve: bool, *args: object) -> object:
    if not policy.fed and not any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in args):
        # As torch's reentrant checkpoint: without an input that needs a gradient, nothing in it gets one.
        with torch.no_grad():
            return function(*args)
    if policy.inline:
        return function(*args)
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


@functools.cache
def _install() -> None:
    """Puts itself in front of both variants of torch's checkpoint, for threads that are inside of a policy.

    Both are private to torch 2.11 to 2.15, and users' code holds `torch.utils.checkpoint.checkpoint` itself, which
    looks them up; nothing public lies between.
    """
    apply = torch_checkpoint.CheckpointFunction.apply

    def under_policy(generator: Function) -> Function:
        def generate(function: Function, *arguments: object, **kwargs: object) -> object:
            policy = _LOCAL.policy
            if policy is None:
                return generator(function, *arguments, **kwargs)
            if policy.inline:
                return _empty_generator()
            return generator(_in_saved_state(function, policy), *arguments, **kwargs)

        return generate

    def apply_under_policy(function: Function, preserve: bool, *args: object) -> object:
        policy = _LOCAL.policy
        return apply(function, preserve, *args) if policy is None else _run_reentrant(policy, function, preserve, *args)

    wrap_checkpoint_generator(under_policy)
    torch_checkpoint.CheckpointFunction.apply = staticmethod(apply_under_policy)
