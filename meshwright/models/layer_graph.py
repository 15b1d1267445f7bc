"""Finds the layer graph of any model by running a small clone of it.

The clone has as many layers as the model, each narrow. Every tensor that enters or leaves a layer is replaced by a
marker, so that autograd's graph tells what each was made of: the layer before, an earlier layer, or weights outside of
the layers. What autograd can't tell (integers, values behind a detach) the rehearsal finds, `models.stage_rehearsal`.
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
from torch.utils._pytree import MappingKey, SequenceKey, tree_flatten_with_path, tree_unflatten

from meshwright.autograd_helper import computed_by_helper
from meshwright.errors import MeshwrightError, PlanError
from meshwright.models.build import BuiltModel, build_meta, use_float64
from meshwright.models.clone import shrink
from meshwright.models.config import ModelConfig
from meshwright.models.objective import Objective
from meshwright.models.sizes import layer_count
from meshwright.models.stage_rehearsal import Tokens, output_of, rehearse
from meshwright.models.structure import ModelStructure
from meshwright.parallel.model_checkpointing import inlined
from meshwright.parallel.stage import copied
from meshwright.spec.layer_graph import LayerGraph, LayerOutput, Path

_VOCAB, _ROWS, _TOKENS = 64, 2, 10
_SMALL = 1 << 23
"""Elements up to which a model is tried out as it is."""
_LARGE = 1 << 28
"""Elements beyond which a function's model isn't tried out, for it can't be shrunk."""


@computed_by_helper
def read_layer_graph(built: BuiltModel, objective: Objective | None = None) -> LayerGraph:
    """Returns the layer graph of a model, proven on a small clone.

    Args:
        built: on meta.
        objective: the model's own loss, of which each stage must see what it is made of.

    Raises:
        PlanError: when the model can't be cut anywhere, with the reason.
    """
    module, structure = _clone(built)
    if objective is not None and not objective.plain:
        module.train()  # some terms are of training alone
    arguments = _sample(built)
    try:
        # Copies: forward may leave tensors of its graph in the module, which then can't be copied any more.
        with torch.no_grad():
            first, second = (output_of(copied(module, share=True), structure, arguments, objective) for _ in range(2))
        if not torch.equal(first, second):
            module.eval()
        layer_graph = _Probe(copied(module, share=True), structure, objective).run(arguments)
        layer_graph = dataclasses.replace(
            layer_graph, whole_backward=rehearse(module, structure, layer_graph, arguments, objective)
        )
    except PlanError as error:
        raise PlanError(f"pp: the model '{built.config.name}' can't be cut into stages: {error}") from error
    except MeshwrightError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise PlanError(f"pp: the model '{built.config.name}' can't be cut into stages: a trial gave {why}") from error
    return layer_graph


def _clone(built: BuiltModel) -> tuple[nn.Module, ModelStructure]:
    """A small real copy in float64, on the CPU, in which tied weights are apart, so that each use has its own name."""
    elements = sum(item.numel() for item in built.module.parameters())
    small = built if elements <= _SMALL and not built.config.dropout else _shrunk(built, elements)
    module = copied(small.module)
    use_float64(module)
    module = module.to_empty(device="cpu")
    draw = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = small.tensor(name)
        if value.is_floating_point():
            # Freshly made weights hold zeros, behind which a path could hide.
            value = value.double() + 0.02 * torch.randn(value.shape, generator=draw, dtype=torch.float64)
            parameter.data, parameter.requires_grad = value, True
        else:
            parameter.data = value
    small.fill_buffers(module, "cpu")
    return (module.eval() if built.config.kind == "function" else module.train()), small.structure


def _shrunk(built: BuiltModel, elements: int) -> BuiltModel:
    """A narrow model with the same layers; a function's model is what it is."""
    if built.config.kind == "function":
        if elements > _LARGE:
            raise PlanError(
                f"pp: a pipeline is tried out on a copy, and '{built.config.name}' with {elements} weights "
                "is too large for that; give its function smaller sizes"
            )
        return built
    assert built.hf_config is not None
    layers = layer_count(built.hf_config.get_text_config(decoder=True).to_dict()) or len(built.structure.layers)
    values = shrink(built.config, layers=layers).to_dict() | {"dropout": 0.0}
    for key in ("vocab", "context"):  # else the user's own would make the copy as large as these
        values.pop(key, None)
    small = build_meta(ModelConfig.from_dict(values), _VOCAB, 4 * _TOKENS)
    if small.structure.layers != built.structure.layers:
        raise PlanError(f"pp: a small copy of '{built.config.name}' hasn't the same layers; use another axis")
    return small


def _sample(built: BuiltModel) -> Tokens:
    vocab = min(_VOCAB, built.structure.vocab or _VOCAB)
    tokens = torch.randint(vocab, (_ROWS, _TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


Mark = tuple[str, int]
"""("layer", number) for what came through a layer, ("weight", place in the list of names)."""


@dataclass
class _Entry:
    """What entered a layer: for each tensor its marks."""

    marks: dict[Path, set[Mark]] = field(default_factory=dict)


class _Probe:
    """One forward of the clone with a marker on everything that enters or leaves a layer."""

    def __init__(self, module: nn.Module, structure: ModelStructure, objective: Objective | None = None) -> None:
        self._module, self._structure, self._objective = module, structure, objective
        self._calls: list[str] = []
        self._entries: list[_Entry] = []
        self._given: list[Any] = []
        self._names: list[str] = []
        self._writes = False
        self._leaf: dict[int, set[Mark]] = {}
        self._whole: dict[int, set[Mark]] = {}
        """Marks of tensors without a gradient that layers gave, by identity."""
        self._alive: list[Any] = []
        self._taken: list[list[torch.Tensor]] = []
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._leaf.setdefault(id(parameter), set()).add(("weight", len(self._names)))
            self._names.append(name)

    def run(self, arguments: Tokens) -> LayerGraph:
        """Runs the clone and returns what it saw."""
        before = {name: item.clone() for name, item in self._module.named_buffers()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(inlined())
            for name in self._structure.layers:
                layer = self._module.get_submodule(name)
                for hook in (
                    layer.register_forward_pre_hook(self._entering(name), with_kwargs=True),
                    layer.register_forward_hook(self._leaving(), with_kwargs=False),
                ):
                    stack.callback(hook.remove)
            output = output_of(self._module, self._structure, arguments, self._objective)
        for name, item in self._module.named_buffers():
            if name not in before or not torch.equal(item, before[name]):
                raise PlanError(f"its forward changes the buffer '{name}', of which each stage would have its own")
        self._check_calls()
        return self._spine(self._marks(output))

    def _check_calls(self) -> None:
        twice = [(name, count) for name, count in Counter(self._calls).items() if count > 1]
        if twice:
            name, count = twice[0]
            raise PlanError(
                f"its forward calls the layer '{name}' more than once ({count} times), so several stages would need "
                "its weights; nearest that works: tp, cp or shard in place of pp"
            )
        if len(self._calls) < 2:
            raise PlanError(f"its forward calls {len(self._calls)} repeated layers, and a stage needs one")

    def _entering(self, name: str) -> Any:
        def hook(_layer: nn.Module, args: Any, kwargs: Any) -> Any:
            number = len(self._calls)
            self._calls.append(name)
            entry, taken = _Entry(), []
            pairs, nest = tree_flatten_with_path((args, kwargs))
            leaves = []
            for keys, leaf in pairs:
                if isinstance(leaf, torch.Tensor):
                    marks = self._marks(leaf)
                    if marks:
                        entry.marks[_path(keys)] = marks
                    if leaf.requires_grad:
                        leaf = self._marker(leaf, {("layer", number)})
                        taken.append(leaf)
                leaves.append(leaf)
            self._entries.append(entry)
            self._taken.append(taken)
            return tree_unflatten(leaves, nest)

        return hook

    def _leaving(self) -> Any:
        def hook(_layer: nn.Module, _args: Any, output: Any) -> Any:
            number = len(self._given)
            self._writes |= any(item._version for item in self._taken[number])
            pairs, nest = tree_flatten_with_path(output)
            leaves = []
            prefix = f"{self._calls[number]}."
            for _, leaf in pairs:
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    for mark in self._marks(leaf) - {("layer", number)}:
                        if mark[0] == "layer" or not self._within(mark[1], prefix):
                            self._entries[number].marks.setdefault(("side", *mark), set()).add(mark)
                    leaf = self._marker(leaf, {("layer", number)})
                elif isinstance(leaf, torch.Tensor):
                    self._whole[id(leaf)] = {("layer", number)}
                    self._alive.append(leaf)
                leaves.append(leaf)
            self._given.append((nest, leaves))
            return tree_unflatten(leaves, nest)

        return hook

    def _within(self, place: int, prefix: str) -> bool:
        """Whether a weight has a name in a layer."""
        shared = self._leaf[id(self._module.get_parameter(self._names[place]))]
        return any(self._names[other].startswith(prefix) for _, other in shared)

    def _marker(self, tensor: torch.Tensor, marks: set[Mark]) -> torch.Tensor:
        leaf = tensor.detach().requires_grad_()
        self._leaf[id(leaf)] = marks
        made = leaf.clone()
        self._alive += [leaf, made]
        return made

    def _marks(self, tensor: torch.Tensor) -> set[Mark]:
        """What a tensor was made of."""
        if not tensor.requires_grad:
            return set(self._whole.get(id(tensor), ()))
        found: set[Mark] = set()
        for leaf in _leaves(tensor):
            found |= self._leaf.get(id(leaf), set())
        return found

    def _spine(self, tail: set[Mark]) -> LayerGraph:
        """Sorts what was seen."""
        count, feeds, bridges, payload = len(self._calls), [], [], []
        blocked: dict[int, str] = {}
        inside = tuple(f"{name}." for name in self._calls)
        for number, marks in enumerate([*(entry.marks for entry in self._entries), {("tail",): tail}]):
            direct: set[str] = set()
            passing: set[str] = set()
            paths: list[Path] = []
            for path, found in marks.items():
                sources = {place for kind, place in found if kind == "layer"}
                weights = {self._names[place] for kind, place in found if kind == "weight"}
                carried = sources and path[0] not in ("side", "tail")
                paths += [path] if carried else []
                (passing if carried or number == count else direct).update(weights)
                last = number if carried else number + 1
                for source in sources - {number}:
                    for bound in range(source + 1, min(last, count)):
                        blocked.setdefault(bound, self._reason(source, number))
            borrowed = [name for name in direct | passing if name.startswith(inside)]
            if borrowed:
                owner = next(n for n, start in enumerate(inside) if borrowed[0].startswith(start))
                for bound in range(min(owner, number) + 1, min(max(owner, number) + 1, count)):
                    blocked.setdefault(bound, f"'{borrowed[0]}' of one side is used on the other")
            feeds.append(frozenset(direct))
            bridges.append(frozenset(passing))
            payload.append(tuple(paths))
        for number in range(1, count):
            if not payload[number]:
                blocked.setdefault(number, "nothing is handed on that a gradient flows through")
        return LayerGraph(
            layers=tuple(self._calls),
            input_weights=tuple(feeds[:count]),
            output_weights=tuple(bridges),
            boundary_tensors=tuple(payload[:count]),
            returns=tuple(self._returned(number) for number in range(count)),
            blocked=dict(sorted(blocked.items())),
            writes=self._writes,
        )

    def _reason(self, source: int, number: int) -> str:
        reader = f"layer {number}" if number < len(self._calls) else "the output"
        return f"{reader} reads what layer {source} made, past the layers between"

    def _returned(self, number: int) -> LayerOutput:
        """Which of a layer's results is which argument of the next: by the only one there is, or by shape in order."""
        nest, leaves = self._given[number]
        following = self._entries[number + 1].marks if number + 1 < len(self._entries) else {}
        free = [path for path, marks in following.items() if path[0] != "side" and ("layer", number) in marks]
        paths: list[Path | None] = []
        for leaf in leaves:
            paths.append(free.pop(0) if free and isinstance(leaf, torch.Tensor) else None)
        tensors = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
        return LayerOutput(nest=nest, leaves=tuple(paths), tensors=tensors)


def _leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Leaves of the graph behind a tensor."""
    if tensor.grad_fn is None:
        yield tensor
        return
    seen, open_nodes = {tensor.grad_fn}, [tensor.grad_fn]
    while open_nodes:
        node: Any = open_nodes.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                open_nodes.append(following)


def _path(keys: Any) -> Path:
    found: list[Any] = []
    for key in keys:
        if not isinstance(key, (SequenceKey, MappingKey)):
            raise PlanError(f"a layer takes tensors inside of an object ({key}), out of which a stage can't take them")
        found.append(key.idx if isinstance(key, SequenceKey) else key.key)
    return tuple(found)
