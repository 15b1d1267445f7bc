"""Each rank's early and late run of a row's tokens, which balance causal attention over the ranks of ``cp``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.document_attention import is_packed_mask
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.tensor_hooks import is_hidden
from meshwright.spec.key_ring import KeyRing
from meshwright.spec.placement import Span
from meshwright.torch_compat.tensors import tree_map_only


def balanced_spans(tokens: int, index: int, ranks: int) -> tuple[Span, Span]:
    """Returns a rank's early and late run of ``tokens``, which 2 x ``ranks`` must divide."""
    return KeyRing(ranks, tokens // (2 * ranks)).spans(index)


def local_runs(x: torch.Tensor, index: int, ranks: int) -> torch.Tensor:
    """Returns a rank's early and late run of the tokens of ``x: (B, S, ...)``."""
    return torch.cat([x[:, start:stop] for start, stop in balanced_spans(x.shape[1], index, ranks)], dim=1)


def wrap_layer(
    layer: nn.Module,
    axis_group: AxisGroup,
    splits: int,
    attending: Callable[[], AbstractContextManager[object]],
    purpose: str,
) -> None:
    """Makes a layer compute this rank's runs of the tokens.

    Args:
        layer: takes a hidden state (B, S / (size splits), D); what else it takes counts all tokens.
        axis_group: the axis.
        splits: number of parts into which another axis splits this rank's tokens between the layers.
        attending: makes the context in which attention meets the other ranks' keys.
        purpose: the wrapper's text in ``meshwright inspect --stack``.
    """

    def local(plain: Forward) -> Forward:
        def forward(*args: object, **kwargs: object) -> object:
            hidden: list[torch.Tensor] = []
            tree_map_only(torch.Tensor, lambda x: hidden.append(x) if is_hidden(x) else None, (args, kwargs))
            # S of the whole row, by which positions and tables of angles are recognised among the arguments.
            tokens = hidden[0].shape[1] * axis_group.size * splits if hidden else 0

            def cut(x: torch.Tensor) -> torch.Tensor:
                if x.dim() not in (2, 3) or x.shape[1] != tokens or x is hidden[0] or is_packed_mask(x):
                    return x
                return local_runs(x, axis_group.index, axis_group.size)

            args, kwargs = tree_map_only(torch.Tensor, cut, (args, kwargs))
            with attending():
                return plain(*args, **kwargs)

        return forward

    wrap_forward(layer, ForwardLayer.CONTEXT, purpose, local)
