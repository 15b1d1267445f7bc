"""Finds by trial whether a model's embedding and head can be gathered by themselves, as ZeRO gathers its layers.

The trial does to a clone what ZeRO does: outside of a module's own forward its weights are something else, of another
type and without numbers. Code that reads them there computes something else, or fails; code that only asks something of
them, their type or their shape, is seen to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.models.analysis.clone import Clone, duplicate_module
from meshwright.models.analysis.objective import nothing_dropped
from meshwright.parallel.keyed_random import seed_all
from meshwright.spec.end_units import EndUnits
from meshwright.torch_compat.tensors import TorchArgs, TorchFunction, TorchKwargs, tree_leaves

ROWS = 2
"""Rows of a trial's batch."""
_LAYER = ""
"""Stands for any layer in the order of calls."""


def find_end_units(clone: Clone, length: int) -> EndUnits:
    """Returns the modules outside a model's layers that can be units of their own; none for what the trial refutes.

    Args:
        clone: of the model, small and real; it stays unchanged.
        length: tokens of a row on which it runs.
    """
    structure = clone.structure
    tied = {name.rpartition(".")[0] for group in structure.ties for name in group}
    candidates = [name for name in (structure.embedding, structure.head) if name and name not in tied]
    if not candidates or not structure.layers:
        return EndUnits()
    embedding = next((name for name in candidates if name == structure.embedding), "")
    head = tuple(name for name in candidates if name == structure.head)
    # A norm joins the head's message; alone it wouldn't be worth one.
    norms = [(structure.final_norm, *head)] if head and structure.final_norm else []
    expected = _run(clone, length, ())
    with_head = next((names for names in [*norms, head] if names and _is_head(clone, names, length, expected)), ())
    is_embedding = bool(embedding) and _is_embedding(clone, embedding, length, expected)
    return EndUnits(embedding=embedding if is_embedding else "", head=with_head)


@dataclass(slots=True)
class _Pass:
    """A forward and backward of a clone."""

    output: torch.Tensor
    """Logits, or the loss of a model without logits, of any shape."""
    grads: list[torch.Tensor | None]
    """Of its weights, in order."""
    calls: list[str] = field(default_factory=list)
    """The watched modules and the layers, `_LAYER`, in the order in which they were called."""

    def equals(self, other: _Pass) -> bool:
        """Whether outputs and gradients are equal to the bit."""
        pairs = [(self.output, other.output), *zip(self.grads, other.grads)]
        return all(
            a is b or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)) for a, b in pairs
        )


def _is_head(clone: Clone, names: Sequence[str], length: int, expected: _Pass | None) -> bool:
    """Whether modules run once each, in order and after all layers, and nothing else reads their weights."""
    actual = _run(clone, length, names)
    if expected is None or actual is None or not actual.equals(expected):
        return False
    earlier, last = actual.calls[: -len(names)], actual.calls[-len(names) :]
    return set(earlier) == {_LAYER} and last == list(names)


def _is_embedding(clone: Clone, name: str, length: int, expected: _Pass | None) -> bool:
    """Whether a module runs once, before all layers, and nothing else reads its weights, its backward included."""
    actual = _run(clone, length, (name,), frees_before_backward=True)
    if expected is None or actual is None or not actual.equals(expected):
        return False
    return actual.calls[0] == name and actual.calls.count(name) == 1


def _run(clone: Clone, length: int, names: Sequence[str], frees_before_backward: bool = False) -> _Pass | None:
    """Runs a copy of a clone whose modules ``names`` have their weights in their own forward alone; None if it fails.

    Args:
        clone: of the model.
        length: tokens of a row.
        names: of modules.
        frees_before_backward: overwrites the weights before backward, which sees them where it kept them.
    """
    module = duplicate_module(clone.module)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    calls: list[str] = []
    watched = {module.get_submodule(layer): _LAYER for layer in clone.structure.layers}
    watched |= {module.get_submodule(name): name for name in names}
    try:
        with nothing_dropped(), _watch_calls(watched, calls), _without_weights_outside(module, names) as own_weights:
            seed_all(0)
            stand_ins = [item for name in names for item in module.get_submodule(name).parameters()]
            with _Uses(stand_ins) as uses:
                output = clone.run(ROWS, module, tokens=length)
            if uses.found:
                return None
            for weight in own_weights if frees_before_backward else ():
                weight.data.fill_(torch.nan)
            upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(6), dtype=output.dtype)
            grads = torch.autograd.grad(output, trained, upstream, allow_unused=True)
    except Exception:
        # Whatever the code did with the stand-ins, it reads weights outside of their modules.
        return None
    return _Pass(output.detach(), list(grads), calls)


class _Uses(TorchFunctionMode):
    """Finds out whether code calls a function of torch with one of some tensors, or asks for its type or shape.

    Args:
        tensors: to look for.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._ids = {id(tensor) for tensor in tensors}
        self.found = False
        """Whether it does."""

    def __torch_function__(
        self, func: TorchFunction, types: Collection[type], args: TorchArgs = (), kwargs: TorchKwargs | None = None
    ) -> object:
        """Notes a use; torch calls this for each function."""
        self.found |= any(id(leaf) in self._ids for leaf in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


@contextmanager
def _watch_calls(watched: dict[nn.Module, str], calls: list[str]) -> Iterator[None]:
    """Appends the names of modules to ``calls`` as they are called."""

    def note(module: nn.Module, _args: object) -> None:
        calls.append(watched[module])

    handles = [module.register_forward_pre_hook(note) for module in watched]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _ShardLike(nn.Parameter):
    """A weight of another class than a plain one's, as a shard is."""


@contextmanager
def _without_weights_outside(module: nn.Module, names: Sequence[str]) -> Iterator[list[nn.Parameter]]:
    """Replaces weights of submodules by others without numbers, except while their submodule runs; yields the former.

    As under ZeRO, where a freed weight is a shard in the type of the masters: the stand-in has another type and class.
    """
    handles, own_weights, restore = [], list[nn.Parameter](), list[Callable[[], None]]()
    for submodule in (module.get_submodule(name) for name in names):
        for owner in submodule.modules():
            weights = {key: item for key, item in owner._parameters.items() if item is not None}
            stand_ins = {
                key: _ShardLike(torch.full_like(item, torch.nan, dtype=torch.float32)) for key, item in weights.items()
            }
            own_weights += weights.values()

            def put(values: dict[str, nn.Parameter], owner: nn.Module = owner) -> None:
                owner._parameters.update(values)

            put(stand_ins)
            handles.append(submodule.register_forward_pre_hook(lambda *_, put=put, weights=weights: put(weights)))
            handles.append(submodule.register_forward_hook(lambda *_, put=put, stand_ins=stand_ins: put(stand_ins)))
            restore.append(functools.partial(put, weights))
    try:
        yield own_weights
    finally:
        for handle in handles:
            handle.remove()
        for put_back in restore:
            put_back()
