"""Lists and dicts that a layer gets and changes, as one to which it appends its auxiliary loss, under FSDP2.

FSDP2 calls a unit's forward with copies of the containers that hold its arguments, so what forward does to them would
be lost without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.parallel.forward_stack import Forward, ForwardLayer, described, wrap_forward


def keep_changes(unit: nn.Module, frees: bool) -> None:
    """Makes what a unit's forward does to lists and dicts among its arguments happen to those of its caller.

    Args:
        unit: of FSDP2, sharded already.
        frees: whether its weights are freed behind forward; backward of what it added would find none then, and is
            refused.
    """
    given: list[Any] = []

    def remember(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        given[:] = _containers((args, kwargs))

    def keeping(plain: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            copies, originals = list(_containers((args, kwargs))), list(given)
            # Kept no longer than the call: they hold the graphs of losses.
            given.clear()
            if not copies or len(copies) != len(originals):
                return plain(*args, **kwargs)
            before = [copied.copy() for copied in copies]
            result = plain(*args, **kwargs)
            for original, copied, content in zip(originals, copies, before):
                if copied is not original and not _are_same(_parts(copied), _parts(content)):
                    if frees and torch.is_grad_enabled():
                        raise PlanError(
                            f"a layer, {type(unit).__name__}, changes a {type(original).__name__} that it is called "
                            "with, and zero=3 frees its weights before a gradient comes by what is in there; nearest "
                            "that works: zero=2, or a layer that returns what it adds"
                        )
                    _change(original, copied, content)
            return result

        return forward

    # In front of FSDP2's own hook, which makes the copies.
    hook = described(remember, "remembers the lists and dicts that the layer is given")
    unit.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    wrap_forward(unit, ForwardLayer.DATA, "changes lists and dicts of its caller, not FSDP2's copies", keeping)


def _containers(value: object, depth: int = 0) -> Iterator[Any]:
    """Yields the lists and dicts in nested arguments, the outermost first; the two that hold all others left out."""
    if isinstance(value, list | tuple | dict):
        if depth > 1 and isinstance(value, list | dict):
            yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item, depth + 1)


def _change(original: Any, copied: Any, content: Any) -> None:
    """Changes a container as its copy was, which had ``content`` at first; what was there stays the caller's own."""
    if isinstance(copied, dict):
        own = {id(value): original[key] for key, value in content.items()}
        changed = {key: own.get(id(value), value) for key, value in copied.items()}
        original.clear()
        original.update(changed)
        return
    own = {id(item): value for item, value in zip(content, original)}
    original[:] = [own.get(id(item), item) for item in copied]


def _parts(container: Any) -> list[object]:
    """Returns the items of a list, or the keys and values of a dict."""
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _are_same(items: Sequence[object], others: Sequence[object]) -> bool:
    """Returns whether two lists hold the same objects."""
    return len(items) == len(others) and all(one is other for one, other in zip(items, others))
