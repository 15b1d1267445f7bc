"""Finds by trial on a small clone what a model's own loss is made of, and which of its buffers forward changes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from meshwright.autograd_helper import computed_by_helper
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.models.build import BuiltModel
from meshwright.models.forward import IGNORED, ModelOutput, author_output
from meshwright.models.objective import OFFSETS, LossTerm, Objective, mean_cross_entropy, nothing_dropped
from meshwright.models.table import Clone, clone_of
from meshwright.parallel.float64_ops import Float64Ops

LARGE = 1 << 28
"""Elements beyond which a function's model isn't tried, for it can't be shrunk."""
ROWS = 4
"""Rows of a trial, of which the first is one part and the others are another."""
SAMPLES = 6
"""Batches from which the factors of named terms are solved for."""
SCALES = (1.0, 8.0)
"""Factors on the clone's matrices: with small ones a router may choose the same for all tokens, and look linear."""
LENGTHS = (12, 8, 16, 64)
"""Tokens of a row: the first that the model takes."""
TOLERANCE = 1e-9
"""Largest relative difference between equal losses, in float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MovingBuffer:
    """A buffer that forward changes while it trains."""

    name: str
    data: bool
    """Whether what it becomes depends on the tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardTrial:
    """What a trial of a model's forward, in training, has shown."""

    objective: Objective = field(default_factory=Objective)
    moving: tuple[MovingBuffer, ...] = ()


@computed_by_helper
def try_forward(built: BuiltModel, training: bool = True) -> ForwardTrial:
    """Runs a model's forward as its author does, on a small clone.

    Args:
        built: on meta; it stays as it is.
        training: in training mode, else in evaluation mode.

    Raises:
        PlanError: for random numbers that can't be placed, in training mode.
        ConfigError: for a loss that can't be told apart from what the model reports, or that no clone gives.
    """
    elements = sum(item.numel() for item in built.module.parameters())
    if built.config.kind == "function" and elements > LARGE:
        return ForwardTrial()
    try:
        clone = clone_of(built)
        for part in clone.module.modules():
            for key, item in part._buffers.items():
                if item is not None and item.is_floating_point() and key not in part._non_persistent_buffers_set:
                    # Running statistics take the type of what they are of; tables of positions keep the model's.
                    part._buffers[key] = item.double()
        trial = _Trial(dataclasses.replace(clone, module=clone.module.train(training)))
        return ForwardTrial(objective=trial.objective(), moving=trial.moving())
    except MeshwrightError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(
            f"model '{built.config.name}': its loss can't be read, since a small clone doesn't run: {why}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Sample:
    tokens: torch.Tensor
    targets: torch.Tensor

    def part(self, rows: slice) -> _Sample:
        return _Sample(self.tokens[rows], self.targets[rows])


class _Trial:
    """A clone and what it answers; its buffers are put back after each call."""

    def __init__(self, clone: Clone) -> None:
        self._clone = clone
        self._length = self._fitting_length()

    def objective(self) -> Objective:
        """Returns what the loss is made of."""
        structure = self._clone.structure
        if structure.target_argument is None:
            self._check_scalars()
            return Objective()
        labels = self._labels()
        if not labels:
            return Objective()
        samples = [self._sample(seed) for seed in range(SAMPLES)]
        first = self._call(samples[0], labels)
        if first.logits is None:
            return self._loss_alone(labels, samples)
        as_counted = Objective(labels=labels, terms=(LossTerm(name="rest", coefficient=1.0, mean="rows", exact=False),))
        if self._is_cross_entropy(as_counted, samples[0], first):
            return Objective(labels=labels)
        outputs = [first, *(self._call(sample, labels) for sample in samples[1:])]
        rests = [_rest(as_counted, sample, output) for sample, output in zip(samples, outputs)]
        scale = max(abs(_number(output.loss)) for output in outputs)
        coefficients = _coefficients(rests, outputs, scale)
        terms = [LossTerm(name=name, coefficient=c, mean="", exact=False) for name, c in coefficients.items()]
        if not terms or _unexplained(rests, outputs, coefficients) > TOLERANCE * scale:
            terms.append(LossTerm(name="rest", coefficient=1.0, mean="", exact=False))
        return self._with_means(Objective(labels=labels, terms=tuple(terms)), samples, scale)

    def moving(self) -> tuple[MovingBuffer, ...]:
        """Returns the buffers that forward changes."""
        before = _buffers(self._clone.module)
        if not before:
            return ()
        after = []
        for seed in (0, 1):
            self._call(self._sample(seed), "aligned" if self._clone.structure.target_argument else "", keep=True)
            after.append(_buffers(self._clone.module))
            _put_back(self._clone.module, before)
        moved = [name for name in after[0] if not _same(after[0][name], before.get(name))]
        return tuple(MovingBuffer(name=name, data=not _same(after[0][name], after[1].get(name))) for name in moved)

    def _fitting_length(self) -> int:
        """Tokens of a row that the model takes."""
        structure = self._clone.structure
        most = max(0, structure.positions or structure.context or 0)  # some configs say -1 where there is no limit
        lengths = [length for length in LENGTHS if not most or length <= most] or [most or LENGTHS[0]]
        error: Exception | None = None
        for self._length in dict.fromkeys([*lengths, *([most] if most and most <= 256 else [])]):
            try:
                self._call(self._sample(0), "aligned" if structure.target_argument else "")
                return self._length
            except MeshwrightError:
                raise
            except Exception as failed:
                error = error or failed
        assert error is not None
        raise error

    def _sample(self, seed: int) -> _Sample:
        """Made-up rows, each with targets of another number."""
        draw = torch.Generator().manual_seed(20 + seed)
        shape = (ROWS, self._length)
        tokens, targets = (torch.randint(self._clone.vocab, shape, generator=draw) for _ in range(2))
        inside = max(0, self._length - 2)  # the first and the last token always have a target
        for row in range(1, ROWS):
            places = torch.randperm(inside, generator=draw)[: row * inside // (ROWS + 1)]
            targets[row, 1 + places] = IGNORED
        return _Sample(tokens, targets)

    def _call(self, sample: _Sample, labels: str, keep: bool = False) -> ModelOutput:
        """Runs forward in float64, with nothing dropped."""
        before = {} if keep else _buffers(self._clone.module)
        torch.manual_seed(0)
        with Float64Ops(), nothing_dropped():
            output = author_output(self._clone.module, self._clone.structure, sample.tokens, sample.targets, labels)
        if not keep:
            _put_back(self._clone.module, before)
        return output

    def _check_scalars(self) -> None:
        output = self._call(self._sample(0), "")
        given = dict(output.scalars) | ({"loss": output.loss} if output.loss is not None else {})
        trained = [name for name, item in given.items() if item.requires_grad]
        if trained and output.logits is None:
            return
        if trained:
            raise ConfigError(
                f"the model's forward gives logits and a scalar with a gradient ({', '.join(trained)}), but takes no "
                "targets: nothing says how the scalar enters the loss; take targets (an argument targets or labels) "
                "and return the whole loss beside the logits, or detach the scalar"
            )

    def _labels(self) -> str:
        """Finds how forward takes targets: where it doesn't look at the first of a row, its code shifts them."""
        sample = self._sample(0)
        first, any_ = sample.targets.clone(), sample.targets.clone()
        first[:, 0] = (first[:, 0] + 1) % self._clone.vocab
        any_[:, 1:] = torch.where(any_[:, 1:] == IGNORED, IGNORED, (any_[:, 1:] + 1) % self._clone.vocab)
        ways = ("shift_labels", "aligned") if self._clone.structure.transformers else ("aligned",)
        matters = False
        for labels in ways:
            try:
                plain = self._call(sample, labels).loss
            except TypeError:
                continue  # its forward takes no shift_labels
            if plain is None:
                return ""  # it takes targets, and gives no loss
            changed = self._call(_Sample(sample.tokens, first), labels).loss
            if _number(changed) != _number(plain):
                return labels
            matters |= _number(self._call(_Sample(sample.tokens, any_), labels).loss) != _number(plain)
        if not matters:
            raise ConfigError(
                f"the loss that the model's forward gives doesn't depend on its argument "
                f"'{self._clone.structure.target_argument}'; return the whole loss, with the cross-entropy in it"
            )
        return "shifted"

    def _is_cross_entropy(self, objective: Objective, sample: _Sample, output: ModelOutput) -> bool:
        """Whether the loss is the cross-entropy of the logits, in its value and in every gradient."""
        assert output.logits is not None and output.loss is not None
        named = [item for item in self._clone.module.parameters() if item.requires_grad]
        with Float64Ops():
            entropy = mean_cross_entropy(output.logits, objective.counted(sample.targets))
        if abs(_number(output.loss) - _number(entropy)) > TOLERANCE * abs(_number(entropy)):
            return False
        wanted = torch.autograd.grad(entropy, named, allow_unused=True, retain_graph=True)
        found = torch.autograd.grad(output.loss, named, allow_unused=True, retain_graph=True)
        sizes = [float(item.abs().max()) for item in wanted if item is not None and item.numel()]
        for one, other in zip(found, wanted):
            apart = torch.zeros(()) if one is None else one
            apart = apart if other is None else apart - other
            if float(apart.abs().sum()) and float(apart.abs().max()) > TOLERANCE * max(sizes, default=1.0):
                return False
        return True

    def _loss_alone(self, labels: str, samples: Sequence[_Sample]) -> Objective:
        term = LossTerm(name="loss", coefficient=1.0, mean="", exact=False)
        objective = Objective(labels=labels, logits=False, terms=(term,))
        scale = abs(_number(self._call(samples[0], labels).loss))
        return self._with_means(objective, samples, scale)

    def _with_means(self, objective: Objective, samples: Sequence[_Sample], scale: float) -> Objective:
        """Finds what each term is a mean over: the whole of some rows must follow from their parts."""
        tried = [samples[0], samples[1]] * len(SCALES)
        parts = (slice(0, ROWS), slice(0, 1), slice(1, ROWS))
        values = []
        for number, sample in enumerate(tried):
            with self._scaled(SCALES[number // 2]):
                values.append([self._values(objective, sample.part(rows)) for rows in parts])
        terms = []
        for place, term in enumerate(objective.terms):
            found = dataclasses.replace(term, mean="rows")
            if not any(abs(value[place]) > TOLERANCE * scale for triple in values for value in triple):
                terms.append(found)  # a gradient without a value doesn't say what it is a mean over
                continue
            for mean in ("targets", "rows", *(f"targets+{offset}" for offset in range(1, OFFSETS + 1))):
                candidate = dataclasses.replace(term, mean=mean, exact=True)

                def fits(number: int, candidate: LossTerm = candidate, place: int = place) -> bool:
                    whole, *pieces = (value[place] for value in values[number])
                    weights = [
                        float(candidate.weight(objective.counted(tried[number].part(rows).targets)))
                        for rows in parts[1:]
                    ]
                    total = sum(weights)
                    mixed = sum(w * v for w, v in zip(weights, pieces)) / total if total else float("nan")
                    return abs(whole - mixed) <= TOLERANCE * max(scale, abs(whole))

                if all(fits(number) for number in range(len(tried))):
                    found = candidate
                    break
            terms.append(found)
        return dataclasses.replace(objective, terms=tuple(terms))

    @contextlib.contextmanager
    def _scaled(self, factor: float) -> Iterator[None]:
        matrices = [item for item in self._clone.module.parameters() if item.dim() > 1]
        for item in matrices:
            item.data.mul_(factor)
        try:
            yield
        finally:
            for item in matrices:
                item.data.div_(factor)

    def _values(self, objective: Objective, sample: _Sample) -> list[float]:
        output = self._call(sample, objective.labels)
        entropy = torch.zeros(())
        if output.logits is not None:
            entropy = mean_cross_entropy(output.logits, objective.counted(sample.targets))
        return [_number(value) for value in objective.values(output, entropy)]


def _rest(objective: Objective, sample: _Sample, output: ModelOutput) -> float:
    """What the loss has beside the cross-entropy of its logits."""
    assert output.logits is not None
    return _number(output.loss) - _number(mean_cross_entropy(output.logits, objective.counted(sample.targets)))


def _coefficients(rests: Sequence[float], outputs: Sequence[ModelOutput], scale: float) -> dict[str, float]:
    """Solves for the factor of each named scalar in the rest; none where the names don't explain anything."""
    names = [name for name in outputs[0].scalars if all(name in output.scalars for output in outputs)]
    if not names or len(names) >= len(outputs) - 1:
        return {}
    table = torch.tensor([[_number(output.scalars[name]) for name in names] for output in outputs], dtype=torch.float64)
    if int(torch.linalg.matrix_rank(table)) < len(names):
        return {}
    found = torch.linalg.lstsq(table, torch.tensor(rests, dtype=torch.float64).unsqueeze(1)).solution.squeeze(1)
    coefficients = {name: float(c) for name, c in zip(names, found) if abs(float(c)) > 1e-6}
    explained = _unexplained(rests, outputs, coefficients) <= 1e-7 * scale
    return coefficients if explained else {}


def _unexplained(rests: Sequence[float], outputs: Sequence[ModelOutput], coefficients: dict[str, float]) -> float:
    return max(
        abs(rest - sum(c * _number(output.scalars[name]) for name, c in coefficients.items()))
        for rest, output in zip(rests, outputs)
    )


def _number(value: torch.Tensor | None) -> float:
    assert value is not None
    return float(value.detach())


def _buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: item.detach().clone() for name, item in module.named_buffers()}


def _put_back(module: torch.nn.Module, before: dict[str, torch.Tensor]) -> None:
    for path, part in module.named_modules():
        for key in part._buffers:
            name = f"{path}.{key}" if path else key
            if name in before:
                part._buffers[key] = before[name].clone()


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and bool(torch.equal(one, other))
