"""What is proven: a model, its batches and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.models.build import BuiltModel
from meshwright.proof.plain_islands import OuterRecipe
from meshwright.proof.reference import OptimizerRecipe
from meshwright.train.feed import MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is proven: a model, and the global batches that it trains on."""

    build: Callable[[], BuiltModel]
    """Makes the model on meta; called once in each process."""
    batches: Sequence[MicroBatch]
    """Global batches, one a step, on the CPU."""
    made_up: bool = False
    """Whether they are random words: those that the model's own loss names, as padding, are put among them."""
    recipe: OptimizerRecipe
    """Optimizer."""
    outer: OuterRecipe = OuterRecipe()  # noqa: RUF009 - frozen
    """How islands join, under layouts that have several."""
    timeout_s: float = 600.0
    """Limit for one layout."""
    training: bool = True
    """Whether the model is in training mode, on both sides; without it one that draws random numbers can be proven."""
    allow_whole: bool = False
    """Whether a layout passes that left whole what it was asked to split."""
    rescaled: bool = False
    """Whether the sharding table is read off a narrower clone and grown, as it is for a model too large to be tried."""
    device: Literal["cpu", "cuda"] | None = None
    """What the ranks run on; GPUs when there are any, when None."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of a row, of each batch."""
        return tuple(batch.tokens.shape[1] for batch in self.batches)

    @property
    def compared_steps(self) -> tuple[int, ...]:
        """Steps whose gradients are compared: the first of each length."""
        return tuple(step for step, length in enumerate(self.lengths) if length not in self.lengths[:step])
