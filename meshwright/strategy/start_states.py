"""The state that an optimizer will have, created before its first step, for a checkpoint to be loaded into.

On one device a weight has no state before its first step. Some optimizers begin otherwise from zeros: SGD's momentum
begins at the first gradient, which ``dampening`` leaves alone. Their first step sees no state unless one was loaded.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.torch_compat.optimizers import create_initial_state, starts_as_from_zeros

State = dict[str, Any]
"""Of one weight: tensors and numbers, by the optimizer's names."""


@dataclass(frozen=True, slots=True)
class _Start:
    """A weight's state as it was created."""

    state: State
    versions: dict[str, int]
    """How often each tensor had been written to, by any view: torch counts it."""

    @classmethod
    def of(cls, state: State) -> _Start:
        """Remembers a state."""
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        return cls(dict(state), {key: value._version for key, value in tensors.items()})

    def is_untouched(self, state: State) -> bool:
        """Tests whether a state is this one, and nobody has written to it."""
        return state.keys() == self.state.keys() and all(
            state[key] is value and value._version == self.versions[key]
            if isinstance(value, torch.Tensor)
            else state[key] == value
            for key, value in self.state.items()
        )


class StartStates:
    """Creates optimizers' states, and takes those away for the first step that it would change and nobody loaded."""

    def __init__(self) -> None:
        self._starts: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[torch.Tensor, _Start]] = (
            weakref.WeakKeyDictionary()
        )
        self._absent: dict[torch.Tensor, _Start] = {}
        self.is_creating = False
        """Whether a step is run only to create state."""

    @torch.no_grad()
    def create(self, optimizer: torch.optim.Optimizer) -> None:
        """Creates the state of weights that no step has changed yet, by a step that changes no weight.

        What torch's optimizers make themselves starts where they start it (``mu_product`` of NAdam at 1); all else,
        such as the momentum of SGD, at zero.
        """
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        members = [parameter for parameter in every if not optimizer.state.get(parameter)]
        if not members:
            return
        with self._without_effect(optimizer, every, members):
            for parameter in members:
                parameter.grad = torch.zeros_like(parameter)
            # before the rates change: ASGD and Rprop start from them
            create_initial_state(optimizer)
            start_values = {parameter: copy.deepcopy(optimizer.state.get(parameter, {})) for parameter in members}
            for group in optimizer.param_groups:
                # at rate 0 the step creates state; weight decay is scaled by the rate too
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
            optimizer.step()
        for parameter in members:
            state = optimizer.state[parameter]
            for key, value in state.items():
                start = start_values[parameter].get(key)
                if isinstance(value, torch.Tensor):
                    value.zero_() if start is None else value.copy_(start)
                elif isinstance(value, (int, float)):
                    state[key] = type(value)(0) if start is None else start
        if not starts_as_from_zeros(optimizer):
            starts = self._starts.setdefault(optimizer, {})
            starts |= {parameter: _Start.of(optimizer.state[parameter]) for parameter in members}

    @contextmanager
    def _without_effect(
        self, optimizer: torch.optim.Optimizer, every: Sequence[torch.Tensor], members: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """Clears all gradients; afterwards puts back these, the members' values, and the groups' rates and counts."""
        groups = optimizer.param_groups
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        gradients = [parameter.grad for parameter in every]
        saved_values = [parameter.detach().clone() for parameter in members]
        # an optimizer leaves weights without a gradient alone, and their state
        for parameter in every:
            parameter.grad = None
        self.is_creating = True
        try:
            yield
        finally:
            self.is_creating = False
            for group, before in zip(groups, options):
                group.update(before)
            for parameter, value in zip(members, saved_values):
                parameter.copy_(value)
            for parameter, gradient in zip(every, gradients):
                parameter.grad = gradient

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes away the created state of weights that this step is the first to change."""
        self._absent = {}
        starts = self._starts.get(optimizer, {})
        for parameter in [item for item in starts if item.grad is not None]:
            start, state = starts.pop(parameter), optimizer.state.get(parameter)
            if state is not None and start.is_untouched(state):
                self._absent[parameter] = start
                del optimizer.state[parameter]

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Moves what the step made into the tensors that were created: a state dict may hold them."""
        for parameter, start in self._absent.items():
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                created = start.state.get(key)
                if isinstance(value, torch.Tensor) and isinstance(created, torch.Tensor):
                    state[key] = created.copy_(value)
        self._absent = {}
