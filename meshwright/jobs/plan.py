"""The job ``plan``: which layout of a model is fastest on some machines, what it takes, and why the others lose."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from meshwright.cluster.cluster import Cluster
from meshwright.errors import ConfigError, nearest
from meshwright.jobs.model_reading import make_measure
from meshwright.jobs.plan_model import (
    PlannableModel,
    PlanResult,
    ScalingResult,
    model_name,
    model_of_sizes,
    plan_model,
    preset_model,
    scale_model,
)
from meshwright.jobs.plan_questions import Answer, answer_question
from meshwright.jobs.requests import Layouts, PlanConfig, with_fields
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.models.random_draws import drawing_parts
from meshwright.models.weights import quantisation_method
from meshwright.planner.presets import presets

VOCABULARY = 50304
"""Of a model type that names none: GPT-2's, padded to 64."""


def plannable_model(model: str | ModelConfig, sequence: int = 2048) -> PlannableModel:
    """Reads a model once, so that it can be planned for any number of clusters; nothing is allocated.

    Args:
        model: a type such as ``"llama"``, a directory, its ``config.json``, a public model such as ``"llama-3-70b"``,
            or ``module:function``; or a config with its sizes.
        sequence: most tokens of a row.

    Raises:
        ConfigError: for a model that can't be built.
    """
    config = ModelConfig(name=model_name(model)) if isinstance(model, str) else model
    preset = preset_model(config)
    if preset is not None:
        return preset
    # A plan needs no weights, so a directory with a config.json alone is enough, or with weights that can't be trained.
    if config.kind == "directory" and _lacks_weights(Path(config.name)):
        config = dataclasses.replace(config, fresh=True)
    has_vocabulary = config.kind == "directory" or config.vocab
    try:
        built = build_meta(config, vocab=None if has_vocabulary else VOCABULARY, context=sequence)
    except ConfigError as error:
        near = nearest(config.name, presets())
        if config.kind != "type" or not near.startswith("; did"):
            raise
        raise ConfigError(f"{error} Of public models by their sizes:{near.removeprefix(';')}") from error
    return PlannableModel(
        shape=measure_shape(built),
        # Each question about the model reuses what an earlier one measured.
        measure=functools.cache(functools.partial(make_measure, built)),
        draws=bool(drawing_parts(built)),
    )


def _lacks_weights(directory: Path) -> bool:
    """Returns whether a directory holds no full weights: none at all, or quantised ones."""
    return bool(quantisation_method(directory)) or not any(directory.glob("*.safetensors"))


def plan(
    config: PlanConfig | None = None,
    /,
    *,
    model: str | ModelConfig | PlannableModel | None = None,
    cluster: str | Cluster | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    sizes: str | None = None,
    devices: int | str | None = None,
    layout: Layouts | None = None,
    fix: str | None = None,
) -> PlanResult:
    """Finds the fastest layout that fits. Nothing is allocated; no GPU is needed.

    Example::

        plan = meshwright.plan(model="llama", cluster="8xh100", batch=512, sequence=4096)
        print(plan.layout, plan.step_s, plan.reason)

    Args:
        config: what to plan; the arguments that follow go before its fields of the same names.
        model: a type such as ``"llama"``, a directory or ``module:function``; a config; or a model that was read.
        cluster: the machines, as ``"64xh100"`` or ``"8xh100+8xa100-80"``, or a `Cluster`; this machine when not given.
        batch: rows of the global batch.
        sequence: tokens a row.
        sizes: a standard transformer by its sizes instead of a model: ``"layers=96,width=12288,heads=96,vocab=51200"``.
        devices: so many of the cluster's.
        layout: layouts to compare with the plan; `PlanResult.compared` says why each isn't it.
        fix: what is given: ``"tp=8,pp=4,zero=1"``.

    Raises:
        ConfigError, ClusterError: for what can't be.
        PlanError: when no layout fits.
    """
    request = _request(config, model, cluster, batch, sequence, sizes, devices, layout, fix)
    return plan_model(request, _model(request, model), cluster if isinstance(cluster, Cluster) else None)


def scaling(
    config: PlanConfig | None = None,
    /,
    *,
    devices: str | None = None,
    model: str | ModelConfig | PlannableModel | None = None,
    cluster: str | Cluster | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    sizes: str | None = None,
    fix: str | None = None,
) -> ScalingResult:
    """Plans for several numbers of devices, and finds the knee beyond which more bring little.

    Args:
        config: what to plan; the arguments that follow go before its fields of the same names.
        devices: the numbers: ``"8..512"`` for each doubling, ``"8,24"`` for these two.
        model: as `plan` takes it, like all that follow.
        cluster: the machines, of which the largest number of devices counts.
        batch: rows of the global batch.
        sequence: tokens a row.
        sizes: a standard transformer by its sizes instead of a model.
        fix: what is given.

    Raises:
        ConfigError, ClusterError, PlanError: for what can't be.
    """
    request = _request(config, model, cluster, batch, sequence, sizes, devices, None, fix)
    return scale_model(request, _model(request, model), cluster if isinstance(cluster, Cluster) else None)


def ask(
    config: PlanConfig,
    /,
    *,
    model: str | ModelConfig | PlannableModel | None = None,
    cluster: str | Cluster | None = None,
) -> Answer:
    """Answers a question about a plan: what training takes, what fits at most, what would be otherwise.

    Example::

        config = meshwright.PlanConfig(cluster="512xh100", tokens="15T", sequence=8192)
        print(meshwright.ask(config, model="llama-3-70b").to_json())

    Args:
        config: one of its fields asks: ``tokens``, ``largest``, ``longest``, ``batch="auto"``, ``what_if``,
            ``measured_s``, ``reshape``, ``walls`` or ``emit``.
        model: goes before the config's, as in `plan`.
        cluster: goes before the config's, as in `plan`.

    Raises:
        ConfigError: when no field asks; as ClusterError for what can't be.
        PlanError: when nothing fits.
    """
    request = _request(config, model, cluster, None, None, None, None, None, None)
    if not request.question:
        raise ConfigError("no question is asked; set tokens, largest, walls or another (docs/planning.md), or use plan")
    return answer_question(request, _model(request, model), cluster if isinstance(cluster, Cluster) else None)


def _request(
    config: PlanConfig | None,
    model: str | ModelConfig | PlannableModel | None,
    cluster: str | Cluster | None,
    batch: int | None,
    sequence: int | None,
    sizes: str | None,
    devices: int | str | None,
    layout: Layouts | None,
    fix: str | None,
) -> PlanConfig:
    """Returns the config with the arguments over it."""
    return with_fields(
        config or PlanConfig(),
        model=None if isinstance(model, PlannableModel) else model,
        cluster=None if isinstance(cluster, Cluster) else cluster,
        batch=batch,
        sequence=sequence,
        sizes=sizes,
        devices=None if devices is None else str(devices),
        layout=layout,
        fix=fix,
    )


def _model(request: PlanConfig, model: str | ModelConfig | PlannableModel | None) -> PlannableModel:
    """Returns the model of a request."""
    if isinstance(model, PlannableModel):
        return model
    return model_of_sizes(request.sizes) if request.sizes else plannable_model(request.model, request.sequence)
