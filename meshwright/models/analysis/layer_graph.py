"""Finds the layer graph of any model by running a small clone of it.

The clone has as many layers as the model, each narrow. Every tensor that enters or leaves a layer is replaced by a
marker: a copy with a fresh autograd leaf. Autograd's graph then shows the sources of each tensor: the layer before, an
earlier layer, or weights outside of the layers. Sources that autograd can't see (integers, values behind a detach) are
found by the rehearsal, `models.analysis.stage_rehearsal`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.autograd_helper import computed_by_helper
from meshwright.errors import MeshwrightError, PlanError
from meshwright.models.analysis.clone import Clone, make_clone_for_stages
from meshwright.models.analysis.evidence import LayerGraphEvidence, StageTrial, TensorUse
from meshwright.models.analysis.layer_states import LayerStates
from meshwright.models.analysis.objective import Objective
from meshwright.models.analysis.stage_rehearsal import Tokens, rehearse_stages
from meshwright.models.build import BuiltModel
from meshwright.parallel.model_checkpointing import without_checkpoints
from meshwright.parallel.stage import copy_module
from meshwright.spec.layer_graph import LayerGraph, LayerOutput, Path
from meshwright.torch_compat.tensors import MappingKey, SequenceKey, tree_flatten_with_path, tree_unflatten

_ROWS = 2
STAGE_TOKENS = 10
"""Tokens of the rows on which stages are tried."""


@dataclass(frozen=True, slots=True)
class LayerGraphAnalysis:
    """A model's layer graph, and the evidence by which it was decided."""

    layer_graph: LayerGraph
    evidence: LayerGraphEvidence


def read_layer_graph(built: BuiltModel, objective: Objective | None = None) -> LayerGraph:
    """Reads the layer graph of a model; arguments and errors are those of `analyse_layer_graph`."""
    return analyse_layer_graph(built, objective).layer_graph


@computed_by_helper
def analyse_layer_graph(built: BuiltModel, objective: Objective | None = None) -> LayerGraphAnalysis:
    """Reads the layer graph of a model, proven on a small clone, and keeps what it was decided by.

    Args:
        built: on meta.
        objective: the model's own loss, whose inputs must be present in each stage.

    Raises:
        PlanError: when the model can't be cut anywhere, with the reason.
    """
    clone = make_clone_for_stages(built, objective)
    arguments = _sample_tokens(clone)
    try:
        # Copies: forward may leave tensors of its graph in the module, which then can't be copied any more.
        with torch.no_grad():
            output_a, output_b = (clone.output_of(copy_module(clone.module, share=True), *arguments) for _ in range(2))
        # forward draws random numbers: compare in evaluation mode, where it draws none
        if not torch.equal(output_a, output_b):
            clone.module.eval()
        probe = _Probe(copy_module(clone.module, share=True), clone)
        layer_graph = probe.run(arguments)
        trial = _rehearse_with_states(probe.states, clone, layer_graph, arguments)
    except PlanError as error:
        raise PlanError(f"pp: the model '{built.config.name}' can't be cut into stages: {error}") from error
    except MeshwrightError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise PlanError(
            f"pp: the model '{built.config.name}' can't be cut into stages: a trial gave {reason}"
        ) from error
    return LayerGraphAnalysis(
        dataclasses.replace(
            layer_graph,
            whole_backward=trial.whole_backward,
            blocked=dict(sorted({**layer_graph.blocked, **trial.refused_ends}.items())),
        ),
        LayerGraphEvidence(inputs=tuple(probe.tensor_uses()), trial=trial),
    )


def _rehearse_with_states(states: LayerStates, clone: Clone, layer_graph: LayerGraph, arguments: Tokens) -> StageTrial:
    """Rehearses stages; where they fail and layers hand on what isn't a tensor, that is the reason.

    Args:
        states: what the layers hand on beside tensors.
        clone: tied weights apart.
        layer_graph: to be proven.
        arguments: tokens and targets, (B, S) int64 each.

    Raises:
        PlanError: it can't be cut.
    """
    try:
        return rehearse_stages(clone, layer_graph, arguments)
    except Exception as error:
        reason = states.reason(with_values=not isinstance(error, PlanError))
        if not reason:
            raise
        raise PlanError(reason) from error


def _sample_tokens(clone: Clone) -> Tokens:
    """Returns random inputs and targets: two (2, 10) int64 tensors."""
    tokens = torch.randint(clone.vocab, (_ROWS, STAGE_TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


Mark = tuple[str, int]
"""A source of a tensor: ("layer", call index), or ("weight", index in the list of names)."""


@dataclass
class _LayerInputs:
    """Inputs of one call of a layer: the sources of each tensor among its arguments."""

    marks: dict[Path, set[Mark]] = field(default_factory=dict)
    """By path into ``(args, kwargs)``. ("side", source) is what reached the output past all arguments, such as a
    closure's tensor; ("tail",) is the model's output, which counts as the input of a last layer."""
    shapes: dict[Path, tuple[int, ...]] = field(default_factory=dict)
    """Of the tensors by path."""


class _Probe:
    """One forward of the clone with a marker on everything that enters or leaves a layer."""

    def __init__(self, module: nn.Module, clone: Clone) -> None:
        self._module, self._clone = module, clone
        self._called_layers: list[str] = []
        self._inputs_by_call: list[_LayerInputs] = []
        self._outputs_by_call: list[Any] = []
        self._weight_names: list[str] = []
        self._writes = False
        self._marks_of_leaf: dict[int, set[Mark]] = {}
        self._marks_of_constant: dict[int, set[Mark]] = {}
        """Marks of layers' outputs without a gradient, by id."""
        self._alive: list[Any] = []
        self._input_markers: list[list[torch.Tensor]] = []
        self._leaves_of_result: dict[int, int] = {}
        """By id of a leaf, which of the last called layer's results it stands for."""
        self._output = _LayerInputs()
        self._tail: tuple[Path, ...] = ()
        self.states = LayerStates()
        """What the layers hand on beside tensors."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._marks_of_leaf.setdefault(id(parameter), set()).add(("weight", len(self._weight_names)))
            self._weight_names.append(name)

    def run(self, arguments: Tokens) -> LayerGraph:
        """Runs the clone and returns its layer graph."""
        buffers_before = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        with contextlib.ExitStack() as stack:
            # a checkpoint would hide the graph of its inside
            stack.enter_context(without_checkpoints())
            for name in self._clone.structure.layers:
                layer = self._module.get_submodule(name)
                for hook in (
                    layer.register_forward_pre_hook(self._mark_inputs(name), with_kwargs=True),
                    layer.register_forward_hook(self._mark_outputs(), with_kwargs=False),
                ):
                    stack.callback(hook.remove)
            output = self._clone.output_of(self._module, *arguments)
        for name, buffer in self._module.named_buffers():
            # stages can't share a buffer that forward writes
            if name not in buffers_before or not torch.equal(buffer, buffers_before[name]):
                raise PlanError(f"its forward changes the buffer '{name}', of which each stage would have its own")
        self._check_calls()
        self._output = _LayerInputs({("tail",): self._marks(output)}, {("tail",): tuple(output.shape)})
        numbers = {self._leaves_of_result.get(id(leaf), -1) for leaf in _graph_leaves(output)}
        self._tail = tuple((number,) for number in sorted(numbers) if number >= 0)
        return self._assemble()

    def tensor_uses(self) -> Iterator[tuple[TensorUse, ...]]:
        """Yields for each layer, and at last for the model's output, the tensors that it reads with their sources."""
        for entry in (*self._inputs_by_call, self._output):
            yield tuple(
                TensorUse(
                    path=path,
                    shape=entry.shapes.get(path, ()),
                    layers=tuple(sorted(index for kind, index in marks if kind == "layer")),
                    weights=tuple(self._weight_names[index] for kind, index in sorted(marks) if kind == "weight"),
                )
                for path, marks in entry.marks.items()
            )

    def _check_calls(self) -> None:
        """Refuses a model that calls a layer twice, or fewer than two layers."""
        repeated_layers = [(name, count) for name, count in Counter(self._called_layers).items() if count > 1]
        if repeated_layers:
            name, count = repeated_layers[0]
            raise PlanError(
                f"its forward calls the layer '{name}' more than once ({count} times), so several stages would need "
                "its weights; nearest that works: tp, cp or shard in place of pp"
            )
        if len(self._called_layers) < 2:
            raise PlanError(f"its forward calls {len(self._called_layers)} repeated layers, and a stage needs one")

    def _mark_inputs(self, name: str) -> Callable[..., object]:
        """Returns a pre-hook that notes the sources of a layer's arguments and puts markers in their place."""

        def hook(_layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            layer_index = len(self._called_layers)
            self._called_layers.append(name)
            entry, markers = _LayerInputs(), []
            pairs, nest = tree_flatten_with_path((args, kwargs))
            leaves = []
            for keys, leaf in pairs:
                if isinstance(leaf, torch.Tensor):
                    marks = self._marks(leaf)
                    if marks:
                        entry.marks[_tensor_path(keys)] = marks
                        entry.shapes[_tensor_path(keys)] = tuple(leaf.shape)
                    # a fresh leaf: what is computed from here on has this layer as its source, and nothing before it
                    if leaf.requires_grad:
                        leaf = self._replace_by_marker(leaf, {("layer", layer_index)})
                        markers.append(leaf)
                else:
                    self.states.note_argument(name, leaf)
                leaves.append(leaf)
            self._inputs_by_call.append(entry)
            self._input_markers.append(markers)
            return tree_unflatten(leaves, nest)

        return hook

    def _mark_outputs(self) -> Callable[..., object]:
        """Returns a hook that notes foreign sources of a layer's outputs and puts markers in their place."""

        def hook(_layer: nn.Module, _args: object, output: object) -> object:
            layer_index = len(self._outputs_by_call)
            # the version of a marker counts in-place writes by the layer into its inputs
            self._writes |= any(item._version for item in self._input_markers[layer_index])
            pairs, nest = tree_flatten_with_path(output)
            leaves = []
            self._leaves_of_result = {}
            prefix = f"{self._called_layers[layer_index]}."
            for number, (_, leaf) in enumerate(pairs):
                # A tensor without a gradient has no graph to search: its object is remembered instead.
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    # a source other than the layer's own arguments and weights reached its output past them
                    for mark in self._marks(leaf) - {("layer", layer_index)}:
                        if mark[0] == "layer" or not self._is_weight_below(mark[1], prefix):
                            self._inputs_by_call[layer_index].marks.setdefault(("side", *mark), set()).add(mark)
                    leaf = self._replace_by_marker(leaf, {("layer", layer_index)})
                    self._leaves_of_result[id(self._alive[-2])] = number
                elif isinstance(leaf, torch.Tensor):
                    self._marks_of_constant[id(leaf)] = {("layer", layer_index)}
                    # ids are unique only among living objects
                    self._alive.append(leaf)
                else:
                    self.states.note_result(self._called_layers[layer_index], leaf)
                leaves.append(leaf)
            self._outputs_by_call.append((nest, leaves))
            return tree_unflatten(leaves, nest)

        return hook

    def _is_weight_below(self, weight_index: int, prefix: str) -> bool:
        """Returns whether a weight has a name below a layer; a tied weight has several names."""
        same_weight = self._marks_of_leaf[id(self._module.get_parameter(self._weight_names[weight_index]))]
        return any(self._weight_names[alias_index].startswith(prefix) for _, alias_index in same_weight)

    def _replace_by_marker(self, tensor: torch.Tensor, marks: set[Mark]) -> torch.Tensor:
        """Returns a copy of a tensor, of any shape, whose graph begins at a leaf with these marks."""
        leaf = tensor.detach().requires_grad_()
        self._marks_of_leaf[id(leaf)] = marks
        marker = leaf.clone()
        self._alive += [leaf, marker]
        return marker

    def _marks(self, tensor: torch.Tensor) -> set[Mark]:
        """Returns the sources of a tensor of any shape: layers and weights."""
        if not tensor.requires_grad:
            return set(self._marks_of_constant.get(id(tensor), ()))
        marks: set[Mark] = set()
        for leaf in _graph_leaves(tensor):
            marks |= self._marks_of_leaf.get(id(leaf), set())
        return marks

    def _assemble(self) -> LayerGraph:
        """Builds the layer graph from the noted sources of the layers' inputs and of the model's output."""
        layer_count_, input_weights, output_weights, boundary_tensors = len(self._called_layers), [], [], []
        blocked: dict[int, str] = {}
        inside = tuple(f"{name}." for name in self._called_layers)
        for layer_index, entry in enumerate([*self._inputs_by_call, self._output]):
            used_inside: set[str] = set()
            used_between: set[str] = set()
            paths: list[Path] = []
            for path, path_marks in entry.marks.items():
                sources = {index for source_kind, index in path_marks if source_kind == "layer"}
                weights = {self._weight_names[index] for source_kind, index in path_marks if source_kind == "weight"}
                # made from a layer's output: that layer's stage computes it and sends the result; the first layer's
                # arguments come from what is in front of the layers
                from_boundary = (sources or layer_index == 0) and path[0] not in ("side", "tail")
                paths += [path] if from_boundary else []
                (used_between if from_boundary or layer_index == layer_count_ else used_inside).update(weights)
                needed_until = layer_index if from_boundary else layer_index + 1
                # a cut between a source and its reader would separate them, unless the tensor is passed on
                for source in sources - {layer_index}:
                    passed_on = layer_index == layer_count_ and source == layer_count_ - 1
                    for boundary in range(source + 1, min(needed_until, layer_count_ + (not passed_on))):
                        blocked.setdefault(boundary, self._skip_reason(source, layer_index))
            # a weight of one layer that another layer's path uses: both must be in one stage
            foreign_weights = [name for name in used_inside | used_between if name.startswith(inside)]
            if foreign_weights:
                owner = next(
                    position for position, prefix in enumerate(inside) if foreign_weights[0].startswith(prefix)
                )
                first, last = min(owner, layer_index), max(owner, layer_index)
                # what comes before the first layer's arguments lies in front of the cut there
                for boundary in range(first if layer_index == 0 else first + 1, min(last, layer_count_) + 1):
                    blocked.setdefault(boundary, f"'{foreign_weights[0]}' of one side is used on the other")
            input_weights.append(frozenset(used_inside))
            output_weights.append(frozenset(used_between))
            boundary_tensors.append(self._tail if layer_index == layer_count_ else tuple(paths))
        for layer_index in range(layer_count_ + 1):
            # a boundary without a differentiable tensor has no backward
            if not boundary_tensors[layer_index]:
                blocked.setdefault(layer_index, "nothing is handed on that a gradient flows through")
        return LayerGraph(
            layers=tuple(self._called_layers),
            input_weights=tuple(input_weights[:layer_count_]),
            output_weights=tuple(output_weights),
            boundary_tensors=tuple(boundary_tensors),
            returns=tuple(self._match_outputs(layer_index) for layer_index in range(layer_count_)),
            blocked=dict(sorted(blocked.items())),
            writes=self._writes,
        )

    def _skip_reason(self, source: int, reader_index: int) -> str:
        """Words the refusal of a cut between a layer and a later reader of its output."""
        reader = f"layer {reader_index}" if reader_index < len(self._called_layers) else "the output"
        return f"{reader} reads what layer {source} made, past the layers between"

    def _match_outputs(self, layer_index: int) -> LayerOutput:
        """Matches a layer's results to the next layer's arguments, in order."""
        nest, leaves = self._outputs_by_call[layer_index]
        next_marks = self._inputs_by_call[layer_index + 1].marks if layer_index + 1 < len(self._inputs_by_call) else {}
        unmatched_paths = [
            path for path, marks in next_marks.items() if path[0] != "side" and ("layer", layer_index) in marks
        ]
        paths: list[Path | None] = []
        for leaf in leaves:
            paths.append(unmatched_paths.pop(0) if unmatched_paths and isinstance(leaf, torch.Tensor) else None)
        tensors = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
        return LayerOutput(nest=nest, leaves=tuple(paths), tensors=tensors)


def _graph_leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the leaves of the autograd graph behind a tensor of any shape."""
    if tensor.grad_fn is None:
        yield tensor
        return
    visited, open_nodes = {tensor.grad_fn}, [tensor.grad_fn]
    while open_nodes:
        node: Any = open_nodes.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in visited:
                visited.add(next_node)
                open_nodes.append(next_node)


def _tensor_path(keys: Any) -> Path:
    """Turns pytree keys into a path of indices and names."""
    path: list[Any] = []
    for key in keys:
        if not isinstance(key, (SequenceKey, MappingKey)):
            raise PlanError(f"a layer takes tensors inside of an object ({key}), out of which a stage can't take them")
        path.append(key.idx if isinstance(key, SequenceKey) else key.key)
    return tuple(path)
