"""A rank's stages of the model, built by a layout's transforms, and the interfaces to the loss and the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from meshwright.parallel.head_cut import HeadCut
from meshwright.parallel.inner_loss import InnerLoss
from meshwright.parallel.vocab_shard import VocabShard
from meshwright.spec.placement import LocalShard


@dataclass(slots=True)
class LossView:
    """What the loss of a micro-batch must know of the layout."""

    vocab: VocabShard | None = None
    """The run of the vocabulary whose logits this rank has; None for all."""
    tokens: tuple[int, int, bool] = (0, 1, False)
    """(index, count, balanced): which of each row's tokens this rank has logits of; see `context.local_tokens`."""
    head_cut: HeadCut | None = None
    """Ends the forward in front of the head; None where the loss needs whole logits."""
    inner_loss: InnerLoss | None = None
    """Reads a loss that counts its own targets inside of the forward; None where another is trained."""
    totals: torch.Tensor | None = None
    """(1 + terms,) float64: targets of the global batch, and what it counts for in each term of the model's own loss;
    None where the cross-entropy is all there is."""


class RowBatch(Protocol):
    """What the runtime reads of a micro-batch; `Compute` knows the rest of it."""

    @property
    def tokens(self) -> torch.Tensor:
        """(B, ...): this rank's rows, on the model's device."""


Compute = Callable[[nn.Module, Any, float, LossView], tuple[torch.Tensor, torch.Tensor]]
"""(module, micro-batch, scale, view) to (loss to differentiate, sums): the loss is scale x the sum over target tokens,
the sums are a float64 vector (loss sum, target tokens, right predictions), detached. Each term of a model's own loss
adds two: the term times what the micro-batch counts for in it, and what it counts for."""
Halve = Callable[[Any], tuple[Any, Any]]
"""A micro-batch to the first and the second half of its rows."""


class Sync(Protocol):
    """What an axis that sums gradients gives the step to steer it."""

    def begin_microbatch(self, is_last: bool, no_gradients: bool = False) -> None:
        """Called before each micro-batch.

        Args:
            is_last: the last one before the optimizer.
            no_gradients: the first one, and no weight has a gradient.
        """

    def finish(self) -> None:
        """Called after the last backward; when it returns, every gradient is the sum over the axis."""

    def discard_accumulated(self) -> None:
        """Drops sums over micro-batches that no gradient shows yet, once zero_grad() has dropped those that do."""


class ExpertCounts(Protocol):
    """What counts the tokens of each expert."""

    def drain(self, device: torch.device) -> torch.Tensor:
        """Returns this rank's counts since the last call, float64 (X,)."""


@dataclass(slots=True)
class StageModule:
    """One stage of the model on this rank; without a pipeline axis the only one is the whole model."""

    module: nn.Module
    """The stage; its names are those of the whole model."""
    layers: list[nn.Module]
    """Its repeated blocks, in order."""
    local_shards: dict[str, LocalShard] = field(default_factory=dict)
    """The shard of the whole weight that a parameter stands for, by name in the module; absent where it is whole."""
    gradient_syncs: list[Sync] = field(default_factory=list)
    """What sums its gradients, in the order in which it finishes."""
    masters: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """Weight that computes to the one that is updated, where these are two (`parallel.compute_copies`)."""
    stage_index: int = 0
    """Its number among all stages."""
    first_layer: int = 0
    """Number of its first layer in the model."""
    is_first: bool = True
    """Whether it has the embedding, and gives the model's first layer its input."""
    is_last: bool = True
    """Whether it has the head, and takes what the model's last layer returns."""


@dataclass(slots=True)
class Stamp:
    """Reports this rank's phase and micro-batch to a watcher."""

    phase: Callable[[str, int], None]
