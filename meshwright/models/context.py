"""Whether a model computes the same when its tokens are split over ranks: rehearsed, as the sharding table is."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.autograd_helper import computed_by_helper
from meshwright.axes import cp
from meshwright.axes.table import ShardingTable
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.table import CONTEXT, Clone, clone_of, narrowed, sharding_table
from meshwright.models.trial import TOLERANCE, in_threads


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """How a model's tokens can be split."""

    attention: str
    """``heads`` or ``gather``."""
    refused: str = ""
    """Why not, if not."""
    rows: int = 1
    """Of how many rows a micro-batch must be a multiple: models that shape their output as whole rows need as many as
    there are ranks."""


@computed_by_helper
def read_context(built: BuiltModel, table: ShardingTable, degree: int, tensor: int, attention: str) -> Context:
    """Finds a way to split a model's tokens over ranks.

    Args:
        built: on meta; it stays as it is.
        table: of the model.
        degree: of ``cp``.
        tensor: degree of ``tp`` beside it.
        attention: ``heads`` or ``gather``; empty for the first that works.
    """
    clone = clone_of(built, max(CONTEXT, 2 * degree))
    small = table if clone.same else sharding_table(build_meta(narrowed(built), 128, CONTEXT), max(degree, tensor))
    refused: dict[str, str] = {}
    for way in (attention,) if attention else ("heads", "gather"):
        refused[way] = _heads_refused(table, degree, tensor) if way == "heads" else ""
        for rows in (1, degree) if not refused[way] else ():
            refused[way] = _rehearse(clone, small, degree, rows, way)
            if not refused[way]:
                return Context(attention=way, rows=rows)
    return Context(attention=attention, refused="; ".join(f"attention={way}: {why}" for way, why in refused.items()))


def _heads_refused(table: ShardingTable, degree: int, tensor: int) -> str:
    for name, rows in table.layers.items():
        if why := cp.refusal(rows, degree, tensor):
            return f"{name}: {why}"
    return ""


def _rehearse(clone: Clone, table: ShardingTable, degree: int, rows: int, way: str) -> str:
    named = {name: item for name, item in clone.module.named_parameters() if item.requires_grad}
    unit = degree * (2 if way == "gather" else 1)
    out = clone.run(rows, unit=unit)
    if out.dim() != 3:
        return "its forward gives a loss over all tokens, and no logits"
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
    whole = _gradients(out, named, upstream)

    def part(wire: Any) -> Any:
        module = copy.deepcopy(clone.module)
        cp.wrap_model(module, table, wire, attention=way)
        mine = clone.run(rows, module, unit=unit).reshape(rows, -1, out.shape[-1])
        held = {name: item for name, item in module.named_parameters() if item.requires_grad}
        own = cp.own_tokens(upstream, wire.index, wire.size, way == "gather")
        return mine.detach(), _gradients(mine, held, own)

    try:
        found = in_threads(degree, part)
        for index, (mine, _) in enumerate(found):
            wanted = cp.own_tokens(out.detach(), index, degree, way == "gather")
            if mine.shape != wanted.shape or _apart(mine, wanted, 0.0):
                return "its logits are others when each rank has some tokens: they meet elsewhere too"
        scale = max(float(item.abs().max()) for item in whole.values())
        for name, wanted in whole.items():
            if _apart(torch.stack([grads[name] for _, grads in found]).sum(0), wanted, scale):
                return f"the gradient of {name} is another when each rank has some tokens"
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        return f"its code needs all tokens of a row elsewhere ({str(error)[:120]})"
    return ""


def _gradients(out: torch.Tensor, named: dict[str, Any], upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    grads = torch.autograd.grad(out, list(named.values()), upstream, allow_unused=True)
    return {name: torch.zeros_like(item) if grad is None else grad for (name, item), grad in zip(named.items(), grads)}


def _apart(found: torch.Tensor, wanted: torch.Tensor, scale: float) -> bool:
    error = float((found - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-3 * scale, 1e-12)
    return not error <= TOLERANCE
