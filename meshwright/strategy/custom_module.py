"""Reads a custom module into the form of a built model: on meta, with a source for any box of any weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.build import BuiltModel, is_transformers, use_float64, without_cache
from meshwright.models.config import ModelConfig
from meshwright.models.deferred import check_complete, recipe_of
from meshwright.models.random_draws import drawing_parts
from meshwright.models.recorder import Recording, record
from meshwright.models.shared_memory import shared_memory_refusal
from meshwright.models.sizes import DROPOUTS
from meshwright.models.structure import ModelStructure, read_structure
from meshwright.models.weight_checks import sparse_gradient_refusal
from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.build import apply_transforms
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_source import Fill, ModelSource
from meshwright.parallel.program import Program
from meshwright.parallel.step_timer import StepTimer
from meshwright.spec.layout import Layout
from meshwright.torch_compat.tensors import tree_leaves
from meshwright.train.model_analysis import ModelAnalysis

Model: TypeAlias = nn.Module | Callable[[], nn.Module]
"""A module, or a function that builds one."""
_KINDS = (torch.float32, torch.float64)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def read_model(model: Model, seed: int) -> BuiltModel:
    """Reads a module; its weights move to meta while the result remembers their values.

    Args:
        model: with real weights or on meta; or a function, which is run on meta and recorded, so that each rank can
            compute its shards alone.
        seed: of the weights of a recorded module.

    Raises:
        ConfigError: for weights that are neither float32 nor float64, and for a function that returns no module.
    """
    # an empty recording: the values are constants of the recipe
    if isinstance(model, nn.Module):
        _refuse_shared_memory(model)
        module, recipe = model, recipe_of(model, Recording())
    else:
        with record(seed) as recording:
            module = model()
            if not isinstance(module, nn.Module):
                raise ConfigError(f"the function gave a {type(module).__name__}; it must return an nn.Module")
        _refuse_shared_memory(module)
        recipe = recipe_of(module, recording)
        check_complete(module, recipe)
    for name, item in module.named_parameters():
        if item.is_floating_point() and item.dtype not in _KINDS:
            raise ConfigError(
                f"'{name}' is {item.dtype}; master weights are float32 or float64: call model.float(), and write "
                "precision=bf16 in the layout to compute in bf16"
            )
    config = dataclasses.replace(_config_of(module), seed=seed)
    return BuiltModel(config, module, recipe, _with_layers(module, read_structure(module)), None, without_cache(module))


def _refuse_shared_memory(module: nn.Module) -> None:
    """Refuses trained weights in the memory of another tensor, before they move to meta and lose it."""
    if reason := shared_memory_refusal(module):
        raise ConfigError(reason)


def refuse_complex(module: nn.Module, layout: Layout) -> None:
    """Refuses complex weights where a data axis shards them: FSDP2 gathers weights of one type together."""
    for name, item in module.named_parameters():
        if item.is_complex() and layout.zero:
            raise ConfigError(
                f"'{name}' is complex ({item.dtype}), and zero={layout.zero} shards real weights of one type together; "
                "nearest that works: replicate in place of shard, or a real weight with a last dim of 2 that forward "
                "reads by torch.view_as_complex"
            )


def _refuse_sparse_gradients(module: nn.Module, layout: Layout) -> None:
    """Refuses embeddings whose gradient is sparse where ranks sum it."""
    if layout.world > 1 and (reason := sparse_gradient_refusal(module)):
        raise ConfigError(reason)


def _config_of(module: nn.Module) -> ModelConfig:
    """Returns a config with the module's name, overrides and dropout, for messages, clones and trials."""
    if not is_transformers(module):
        dropout = max((child.p for child in module.modules() if isinstance(child, nn.Dropout)), default=0.0)
        return ModelConfig(name=f"{type(module).__module__}:{type(module).__qualname__}", dropout=dropout)
    config: Any = module.config
    config_values, changed = config.to_dict(), config.to_diff_dict()
    skipped = {*DROPOUTS, "model_type", "transformers_version", "_name_or_path", "dtype", "torch_dtype"}
    # overrides hold what differs from the family's defaults, so that clones have it too; whole numbers are sizes, which
    # a clone has of its own, and the table is scaled to the model's
    changed_values = {
        key: item
        for key, item in changed.items()
        if key in config_values and key not in skipped and isinstance(item, (bool, str, float))
    }
    dropout = max((float(config_values[key]) for key in DROPOUTS if config_values.get(key)), default=0.0)
    return ModelConfig(name=config.model_type, overrides=changed_values, dropout=dropout)


def _with_layers(module: nn.Module, structure: ModelStructure) -> ModelStructure:
    """Uses the items of an `nn.Sequential` that have weights as its layers, where nothing in it is repeated."""
    if structure.layers or not isinstance(module, nn.Sequential):
        return structure
    names = tuple(name for name, item in module.named_children() if any(True for _ in item.parameters()))
    return dataclasses.replace(structure, stacks=(names,))


class _OnExample:
    """Replaces a module's forward in trials: random rows shaped like an example, a scalar out."""

    def __init__(self, plain: Forward, example: torch.Tensor) -> None:
        self._plain, self._example = plain, example

    def __call__(self, **inputs: torch.Tensor) -> torch.Tensor:
        rows = next(iter(inputs.values())).shape[0]
        generator = torch.Generator().manual_seed(rows)
        if self._example.is_floating_point():
            shape = (rows, *self._example.shape[1:])
            example_rows = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_().clone()
        else:
            # integers (classes, ids) can't be random: repeat the example's rows
            example_rows = self._example.cpu()[torch.arange(rows) % len(self._example)]
        output: Any = self._plain(example_rows)
        total = torch.zeros((), dtype=torch.float64)
        for item in tree_leaves(output):
            if isinstance(item, torch.Tensor) and item.is_floating_point():
                # random weights, so that errors of different elements can't cancel in the sum
                output_grad = torch.randn(item.shape, generator=generator, dtype=torch.float64)
                total = total + (item * output_grad).sum()
        return total


def with_forward_trial(built: BuiltModel, example: torch.Tensor | None) -> BuiltModel:
    """Returns the model as the probes of sharding and stages run it: on rows like ``example`` instead of tokens.

    Args:
        built: its module stays unchanged.
        example: (B, ...) one input; None for a language model, which is run on tokens (B, S).

    Raises:
        ConfigError: for a model without a token embedding and no example.
    """
    if example is None:
        if built.structure.embedding is None:
            raise ConfigError(
                f"{built.config.name} has no token embedding, so nothing says what it takes: give an input of it "
                "as example=, a tensor (B, ...)"
            )
        return built
    probe_module = _shallow_copy(built.module)
    on_example = partial(_OnExample, example=example.detach())
    wrap_forward(probe_module, ForwardLayer.EXAMPLE, "called on an example of the user's", on_example)
    return dataclasses.replace(built, module=probe_module)


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Returns a module of the same class with the same children, whose own attributes can be set separately."""
    copy = module.__class__.__new__(module.__class__)
    copy.__dict__.update(module.__dict__)
    return copy


def refuse_unrecorded(built: BuiltModel) -> None:
    """Refuses weights without recorded values, before any rank waits for another.

    Raises:
        ConfigError: with the possible remedies.
    """
    lost = [name for name, ref in built.recipe.refs.items() if ref.numel and not built.recipe.replay.has_origin(ref)]
    if lost:
        raise ConfigError(
            f"{lost[0]} is on meta, and nothing says what is in it: hand in the function that builds the model, "
            "or fill=, a function of a weight's name and box"
        )


def check_equal(built: BuiltModel, world: AxisGroup) -> None:
    """Refuses weights that aren't the same on all ranks, by a sum of their bits.

    Raises:
        ConfigError: with the possible remedies.
    """
    weighted_bits = torch.zeros((), dtype=torch.int64)
    for index, value in enumerate(built.recipe.constants.values()):
        if value.numel() and value.is_floating_point():
            bits = value.contiguous().view(_BITS[value.itemsize])
            # weighted by index, so that two swapped weights don't sum to the same
            weighted_bits += (bits.sum(dtype=torch.int64) % (1 << 40)).cpu() * (index + 1)
    # Both ends in one maximum; a float64 holds 52 of the bits.
    maxima = torch.stack([weighted_bits, -weighted_bits]).remainder(1 << 50).to(torch.float64)
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    maxima, local_sums = maxima.to(device), maxima.to(device, copy=True)
    world.all_reduce_max(maxima).wait()
    differs = (maxima != local_sums).any().to(torch.float64)
    # every rank must raise, or the others would wait for it in the next collective
    world.all_reduce_max(differs).wait()
    if bool(differs):
        raise ConfigError(
            "the ranks hold other weights: seed all alike (torch.manual_seed) before the model is built, load the same "
            "checkpoint, take one rank's by shard(model, from_rank=0), or hand in a function that builds the model"
        )


def make_model_source(built: BuiltModel, analysis: ModelAnalysis, fill: Fill | None, compute: Any) -> ModelSource:
    """Returns a custom model in the form that the runtime builds from."""

    def fill_buffers(module: nn.Module, device: torch.device) -> None:
        if fill is None:
            built.fill_buffers(module, device)
        for path, child in module.named_modules():
            for key, buffer in child._buffers.items():
                # without fill, built.fill_buffers has set every buffer above
                if buffer is not None and buffer.is_meta:
                    name = f"{path}.{key}" if path else key
                    assert fill is not None
                    child._buffers[key] = fill(name, tuple((0, size) for size in buffer.shape)).to(device, buffer.dtype)

    return ModelSource(
        module=built.module,
        layers=built.structure.layers,
        compute=compute,
        fill=fill or built.tensor,
        fill_buffers=fill_buffers,
        random=bool(drawing_parts(built)),
        ties=built.structure.ties,
        table=analysis.table,
        layer_graph=analysis.layer_graph,
        experts=analysis.experts,
        width=built.structure.width or 0,
    )


def with_compute_precision(layout: Layout, built: BuiltModel) -> Layout:
    """Keeps a float64 model in float64, and switches its kernels to those that support it."""
    refuse_complex(built.module, layout)
    _refuse_sparse_gradients(built.module, layout)
    dtypes = {parameter.dtype for parameter in built.module.parameters() if parameter.is_floating_point()}
    if torch.float64 in dtypes and layout.precision == "float32":
        layout = dataclasses.replace(layout, precision="float64")
    if layout.precision == "float64":
        use_float64(built.module)
    return layout


def no_compute(*_: object) -> object:
    """Stands for the computation of a micro-batch in a custom loop, which nothing calls."""
    raise ConfigError("the loop is the user's own: call the model, and backward on its loss")


def shape_only_program(source: ModelSource, layout: Layout, mesh: Mesh) -> Program:
    """Builds a program without memory: shapes and placements alone."""
    context = apply_transforms(source, layout, mesh)
    return Program(context.stages, source.compute, context.view, mesh, StepTimer(mesh.device_type))
