"""A whole training job as anyone would write it for one device: rows, schedule, clipping, AdamW, evaluation.

The other side of `proof.job`. It shares no code with data/, train/ or parallel/: the order of rows and the learning
rate are written down here a second time, from their documentation, one row and one number at a time.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

IGNORED = -100
_WORD = 2**64
_ROUNDS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainBatch:
    """Rows of text."""

    tokens: torch.Tensor
    """(B, S) int64."""
    targets: torch.Tensor
    """(B, S) int64, the token after each; -100 where nothing is predicted."""
    positions: torch.Tensor | None
    """(B, S) int64, from 0 at each document's begin; None where every row counts from 0 without a break."""


class PlainRows:
    """The rows of a prepared set in the order of training, found one at a time.

    The text is cut into windows of S tokens after a shift of the epoch; a keyed permutation (a Feistel network that is
    walked until it lands inside) puts the windows of an epoch in order. Keys: first 8 bytes of SHA-256 over what names
    them; mixing: SplitMix64 (Steele, Lea, Flood 2014).

    Args:
        folder: the prepared set.
        rows: of a global batch.
        sequence: S, tokens a row.
        seed: of the run.
        documents: whether attention and targets end with each document.
    """

    def __init__(self, folder: Path, *, rows: int, sequence: int, seed: int, documents: bool) -> None:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        self._tokens = np.fromfile(folder / "train.bin", dtype=manifest["dtype"])
        self._held_out = np.fromfile(folder / "validation.bin", dtype=manifest["dtype"])
        self._document_ends = np.fromfile(folder / "train.idx", dtype="<u8").tolist()
        self._rows, self._sequence, self._documents = rows, sequence, documents
        self._shifts = min(sequence, len(self._tokens) - sequence)
        self._windows = (len(self._tokens) - self._shifts) // sequence
        self._order = _hash_key("order", manifest["fingerprint"], seed)
        self._shift = _hash_key("shift", manifest["fingerprint"], seed)

    def batch(self, step: int) -> PlainBatch:
        """Returns a step's global batch."""
        starts = [self._start(step * self._rows + row) for row in range(self._rows)]
        tokens, targets, positions = zip(*(self._row(start) for start in starts))
        has_documents = any(row[-1] != self._sequence - 1 for row in positions)
        return PlainBatch(
            tokens=torch.tensor(tokens),
            targets=torch.tensor(targets),
            positions=torch.tensor(positions) if has_documents else None,
        )

    def validation_batches(self, rows: int) -> Iterator[PlainBatch]:
        """Yields the first ``rows`` windows of the text that isn't trained on, one at a time; the last may be short."""
        for row in range(rows):
            text = self._held_out[row * self._sequence : (row + 1) * self._sequence + 1].astype(np.int64).tolist()
            if len(text) < 2:
                return
            tokens = torch.tensor([text[:-1]])
            yield PlainBatch(tokens=tokens, targets=torch.tensor([text[1:]]), positions=None)

    def _start(self, number: int) -> int:
        """Returns where in the text the run's row of this number begins."""
        epoch, position = divmod(number, self._windows)
        window = _shuffled(position, self._windows, _mix((epoch + self._order) % _WORD))
        return window * self._sequence + _mix((epoch + self._shift) % _WORD) % self._shifts

    def _row(self, start: int) -> tuple[list[int], list[int], list[int]]:
        """Returns (tokens, targets, positions) of a row; a document's last token predicts nothing."""
        text = self._tokens[start : start + self._sequence + 1].astype(np.int64).tolist()
        tokens, targets, positions = text[:-1], text[1:], list(range(self._sequence))
        if self._documents:
            document_starts = {
                document_end - start
                for document_end in self._document_ends
                if start < document_end <= start + self._sequence
            }
            position = 0
            for index in range(self._sequence):
                position = 0 if index in document_starts or index == 0 else position + 1
                positions[index] = position
                if index + 1 in document_starts:  # the last token of a document predicts nothing of the next one
                    targets[index] = IGNORED
        return tokens, targets, positions


def _hash_key(*fields: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(fields).encode()).digest()[:8], "little")


def _mix(value: int) -> int:
    """Returns SplitMix64's output for a state. Source: Steele, Lea and Flood (2014), the 64-bit variant."""
    value = (value + 0x9E3779B97F4A7C15) % _WORD
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % _WORD
    return value ^ (value >> 31)


def _shuffled(index: int, size: int, key: int) -> int:
    """Returns where a keyed permutation of 0 to ``size`` - 1 puts a place."""
    # The smallest near-square grid with at least `size` cells: halves of a Feistel network are its row and column.
    width = math.isqrt(size - 1) + 1
    height = -(-size // width)
    while True:
        column, row = index % width, index // width
        for round_index in range(_ROUNDS):
            salt = _mix((key + round_index) % _WORD)
            if round_index % 2:
                row = (row + _mix(column ^ salt) % height) % height
            else:
                column = (column + _mix(row ^ salt) % width) % width
        index = column + row * width
        # Cycle walking: a cell outside is shuffled again until one inside comes, which keeps it a permutation.
        if index < size:
            return index


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainSchedule:
    """A learning rate over steps, as documented: linear warm-up to the peak, then the shape down to the floor."""

    peak: float
    warmup: int
    """Steps."""
    steps: int
    """Of the whole run."""
    shape: str
    """``constant``, ``cosine``, ``linear`` or ``wsd``."""
    floor: float
    """Share of the peak at the last step."""
    decay_share: float
    """``wsd``: share of the steps, at the end, in which the rate falls."""

    def rate(self, step: int) -> float:
        """Returns the rate of a step, from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / (self.warmup + 1)
        if self.shape == "constant":
            return self.peak
        decay_start, last_step = self.warmup, max(self.warmup + 1, self.steps - 1)
        if self.shape == "wsd":
            decay_start = round(self.steps * (1 - self.decay_share))
            decay_start = max(self.warmup, min(decay_start, last_step - 1)) if self.decay_share else decay_start
        share = min(1.0, max(0.0, (step - decay_start) / max(1, last_step - decay_start)))
        remaining = (1 + math.cos(math.pi * share)) / 2 if self.shape == "cosine" else 1 - share
        return self.peak * (self.floor + (1 - self.floor) * remaining)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainOptimizer:
    """AdamW and clipping, as numbers."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decay_all: bool
    """Whether weights of one dim decay too."""
    clip: float
    """Largest gradient norm; 0 for none."""
    largest_norm: float = 0.0
    """Largest norm, before clipping, with which a step changes weights and moments; 0 for any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainAdaScale:
    """AdaScale as its paper writes it (Johnson et al. 2020, algorithm 1), with the noise measured now and then.

    One row in eight (one of a smaller batch) is a batch of its own. Two sizes of batches give mean and variance of a
    row's gradient: E |g_n|^2 = mu^2 + sigma^2 / n. Expectations are means of the last 50 measurements.
    """

    base_rows: int
    """Rows of the batch that the rate and the schedule are for."""
    rows: int
    """Rows of the batch."""
    every: int
    """Steps between measurements."""
    takes_root: bool
    """Whether the rate grows by the root of the gain."""

    def gain(self, measured: list[tuple[float, float]]) -> tuple[float, float]:
        """Returns r_t from (mu^2, sigma^2) of each measurement so far, and the factor on the rate; 1 before the first.

        With sigma^2 / B1 the variance of a batch of B1 = ``base_rows`` rows, which is S times that of B = ``rows``.
        """
        if not measured:
            return 1.0, 1.0
        mean = max(0.0, math.fsum(one for one, _ in measured[-50:]) / len(measured[-50:]))
        variance = max(0.0, math.fsum(one for _, one in measured[-50:]) / len(measured[-50:])) / self.base_rows
        scale = self.rows / self.base_rows
        ratio = (variance + mean) / (variance / scale + mean) if variance else 1.0
        return ratio, math.sqrt(ratio) if self.takes_root else ratio

    def measure(self, small: tuple[float, int], large: tuple[float, int]) -> tuple[float, float]:
        """Returns (mu^2, sigma^2) of a row from (gradient norm, targets) of the small batch and of the large one."""
        small_rows = self.rows * small[1] / large[1]
        # Two equations: mu^2 + sigma^2 / n = |g_n|^2.
        variance = (small[0] ** 2 - large[0] ** 2) / (1 / small_rows - 1 / self.rows)
        return large[0] ** 2 - variance / self.rows, variance


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainJob:
    """What is trained, on what."""

    rows: PlainRows
    schedule: PlainSchedule
    optimizer: PlainOptimizer
    steps: int
    """Steps that are run."""
    evaluate: tuple[int, ...]
    """After these steps the validation loss is taken."""
    evaluation_rows: int
    """Windows of the text that isn't trained on."""
    adascale: PlainAdaScale | None = None
    """How rates follow the noise of gradients; None where the schedule alone gives them."""


Forward = Callable[[nn.Module, PlainBatch, int], torch.Tensor]
"""(module, batch, step) to logits (B, S, V)."""


def train_job(module: nn.Module, forward: Forward, job: PlainJob) -> dict[str, Any]:
    """Trains ``module`` on one device, a whole global batch at a time.

    Args:
        module: materialised, in float64, in training mode.
        forward: of the model; in evaluation mode the step is the number of steps done.
        job: the job.

    Returns:
        ``losses``, ``norms``, ``rates``, ``tokens``, ``totals`` (tokens up to a step), ``accuracies`` (lists, one a
        step), ``validation`` (step to ``loss``, ``accuracy`` and ``targets``), and ``state``: name in a checkpoint to
        value.
    """
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    config = job.optimizer
    decayed = [parameter for _, parameter in trained if config.decay_all or parameter.dim() >= 2]
    undecayed = [parameter for _, parameter in trained if not (config.decay_all or parameter.dim() >= 2)]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=1.0, betas=config.betas, eps=config.eps, foreach=False
    )
    lists = ("losses", "norms", "rates", "tokens", "totals", "accuracies")
    records: dict[str, Any] = {"validation": {}} | {name: [] for name in lists}
    measured: list[tuple[float, float]] = []
    scaled_steps = 0.0
    for step in range(job.steps):
        batch = job.rows.batch(step)
        optimizer.zero_grad(set_to_none=True)
        logits = forward(module, batch, step)
        loss = _mean_loss(logits, batch.targets)
        loss.backward()
        for _, parameter in trained:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norm = torch.nn.utils.clip_grad_norm_([x for _, x in trained], config.clip or math.inf, foreach=False)
        gain, rate_factor = job.adascale.gain(measured) if job.adascale is not None else (1.0, 1.0)
        rate = rate_factor * job.schedule.rate(math.floor(scaled_steps))
        scaled_steps += gain
        changes = not config.largest_norm or float(norm) <= config.largest_norm
        if job.adascale is not None and (step + 1) % job.adascale.every == 0 and changes:
            small = _norm_of_part(module, forward, batch, step)
            measured.append(job.adascale.measure(small, (float(norm), int((batch.targets != IGNORED).sum()))))
        for group in optimizer.param_groups:
            group["lr"] = rate
        if changes:
            optimizer.step()
        records["losses"].append(loss.item())
        records["norms"].append(float(norm))
        records["rates"].append(rate)
        records["tokens"].append(int((batch.targets != IGNORED).sum()))
        records["totals"].append(sum(records["tokens"]))
        records["accuracies"].append(_hits(logits, batch.targets) / max(1, records["tokens"][-1]))
        if step + 1 in job.evaluate:
            records["validation"][step + 1] = _validation(module, forward, job, step + 1)
    # Weights that aren't trained stand in a checkpoint too.
    state = {f"weights/{name}": parameter.detach().clone() for name, parameter in module.named_parameters()}
    for name, parameter in trained:
        moments = optimizer.state[parameter]  # none where no step was taken
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"{moment}/{name}"] = moments[moment].clone() if moments else torch.zeros_like(parameter)
    return records | {"state": state}


def _norm_of_part(module: nn.Module, forward: Forward, batch: PlainBatch, step: int) -> tuple[float, int]:
    """Returns the norm of the mean gradient of every eighth row of a batch, of fewer rows of its first; its targets."""
    targets = torch.full_like(batch.targets, IGNORED)
    chosen = range(0, len(targets), min(8, len(targets)))
    for row in chosen:
        targets[row] = batch.targets[row]
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    loss = _mean_loss(forward(module, batch, step), targets)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    squares = sum(float(gradient.square().sum()) for gradient in gradients if gradient is not None)
    return math.sqrt(squares), int((targets != IGNORED).sum())


def _mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def _hits(logits: torch.Tensor, targets: torch.Tensor) -> int:
    """Returns how many targets have the largest logit of their place; ``logits: (B, S, V)``, ``targets: (B, S)``."""
    has_target = targets != IGNORED
    target_logits = logits.detach()[has_target].gather(1, targets[has_target].unsqueeze(1)).squeeze(1)
    return int((target_logits == logits.detach()[has_target].amax(dim=1)).sum())


def _validation(module: nn.Module, forward: Forward, job: PlainJob, step: int) -> dict[str, float]:
    """Returns mean loss and share of hits over the windows, and their number of targets; every token counts once."""
    total, count, hits = 0.0, 0, 0
    module.eval()
    with torch.no_grad():
        for batch in job.rows.validation_batches(job.evaluation_rows):
            logits = forward(module, batch, step)
            # Windows may differ in length: the mean over tokens weighs each window by its tokens.
            total += float(_mean_loss(logits, batch.targets)) * batch.targets.numel()
            count += batch.targets.numel()
            hits += _hits(logits, batch.targets)
    module.train()
    return {"loss": total / max(1, count), "accuracy": hits / max(1, count), "targets": count}
