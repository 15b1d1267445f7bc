"""Rehearses a split of a model's tokens over ranks (context parallelism), on a small clone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.autograd_helper import computed_by_helper
from meshwright.models.analysis.clone import narrowed
from meshwright.models.analysis.table import CONTEXT, SMALL, Clone, clone_of, sharding_table
from meshwright.models.analysis.trial import LONG_PATIENCE_S, TOKENS, TOLERANCE, in_threads, reason_of, rehearse_model
from meshwright.models.build import BuiltModel, build_meta
from meshwright.parallel import context
from meshwright.spec.sharding_table import ShardingTable

TRIAL_WORK = 1 << 32
"""Parameters x tokens of a trial's longest row: its forward and backward cost one core about a second, in float64."""
LEAST_TOKENS, MOST_TOKENS = 128, 512
"""Bounds of a trial's longest row; attention's weights grow with its square, 64 MiB a layer of 32 heads at 512."""
UNKNOWN_TOKENS = 256
"""Longest row of a trial where no run is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The way in which a model's tokens can be split."""

    attention: str
    """``heads`` or ``gather``."""
    refused: str = ""
    """The reason for which they can't be split; "" when they can."""
    rows: int = 1
    """Divisor of a micro-batch's rows: models that shape their output as full rows need as many rows as ranks."""
    tried: str = ""
    """Row lengths of the rehearsal, and the reason for which none was longer."""


@computed_by_helper
def read_context(
    built: BuiltModel, table: ShardingTable, degree: int, tensor: int, attention: str, tokens: int = 0
) -> Context:
    """Finds a way to split a model's tokens over ranks.

    Args:
        built: on meta; it stays unchanged.
        table: of the model.
        degree: of ``cp``.
        tensor: degree of ``tp`` beside it.
        attention: ``heads`` or ``gather``; empty for the first that works.
        tokens: in the run's rows; 0 where no run is known.
    """
    if not table.layers:
        return Context(attention=attention, refused="the model has no stack of repeated layers")
    elements = sum(parameter.numel() for parameter in built.module.parameters())
    longest_row, shortened_because = trial_tokens(
        tokens, elements if built.config.kind == "function" else min(elements, SMALL)
    )
    # windows shorter than a rank's share of a row, so that attention must cross ranks
    clone = clone_of(built, max(CONTEXT, longest_row, 2 * degree), window=max(2, longest_row // (2 * degree)))
    if not tokens and clone.refuses(longest_row):
        longest_row, shortened_because = TOKENS, f"the model doesn't run on {longest_row}"
    clone_table = (
        table if clone.full_size else sharding_table(build_meta(narrowed(built), 128, CONTEXT), max(degree, tensor))
    )
    refused: dict[str, str] = {}
    for attention_mode in (attention,) if attention else ("heads", "gather"):
        refused[attention_mode] = _refusal_of_heads(table, degree, tensor) if attention_mode == "heads" else ""
        # gather splits each row into 2 x degree chunks, so that causal work is balanced
        length_multiple = degree * (2 if attention_mode == "gather" else 1)
        lengths = sorted({length_multiple * max(1, size // length_multiple) for size in (TOKENS, longest_row)})
        for rows in (1, degree) if not refused[attention_mode] else ():
            # The short rows first: a refusal there costs little.
            trials = (
                _rehearse_attention(clone, clone_table, degree, rows, attention_mode, length) for length in lengths
            )
            refused[attention_mode] = next((reason for reason in trials if reason), "")
            if not refused[attention_mode]:
                trial_lengths = (
                    f"rows of {' and '.join(map(str, lengths))} tokens{shortened_because and f': {shortened_because}'}"
                )
                return Context(attention=attention_mode, rows=rows, tried=trial_lengths)
    return Context(
        attention=attention,
        refused="; ".join(f"attention={attention_mode}: {reason}" for attention_mode, reason in refused.items()),
    )


@computed_by_helper
def read_sequence(built: BuiltModel, table: ShardingTable, degree: int, tokens: int = 0) -> str:
    """Returns why a model's tokens can't be split between the groups that ``tp`` splits; "" when they can.

    The sharding table's rehearsal uses short rows; here rows are as long as the run's, or as a trial allows.

    Args:
        built: on meta; it stays unchanged.
        table: of the model.
        degree: of ``tp``.
        tokens: in the run's rows; 0 where no run is known.
    """
    elements = sum(parameter.numel() for parameter in built.module.parameters())
    longest_row, _ = trial_tokens(tokens, elements if built.config.kind == "function" else min(elements, SMALL))
    # every rank needs the same number of tokens
    length = degree * max(1, longest_row // degree)
    clone = clone_of(built, max(CONTEXT, length), window=max(2, length // (2 * degree)))
    if not tokens and clone.refuses(length):
        return ""
    clone_table = table if clone.full_size else sharding_table(build_meta(narrowed(built), 128, CONTEXT), degree)
    reason = rehearse_model(clone, clone_table, degree, rows=1, tokens=length, sequence=True)
    return f"with rows of {length} tokens {reason}" if reason else ""


def trial_tokens(tokens: int, elements: int) -> tuple[int, str]:
    """Returns the longest row of a trial, and why it is shorter than the run's; "" where it isn't.

    Args:
        tokens: in the run's rows; 0 where no run is known.
        elements: parameters of the model under trial.
    """
    token_limit = max(LEAST_TOKENS, min(MOST_TOKENS, TRIAL_WORK // max(1, elements)))
    if not tokens:
        return min(token_limit, UNKNOWN_TOKENS), ""
    if tokens <= token_limit:
        return tokens, ""
    return token_limit, f"the run's {tokens} would take the trial longer than a few seconds"


def _refusal_of_heads(table: ShardingTable, degree: int, tensor: int) -> str:
    """Returns the first layer's reason against exchanging heads for tokens; "" for none."""
    for name, rows in table.layers.items():
        if reason := context.refusal(rows, degree, tensor):
            return f"{name}: {reason}"
    return ""


def _rehearse_attention(
    clone: Clone, table: ShardingTable, degree: int, rows: int, attention_mode: str, tokens: int
) -> str:
    """Compares logits and gradients of a clone whose tokens are split over threads with the full clone's.

    Args:
        clone: of the model.
        table: of the clone.
        degree: of ``cp``.
        rows: B.
        attention_mode: ``heads`` or ``gather``.
        tokens: S.

    Returns:
        The difference in words; "" when they agree.
    """
    trained = {name: parameter for name, parameter in clone.module.named_parameters() if parameter.requires_grad}
    full_logits = clone.run(rows, tokens=tokens)
    if full_logits.dim() != 3:
        return "its forward gives a loss over all tokens, and no logits"
    # one output gradient for the full clone; each rank gets its tokens of it
    output_grad = torch.randn(full_logits.shape, generator=torch.Generator().manual_seed(5), dtype=full_logits.dtype)
    full_grads = _grads_or_zeros(full_logits, trained, output_grad)

    def run_rank(axis_group: Any) -> Any:
        module = copy.deepcopy(clone.module)
        context.wrap_model(module, table, axis_group, attention=attention_mode)
        local_logits = clone.run(rows, module, tokens=tokens, parts=degree).reshape(rows, -1, full_logits.shape[-1])
        local_parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        local_output_grad = context.local_tokens(
            output_grad, axis_group.index, axis_group.size, attention_mode == "gather"
        )
        return local_logits.detach(), _grads_or_zeros(local_logits, local_parameters, local_output_grad)

    try:
        rank_results = in_threads(degree, run_rank, patience_s=LONG_PATIENCE_S)
        for index, (local_logits, _) in enumerate(rank_results):
            expected = context.local_tokens(full_logits.detach(), index, degree, attention_mode == "gather")
            if local_logits.shape != expected.shape or _exceeds_tolerance(local_logits, expected, 0.0):
                return (
                    f"with rows of {tokens} tokens, of which each rank has some, its logits are off by "
                    f"{_relative_error(local_logits, expected, 0.0):.1e}, so some layer mixes tokens, or uses their "
                    "number, elsewhere than in attention"
                )
        # weights are replicated: each rank's gradient is a term of the sum over its tokens
        scale = max(float(grad.abs().max()) for grad in full_grads.values())
        for name, expected in full_grads.items():
            total = torch.stack([grads[name] for _, grads in rank_results]).sum(0)
            if _exceeds_tolerance(total, expected, scale):
                return (
                    f"with rows of {tokens} tokens, of which each rank has some, the gradient of '{name}' is off by "
                    f"{_relative_error(total, expected, scale):.1e}, though the logits agree"
                )
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError) as error:
        return f"its code needs all tokens of a row elsewhere ({reason_of(error)[:120]})"
    return ""


def _grads_or_zeros(
    output: torch.Tensor, parameters: dict[str, Any], output_grad: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Returns the gradients of named parameters, of the parameters' shapes; zeros where the output is independent.

    Args:
        output: (B, S, V) float64, in the graph.
        parameters: by name.
        output_grad: (B, S, V) float64.
    """
    grads = torch.autograd.grad(output, list(parameters.values()), output_grad, allow_unused=True)
    return {
        name: torch.zeros_like(item) if grad is None else grad for (name, item), grad in zip(parameters.items(), grads)
    }


def _exceeds_tolerance(actual: torch.Tensor, expected: torch.Tensor, scale: float) -> bool:
    """Returns whether two tensors of one shape differ by more than the tolerance."""
    return not _relative_error(actual, expected, scale) <= TOLERANCE


def _relative_error(actual: torch.Tensor, expected: torch.Tensor, scale: float) -> float:
    """Returns the largest difference relative to the largest expected entry; infinite for other shapes."""
    if actual.shape != expected.shape:
        return float("inf")
    return float((actual - expected).abs().max()) / max(float(expected.abs().max()), 1e-3 * scale, 1e-12)
