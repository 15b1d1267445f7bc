"""The one place that replaces a module's forward: an ordered stack of wrappers, whatever order they are installed in.

Each axis and each choice of a layout that changes how a module runs wraps its forward. What a wrapper sees depends on
what lies inside of it: a recomputed layer must draw the same dropout numbers again, so recompute lies outside of
dropout's; a compiler that sees what is recomputed plans for it, so compile lies outside of recompute where it can see
that. `ForwardLayer` is that order, and `describe` prints a module's stack as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from torch import nn

Forward = Callable[..., Any]
"""A module's forward: the arguments of a call to what the call returns."""
Hook = TypeVar("Hook", bound=Callable[..., object])
_STACK = "_meshwright_forward_stack"


class ForwardLayer(IntEnum):
    """Where a wrapper lies, innermost first; the transforms of a layout run in this order too."""

    EXAMPLE = 0
    """Stands for the module's own forward while it is tried out on an example of the user's."""
    PRODUCT = 5
    """Products in another precision: a linear module's in float8, of angles exact beside TF32."""
    STAGE = 10
    """Layers of other pipeline stages are stubs; a stage's forward ends at its boundary."""
    HEAD = 15
    """The forward ends in front of the head, whose product the loss computes in chunks."""
    TENSOR = 20
    """Row-parallel outputs are summed; inputs and buffers are sliced to a rank's units."""
    EXPERT = 30
    """Tokens are dispatched to the ranks that hold their experts."""
    CONTEXT = 40
    """Attention sees all tokens; everything else this rank's."""
    DROPOUT = 50
    """Random numbers follow from the place in the global batch."""
    FLOAT64 = 60
    """No operation narrows a float64 tensor."""
    COMPILE_RECOMPUTED = 65
    """torch.compile of a layer of several graphs that recompute calls twice."""
    RECOMPUTE = 70
    """Activations are dropped and computed again in backward."""
    COMPILE = 80
    """torch.compile of a layer, or its exclusion."""
    DATA = 90
    """Lists and dicts that FSDP2 copies; its units themselves and gradient all-reduce are hooks around the forward."""
    CHECKPOINT_STATE = 100
    """A model's own checkpoints see the state of their first run when they run again."""
    PROGRESS = 110
    """Reports which layer runs."""
    PROBE = 120
    """Measures or replaces a call, on a copy of the model that nobody trains."""


@dataclass(frozen=True, slots=True)
class ForwardWrapper:
    """One entry of a module's stack."""

    layer: ForwardLayer
    purpose: str
    """What it does, in a clause, for `describe`."""
    wrap: Callable[[Forward], Forward]
    """The forward inside of it to the forward with it. May be called again when another wrapper is added."""


@dataclass(frozen=True, slots=True)
class _ForwardStack:
    """A module's own forward and its wrappers, innermost first."""

    plain: Forward
    wrappers: tuple[ForwardWrapper, ...]
    installed: Forward
    """What the module's forward was set to: another value there means that somebody else replaced it."""


def wrap_forward(module: nn.Module, layer: ForwardLayer, purpose: str, wrap: Callable[[Forward], Forward]) -> None:
    """Adds a wrapper to a module's forward: outside of those of lower layers and of earlier ones of its own.

    Args:
        module: its ``forward`` attribute is set on the instance; hooks stay outside of all wrappers.
        layer: where the wrapper lies.
        purpose: what it does, in a clause.
        wrap: the forward inside of it to the forward with it.
    """
    stack = _current_stack(module)
    added = ForwardWrapper(layer, purpose, wrap)
    # The sort is stable: later wrappers of one layer lie outside of earlier ones.
    ordered = sorted((*stack.wrappers, added), key=lambda wrapper: wrapper.layer)
    if ordered[-1] is added:
        # As it stands, since that of a deep copy may be the copy of an object, which wrapping anew would not give.
        forward = wrap(module.forward)
    else:
        forward = stack.plain
        for wrapper in ordered:
            forward = wrapper.wrap(forward)
    module.__dict__["forward"] = forward
    module.__dict__[_STACK] = _ForwardStack(stack.plain, tuple(ordered), forward)


def _current_stack(module: nn.Module) -> _ForwardStack:
    """Returns a module's stack, without wrappers where it was never wrapped."""
    stack: _ForwardStack | None = module.__dict__.get(_STACK)
    if stack is not None and stack.installed is module.__dict__.get("forward"):
        return stack
    # Never wrapped, or somebody else's code replaced the forward since: that is the module's own then.
    return _ForwardStack(module.forward, (), module.forward)


def described(hook: Hook, purpose: str) -> Hook:
    """Returns a hook that `describe` prints by its purpose."""
    setattr(hook, "purpose", purpose)  # noqa: B010 - functions have no such field
    return hook


def wrappers(module: nn.Module) -> tuple[ForwardWrapper, ...]:
    """Returns the wrappers of a module's forward, innermost first."""
    return _current_stack(module).wrappers


def plain_forward(module: nn.Module) -> Forward:
    """Returns a module's own forward, inside of all wrappers."""
    return _current_stack(module).plain


def describe(module: nn.Module) -> list[str]:
    """Returns a line for everything between a call of a module and its own code, outermost first.

    Hooks before the forward in the order in which they run, the wrappers, the module's own forward, and hooks after.
    """
    lines = [f"pre-hook    {_name(hook)}" for hook in module._forward_pre_hooks.values()]
    for wrapper in reversed(wrappers(module)):
        lines.append(f"wrapper     {wrapper.layer.name.lower()}: {wrapper.purpose}")
    lines.append(f"forward     {_name(plain_forward(module))}")
    lines += [f"hook        {_name(hook)}" for hook in module._forward_hooks.values()]
    # By name: the class comes with torch.distributed.fsdp, which a rank without FSDP2 units needn't import.
    if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
        lines.insert(0, "FSDP2 unit  its parameters are gathered before the call and released after")
    return lines


def _name(hook: Callable[..., object]) -> str:
    """Returns the purpose of a hook or, where it states none, its ``module.function`` without the package."""
    if purpose := getattr(hook, "purpose", ""):
        return str(purpose)
    function = getattr(hook, "__func__", hook)
    module = getattr(function, "__module__", type(hook).__module__).removeprefix("meshwright.")
    name = getattr(function, "__qualname__", type(hook).__qualname__)
    return f"{module}.{name}".replace(".<locals>", "")
