"""Proves a whole job: feed, loader, schedule, clipping, AdamW, evaluation, checkpoint, resume under another layout.

`proof.verify` proves one step's mathematics. Here the trainer itself runs, as a run starts it: half of the steps under
one layout, a checkpoint, the other half under another layout from that checkpoint. Its metrics, its validation losses
and its last checkpoint are compared with `proof.plain_job`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from meshwright.checkpoint.store import CheckpointStore
from meshwright.errors import MeshwrightError, PlanError
from meshwright.json_types import JsonObject
from meshwright.launch.contract import RankContext
from meshwright.launch.devices import found_devices
from meshwright.launch.fork import ForkLauncher
from meshwright.models.build import BuiltModel, use_float64
from meshwright.models.deferred import retie
from meshwright.models.forward import model_forward
from meshwright.parallel.build import check
from meshwright.parallel.float64_ops import Float64Ops
from meshwright.proof.compare import part_error, relative, scales
from meshwright.proof.masks import Masks
from meshwright.proof.plain_job import (
    PlainAdaScale,
    PlainBatch,
    PlainJob,
    PlainOptimizer,
    PlainRows,
    PlainSchedule,
    train_job,
)
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import OptimizerConfig
from meshwright.train.hooks import Request, StepInfo
from meshwright.train.model_analysis import analyse_model, check_shapes
from meshwright.train.run_config import RunConfig
from meshwright.train.session import TrainJob, run_rank

BOUND = 1e-9
"""Largest relative error that passes, in float64."""
STEPS = 6
"""Optimizer steps of a proof, half of them under each layout."""
WARMUP = 2
"""Of those, steps with a rising rate."""
NOISE_EVERY = 2
"""Steps between two measurements of the noise that rates follow, where they do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCase:
    """What is proven."""

    config: RunConfig
    """The job, from `scaled_config`."""
    build: Callable[[], BuiltModel]
    """Makes the model on meta; called once in each process."""
    data: Path
    """The prepared text."""
    timeout_s: float = 600.0
    """Limit for each of the runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobVerdict:
    """How far a job under two layouts is from the plain loop; errors are relative."""

    layout: str
    """Of the first half."""
    resumed: str
    """Of the second half."""
    passed: bool
    errors: Mapping[str, float] = field(default_factory=dict)
    """The largest error of ``loss``, ``norm``, ``rate``, ``tokens``, ``total``, ``accuracy``, ``validation``,
    ``weights`` (those that aren't trained too) and ``moments``."""
    worst: str = ""
    """The tensor of the checkpoint that is furthest off."""
    refused: str = ""
    """Why the job couldn't run, if it couldn't."""

    def to_json(self) -> dict[str, object]:
        """Returns plain values; infinite errors become strings that JSON can hold."""
        plain = dataclasses.asdict(self)
        plain["errors"] = {name: value if math.isfinite(value) else str(value) for name, value in self.errors.items()}
        return plain


def scaled_config(config: RunConfig, steps: int = STEPS, rows: int | None = None) -> RunConfig:
    """Returns a run's config for a proof: its own text, rows, length, optimizer and loss; a schedule of few steps.

    The schedule keeps its shape, floor and share of decay, so that a few steps see it rise and fall. The run stops a
    step before its end, where it would read all of the text that is held out.

    Args:
        config: of the run.
        steps: optimizer steps of the proof; even.
        rows: of its global batch; those of the run when None.
    """
    half, rows, train, optimizer = steps // 2, rows or config.train.batch, config.train, config.optimizer
    warmup = min(WARMUP, steps - 1) if config.schedule.warmup_steps(train.steps) else 0
    train = dataclasses.replace(train, steps=steps + 1, epochs=0.0, batch=rows, sample="", sample_tokens=0)
    if optimizer.follows_noise:
        optimizer = dataclasses.replace(optimizer, lr_batch=max(1, rows * optimizer.lr_batch // config.train.batch))
        # Steps count by their gain: as many of the proof's as there may be before the run is over.
        train = dataclasses.replace(train, steps=steps * _most_gain(rows, optimizer) + 1, noise_scale=NOISE_EVERY)
    return dataclasses.replace(
        config,
        trials=0,
        train=train,
        optimizer=optimizer,
        schedule=dataclasses.replace(config.schedule, warmup=warmup, warmup_share=0.0),
        evaluation=dataclasses.replace(config.evaluation, every=half, rows=evaluation_rows(rows)),
        checkpoint=dataclasses.replace(config.checkpoint, every=0, mirror=""),
        recovery=dataclasses.replace(config.recovery, enabled=False, faults="", on_sick="skip", spike=0.0),
        monitor=config.monitor.without_output(),
    )


def _most_gain(rows: int, optimizer: OptimizerConfig) -> int:
    """Returns the most steps of the schedule that a step of ``rows`` rows counts as."""
    return -(-rows // optimizer.lr_batch) if optimizer.follows_noise else 1


def evaluation_rows(rows: int) -> int:
    """Returns the rows that a proof evaluates: one less than a batch's, so that a rank's last one is padding.

    Args:
        rows: of the global batch.
    """
    return max(1, rows - 1)


def verify_job(
    case: JobCase, pairs: Sequence[tuple[Layout, Layout]], on_verdict: Callable[[JobVerdict], None] | None = None
) -> list[JobVerdict]:
    """Runs the plain loop once and the job under each pair of layouts after it, on forked ranks of this machine.

    Args:
        case: the job.
        pairs: layout of the first half, and of the second; in float64.
        on_verdict: called with each verdict as it is reached.

    Returns:
        One verdict a pair; one that can't run is refused, with the reason.
    """
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="meshwright-job-") as folder:
        expected_path = Path(folder) / "plain.pt"
        with contextlib.suppress(MeshwrightError):
            case.build()  # imports the model's code, which every rank then finds in memory
        _launch(1, case, _plain_rank, expected_path)
        expected = torch.load(expected_path, map_location="cpu", weights_only=True)
        for number, (trained_layout, resumed_layout) in enumerate(pairs):
            run_dir = Path(folder) / f"run-{number}"
            try:
                for layout, until in ((trained_layout, _steps(case) // 2), (resumed_layout, _steps(case))):
                    _train_until(case, layout, run_dir, until)
                verdict = _compare_run(case, trained_layout, resumed_layout, run_dir, expected)
            except MeshwrightError as error:
                verdict = JobVerdict(
                    layout=str(trained_layout), resumed=str(resumed_layout), passed=False, refused=str(error)
                )
            verdicts.append(verdict)
            if on_verdict:
                on_verdict(verdict)
    return verdicts


def _steps(case: JobCase) -> int:
    train = case.config.train
    return (train.steps - 1) // _most_gain(train.batch, case.config.optimizer)


R = TypeVar("R")


def _launch(ranks: int, case: JobCase, entry: Callable[..., R], *args: object) -> R:
    launcher = ForkLauncher(ranks, devices=found_devices(ranks))
    return launcher.run(entry, case, *args, timeout_s=case.timeout_s)[0]


def _train_until(case: JobCase, layout: Layout, run_dir: Path, stop_step: int) -> None:
    """Trains up to a step as the command does, from the newest checkpoint of the run directory if it has one."""
    if layout.precision != "float64":
        raise PlanError(f"{layout}: a job is proven in float64; leave precision out")
    if layout.islands > 1:
        raise PlanError(
            f"{layout}: the plain job has no rounds to compare islands with; meshwright verify --layout {layout} "
            "proves their steps and joins"
        )
    built = case.build()
    check(layout, found_devices(layout.world).kind, len(built.structure.layers))
    analysis = analyse_model(built, layout)
    check_shapes(analysis, layout, case.config.train.batch, case.config.data.sequence)
    config = dataclasses.replace(case.config, run=str(run_dir), layout=str(layout), devices=layout.world)
    job = TrainJob(
        config=config,
        plan=Plan(layout=layout, prediction=Prediction(memory={}), ranks=layout.world, reason="to be proven"),
        model=built,
        run_dir=run_dir,
        data_dir=case.data,
        fingerprint="proof",
        header={},
        analysis=analysis,
        flops_per_token=0.0,
        hooks=(partial(_stop_after, stop_step),),
    )
    run_dir.mkdir(parents=True, exist_ok=True)
    launcher = ForkLauncher(layout.world, devices=found_devices(layout.world), label=layout.coordinates)
    launcher.run(run_rank, job, timeout_s=case.timeout_s)


def _stop_after(stop_step: int, info: StepInfo) -> Request:
    return Request.STOP if info.step >= stop_step else Request.NONE


def _plain_rank(context: RankContext, case: JobCase, path: Path) -> None:
    """Trains by the plain loop on this one rank and writes its records."""
    config, built, device = case.config, case.build(), torch.device(context.device)
    use_float64(built.module)
    module = built.module.to_empty(device=device)
    retie(module, built.recipe.ties)
    built.fill_buffers(module, device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            # Buffers keep their type, as under a layout: tables of angles are float32 in either.
            parameter.data = built.tensor(name).to(device=device, dtype=torch.float64)
    module.train()

    def forward(model: nn.Module, batch: PlainBatch, step: int) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            if model.training:
                name = f"{config.train.seed},{step}"
                stack.enter_context(Masks(model, built.structure.layers, len(batch.tokens), name))
            stack.enter_context(Float64Ops())
            positions = None if batch.positions is None else batch.positions.to(device)
            return model_forward(model, built.structure, batch.tokens.to(device), positions, positions is not None)

    torch.save(train_job(module, forward, _plain_job(case)), path)


def _plain_job(case: JobCase) -> PlainJob:
    config, steps = case.config, _steps(case)
    optimizer, schedule = config.optimizer, config.schedule
    return PlainJob(
        rows=PlainRows(
            case.data,
            rows=config.train.batch,
            sequence=config.data.sequence,
            seed=config.train.seed,
            documents=config.data.mask_documents,
            packing=config.data.resolved_packing,
        ),
        schedule=PlainSchedule(
            peak=optimizer.peak(config.train.batch),
            warmup=schedule.warmup or 0,
            steps=config.train.steps,
            shape=schedule.shape,
            floor=schedule.floor,
            decay_share=schedule.decay_share,
        ),
        optimizer=PlainOptimizer(
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            decay_all=optimizer.decay == "all",
            clip=optimizer.clip,
            largest_norm=config.recovery.largest_norm,
        ),
        adascale=PlainAdaScale(
            base_rows=optimizer.lr_batch,
            rows=config.train.batch,
            every=config.train.noise_scale,
            takes_root=optimizer.lr_rule == "adascale_sqrt",
        )
        if optimizer.follows_noise
        else None,
        steps=steps,
        evaluate=(steps // 2, steps),
        evaluation_rows=config.evaluation.rows,
    )


def _compare_run(
    case: JobCase, trained_layout: Layout, resumed_layout: Layout, run_dir: Path, expected: Mapping[str, Any]
) -> JobVerdict:
    """Compares metrics, events and the last checkpoint of a run directory with the plain loop's records.

    Raises:
        PlanError: when steps are missing, or the checkpoint holds a weight that the plain loop doesn't have.
    """
    steps = _steps(case)
    rows = {row["step"]: row for row in _read_jsonl(run_dir / "metrics.jsonl")}
    if sorted(rows) != list(range(1, steps + 1)):
        raise PlanError(f"the run's metrics have steps {sorted(rows)}, not 1 to {steps}")
    errors = {
        name: max(relative(rows[step + 1][key], expected[series][step]) for step in range(steps))
        for name, key, series in (
            ("loss", "loss", "losses"),
            ("norm", "grad_norm", "norms"),
            ("rate", "lr", "rates"),
            ("tokens", "tokens", "tokens"),
            ("total", "tokens_total", "totals"),
            ("accuracy", "accuracy", "accuracies"),
        )
    }
    evaluations = {row["step"]: row for row in _read_jsonl(run_dir / "events.jsonl") if row["kind"] == "evaluated"}
    errors["validation"] = max(
        relative(evaluations.get(step, {}).get(key, math.inf), value)
        for step, values in expected["validation"].items()
        for key, value in values.items()
    )
    store = CheckpointStore(run_dir / "checkpoints", case.config.checkpoint)
    checkpoint = store.find(steps)
    assert checkpoint is not None
    state = dict(store.read_full(checkpoint))
    worst_name, largest_error = "", -1.0
    if unknown_names := {name for name in state if not name.startswith("buffers/")} - expected["state"].keys():
        raise PlanError(
            f"the run's checkpoint holds {sorted(unknown_names)[:3]}, which the plain loop knows nothing of"
        )
    for kind, prefixes in (("weights", ("weights",)), ("moments", ("exp_avg", "exp_avg_sq"))):
        for prefix in prefixes:
            values = {name: value for name, value in expected["state"].items() if name.startswith(f"{prefix}/")}
            size = scales(values)
            for name, value in values.items():
                error = part_error(state[name], value, size[name]) if name in state else math.inf
                errors[kind] = max(errors.get(kind, 0.0), error)
                worst_name, largest_error = (name, error) if error > largest_error else (worst_name, largest_error)
    passed = max(errors.values()) <= BOUND
    return JobVerdict(
        layout=str(trained_layout), resumed=str(resumed_layout), passed=passed, errors=errors, worst=worst_name
    )


def _read_jsonl(path: Path) -> list[JsonObject]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
