"""Tries a model on the arguments of a user's call: whether rows depend on each other, or calls on earlier calls.

A custom loop calls the model itself, so its arguments are known at its first call alone. The trial runs a small copy in
float64 on some rows of that call. It changes what other rows contain, and leaves shapes as they are, so that masks and
whatever else comes with the rows stay right.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.models.analysis.attribute_state import AttributeState, Place
from meshwright.models.analysis.clone import copy_buffers, restore_buffers
from meshwright.models.analysis.objective import nothing_dropped
from meshwright.parallel.float64_ops import Float64Ops
from meshwright.torch_compat.tensors import tree_flatten, tree_leaves, tree_unflatten

ROWS, TOKENS = 4, 16
"""Rows of a call, and tokens of each, to which it is cut where the model takes that."""
TOLERANCE = 1e-9
"""Largest difference of equal outputs in float64, relative to the largest."""
WORK = 1 << 36
"""Weights x positions of a call, beyond which no trial is run: some seconds of a forward."""
_VARIANTS = 4
"""Contents that other rows are given."""
_CARRIERS = 48
"""Attributes that are tried one by one."""
_SHIFTS = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
"""Added to a count, to see what forward does in later calls."""
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call, by position and by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFacts:
    """What a model does with the rows of a call, and from call to call."""

    mixes_rows: bool = False
    """Whether its output of a row depends on what is in the other rows of the call."""
    remembers: tuple[str, ...] = ()
    """Plain attributes by which its output depends on earlier calls, the clearest first."""
    mixes_remembered_rows: bool = False
    """Whether its output of a row depends on other rows of earlier calls."""


class CallTrial:
    """Calls a copy of a model as its user does.

    Args:
        module: real, in float64, which nobody else uses; in the modes in which the user calls it.
        call: the arguments, on the CPU.
    """

    def __init__(self, module: nn.Module, call: Call) -> None:
        self._module = module
        self._state, self._buffers = AttributeState(module), copy_buffers(module)
        self._call, self._base = self._fitting(call)

    def facts(self) -> CallFacts:
        """Returns what the calls show; nothing where the model can't be called, or calls can't be repeated."""
        if self._base is None or not self._is_near(self._base, self._run([self._call])):
            return CallFacts()
        remembers = tuple(dict.fromkeys(self._remembered()))
        return CallFacts(
            mixes_rows=self._mixes(self._base, lambda other: [other]),
            remembers=remembers,
            mixes_remembered_rows=bool(remembers)
            and self._mixes(self._run([self._call, self._call]), lambda other: [other, self._call]),
        )

    def _fitting(self, call: Call) -> tuple[Call, list[torch.Tensor] | None]:
        """Returns the call cut to some rows of some tokens as far as the model takes that, and its output."""
        tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]
        few_rows = _cut(call, 0, ROWS)
        candidates = [_cut(few_rows, 1, TOKENS)] if all(map(_is_of_tokens, tensors)) else []
        for candidate in (*candidates, few_rows):
            if (output := self._run([candidate])) is not None:
                return candidate, output
        return call, self._run([call])

    def _is_small(self, call: Call) -> bool:
        """Returns whether a forward takes seconds at most."""
        tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]
        positions = max((leaf[..., 0].numel() if leaf.dim() > 2 else leaf.numel() for leaf in tensors), default=0)
        return positions * sum(item.numel() for item in self._module.parameters()) <= WORK

    def _run(self, calls: Sequence[Call], changes: dict[Place, Any] | None = None) -> list[torch.Tensor] | None:
        """Returns the output of the last of some calls, from the same state and random numbers; None for an error.

        Args:
            calls: one after another; the state is as at first before the first of them.
            changes: attributes that have other values than at first.
        """
        self._state.set(changes or {})
        output: Any = None
        for call in calls:
            if not self._is_small(call):
                return None
            restore_buffers(self._module, self._buffers)
            args, kwargs = copy.deepcopy(call)
            # Any error: the model can't be called so, which is no fault of the user's.
            try:
                with _alike(), torch.autocast("cpu", enabled=False), Float64Ops(), nothing_dropped():
                    output = self._module(*args, **kwargs)
            except Exception:
                return None
        return [item.detach() for item in output_tensors(output) if item.is_floating_point()]

    @staticmethod
    def _is_near(outputs: list[torch.Tensor] | None, others: list[torch.Tensor] | None) -> bool:
        """Returns whether two outputs are equal up to rounding."""
        if outputs is None or others is None or len(outputs) != len(others):
            return False
        return all(_is_near(output, other) for output, other in zip(outputs, others))

    def _mixes(self, wanted: list[torch.Tensor] | None, calls_of: Callable[[Call], Sequence[Call]]) -> bool:
        """Returns whether a row's output depends on other rows of a call.

        Args:
            wanted: the output with the rows as they are.
            calls_of: a call whose other rows are changed to the calls of which the last one's output is looked at.
        """
        main = _main_tensor(self._call)
        if main is None:
            return False
        if not self._rows_change(calls_of, wanted, main, 0):
            return False
        # torch's own layers of tokens (S, B, ...) have their rows in the second dim
        if all(getattr(child, "batch_first", True) for child in self._module.modules()) or main.dim() < 2:
            return True
        return self._rows_change(calls_of, wanted, main, 1)

    def _rows_change(
        self,
        calls_of: Callable[[Call], Sequence[Call]],
        wanted: list[torch.Tensor] | None,
        main: torch.Tensor,
        dim: int,
    ) -> bool:
        """Returns whether the output of half of the rows along a dim changes with what the other half contains."""
        size = main.shape[dim]
        if wanted is None or size < 2:
            return False
        # outputs that have rows are shorter with one row less
        fewer = self._run([_cut(self._call, dim, size - 1)]) if size > 2 else None
        for start, stop in ((size // 2, size), (0, size // 2)):
            for variant in range(_VARIANTS):
                outputs = self._run(calls_of(_with_others(self._call, main, dim, (start, stop), variant)))
                if outputs is None or len(outputs) != len(wanted):
                    continue
                for index, (output, expected) in enumerate(zip(outputs, wanted)):
                    cut = fewer[index] if fewer is not None and len(fewer) == len(wanted) else None
                    if output.shape != expected.shape or not _has_rows(expected, cut, dim, size):
                        continue
                    kept = [
                        item.unflatten(dim, (size, -1)).narrow(dim, start, stop - start) for item in (output, expected)
                    ]
                    if not _is_near(kept[0], kept[1], float(expected.abs().nan_to_num().max())):
                        return True
        return False

    def _remembered(self) -> Iterator[str]:
        """Yields the names of plain attributes by which a later call gives something else."""
        changed = self._state.changes_to(self._state_after(1))
        if not changed:
            return
        is_same = self._is_near(self._base, self._run([self._call, self._call]))
        if len(changed) > _CARRIERS:
            yield from () if is_same else map(_name, changed)
            return
        for place, value in changed.items():
            # an error: what changed belongs to other attributes, which are tried too
            if self._depends(place, value):
                yield _name(place)
        # counts that every call moves, of which later calls may make something
        second = self._state_after(2)
        moving = second.changes_to(self._state_after(3))
        for place, value in moving.items():
            if _is_number(value) and any(self._depends(place, value + shift) for shift in _SHIFTS):
                yield _name(place)
        if not is_same:
            yield from map(_name, changed)

    def _state_after(self, calls: int) -> AttributeState:
        """Returns the attributes after some calls in a row."""
        self._run([self._call] * calls)
        return AttributeState(self._module)

    def _depends(self, place: Place, value: Any) -> bool:
        """Returns whether the output is another with an attribute of another value."""
        outputs = self._run([self._call], {place: value})
        return outputs is not None and not self._is_near(self._base, outputs)


def output_tensors(output: object) -> Iterator[torch.Tensor]:
    """Yields the tensors, of any shape, of a model's output, however they are nested."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from (tensor for tensor in tree_leaves(list(vars(leaf).values())) if isinstance(tensor, torch.Tensor))


def as_trial_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Returns copies of a call's arguments on the CPU, floating ones in float64; others are copied too."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        leaf = leaf.detach().cpu().clone()
        return leaf.double() if leaf.is_floating_point() else leaf

    leaves, spec = tree_flatten((args, kwargs))
    call: Call = tree_unflatten([copied(leaf) for leaf in leaves], spec)
    main = _main_tensor(call)
    # few rows: copies of them, of which the others are changed
    if main is None or len(main) >= ROWS - 1:
        return call
    count, times = len(main), -(-ROWS // len(main))
    return _map(
        call, lambda leaf: leaf.repeat(times, *[1] * (leaf.dim() - 1)) if leaf.dim() and len(leaf) == count else leaf
    )


def limit_tokens(call: Call, vocab: int) -> Call:
    """Returns a call whose tokens are those of a model of a smaller vocabulary; -100 and masks stay."""
    return _map(call, lambda leaf: leaf if leaf.is_floating_point() else torch.where(leaf < vocab, leaf, leaf % vocab))


def _map(call: Call, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """Returns a call with each tensor of it, of any shape, changed."""
    leaves, spec = tree_flatten(call)
    changed: Call = tree_unflatten([change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
    return changed


def _is_of_tokens(leaf: torch.Tensor) -> bool:
    """Returns whether a tensor looks like one of tokens, (B, S): whole numbers, or true and false."""
    return (leaf.dim() == 2 and not leaf.is_floating_point()) or leaf.dim() == 0


def _main_tensor(call: Call) -> torch.Tensor | None:
    """Returns the tensor (B, ...) whose rows are changed: of whole numbers beyond 1, which a mask isn't, or else real.

    Packed rows (T,) beside their bounds are no rows that could be changed.
    """
    tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.numel()]
    whole = [leaf for leaf in tensors if leaf.dtype in (torch.int64, torch.int32) and int(leaf.max()) > 1]
    main = next(iter(whole), next((leaf for leaf in tensors if leaf.is_floating_point()), None))
    if main is None:
        return None
    if main.dim() == 1 and any(leaf.dim() == 1 and not leaf[0] and leaf[-1] == len(main) for leaf in whole):
        return None
    return main


def _cut(call: Call, dim: int, size: int) -> Call:
    """Returns a call cut along a dim, where a tensor has the first one's size there."""
    main = _main_tensor(call)
    if main is None or main.dim() <= dim or main.shape[dim] <= size:
        return call
    length = main.shape[dim]
    return _map(
        call, lambda leaf: leaf.narrow(dim, 0, size) if leaf.dim() > dim and leaf.shape[dim] == length else leaf
    )


def _with_others(call: Call, main: torch.Tensor, dim: int, kept: tuple[int, int], variant: int) -> Call:
    """Returns a call in which the rows along a dim outside of ``kept`` are changed, of tensors like the main one."""

    def changed(leaf: torch.Tensor) -> torch.Tensor:
        is_alike = leaf.shape == main.shape and leaf.dtype == main.dtype
        if not is_alike or (not leaf.is_floating_point() and int(leaf.max()) <= 1):
            return leaf
        other = _variant(leaf, dim, variant).clone()
        start, stop = kept
        other.narrow(dim, start, stop - start).copy_(leaf.narrow(dim, start, stop - start))
        return other

    return _map(call, changed)


def _variant(leaf: torch.Tensor, dim: int, variant: int) -> torch.Tensor:
    """Returns other contents of a tensor of any shape: in another order, or of one word, or large copies of one row."""
    if not variant:
        order = torch.randperm(leaf.numel(), generator=torch.Generator().manual_seed(5))
        other = leaf.flatten()[order].reshape(leaf.shape)
        return -other if leaf.is_floating_point() else other
    # Tokens of one word all go to the same experts, which are then full, and leave others empty.
    if leaf.is_floating_point():
        row = leaf.narrow(dim, variant % leaf.shape[dim], 1)
        return (3.0 * (-1) ** variant * row).expand_as(leaf)
    words = leaf.unique()
    return words[(variant - 1) * len(words) // (_VARIANTS - 1)].expand_as(leaf)


def _has_rows(expected: torch.Tensor, cut: torch.Tensor | None, dim: int, size: int) -> bool:
    """Returns whether an output has a run of elements for each row along a dim: with one row less it is shorter."""
    if expected.dim() <= dim or expected.shape[dim] % size or not expected.shape[dim]:
        return False
    if dim and expected.shape[dim] != size:
        return False
    if cut is None:
        return size == 2
    return cut.dim() > dim and cut.shape[dim] == expected.shape[dim] // size * (size - 1)


def _is_near(output: torch.Tensor, other: torch.Tensor, largest: float | None = None) -> bool:
    """Returns whether two tensors of any shape are equal up to rounding; NaN and infinities are equal to all."""
    if output.shape != other.shape:
        return False
    if not output.numel():
        return True
    gap = float((output - other).abs().nan_to_num(posinf=0.0).max())
    finite = other.abs().nan_to_num(posinf=0.0)
    return not gap > TOLERANCE * (float(finite.max()) if largest is None else largest)


def _is_number(value: object) -> bool:
    """Returns whether a value is a number, or a tensor of one."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.dtype != torch.bool
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _name(place: Place) -> str:
    """Returns the dotted name of an attribute."""
    return ".".join(filter(None, place))


@contextlib.contextmanager
def _alike() -> Iterator[None]:
    """Gives a call the same random numbers each time, without a trace in the generators, and no gradients."""
    python_state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng([]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        random.seed(0)
        if numpy is not None:
            numpy.random.seed(0)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
