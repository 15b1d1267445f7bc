"""The job ``verify``: proves for a user's own model that layouts compute what one device computes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch

from meshwright.data.loader import Loader
from meshwright.errors import ConfigError
from meshwright.jobs.attention_checks import attention_text, attention_to_prove
from meshwright.jobs.prepare import prepare, text_config
from meshwright.jobs.product_checks import check_products
from meshwright.jobs.progress import Say, to_stderr
from meshwright.jobs.proof_reports import VerifyReport
from meshwright.jobs.requests import Layouts, VerifyConfig, with_fields
from meshwright.launch.devices import found_devices
from meshwright.models.analysis.clone import SMALL, make_clone
from meshwright.models.analysis.document_masks import check_documents
from meshwright.models.analysis.experts import find_experts
from meshwright.models.analysis.small_config import shrink_config, with_every_kind
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.compare import Verdict
from meshwright.proof.layouts import all_layouts, min_layers
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import NARROW, Case, random_batches
from meshwright.proof.verify import verify as prove_layouts
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.train.feed import MicroBatch

VOCABULARY = 199
"""Tokens of made-up text; a prime, so that no degree divides it."""
LENGTHS = (240, 120, 48, 24)
"""Candidate lengths of the long rows, in tokens; the first on which the model runs is used."""


def verify(
    config: VerifyConfig | None = None,
    /,
    *,
    model: str | ModelConfig | None = None,
    layout: Layouts | None = None,
    devices: int | None = None,
    steps: int | None = None,
    dtype: Literal["float64", "float32", "tf32", "bf16", "fp16", "fp8", "fp8_rowwise"] | None = None,
    full: bool | None = None,
    on_start: Callable[[str, Sequence[Layout]], None] | None = None,
    on_verdict: Callable[[Verdict], None] | None = None,
    say: Say = to_stderr,
) -> VerifyReport:
    """Proves that layouts of a model compute the losses, gradients and weights that one device computes.

    Example::

        report = meshwright.verify(model="llama", layout=["tp=2", "pp=2,microbatches=2"])
        assert report.passed, report.verdicts

    Args:
        config: what to prove; the arguments that follow go before its fields of the same names.
        model: a type such as ``"llama"``, a directory or ``module:function``; or a config with its sizes.
        layout: layouts; every layout of ``devices`` ranks when none is named.
        devices: number of ranks.
        steps: optimizer steps that are compared.
        dtype: precision of layouts that name none.
        full: the model as it is, instead of a small clone.
        on_start: called before the first proof with what is proven and under which layouts.
        on_verdict: called with each layout's verdict as it comes.
        say: takes a line of progress while text is prepared.

    Raises:
        ConfigError, PlanError: for what can't be; a layout that the model doesn't allow is refused in the report.
    """
    request = with_fields(
        config or VerifyConfig(), model=model, layout=layout, devices=devices, steps=steps, dtype=dtype, full=full
    )
    request = dataclasses.replace(request, sequence=request.sequence or _longest_row(request))
    layouts = _layouts_to_prove(request)
    if len({layout.precision for layout in layouts}) > 1:
        raise ConfigError("verify compares layouts of one precision; call it once for each")
    check_products(layouts[0], found_devices())
    case, model_config = _make_case(request, layouts, say)
    if on_start is not None:
        on_start(_subject_text(request) + attention_text(request.model.attention, model_config.attention), layouts)
    verdicts = prove_layouts(case, layouts, on_verdict)
    return VerifyReport(verdicts=tuple(verdicts), named=bool(request.layout))


def _layouts_to_prove(config: VerifyConfig) -> list[Layout]:
    base = Layout(precision=config.dtype)
    if not config.layout:
        experts = find_experts(_build_for_proof(_model_to_prove(config, 2), config.sequence).module)
        return all_layouts(found_devices(config.devices).count, base, min((e.experts for e in experts), default=0))
    layouts = [Layout.parse(text) for text in config.layout]
    if config.devices is not None:
        for layout in layouts:
            layout.check_ranks(config.devices)
    return [
        layout if "precision" in text else dataclasses.replace(layout, precision=config.dtype)
        for text, layout in zip(config.layout, layouts)
    ]


def _make_case(config: VerifyConfig, layouts: Sequence[Layout], say: Say) -> tuple[Case, ModelConfig]:
    """Returns what is proven, and the config of its model."""
    max_split = max(layout.degree(Mechanics.MATRICES) * layout.degree(Mechanics.TOKENS) for layout in layouts)
    model = _model_to_prove(config, min_layers(layouts), max_split)
    batches, vocab = _make_batches(config, layouts, model, say)
    build_unshrunk = partial(_build_for_proof, config.model, config.sequence)
    precisions, has_documents = {layout.precision for layout in layouts}, batches[0].positions is not None
    model = attention_to_prove(build_unshrunk, model, precisions, config.sequence, has_documents, float64_for="bf16")

    def build() -> BuiltModel:
        return build_meta(model, vocab=vocab, context=config.sequence)

    case = Case(
        build=build,
        batches=batches,
        made_up=not config.data.paths,
        recipe=OptimizerRecipe(),
        timeout_s=config.timeout_s,
        training=config.training,
        allow_whole=config.allow_whole,
        rescaled=_reads_grown_clone(config),
    )
    return case, model


def _model_to_prove(config: VerifyConfig, layers: int, max_split: int = 2) -> ModelConfig:
    """Returns the model, or a small clone with its ratio of heads and every kind of layer beside its neighbours."""
    model = config.model
    if config.full or model.kind == "function":
        return model
    small = shrink_config(model, layers, parts=max_split)
    if _reads_grown_clone(config):
        small = shrink_config(model, layers, width=2 * NARROW * (small.heads or 8), parts=max_split)
    return with_every_kind(_build_for_proof(model, config.sequence), small)


def _reads_grown_clone(config: VerifyConfig) -> bool:
    """Returns whether training reads the model's sharding table off a narrower clone; the proof then does so too."""
    if config.full or config.model.kind == "function":
        return False
    built = _build_for_proof(config.model, config.sequence)
    return sum(item.numel() for item in built.module.parameters()) > SMALL


def _build_for_proof(model: ModelConfig, context: int) -> BuiltModel:
    """Returns the model on meta, with the proof's vocabulary unless the model fixes another."""
    try:
        return build_meta(model, vocab=None if model.kind == "directory" else VOCABULARY, context=context)
    except ConfigError:
        return build_meta(model, vocab=None, context=context)


def _longest_row(config: VerifyConfig) -> int:
    """Returns the longest of `LENGTHS` on which the model runs; only small models of functions are run to find out."""
    for length in LENGTHS[:-1]:
        try:
            built = _build_for_proof(config.model, length)
        except ConfigError:
            continue  # rows longer than its positions
        elements = sum(item.numel() for item in built.module.parameters())
        if config.model.kind != "function" or elements > SMALL or not make_clone(built).refuses(length):
            return length
    return LENGTHS[-1]


def _subject_text(config: VerifyConfig) -> str:
    unshrunk = config.full or config.model.kind == "function"
    return config.model.name + ("" if unshrunk else ", a small clone of it")


def _make_batches(
    config: VerifyConfig, layouts: Sequence[Layout], model: ModelConfig, say: Say
) -> tuple[Sequence[MicroBatch], int]:
    """Returns global batches and their vocabulary: from the user's text, or made up."""
    # Every layout's readers and micro-batches must divide the batch.
    row_multiple = math.lcm(*(layout.batch_unit for layout in layouts))
    rows = config.rows or row_multiple * max(1, -(-8 // row_multiple))
    if not config.data.paths:
        built = _build_for_proof(model, config.sequence)
        # Ids must exist in a model whose vocabulary is smaller.
        vocab = min(built.vocab or VOCABULARY, VOCABULARY)
        return random_batches(config.steps, rows, _row_lengths(config), vocab, _masks_documents(built)), vocab
    token_set = prepare(text_config(config.model, config.data), say=say)
    data = config.data
    loaders = [
        Loader(
            token_set.train,
            rows=rows,
            sequence=length,
            seed=0,
            mask_documents=data.mask_documents,
            packing=data.resolved_packing,
        )
        for length in _row_lengths(config)
    ]
    batches = []
    for step in range(config.steps):
        batch = loaders[step % len(loaders)].batch(step)
        fields = (torch.from_numpy(item) for item in (batch.tokens, batch.targets, batch.positions))
        batches.append(MicroBatch(*fields))
    return batches, token_set.vocab_size


def _row_lengths(config: VerifyConfig) -> tuple[int, ...]:
    """Returns the row lengths in tokens, the long one first: a single step is proven on it."""
    return (config.sequence, min(config.sequence, config.short_sequence))


def _masks_documents(built: BuiltModel) -> bool:
    """Returns whether the model masks attention between documents of a row."""
    try:
        check_documents(built)
    except ConfigError:
        return False
    return True
