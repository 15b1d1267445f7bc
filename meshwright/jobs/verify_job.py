"""The job ``verify_job``: proves a whole run, through its data, schedule, evaluation and checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from meshwright.data.config import DataConfig
from meshwright.data.packing import PackedRows
from meshwright.data.tokens import TokenSet
from meshwright.errors import ConfigError, DataError
from meshwright.jobs.attention_checks import attention_text, attention_to_prove
from meshwright.jobs.prepare import prepare, text_config
from meshwright.jobs.proof_reports import JobReport
from meshwright.jobs.requests import Layouts
from meshwright.jobs.run_directory import PLAN, read_plan, refuse_code, run_config
from meshwright.models.analysis.small_config import shrink_config
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.job import JobCase, JobVerdict, scaled_config
from meshwright.proof.job import verify_job as prove_job
from meshwright.proof.layouts import min_layers
from meshwright.spec.layout import Layout
from meshwright.train.run_config import RunConfig

ROWS, TOKENS = 8, 1024
"""Least rows of the proof's batch, and most tokens of its rows, unless ``full``: a CPU can run these in float64."""


def verify_job(
    job: RunConfig | str | Path,
    *,
    layout: Layouts = (),
    full: bool = False,
    steps: int = 6,
    timeout_s: float = 600.0,
    trust: bool = False,
    on_start: Callable[[str], None] | None = None,
    on_verdict: Callable[[JobVerdict], None] | None = None,
) -> JobReport:
    """Proves that a run's text, rows, optimizer, schedule and loss train under layouts as a plain loop on one device.

    Each layout is trained under, evaluated, saved, and resumed under the next one, in float64 to 1e-9.

    Args:
        job: a run's directory, or its config.
        layout: layouts, each resumed under the one after it and the last under the first; the run's own when empty.
        full: the model as it is, all rows and tokens, instead of a small clone.
        steps: optimizer steps, half under each of two layouts.
        timeout_s: limit for each run.
        trust: import and call the function that a run's directory names as its model.
        on_start: called before the first proof with what is proven, and what is left out of it.
        on_verdict: called with the verdict of each pair of layouts as it comes.

    Raises:
        ConfigError, PlanError: for what can't be.
    """
    if steps < 2 or steps % 2:
        raise ConfigError(f"steps = {steps}: half of them run under each layout; give an even number from 2 on")
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout_s = {timeout_s:g}: give seconds above 0")
    named = [str(item) for item in ([layout] if isinstance(layout, (str, Layout)) else layout)]
    config, layouts = job_and_layouts(job, named, trust)
    case, subject = case_of(config, layouts, full, steps, timeout_s)
    if on_start is not None:
        on_start(subject)
    pairs = _layout_pairs([dataclasses.replace(layout, precision="float64") for layout in layouts])
    return JobReport(subject=subject, verdicts=tuple(prove_job(case, pairs, on_verdict)))


def job_and_layouts(job: RunConfig | str | Path, named: Sequence[str], trust: bool) -> tuple[RunConfig, list[Layout]]:
    """Returns the config of a run and the layouts to prove it under.

    Args:
        job: a run's directory, or its config.
        named: layouts by text form; the run's own when empty.
        trust: whether a directory may name code.
    """
    if isinstance(job, RunConfig):
        config, run_layout = job, "" if job.layout == "auto" else job.layout
    else:
        path, run_layout = Path(job), ""
        config = run_config(path)
        refuse_code(path, config, trust)
        if (path / PLAN).is_file():
            run_layout = str(read_plan(path).layout)
    texts = list(named) or ([run_layout] if run_layout else [])
    if not texts:
        raise ConfigError("the recipe leaves the layout to the planner (auto): name layouts with --layout")
    layouts = [Layout.parse(text) for text in texts]
    for layout in layouts:
        if layout.is_lossy:
            raise ConfigError(
                f"--layout {layout}: a job is proven to 1e-9, and rounded numbers on the wire are another training; "
                "leave compress, compress_weights and compress_tokens out of --layout, and prove the rounding itself "
                f"by meshwright verify --model {config.model.name} --layout {layout}"
            )
    for layout, text in zip(layouts, named):
        if "precision" in text and layout.precision != "float64":
            raise ConfigError(
                f"--layout {text}: a job is proven in float64; drop precision={layout.precision}, and prove its steps "
                f"within rounding by meshwright verify --model {config.model.name} --layout {text}"
            )
    return config, layouts


def _layout_pairs(layouts: Sequence[Layout]) -> list[tuple[Layout, Layout]]:
    """Returns (trained, resumed) pairs in which each layout is trained under once and resumed under once."""
    if len(layouts) == 1:
        one_device = Layout(precision="float64")
        return (
            [(layouts[0], one_device), (one_device, layouts[0])]
            if layouts[0] != one_device
            else [(one_device, one_device)]
        )
    return list(zip(layouts, [*layouts[1:], layouts[0]]))


def case_of(
    config: RunConfig, layouts: Sequence[Layout], full: bool, steps: int, limit_s: float
) -> tuple[JobCase, str]:
    """Returns the job to prove and a sentence that describes it and its omissions."""
    token_set = prepare(text_config(config.model, config.data), say=None)
    model, omissions = config.model, []
    if not full and model.kind != "function":
        model, omissions = _small_clone(model, layouts), ["a small clone of the model"]
    build_unshrunk = partial(build_meta, config.model, vocab=token_set.vocab_size, context=config.data.sequence)
    has_documents = config.data.separates_documents and len(token_set.train.ends) > 1
    precisions = {layout.precision for layout in layouts}
    model = attention_to_prove(build_unshrunk, model, precisions, config.data.sequence, has_documents)
    row_multiple = math.lcm(*(layout.batch_unit for layout in layouts))
    rows, tokens = config.train.batch, config.data.sequence
    if not full:
        rows = min(rows, row_multiple * max(1, -(-ROWS // row_multiple)))
        tokens = tokens_with_targets(token_set, config.data, TOKENS)
        omissions += [f"{rows} of {config.train.batch} rows"] if rows < config.train.batch else []
        omissions += [f"{tokens} of {config.data.sequence} tokens a row"] if tokens < config.data.sequence else []
    scaled = dataclasses.replace(
        scaled_config(config, steps, rows),
        model=model,
        data=dataclasses.replace(config.data, sequence=tokens),
    )

    def build() -> BuiltModel:
        return build_meta(model, vocab=token_set.vocab_size, context=tokens)

    case = JobCase(config=scaled, build=build, data=token_set.path, timeout_s=limit_s)
    subject = f"{config.model.name} on {token_set.path}: {steps} steps of {rows} x {tokens} tokens, float64"
    subject += attention_text(config.model.attention, model.attention)
    narrow = sorted({layout.precision for layout in layouts if layout.is_mixed_precision})
    precision_note = (
        f"; float64 stands for {' and '.join(narrow)}, in which verify --model proves steps" if narrow else ""
    )
    return case, subject + (
        f"; instead of the run's own: {', '.join(omissions)} (--full proves all)" if omissions else ""
    ) + precision_note


def tokens_with_targets(token_set: TokenSet, data: DataConfig, most: int) -> int:
    """Returns the tokens of a proof's rows: ``most``, or more where no row of so few would have a target.

    Args:
        token_set: the prepared text.
        data: settings of the run, whose own rows are the longest.
        most: tokens where they suffice.
    """
    tokens = min(most, data.sequence)
    if data.resolved_packing == "stream":
        return tokens
    while tokens < data.sequence:
        try:
            for split in (token_set.train, token_set.validation):
                if len(split.tokens) > 1:
                    PackedRows(split, tokens, single=data.resolved_packing == "single")
        except DataError:
            tokens = min(2 * tokens, data.sequence)
        else:
            break
    return tokens


def _small_clone(model: ModelConfig, layouts: Sequence[Layout]) -> ModelConfig:
    return shrink_config(model, min_layers(layouts))
