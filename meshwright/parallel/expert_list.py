"""Experts that are modules of a list: each rank keeps some of them, and the loop over them stays the model's own code.

The module that calls the experts runs twice. In the first run it gets zeros from each, which tells which rows go where;
all of these travel at once (`parallel.token_dispatch`), so it doesn't matter that ranks call other experts, or some not
at all. In the second run the calls get what came back. Both runs start from the same buffers, attributes and random
numbers, and the first leaves no trace. Gradients go by the rows of the first run and the outputs of the second.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.parallel.backward_tie import tied
from meshwright.parallel.dropout_rng import DropoutRng
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.forward_state import ForwardState
from meshwright.parallel.keyed_random import DrawnStates
from meshwright.parallel.moving_buffers import MovingBuffers
from meshwright.spec.experts import LayerExperts
from meshwright.spec.placement import Span
from meshwright.torch_compat.tensors import tree_leaves

NEAREST = "nearest that works: tp or shard without ep, or experts that are rows of one weight"


@dataclass(slots=True)
class _Calls:
    """The calls of a list's experts in one call of the module around them."""

    experts: list[int] = field(default_factory=list)
    """The expert of each call."""
    rows: list[torch.Tensor] = field(default_factory=list)
    """What each got, (..., D)."""
    versions: list[int] = field(default_factory=list)
    """How often each had been written to."""
    outputs: list[torch.Tensor] | None = None
    """What each returns, of the same shape; None in the first run."""
    answered: int = 0
    """Calls of the second run so far."""
    autocast: tuple[bool, bool] = (False, False)
    """Whether autocast was on where the module around them was called, on the CPU and on GPUs."""


class _CallsOfThread(threading.local):
    """Of a thread, since two halves of a micro-batch may be in the same module."""

    def __init__(self) -> None:
        self.calls: dict[int, _Calls] = {}
        """Of each `LocalExperts` whose caller runs, by id."""


_LOCAL = _CallsOfThread()


class LocalExperts(nn.Module):
    """This rank's experts of a list; to the code that calls them it is the list or dict of all.

    Args:
        experts: all of them, by name.
        span: those of this rank.
        path: dotted name of the list in the model.
        is_mapping: whether the list is a dict.
    """

    def __init__(self, experts: Mapping[str, nn.Module], span: Span, path: str, is_mapping: bool) -> None:
        super().__init__()
        self._names, self.path, self._is_mapping = tuple(experts), path, is_mapping
        self.in_halves = False
        """Whether an expert gets its rows in two halves, which shows whether it mixes them."""
        self.is_trained = any(item.requires_grad for expert in experts.values() for item in expert.parameters())
        """Whether some expert has weights that are trained, be it on another rank."""
        self._is_computing = False
        # by their own names, as checkpoints have them
        for name in self._names[slice(*span)]:
            self.add_module(name, experts[name])

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Computes rows by this rank's experts.

        Args:
            hidden_states: (N, D).
            top_k_index: (N, 1), counted on this rank.
            top_k_weights: (N, 1) ones; whoever calls the experts weighs them.

        Returns:
            (N, D).
        """
        chosen, order = top_k_index.reshape(-1).sort(stable=True)
        experts = list(self.children())
        edges = torch.searchsorted(chosen, torch.arange(len(experts) + 1, device=chosen.device))
        parts = hidden_states.index_select(0, order).split(edges.diff().tolist())
        outputs = [self._compute(expert, rows) for expert, rows in zip(experts, parts) if len(rows)]
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device=order.device)
        return torch.cat(outputs or [hidden_states]).index_select(0, position)

    def _compute(self, expert: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        """Returns what an expert makes of ``rows: (n, D)``, of the same shape."""
        halves = rows.tensor_split(2) if self.in_halves and len(rows) > 1 else (rows,)
        self._is_computing = True
        try:
            outputs = [expert(half) for half in halves]
        finally:
            self._is_computing = False
        for output, half in zip(outputs, halves):
            if not isinstance(output, torch.Tensor) or output.shape != half.shape:
                returned = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
                self.refuse(f"an expert returns {returned} for rows {tuple(half.shape)}")
            if output.dtype != half.dtype:
                returned, given = (str(item.dtype).removeprefix("torch.") for item in (output, half))
                self.refuse(
                    f"an expert returns {returned} for rows of {given}, and ranks exchange one type; let it return "
                    "y.to(x.dtype)"
                )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def refuse_direct_calls(self) -> None:
        """Makes this rank's experts refuse calls that don't come by `call`: of those on other ranks none would be."""

        def refuse_call(*_: object) -> None:
            if not self._is_computing:
                self.refuse(
                    "the code that calls them doesn't take them from the list by its index, its name or iteration, as "
                    "where it kept them in another attribute, or asks for children()"
                )

        for expert in self.children():
            expert.register_forward_pre_hook(refuse_call)

    def refuse(self, reason: str) -> NoReturn:
        """Raises PlanError for experts that can't be spread."""
        raise PlanError(f"ep spreads the experts of '{self.path}' over ranks, but {reason}; {NEAREST}")

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, key: int | slice | str) -> _Expert | list[_Expert]:
        if self._is_mapping:
            return _Expert(self, self._names.index(str(key)))
        positions = range(len(self))
        if isinstance(key, slice):
            return [_Expert(self, position) for position in positions[key]]
        return _Expert(self, positions[int(key)])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._names) if self._is_mapping else iter(self.values())

    def __contains__(self, key: object) -> bool:
        return self._is_mapping and key in self._names

    def keys(self) -> tuple[str, ...]:
        """Returns the names of all experts."""
        return self._names

    def values(self) -> list[_Expert]:
        """Returns all experts, as the code of the model may call them."""
        return [_Expert(self, position) for position in range(len(self))]

    def items(self) -> list[tuple[str, _Expert]]:
        """Returns both."""
        return list(zip(self._names, self.values()))

    def call(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """Answers the model's own call of an expert with ``rows: (..., D)``; (..., D)."""
        calls = _LOCAL.calls.get(id(self))
        if calls is None:
            self.refuse(
                "another module's forward than its parent's calls them, or its parent's does so again in backward, by "
                "a checkpoint of its own; layouts have recompute=full for that"
            )
        if calls.outputs is None:
            if calls.autocast != _autocast():
                self.refuse(
                    "the code that calls them does so in an autocast of its own, and they compute outside of it"
                )
            calls.experts.append(expert)
            calls.rows.append(rows)
            calls.versions.append(rows._version)
            return torch.zeros_like(rows)
        position = calls.answered
        calls.answered += 1
        expected = (calls.experts[position], calls.rows[position].shape) if position < len(calls.experts) else None
        if expected != (expert, rows.shape):
            self.refuse_dependence()
        return calls.outputs[position]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields those of this rank's experts, of any shape; refuses code that calls the experts: it would read all."""
        if id(self) in _LOCAL.calls:
            self.refuse("the code that calls them reads their weights, of which each rank has some")
        return super().named_parameters(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yields this rank's experts and all below, of any kind; refuses code that calls the experts, as above."""
        if id(self) in _LOCAL.calls:
            self.refuse("the code that calls them asks for their modules, of which each rank has some")
        return super().named_modules(*args, **kwargs)

    def refuse_dependence(self) -> NoReturn:
        """Refuses a caller whose second run called other experts than its first."""
        self.refuse("which of them are called, and with how many rows, depends on what others returned")

    @contextlib.contextmanager
    def answering(self, calls: _Calls) -> Iterator[None]:
        """Makes the calls of this thread part of ``calls``."""
        outer = _LOCAL.calls.get(id(self))
        _LOCAL.calls[id(self)] = calls
        try:
            yield
        finally:
            if outer is None:
                del _LOCAL.calls[id(self)]
            else:
                _LOCAL.calls[id(self)] = outer


class _Expert:
    """What the model's code gets for an expert, wherever that is: it can be called with rows."""

    def __init__(self, experts: LocalExperts, number: int) -> None:
        self._experts, self._number = experts, number

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        values = [*args, *kwargs.values()]
        if len(values) != 1 or not isinstance(values[0], torch.Tensor) or not values[0].dim():
            kinds = ", ".join(type(value).__name__ for value in values)
            self._experts.refuse(f"they are called with ({kinds}), not with one tensor of rows (..., D)")
        return self._experts.call(self._number, values[0])

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._experts.refuse(f"the code that calls them reads '{name}' of an expert, which another rank may hold")


class ListDispatch:
    """Replaces the forward of the module that calls the experts of a list.

    Args:
        caller: that module.
        experts: of this rank, whose call sends rows to the ranks of their experts.
        moving: the buffers that the caller's forward changes.
        random: returns the random numbers by place of this rank's forwards; None where there are none.
        width: D of a rank that calls no expert.
        plain: the caller's own forward.
    """

    def __init__(
        self,
        caller: nn.Module,
        experts: LocalExperts,
        moving: MovingBuffers,
        random: Callable[[], DropoutRng | None],
        width: int,
        plain: Forward,
    ) -> None:
        self._caller, self._experts, self._moving, self._random = caller, experts, moving, random
        self._width, self._plain = width, plain

    @property
    def _own_parameters(self) -> list[nn.Parameter]:
        """The caller's, but for those of its experts."""
        modules = set(self._caller.modules()) - set(self._experts.modules())
        return [item for module in modules for item in module._parameters.values() if item is not None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the caller returns."""
        calls = self._ask(args, kwargs)
        returned, sizes = self._send(calls, _tensors((args, kwargs)))
        # Not split(): what the model adds to an output in place would be refused as a view of several.
        parts = torch.unsafe_split_with_sizes(returned, [*sizes, len(returned) - sum(sizes)])
        calls.outputs = [part.view(rows.shape) for part, rows in zip(parts, calls.rows)]
        with self._experts.answering(calls):
            result = self._plain(*args, **kwargs)
        if calls.answered < len(calls.experts):
            self._experts.refuse_dependence()
        # Ranks that wait for this one in backward would do so for ever.
        return result if sum(sizes) else tied(result, returned)

    def _ask(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Calls:
        """Runs the caller a first time and returns its calls; it leaves no trace."""
        random, moving, generators = self._random(), self._moving, DrawnStates()
        by_place = random.snapshot()() if random is not None else contextlib.nullcontext()
        buffers: AbstractContextManager[None] = moving.substituted(moving.copy())
        inputs = [(tensor, tensor._version) for tensor in _tensors((args, kwargs))]
        states, calls = generators.states, _Calls(autocast=_autocast())
        attributes = ForwardState(self._caller, self._experts, (args, kwargs))
        try:
            with self._experts.answering(calls), by_place, buffers:
                self._plain(*args, **kwargs)
        finally:
            generators.states = states
            changed = attributes.put_back()
        if changed:
            self._experts.refuse(f"the code that calls them writes into its tensor '{changed}', which is no buffer")
        if any(tensor._version != version for tensor, version in [*inputs, *zip(calls.rows, calls.versions)]):
            self._experts.refuse("the code that calls them writes into its input or into an expert's rows")
        return calls

    def _send(self, calls: _Calls, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        """Sends all rows to their experts.

        Args:
            calls: of the first run.
            inputs: tensors that the caller was called with.

        Returns:
            (N, D) that came back, in the order of the calls, and the rows of each call; more may follow these.
        """
        sizes = [rows.shape[:-1].numel() for rows in calls.rows]
        sent = list(zip(calls.experts, (rows.reshape(-1, rows.shape[-1]) for rows in calls.rows)))
        example = next((rows[:1].detach() for _, rows in sent if len(rows)), None)
        visited = {expert for expert, rows in sent if len(rows)}
        for expert, rows in sent[:]:
            if expert not in visited:
                # Called without rows, its weights have gradients of zeros: of a row whose output nobody reads.
                visited.add(expert)
                sent.append((expert, rows.new_zeros(1, rows.shape[1]) if example is None else example))
        if not sent:
            like = next(tensor for tensor in inputs if tensor.is_floating_point())
            sent.append((0, like.new_zeros(0, self._width)))
        hidden = torch.cat([rows for _, rows in sent])
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # Backward is an exchange too, so that rows have gradients on all ranks or on none.
            sources = (*inputs, *self._own_parameters)
            hidden.requires_grad_(self._experts.is_trained or any(tensor.requires_grad for tensor in sources))
        experts = [torch.full((len(rows), 1), expert, device=hidden.device) for expert, rows in sent]
        return self._experts(hidden, torch.cat(experts), hidden.new_ones(len(hidden), 1)), sizes


def _autocast() -> tuple[bool, bool]:
    """Returns whether autocast is on here, on the CPU and on GPUs."""
    return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _tensors(tree: object) -> list[torch.Tensor]:
    """Returns the tensors of nested arguments, of any shape."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def spread(
    caller: nn.Module,
    rows: LayerExperts,
    span: Span,
    moving: MovingBuffers,
    random: Callable[[], DropoutRng | None],
    width: int,
) -> LocalExperts:
    """Puts `LocalExperts` in the place of a list.

    Args:
        caller: the module that has the list.
        rows: what the list is.
        span: this rank's experts.
        moving: see `ListDispatch`.
        random: likewise.
        width: likewise.
    """
    attribute = rows.module.rpartition(".")[2]
    whole = caller.get_submodule(attribute)
    children = {name: whole.get_submodule(name) for name in rows.children}
    experts = LocalExperts(children, span, rows.module, isinstance(whole, nn.ModuleDict))
    setattr(caller, attribute, experts)
    wrap_forward(
        caller,
        ForwardLayer.EXPERT,
        "runs twice: the first run tells which rows go to which expert",
        lambda plain: ListDispatch(caller, experts, moving, random, width, plain),
    )
    return experts
