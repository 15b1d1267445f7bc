"""Cuts a stage out of a model without touching its code: its own forward runs, the layers of other stages are stubs.

Before the stage's first layer the forward runs on zeros that take no memory, and what it makes of them is thrown away:
the first layer gets what the stage before sent. After the stage's last layer the forward is left by an exception that
carries what the next stage gets. So masks, position tables and whatever else a model prepares for its layers are there
in each stage, since each reads the same tokens.

The first and the last stage may have no layer. The first one is left at the stub of the model's first layer; in the
last one the stub of the model's last layer returns what the stage before sent.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.parallel.forward_stack import ForwardLayer, wrap_forward
from meshwright.parallel.model_checkpointing import restoring_first_run
from meshwright.spec.layer_graph import LayerGraph, Path
from meshwright.torch_compat.tensors import is_view, tree_flatten_with_path, tree_leaves, tree_unflatten


class _Boundary(BaseException):
    """Leaves the forward at the layer after the stage's last; no model code catches it."""

    def __init__(self, payload: tuple[torch.Tensor, ...]) -> None:
        super().__init__("left at the end of a stage")
        self.payload = payload


T = TypeVar("T")
Nested: TypeAlias = Any
"""Arguments of a call, nested in tuples, lists and dicts: what a `Path` leads through."""

_CONTAINERS = (OrderedDict, dict, set)
"""Types of a module's containers of hooks, buffers and submodules, of which most are empty."""
_ELSEWHERE = "_meshwright_elsewhere"
"""Attribute that marks the layers of other stages."""


class Stage:
    """Some consecutive layers of a model, and whatever of the rest runs before or after them.

    Args:
        module: on meta or real; it is changed for good. Use `copy_module` where it is needed again.
        layer_graph: of the model.
        bounds: first layer of each stage of the pipeline, and the number of layers.
        number: of the stage.
        kept_names: names of the weights that it holds, `layer_graph.weights_by_stage`.
    """

    OF_FORWARD = ("_received", "_runs")
    """What belongs to a forward that runs."""

    def __init__(
        self,
        module: nn.Module,
        layer_graph: LayerGraph,
        bounds: Sequence[int],
        number: int,
        kept_names: Collection[str],
    ) -> None:
        self.module, self.layer_graph = module, layer_graph
        self.first, self.stop = bounds[number : number + 2]
        self.is_first, self.is_last = number == 0, number == len(bounds) - 2
        """Whether the embedding is in it, and whether the head is."""
        own_names = layer_graph.layers[self.first : self.stop]
        self.layers: list[nn.Module] = [module.get_submodule(name) for name in own_names]
        for layer in map(module.get_submodule, layer_graph.layers):
            if not any(layer is own_layer for own_layer in self.layers):
                layer.__dict__[_ELSEWHERE] = True
        self._received: tuple[torch.Tensor, ...] = ()
        self._runs = False
        self._place = f"stage {number} of {len(bounds) - 1}"
        self._dropped: list[tuple[nn.Module, str, torch.Size, torch.dtype]] = []
        self._drop_other_stages(kept_names)
        # Layers before the stage pass their arguments on; the one behind it ends the forward, so later ones never run.
        count = len(layer_graph.layers)
        for layer_number, name in enumerate(layer_graph.layers):
            if layer_number < self.first:
                feeds_head = self.first == count and layer_number == count - 1
                skip = functools.partial(_skip_layer, layer_graph, layer_number)
                self._install_stub(name, self._return_received if feeds_head else skip)
            elif layer_number == self.stop:
                self._install_stub(name, functools.partial(_leave_stage, layer_graph.boundary_tensors[self.stop]))
        if not self.is_last:
            wrap_forward(module, ForwardLayer.STAGE, "ends at the stage's boundary", _catch_boundary)

    def arm(self, dtype: torch.dtype, device: torch.device) -> None:
        """Makes the stage ready to run, once its weights are real and the data axes have wrapped it.

        Args:
            dtype: of compute; what stands for the weights of other stages gets it.
            device: of compute, for the same tensors.
        """
        zero_by_dtype: dict[torch.dtype, torch.Tensor] = {}
        for owner, key, shape, fill_dtype in self._dropped:
            fill_dtype = dtype if fill_dtype.is_floating_point else fill_dtype
            if fill_dtype not in zero_by_dtype:
                zero_by_dtype[fill_dtype] = torch.zeros((), dtype=fill_dtype, device=device)
            # Code that reads a dropped weight (its shape, its type) gets zeros that share one element.
            owner.__dict__[key] = zero_by_dtype[fill_dtype].expand(shape)
        if not self.is_first and self.layers:
            # Before the hooks of the data axes, which look for the tensors that gradients will flow back through.
            self.layers[0].register_forward_pre_hook(self._receive, with_kwargs=True, prepend=True)
        self.module.register_forward_pre_hook(self._refuse_alone, prepend=True)
        if not self.is_last:
            self.module.register_forward_hook(_leave_with_output)
            if self.stop == len(self.layer_graph.layers):
                # After the hooks of the data axes, which look for the tensors that gradients will come back through.
                self.layers[-1].register_forward_hook(functools.partial(_leave_behind, self.layer_graph))

    def run(self, call: Callable[[], T], received: tuple[torch.Tensor, ...]) -> T | tuple[torch.Tensor, ...]:
        """Runs ``call``, which calls the module, with the boundary tensors, of any shape, that the stage before sent.

        Returns:
            What ``call`` returns in the last stage; in another the tensors for the next stage.
        """
        self._received, self._runs = received, True
        try:
            # A checkpoint inside is computed again in backward, when `_received` may be another micro-batch's.
            with restoring_first_run(self._snapshot, fed=not self.is_first):
                return call()
        except _Boundary as boundary:
            return boundary.payload
        finally:
            self._received, self._runs = (), False

    def _refuse_alone(self, _module: nn.Module, _args: object) -> None:
        """Refuses a call of the model by a loop: its other layers are on other ranks."""
        if not self._runs:
            raise ConfigError(
                f"this rank holds {self._place} of the model, which can't be called alone: under pp the stages run "
                "together, by strategy.step(batch) or PipelineEngine.step; a loop that calls the model itself takes a "
                "layout without pp"
            )

    def _snapshot(self) -> Callable[[], AbstractContextManager[None]]:
        """Returns what gives the stage its present input again, for a checkpoint of the model's own."""
        received = self._received

        @contextlib.contextmanager
        def restore_input() -> Iterator[None]:
            current, self._received = self._received, received
            try:
                yield
            finally:
                self._received = current

        return restore_input

    def _receive(self, _layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Nested:
        call: Nested = (args, kwargs)
        for path, tensor in zip(self.layer_graph.boundary_tensors[self.first], self._received, strict=True):
            # The runtime keeps a received tensor for backward: layers that write into their input get a copy.
            call = _replace_at_path(call, path, tensor.clone() if self.layer_graph.writes else tensor)
        return call

    def _return_received(self, *_args: object, **_kwargs: object) -> object:
        """Stands for the last layer in front of a stage with the head alone."""
        returned = self.layer_graph.returns[-1]
        leaves: list[object] = [self._received[0] if is_tensor else None for is_tensor in returned.tensors]
        for (leaf_number,), tensor in zip(self.layer_graph.boundary_tensors[-1], self._received, strict=True):
            leaves[leaf_number] = tensor.clone() if self.layer_graph.writes else tensor
        return tree_unflatten(leaves, returned.nest)

    def _install_stub(self, name: str, forward: Callable[..., object]) -> None:
        layer = self.module.get_submodule(name)
        wrap_forward(layer, ForwardLayer.STAGE, "a stub: another stage computes it", lambda _plain: forward)

    def _drop_other_stages(self, kept_names: Collection[str]) -> None:
        """Takes away the weights that other stages hold, and the buffers of their layers."""
        # By (module, attribute): a shared module has several names, and keeps its weight where one of them is kept.
        owners: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        kept_keys: set[tuple[int, str]] = set()
        own_modules = {id(submodule) for layer in self.layers for submodule in layer.modules()}
        other_modules: dict[int, nn.Module] = {}
        for name in (*self.layer_graph.layers[: self.first], *self.layer_graph.layers[self.stop :]):
            other_modules |= {
                id(submodule): submodule
                for submodule in self.module.get_submodule(name).modules()
                if id(submodule) not in own_modules
            }
        for path, submodule in self.module.named_modules(remove_duplicate=False):
            for key, parameter in submodule._parameters.items():
                if parameter is not None:
                    owners[id(submodule), key] = submodule, key
                    if (f"{path}.{key}" if path else key) in kept_names:
                        kept_keys.add((id(submodule), key))
        for owner_key, (submodule, key) in owners.items():
            if owner_key not in kept_keys:
                self._dropped.append((submodule, key, *_shape_and_dtype(submodule._parameters.pop(key))))
        for submodule in other_modules.values():
            # Some models keep tables as plain attributes, without registering a buffer.
            plain_tensors = {key: tensor for key, tensor in vars(submodule).items() if isinstance(tensor, torch.Tensor)}
            for key, tensor in [*submodule._buffers.items(), *plain_tensors.items()]:
                if tensor is not None:
                    self._dropped.append((submodule, key, *_shape_and_dtype(tensor)))
                    submodule._buffers.pop(key, None)
                    submodule.__dict__.pop(key, None)


def local_layer(module: nn.Module, name: str) -> nn.Module | None:
    """Returns a layer by its name in the model; None where another stage has it, or all of it."""
    submodule: nn.Module = module
    for key in name.split("."):
        submodule = getattr(submodule, "_modules", {}).get(key)
    # One of another stage has weights here where it shares them with a layer of this one.
    if submodule is None or submodule.__dict__.get(_ELSEWHERE):
        return None
    return submodule if any(True for _ in submodule.parameters()) else None


def copy_module(module: nn.Module, share: bool = False) -> nn.Module:
    """Returns a copy of a module; with ``share`` its weights are the same tensors."""
    memo: dict[int, object] = {id(parameter): parameter for parameter in module.parameters()} if share else {}
    # Eleven empty containers of hooks a module take most of a deep copy's time.
    for child in module.modules():
        for value in vars(child).values():
            if type(value) in _CONTAINERS and not value:
                memo[id(value)] = type(value)()
    duplicate: nn.Module = copy.deepcopy(module, memo)
    return duplicate


def get_tensor(call: Nested, path: Path) -> Any:
    """Returns the tensor of a call's ``(args, kwargs)`` that a path leads to."""
    return functools.reduce(operator.getitem, path, call)


def _shape_and_dtype(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _replace_at_path(call: Nested, path: Path, tensor: torch.Tensor) -> Nested:
    """Returns the call with another tensor at a path; containers on the way are new."""
    if not path:
        return tensor
    if isinstance(call, dict):
        return {**call, path[0]: _replace_at_path(call[path[0]], path[1:], tensor)}
    items = list(call)
    items[path[0]] = _replace_at_path(items[path[0]], path[1:], tensor)
    return items if isinstance(call, list) else tuple(items)


def _skip_layer(layer_graph: LayerGraph, number: int, *args: object, **kwargs: object) -> object:
    """Stands for a layer of a stage before: gives its own arguments back, nested as the layer would."""
    returned = layer_graph.returns[number]
    leaves: list[object] = []
    stand_in = _first_tensor(args, kwargs)
    for path, is_tensor in zip(returned.leaves, returned.tensors):
        leaves.append(_tensor_or_stand_in(stand_in, (args, kwargs), path) if is_tensor else None)
    return tree_unflatten(leaves, returned.nest)


def _tensor_or_stand_in(stand_in: torch.Tensor, call: Nested, path: Path | None) -> torch.Tensor:
    if path is None:
        return stand_in
    try:
        tensor = get_tensor(call, path)
    except (LookupError, TypeError):
        return stand_in
    return tensor if isinstance(tensor, torch.Tensor) else stand_in


def _first_tensor(args: Sequence[object], kwargs: Mapping[str, object]) -> torch.Tensor:
    # Also one in a dict or a tuple, as a layer may take its state.
    return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))


def _leave_stage(paths: tuple[Path, ...], *args: object, **kwargs: object) -> object:
    """Stands for the first layer of the next stage."""
    raise _Boundary(tuple(_sendable(get_tensor((args, kwargs), path)) for path in paths))


def _leave_behind(layer_graph: LayerGraph, _layer: nn.Module, _args: object, output: object) -> None:
    """Leaves the forward behind the last layer, whose results go to a stage with the head alone."""
    leaves = [leaf for _, leaf in tree_flatten_with_path(output)[0]]
    raise _Boundary(tuple(_sendable(get_tensor(leaves, path)) for path in layer_graph.boundary_tensors[-1]))


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor that is no view, since a backward in two halves detaches it in place."""
    if is_view(tensor) or not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _catch_boundary(plain: Callable[..., object]) -> Callable[..., object]:
    """Ends the exception inside the module's forward, so that hooks which follow a forward run."""

    @functools.wraps(plain)
    def forward(*args: object, **kwargs: object) -> object:
        try:
            return plain(*args, **kwargs)
        except _Boundary as boundary:
            return boundary.payload

    return forward


def _leave_with_output(_module: nn.Module, _args: object, output: tuple[torch.Tensor, ...]) -> None:
    """Leaves the module's caller by an exception, after all other hooks: it waits for the model's own output."""
    raise _Boundary(output)
