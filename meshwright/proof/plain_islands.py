"""Islands as anyone would write them for one device: each trains by itself in turn, and at a round's end they join.

The other side of `train.outer`, with which it shares no code: one list of full weights for each island, and the outer
step written down a second time, weight by weight. Sources: Douillard et al., DiLoCo (2023), algorithm 1; Douillard et
al., Streaming DiLoCo (2025), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.proof.reference import (
    AuthorCall,
    OptimizerRecipe,
    Trace,
    accumulate_gradients,
    make_adamw,
    round_weights,
)
from meshwright.train.feed import MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterRecipe:
    """The outer step, as numbers that both sides use."""

    every: int = 2
    """Steps of a round."""
    lr: float = 0.7
    momentum: float = 0.6
    nesterov: bool = True
    fragments: int = 1
    """Fragments of the weights, each of which joins once in ``every`` steps."""
    delay: int = 0
    """Steps from a fragment's mean to the outer step that takes it."""
    mix: float = 0.0
    """Share of an island's own weights that stays when it is taken."""
    warmup: int = 0
    """First steps, which every island takes with the batches of all."""

    def fragment(self, name: str) -> int:
        """Returns the fragment of a weight: its layer's number modulo their count, the last for one of no layer."""
        for word in name.split("."):
            if word.isdigit():
                return int(word) % self.fragments
        return self.fragments - 1

    def departs(self, fragment: int, step: int) -> bool:
        """Returns whether a fragment's mean is taken after so many steps."""
        first = self.warmup + (fragment + 1) * self.every // self.fragments
        return step >= first and (step - first) % self.every == 0


class _PlainIslands:
    """The weights of all islands, and what joins them; all by name, of any shape.

    Args:
        outer: the outer step.
        start: outer weights.
        islands: weights of each island.
    """

    def __init__(
        self, outer: OuterRecipe, start: dict[str, torch.Tensor], islands: list[dict[str, torch.Tensor]]
    ) -> None:
        self.outer, self.start, self.islands = outer, start, islands
        self.momentum = {name: torch.zeros_like(value) for name, value in start.items()}
        self.tokens = [[0] * len(islands) for _ in range(outer.fragments)]
        """For each fragment the target tokens of each island since its mean was last taken."""
        self.travelling: dict[int, tuple[int, dict[str, torch.Tensor]]] = {}
        """Fragment to the step of its mean, and that mean."""

    def count(self, island: int, targets: int) -> None:
        """Counts a step of an island."""
        for counts in self.tokens:
            counts[island] += targets

    @torch.no_grad()
    def join(self, step: int, last: bool) -> None:
        """Does after so many steps what islands do then."""
        if step <= self.outer.warmup:
            # All islands are alike: where their first round begins.
            self.start = {name: value.detach().clone() for name, value in self.islands[0].items()}
            self.tokens = [[int(last)] * len(self.islands) for _ in range(self.outer.fragments)]
        for fragment in range(self.outer.fragments):
            if fragment in self.travelling and (last or self.travelling[fragment][0] + self.outer.delay == step):
                self._arrive(fragment, self.outer.mix)
        for fragment in range(self.outer.fragments):
            if last or self.outer.departs(fragment, step):
                self._depart(fragment, step)
                if last or not self.outer.delay:
                    self._arrive(fragment, 0.0)

    def _depart(self, fragment: int, step: int) -> None:
        """Takes the mean of the islands' weights, each by its tokens."""
        tokens = self.tokens[fragment]
        names = [name for name in self.start if self.outer.fragment(name) == fragment]
        mean = {
            name: sum(count * weights[name] for count, weights in zip(tokens, self.islands)) / sum(tokens)
            for name in names
        }
        self.travelling[fragment] = step, mean
        self.tokens[fragment] = [0] * len(tokens)

    def _arrive(self, fragment: int, mix: float) -> None:
        """Takes the outer step on ``start`` and moves every island to it, but for the share that it keeps."""
        outer, (_, means) = self.outer, self.travelling.pop(fragment)
        for name, mean in means.items():
            # How far the mean lies from the start is the pseudo-gradient.
            movement = self.start[name] - mean
            self.momentum[name] = outer.momentum * self.momentum[name] + movement
            step = movement + outer.momentum * self.momentum[name] if outer.nesterov else self.momentum[name]
            self.start[name] = self.start[name] - outer.lr * step
            for weights in self.islands:
                weights[name].copy_(mix * weights[name] + (1.0 - mix) * self.start[name])


def train_islands_plainly(
    module: nn.Module,
    call: AuthorCall,
    batches: Sequence[Sequence[Sequence[MicroBatch]]],
    recipe: OptimizerRecipe,
    outer: OuterRecipe,
    training: bool = True,
    compared: Collection[int] = (0,),
    compute: torch.dtype | None = None,
    scale: float = 1.0,
    shake: tuple[float, int] = (0.0, 0),
) -> list[Trace]:
    """Trains several islands on one device, whose weights the module holds in turn.

    Args:
        module: materialised, in the dtype of the proof.
        call: of the model.
        batches: for each step and island the parts of its batch that are handed to the model at once.
        recipe: the inner optimizer, of which each island has one.
        outer: the outer step; the last step ends a round.
        training: whether the module is in training mode.
        compared: steps whose gradients are kept.
        compute: type of forward and backward; None for the module's own.
        scale: factor on the loss in backward, taken out of the gradients again.
        shake: by what share of themselves weights are moved at most before they are rounded to ``compute``, at random,
            and the seed of it.

    Returns:
        A trace of each island; the weights of all are those after the last join.
    """
    module.train(training)
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    start = {name: parameter.detach().clone() for name, parameter in trained}
    if compute:
        for parameter in module.parameters():  # buffers keep their type, as under a layout
            parameter.data = parameter.data.to(compute) if parameter.is_floating_point() else parameter.data
    islands = [{name: value.clone() for name, value in start.items()} for _ in batches[0]]
    joint = _PlainIslands(outer, start, islands)
    optimizers = [make_adamw(weights, recipe) for weights in islands]
    traces, generator = [Trace() for _ in islands], torch.Generator().manual_seed(shake[1])
    for step, parts in enumerate(batches):
        everything = [batch for micro_batches in parts for batch in micro_batches]
        for island, (weights, own_batches) in enumerate(zip(islands, parts)):
            micro_batches = everything if step < outer.warmup else own_batches
            round_weights(trained, weights, shake[0], generator)
            loss = accumulate_gradients(module, call, micro_batches, trained, weights, scale)
            if step in compared:
                traces[island].gradients[step] = {
                    name: value.grad.clone() for name, value in weights.items() if value.grad is not None
                }
            norm = torch.nn.utils.clip_grad_norm_(list(weights.values()), recipe.clip, foreach=False)
            optimizers[island].step()
            traces[island].losses.append(loss)
            traces[island].norms.append(float(norm))
            joint.count(island, sum(int((batch.targets != -100).sum()) for batch in micro_batches))
        joint.join(step + 1, step + 1 == len(batches))
    for trace in traces:
        trace.weights = joint.start
    return traces
