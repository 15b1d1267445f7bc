"""Finds by trial on a small clone which terms a model's own loss has, and which buffers its forward changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from meshwright.autograd_helper import computed_by_helper
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.models.analysis.buffer_trial import MovingBuffer, find_moving_buffers
from meshwright.models.analysis.clone import (
    LARGEST_FUNCTION,
    Clone,
    copy_buffers,
    equal_tensors,
    make_clone,
    restore_buffers,
)
from meshwright.models.analysis.counted_trial import Runs, chooses_targets
from meshwright.models.analysis.end_trial import find_end_units
from meshwright.models.analysis.forward_trace import check_trial_memory, settling_trace
from meshwright.models.analysis.head_trial import HeadTrial, try_head
from meshwright.models.analysis.label_trial import find_labels
from meshwright.models.analysis.loss_coefficients import float_of, solve_coefficients, unexplained_loss
from meshwright.models.analysis.loss_extremes import (
    extreme_targets,
    is_cross_entropy,
    large_factors,
    reaches_logits,
    scaled_matrices,
)
from meshwright.models.analysis.objective import (
    OFFSETS,
    LossTerm,
    Objective,
    clone_failure,
    mean_cross_entropy,
    nothing_dropped,
    with_words,
)
from meshwright.models.analysis.outside_reads import OutsideRead, find_outside_reads, refuse_replaced_weights
from meshwright.models.analysis.row_trial import mixes_rows
from meshwright.models.analysis.target_trial import try_targets
from meshwright.models.build import BuiltModel
from meshwright.models.forward import IGNORED, ModelOutput, author_output
from meshwright.parallel.float64_ops import Float64Ops
from meshwright.parallel.keyed_random import seed_all
from meshwright.spec.end_units import EndUnits

ROWS = 4
"""Rows of a trial; means are tested on its first row and the others."""
SAMPLES = 6
"""Batches from which the factors of named terms are solved for."""
SCALES = (1.0, 8.0)
"""Factors on the clone's matrices: with small ones a router may choose the same for all tokens, and look linear."""
LENGTHS = (12, 8, 16, 64)
"""Candidate row lengths in tokens; the first on which the model runs is used."""
TOLERANCE = 1e-9
"""Largest relative difference between equal losses, in float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardTrial:
    """The results of a trial of a model's forward in training."""

    objective: Objective = field(default_factory=Objective)
    moving: tuple[MovingBuffer, ...] = ()
    mixes_rows: bool = False
    """Whether its logits of a row depend on the other rows of the call."""
    head: HeadTrial = HeadTrial()  # noqa: RUF009 - frozen
    """How its logits come about."""
    ends: EndUnits = EndUnits()  # noqa: RUF009 - frozen
    """Modules outside its layers that ZeRO may gather by themselves."""
    outside: tuple[OutsideRead, ...] = ()
    """Weights of its layers that something else than their layer reads."""


@computed_by_helper
def try_forward(built: BuiltModel, training: bool = True) -> ForwardTrial:
    """Runs a model's forward as its author calls it, on a small clone.

    Args:
        built: on meta; it stays unchanged.
        training: in training mode, else in evaluation mode.

    Raises:
        PlanError: for random numbers that can't be placed, in training mode.
        ConfigError: for a loss that can't be told from reported scalars, that no clone returns, or that only a trial
            would show for which there isn't the memory.
    """
    elements = sum(parameter.numel() for parameter in built.module.parameters())
    if built.config.kind == "function" and elements > LARGEST_FUNCTION:
        if (trace := settling_trace(built, LENGTHS[0])) is not None:
            return ForwardTrial(outside=trace.outside)
        check_trial_memory(built, elements)
    try:
        clone = make_clone(built)
        trial = _Trial(dataclasses.replace(clone, module=clone.module.train(training)))
        refuse_replaced_weights(trial.clone, trial.length, built.config.name)
        objective, moving = trial.objective(), trial.moving()
        clone = dataclasses.replace(trial.clone, objective=objective)
        ends, outside = find_end_units(clone, trial.length), find_outside_reads(clone, trial.length)
        head = try_head(built, trial.clone, objective, trial.length, changing=trial.find_changes(moving))
        mixing = trial.mixes_rows()
        return ForwardTrial(
            objective=objective, moving=moving, mixes_rows=mixing, head=head, ends=ends, outside=outside
        )
    except MeshwrightError:
        raise
    except Exception as error:
        reason = clone_failure(error)
        raise ConfigError(
            f"model '{built.config.name}': its loss can't be read, since a small clone doesn't run: {reason}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Sample:
    """A batch: tokens and targets, (B, S) int64 each."""

    tokens: torch.Tensor
    targets: torch.Tensor

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both."""
        return self.tokens, self.targets

    def part(self, rows: slice) -> _Sample:
        """Returns some rows of the batch."""
        return _Sample(self.tokens[rows], self.targets[rows])


class _Trial:
    """A clone under trial; its buffers are restored after each call."""

    def __init__(self, clone: Clone) -> None:
        self.clone = clone
        self.length = self._fitting_length()
        self._repeats: bool | None = None  # whether two calls in a row gave the same logits; None before that
        self._logits: torch.Tensor | None = None  # (ROWS, S, V) of the first sample, once they are there

    def objective(self) -> Objective:
        """Returns the terms of the model's loss."""
        structure = self.clone.structure
        if structure.target_argument is None:
            self._refuse_trained_scalars()
            return Objective()
        labels = find_labels(
            self.clone,
            self.length,
            rows=lambda seed: self._sample(seed).rows,
            run=lambda tokens, targets, labels: self._run_forward(_Sample(tokens, targets), labels),
        )
        if not labels:
            return Objective()
        samples = [self._sample(seed) for seed in range(SAMPLES)]
        first_output = self._run_forward(samples[0], labels)
        if first_output.logits is None:
            return self._objective_of_loss(labels, samples)
        self._logits = first_output.logits.detach()
        # first the common case: the loss is the cross-entropy alone
        as_counted = Objective(labels=labels, terms=(LossTerm(name="rest", coefficient=1.0, mean="rows", exact=False),))
        output = self._run_forward(samples[0], labels)
        self._repeats = equal_tensors(first_output.logits, output.logits)
        is_entropy = is_cross_entropy(output, as_counted.counted(samples[0].targets), self._trained(), TOLERANCE)
        targets = try_targets(self.clone, self.length, self._excess_of(as_counted) if is_entropy else None)
        if targets.shown or (targets.alike and self._is_cross_entropy_of_extremes(as_counted, samples[1])):
            return Objective(labels=labels)
        samples = [
            _Sample(*(with_words(ids, targets.words, 2 * number + place) for place, ids in enumerate(sample.rows)))
            for number, sample in enumerate(samples)
        ]
        outputs = [self._run_forward(sample, labels) for sample in samples]
        # otherwise explain the difference from the cross-entropy by scalars that the model returns
        extra_losses = [_extra_loss(as_counted, sample, output) for sample, output in zip(samples, outputs)]
        scale = max(abs(float_of(output.loss)) for output in outputs)
        # A mean over no target is NaN, of which nothing can be solved for.
        is_known = all(math.isfinite(value) for value in extra_losses)
        coefficients = solve_coefficients(extra_losses, outputs, scale) if is_known else {}
        terms = [
            LossTerm(name=name, coefficient=coefficient, mean="", exact=False)
            for name, coefficient in coefficients.items()
        ]
        if not terms or unexplained_loss(extra_losses, outputs, coefficients) > TOLERANCE * scale:
            terms.append(LossTerm(name="rest", coefficient=1.0, mean="", exact=False))
        objective = self._find_means(Objective(labels=labels, terms=tuple(terms)), samples, scale)
        chosen = Objective(labels=labels, counts_targets=True, words=targets.words)
        if not objective.exact and self._chooses_targets(chosen, samples):
            return chosen
        return dataclasses.replace(objective, words=targets.words)

    def moving(self) -> tuple[MovingBuffer, ...]:
        """Returns the buffers that forward changes."""
        labels = "aligned" if self.clone.structure.target_argument else ""

        def run_forward(rows: tuple[torch.Tensor, torch.Tensor]) -> None:
            self._run_forward(_Sample(*rows), labels, keep=True)

        return find_moving_buffers(self.clone.module, run_forward, self._sample(0).rows, self._sample(1).rows)

    def mixes_rows(self) -> bool:
        """Returns whether logits of a row depend on the other rows of the call."""
        labels, sample = "aligned" if self.clone.structure.target_argument else "", self._sample(0)
        with torch.no_grad():
            logits = self._run_forward(sample, labels).logits if self._logits is None else self._logits
            if logits is None or len(logits) != ROWS:
                return False
            last_row = sample.part(slice(ROWS - 1, ROWS))
            return mixes_rows(logits, lambda seed: self._run_forward(last_row, labels, seed=seed).logits)

    def find_changes(self, moving: Sequence[MovingBuffer]) -> str:
        """Returns why logits may change from call to call, in a clause; "" where they don't.

        Args:
            moving: buffers that forward changes.
        """
        prefixes = tuple(f"{layer}." for layer in self.clone.structure.layers)
        for buffer in moving:
            if not buffer.name.startswith(prefixes):
                return f"its forward changes the buffer '{buffer.name}' outside of its layers"
        if self._repeats is None:
            labels = "aligned" if self.clone.structure.target_argument else ""
            first, second = (self._run_forward(self._sample(0), labels).logits for _ in range(2))
            self._repeats = first is None or equal_tensors(first, second)
        if not self._repeats:
            return "two calls of its forward with the same rows and random numbers give other logits"
        return ""

    def _excess_of(self, objective: Objective) -> Callable[[torch.Tensor, torch.Tensor], float]:
        """Returns a function of tokens and targets, (B, S) int64: the loss's relative distance from cross-entropy."""

        def excess(tokens: torch.Tensor, targets: torch.Tensor) -> float:
            with torch.no_grad():
                output = self._run_forward(_Sample(tokens, targets), objective.labels)
                assert output.logits is not None
                entropy = float_of(mean_cross_entropy(output.logits, objective.counted(targets)))
            difference = abs(float_of(output.loss) - entropy)
            return 0.0 if difference <= TOLERANCE * abs(entropy) else difference / abs(entropy)

        return excess

    def _fitting_length(self) -> int:
        """Returns the first row length, in tokens, on which the model runs."""
        structure = self.clone.structure
        # some configs say -1 where there is no limit
        limit = max(0, structure.positions or structure.context or 0)
        lengths = [length for length in LENGTHS if not limit or length <= limit] or [limit or LENGTHS[0]]
        first_error: Exception | None = None
        for self.length in dict.fromkeys([*lengths, *([limit] if limit and limit <= 256 else [])]):
            try:
                self._run_forward(self._sample(0), "aligned" if structure.target_argument else "")
                return self.length
            except MeshwrightError:
                raise
            except Exception as failure:
                first_error = first_error or failure
        assert first_error is not None
        raise first_error

    def _sample(self, seed: int) -> _Sample:
        """Draws random rows; each has another number of targets."""
        generator = torch.Generator().manual_seed(20 + seed)
        shape = (ROWS, self.length)
        tokens, targets = (torch.randint(self.clone.vocab, shape, generator=generator) for _ in range(2))
        # the first and the last token always have a target
        inner_tokens = max(0, self.length - 2)
        for row in range(1, ROWS):
            ignored_tokens = torch.randperm(inner_tokens, generator=generator)[: row * inner_tokens // (ROWS + 1)]
            targets[row, 1 + ignored_tokens] = IGNORED
        return _Sample(tokens, targets)

    def _run_forward(self, sample: _Sample, labels: str, keep: bool = False, seed: int = 0) -> ModelOutput:
        """Runs forward in float64, with nothing dropped."""
        buffers_before = {} if keep else copy_buffers(self.clone.module)
        # the same draws at each call, so that two calls differ by their arguments alone
        seed_all(seed)
        with Float64Ops(), nothing_dropped():
            output = author_output(self.clone.module, self.clone.structure, sample.tokens, sample.targets, labels)
        if not keep:
            restore_buffers(self.clone.module, buffers_before)
        return output

    def _refuse_trained_scalars(self) -> None:
        """Refuses a trained scalar beside logits in a model without targets: its role in the loss is unknown."""
        output = self._run_forward(self._sample(0), "")
        scalars = dict(output.scalars) | ({"loss": output.loss} if output.loss is not None else {})
        trained = [name for name, item in scalars.items() if item.requires_grad]
        if trained and output.logits is None:
            return
        if trained:
            raise ConfigError(
                f"the model's forward gives logits and a scalar with a gradient ({', '.join(trained)}), but takes no "
                "targets: nothing says how the scalar enters the loss; take targets (an argument targets or labels) "
                "and return the whole loss beside the logits, or detach the scalar"
            )

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.clone.module.parameters() if parameter.requires_grad]

    def _is_cross_entropy_of_extremes(self, objective: Objective, sample: _Sample) -> bool:
        """Returns whether it stays the cross-entropy of large logits, and of targets that are certain or unlikely.

        What a loss does with a probability, a limit of its terms, a penalty of large logits: none shows in logits of
        weights that have learned nothing.
        """
        for factor in self._factors(sample, objective.labels):
            with scaled_matrices(self.clone.module, factor):
                logits = self._run_forward(sample, objective.labels).logits
                assert logits is not None
                targets = extreme_targets(logits, sample.targets)
                output = self._run_forward(_Sample(sample.tokens, targets), objective.labels)
                if not is_cross_entropy(output, objective.counted(targets), self._trained(), TOLERANCE):
                    return False
        return True

    def _factors(self, sample: _Sample, labels: str) -> tuple[float, float]:
        return large_factors(self.clone.module, lambda: self._run_forward(sample, labels).logits)

    def _chooses_targets(self, objective: Objective, samples: Sequence[_Sample]) -> bool:
        """Returns whether the loss is a mean over targets that its own code chooses, and these show in 16 bits too."""
        if not reaches_logits(self.clone, *samples[0].rows, objective.labels, torch.bfloat16):
            return False
        factors = self._factors(samples[0], objective.labels)
        runs = Runs(
            factors=factors,
            forward=lambda tokens, targets: self._run_forward(_Sample(tokens, targets), objective.labels),
            trained=self._trained(),
            scaled=partial(scaled_matrices, self.clone.module),
        )
        return chooses_targets(runs, objective, [sample.rows for sample in samples])

    def _objective_of_loss(self, labels: str, samples: Sequence[_Sample]) -> Objective:
        """Returns the objective of a model that returns a loss and no logits."""
        term = LossTerm(name="loss", coefficient=1.0, mean="", exact=False)
        objective = Objective(labels=labels, logits=False, terms=(term,))
        scale = abs(float_of(self._run_forward(samples[0], labels).loss))
        return self._find_means(objective, samples, scale)

    def _find_means(self, objective: Objective, samples: Sequence[_Sample], scale: float) -> Objective:
        """Finds the set over which each term is a mean: a batch's value must follow from those of its row slices."""
        # Two batches at each scale of the matrices: what fits all four by chance is no mean.
        trial_samples = [samples[0], samples[1]] * len(SCALES)
        # the whole batch, its first row, the others
        row_slices = (slice(0, ROWS), slice(0, 1), slice(1, ROWS))
        values = []
        for trial_index, sample in enumerate(trial_samples):
            with scaled_matrices(self.clone.module, SCALES[trial_index // 2]):
                values.append([self._term_values(objective, sample.part(rows)) for rows in row_slices])
        terms = []
        for term_index, term in enumerate(objective.terms):
            decided = dataclasses.replace(term, mean="rows")
            if not any(abs(value[term_index]) > TOLERANCE * scale for slice_triple in values for value in slice_triple):
                # a term with value 0 doesn't reveal the set of its mean
                terms.append(decided)
                continue
            for mean in ("targets", "rows", *(f"targets+{offset}" for offset in range(1, OFFSETS + 1))):
                candidate = dataclasses.replace(term, mean=mean, exact=True)

                def fits(trial_index: int, candidate: LossTerm = candidate, term_index: int = term_index) -> bool:
                    full_value, *slice_values = (value[term_index] for value in values[trial_index])
                    weights = [
                        float(candidate.weight(objective.counted(trial_samples[trial_index].part(rows).targets)))
                        for rows in row_slices[1:]
                    ]
                    total = sum(weights)
                    # a mean over a set is the mean of the slices' means, weighted by the set's size in each
                    weighted_mean = (
                        sum(weight * slice_value for weight, slice_value in zip(weights, slice_values)) / total
                        if total
                        else float("nan")
                    )
                    return abs(full_value - weighted_mean) <= TOLERANCE * max(scale, abs(full_value))

                if all(fits(trial_index) for trial_index in range(len(trial_samples))):
                    decided = candidate
                    break
            terms.append(decided)
        return dataclasses.replace(objective, terms=tuple(terms))

    def _term_values(self, objective: Objective, sample: _Sample) -> list[float]:
        """Returns the value of each term on a batch."""
        output = self._run_forward(sample, objective.labels)
        entropy = torch.zeros(())
        if output.logits is not None:
            entropy = mean_cross_entropy(output.logits, objective.counted(sample.targets))
        return [float_of(value) for value in objective.values(output, entropy)]


def _extra_loss(objective: Objective, batch: _Sample, output: ModelOutput) -> float:
    """Returns the loss minus the cross-entropy of its logits."""
    assert output.logits is not None
    return float_of(output.loss) - float_of(mean_cross_entropy(output.logits, objective.counted(batch.targets)))
