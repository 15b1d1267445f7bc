"""Holds every transfer of rounded numbers against a plain one, then lets the program go on with exact values.

So a proof has two halves that share nothing: what rounds is held against `proof.plain_rounding`, and everything else
against one device, which rounds nothing. Format, runs and random numbers are those that the layout, the seed and the
step ask for: nothing but the values and the weights' names is read off the transfer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshwright.parallel.compression import LossyTransfer, WeightCompressor
from meshwright.parallel.partial_grads import PartialGradReducer
from meshwright.parallel.program import Program
from meshwright.parallel.row_codec import RowTransfer
from meshwright.proof.compare import EXACT, Deviation, worst_of
from meshwright.proof.plain_low_rank import PlainPowerSgd
from meshwright.proof.plain_rounding import compressed_sum, round_rows, round_weight, sum_in_order
from meshwright.proof.plain_top_k import PlainTopK
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.low_rank import POWER_SGD
from meshwright.spec.top_k import TOP_K

_FLOAT32_BOUNDS = {POWER_SGD: 1e-3, TOP_K: 1e-6}
"""Largest distance of sums with error feedback from the plain ones, in float32: in low rank a basis is as good as its
least direction, and vectors, which are summed exactly, are added up in another order."""


class CompressedSums:
    """The observer of a program's compressors; every rank has one.

    Args:
        program: observed from now on.
        layout: it was built for.
        seed: of the run.
    """

    def __init__(self, program: Program, layout: Layout, seed: int) -> None:
        self.method = Deviation(error=0.0, bound=EXACT)
        """How far any transfer was from the plain one, relative to its largest value."""
        self._layout, self._seed, self._step = layout, seed, 0
        self._shapes = {weight.name: (weight.shape, tuple(weight.local.shape)) for weight in program.weights}
        # Ranks of tp add these up afterwards, so they are summed exactly.
        syncs = [sync for stage in program.stages for sync in stage.gradient_syncs]
        self._partial = {name for sync in syncs if isinstance(sync, PartialGradReducer) for name in sync.names}
        choice, is_double = layout.compress, layout.precision == "float64"
        epsilon = float(np.finfo(np.float64 if is_double else np.float32).eps)
        self._feedback: PlainPowerSgd | PlainTopK = (
            PlainPowerSgd(choice.rank, choice.exact_steps, seed, epsilon)
            if choice.is_low_rank
            else PlainTopK(choice.inverse_density, choice.exact_steps)
        )
        self._bound = EXACT if is_double else _FLOAT32_BOUNDS.get(choice.name, EXACT)
        """Numbers on the wire are equal to the bit; products of matrices within the rounding of their sums."""
        self._squared_error = self._squared_exact = 0.0
        # Weights of each stage by name; a tied one may be in two stages of this rank.
        self._stages = {
            stage.stage_index: {name for name, _ in stage.module.named_parameters()} for stage in program.stages
        }
        self._summed: set[tuple[int, tuple[str, ...], tuple[int, ...]]] = set()
        for compressor in program.mesh.compressors if program.mesh is not None else ():
            is_sum = not isinstance(compressor, WeightCompressor)
            compressor.observer = self._check_sum if is_sum else self._check_gather
        if program.mesh is not None and program.mesh.row_codec is not None:
            program.mesh.row_codec.observer = self._check_rows

    @property
    def distance(self) -> float:
        """How far rounding takes all values that were sent from the exact ones; 2-norms, relative."""
        return math.sqrt(self._squared_error / self._squared_exact) if self._squared_exact else 0.0

    def begin_step(self, step: int) -> None:
        """Announces a step by its number, from 0 on: a step's gradients are summed once, by numbers of its own."""
        self._step = step
        self._summed.clear()

    def finish_step(self, updates_weights: bool) -> None:
        """Announces the end of a step, and whether it changed the weights."""
        self._feedback.finish_step(updates_weights)

    def _check_sum(self, transfer: LossyTransfer) -> None:
        """Compares a sum with the plain one, and puts the exact sum in its place."""
        terms_by_name = _terms_by_name(transfer)
        ranks = tuple(dist.get_process_group_ranks(transfer.axis_group.group))
        names = transfer.weights.names
        stages = [
            stage
            for stage, stage_names in self._stages.items()
            if stage_names.issuperset(names) and (stage, names, ranks) not in self._summed
        ]
        # FSDP sums what is left of a unit under the unit's name, where some weight wasn't gathered.
        stages = stages or [stage for stage in self._stages if (stage, names, ranks) not in self._summed]
        if not stages:
            self.method = Deviation(error=math.inf, bound=EXACT)  # summed twice
            return
        plain_by_stage = {stage: self._plain_sums(terms_by_name, ranks, stage) for stage in stages}
        errors = {
            stage: max((_error(after, plain) for after, plain in zip(transfer.after, sums, strict=True)), default=0.0)
            for stage, sums in plain_by_stage.items()
        }
        # Of a weight that is in two stages here, each of the two is summed once.
        stage = min(errors, key=lambda candidate: errors[candidate])
        self._summed.add((stage, names, ranks))
        self.method = worst_of((self.method, Deviation(error=errors[stage], bound=self._bound)))
        for after, (_, terms) in zip(transfer.after, terms_by_name, strict=True):
            self._put_exact(after, sum_in_order(terms))

    def _plain_sums(
        self, terms_by_name: Sequence[tuple[str, list[np.ndarray[Any, Any]]]], ranks: Sequence[int], stage: int
    ) -> list[np.ndarray[Any, Any]]:
        """Returns the compressed sum of each weight, (n,), as the layout, the seed and the step ask for."""
        choice = self._layout.compress
        if choice.keeps_errors:
            return [self._feedback_sum(terms, weight) for weight, terms in terms_by_name]
        name, run = choice.name, choice.node_copies
        # Experts may have fewer copies than the rest, which the runs need not divide.
        run = run if len(ranks) % run == 0 and len(ranks) > run else 1
        draw = f"{self._seed},{self._step},{self._first_without_tp(ranks[0])}.{stage}"
        return [compressed_sum(terms, name, run, draw, weight) for weight, terms in terms_by_name]

    def _feedback_sum(self, terms: Sequence[np.ndarray[Any, Any]], weight: str) -> np.ndarray[Any, Any]:
        """Returns the sum of a weight's gradients, (n,), approximate where the layout's is for such a weight."""
        if weight in self._partial or weight not in self._shapes:
            return sum_in_order(terms)
        shape, local_shape = self._shapes[weight]
        # What fills a shard up to the length of the first rank's.
        own = math.prod(local_shape)
        filling = sum_in_order([term[own:] for term in terms])
        if not own:
            return filling
        total = self._feedback.sum(weight, [term[:own] for term in terms], self._step, shape, local_shape)
        return np.concatenate([total, filling])

    def _first_without_tp(self, rank: int) -> int:
        """Returns the rank at index 0 along ``tp`` that is like another along all other axes."""
        stride = 1
        for axis, degree in reversed(self._layout.shape().items()):
            if axis == self._layout.axis(Mechanics.MATRICES):
                return rank - rank // stride % degree * stride
            stride *= degree
        return rank

    def _check_gather(self, transfer: LossyTransfer) -> None:
        """Compares gathered weights with plain ones, and puts the exact ones in their place."""
        terms_by_name = _terms_by_name(transfer)
        for position, (_, terms) in enumerate(terms_by_name):
            for rank, term in enumerate(terms):
                after = transfer.after[rank * len(terms_by_name) + position]
                plain = round_weight(_widened(term), self._layout.compress_weights, "", "")
                self.method = worst_of((self.method, Deviation(error=_error(after, plain), bound=EXACT)))
                self._put_exact(after, term)

    def _check_rows(self, transfer: RowTransfer) -> None:
        """Compares tokens, or gradients, that came for experts with plain ones, and puts the exact ones in place."""
        exact = transfer.exact.detach().cpu()
        # numpy has no bfloat16, of which float32 holds every number.
        values = (exact if exact.dtype in (torch.float32, torch.float64) else exact.float()).numpy()
        plain = round_rows(values).reshape(-1)
        if exact.dtype == torch.float16:
            # The program takes what is rounded up beyond float16's largest number for that.
            plain = plain.clip(-65504.0, 65504.0)
        error = _error(transfer.arrived.detach().reshape(-1), plain)
        self.method = worst_of((self.method, Deviation(error=error, bound=EXACT)))
        self._put_exact(transfer.arrived, values.reshape(-1))

    def _put_exact(self, measured: torch.Tensor, exact: np.ndarray[Any, Any]) -> None:
        """Books how far rounding took some values, of any shape, and replaces them by the exact ones, (n,)."""
        sent = measured.detach().cpu().double().view(-1).numpy()
        self._squared_error += float(np.square(np.nan_to_num(sent - exact)).sum())
        self._squared_exact += float(np.square(exact, dtype=np.float64).sum())
        measured.copy_(torch.from_numpy(exact).to(measured.device).view(measured.shape))


def _error(measured: torch.Tensor, plain: np.ndarray[Any, Any]) -> float:
    """Returns the largest difference, relative to the largest value; infinite where only one side is NaN."""
    expected, sent = torch.from_numpy(plain).to(measured.dtype).view(-1), measured.detach().cpu().view(-1)
    # A block that isn't finite is NaN on both sides.
    off = torch.nan_to_num(sent.double() - expected.double(), nan=0.0)
    off[torch.isnan(sent) != torch.isnan(expected)] = math.inf
    if not expected.numel():
        return 0.0
    return float(off.abs().max()) / max(float(torch.nan_to_num(expected).abs().max()), 1e-300)


def _terms_by_name(transfer: LossyTransfer) -> list[tuple[str, list[np.ndarray[Any, Any]]]]:
    """Returns each weight's name and the exact values of every rank, (n,) each, in order."""
    values_by_rank, offset, terms_by_name = _gather_values(transfer), 0, []
    for name, values in zip(transfer.weights.names, transfer.before, strict=True):
        stop = offset + values.numel()
        terms_by_name.append((name, [each[offset:stop] for each in values_by_rank]))
        offset = stop
    return terms_by_name


def _widened(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns weights, (n,), in the type in which blocks are rounded."""
    return values if values.dtype == np.float64 else values.astype(np.float32)


def _gather_values(transfer: LossyTransfer) -> list[np.ndarray[Any, Any]]:
    """Returns the exact values of every rank, (n,) each, in order."""
    flat = torch.cat([values.reshape(-1) for values in transfer.before])
    # numpy has no bfloat16, of which float32 holds every number.
    flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    gathered = [torch.empty_like(flat) for _ in range(transfer.axis_group.size)]
    dist.all_gather(gathered, flat, group=transfer.axis_group.group)
    return [values.cpu().numpy() for values in gathered]
