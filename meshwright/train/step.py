"""One optimizer step: micro-batches, one small all-reduce for everything global, clipping, update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from meshwright.parallel.host_copy import HostCopy
from meshwright.parallel.program import Program
from meshwright.parallel.stage_module import RowBatch, Stamp
from meshwright.parallel.weights import Weight, view_box
from meshwright.torch_compat.tensors import foreach_norm
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler

FIELDS = ("loss_sum", "targets", "hits", "norm_squared", "stop")
"""Fields of the step's all-reduced vector, each a sum over the ranks of an island. They are followed by two numbers for
each term of a model's own loss (`parallel.stage_module.Compute`), then the token counts of each expert."""

ROW = 1 << 12
"""Elements of a host tensor whose norm is one sum in float32: 16 KiB, which the cache of a core holds."""


class StepAbandoned(Exception):
    """Raised by the ``limits`` of `Stepper.run`: the step before asks for something first.

    No weight is updated; gradients are left over.
    """


@dataclass(slots=True)
class StepOutcome:
    """The outcome of a step, global over all ranks of an island; whatever reads it waits for the device."""

    numbers: HostCopy
    """(6 + 2 terms + experts,) float64: 2-norm of the global gradient before clipping, `FIELDS` and what follows."""
    lr: float
    """Learning rate of the step."""
    names: tuple[str, ...] = ()
    """Terms of the model's own loss."""

    @property
    def sums(self) -> torch.Tensor:
        """(5 + 2 terms + experts,) float64 on the CPU, `FIELDS` and what follows them."""
        return self.numbers.read()[1:]

    @property
    def experts(self) -> tuple[float, ...]:
        """Share of the routed tokens of each expert, over all layers; empty for a model without experts."""
        counts = self.sums[len(FIELDS) + 2 * len(self.names) :]
        return tuple((counts / counts.sum().clamp(min=1.0)).tolist())

    @property
    def terms(self) -> dict[str, float]:
        """Means of the cross-entropy and of each term of the model's own loss; empty for plain cross-entropy."""
        sums = self.sums
        return mean_terms(torch.cat([sums[:3], sums[len(FIELDS) :]]), self.names)

    def read(self) -> dict[str, float]:
        """Returns loss, targets, accuracy, grad_norm, stop (number of ranks asked to stop) and finite."""
        norm, loss_sum, targets, hits, _, stop = self.numbers.read()[: 1 + len(FIELDS)].tolist()
        return {
            "loss": sum(self.terms.values()) if self.names else loss_sum / max(1.0, targets),
            "targets": targets,
            "accuracy": hits / max(1.0, targets),
            "grad_norm": norm,
            "stop": stop,
            "finite": float(norm - norm == 0.0),
        }


def mean_terms(sums: torch.Tensor, names: Sequence[str]) -> dict[str, float]:
    """Returns the mean of each term of a model's own loss, whose sum is the loss.

    Args:
        sums: (3 + 2 terms + any,) float64, sums of `parallel.stage_module.Compute` over all ranks.
        names: of the terms; empty for plain cross-entropy.
    """
    if not names:
        return {}
    loss_sum, targets, _, *term_sums = sums[: 3 + 2 * len(names)].tolist()
    means = {name: term_sums[2 * term] / max(1.0, term_sums[2 * term + 1]) for term, name in enumerate(names)}
    return {"cross_entropy": loss_sum / max(1.0, targets)} | means


def local_norm_squared(program: Program) -> torch.Tensor:
    """Returns this rank's share of the squared gradient norm, () float64, partial over the ranks of an island.

    A box that several ranks hold counts once: each of its ``copies`` ranks contributes 1 / copies of its square.
    """
    gradients = [(weight, weight.gradient) for weight in program.weights]
    return squared_norm([(weight, grad) for weight, grad in gradients if grad is not None], program.weights_device)


def squared_norm(shards: Iterable[tuple[Weight, torch.Tensor]], device: torch.device) -> torch.Tensor:
    """Returns this rank's term of a squared norm, () float64, partial over the ranks of an island.

    Args:
        shards: weights with a tensor each of the shape of the weight's local part, on ``device``.
        device: of the result.
    """
    by_copies: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    for weight, shard in shards:
        if not shard.numel():
            continue
        boxes = weight.boxes
        # The common case: the whole local shard has one replication factor.
        if len({box.copies for box in boxes}) == 1:
            by_copies.setdefault((boxes[0].copies, shard.dtype), []).append(shard)
            continue
        for box in boxes:
            by_copies.setdefault((box.copies, shard.dtype), []).append(view_box(shard, box.local_box).contiguous())
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (copies, dtype), views in by_copies.items():
        # One fused kernel per replication factor; float64 sums keep the norm independent of the layout.
        large = [view for view in views if view.device.type == "cpu" and view.numel() >= 2 * ROW]
        rest = [view for view in views if view.device.type != "cpu" or view.numel() < 2 * ROW]
        norms = [norm for view in large for norm in norms_by_row(view)]
        if rest:
            norms.append(torch.stack(foreach_norm(rest, 2, dtype=torch.promote_types(dtype, torch.float32))))
        total += torch.cat(norms).to(torch.float64).square().sum() / copies
    return total


def norms_by_row(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns norms of a tensor's parts, each (n,), in float32 at least: of rows of `ROW` elements, and of the rest.

    Of a whole tensor of the CPU torch takes the norm with one thread and one sum in float32, whatever its size (in 2^25
    normal numbers its square was 0.1 % off); of rows it takes one a thread.
    Source: torch 2.13, aten/src/ATen/native/cpu/ReduceOpsKernel.cpp, norm_kernel_tensor_iterator_impl.

    Args:
        tensor: of any shape.
    """
    flat = tensor.reshape(-1).to(torch.promote_types(tensor.dtype, torch.float32))
    whole = flat.numel() // ROW * ROW
    rows, rest = flat[:whole].view(-1, ROW), flat[whole:]
    return [torch.linalg.vector_norm(rows, dim=-1), *([rest.norm().view(1)] if rest.numel() else [])]


def fill_missing(program: Program, is_summed: bool = False) -> None:
    """Sets a zero gradient for weights that forward didn't reach, so that every rank updates the same weights.

    Args:
        program: after backward.
        is_summed: give gradients the type of their weights, since they are yet to be summed.
    """
    for weight in program.weights:
        if is_summed:
            weight.widen_gradient()
        if weight.parameter.grad is None:
            weight.parameter.grad = weight.as_dtensor(torch.zeros_like(weight.local))  # type: ignore[assignment]


class JointSteps(Protocol):
    """Islands that take some steps as one (`train.outer.OuterOptimizer`)."""

    islands: int

    def is_joint(self, step: int) -> bool:
        """Returns whether all islands take the step after so many steps as one."""

    def sum_gradients(self) -> None:
        """Sums the gradients of this rank's weights over the islands, for a step that these take as one."""


class Stepper:
    """Runs optimizer steps on a program.

    Args:
        program: the built layout.
        optimizer: over the program's weights.
        scaler: loss scale.
        clip: largest gradient norm; 0 for none.
        seed: of the random numbers in forward.
    """

    def __init__(
        self,
        program: Program,
        optimizer: LocalAdamW,
        scaler: LossScaler,
        clip: float,
        seed: int,
    ) -> None:
        self.program, self.optimizer, self.scaler = program, optimizer, scaler
        self._clip, self._seed = clip, seed
        self._targets = 1
        self.outer: JointSteps | None = None
        """The islands that may take first steps as one; None without several."""
        self.probe: Callable[[torch.Tensor], None] | None = None
        """Called before clipping and update, when gradients are complete, with the factor to true gradients."""
        self._copies = program.reporters

    def run(
        self,
        step: int,
        batches: Sequence[RowBatch],
        targets: int,
        lr: float,
        stop: float,
        stamp: Stamp | None = None,
        limits: Callable[[], tuple[float, float] | None] | None = None,
    ) -> StepOutcome:
        """Runs one step.

        Args:
            step: steps done before this one.
            batches: this rank's micro-batches.
            targets: target tokens of the global batch by the data index. The loss is divided by them before backward,
                so that gradients have the same values under every layout, up to rounding.
            lr: learning rate.
            stop: this rank's term of the stop count, which is summed: 1 if asked to stop, less for a lesser request.
            stamp: reports progress.
            limits: returns the largest (loss, norm) with which weights are updated, None for any finite ones; called
                once all but the update is queued. It may wait for the step before, and raise `StepAbandoned`.

        Returns:
            Global sums; loss and norm are those of the global batch, normalised by its true number of targets.
        """
        program, outer = self.program, self.outer
        joint_islands = outer.islands if outer is not None and outer.is_joint(step) else 1
        # A batch whose targets are all masked would divide by zero.
        self._targets = max(1, targets)
        if program.term_counts is not None:
            local_weights = torch.stack([program.term_counts(batch) for batch in batches]).sum(dim=0)
            # Ranks that read the same rows each report the full weight: count it once.
            program.view.totals = self._step_sum(local_weights / program.ranks_per_batch, joint_islands)
        if (feedback := program.error_feedback) is not None:
            feedback.begin_step(self.scaler.scale)
        sums = program.forward_backward(batches, self.scaler.scale / self._targets, (self._seed, step), stamp)
        # Before norm and update: all ranks must update the same weights.
        fill_missing(program, is_summed=joint_islands > 1)
        if stamp:
            stamp.phase("reduce", 0)
        if outer is not None and joint_islands > 1:
            outer.sum_gradients()
        norm, vector, factor = self.globals(sums, stop, joint_islands)
        if self.probe is not None:
            self.probe(factor)
        program.step_timer.lap("norm")
        if stamp:
            stamp.phase("optimizer", 0)
        outcome = StepOutcome(HostCopy(torch.cat([norm.view(1), vector])), lr, program.loss_terms)
        is_valid = self._is_valid(norm, vector, limits() if limits is not None else None)
        if feedback is not None:
            feedback.commit(is_valid)
        factor = torch.where(is_valid, factor, torch.nan)
        if self._clip:
            factor = factor * torch.clamp(self._clip / (norm + 1e-6), max=1.0)
        self.optimizer.step(lr, factor)
        program.clear_gradients()
        program.step_timer.lap("optimizer")
        return outcome

    def part_norm(
        self, step: int, batches: Sequence[RowBatch], targets: int, stamp: Stamp | None = None
    ) -> tuple[float, float]:
        """Computes a gradient that no update takes; the step that follows is as if it hadn't been.

        Args:
            step: steps done, whose random numbers are drawn.
            batches: this rank's micro-batches.
            targets: target tokens of about as many rows, by which the loss is divided before backward.
            stamp: reports progress.

        Returns:
            The norm of the mean gradient over the batches' targets on all ranks, and the number of these.
        """
        program = self.program
        self._targets = max(1, targets)
        buffers_before = program.moving_buffers.copy()
        sums = program.forward_backward(batches, self.scaler.scale / self._targets, (self._seed, step), stamp)
        fill_missing(program)
        norm, vector, _ = self.globals(sums, 0.0)
        program.clear_gradients()
        program.moving_buffers.restore(buffers_before)
        program.step_timer.lap("noise")
        return float(norm), float(vector[1])

    def _is_valid(self, norm: torch.Tensor, vector: torch.Tensor, limits: tuple[float, float] | None) -> torch.Tensor:
        """Returns whether a step may update the weights, () bool on the device.

        Args:
            norm: () float64, of the gradient.
            vector: the summed vector (`globals`).
            limits: the largest (loss, norm); None for any finite ones.
        """
        # Clipping would scale an infinite gradient to 0, which would count as an update.
        is_valid = torch.isfinite(norm)
        if limits is not None:
            is_valid = is_valid & (self._mean_loss(vector) <= limits[0]) & (norm <= limits[1])
        return is_valid

    def _mean_loss(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns a step's loss, () float64 on the device, from its summed vector (`globals`)."""
        loss = vector[0] / vector[1].clamp(min=1.0)
        for term_index in range(len(FIELDS), len(FIELDS) + 2 * len(self.program.loss_terms), 2):
            loss = loss + vector[term_index] / vector[term_index + 1].clamp(min=1.0)
        return loss

    def globals(
        self, sums: torch.Tensor, stop: float, joint_islands: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All-reduces the step's sums and the squared gradient norm, in one vector.

        Args:
            sums: (3 + 2 terms,) this rank's sums of `parallel.stage_module.Compute`, partial over readers.
            stop: this rank's term of the stop count.
            joint_islands: islands that take the step as one, each of which has the gradient of all.

        Returns:
            On the device, float64: the global norm of the true gradients, (); the summed vector of `FIELDS` and what
            follows, 1-D; and the factor from stored to true gradients, ().
        """
        program = self.program
        squared = local_norm_squared(program) / joint_islands
        sums = sums.to(squared.device)
        # Ranks that read the same rows (tp, cp) report the same sums: count them once.
        sums = sums / self._copies
        vector = torch.cat([sums[:3], torch.stack([squared, squared.new_full((), stop)]), sums[3:]])
        if program.expert_counts is not None:
            vector = torch.cat([vector, program.expert_counts.drain(vector.device)])
        # The step's only all-reduce over all its ranks: loss, targets, hits, norm, stop and expert counts together.
        self._step_sum(vector, joint_islands)
        # Gradients were scaled by scale / expected targets; the true mean divides by the counted ones.
        factor = self._targets / (vector[1].clamp(min=1.0) * self.scaler.scale)
        return vector[3].sqrt() * factor, vector, factor

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        """Returns ``sums`` of `parallel.stage_module.Compute`, (3 + 2 terms,), as float64 summed over all readers."""
        return self.world_sum(sums.to(torch.float64) / self._copies)

    def _step_sum(self, values: torch.Tensor, joint_islands: int) -> torch.Tensor:
        """Returns ``values`` summed over the ranks that take this step together: an island's, or those of several."""
        return self.world_sum(values) if joint_islands > 1 else self.island_sum(values)

    def island_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Returns ``values``, any shape, summed over the ranks of this rank's island; in place for several."""
        if self.program.mesh is not None and self.program.mesh.island.size > 1:
            self.program.mesh.island.all_reduce(values).wait()
        return values

    def world_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Returns ``values``, any shape, summed over all ranks; in place for more than one rank."""
        if self.program.mesh is not None and self.program.mesh.world.size > 1:
            self.program.mesh.world.all_reduce(values).wait()
        return values
