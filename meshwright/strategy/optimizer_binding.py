"""Binds optimizers to the shards of a sharded model: new, rebuilt and the user's own, checked at each step."""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright.errors import ConfigError
from meshwright.parallel.program import Program
from meshwright.parallel.weights import Weight
from meshwright.spec.axis import Mechanics
from meshwright.strategy.gradient_sync import GradientSync
from meshwright.strategy.optimizer_trial import OptimizerTrial, trial_key, try_optimizer
from meshwright.strategy.sharded_gradient import plain_gradient, wrap_gradient
from meshwright.strategy.start_states import StartStates
from meshwright.strategy.zero import TorchZeroOptimizer

STALE = (
    "the optimizer was made before shard(model), which replaces the model's parameters: it would train nothing; write "
    "model, optimizer = strategy.shard(model, optimizer), or make it afterwards, from model.parameters() or by "
    "strategy.optimizer"
)


class OptimizerBinding:
    """Binds optimizers to the weights of a program.

    Args:
        program: built.
        local_parameters: this rank's shard of each weight, plain tensors that share its memory.
        sync: reduces gradients in a custom loop; None where the caller's schedule has done so.
        before_step: called before each step of an optimizer that has weights of the program, once it isn't refused.
        after_step: called after it.
    """

    def __init__(
        self,
        program: Program,
        local_parameters: list[nn.Parameter],
        sync: GradientSync | None,
        before_step: Callable[[], None],
        after_step: Callable[[], None],
    ) -> None:
        self._program, self._sync = program, sync
        self._call_before_step, self._call_after_step = before_step, after_step
        self._local_parameters = dict(zip(program.weights, local_parameters))
        self._by_id = {id(weight.parameter): weight for weight in (*program.weights, *program.frozen)}
        self._bound: dict[int, tuple[weakref.ref[torch.optim.Optimizer], list[Weight]]] = {}
        self._published: dict[Weight, torch.Tensor] = {}
        self._stale: dict[int, weakref.ref[nn.Parameter]] = {}
        self.starts = StartStates()
        """Creates the state of optimizers before their first step."""
        self.split = any(weight.data_shards > 1 or not weight.shard.is_unsharded for weight in program.weights)
        mesh = program.mesh
        self._shared = mesh is not None and mesh.world.size > 1
        dealt = (Mechanics.STAGES, Mechanics.EXPERTS)
        self._dealt_out = mesh is not None and any(mesh.layout.degree(axis) > 1 for axis in dealt)
        """Whether ranks hold other weights than each other."""
        self._trials: dict[str, OptimizerTrial] = {}
        self._local_ids = {id(item) for item in local_parameters}
        self._outside: dict[int, weakref.ref[nn.Parameter]] = {}
        self._tried_groups: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        _observe_optimizers(self)

    def mark_stale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remembers parameters, of any shape, that the model lost: an optimizer that has one is refused at its step."""
        self._stale = {id(item): weakref.ref(item) for item in parameters if id(item) not in self._by_id}

    def make_optimizer(
        self, make: Callable[..., torch.optim.Optimizer], groups: Iterable[object] | None, settings: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        """Returns a new optimizer over this rank's shards; see `HybridParallelStrategy.optimizer`."""
        parameters: list[object] = (
            [weight.parameter for weight in self._local_parameters] if groups is None else list(groups)
        )
        local_parameters = [self._replace_by_local(item) for item in parameters]
        # torch refuses an optimizer without parameters, as a pipeline stage that is frozen as a whole would have
        optimizer = make(local_parameters or [nn.Parameter(torch.empty(0))], **settings)
        self._bind(optimizer)
        return optimizer

    def rebuild(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> torch.optim.Optimizer:
        """Replaces an optimizer's parameters by this rank's shards; groups, rates and state stay.

        Args:
            optimizer: changed in place, so that a scheduler continues with it.
            names: name of each parameter that the model had, by id.
        """
        weights = {weight.name: weight for weight in self._by_id.values()}
        for group in optimizer.param_groups:
            local_parameters = []
            for old_parameter in group["params"]:
                if id(old_parameter) not in names:
                    raise ConfigError(
                        "the optimizer has a parameter that isn't the model's: give it an optimizer of its own"
                    )
                state = optimizer.state.pop(old_parameter, None)
                weight = weights.get(names[id(old_parameter)])
                # another stage's
                if weight is None:
                    continue
                local_parameters.append(self._local_parameters.get(weight, weight.parameter))
                if state is not None:
                    # moments follow their weight, cut as it was
                    optimizer.state[local_parameters[-1]] = _cut_state(state, weight)
            group["params"] = local_parameters
        self._bind(optimizer)
        return optimizer

    def _bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Registers an optimizer, and redirects its zero_grad to the weights' gradients."""
        members = {id(item) for group in optimizer.param_groups for item in group["params"]}
        weights = [
            weight for weight, local_parameter in self._local_parameters.items() if id(local_parameter) in members
        ]
        self._bound[id(optimizer)] = (weakref.ref(optimizer), weights)
        zero_grad = types.MethodType(_make_zero_grad(self, weights), optimizer)
        # torch's own would clear the shards' gradients and leave the weights'
        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        if self.split:
            optimizer.register_state_dict_pre_hook(_refuse_state_dict)

    def publish(self) -> None:
        """Sets the reduced gradients on the shards."""
        for weights in self._bound_weights():
            for weight in weights:
                gradient = weight.gradient
                # user code sees wrapped gradients on the shards too, before the step unwraps them
                if gradient is not None:
                    gradient = plain_gradient(gradient)
                    assert self._sync is not None
                    gradient = wrap_gradient(gradient, weight, self._sync) if self.split else gradient
                    self._published[weight] = gradient
                self._local_parameters[weight].grad = gradient

    def _bound_weights(self) -> list[list[Weight]]:
        """Returns the weights of each optimizer that still exists."""
        alive = {key: entry for key, entry in self._bound.items() if entry[0]() is not None}
        self._bound = alive
        return [weights for _, weights in alive.values()]

    def _bound_weights_of(self, optimizer: torch.optim.Optimizer) -> list[Weight] | None:
        """Returns the weights whose shards a bound optimizer steps on; None for another optimizer."""
        entry = self._bound.get(id(optimizer))
        return entry[1] if entry is not None and entry[0]() is optimizer else None

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Checks an optimizer before its step, and gives it plain gradients."""
        weights = self._bound_weights_of(optimizer)
        is_bound = weights is not None
        for item in (item for group in optimizer.param_groups for item in group["params"]):
            stale = self._stale.get(id(item))
            # an id may be reused after the parameter was freed: compare the object itself
            if stale is not None and stale() is item:
                raise ConfigError(STALE)
            is_bound = is_bound or id(item) in self._by_id
        if self.starts.is_creating:
            return
        self._note_outside(optimizer)
        if not is_bound:
            return
        self._refuse_unsupported(optimizer, any(item is not None for item in (*args[1:], *kwargs.values())))
        if self._sync is not None:
            self._sync.check_step()
            self._sync.hide_gradients()
        for weight in weights or ():
            local_parameter = self._local_parameters[weight]
            # a gradient that user code has replaced on the shard is left alone
            if (
                local_parameter.grad is None
                or local_parameter.grad is self._published.get(weight)
                or self._sync is None
            ):
                gradient = weight.gradient
                local_parameter.grad = None if gradient is None else plain_gradient(gradient)
        self._call_before_step()
        self.starts.before_step(optimizer)

    def _note_outside(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes trained parameters of an optimizer that belong to no sharded model: nobody sums their gradients."""
        for item in (item for group in optimizer.param_groups for item in group["params"]):
            is_trained = item.grad is not None and type(item) is nn.Parameter
            noted = self._outside.get(id(item))
            is_new = noted is None or noted() is not item
            if is_trained and is_new and not any(binding.has(item) for binding in _bindings_in_order()):
                self._outside[id(item)] = weakref.ref(item)

    def has(self, parameter: nn.Parameter) -> bool:
        """Returns whether a parameter, of any shape, is one of the program's, or this rank's shard of one."""
        return id(parameter) in self._by_id or id(parameter) in self._local_ids

    def outside_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters, of any shape, of no sharded model that optimizers stepped on, in their order."""
        alive = [item for reference in self._outside.values() if (item := reference()) is not None]
        return [item for item in alive if not item.is_complex()]

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Clears the shards' gradients and wraps the weights' again after a step."""
        if self.starts.is_creating:
            return
        weights = self._bound_weights_of(optimizer)
        members = (item for group in optimizer.param_groups for item in group["params"])
        if weights is None and not any(id(item) in self._by_id for item in members):
            return
        self.starts.after_step(optimizer)
        for weight in weights or ():
            self._local_parameters[weight].grad = None
            self._published.pop(weight, None)
        if self._sync is not None:
            self._sync.show_gradients()
        self._call_after_step()

    def _refuse_unsupported(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Refuses optimizers that are wrong on shards, or decide by values that only this rank has."""
        optimizer_class = type(optimizer)
        if not self._shared:
            return
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                f"{optimizer_class.__name__} decides by the loss and by products over all weights, of which each rank "
                "has its own, so ranks would part: use an optimizer that works element by element, such as AdamW"
            )
        if self.split and closure:
            raise ConfigError("step() takes no closure where weights are split: call forward and backward, then step()")
        if self.split and isinstance(optimizer, TorchZeroOptimizer):
            raise ConfigError(
                "the parameters are parts already, and ZeroRedundancyOptimizer would send one rank's to others: use "
                "strategy.optimizer, and shard=N,zero=1 in the layout"
            )
        if self.split or self._dealt_out:
            self._refuse_by_trial(optimizer)

    def _refuse_by_trial(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses an optimizer that reads more of the weights than this rank has; tried once for each."""
        if self._tried_groups.get(optimizer) == len(optimizer.param_groups):
            return
        name, key = type(optimizer).__name__, trial_key(optimizer)
        trial = self._trials.get(key) or self._trials.setdefault(key, try_optimizer(optimizer))
        cure = "use AdamW or its like, or copies alone (replicate=N in the layout)"
        if trial.failure:
            raise ConfigError(
                f"{name} couldn't be tried on small weights of other shapes ({trial.failure}), and where ranks hold "
                f"parts of the weights an optimizer must be known to work element by element: {cure}"
            )
        if not trial.by_weight:
            raise ConfigError(
                f"{name} moves a weight by what others are, as by a norm over all of them, and each rank has parts of "
                f"them alone: {cure}; a norm is clipped by strategy.clip_grad_norm_, or by clip= of a step()"
            )
        if self.split and not trial.by_element:
            raise ConfigError(
                f"{name} doesn't work element by element, so on parts of weights it isn't what it is on whole ones: "
                f"{cure}"
            )
        self._tried_groups[optimizer] = len(optimizer.param_groups)

    def _replace_by_local(self, item: object) -> object:
        """Returns a parameter, or a group of them, with this rank's shards in their places."""
        if isinstance(item, dict):
            members = item["params"]
            members = [members] if isinstance(members, torch.Tensor) else list(members)
            return {**item, "params": [self._replace_by_local(member) for member in members]}
        # (name, parameter), an item of named_parameters()
        if isinstance(item, tuple):
            return (item[0], self._replace_by_local(item[1]))
        weight = self._by_id.get(id(item))
        if weight is None:
            raise ConfigError(
                "a parameter isn't one of the sharded model: list parameters after shard(), which replaces them"
            )
        return self._local_parameters.get(weight, weight.parameter)


_NUMBERS = itertools.count()
_bindings: weakref.WeakValueDictionary[int, OptimizerBinding] = weakref.WeakValueDictionary()
"""Those in use, by the order in which they were made; torch's hooks of every optimizer see also one that nobody
announced."""


def _observe_optimizers(binding: OptimizerBinding) -> None:
    """Calls a binding at every optimizer's step for as long as somebody references it.

    torch's hooks are installed once and stay: one that is removed as its binding is collected may be removed while
    torch iterates over its hooks, which is an error in a step that has nothing to do with it.
    """
    _install_hooks()
    _bindings[next(_NUMBERS)] = binding


@functools.cache
def _install_hooks() -> None:
    """Registers torch's hooks for the steps of every optimizer, once in a process."""
    register_optimizer_step_pre_hook(_before_every_step)
    register_optimizer_step_post_hook(_after_every_step)


def _bindings_in_order() -> list[OptimizerBinding]:
    """Returns the bindings in use as they were made: ranks compare copies in each, so all must come in one order."""
    return [binding for _, binding in sorted(_bindings.items(), key=lambda item: item[0])]


def _before_every_step(optimizer: torch.optim.Optimizer, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Calls every binding before an optimizer's step."""
    for binding in _bindings_in_order():
        binding._before_step(optimizer, args, kwargs)


def _after_every_step(optimizer: torch.optim.Optimizer, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Calls every binding after an optimizer's step."""
    for binding in _bindings_in_order():
        binding._after_optimizer_step(optimizer, args, kwargs)


def _make_zero_grad(binding: OptimizerBinding, weights: list[Weight]) -> Callable[..., None]:
    """Returns a zero_grad that clears the weights' gradients, where autograd accumulates, and the shards'."""

    def zero_grad(_: object, set_to_none: bool = True) -> None:
        for weight in weights:
            gradient = weight.gradient
            if not set_to_none and gradient is not None:
                plain_gradient(gradient).zero_()
            else:
                weight.parameter.grad = None
                binding._local_parameters[weight].grad = None

    return zero_grad


def _refuse_state_dict(_: torch.optim.Optimizer) -> None:
    """Refuses a state dict of shards, whose shapes don't say where they belong."""
    raise ConfigError(
        "the optimizer's state is of this rank's parts, which state_dict() can't say: save "
        "strategy.state_dict(optimizer) by torch.distributed.checkpoint, which any layout loads"
    )


def _cut_state(state: dict[str, Any], weight: Weight) -> dict[str, object]:
    """Returns the optimizer state of a full weight, cut to this rank's shard."""
    local_state: dict[str, Any] = {}
    for key, value in state.items():
        # a scalar weight has the shape of the step counter, which isn't cut
        is_weight_shaped = isinstance(value, torch.Tensor) and tuple(value.shape) == weight.shape and key != "step"
        local_state[key] = weight.extract_shard(value).to(weight.local.device) if is_weight_shaped else value
    return local_state


def local_shards(weights: Iterable[Weight]) -> list[nn.Parameter]:
    """Returns this rank's shard of each weight, (n_local, ...), as a plain parameter that shares its memory."""
    return [nn.Parameter(weight.local, requires_grad=False) for weight in weights]
