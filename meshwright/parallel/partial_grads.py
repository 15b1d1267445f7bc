"""Sums, after backward, the gradients of which each rank along ``tp`` has a summand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.tensor import PartialGrad
from meshwright.torch_compat.dtensors import local_rows
from meshwright.torch_compat.tensors import local_tensor


class PartialGradReducer:
    """Sums, after backward, the gradients of which each rank of the axis has a summand.

    Args:
        module: holds the parameters; they may be DTensors, whose local shards are summed.
        partial_grads: the gradients to sum, by their names in the module.
        axis_group: the axis.
        neighbours: groups over runs of neighbouring ranks, by their number.
        masters: parameter of the module to the one that has its gradient, where these are two.
    """

    def __init__(
        self,
        module: nn.Module,
        partial_grads: Sequence[PartialGrad],
        axis_group: AxisGroup,
        neighbours: Mapping[int, AxisGroup],
        masters: Mapping[nn.Parameter, nn.Parameter],
    ) -> None:
        self._module, self._partial_grads, self._masters = module, tuple(partial_grads), masters
        self._axis_group, self._neighbours = axis_group, neighbours

    @property
    def names(self) -> set[str]:
        """Names of the parameters that have such gradients."""
        return {partial.name for partial in self._partial_grads}

    def summed_parts(self) -> dict[nn.Parameter, list[tuple[PartialGrad, int]]]:
        """Returns, for each parameter (any shape) with such gradients, these and the number of ranks that sum each."""
        parameters_by_name = dict(self._module.named_parameters(remove_duplicate=False))
        parts: dict[nn.Parameter, dict[tuple[object, ...], tuple[PartialGrad, int]]] = {}
        for partial in self._partial_grads:
            if (parameter := parameters_by_name.get(partial.name)) is not None:
                key = (partial.runs, partial.dim, partial.ranks)
                parts.setdefault(self._masters.get(parameter, parameter), {})[key] = (
                    partial,
                    partial.ranks or self._axis_group.size,
                )
        return {parameter: list(found.values()) for parameter, found in parts.items()}

    def begin_microbatch(self, is_last: bool, no_gradients: bool = False) -> None:
        """Does nothing: gradients are summed after the last backward."""

    def finish(self) -> None:
        """Sums the partial gradients, packed by group and type."""
        # By each of its names: in a stage the first of a weight that layers share may be one of another stage's layers.
        parameters_by_name = dict(self._module.named_parameters(remove_duplicate=False))
        summed: set[tuple[object, ...]] = set()
        buckets: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        for partial in self._partial_grads:
            parameter = parameters_by_name.get(partial.name)
            if parameter is None or not parameter.requires_grad:
                continue
            key = (id(parameter), partial.runs, partial.dim, partial.ranks)
            if key in summed:
                continue
            summed.add(key)
            parameter = self._masters.get(parameter, parameter)
            if parameter.grad is None:
                # Zeros take part: every rank must send an equally long bucket.
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.dtype != parameter.dtype:
                parameter.grad = parameter.grad.to(parameter.dtype)
            grad = local_tensor(parameter.grad)
            buckets.setdefault((partial.ranks, grad.dtype), []).extend(partial_grad_views(parameter, grad, partial))
        for (ranks, _), grad_views in buckets.items():
            if not grad_views:
                continue
            axis_group = self._neighbours[ranks] if ranks else self._axis_group
            # One all-reduce for each group and type: these gradients are small and many.
            bucket = torch.cat([grad_view.reshape(-1) for grad_view in grad_views])
            axis_group.all_reduce(bucket, "shared gradients").wait()
            for grad_view, reduced_grad in zip(
                grad_views, bucket.split([grad_view.numel() for grad_view in grad_views])
            ):
                grad_view.copy_(reduced_grad.view(grad_view.shape))

    def discard_accumulated(self) -> None:
        """Does nothing: until the last micro-batch the gradients themselves hold the sums."""


def partial_grad_views(parameter: torch.Tensor, grad: torch.Tensor, partial: PartialGrad) -> list[torch.Tensor]:
    """Returns the views of a local gradient, (n_local, ...) as the local part of the parameter, that are summed."""
    if not partial.runs:
        return [grad] if grad.numel() else []
    # The runs count in tp's shard, of which FSDP2 may have left this rank some rows.
    offset, size = local_rows(parameter) if partial.dim == 0 else (0, grad.shape[partial.dim])
    local_runs = [(max(0, start - offset), min(size, stop - offset)) for start, stop in partial.runs]
    return [grad.narrow(partial.dim, start, stop - start) for start, stop in local_runs if start < stop]
