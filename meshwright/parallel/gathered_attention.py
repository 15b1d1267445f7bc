"""Attention over split tokens by collecting keys and values: for heads that don't divide over the ranks.

Each rank asks for its own tokens alone, and takes an early and a late run of them, so that under a causal mask all
ranks have as many keys to look at. Attention is found where every kernel is called, `scaled_dot_product_attention`;
the mask, window and scale that the model gives it stay what they were.
Source: Llama Team, The Llama 3 Herd of Models (2024), section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.overrides import TorchFunctionMode

from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.balanced_runs import balanced_spans
from meshwright.parallel.collectives import all_gather_tokens
from meshwright.torch_compat.tensors import TorchArgs, TorchFunction, TorchKwargs

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def restore_token_order(x: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """Reorders ``x`` (..., S, ...), gathered as (early, late) runs rank by rank, into the order of the row."""
    runs = x.chunk(2 * ranks, dim=dim)
    return torch.cat([*runs[0::2], *reversed(runs[1::2])], dim=dim)


class GatheredAttention(TorchFunctionMode):
    """Makes attention inside of it use this rank's queries and the keys and values of all ranks."""

    def __init__(self, axis_group: AxisGroup) -> None:
        super().__init__()
        self._axis_group = axis_group

    def __torch_function__(
        self,
        func: TorchFunction,
        types: Collection[type],
        args: TorchArgs = (),
        kwargs: TorchKwargs | None = None,
    ) -> object:
        """Replaces attention and calls any other function as it is; torch calls this for each function."""
        named = dict(kwargs or {})
        if func is not _ATTENTION:
            return func(*args, **named)
        named |= dict(zip(_NAMES, args))
        axis_group, query = self._axis_group, named.pop("query")
        keys, values = (
            restore_token_order(all_gather_tokens(named.pop(name), axis_group, -2, True), -2, axis_group.size)
            for name in ("key", "value")
        )
        mask, causal = named.pop("attn_mask", None), named.pop("is_causal", False)
        spans = balanced_spans(keys.shape[-2], axis_group.index, axis_group.size)
        outputs: list[torch.Tensor] = []
        # One call for each run: under a causal mask each gets only the keys up to its end, so ranks do equal work.
        for (start, stop), local_queries in zip(spans, query.chunk(2, dim=-2)):
            marked_query: torch.Tensor = local_queries
            # (first query of the run, whether it is the first run): dropout draws once for both, by the row's queries.
            marked_query.query_run = (start, not outputs)
            visible_keys = stop if causal else keys.shape[-2]
            # A mask counts whole rows (the model made it before the tokens were split): take this run's queries.
            mask_rows = None if mask is None else mask[..., start:stop, :visible_keys]
            if causal:
                # is_causal would align query 0 with key 0; the run's first query is the row's token `start`.
                mask_rows = torch.ones(stop - start, visible_keys, dtype=torch.bool, device=query.device).tril(start)
            outputs.append(
                func(
                    marked_query,
                    keys[..., :visible_keys, :],
                    values[..., :visible_keys, :],
                    attn_mask=mask_rows,
                    **named,
                )
            )
        return torch.cat(outputs, dim=-2)
