"""A whole training job as anyone would write it for one device: schedule, clipping, AdamW, evaluation.

The other side of `proof.job`. It shares no code with data/, train/ or parallel/: the learning rate is written down here
a second time, from its documentation, and so are the rows, in `plain_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from meshwright.proof.plain_rows import IGNORED, PlainBatch, PlainRows


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
    """Returns the mean over targets; 0 where there is none, which a mean of torch's isn't."""
    count = max(1, int((targets != IGNORED).sum()))
    return (
        functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum") / count
    )


def _hits(logits: torch.Tensor, targets: torch.Tensor) -> int:
    """Returns how many targets have the largest logit of their place; ``logits: (B, S, V)``, ``targets: (B, S)``."""
    has_target = targets != IGNORED
    target_logits = logits.detach()[has_target].gather(1, targets[has_target].unsqueeze(1)).squeeze(1)
    return int((target_logits == logits.detach()[has_target].amax(dim=1)).sum())


def _validation(module: nn.Module, forward: Forward, job: PlainJob, step: int) -> dict[str, float]:
    """Returns mean loss and share of hits over the windows, and their number of targets; every target counts once."""
    total, count, hits = 0.0, 0, 0
    module.eval()
    with torch.no_grad():
        for batch in job.rows.validation_batches(job.evaluation_rows):
            logits = forward(module, batch, step)
            # Windows may differ in length: the mean over tokens weighs each window by its tokens.
            targets = int((batch.targets != IGNORED).sum())
            total += float(_mean_loss(logits, batch.targets)) * targets
            count += targets
            hits += _hits(logits, batch.targets)
    module.train()
    return {"loss": total / max(1, count), "accuracy": hits / max(1, count), "targets": count}
