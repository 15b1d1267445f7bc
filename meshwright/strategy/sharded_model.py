"""What a rank holds of a model, seen as a whole: norm and clipping, optimizers on parts, state without a layout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from meshwright.errors import PlanError
from meshwright.parallel.dcp_shards import LocalBoxes
from meshwright.parallel.program import Program
from meshwright.parallel.weights import Weight
from meshwright.spec.layout import Layout
from meshwright.strategy.agreement import AgreementCheck
from meshwright.strategy.gradient_sync import GradientSync
from meshwright.strategy.optimizer_binding import OptimizerBinding, local_parts
from meshwright.strategy.state import SavedParts
from meshwright.train.step import local_norm_squared


class ShardedModel:
    """This rank's parts of a model that ranks share.

    Args:
        program: built.
        layout: it was built for.
        rank: this rank.
        ties: groups of names that are one weight.
        custom: (readers, whether gradients are means over them) of a loop that calls backward itself; None where a
            schedule does, and sums.
    """

    def __init__(
        self,
        program: Program,
        layout: Layout,
        rank: int,
        ties: Iterable[Iterable[str]],
        custom: tuple[int, bool] | None = None,
    ) -> None:
        if layout.rows:
            raise PlanError(f"rows={layout.rows}: your own loader shares the rows out here; drop it from the layout")
        self.program, self.layout = program, layout
        self.reader = layout.reader(rank)
        self._ties = {names[0]: names[1:] for names in map(tuple, ties)}
        self._parts = local_parts(program.weights)
        self.agreement = AgreementCheck(program)
        self.sync = None if custom is None else GradientSync(program, *custom, self._publish)
        """What makes gradients whole in a custom loop."""
        self.optimizers = OptimizerBinding(program, self._parts, self.sync, self._after_step)
        """Makes, rebuilds and checks optimizers over this rank's parts."""

    def _publish(self) -> None:
        self.optimizers.publish()

    def _after_step(self) -> None:
        self.release()
        self.agreement.after_step()

    @property
    def bytes(self) -> int:
        """Bytes of the weights that this rank holds; a gradient or a moment of an optimizer takes as many again."""
        return sum(weight.local.nbytes for weight in (*self.program.weights, *self.program.frozen))

    def release(self) -> None:
        """Frees gathered weights that no backward freed; the next forward would take them for the new ones."""
        for part in (child for held in self.program.parts for child in held.module.modules()):
            if isinstance(part, FSDPModule):
                part.reshard()

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        """Returns the 2-norm of the gradient of the whole model, float64, the same on every rank."""
        if self.sync is not None:
            self.sync.check_step()
        with torch._C.DisableTorchFunctionSubclass():
            squared = local_norm_squared(self.program)
        assert self.program.mesh is not None
        self.program.mesh.world.all_reduce(squared).wait()
        return squared.sqrt()

    @torch.no_grad()
    def clip(self, most: float) -> torch.Tensor:
        """Scales the gradient of the whole model down to a norm of at most ``most``; returns the norm it had."""
        norm = self.norm()
        factor = torch.clamp(most / (norm + 1e-6), max=1.0)
        gradients = [weight.gradient for weight in self.program.weights if weight.gradient is not None]
        with torch._C.DisableTorchFunctionSubclass():
            torch._foreach_mul_(gradients, float(factor))
        return norm

    def average(self, value: torch.Tensor | float) -> float:
        """Returns the mean of a number over all readers: of the loss of each rank's rows, the loss of the batch."""
        assert self.program.mesh is not None
        total = torch.as_tensor(value, dtype=torch.float64).detach().clone().to(self.program.weights[0].local.device)
        self.program.mesh.world.all_reduce(total).wait()
        return float(total) / self.layout.world

    def state_dict(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Returns the state for torch.distributed.checkpoint; see `HybridParallelStrategy.state_dict`."""
        program = self.program
        model: dict[str, Any] = {}
        for weight in (*program.weights, *program.frozen):
            saved = _as_tensor(weight.saved(weight.local), weight)
            model |= dict.fromkeys((weight.name, *self._ties.get(weight.name, ())), saved)
        model |= dict(program.buffers())
        state: dict[str, Any] = {"model": model}
        if optimizer is None:
            return state
        if not optimizer.state:
            self._start(optimizer)
        moments: dict[str, dict[str, Any]] = {}
        for weight, part in zip(program.weights, self._parts):
            for key, value in optimizer.state.get(part, {}).items():
                if isinstance(value, torch.Tensor):
                    same = value.shape == part.shape and key != "step"
                    saved = _as_tensor(weight.saved(value), weight) if same else value
                    moments.setdefault(key, {})[weight.name] = saved
        return state | {"optimizer": moments}

    @torch.no_grad()
    def _start(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the state that the optimizer has after no step, by a step that changes nothing: all zeros."""
        groups = optimizer.param_groups
        rates, members = [group["lr"] for group in groups], [part for group in groups for part in group["params"]]
        held = [part.detach().clone() for part in members]
        for group in groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for part in members:
            part.grad = torch.zeros_like(part)
        self.optimizers.starting = True
        try:
            optimizer.step()
        finally:
            self.optimizers.starting = False
            for group, rate in zip(groups, rates):
                group["lr"] = rate
            for part, value in zip(members, held):
                part.copy_(value)
        for value in (value for state in optimizer.state.values() for value in state.values()):
            if isinstance(value, torch.Tensor):
                value.zero_()


def _as_tensor(saved: Any, weight: Weight) -> torch.Tensor:
    """What a weight saves, a tensor in any case."""
    return SavedParts(saved, weight.local.device) if isinstance(saved, LocalBoxes) else saved
