"""Decides by what the parts of a batch are weighted, so that their losses add up to the loss of all rows.

A mean over targets, of which -100 is none (cross-entropy), is that of all rows when each part weighs as many targets
as it has; a mean over rows when each weighs as many rows. Which of the two holds is tried: the loss is called on parts
and on all of their rows at once, with outputs of the model.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from meshwright.errors import ConfigError, DataError
from meshwright.models.structure import ModelStructure
from meshwright.parallel.stage_module import Compute, LossView
from meshwright.torch_compat.tensors import tree_flatten, tree_leaves, tree_unflatten
from meshwright.train.loss import IGNORED

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
"""(output, targets) to a mean over the rows, or over the targets, of a micro-batch; of whole numbers -100 is no target.
A mean over rows may count those of a row as it likes; which of the two it is, is tried."""

_TOLERANCE = 1e-4
"""Largest relative difference of a loss from that of its weighted parts: rounding in float32 stays below it."""


@dataclass(frozen=True, slots=True)
class LossBatch:
    """A micro-batch and what it weighs in the loss of the step."""

    tokens: torch.Tensor
    """(B, ...): the model's input."""
    targets: torch.Tensor
    """(B, ...)."""
    weight: float = 1.0
    """Rows or targets that it counts for; at 0 the loss isn't called."""
    total: torch.Tensor | None = None
    """() float64: the weight of all micro-batches of all readers; None for one that isn't trained on."""
    outputs: list[Any] | None = None
    """Takes the model's output in place of a loss; None where the loss is computed."""


@dataclass(frozen=True, slots=True)
class TargetCounts:
    """How many targets each row of a part has."""

    rows: tuple[int, ...]
    """One number for each row."""
    entries: int
    """Of each row: the most that it can have."""

    def weight(self, by_rows: bool) -> float:
        """Returns the number of rows, or of targets."""
        return float(len(self.rows) if by_rows else sum(self.rows))

    def chunks(self, count: int) -> list[TargetCounts]:
        """Returns the counts of ``count`` equal runs of rows."""
        size = len(self.rows) // count
        return [TargetCounts(self.rows[index * size : (index + 1) * size], self.entries) for index in range(count)]


def count_row_targets(targets: torch.Tensor) -> TargetCounts:
    """Counts the targets of each row; of whole numbers -100 is none.

    Args:
        targets: (B, ...), read on the host.
    """
    entries = targets[:1].numel()
    if targets.is_floating_point():
        return TargetCounts((entries,) * len(targets), entries)
    return TargetCounts(tuple((targets != IGNORED).reshape(len(targets), -1).sum(dim=1).tolist()), entries)


@dataclass(slots=True)
class WeightRule:
    """What is known of a loss: whether it can be a mean over targets, and over rows."""

    by_targets: bool = True
    by_rows: bool = True
    is_known: bool = False
    """Whether it needs no trial."""

    @property
    def is_decided(self) -> bool:
        """Whether one is left."""
        return not (self.by_targets and self.by_rows)

    def needs_trial(self, is_due: bool) -> bool:
        """Returns whether to try the loss before a step; ``is_due`` for one before which even a decided one is."""
        return not self.is_known and (is_due or not self.is_decided)

    def exclude(self, targets_fail: bool, rows_fail: bool) -> None:
        """Takes in what a trial has shown, the same on every rank.

        Raises:
            DataError: the loss is neither.
        """
        self.by_targets, self.by_rows = self.by_targets and not targets_fail, self.by_rows and not rows_fail
        if not (self.by_targets or self.by_rows):
            raise DataError(
                "loss: that of all rows must be the mean of the losses of micro-batches and readers, by their rows or "
                "by their targets other than -100, and is neither; nearest that works: a mean (not a sum) over rows or "
                "targets, with -100 for targets that count for nothing, not a value or mask of its own"
            )


def scalar_loss(loss: Loss) -> Loss:
    """Returns a loss whose value is one number, a () tensor, or an error that says what it gave instead.

    Args:
        loss: of the user.

    Raises:
        DataError: by the returned function, for a value of several elements, of another type, or without a gradient.
    """

    def call(output: Any, targets: torch.Tensor) -> torch.Tensor:
        value: Any = loss(output, targets)
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and value.numel() != 1:
            problem = f"a tensor of shape {tuple(value.shape)}, and step() trains one number"
            cure = "a mean over rows or targets, as .mean() or reduction='mean' give it"
        elif not is_tensor or not value.is_floating_point():
            problem = f"a tensor of {value.dtype}" if is_tensor else f"a {type(value).__name__}"
            problem, cure = f"{problem}, and step() trains one real number", "return the mean itself, a tensor"
        elif torch.is_grad_enabled() and not value.requires_grad and _has_gradient(output):
            problem, cure = "a number without a gradient", "leave out .detach(), .item() and torch.no_grad()"
        else:
            return value.reshape(())
        raise DataError(f"loss: it gave {problem}; nearest that works: {cure}")

    return call


def _has_gradient(output: Any) -> bool:
    return any(leaf.requires_grad for leaf in _tensors(output))


def try_rules(
    loss: Loss, parts: Sequence[tuple[Any, torch.Tensor]], ignored: float, empty_rows: float
) -> tuple[bool, bool]:
    """Tries a loss on parts of a batch; returns whether it is no mean over targets, and no mean over rows.

    Args:
        loss: of the user.
        parts: (output, targets (B, ...)) of one or more micro-batches; one is halved where it has four rows or more.
        ignored: targets of -100 in the whole batch; where there are any, the loss is called on others too.
        empty_rows: rows of the whole batch that have no target.
    """
    devices = [leaf.device for output, _ in parts for leaf in _tensors(output) if leaf.is_cuda]
    # a loss may draw random numbers; the training's stay where they are
    with torch.no_grad(), torch.random.fork_rng(sorted(set(devices), key=str)):
        output, targets = parts[0]
        trials = [_cut(parts)]
        if ignored:
            noisy = _with_noise(output)
            # outputs that must be positive, say, can't be moved
            output = noisy if bool(loss(noisy, targets).isfinite()) else output
            trials += [[(output, targets), (output, other)] for other in _masked(targets, empty_rows > 0)]
        fails = [_failures(loss, trial) for trial in trials]
    return any(by_targets for by_targets, _ in fails), any(by_rows for _, by_rows in fails)


def _masked(targets: torch.Tensor, with_empty: bool) -> list[torch.Tensor]:
    """Returns targets of which fewer count: the first of each row, and none if ``with_empty``."""
    is_target = (targets != IGNORED).reshape(len(targets), -1)
    is_first = (is_target & (is_target.cumsum(dim=1) == 1)).reshape(targets.shape)
    first = targets.masked_fill(~is_first, IGNORED)
    return [first, torch.full_like(targets, IGNORED)] if with_empty else [first]


def _failures(loss: Loss, parts: Sequence[tuple[Any, torch.Tensor]]) -> tuple[bool, bool]:
    """Returns whether the loss of all rows isn't that of the parts by targets, and by rows."""
    whole = float(loss(_concatenate([output for output, _ in parts]), torch.cat([targets for _, targets in parts])))
    if whole != whole or abs(whole) == float("inf"):
        # plain PyTorch trains nothing on these either
        return False, False
    counts = [count_row_targets(targets) for _, targets in parts]
    values = [float(loss(output, targets)) for output, targets in parts]
    largest = max(abs(whole), *(abs(value) for value in values if value == value), 1e-12)
    fails = []
    for by_rows in (False, True):
        weights = [count.weight(by_rows) for count in counts]
        mean = sum(weight * value for weight, value in zip(weights, values) if weight) / max(1.0, sum(weights))
        # written so that NaN fails
        fails.append(not abs(mean - whole) <= _TOLERANCE * largest)
    return fails[0], fails[1]


def flatten_output(output: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Returns the leaves of a model's output, and a function that makes such an output of others.

    A dataclass or another object with attributes, which torch takes for one leaf, is its attributes here.
    """
    leaves, spec = tree_flatten(output)
    makers: list[Callable[[Sequence[Any]], Any]] = []
    flat: list[Any] = []
    counts = []
    for leaf in leaves:
        names = _attributes(leaf)
        inner, make = flatten_output([getattr(leaf, name) for name in names]) if names else ([leaf], _only)
        makers.append(functools.partial(_with_attributes, leaf, names, make) if names else make)
        flat += inner
        counts.append(len(inner))

    def rebuild(values: Sequence[Any]) -> Any:
        remaining = iter(values)
        made = [make(list(itertools.islice(remaining, count))) for make, count in zip(makers, counts)]
        return tree_unflatten(made, spec)

    return flat, rebuild


def _attributes(leaf: Any) -> list[str]:
    """Returns the names of a leaf's attributes where one of them holds a tensor."""
    if isinstance(leaf, (torch.Tensor, type, nn.Module)):
        return []
    if dataclasses.is_dataclass(leaf):
        names = [field.name for field in dataclasses.fields(leaf)]
    else:
        names = list(getattr(leaf, "__dict__", ()))
    values = tree_leaves([getattr(leaf, name) for name in names])
    return names if any(isinstance(value, torch.Tensor) for value in values) else []


def _only(values: Sequence[Any]) -> Any:
    """Returns the one value."""
    return values[0]


def _with_attributes(
    leaf: Any, names: Sequence[str], make: Callable[[Sequence[Any]], Any], values: Sequence[Any]
) -> Any:
    """Returns a copy of an object with other attributes, of a frozen dataclass too."""
    changed = copy.copy(leaf)
    for name, value in zip(names, make(values)):
        object.__setattr__(changed, name, value)
    return changed


def _map_tensors(change: Callable[[torch.Tensor], Any], output: Any) -> Any:
    """Returns an output with each of its tensors, of any shape, changed."""
    leaves, rebuild = flatten_output(output)
    return rebuild([change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


def _cut(parts: Sequence[tuple[Any, torch.Tensor]]) -> list[tuple[Any, torch.Tensor]]:
    """Returns two parts or more; one alone in halves of an even number of rows each, or else twice."""
    if len(parts) > 1:
        return list(parts)
    output, targets = parts[0]
    rows = len(targets)
    if rows % 4 or any(leaf.dim() == 0 or len(leaf) != rows for leaf in _tensors(output)):
        return [parts[0], parts[0]]
    halves = slice(0, rows // 2), slice(rows // 2, rows)
    return [(_map_tensors(functools.partial(_rows, rows=half), output), targets[half]) for half in halves]


def _rows(leaf: torch.Tensor, rows: slice) -> torch.Tensor:
    """Returns some rows of a tensor, (B, ...)."""
    return leaf[rows]


def _tensors(output: Any) -> list[torch.Tensor]:
    """Returns the tensors of a model's output."""
    return [leaf for leaf in flatten_output(output)[0] if isinstance(leaf, torch.Tensor)]


def _with_noise(output: Any) -> Any:
    """Returns the output moved by normal noise: a head of zeros gives every target the same loss."""
    return _map_tensors(lambda leaf: leaf + torch.randn_like(leaf) if leaf.is_floating_point() else leaf, output)


def _concatenate(outputs: Sequence[Any]) -> Any:
    """Returns outputs of parts, each tensor of them (B, ...), as one of all rows."""
    flat, rebuilds = zip(*(flatten_output(output) for output in outputs))
    joined = [
        torch.cat(leaves) if isinstance(leaves[0], torch.Tensor) and leaves[0].dim() else leaves[0]
        for leaves in zip(*flat)
    ]
    return rebuilds[0](joined)


def known_rule(loss: object) -> WeightRule:
    """Returns what is known of a loss before it is tried: torch's own cross-entropy is a mean over targets."""
    is_known = loss in (None, cross_entropy)
    return WeightRule(by_rows=not is_known, is_known=is_known)


def most_unequal(counts: Sequence[TargetCounts]) -> list[int]:
    """Returns the indices of the micro-batches with most and with fewest targets, in this order; of one alone, one."""
    numbers = [sum(chunk.rows) for chunk in counts]
    most, fewest = numbers.index(max(numbers)), numbers.index(min(numbers))
    return list(dict.fromkeys((most, (most + 1) % len(numbers) if most == fewest else fewest)))


def mean_of_sums(sums: torch.Tensor) -> float:
    """Returns the mean loss over steps.

    Args:
        sums: (steps, 3) float64, over all ranks: loss sum, rows or targets, and micro-batches of a finite loss.

    Raises:
        DataError: the loss is finite on some micro-batches of a step and NaN on others.
    """
    mean = float(sums[:, 0].sum() / sums[:, 1].sum().clamp(min=1.0))
    if mean != mean and bool((sums[:, 0].isnan() & (sums[:, 2] > 0)).any()):
        raise DataError(
            "loss: it is NaN on some micro-batches and finite on others, as a mean over no target is where a loss "
            "leaves out targets by a value or mask of its own; nearest that works: -100 for targets that "
            "count for nothing. The weights are NaN after this step: start again from a checkpoint"
        )
    return mean


def mean_cross_entropy(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy, a scalar.

    Args:
        output: (..., V) logits.
        targets: (...) int64; -100 counts for nothing.
    """
    return cross_entropy(output.flatten(0, -2), targets.flatten())


def weighted_compute(structure: ModelStructure, loss: Loss) -> Compute:
    """Returns the computation of a micro-batch; its sums are (loss x weight, weight, 1 where the loss is finite)."""

    def compute(module: nn.Module, batch: LossBatch, scale: float, _: LossView) -> tuple[torch.Tensor, torch.Tensor]:
        is_plain_module = not structure.transformers
        output: Any = module(batch.tokens) if is_plain_module else module(batch.tokens, use_cache=False).logits
        if batch.outputs is not None:
            batch.outputs.append(_map_tensors(_detach, output))
        # a mean over no target is NaN, and so is its gradient: such rows add nothing
        is_counted = batch.outputs is None and batch.weight > 0
        micro_batch_loss = loss(output, batch.targets) if is_counted else _nothing(output)
        # a mean becomes a sum, so that batches of any size add up
        value = micro_batch_loss.detach().to(torch.float64)
        is_finite = value.isfinite().to(torch.float64) * is_counted
        sums = torch.stack([value * batch.weight, torch.full_like(value, batch.weight), is_finite])
        # a tensor of the device, so that the host waits for nothing
        share = batch.weight * scale if batch.total is None else batch.weight * scale / batch.total
        return (micro_batch_loss * share).to(micro_batch_loss.dtype), sums

    return compute


def _detach(output: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of any shape without its graph, in float32 at least."""
    is_rounded = output.dtype in (torch.bfloat16, torch.float16)
    return output.detach().float() if is_rounded else output.detach()


def _nothing(output: Any) -> torch.Tensor:
    """Returns a scalar 0 with a gradient of 0 by every tensor of a model's output."""
    tensors = [leaf for leaf in _tensors(output) if leaf.is_floating_point()]
    if not tensors:
        raise ConfigError(
            f"the model gave a {type(output).__name__} without tensors of real numbers, of which step() can train no "
            "loss: return a tensor, or an object, dict, list or tuple of them"
        )
    return torch.stack([(leaf * 0.0).sum() for leaf in tensors]).sum()
