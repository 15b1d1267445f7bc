"""Islands as anyone would write them for one device: each trains by itself in turn, and at a round's end they join.

The other side of `train.outer`, with which it shares no code: one list of full weights for each island, and the outer
step written down a second time, weight by weight. Source: Douillard et al., DiLoCo (2023), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.proof.reference import AuthorCall, OptimizerRecipe, Trace, accumulate_gradients, make_adamw
from meshwright.train.feed import MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterRecipe:
    """The outer step, as numbers that both sides use."""

    every: int = 2
    """Steps of a round."""
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True


def train_islands_plainly(
    module: nn.Module,
    call: AuthorCall,
    batches: Sequence[Sequence[Sequence[MicroBatch]]],
    recipe: OptimizerRecipe,
    outer: OuterRecipe,
    training: bool = True,
    compared: Collection[int] = (0,),
) -> list[Trace]:
    """Trains several islands on one device, whose weights the module holds in turn.

    Args:
        module: materialised, in float64.
        call: of the model.
        batches: for each step and island the parts of its batch that are handed to the model at once.
        recipe: the inner optimizer, of which each island has one.
        outer: the outer step; the last step ends a round.
        training: whether the module is in training mode.
        compared: steps whose gradients are kept.

    Returns:
        A trace of each island; the weights of all are those after the last join.
    """
    module.train(training)
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    start = {name: parameter.detach().clone() for name, parameter in trained}
    momentum = {name: torch.zeros_like(value) for name, value in start.items()}
    islands = [{name: value.clone() for name, value in start.items()} for _ in batches[0]]
    optimizers = [make_adamw(weights, recipe) for weights in islands]
    traces, tokens = [Trace() for _ in islands], [0] * len(islands)
    for step, parts in enumerate(batches):
        for island, (weights, micro_batches) in enumerate(zip(islands, parts)):
            with torch.no_grad():
                for name, parameter in trained:
                    parameter.copy_(weights[name])
            loss = accumulate_gradients(module, call, micro_batches, trained, weights, 1.0)
            if step in compared:
                traces[island].gradients[step] = {
                    name: value.grad.clone() for name, value in weights.items() if value.grad is not None
                }
            norm = torch.nn.utils.clip_grad_norm_(list(weights.values()), recipe.clip, foreach=False)
            optimizers[island].step()
            traces[island].losses.append(loss)
            traces[island].norms.append(float(norm))
            tokens[island] += sum(int((batch.targets != -100).sum()) for batch in micro_batches)
        if (step + 1) % outer.every == 0 or step + 1 == len(batches):
            _join(start, momentum, islands, tokens, outer)
            tokens = [0] * len(islands)
    for trace in traces:
        trace.weights = start
    return traces


@torch.no_grad()
def _join(
    start: dict[str, torch.Tensor],
    momentum: dict[str, torch.Tensor],
    islands: Sequence[dict[str, torch.Tensor]],
    tokens: Sequence[int],
    outer: OuterRecipe,
) -> None:
    """Takes the outer step on ``start`` and copies it into every island; all by name, of any shape."""
    for name, value in start.items():
        # The mean of the islands' weights, each by its tokens; how far it lies from the start is the pseudo-gradient.
        mean = sum(count * weights[name] for count, weights in zip(tokens, islands)) / sum(tokens)
        movement = value - mean
        momentum[name] = outer.momentum * momentum[name] + movement
        step = movement + outer.momentum * momentum[name] if outer.nesterov else momentum[name]
        start[name] = value - outer.lr * step
        for weights in islands:
            weights[name].copy_(start[name])
