"""Reads the arguments of a pipeline engine: a model or stages, a layout or a mesh, and the forms of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import ConfigError, DataError, PlanError
from meshwright.models.structure import read_structure
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.strategy.custom_module import Model


def inputs_and_targets(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (inputs, targets) of a batch: a pair, or the ``input_ids`` and ``labels`` of a language model.

    Labels are shifted here, as transformers' models do: the target of a token is the label of the next.

    Raises:
        DataError: for anything else.
    """
    if isinstance(batch, Mapping):
        tokens, labels = batch.get("input_ids"), batch.get("labels")
        mask = batch.get("attention_mask")
        if tokens is not None and labels is not None:
            if mask is not None and not bool(mask.all()):
                raise DataError("the batch is padded (attention_mask has zeros): pack rows to one length instead")
            # the last token of a row has no next token
            return tokens, torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise DataError("a batch is a pair (inputs, targets), or a mapping with input_ids and labels")


def takes_tokens(model: nn.Module) -> bool:
    """Returns whether a model has a token embedding, so that trials can run it on tokens."""
    return read_structure(model).embedding is not None


def layout_or_mesh(layout: Layout | str | DeviceMesh | None, mesh: DeviceMesh | None) -> Layout | str | DeviceMesh:
    """Returns the one of two names that was given; a mesh of one dim without a name is the pipeline."""
    if (layout is None) == (mesh is None):
        raise ConfigError("give one of layout, as 'pp=4', and device_mesh")
    layout_or_mesh = mesh if layout is None else layout
    if isinstance(layout_or_mesh, DeviceMesh) and layout_or_mesh.ndim == 1 and layout_or_mesh.mesh_dim_names is None:
        return f"pp={layout_or_mesh.size()}"
    assert layout_or_mesh is not None
    return layout_or_mesh


def single_module(model: Model | None, stages: Sequence[nn.Module] | None) -> Model:
    """Returns the model, or its stages as one `nn.Sequential`."""
    if (model is None) == (stages is None):
        raise ConfigError("give one of model and model_stages, a list of modules that run one after another")
    if stages is None:
        assert model is not None
        return model
    for index, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise ConfigError(f"model_stages[{index}] is a {type(stage).__name__}: give modules")
    return nn.Sequential(*stages)


def with_microbatches(layout: Layout, microbatches: int | None) -> Layout:
    """Returns the layout with a number of micro-batches; refuses two different numbers, and unsupported choices."""
    # 1 is the layout's default, so it isn't a second answer
    if microbatches is not None and layout.microbatches not in (1, microbatches):
        raise PlanError(
            f"microbatches={microbatches}, but the layout says microbatches={layout.microbatches}; give one of them"
        )
    if layout.degree(Mechanics.TOKENS) > 1:
        raise PlanError(
            f"{layout.format_degree(Mechanics.TOKENS)}: "
            "the engine's loss reads whole rows; use tp, or `meshwright train`"
        )
    if layout.precision == "fp16":
        raise PlanError("precision=fp16 needs a loss scale that the engine lacks: write precision=bf16")
    if layout.offload == "optimizer":
        raise PlanError("offload=optimizer belongs to the trainer's own AdamW: write offload=parameters")
    return dataclasses.replace(layout, microbatches=microbatches or layout.microbatches)
