"""Makes the clone: a small real model of the same architecture, in float64 on the CPU, on which every trial runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.models.analysis.objective import Objective, nothing_dropped, trial_output
from meshwright.models.analysis.small_config import limit_windows, narrow_config, shrink_config
from meshwright.models.build import BuiltModel, build_meta, use_float64
from meshwright.models.config import ModelConfig
from meshwright.models.deferred import retie
from meshwright.models.forward import model_output
from meshwright.models.sizes import layer_count
from meshwright.models.structure import ModelStructure
from meshwright.parallel.float64_ops import Float64Ops
from meshwright.parallel.forward_state import OF_MODULES
from meshwright.parallel.stage import copy_module

SMALL = 1 << 24
"""Parameters up to which a model is its own clone."""
SMALL_FOR_STAGES = 1 << 23
"""The same where stages are rehearsed, which hold several copies."""
LARGEST_FUNCTION = 1 << 28
"""Parameters beyond which a function's model isn't tried, for it can't be shrunk."""
ROWS = 32
"""Rows of the traced batch."""
CONTEXT = 64
"""Longest sequence of a smaller clone in tokens."""
TOKENS = 8
"""Tokens of a short row."""
_VOCAB = 128
"""Vocabulary of a smaller clone: the head's width doesn't matter to the layers' groups."""
_STAGES_VOCAB, _STAGES_CONTEXT = 64, 40
"""The same of one whose stages are rehearsed, and its longest sequence."""


@dataclass(frozen=True, slots=True)
class Clone:
    """A small real model in float64, of the same architecture: what traces and rehearsals run."""

    module: nn.Module
    structure: ModelStructure
    vocab: int
    full_size: bool
    """Whether its sizes are the model's."""
    objective: Objective = field(default_factory=Objective)
    """The model's own loss, where it is more than the cross-entropy of the logits."""

    def run(
        self,
        rows: int = ROWS,
        module: nn.Module | None = None,
        documents: bool = False,
        tokens: int = TOKENS,
        parts: int = 1,
    ) -> torch.Tensor:
        """Runs a forward on random tokens and returns its logits, or its loss where the model returns no logits.

        Args:
            rows: B.
            module: to run instead of the clone itself.
            documents: packs two documents into each row where the model takes position ids, so that attention uses a
                mask.
            tokens: S.
            parts: number of shards into which ``module`` splits the rows' tokens.

        Returns:
            (B, S / parts, V) float64 logits, or a float64 scalar.
        """
        ids = torch.randint(self.vocab, (rows, tokens), generator=torch.Generator().manual_seed(7))
        position_ids = None
        # positions restart at the middle of a row: two packed documents
        if documents and self.structure.takes_positions and self.structure.transformers:
            position_ids = (torch.arange(tokens) % (tokens // 2 + 1)).expand(rows, tokens)
        return self.output_of(module or self.module, ids, ids, position_ids, parts)

    def output_of(
        self,
        module: nn.Module,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | None = None,
        token_parts: int = 1,
    ) -> torch.Tensor:
        """Returns the tensor that a rehearsal compares, of the clone or of a split copy of it.

        Args:
            module: the clone's module, a copy, or a stage of it.
            tokens: (B, S) int64.
            targets: (B, S) int64.
            positions: (B, S) int64, restarting at each document; None for one document a row.
            token_parts: number of shards into which ``module`` splits the rows' tokens.

        Returns:
            Logits (B, S / token_parts, V) float64 with the terms of the model's own loss in them, or the scalar loss of
            a model without logits.
        """
        masked, plain = positions is not None, self.objective.plain
        with Float64Ops(), contextlib.nullcontext() if plain else nothing_dropped():
            if not plain:
                return trial_output(module, self.structure, self.objective, tokens, targets, positions)
            output = model_output(module, self.structure, tokens, targets, positions, masked, token_parts=token_parts)
        output_tensor = output.logits if output.logits is not None else output.loss
        assert output_tensor is not None
        return output_tensor

    def refuses(self, tokens: int) -> bool:
        """Returns whether its forward fails on rows of so many tokens: a position table may be shorter."""
        try:
            # a copy, since forward may change buffers before it fails
            with torch.no_grad():
                self.run(1, duplicate_module(self.module), tokens=tokens)
        except Exception:
            return True
        return False


def duplicate_module(module: nn.Module) -> nn.Module:
    """Copies a module; tensors that its forward stored for a later call are detached, since a graph can't be copied."""
    seen: set[int] = set()
    for child in module.modules():
        for key, value in list(vars(child).items()):
            if key not in OF_MODULES and (detached := _detached(value, seen)) is not value:
                setattr(child, key, detached)
    return copy_module(module)


def _detached(value: Any, seen: set[int]) -> Any:
    """Returns a value whose tensors have no graph, of any shape; lists and dicts stay the ones that modules share.

    Args:
        value: an attribute, or an item of one.
        seen: ids of the lists and dicts that are done.
    """
    if isinstance(value, torch.Tensor):
        return value.detach() if value.grad_fn is not None else value
    if isinstance(value, tuple):
        items = [_detached(item, seen) for item in value]
        if all(item is old for item, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list | dict) and id(value) not in seen:
        seen.add(id(value))
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if (detached := _detached(item, seen)) is not item:
                value[key] = detached
    return value


def realise_model(
    source: BuiltModel, value_of: Callable[[str, nn.Parameter], torch.Tensor], apart: bool = False
) -> nn.Module:
    """Makes a real float64 copy of a meta model on the CPU; the one place where a clone's tensors come from.

    Args:
        source: on meta; it stays unchanged.
        value_of: returns a parameter's values, of its shape, by its name; floating ones become float64.
        apart: gives each name of a tied weight its own parameter, and trains frozen ones, so that autograd shows every
            use of a weight.
    """
    module = copy_module(source.module)
    # kernels without float64, such as grouped products of experts, are switched to plain ones
    use_float64(module)
    module = module.to_empty(device="cpu")
    if not apart:
        retie(module, source.recipe.ties)
    for name, parameter in module.named_parameters(remove_duplicate=not apart):
        value = value_of(name, parameter)
        parameter.data = value.double() if value.is_floating_point() else value
        parameter.requires_grad = parameter.requires_grad or (apart and value.is_floating_point())
    source.fill_buffers(module, "cpu")
    for child in module.modules():
        for key, item in child._buffers.items():
            if item is not None and item.is_floating_point() and key not in child._non_persistent_buffers_set:
                # Running statistics have the activations' type, here float64; position tables keep theirs.
                child._buffers[key] = item.double()
    return module


def make_clone(built: BuiltModel, context: int = CONTEXT, window: int = 0, narrow: int = 0) -> Clone:
    """Builds the clone: the model itself where it is small, else one with as many heads and experts but narrower.

    Args:
        built: the model, on meta.
        context: longest sequence of a clone that is built anew, in tokens.
        window: upper limit of attention windows in tokens, so that a window matters in rows of the clone's length; 0
            for no limit.
        narrow: elements of a head of a clone that is narrower than the model even where that is small; 0 for the
            model itself there.
    """
    is_small = not narrow and sum(parameter.numel() for parameter in built.module.parameters()) <= SMALL
    full_size = is_small or built.config.kind == "function"
    if full_size:
        # a window longer than the clone's rows would never mask anything
        windowed = limit_windows(built, window)
        source = built if windowed is None else build_meta(windowed, built.vocab, context)
    else:
        source = build_meta(narrow_config(built, narrow) if narrow else narrow_config(built), _VOCAB, context)
    generator = torch.Generator().manual_seed(11)

    def draw_value(_: str, parameter: nn.Parameter) -> torch.Tensor:
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        # Around one for scales of norms; small for matrices, so that no activation saturates.
        scale = 0.2 if parameter.dim() < 2 else 0.5 / max(1, parameter.shape[-1]) ** 0.5
        return values * scale + (1.0 if parameter.dim() < 2 else 0.0)

    module = realise_model(source, draw_value).eval()
    return Clone(module, source.structure, source.vocab or _VOCAB, full_size)


def make_clone_for_stages(built: BuiltModel, objective: Objective | None = None) -> Clone:
    """Builds a clone with all layers of the model, narrow, and tied weights apart: each use has its own name.

    Args:
        built: the model, on meta.
        objective: the model's own loss.
    """
    elements = sum(parameter.numel() for parameter in built.module.parameters())
    fits = elements <= SMALL_FOR_STAGES and not built.config.dropout
    source = built if fits else _narrow_all_layers(built, elements)
    generator = torch.Generator().manual_seed(0)

    def disturb_value(name: str, _: nn.Parameter) -> torch.Tensor:
        value = source.tensor(name)
        if not value.is_floating_point():
            return value
        # Fresh weights contain zeros, behind which a path could hide.
        return value.double() + 0.02 * torch.randn(value.shape, generator=generator, dtype=torch.float64)

    module = realise_model(source, disturb_value, apart=True)
    module = module.eval() if built.config.kind == "function" else module.train()
    vocab = min(_STAGES_VOCAB, built.structure.vocab or _STAGES_VOCAB)
    return with_objective(Clone(module, source.structure, vocab, source is built), objective)


def _narrow_all_layers(built: BuiltModel, elements: int) -> BuiltModel:
    """Builds a narrow model with the same layers; a model built by a function keeps its sizes."""
    if built.config.kind == "function":
        if elements > LARGEST_FUNCTION:
            raise PlanError(
                f"pp: a pipeline is tried out on a copy, and '{built.config.name}' with {elements} weights "
                "is too large for that; give its function smaller sizes"
            )
        return built
    assert built.hf_config is not None
    layers = layer_count(built.hf_config.get_text_config(decoder=True).to_dict()) or len(built.structure.layers)
    config_fields = shrink_config(built.config, layers=layers).to_dict() | {"dropout": 0.0}
    # the user's sizes would make the copy as large as the model
    for key in ("vocab", "context"):
        config_fields.pop(key, None)
    small_model = build_meta(ModelConfig.from_dict(config_fields), _STAGES_VOCAB, _STAGES_CONTEXT)
    if small_model.structure.layers != built.structure.layers:
        raise PlanError(f"pp: a small copy of '{built.config.name}' hasn't the same layers; use another axis")
    return small_model


def train_frozen_layers(clone: Clone) -> Clone:
    """Trains a clone's frozen embedding and layers, so that gradients show who reads what; returns the clone.

    How a matrix can be split doesn't depend on whether it is trained: the weights below adapters are split too.
    """
    for name in filter(None, (clone.structure.embedding, *clone.structure.layers)):
        for parameter in clone.module.get_submodule(name).parameters():
            parameter.requires_grad_(parameter.requires_grad or parameter.is_floating_point())
    return clone


def with_objective(clone: Clone, objective: Objective | None) -> Clone:
    """Returns a clone in training mode with the model's own loss in its output; some terms exist in training alone."""
    if objective is None or objective.plain:
        return clone
    return dataclasses.replace(clone, module=clone.module.train(), objective=objective)


def copy_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns copies of a module's buffers, of any shape, by name."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def restore_buffers(module: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Restores a module's buffers, of any shape, from copies by name."""
    for path, child in module.named_modules():
        for key in child._buffers:
            name = f"{path}.{key}" if path else key
            if name in saved:
                child._buffers[key] = saved[name].clone()


def equal_tensors(tensor: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Returns whether two tensors have one shape and equal values."""
    return other is not None and tensor.shape == other.shape and bool(torch.equal(tensor, other))
