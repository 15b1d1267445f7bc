"""Rehearses a split of a model's tokens over ranks (context parallelism), on a small clone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwright.autograd_helper import computed_by_helper
from meshwright.models.analysis.clone import CONTEXT, SMALL, TOKENS, Clone, duplicate_module, make_clone
from meshwright.models.analysis.document_masks import varlen_refusal
from meshwright.models.analysis.rehearsal import (
    PassComparison,
    PassResult,
    random_output_grad,
    rehearse_model,
    run_passes,
)
from meshwright.models.analysis.small_config import narrow_config
from meshwright.models.analysis.table import sharding_table
from meshwright.models.analysis.thread_group import LONG_PATIENCE_S, ThreadGroup, describe_error, run_in_threads
from meshwright.models.attention import use_varlen
from meshwright.models.build import BuiltModel, build_meta
from meshwright.parallel import context
from meshwright.parallel.ring_attention import RingRefusal
from meshwright.spec.layout_fields import BALANCED_ATTENTIONS
from meshwright.spec.sharding_table import ShardingTable

TRIAL_WORK = 1 << 32
"""Parameters x tokens of a trial's longest row: its forward and backward cost one core about a second, in float64."""
LEAST_TOKENS, MOST_TOKENS = 128, 512
"""Bounds of a trial's longest row; attention's weights grow with its square, 64 MiB a layer of 32 heads at 512."""
RING = "ring"
"""Attention whose keys go round the ranks: tried where a layout names it."""
UNKNOWN_TOKENS = 256
"""Longest row of a trial where no run is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The way in which a model's tokens can be split."""

    attention: str
    """``heads``, ``gather`` or ``ring``."""
    refused: str = ""
    """The reason for which they can't be split; "" when they can."""
    rows: int = 1
    """Divisor of a micro-batch's rows: models that shape their output as full rows need as many rows as ranks."""
    tried: str = ""
    """Row lengths of the rehearsal, and the reason for which none was longer."""
    heads_refused: str = ""
    """Why attention isn't ``heads``, which is tried first where none is named; "" where it is, or one is named."""


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
        attention: ``heads``, ``gather`` or ``ring``; empty for the first of the former two that works.
        tokens: in the run's rows; 0 where no run is known.
    """
    context = _find_way(built, table, degree, tensor, (attention,) if attention else ("heads", "gather"), tokens)
    if not context.refused:
        return context
    if not attention:
        return dataclasses.replace(context, attention="")
    others = tuple(way for way in ("gather", "heads") if way != attention)
    other = _find_way(built, table, degree, tensor, others, tokens)
    nearest = f"; the nearest that works: attention={other.attention}" if not other.refused else ""
    return dataclasses.replace(context, attention=attention, refused=context.refused + nearest)


def _find_way(
    built: BuiltModel, table: ShardingTable, degree: int, tensor: int, ways: tuple[str, ...], tokens: int
) -> Context:
    """Returns the first of some ways that works, or why none does; arguments as `read_context`."""
    attention = ways[0]
    if not table.layers:
        return Context(attention=attention, refused="the model has no stack of repeated layers")
    elements = sum(parameter.numel() for parameter in built.module.parameters())
    longest_row, shortened_because = trial_tokens(
        tokens, elements if built.config.kind == "function" else min(elements, SMALL)
    )
    # windows shorter than a rank's share of a row, so that attention must cross ranks
    clone = make_clone(built, max(CONTEXT, longest_row, 2 * degree), window=max(2, longest_row // (2 * degree)))
    if not tokens and clone.refuses(longest_row):
        longest_row, shortened_because = TOKENS, f"the model doesn't run on {longest_row}"
    clone_table = (
        table
        if clone.full_size
        else sharding_table(build_meta(narrow_config(built), 128, CONTEXT), max(degree, tensor))
    )
    refused: dict[str, str] = {}
    for attention_mode in ways:
        refused[attention_mode] = _refusal_of_heads(table, degree, tensor) if attention_mode == "heads" else ""
        if attention_mode == RING and built.structure.transformers:
            refused[attention_mode] = varlen_refusal(built)
        # gather and ring split each row into 2 x degree chunks, so that causal work is balanced
        length_multiple = degree * (2 if attention_mode in BALANCED_ATTENTIONS else 1)
        lengths = sorted({length_multiple * max(1, size // length_multiple) for size in (TOKENS, longest_row)})
        for rows in (1, degree) if not refused[attention_mode] else ():
            # The short rows first: a refusal there costs little.
            trials = (
                _rehearse_attention(clone, clone_table, degree, rows, attention_mode, length, documents)
                for length, documents in _trials(clone, attention_mode, lengths)
            )
            refused[attention_mode] = next((reason for reason in trials if reason), "")
            if not refused[attention_mode]:
                trial_lengths = (
                    f"rows of {' and '.join(map(str, lengths))} tokens{shortened_because and f': {shortened_because}'}"
                )
                heads_refused = "" if attention_mode == "heads" else refused.get("heads", "")
                return Context(attention=attention_mode, rows=rows, tried=trial_lengths, heads_refused=heads_refused)
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
    clone = make_clone(built, max(CONTEXT, length), window=max(2, length // (2 * degree)))
    # Of a custom loop's rows only the model's positions may be known: the longest that it takes.
    while not tokens and clone.refuses(length):
        if length <= degree:
            return ""
        length = degree * max(1, length // (2 * degree))
    clone_table = table if clone.full_size else sharding_table(build_meta(narrow_config(built), 128, CONTEXT), degree)
    reason = rehearse_model(clone, clone_table, degree, rows=1, tokens=length, sequence=True).failure
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


def _trials(clone: Clone, attention_mode: str, lengths: Sequence[int]) -> list[tuple[int, bool]]:
    """Returns (tokens of a row, whether it holds two documents) of each trial."""
    trials = [(length, False) for length in lengths]
    # A mask of a model's own for documents can't be told to a ring.
    if attention_mode == RING and clone.structure.takes_positions:
        trials.append((lengths[-1], True))
    return trials


def _refusal_of_heads(table: ShardingTable, degree: int, tensor: int) -> str:
    """Returns the first layer's reason against exchanging heads for tokens; "" for none."""
    for name, rows in table.layers.items():
        if reason := context.refusal(rows, degree, tensor):
            return f"{name}: {reason}"
    return ""


def _trial_rows(vocab: int, rows: int, tokens: int, documents: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns tokens (B, S) int64, and positions (B, S) that restart in the middle of a row; None for whole rows."""
    ids = torch.randint(vocab, (rows, tokens), generator=torch.Generator().manual_seed(7))
    return ids, (torch.arange(tokens) % (tokens // 2 + 1)).expand(rows, tokens) if documents else None


def _rehearse_attention(
    clone: Clone, table: ShardingTable, degree: int, rows: int, attention_mode: str, tokens: int, documents: bool
) -> str:
    """Compares logits and gradients of a clone whose tokens are split over threads with the full clone's.

    Args:
        clone: of the model.
        table: of the clone.
        degree: of ``cp``.
        rows: B.
        attention_mode: ``heads``, ``gather`` or ``ring``.
        tokens: S.
        documents: packs two documents into each row.

    Returns:
        The difference in words; "" when they agree.
    """
    ids, positions = _trial_rows(clone.vocab, rows, tokens, documents)
    expected = run_passes(lambda: clone.output_of(clone.module, ids, ids, positions), clone.module, random_output_grad)
    full_logits = expected.output
    if full_logits.dim() != 3:
        return "its forward gives a loss over all tokens, and no logits"
    # one output gradient for the full clone; each rank gets its tokens of it
    output_grad, is_balanced = random_output_grad(full_logits), attention_mode in BALANCED_ATTENTIONS

    def run_rank(axis_group: ThreadGroup) -> PassResult:
        module = duplicate_module(clone.module)
        if attention_mode == RING and clone.structure.transformers:
            use_varlen(module, in_ring=True)
        # the runtime's group of processes has the same collectives
        context.wrap_model(module, table, axis_group, attention=attention_mode)  # type: ignore[arg-type]
        return run_passes(
            lambda: clone.output_of(module, ids, ids, positions, degree).reshape(rows, -1, full_logits.shape[-1]),
            module,
            lambda _: context.local_tokens(output_grad, axis_group.index, axis_group.size, is_balanced),
        )

    comparison = PassComparison()
    try:
        rank_results = run_in_threads(degree, run_rank, patience_s=LONG_PATIENCE_S)
        for index, rank in enumerate(rank_results):
            if comparison.differs(rank.output, context.local_tokens(full_logits, index, degree, is_balanced)):
                return (
                    f"with rows of {tokens} tokens, of which each rank has some, its logits are off by "
                    f"{comparison.error:.1e}, so some layer mixes tokens, or uses their number, elsewhere than in "
                    "attention"
                )
        # weights are replicated: each rank's gradient is a term of the sum over its tokens
        scale = max(float(grad.abs().max()) for grad in expected.grads.values())
        for name, full_grad in expected.grads.items():
            if comparison.differs(torch.stack([rank.grads[name] for rank in rank_results]).sum(0), full_grad, scale):
                return (
                    f"with rows of {tokens} tokens, of which each rank has some, the gradient of '{name}' is off by "
                    f"{comparison.error:.1e}, though the logits agree"
                )
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError) as error:
        if isinstance(error.__cause__, RingRefusal):
            return str(error.__cause__)
        return f"its code needs all tokens of a row elsewhere ({describe_error(error)[:120]})"
    return ""
