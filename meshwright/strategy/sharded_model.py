"""This rank's shards of a model with operations on the full model: norm, clipping, optimizers, layout-free state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from meshwright.errors import ConfigError, PlanError
from meshwright.parallel.dcp_shards import LocalBoxes
from meshwright.parallel.program import Program
from meshwright.parallel.weights import Weight
from meshwright.spec.layout import Layout
from meshwright.strategy.agreement import AgreementCheck
from meshwright.strategy.comm_hooks import offer_comm_hook
from meshwright.strategy.first_call import FirstCall
from meshwright.strategy.gradient_sync import GradientSync
from meshwright.strategy.optimizer_binding import OptimizerBinding, local_shards
from meshwright.strategy.split_parameter import SplitWeightGuard
from meshwright.strategy.state import SavedShards
from meshwright.torch_compat.tensors import foreach_mul_, without_tensor_subclasses
from meshwright.train.step import local_norm_squared


class ShardedModel:
    """This rank's shards of a model that ranks share.

    Args:
        program: built.
        layout: it was built for.
        rank: this rank.
        ties: groups of names that are one weight.
        first_call: tries the model at its first call.
        custom: (readers, whether gradients are means over them) of a loop that calls backward itself; None where a
            schedule does, and sums.
    """

    def __init__(
        self,
        program: Program,
        layout: Layout,
        rank: int,
        ties: Iterable[Iterable[str]],
        first_call: FirstCall,
        custom: tuple[int, bool] | None = None,
    ) -> None:
        if layout.rows:
            raise PlanError(f"rows={layout.rows}: your own loader shares the rows out here; drop it from the layout")
        if layout.compress.keeps_errors:
            raise PlanError(
                f"compress={layout.compress}: train alone keeps what copies owe, and this loop is your own; nearest "
                "that works: compress=int8"
            )
        self.program, self.layout = program, layout
        self.reader = layout.reader(rank)
        self._ties = {names[0]: names[1:] for names in map(tuple, ties)}
        self._local_parameters = local_shards(program.weights)
        self.agreement, self.first_call = AgreementCheck(program, layout), first_call
        self.guard = None if custom is None else SplitWeightGuard(program)
        """Guards weights that ``tp`` or ``ep`` split, in a custom loop; None with a schedule."""
        self.sync = None
        if custom is not None and self.guard is not None:
            self.sync = GradientSync(program, *custom, self._publish, self.guard)
        """Reduces gradients in a custom loop; None with a schedule."""
        self.optimizers = OptimizerBinding(
            program, self._local_parameters, self.sync, self._before_step, self._after_step
        )
        """Creates, rebuilds and checks optimizers over this rank's shards."""
        self.random_step = torch.zeros((), dtype=torch.int64)
        """Counts the forwards of a custom loop, or the steps of a schedule, for dropout; a tensor, since a checkpoint
        is loaded in place."""
        self.rounding_step = torch.zeros((), dtype=torch.int64)
        """Counts the sums over copies of a custom loop, for the rounding of compressed ones."""
        if self.sync is not None:
            program.rounding_key.step = self.rounding_step
            self.sync.after_sums = first_call.settle
            offer_comm_hook(program, layout)

    def _publish(self) -> None:
        """Hands reduced gradients to the optimizers' shards."""
        self.optimizers.publish()

    def _before_step(self) -> None:
        """Shows an optimizer plain parts."""
        if self.guard is not None:
            self.guard.begin("step")

    def _after_step(self) -> None:
        """Frees gathered weights, which the step made stale, and compares copies."""
        self.release()
        self.agreement.after_step(self.optimizers.outside_parameters())
        if self.guard is not None:
            self.guard.end("step")

    def adopt_replaced_data(self) -> None:
        """Copies what user code set as a weight's `data` into the memory that ranks gather and optimizers step on."""
        for weight, local_parameter in zip(self.program.weights, self._local_parameters):
            if weight.address == local_parameter.data_ptr():
                continue
            with torch.no_grad(), without_tensor_subclasses():
                if weight.local.shape != local_parameter.shape:
                    raise ConfigError(
                        f"the data of '{weight.name}' was replaced by a tensor of another shape, or of the whole "
                        "weight: write parameter.copy_(values), or shard the model once it has its shapes"
                    )
                local_parameter.copy_(weight.local)
                weight.parameter.data = weight.as_dtensor(local_parameter.detach())

    @property
    def bytes(self) -> int:
        """Bytes of this rank's weights; a gradient or an optimizer moment costs as many again."""
        return sum(weight.local.nbytes for weight in (*self.program.weights, *self.program.frozen))

    def release(self) -> None:
        """Frees gathered weights that no backward freed; the next forward would mistake them for current ones."""
        for module in (child for stage in self.program.stages for child in stage.module.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        """Returns the 2-norm of the full model's gradient, a float64 scalar, the same on every rank."""
        if self.sync is not None:
            self.sync.check_step()
        with without_tensor_subclasses():
            squared = local_norm_squared(self.program)
        assert self.program.mesh is not None
        self.program.mesh.world.all_reduce(squared).wait()
        return squared.sqrt()

    @torch.no_grad()
    def clip(self, max_norm: float) -> torch.Tensor:
        """Scales the full gradient down to a norm of at most ``max_norm``; returns the norm before, float64 scalar."""
        norm = self.norm()
        # as torch.nn.utils.clip_grad_norm_ does
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        gradients = [weight.gradient for weight in self.program.weights if weight.gradient is not None]
        # none in a pipeline stage that is frozen as a whole
        if gradients:
            with without_tensor_subclasses():
                foreach_mul_(gradients, float(factor))
        return norm

    def average(self, value: torch.Tensor | float) -> float:
        """Returns the mean of a number over all readers: from the losses of each rank's rows, the loss of the batch."""
        assert self.program.mesh is not None
        # ranks that read the same rows have the same number, so the mean over ranks is that over readers
        total = torch.as_tensor(value, dtype=torch.float64).detach().clone().to(self.program.weights_device)
        self.program.mesh.world.all_reduce(total).wait()
        return float(total) / self.layout.world

    def state_dict(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Returns the state for torch.distributed.checkpoint; see `HybridParallelStrategy.state_dict`."""
        program = self.program
        model: dict[str, Any] = {}
        for weight in (*program.weights, *program.frozen):
            saved = _saved_tensor(weight.checkpoint_boxes(weight.local), weight)
            # every tied name, so that a model without ties loads it too
            model |= dict.fromkeys((weight.name, *self._ties.get(weight.name, ())), saved)
        model |= dict(program.buffers())
        state: dict[str, Any] = {"model": model}
        # else a resumed run would draw the masks and roundings of its first steps again
        steps: dict[str, torch.Tensor] = {}
        if program.dropout_rng is not None or (self.layout.compress and self.sync is None):
            steps["step"] = self.random_step
        if self.layout.compress and self.sync is not None:
            steps["rounding_step"] = self.rounding_step
        if steps:
            state["random"] = steps
        if optimizer is None:
            return state
        # loading in place needs tensors to load into
        self.optimizers.starts.create(optimizer)
        moments: dict[str, dict[str, Any]] = {}
        for weight, local_parameter in zip(program.weights, self._local_parameters):
            for key, value in optimizer.state.get(local_parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    is_shard_shaped = value.shape == local_parameter.shape and key != "step"
                    saved = _saved_tensor(weight.checkpoint_boxes(value), weight) if is_shard_shaped else value
                    moments.setdefault(key, {})[weight.name] = saved
        return state | {"optimizer": moments}


def _saved_tensor(saved: Any, weight: Weight) -> torch.Tensor:
    """Returns the saved form of a weight as a tensor in any case."""
    return SavedShards(saved, weight.local.device) if isinstance(saved, LocalBoxes) else saved
