"""Which weights the backwards of a step reached on some rank: an optimizer leaves the others alone, as on one device.

Sums over ranks fill in zeros where a rank has no gradient, and AdamW on zeros decays a weight and moves it by its
moments. On one device such a weight has no gradient, and stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.fsdp import FsdpSync
from meshwright.parallel.program import Program


class ReachedWeights:
    """Notes the weights of one program that are reached, between its last backward and the sums over ranks.

    Args:
        program: built.
        names: of weights, in the same order on every rank, the trained ones of all ranks among them.
        group: of the ranks that may reach other weights; None where this rank knows of all.
    """

    def __init__(self, program: Program, names: Sequence[str], group: AxisGroup | None) -> None:
        self._program, self._group = program, group
        self._positions = {name: position for position, name in enumerate(names)}
        self._reached: set[str] = set()

    def note(self) -> None:
        """Notes what is reached; every rank of the group calls it together."""
        self._reached = self._reached_here()
        if self._group is None:
            return
        flags = torch.zeros(len(self._positions))
        flags[[self._positions[name] for name in self._reached]] = 1
        flags = flags.to(self._program.weights_device)
        self._group.all_reduce(flags).wait()
        # Only a rank that lacks a gradient waits for the device.
        if any(weight.name not in self._reached for weight in self._program.weights):
            counts = flags.tolist()
            self._reached = {name for name, position in self._positions.items() if counts[position]}

    def _reached_here(self) -> set[str]:
        """Returns the names of the weights that this rank's backwards reached."""
        program = self._program
        syncs = [sync for stage in program.stages for sync in stage.gradient_syncs if isinstance(sync, FsdpSync)]
        # A shard has a gradient even where no rank reached its weight.
        reached_shards = {shard: is_reached for sync in syncs for shard, is_reached in sync.reached.items()}
        return {
            weight.name
            for weight in (*program.weights, *program.twins)
            if reached_shards.get(weight.parameter, weight.parameter.grad is not None)
        }

    def complete(self) -> None:
        """Drops the gradients of weights that no rank reached, and sets zeros for those that another alone did."""
        for weight in self._program.weights:
            if weight.name not in self._reached:
                weight.parameter.grad = None
            elif weight.parameter.grad is None:
                weight.parameter.grad = weight.as_dtensor(torch.zeros_like(weight.local))  # type: ignore[assignment]
