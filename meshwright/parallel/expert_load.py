"""Counts how many tokens each expert of a mixture gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from meshwright.parallel.stage_module import StageModule
from meshwright.spec.experts import LayerExperts


class ExpertMeter:
    """Adds up this rank's choices by expert, over all layers, until they are asked for.

    Layers that are recomputed count twice, and ranks that see the same tokens each count them: shares don't see that.

    Args:
        stages: stages of this rank.
        rows: where the model's experts are; layers with another number of experts than the first aren't counted.
    """

    def __init__(self, stages: Sequence[StageModule], rows: Sequence[LayerExperts]) -> None:
        self.experts = rows[0].experts
        self._counts: torch.Tensor | None = None
        for stage in stages:
            modules_by_name = dict(stage.module.named_modules())
            for row in (row for row in rows if row.module in modules_by_name and row.experts == self.experts):
                experts = modules_by_name[row.module]
                if isinstance(experts, nn.ModuleList | nn.ModuleDict):
                    for number, expert in enumerate(experts.children()):
                        expert.register_forward_pre_hook(self._counting_rows(number), with_kwargs=True)
                else:
                    experts.register_forward_pre_hook(self._counting(row.arguments[1]), with_kwargs=True)

    def _counting(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
            chosen = (kwargs[name] if name in kwargs else args[1]).detach().reshape(-1)
            # Unlike bincount this doesn't wait for the device; what lies beyond are slots to be skipped.
            edges = torch.arange(self.experts + 1, device=chosen.device)
            self._add(torch.searchsorted(chosen.sort().values, edges).diff())

        return hook

    def _counting_rows(self, number: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            for rows in (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)):
                counts = torch.zeros(self.experts, dtype=torch.int64, device=rows.device)
                counts[number] = rows.shape[:-1].numel()
                self._add(counts)
                return

        return hook

    def _add(self, counts: torch.Tensor) -> None:
        """Adds ``counts: (X,)``."""
        self._counts = counts if self._counts is None else self._counts + counts

    def drain(self, device: torch.device) -> torch.Tensor:
        """Returns this rank's counts, float64 (X,), and starts again."""
        counts, self._counts = self._counts, None
        if counts is None:
            return torch.zeros(self.experts, dtype=torch.float64, device=device)
        return counts.to(torch.float64)
