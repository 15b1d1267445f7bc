"""Checks that ranks agree where a layout says that they do, at the first steps and ever more rarely after them.

Copies of a weight diverge when a loop changes them by values that only one rank has: a gradient from
`torch.autograd.grad`, a layer drawn anew, a checkpoint loaded on one rank. Ranks that split layers must be called on
the same rows. Buffers diverge where a forward changes them by the rows that it sees (running statistics), and in a
pipeline change with each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from meshwright.errors import ConfigError
from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.program import Program
from meshwright.parallel.weights import Weight
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.groups import row_axes
from meshwright.spec.layout import Layout
from meshwright.strategy.module_state import BatchNormBase
from meshwright.torch_compat.tensors import tree_leaves

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SUM_BITS = 50
"""Bits of a sum, so that float64 represents it exactly."""


class AgreementCheck:
    """Compares copies of weights, and inputs, over ranks: at calls 1, 2, 4, 8 and so on.

    Args:
        program: built, with a mesh.
        layout: it was built for.
    """

    def __init__(self, program: Program, layout: Layout) -> None:
        assert program.mesh is not None
        axis_groups = program.mesh.axis_groups
        weights = (*program.weights, *program.frozen)
        self._copies: list[tuple[AxisGroup, Sequence[Weight]]] = []
        for name in (name for name in row_axes(Holds.COPY) if layout.degree(name) > 1):
            self._copies.append((axis_groups[name], weights))
        tensor = axis_groups[layout.axis(Mechanics.MATRICES)]
        if tensor.size > 1:
            self._copies.append((tensor, [weight for weight in weights if weight.shard.is_unsharded]))
        self._same_rows = tensor if tensor.size > 1 else None
        self._steps = self._forwards = 0
        self._program, self._layout, self._world = program, layout, program.mesh.world
        self._buffers_before: dict[str, int | torch.Tensor] = {}
        self._runs_schedule = False

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Returns (name, buffer) of those that forward must leave alone; whoever has BatchNorm was asked about it."""
        modules = [stage.module for stage in self._program.stages]
        norms = {
            prefix for module in modules for prefix, child in module.named_modules() if isinstance(child, BatchNormBase)
        }
        return [(name, buffer) for name, buffer in self._program.buffers() if name.rpartition(".")[0] not in norms]

    @torch.no_grad()
    def before_schedule(self) -> None:
        """Remembers the buffers that the schedule of a step must leave alone."""
        self._runs_schedule = True
        if _power_of_two(self._steps + 1):
            self._buffers_before = {name: checksum(buffer) for name, buffer in self._buffers()}

    @torch.no_grad()
    def after_step(self, outside: Sequence[torch.Tensor] = ()) -> None:
        """Compares copies of weights over ranks, and buffers.

        Args:
            outside: parameters, of any shape, that this rank's optimizers step on beside the model's.

        Raises:
            ConfigError: on every rank of a group whose copies differ, or whose forward changes buffers.
        """
        self._steps += 1
        if not _power_of_two(self._steps):
            return
        self._check_buffers()
        self._check_outside(outside)
        for axis_group, weights in self._copies:
            if not weights:
                continue
            differs = _differing_indices(
                [checksum(weight.local) for weight in weights], axis_group, weights[0].local.device
            )
            if differs:
                raise ConfigError(
                    f"after {self._steps} steps ranks hold other values of '{weights[differs[0]].name}', of which each "
                    "has a copy: something changed it by what one rank alone knows, such as torch.autograd.grad, a "
                    "random draw, or load_state_dict on one rank; change weights alike on all ranks, by whole gradients"
                )

    def _check_outside(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuses parameters beside the model's that ranks train apart; every rank calls it together."""
        if self._world.size == 1 or self._runs_schedule:
            return
        # ranks that have other numbers of them train something of their own
        device = self._program.weights_device
        counts = torch.tensor([len(parameters), -len(parameters)], dtype=torch.float64, device=device)
        self._world.all_reduce_max(counts).wait()
        if not parameters or bool(counts.sum()):
            return
        if _differing_indices([checksum(item).to(device) for item in parameters], self._world, device):  # type: ignore[union-attr]
            shape = tuple(parameters[0].shape)
            raise ConfigError(
                f"after {self._steps} steps ranks hold other values of a parameter that an optimizer has beside the "
                f"sharded model's, the first of shape {shape}: each rank trains it by its own rows, since nobody sums "
                "its gradient; nearest that works: make it a part of the model before shard(), or shard the module "
                "that has it by a strategy of its own"
            )

    def _check_buffers(self) -> None:
        """Refuses buffers that forward changes in another way than on one device; every rank calls it together."""
        buffers = self._buffers()
        if self._runs_schedule:
            changed = [name for name, buffer in buffers if checksum(buffer) != self._buffers_before.get(name)]
            flag = torch.tensor([float(bool(changed))], dtype=torch.float64, device=self._program.weights_device)
            self._world.all_reduce_max(flag).wait()
            if flag.item():
                raise ConfigError(
                    f"the forward changes {_buffer_words(changed)}, and step() runs it for each micro-batch, and again "
                    "to try the loss, not once a step; nearest that works: a loop that calls the model and backward "
                    "itself, under replicate, shard or tp"
                )
            return
        if not buffers or self._layout.world == 1:
            return
        differs = _differing_indices([checksum(buffer) for _, buffer in buffers], self._world, buffers[0][1].device)
        if differs:
            raise ConfigError(
                f"after {self._steps} steps ranks hold other values of the buffer '{buffers[differs[0]][0]}': forward "
                "changes it by the rows or tokens that its rank sees, so that each trains another model; nearest that "
                "works: tp without sequence=true and with one reader, or buffers that don't depend on the rows"
            )

    def before_forward(self, inputs: object) -> None:
        """Compares inputs of ranks that split layers.

        Raises:
            ConfigError: on every rank of a group that was called on other rows.
        """
        self._forwards += 1
        if self._same_rows is None or not _power_of_two(self._forwards):
            return
        tensors = [tensor for tensor in tree_leaves(inputs) if isinstance(tensor, torch.Tensor)]
        if tensors and _differing_indices([sum(map(checksum, tensors))], self._same_rows, tensors[0].device):
            raise ConfigError(
                "ranks of one tensor parallel group were called on other rows: they share the work on the same ones; "
                "give the sampler num_replicas and rank from strategy.reader, not from the world"
            )


def _buffer_words(changed: Sequence[str]) -> str:
    return f"the buffer '{changed[0]}'" if changed else "a buffer of another stage"


def checksum(values: torch.Tensor) -> int | torch.Tensor:
    """Returns a sum of a tensor's bits, each element weighted by its position: an int64 scalar."""
    bits = values.detach().contiguous().view(-1).view(_BITS[values.itemsize]) if not values.is_complex() else values
    # a weight for each position, so that swapped elements change the sum
    position_weights = torch.arange(1, bits.numel() + 1, device=bits.device, dtype=torch.int64) % 8191
    return (bits.to(torch.int64) * position_weights).sum() if bits.numel() else torch.zeros((), dtype=torch.int64)


def _differing_indices(checksums: Iterable[object], axis_group: AxisGroup, device: torch.device) -> list[int]:
    """Returns the indices of checksums that differ between ranks, the same list on every rank."""
    local_sums = torch.stack([torch.as_tensor(item, device=device) for item in checksums]).remainder(1 << _SUM_BITS)
    # one maximum over ranks gives both ends: max(x) and -min(x)
    signed_sums = torch.cat([local_sums, -local_sums]).to(torch.float64)
    maxima = signed_sums.clone()
    axis_group.all_reduce_max(maxima).wait()
    # Equal exactly where the largest is also the smallest.
    max_minus_min = maxima[: len(local_sums)] + maxima[len(local_sums) :]
    return [index for index, gap in enumerate(max_minus_min.tolist()) if gap]


def _power_of_two(number: int) -> bool:
    """Returns whether a count is a power of two: checks become rarer as a run goes on."""
    return number & (number - 1) == 0
