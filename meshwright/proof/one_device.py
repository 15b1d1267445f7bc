"""The reference of a proof: the model on one device, in float64 and in a layout's precision."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.launch.contract import RankContext
from meshwright.launch.devices import found_devices
from meshwright.launch.fork import ForkLauncher
from meshwright.models.analysis.objective_trial import ForwardTrial
from meshwright.models.build import use_float64
from meshwright.models.deferred import retie
from meshwright.models.forward import IGNORED, author_output, model_output
from meshwright.parallel.document_attention import document_bounds
from meshwright.parallel.float64_ops import Float64Ops
from meshwright.parallel.model_checkpointing import without_checkpoints
from meshwright.parallel.moving_buffers import MovingBuffers
from meshwright.parallel.tf32 import use_tf32
from meshwright.proof.case import Case
from meshwright.proof.compare import EXACT
from meshwright.proof.masks import Masks
from meshwright.proof.plain_islands import train_islands_plainly
from meshwright.proof.reference import Forward, Trace, find_random_modules, measure_batch_spread, train_plainly
from meshwright.proof.rounding import DRAWS, UNITS, ErrorStatistics
from meshwright.spec.layout import Layout
from meshwright.spec.layout_fields import FLOAT8_RECIPES
from meshwright.spec.placement import Span, halved
from meshwright.torch_compat.torchao_import import import_torchao
from meshwright.train.feed import MicroBatch

SEED = 0
"""Of the random numbers in forward: dropout's."""
COMPUTE = {
    **dict.fromkeys(("float32", "tf32"), torch.float32),
    **dict.fromkeys(("bf16", *FLOAT8_RECIPES), torch.bfloat16),
    "fp16": torch.float16,
}
"""Type of forward and backward by precision, outside of products in another."""
SCALES = tuple(2.0**power for power in range(16, -1, -1))
"""Loss scales of fp16, tried in turn as a scaler halves them; the first is that of `train.scaler`."""


class References:
    """Reference runs on one device in one precision, one for each way in which layouts divide the rows into calls.

    A model whose loss depends on which rows lie in one call is called with the same rows as under the layout; any other
    with the whole batch.
    """

    def __init__(self, case: Case, folder: Path, precision: str, trial: ForwardTrial) -> None:
        self._case, self._folder, self._precision, self._trial = case, folder, precision, trial
        self._reference_of_spans: dict[tuple[tuple[Span, ...], ...], tuple[Path, str]] = {}

    def reference_for(self, layout: Layout) -> tuple[Path, str]:
        """Returns the file of the reference for a layout, and why there is none."""
        rows = len(self._case.batches[0].tokens)
        spans: tuple[tuple[Span, ...], ...] = (((0, rows),),)
        if not self._trial.objective.exact or layout.islands > 1:
            try:
                layout.check_batch(rows)
            except PlanError as error:
                return Path(), str(error)
            spans = tuple(self._island_spans(layout, island, rows) for island in range(layout.islands))
        if spans not in self._reference_of_spans:
            path = self._folder / f"reference-{self._precision}-{len(self._reference_of_spans)}.pt"
            arguments = (self._case, path, self._precision, self._trial, spans)
            launcher = ForkLauncher(1, devices=found_devices(1, self._case.device))
            reason = launcher.run(_reference, *arguments, timeout_s=self._case.timeout_s)[0]
            self._reference_of_spans[spans] = path, reason
        return self._reference_of_spans[spans]

    def _island_spans(self, layout: Layout, island: int, rows: int) -> tuple[Span, ...]:
        """Returns the rows of each call that one device makes for an island: one, unless the loss depends on calls."""
        ranks = [rank for rank in range(layout.world) if layout.island(rank) == island]
        readers = sorted({layout.span(rank, rows) for rank in ranks})
        if self._trial.objective.exact:
            return ((readers[0][0], readers[-1][1]),)
        sizes = [(start, (stop - start) // layout.microbatches) for start, stop in readers]
        spans = [
            (start + number * size, start + (number + 1) * size)
            for start, size in sizes
            for number in range(layout.microbatches)
        ]
        if layout.ep_halves:
            spans = [half for start, stop in spans for half in halved((start, stop))]
        return tuple(spans)


def _reference(
    context: RankContext,
    case: Case,
    path: Path,
    precision: str,
    trial: ForwardTrial,
    islands: Sequence[Sequence[Span]],
) -> str:
    """Trains on this one rank and writes losses, norms, gradients and weights; returns why it can't be a reference."""
    torch.set_num_threads(1)  # as every rank has: how threads share a sum is part of its rounding
    device = _OneDevice(case, trial, [span for spans in islands for span in spans], torch.device(context.device))
    module = device.start(wide=True)
    try:
        reason = _random_numbers_reason(module, device.forward, device.batches[0][0], case.training)
    except RuntimeError as error:
        if "same dtype" not in str(error):
            raise
        reason = (
            f"one device alone can't run it in float64, so that there is nothing to compare with: {error}; a buffer, "
            "which keeps its type, is multiplied with weights; nearest that works: forward converts it to the type of "
            "its input, as buffer.to(x.dtype)"
        )
    if reason:
        return reason
    calls = [len(spans) for spans in islands]
    truths = device.train_islands(module, calls) if len(calls) > 1 else [device.train(module)]
    if fault := _nonfinite_reason(truths):
        return f"one device alone can't train it, so that there is nothing to compare with: {fault} in float64"
    if not trial.objective.plain and not any(norm for truth in truths for norm in truth.norms):
        return (
            "one device alone learns nothing of these rows, so that there is nothing to compare with: every gradient "
            "is 0; nearest that works: text of which the model's own loss counts some targets"
        )
    own: list[dict[str, Any]] = [
        {"losses": truth.losses, "norms": truth.norms, "gradients": truth.gradients} for truth in truths
    ]
    saved: dict[str, Any] = {"weights": truths[0].weights, "buffers": truths[0].buffers}
    if precision != "float64":
        del module
        for scale in SCALES if precision == "fp16" else SCALES[-1:]:
            # Each scale has its own draws: those before one that failed were made under another scale.
            errors = [ErrorStatistics(truth) for truth in truths]
            fault = _add_rounding_errors(device, precision, scale, errors, calls)
            if not fault:
                break
        else:
            return (
                f"one device alone can't train it in {precision}, so that there is nothing to compare with: {fault}; "
                "nearest that works: precision=float32"
            )
        saved["scale"] = scale
        for values, statistics in zip(own, errors):
            values["plain"] = statistics.mean_errors
    torch.save(saved | own[0] | ({"islands": own} if len(own) > 1 else {}), path)
    return ""


def _add_rounding_errors(
    device: _OneDevice, precision: str, scale: float, errors: Sequence[ErrorStatistics], calls: Sequence[int]
) -> str:
    """Trains in a low precision `DRAWS` times and adds the errors to the statistics; returns what isn't finite.

    Args:
        device: trains.
        precision: of forward and backward.
        scale: of the loss.
        errors: of each island.
        calls: for each island in how many of the calls of a batch it takes part.
    """
    for draw in range(DRAWS):
        # The first draw is that of any device; the others round other numbers, as near to the weights.
        shake = (UNITS[precision] / 2 if draw else 0.0, draw)
        module, low = device.start(wide=False), (COMPUTE[precision], scale, shake)
        if precision in FLOAT8_RECIPES:
            device.convert_to_float8(module, FLOAT8_RECIPES[precision])
        if precision == "tf32":
            use_tf32(module)
        traces = device.train_islands(module, calls, *low) if len(calls) > 1 else [device.train(module, *low)]
        if fault := _nonfinite_reason(traces):
            return fault
        for statistics, trace in zip(errors, traces):
            statistics.add(trace)
    return ""


def _nonfinite_reason(traces: Sequence[Trace]) -> str:
    """Returns the first loss or gradient norm that isn't finite, in words; "" for none."""
    for trace in traces:
        for step, values in enumerate(zip(trace.losses, trace.norms)):
            for quantity, value in zip(("loss", "gradients' norm"), values):
                if not math.isfinite(value):
                    return f"the {quantity} of step {step} is {value}"
    return ""


class _OneDevice:
    """The model of a proof on one device, without any parallelism.

    Args:
        case: model and data.
        trial: of its forward.
        spans: rows of each call.
        device: where it computes.
    """

    def __init__(self, case: Case, trial: ForwardTrial, spans: Sequence[Span], device: torch.device) -> None:
        self._case, self._trial, self._device = case, trial, device
        objective = trial.objective
        self._labels = "" if objective.plain and objective.labels == "shifted" else objective.labels
        self.batches = [
            [_rows_of(to_device(batch, device), span, self._labels == "shifted") for span in spans]
            for batch in case.batches
        ]
        self._step_and_row_of_batch = {
            id(microbatch): (step, span[0])
            for step, microbatches in enumerate(self.batches)
            for microbatch, span in zip(microbatches, spans)
        }
        self._wide = False

    def start(self, wide: bool) -> nn.Module:
        """Returns the model with its first weights, in float64 or float32."""
        self._built, self._wide = self._case.build(), wide
        built, device = self._built, self._device
        if wide:
            use_float64(built.module)
        module = built.module.to_empty(device=device)
        retie(module, built.recipe.ties)
        built.fill_buffers(module, device)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                # Buffers keep their type, as under a layout: tables of angles are float32 in either.
                parameter.data = built.tensor(name).to(device=device, dtype=torch.float64 if wide else torch.float32)
        if wide:
            MovingBuffers([module], [buffer.name for buffer in self._trial.moving]).widen()
        return module

    def convert_to_float8(self, module: nn.Module, recipe: str) -> None:
        """Converts the linear modules of the layers as a user of torchao does, by a call of its own."""
        torchao = import_torchao("torchao.float8")
        layers = tuple(f"{layer}." for layer in self._built.structure.layers)
        config = torchao.Float8LinearConfig.from_recipe_name(recipe)
        config = dataclasses.replace(config, emulate=self._device.type == "cpu", pad_inner_dim=True)

        def is_converted(child: nn.Module, name: str) -> bool:
            sizes = child.weight.shape if isinstance(child, nn.Linear) else (1,)
            return name.startswith(layers) and all(size % 16 == 0 for size in sizes)

        torchao.convert_to_float8_training(module, config=config, module_filter_fn=is_converted)

    def train(
        self,
        module: nn.Module,
        compute: torch.dtype | None = None,
        scale: float = 1.0,
        shake: tuple[float, int] = (0.0, 0),
    ) -> Trace:
        """Trains the module that was started last; as `train_plainly`."""
        case = self._case
        return train_plainly(
            module, self.call, self.batches, case.recipe, case.training, case.compared_steps, compute, scale, shake
        )

    def train_islands(
        self,
        module: nn.Module,
        calls: Sequence[int],
        compute: torch.dtype | None = None,
        scale: float = 1.0,
        shake: tuple[float, int] = (0.0, 0),
    ) -> list[Trace]:
        """Trains the module that was started last as several islands, by `train_islands_plainly`.

        Args:
            module: in the dtype of the proof.
            calls: for each island in how many of the calls of a batch it takes part.
            compute: type of forward and backward; None for the module's own.
            scale: factor on the loss in backward.
            shake: as in `train_plainly`.
        """
        case = self._case
        starts = [sum(calls[:island]) for island in range(len(calls))]
        batches = [[parts[start : start + count] for start, count in zip(starts, calls)] for parts in self.batches]
        outer, compared = case.outer, case.compared_steps
        return train_islands_plainly(
            module, self.call, batches, case.recipe, outer, case.training, compared, compute, scale, shake
        )

    def call(self, model: nn.Module, batch: MicroBatch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns (logits (B, S, V) or None, loss () or None), as the model's own code gives them."""
        structure = self._built.structure
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                without_checkpoints()
            )  # a checkpoint changes no number, and none is drawn again in backward
            if model.training:
                step, first_row = self._step_and_row_of_batch[id(batch)]
                stack.enter_context(Masks(model, structure.layers, len(batch.tokens), f"{SEED},{step}", first_row))
            stack.enter_context(Float64Ops() if self._wide else contextlib.nullcontext())
            masked = batch.positions is not None
            arguments = (model, structure, batch.tokens, batch.targets)
            if self._labels:
                output = author_output(*arguments, self._labels, batch.positions, masked)
            else:
                output = model_output(*arguments, batch.positions, masked)
            return output.logits, output.loss

    def forward(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        """Returns logits (B, S, V), or the loss () of a model that gives nothing else."""
        logits, loss = self.call(model, batch)
        output = logits if logits is not None else loss
        assert output is not None
        return output


_KEPT_CURE = "nearest that works: a count in a buffer (register_buffer), random numbers from torch"
"""What the author of a model that keeps something from call to call can write in its place."""


def _random_numbers_reason(module: torch.nn.Module, forward: Forward, batch: MicroBatch, training: bool) -> str:
    """Returns why a model whose runs differ can't be compared (it draws random numbers); "" for any other."""
    difference = measure_batch_spread(module, forward, batch, training)
    if difference <= EXACT:
        return ""
    cure = "take what draws them out of the model"
    if training and measure_batch_spread(module, forward, batch, training=False) <= EXACT:
        cure = "nearest that works: verify it in evaluation mode, where it draws none (--training false)"
    module.train(training)
    where = find_random_modules(module, forward, batch)
    if not where:
        return (
            f"two runs of its forward on one device with the same rows and buffers differ by {difference:.1e}, and a "
            f"proof needs {EXACT:g}, though it draws no random numbers of torch's: it keeps something from call to "
            f"call in a plain attribute, or draws from another generator; {_KEPT_CURE}"
        )
    return (
        f"its forward draws random numbers in {'training' if training else 'evaluation'}, in {where}: two runs of it "
        f"on one device differ by {difference:.1e}, and a proof needs {EXACT:g}; {cure}"
    )


def _rows_of(batch: MicroBatch, span: Span, model_shifts: bool) -> MicroBatch:
    """Returns some rows of a batch; the last token of a row has no target where the model's code shifts its labels."""
    rows = slice(*span)
    positions = None if batch.positions is None else batch.positions[rows]
    targets = batch.targets[rows]
    if model_shifts:
        targets = targets.clone()
        targets[:, -1] = IGNORED
    return MicroBatch(batch.tokens[rows], targets, positions)


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Returns a batch on a device; the host has counted its documents, as in a run on GPUs."""
    tokens, targets = batch.tokens.to(device), batch.targets.to(device)
    if batch.positions is None or device.type == "cpu":
        return MicroBatch(tokens, targets, batch.positions)
    return MicroBatch(tokens, targets, batch.positions.to(device), document_bounds(batch.positions).to(device))
