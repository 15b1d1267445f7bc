"""The tutorial's pipeline of convolutional stages: PipelineEngine(model_stages=, device_mesh=, num_microbatches=).

python examples/sketch_pipeline.py
"""

from __future__ import annotations

import torch
from sketch_ranks import run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from meshwright import PipelineEngine, PipelineStrategy


def stages() -> list[nn.Module]:
    """Four stages, the same on every rank."""
    torch.manual_seed(0)
    made: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 10)),
    ]
    return [stage.double() for stage in made]


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Made-up images of ten classes."""
    images = torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return DataLoader(TensorDataset(images, torch.arange(32) % 10), batch_size=16)


def on_one_device(epochs: int) -> list[float]:
    """The same training without ranks: the mean loss of each epoch."""
    model, means = nn.Sequential(*stages()), []
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(epochs):
        losses = []
        for images, classes in loader():
            loss = cross_entropy(model(images), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
    return means


def work() -> None:
    """What every rank does; each has one stage."""
    mesh = DeviceMesh(device_type="cpu", mesh=[0, 1, 2, 3])
    plan = PipelineStrategy(device_mesh=mesh, num_stages=4, microbatch_size=2).layout(rows=16)
    engine = PipelineEngine(model_stages=stages(), device_mesh=mesh, num_microbatches=8)
    assert plan == engine.layout
    means = [engine.train_epoch(loader()) for _ in range(2)]
    if mesh.get_rank() == 0:
        torch.testing.assert_close(means, on_one_device(2), rtol=1e-9, atol=0.0)
        print(f"{plan}: epochs equal to one device, {means[0]:.4f} to {means[-1]:.4f}")


if __name__ == "__main__":
    run(4, work)
