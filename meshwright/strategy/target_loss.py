"""Takes the mean cross-entropy over the targets of a whole step, however many each reader and micro-batch has.

A micro-batch alone doesn't know the targets of the others: their number comes by ``total``, or all have equally many.
Losses are followed into backward, where it shows which of them are of one step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from meshwright.errors import ConfigError
from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.program import Program
from meshwright.strategy.split_logits import plain_logits
from meshwright.train.loss import IGNORED, cross_entropy_sums

_SLACK = 1e-6
"""Relative rounding of a sum of shares."""


class TargetTotals:
    """Follows what the losses of a step were divided by, and refuses those that don't add up to a mean.

    Args:
        world: all ranks.
        ranks_per_reader: ranks that read the same rows.
    """

    def __init__(self, world: AxisGroup, ranks_per_reader: int) -> None:
        self._world, self._ranks_per_reader = world, ranks_per_reader
        self._pass_totals: list[float] = []
        self._earlier_totals: list[float] = []
        self._pass_shares: list[torch.Tensor] = []
        self._share: torch.Tensor | float = 0.0
        self._most_calls = self._steps = 0
        self._continues = self._had_gradients = False

    def note_own(self, total: float) -> None:
        """Notes a backward through a loss that was divided by its own number of targets, of all readers."""
        self._pass_totals.append(total)

    def note_given(self, share: torch.Tensor) -> None:
        """Notes a backward through a loss with a ``total``; ``share``, () float64, is its part of these targets."""
        self._pass_shares.append(share)

    @property
    def needs_gradients(self) -> bool:
        """Whether it matters if gradients of earlier micro-batches are there."""
        return bool(self._earlier_totals)

    def begin_pass(self, continues: bool, had_gradients: bool) -> None:
        """Begins a backward; the losses that it began with are noted already.

        Args:
            continues: it may add to gradients of earlier ones, by what every rank knows alike.
            had_gradients: this rank has gradients of earlier ones that aren't 0.
        """
        self._continues, self._had_gradients = continues, had_gradients

    def discard_pass(self) -> None:
        """Forgets a backward that ended in an error."""
        self._pass_totals, self._pass_shares = [], []

    def end_pass(self, device: torch.device, is_last: bool) -> None:
        """Ends a backward.

        Args:
            device: of the flags that ranks exchange.
            is_last: no other backward follows inside of ``accumulate()``.

        Raises:
            ConfigError: on every rank, the losses of the step so far are no parts of one mean.
        """
        totals, earlier, shares = self._pass_totals, self._earlier_totals, self._pass_shares
        self.discard_pass()
        if self._continues and totals and earlier and totals != earlier:
            # The totals are those of all readers, so that every rank comes here.
            flag = torch.tensor([float(self._had_gradients)], dtype=torch.float64, device=device)
            self._world.all_reduce_max(flag).wait()
            if flag.item():
                raise ConfigError(
                    f"strategy.loss: micro-batches of this step have {_listed(earlier)} and {_listed(totals)} targets "
                    "over the readers, and each was divided by its own: their sum weighs targets unequally; give each "
                    "the number of all, strategy.loss(logits, targets, total=strategy.count_targets(targets of all "
                    "of this reader's micro-batches)), and divide by nothing else"
                )
        if not self._continues:
            self._earlier_totals, self._share, self._most_calls = [], 0.0, 0
        self._earlier_totals = totals or self._earlier_totals
        for share in shares:
            self._share = self._share + share
        self._most_calls = max(self._most_calls, len(shares))
        if is_last:
            self._check_shares(device)

    def _check_shares(self, device: torch.device) -> None:
        """Compares the targets of a step with the total that was given, at steps 1, 2, 4, 8 and so on."""
        share, calls = self._share, self._most_calls
        self._share, self._most_calls = 0.0, 0
        self._steps += 1
        if self._steps & (self._steps - 1):
            return
        sums = torch.as_tensor(share, dtype=torch.float64, device=device).reshape(1).clone()
        most = torch.tensor([float(calls)], dtype=torch.float64, device=device)
        self._world.all_reduce(sums).wait()
        self._world.all_reduce_max(most).wait()
        counted = float(sums) / self._ranks_per_reader
        if counted > float(most) * (1 + _SLACK):
            raise ConfigError(
                f"strategy.loss: the micro-batches of this step and its readers have {counted:.3g} times the targets "
                "that total= says: it must be the number of all of them, of all readers; nearest that works: "
                "total=strategy.count_targets(targets of all this reader's micro-batches)"
            )


class TargetLoss:
    """Divides cross-entropy by the targets of all readers, and of a whole step where their number is given.

    Args:
        program: built, with a mesh.
        totals: where backwards are followed.
        readers: number of ranks that read other rows.
        average: whether gradients are means over the readers, not sums.
    """

    def __init__(self, program: Program, totals: TargetTotals, readers: int, average: bool) -> None:
        assert program.mesh is not None
        self._totals, self._world = totals, program.mesh.world
        self._ranks_per_reader, self._vocab = program.mesh.layout.world // readers, program.view.vocab
        # undoes the mean that is taken over readers
        self._factor = readers if average else 1
        self.drawn_alone = False
        """Whether readers run other numbers of micro-batches now, so that a loss can't ask the others for theirs."""

    def count(self, targets: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor:
        """Returns the number of targets of all readers, () float64; every rank calls it together.

        Args:
            targets: (...) int64 of this rank's reader, one tensor or several; -100 is none.
        """
        parts = [targets] if isinstance(targets, torch.Tensor) else list(targets)
        if not parts:
            raise ConfigError("count_targets: no targets were given; give those of every micro-batch of this step")
        counts = [(part != IGNORED).sum().to(torch.float64) for part in parts]
        total = torch.stack(counts).sum()
        self._world.all_reduce(total).wait()
        # Ranks that read the same rows have counted the same targets.
        return total / self._ranks_per_reader

    def mean(self, logits: torch.Tensor, targets: torch.Tensor, total: torch.Tensor | float | None) -> torch.Tensor:
        """Returns the loss, a scalar; see `HybridParallelStrategy.loss`.

        Args:
            logits: (B, S, V), or this rank's shard of V.
            targets: (B, S) int64.
            total: () or a number; None for that of this call's targets, of all readers.
        """
        logits = plain_logits(logits)
        if total is None:
            if self.drawn_alone:
                raise ConfigError(
                    "strategy.loss: readers run other micro-batches, and as many as they come to, so none knows the "
                    "targets of the others; give the number of the global batch, strategy.loss(logits, targets, "
                    "total=(all_targets != -100).sum()), and leave task.weight out"
                )
            own = float(self.count(targets))
            loss, _ = cross_entropy_sums(logits, targets, self._factor / max(1.0, own), self._vocab)
            if loss.requires_grad:
                loss.register_hook(lambda _: self._totals.note_own(own))
            return loss
        given = torch.as_tensor(total, dtype=torch.float64, device=logits.device)
        if given.numel() != 1:
            raise ConfigError(
                f"strategy.loss: total has shape {tuple(given.shape)}; it is one number, as strategy.count_targets "
                "gives it"
            )
        given = given.reshape(()).clamp(min=1.0)
        loss, sums = cross_entropy_sums(logits, targets, self._factor / given, self._vocab)
        if loss.requires_grad:
            loss.register_hook(lambda _: self._totals.note_given(sums[1] / given))
        return loss


def _listed(totals: list[float]) -> str:
    return " + ".join(str(math.floor(total)) for total in totals)
