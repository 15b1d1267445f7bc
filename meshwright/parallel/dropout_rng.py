"""Dropout and its like under every layout: each draw of a forward gets the numbers of its place in the global batch.

Inside a forward that trains, functions that draw random numbers are found by torch's function mode, and draw from
`parallel.keyed_random` instead: keyed by seed, step, the layer (outside of the layers: the innermost module) and how
many draws came before in this call of it; then by the row's place in the global batch and the element's in the row. So
no change of the layout moves a number, and a layer that is computed again draws the same ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.parallel.activation_boxes import AmbiguousActivation, TokenSplit, Units, line_numbers, locate_box
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.keyed_random import (
    RowBox,
    Words,
    drop_in_one_kernel,
    dropout_mask,
    generator_states,
    row_keys,
    uniform,
)
from meshwright.parallel.random_ops import RandomOpsMode, apply_dropout

Call = Callable[..., Any]
T = TypeVar("T")
BOXES = 64
"""Shapes whose boxes are remembered."""


@dataclass(slots=True)
class RngContext:
    """What is being computed: a micro-batch of a step, and where in the model."""

    key: str
    """Seed and step."""
    first_row: int
    """Index of the micro-batch's first row in the global batch."""
    rows: int
    """Rows of the micro-batch."""
    tokens: int
    """Tokens of a row, S."""
    calls: dict[str, int] = field(default_factory=dict)
    """Calls so far, by module."""
    owner: str = ":0"
    """The module that is being called, and which call it is."""
    draw_index: int = 0
    """Draws so far in this call."""
    units: Units | None = None
    """What is here of units that other ranks have too, between the matrices of a group."""
    whole_input: torch.Tensor | None = None
    """What entered the group, (B, S, D), equal on the ranks that share its units: an adapter may drop some of it."""
    unknown_rows_reason: str = ""
    """Why a tensor's rows are unknown in this module; "" where they are known."""


class DropoutRng:
    """The random numbers of one rank's forwards.

    Args:
        split: how its tokens follow from a row's.
    """

    OF_FORWARD = ("context", "_mode_is_on")
    """What belongs to a forward that runs."""

    def __init__(self, split: TokenSplit) -> None:
        self._split = split
        self.context: RngContext | None = None
        self._mode_is_on = False
        self._drawn: bool | None = None
        """Whether some forward drew a number; None before the first."""
        self._boxes: dict[Hashable, RowBox] = {}

    def begin_forward(self, key: tuple[int, int], first_row: int, shape: Sequence[int]) -> None:
        """Starts the numbering of a training forward; called before it.

        Args:
            key: (seed, step).
            first_row: index of the first row in the global batch.
            shape: of the micro-batch: (B, S) or (B, ...).
        """
        # False, no longer None: a forward ran, and drew nothing so far.
        self._drawn = self._drawn or False
        self.context = RngContext(f"{key[0]},{key[1]}", first_row, shape[0], shape[1] if len(shape) > 1 else 1)

    def end_forward(self) -> None:
        """Ends the numbering; called after the forward, so that an evaluation draws from torch."""
        self.context = None

    def run(
        self,
        key: tuple[int, int],
        first_row: int,
        shape: Sequence[int],
        forward: Callable[[], T],
        undo: Callable[[], None],
    ) -> T:
        """Runs a forward that trains, and returns what it gives.

        A model that drew nothing at first runs without the numbers, until a draw moves torch's generator: a
        probability that grows from zero. That forward is then done again with them, before anything came of it.

        Args:
            key: as `begin_forward`.
            first_row: as `begin_forward`.
            shape: as `begin_forward`.
            forward: may be called twice.
            undo: puts back what a forward changes in the model.
        """
        if self._drawn is False:
            # A draw moves torch's generators, which shows that this forward needs keyed numbers after all.
            states_before = generator_states()
            output = forward()
            if all(map(torch.equal, states_before, generator_states())):
                return output
            del output
            # It drew from torch: put the buffers back, and run it again with keyed numbers.
            undo()
        self.begin_forward(key, first_row, shape)
        try:
            return forward()
        finally:
            self.end_forward()

    def track_module(self, module: nn.Module, name: str) -> None:
        """Makes draws inside the calls of a module its own."""

        def owning(plain: Forward) -> Forward:
            @functools.wraps(plain)
            def forward(*args: object, **kwargs: object) -> object:
                return plain(*args, **kwargs) if self.context is None else self._run_as_owner(name, plain, args, kwargs)

            return forward

        wrap_forward(module, ForwardLayer.DROPOUT, f"random numbers are keyed by '{name}'", owning)

    def in_shard(self, first_module: nn.Module, last_module: nn.Module, units: Units) -> None:
        """States what this rank has of the units, from the call of one module to the end of another."""

        def enter(_module: nn.Module, args: tuple[object, ...]) -> None:
            if self.context is not None:
                self.context.units = units
                self.context.whole_input = next((item for item in args if isinstance(item, torch.Tensor)), None)

        def leave(*_: object) -> None:
            if self.context is not None:
                self.context.units = self.context.whole_input = None

        first_module.register_forward_pre_hook(enter, prepend=True)
        last_module.register_forward_hook(leave)

    def forbid(self, module: nn.Module, reason: str) -> None:
        """States that inside a module nobody can tell which rows its tensors belong to."""

        def forbidding(plain: Forward) -> Forward:
            @functools.wraps(plain)
            def forward(*args: object, **kwargs: object) -> object:
                if self.context is None:
                    return plain(*args, **kwargs)
                self.context.unknown_rows_reason = reason
                try:
                    return plain(*args, **kwargs)
                finally:
                    self.context.unknown_rows_reason = ""

            return forward

        wrap_forward(module, ForwardLayer.DROPOUT, "random numbers are refused", forbidding)

    def snapshot(self) -> Callable[[], AbstractContextManager[None]]:
        """Returns a context manager that restores the present position in the forward, for recompute."""
        context, mode_is_on = self.context, self._mode_is_on
        if context is None:
            return contextlib.nullcontext
        # A copy, since the forward goes on and counts further draws.
        context_copy = dataclasses.replace(context, calls=dict(context.calls))

        @contextlib.contextmanager
        def restore() -> Iterator[None]:
            current = self.context, self._mode_is_on
            self.context, self._mode_is_on = (
                dataclasses.replace(context_copy, calls=dict(context_copy.calls)),
                mode_is_on,
            )
            try:
                yield
            finally:
                self.context, self._mode_is_on = current

        return restore

    def dropout_mask(self, shape: Sequence[int], p: float, device: torch.device) -> torch.Tensor:
        """Returns ``shape`` bool: True where dropout keeps an element."""
        return dropout_mask(*self._next_draw(shape), p, device).view(tuple(shape))

    def drop(self, x: torch.Tensor, p: float, inplace: bool = False) -> torch.Tensor:
        """Returns ``x / (1 - p)``, of any shape, where dropout keeps an element, else 0; in ``x`` if ``inplace``."""
        context = self.context
        is_whole = context is not None and x is context.whole_input
        keys, box = self._next_draw(x.shape, is_whole)
        kept = None if inplace else drop_in_one_kernel(x, keys, box, p)
        # Without a kernel for both: the mask, which backward reads again.
        if kept is None:
            return apply_dropout(x, dropout_mask(keys, box, p, x.device).view(x.shape), p, inplace)
        return kept

    def uniform(self, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Returns ``shape`` float64 numbers between 0 and 1; one without dims is the same for all rows."""
        if not shape:
            context = self._drawing_context()
            # Row -1: a number of no row, equal on every rank.
            key = row_keys(self._draw_name(context), np.array([-1]))
            return uniform(key, RowBox(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)), device).view(())
        return uniform(*self._next_draw(shape), device).view(tuple(shape))

    def attention_dropout_mask(self, query: torch.Tensor, keys: int, p: float) -> torch.Tensor:
        """Returns what dropout keeps of attention's weights (B, H, queries, keys), bool.

        Args:
            query: (B, H, queries, E); ``query_run`` on it says which run of the queries it is, where they are several.
            keys: first tokens of the row that are looked at; all of them unless ``query_run`` is there.
            p: probability.
        """
        context = self._drawing_context()
        rows, heads, queries = query.shape[:3]
        query_run: tuple[int, bool] | None = getattr(query, "query_run", None)
        context.draw_index -= bool(query_run and not query_run[1])  # the second run of the same draw
        positions_by_count = self._split.positions(context.tokens)
        if rows != context.rows or (
            query_run is None and (queries not in positions_by_count or keys != context.tokens)
        ):
            raise self._placement_error(
                context, (rows, heads, queries, keys), "attention over other tokens than the batch's"
            )
        # All that the box depends on: lines (head, query) and columns (key).
        key = ("scores", heads, queries, keys, query_run, context.tokens, context.units)
        box = self._boxes.get(key)
        if box is None:
            try:
                head_indices, head_count = (
                    context.units.positions(heads) if context.units is not None else (np.arange(heads), heads)
                )
            except AmbiguousActivation as error:
                raise self._placement_error(context, query.shape, str(error)) from None
            query_positions = (
                positions_by_count[queries] if query_run is None else np.arange(query_run[0], query_run[0] + queries)
            )
            box = self._remember_box(
                key,
                RowBox(line_numbers([head_indices, query_positions], [head_count, context.tokens]), np.arange(keys)),
            )
        row_keys_of_draw = row_keys(self._draw_name(context), np.arange(context.first_row, context.first_row + rows))
        return dropout_mask(row_keys_of_draw, box, p, query.device).view(rows, heads, queries, keys)

    def _next_draw(self, shape: Sequence[int], is_whole: bool = False) -> tuple[Words, RowBox]:
        """Keys and box of the next draw, of a tensor of some shape; ``is_whole`` for one of no units."""
        context = self._drawing_context()
        units = None if is_whole else context.units
        key = (tuple(shape), context.rows, context.tokens, units)
        box = self._boxes.get(key)
        if box is None:
            try:
                box = locate_box(shape, context.rows, self._split.positions(context.tokens), units)
            except AmbiguousActivation as error:
                raise self._placement_error(context, shape, str(error)) from None
            self._remember_box(key, box)
        return row_keys(self._draw_name(context), np.arange(context.first_row, context.first_row + context.rows)), box

    def _remember_box(self, key: Hashable, box: RowBox) -> RowBox:
        if len(self._boxes) >= BOXES:
            # Shapes change with the rows' lengths, so the cache is bounded.
            self._boxes.clear()
        self._boxes[key] = box
        return box

    def _drawing_context(self) -> RngContext:
        assert self.context is not None
        self._drawn = True
        if self.context.unknown_rows_reason:
            raise self._placement_error(self.context, (), self.context.unknown_rows_reason)
        return self.context

    def _draw_name(self, context: RngContext) -> str:
        # The name hashes to the draw's key; see `keyed_random`.
        context.draw_index += 1
        return f"{context.key},{context.owner},{context.draw_index - 1}"

    def _run_as_owner(self, name: str, plain: Call, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        context = self.context
        assert context is not None
        # Draws are counted anew in each call of an owner, so that they don't depend on what else this rank computes.
        outer = context.owner, context.draw_index, context.units, context.whole_input
        call_index = context.calls.get(name, 0)
        context.calls[name] = call_index + 1
        context.owner, context.draw_index = f"{name}:{call_index}", 0
        context.units = context.whole_input = None
        try:
            # One mode for nested owners: under two, a replaced draw would be replaced again.
            return plain(*args, **kwargs) if self._mode_is_on else self._run_under_mode(plain, args, kwargs)
        finally:
            context.owner, context.draw_index, context.units, context.whole_input = outer

    def _run_under_mode(self, plain: Call, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        self._mode_is_on = True
        try:
            with RandomOpsMode(self):
                return plain(*args, **kwargs)
        finally:
            self._mode_is_on = False

    @staticmethod
    def _placement_error(context: RngContext, shape: Sequence[int], reason: str) -> PlanError:
        described = f" a tensor {tuple(shape)}" if shape else ""
        return PlanError(
            f"random numbers of {context.owner.rpartition(':')[0] or 'the model'}: it draws{described}, but {reason}, "
            "and numbers must not depend on the layout; what works: tensors (B, ...), (B S, D) and (B H, S, S), or none"
        )
