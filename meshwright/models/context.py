"""Whether a model computes the same when its tokens are split over ranks: rehearsed, as the sharding table is."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.autograd_helper import computed_by_helper
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.clone import narrowed
from meshwright.models.table import CONTEXT, SMALL, Clone, clone_of, sharding_table
from meshwright.models.trial import LONG_PATIENCE_S, TOKENS, TOLERANCE, in_threads, reason_of, rehearse_model
from meshwright.parallel import context
from meshwright.spec.sharding_table import ShardingTable

TRIAL_WORK = 1 << 32
"""Parameters x tokens of a trial's longest row: forward and backward of it take one core about a second, in float64."""
LEAST_TOKENS, MOST_TOKENS = 128, 512
"""Bounds of a trial's longest row; attention's weights grow with its square, 64 MiB a layer of 32 heads at 512."""
UNKNOWN_TOKENS = 256
"""Longest row of a trial where no run is known."""


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
    tried: str = ""
    """Lengths of the rows on which it was tried, and why none longer."""


@computed_by_helper
def read_context(
    built: BuiltModel, table: ShardingTable, degree: int, tensor: int, attention: str, tokens: int = 0
) -> Context:
    """Finds a way to split a model's tokens over ranks.

    Args:
        built: on meta; it stays as it is.
        table: of the model.
        degree: of ``cp``.
        tensor: degree of ``tp`` beside it.
        attention: ``heads`` or ``gather``; empty for the first that works.
        tokens: in the run's rows; 0 where no run is known.
    """
    if not table.layers:
        return Context(attention=attention, refused="the model has no stack of repeated layers")
    elements = sum(item.numel() for item in built.module.parameters())
    longest, capped = trial_tokens(tokens, elements if built.config.kind == "function" else min(elements, SMALL))
    clone = clone_of(built, max(CONTEXT, longest, 2 * degree), window=max(2, longest // (2 * degree)))
    if not tokens and clone.refuses(longest):
        longest, capped = TOKENS, f"the model doesn't run on {longest}"
    small = table if clone.same else sharding_table(build_meta(narrowed(built), 128, CONTEXT), max(degree, tensor))
    refused: dict[str, str] = {}
    for way in (attention,) if attention else ("heads", "gather"):
        refused[way] = _heads_refused(table, degree, tensor) if way == "heads" else ""
        unit = degree * (2 if way == "gather" else 1)
        lengths = sorted({unit * max(1, size // unit) for size in (TOKENS, longest)})
        for rows in (1, degree) if not refused[way] else ():
            # The short rows first: what they refuse costs little.
            trials = (_rehearse(clone, small, degree, rows, way, length) for length in lengths)
            refused[way] = next((why for why in trials if why), "")
            if not refused[way]:
                tried = f"rows of {' and '.join(map(str, lengths))} tokens{capped and f': {capped}'}"
                return Context(attention=way, rows=rows, tried=tried)
    return Context(attention=attention, refused="; ".join(f"attention={way}: {why}" for way, why in refused.items()))


@computed_by_helper
def read_sequence(built: BuiltModel, table: ShardingTable, degree: int, tokens: int = 0) -> str:
    """Returns why a model's tokens can't be split between the parts that ``tp`` splits; "" when they can.

    The sharding table knows it of short rows; here rows are as long as the run's, or as a trial allows.

    Args:
        built: on meta; it stays as it is.
        table: of the model.
        degree: of ``tp``.
        tokens: in the run's rows; 0 where no run is known.
    """
    elements = sum(item.numel() for item in built.module.parameters())
    longest, _ = trial_tokens(tokens, elements if built.config.kind == "function" else min(elements, SMALL))
    length = degree * max(1, longest // degree)
    clone = clone_of(built, max(CONTEXT, length), window=max(2, length // (2 * degree)))
    if not tokens and clone.refuses(length):
        return ""
    small = table if clone.same else sharding_table(build_meta(narrowed(built), 128, CONTEXT), degree)
    why = rehearse_model(clone, small, degree, rows=1, tokens=length, sequence=True)
    return f"with rows of {length} tokens {why}" if why else ""


def trial_tokens(tokens: int, elements: int) -> tuple[int, str]:
    """Returns the longest row of a trial, and why it is shorter than the run's; "" where it isn't.

    Args:
        tokens: in the run's rows; 0 where no run is known.
        elements: parameters of what is tried.
    """
    most = max(LEAST_TOKENS, min(MOST_TOKENS, TRIAL_WORK // max(1, elements)))
    if not tokens:
        return min(most, UNKNOWN_TOKENS), ""
    if tokens <= most:
        return tokens, ""
    return most, f"the run's {tokens} would take the trial longer than a few seconds"


def _heads_refused(table: ShardingTable, degree: int, tensor: int) -> str:
    for name, rows in table.layers.items():
        if why := context.refusal(rows, degree, tensor):
            return f"{name}: {why}"
    return ""


def _rehearse(clone: Clone, table: ShardingTable, degree: int, rows: int, way: str, tokens: int) -> str:
    named = {name: item for name, item in clone.module.named_parameters() if item.requires_grad}
    out = clone.run(rows, tokens=tokens)
    if out.dim() != 3:
        return "its forward gives a loss over all tokens, and no logits"
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
    whole = _gradients(out, named, upstream)

    def part(axis_group: Any) -> Any:
        module = copy.deepcopy(clone.module)
        context.wrap_model(module, table, axis_group, attention=way)
        mine = clone.run(rows, module, tokens=tokens, parts=degree).reshape(rows, -1, out.shape[-1])
        held = {name: item for name, item in module.named_parameters() if item.requires_grad}
        own = context.own_tokens(upstream, axis_group.index, axis_group.size, way == "gather")
        return mine.detach(), _gradients(mine, held, own)

    try:
        found = in_threads(degree, part, patience_s=LONG_PATIENCE_S)
        for index, (mine, _) in enumerate(found):
            wanted = context.own_tokens(out.detach(), index, degree, way == "gather")
            if mine.shape != wanted.shape or _apart(mine, wanted, 0.0):
                return (
                    f"with rows of {tokens} tokens, of which each rank has some, its logits are off by "
                    f"{_error(mine, wanted, 0.0):.1e}, so some layer looks at tokens, or at their number, elsewhere "
                    "than in attention"
                )
        scale = max(float(item.abs().max()) for item in whole.values())
        for name, wanted in whole.items():
            total = torch.stack([grads[name] for _, grads in found]).sum(0)
            if _apart(total, wanted, scale):
                return (
                    f"with rows of {tokens} tokens, of which each rank has some, the gradient of '{name}' is off by "
                    f"{_error(total, wanted, scale):.1e}, though the logits agree"
                )
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError) as error:
        return f"its code needs all tokens of a row elsewhere ({reason_of(error)[:120]})"
    return ""


def _gradients(out: torch.Tensor, named: dict[str, Any], upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    grads = torch.autograd.grad(out, list(named.values()), upstream, allow_unused=True)
    return {name: torch.zeros_like(item) if grad is None else grad for (name, item), grad in zip(named.items(), grads)}


def _apart(found: torch.Tensor, wanted: torch.Tensor, scale: float) -> bool:
    return not _error(found, wanted, scale) <= TOLERANCE


def _error(found: torch.Tensor, wanted: torch.Tensor, scale: float) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-3 * scale, 1e-12)
