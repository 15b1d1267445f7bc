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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.autograd_helper import computed_by_helper
from meshwright.errors import MeshwrightError, PlanError
from meshwright.models.analysis.clone import shrink
from meshwright.models.analysis.objective import Objective
from meshwright.models.analysis.stage_rehearsal import Tokens, output_of, rehearse
from meshwright.models.build import BuiltModel, build_meta, use_float64
from meshwright.models.config import ModelConfig
from meshwright.models.sizes import layer_count
from meshwright.models.structure import ModelStructure
from meshwright.parallel.model_checkpointing import without_checkpoints
from meshwright.parallel.stage import copy_module
from meshwright.spec.layer_graph import LayerGraph, LayerOutput, Path
from meshwright.torch_compat.tensors import MappingKey, SequenceKey, tree_flatten_with_path, tree_unflatten

_VOCAB, _ROWS, _TOKENS = 64, 2, 10
_SMALL = 1 << 23
"""Elements up to which a model is its own clone."""
_LARGE = 1 << 28
"""Elements beyond which a function's model is refused, for it can't be shrunk."""


@computed_by_helper
def read_layer_graph(built: BuiltModel, objective: Objective | None = None) -> LayerGraph:
    """Returns the layer graph of a model, proven on a small clone.

    Args:
        built: on meta.
        objective: the model's own loss, whose inputs must be present in each stage.

    Raises:
        PlanError: when the model can't be cut anywhere, with the reason.
    """
    module, structure = _build_clone(built)
    if objective is not None and not objective.plain:
        # some terms are of training alone
        module.train()
    arguments = _sample_tokens(built)
    try:
        # Copies: forward may leave tensors of its graph in the module, which then can't be copied any more.
        with torch.no_grad():
            output_a, output_b = (
                output_of(copy_module(module, share=True), structure, arguments, objective) for _ in range(2)
            )
        # forward draws random numbers: compare in evaluation mode, where it draws none
        if not torch.equal(output_a, output_b):
            module.eval()
        layer_graph = _Probe(copy_module(module, share=True), structure, objective).run(arguments)
        layer_graph = dataclasses.replace(
            layer_graph, whole_backward=rehearse(module, structure, layer_graph, arguments, objective)
        )
    except PlanError as error:
        raise PlanError(f"pp: the model '{built.config.name}' can't be cut into stages: {error}") from error
    except MeshwrightError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise PlanError(
            f"pp: the model '{built.config.name}' can't be cut into stages: a trial gave {reason}"
        ) from error
    return layer_graph


def _build_clone(built: BuiltModel) -> tuple[nn.Module, ModelStructure]:
    """Builds a small float64 copy on the CPU with tied weights apart: each use of a weight has its own name."""
    elements = sum(parameter.numel() for parameter in built.module.parameters())
    source_model = built if elements <= _SMALL and not built.config.dropout else _shrink_layers(built, elements)
    module = copy_module(source_model.module)
    use_float64(module)
    module = module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = source_model.tensor(name)
        if value.is_floating_point():
            # Fresh weights contain zeros, behind which a path could hide.
            value = value.double() + 0.02 * torch.randn(value.shape, generator=generator, dtype=torch.float64)
            parameter.data, parameter.requires_grad = value, True
        else:
            parameter.data = value
    source_model.fill_buffers(module, "cpu")
    return (module.eval() if built.config.kind == "function" else module.train()), source_model.structure


def _shrink_layers(built: BuiltModel, elements: int) -> BuiltModel:
    """Builds a narrow model with the same layers; a model built by a function keeps its sizes."""
    if built.config.kind == "function":
        if elements > _LARGE:
            raise PlanError(
                f"pp: a pipeline is tried out on a copy, and '{built.config.name}' with {elements} weights "
                "is too large for that; give its function smaller sizes"
            )
        return built
    assert built.hf_config is not None
    layers = layer_count(built.hf_config.get_text_config(decoder=True).to_dict()) or len(built.structure.layers)
    config_fields = shrink(built.config, layers=layers).to_dict() | {"dropout": 0.0}
    # the user's sizes would make the copy as large as the model
    for key in ("vocab", "context"):
        config_fields.pop(key, None)
    small_model = build_meta(ModelConfig.from_dict(config_fields), _VOCAB, 4 * _TOKENS)
    if small_model.structure.layers != built.structure.layers:
        raise PlanError(f"pp: a small copy of '{built.config.name}' hasn't the same layers; use another axis")
    return small_model


def _sample_tokens(built: BuiltModel) -> Tokens:
    """Returns random inputs and targets: two (2, 10) int64 tensors."""
    vocab = min(_VOCAB, built.structure.vocab or _VOCAB)
    tokens = torch.randint(vocab, (_ROWS, _TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


Mark = tuple[str, int]
"""A source of a tensor: ("layer", call index), or ("weight", index in the list of names)."""


@dataclass
class _LayerInputs:
    """Inputs of one call of a layer: the sources of each tensor among its arguments."""

    marks: dict[Path, set[Mark]] = field(default_factory=dict)


class _Probe:
    """One forward of the clone with a marker on everything that enters or leaves a layer."""

    def __init__(self, module: nn.Module, structure: ModelStructure, objective: Objective | None = None) -> None:
        self._module, self._structure, self._objective = module, structure, objective
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
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._marks_of_leaf.setdefault(id(parameter), set()).add(("weight", len(self._weight_names)))
            self._weight_names.append(name)

    def run(self, arguments: Tokens) -> LayerGraph:
        """Runs the clone and returns its layer graph."""
        buffers_before = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        with contextlib.ExitStack() as stack:
            # a checkpoint would hide the graph of its inside
            stack.enter_context(without_checkpoints())
            for name in self._structure.layers:
                layer = self._module.get_submodule(name)
                for hook in (
                    layer.register_forward_pre_hook(self._mark_inputs(name), with_kwargs=True),
                    layer.register_forward_hook(self._mark_outputs(), with_kwargs=False),
                ):
                    stack.callback(hook.remove)
            output = output_of(self._module, self._structure, arguments, self._objective)
        for name, buffer in self._module.named_buffers():
            # stages can't share a buffer that forward writes
            if name not in buffers_before or not torch.equal(buffer, buffers_before[name]):
                raise PlanError(f"its forward changes the buffer '{name}', of which each stage would have its own")
        self._check_calls()
        return self._assemble(self._marks(output))

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

    def _mark_inputs(self, name: str) -> Any:
        """Returns a pre-hook that notes the sources of a layer's arguments and puts markers in their place."""

        def hook(_layer: nn.Module, args: Any, kwargs: Any) -> Any:
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
                    # a fresh leaf: what is computed from here on has this layer as its source, and nothing before it
                    if leaf.requires_grad:
                        leaf = self._replace_by_marker(leaf, {("layer", layer_index)})
                        markers.append(leaf)
                leaves.append(leaf)
            self._inputs_by_call.append(entry)
            self._input_markers.append(markers)
            return tree_unflatten(leaves, nest)

        return hook

    def _mark_outputs(self) -> Any:
        """Returns a hook that notes foreign sources of a layer's outputs and puts markers in their place."""

        def hook(_layer: nn.Module, _args: Any, output: Any) -> Any:
            layer_index = len(self._outputs_by_call)
            # the version of a marker counts in-place writes by the layer into its inputs
            self._writes |= any(item._version for item in self._input_markers[layer_index])
            pairs, nest = tree_flatten_with_path(output)
            leaves = []
            prefix = f"{self._called_layers[layer_index]}."
            for _, leaf in pairs:
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    # a source other than the layer's own arguments and weights reached its output past them
                    for mark in self._marks(leaf) - {("layer", layer_index)}:
                        if mark[0] == "layer" or not self._is_weight_below(mark[1], prefix):
                            self._inputs_by_call[layer_index].marks.setdefault(("side", *mark), set()).add(mark)
                    leaf = self._replace_by_marker(leaf, {("layer", layer_index)})
                elif isinstance(leaf, torch.Tensor):
                    self._marks_of_constant[id(leaf)] = {("layer", layer_index)}
                    # ids are unique only among living objects
                    self._alive.append(leaf)
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

    def _assemble(self, tail: set[Mark]) -> LayerGraph:
        """Builds the layer graph from the noted sources.

        Args:
            tail: sources of the model's output.
        """
        layer_count_, input_weights, output_weights, boundary_tensors = len(self._called_layers), [], [], []
        blocked: dict[int, str] = {}
        inside = tuple(f"{name}." for name in self._called_layers)
        for layer_index, marks in enumerate([*(entry.marks for entry in self._inputs_by_call), {("tail",): tail}]):
            used_inside: set[str] = set()
            used_between: set[str] = set()
            paths: list[Path] = []
            for path, path_marks in marks.items():
                sources = {index for source_kind, index in path_marks if source_kind == "layer"}
                weights = {self._weight_names[index] for source_kind, index in path_marks if source_kind == "weight"}
                # made from a layer's output: that layer's stage computes it and sends the result
                from_boundary = sources and path[0] not in ("side", "tail")
                paths += [path] if from_boundary else []
                (used_between if from_boundary or layer_index == layer_count_ else used_inside).update(weights)
                needed_until = layer_index if from_boundary else layer_index + 1
                # a cut between a source and its reader would separate them, unless the tensor is passed on
                for source in sources - {layer_index}:
                    for boundary in range(source + 1, min(needed_until, layer_count_)):
                        blocked.setdefault(boundary, self._skip_reason(source, layer_index))
            # a weight of one layer that another layer's path uses: both must be in one stage
            foreign_weights = [name for name in used_inside | used_between if name.startswith(inside)]
            if foreign_weights:
                owner = next(
                    position for position, prefix in enumerate(inside) if foreign_weights[0].startswith(prefix)
                )
                for boundary in range(min(owner, layer_index) + 1, min(max(owner, layer_index) + 1, layer_count_)):
                    blocked.setdefault(boundary, f"'{foreign_weights[0]}' of one side is used on the other")
            input_weights.append(frozenset(used_inside))
            output_weights.append(frozenset(used_between))
            boundary_tensors.append(tuple(paths))
        for layer_index in range(1, layer_count_):
            # a boundary without a differentiable tensor has no backward
            if not boundary_tensors[layer_index]:
                blocked.setdefault(layer_index, "nothing is handed on that a gradient flows through")
        return LayerGraph(
            layers=tuple(self._called_layers),
            input_weights=tuple(input_weights[:layer_count_]),
            output_weights=tuple(output_weights),
            boundary_tensors=tuple(boundary_tensors[:layer_count_]),
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
