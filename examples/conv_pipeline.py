"""A convolutional net as a pipeline of four stages, between which images (B, C, H, W) of other sizes travel.

python examples/conv_pipeline.py
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from meshwright import PipelineEngine, launch_ranks

RANKS, CLASSES, ADAM = 4, 10, functools.partial(torch.optim.AdamW, lr=1e-2)


class Halving(nn.Module):
    """Two convolutions, the first of which halves the image; GroupNorm, since rows must not meet."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """Takes the channels before and after."""
        super().__init__()
        self.shrink = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, outputs)
        self.mix = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, C, H, W) to (B, C', H / 2, W / 2)."""
        shrunk = torch.relu(self.norm(self.shrink(x)))
        return shrunk + self.mix(shrunk)


def build() -> nn.Sequential:
    """The net, the same on every rank."""
    torch.manual_seed(0)
    blocks = (Halving(3, 8), Halving(8, 16), Halving(16, 16), Halving(16, 32))
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)).double()


def on_one_device(loader: DataLoader[Any], epochs: int) -> list[float]:
    """The same training without ranks: the mean loss of each epoch."""
    model, means = build(), []
    optimizer = ADAM(model.parameters())
    for _ in range(epochs):
        losses = []
        for images, classes in loader:
            loss = cross_entropy(model(images), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
    return means


def work(context: Any) -> None:
    """What every rank does; each has one stage."""
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(32, 3, 32, 32, generator=draw, dtype=torch.float64)
    loader = DataLoader(TensorDataset(images, torch.arange(32) % CLASSES), batch_size=16)
    engine = PipelineEngine(build(), "pp=4", cross_entropy, ADAM, microbatches=8, example=images[:2])
    means = [engine.train_epoch(loader) for _ in range(3)]
    if context.rank == 0:
        torch.testing.assert_close(means, on_one_device(loader, 3), rtol=1e-9, atol=0.0)
        print(f"pp=4: epochs equal to one device, {means[0]:.4f} to {means[-1]:.4f}; {engine.bytes} bytes on stage 0")


if __name__ == "__main__":
    launch_ranks(work, RANKS, kind="cpu", timeout_s=100)
