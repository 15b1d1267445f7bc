"""Layers tell when their forward and their backward begin, in words that a hang is told by."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.monitor.progress import NO_LAYER, ProgressWriter, read_progress
from meshwright.parallel import recompute
from meshwright.parallel.layer_names import REST, format_layers, layer_of
from meshwright.parallel.progress_hooks import OUTSIDE, LayerProgressHooks
from meshwright.train.faults import Fault, Faults
from meshwright.train.rank_progress import RankProgress


class Layer(nn.Module):
    """Gives a tensor, or it among other things."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.kind = kind
        self.runs = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        self.runs += 1
        out = torch.tanh(x * self.weight * scale)
        return {"": out, "tuple": (None, out, 1), "dict": {"size": 3, "hidden": out}}[self.kind]


def through(layers: list[Layer], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        out = layer(x, scale=0.5)
        x = out if layer.kind == "" else out[1] if layer.kind == "tuple" else out["hidden"]
    return x


@pytest.mark.parametrize("mode", ["none", "full"])
def test_layers_tell_forward_in_order_and_backward_in_reverse(mode: str) -> None:
    layers, told = [Layer(), Layer("tuple"), Layer("dict"), Layer()], list[int]()
    if mode == "full":
        recompute.apply(layers, mode, None)
    progress_hooks = LayerProgressHooks()
    progress_hooks.watch(layers, first_layer=4)
    assert list(inspect.signature(layers[0].forward).parameters)[:2] != [], "what it took, it takes"
    x = torch.ones(2, 3)
    through(layers, x).sum().backward()
    assert told == [], "nobody listens"
    runs = layers[0].runs
    progress_hooks.listener = told.append
    out = through(layers, x)
    assert told == [4, 5, 6, 7, OUTSIDE]
    out.sum().backward()
    assert told[5:] == [7, 6, 5, 4], "also where the forward runs again for it"
    assert layers[0].runs - runs == (2 if mode == "full" else 1)
    progress_hooks.outside()
    with torch.no_grad():
        through(layers, x)
    assert told[9:] == [OUTSIDE, 4, 5, 6, 7, OUTSIDE]


def test_where_a_rank_stands_is_stamped_with_its_layer(tmp_path: Path) -> None:
    path, step = tmp_path / "progress.bin", 11
    struck: list[str] = []
    known = [Fault(kind="nan", rank=0, step=12, phase="backward.3")]
    faults = Faults(tmp_path, 0, 0, known, spoil=lambda: struck.append("nan") is None)
    standing = RankProgress(ProgressWriter(path, 0), faults, lambda: step)

    def now() -> tuple[str, int, int, str]:
        (one,) = read_progress(path)
        return one.phase, one.step, one.layer, one.collective

    standing.begin_step()
    standing.phase("forward", 0)
    assert now() == ("forward", 12, NO_LAYER, "")
    standing.enter(3)
    assert now() == ("forward", 12, 3, "") and not struck
    standing.waits("all_reduce over tp", 5, 3 * 2**20)
    assert now() == ("forward", 12, 3, "all_reduce over tp, 3.00 MiB (5th of the step)")
    standing.waits("", 5)
    assert now() == ("forward", 12, 3, " (5th of the step)"), "of what it waited for last"
    standing.phase("backward", 0)
    assert now()[:3] == ("backward", 12, NO_LAYER)
    standing.enter(3)
    assert struck == ["nan"] and str(standing) == "backward of step 12"
    standing.enter(OUTSIDE)
    assert now()[2] == NO_LAYER == OUTSIDE
    standing.phase("record", 0)
    assert now()[:2] == ("record", 11), "of the step that is done"
    (one,) = read_progress(path)
    assert one.place == "record of step 11"


def test_what_travels_is_named_by_its_layers() -> None:
    assert format_layers([]) == ""
    assert (
        format_layers([3]) == "layer 3"
        and format_layers([REST]) == "the rest"
        and format_layers([2, REST]) == "layer 2 and the rest"
    )
    assert (
        format_layers([4, 2, 3, 3, 7]) == "layers 2-4, 7" and format_layers([0, 1, REST]) == "layers 0-1 and the rest"
    )
    numbers = {"model.h.1": 1, "model.h.10": 10}
    assert layer_of("model.h.1.attn.weight", numbers) == 1 and layer_of("model.h.10.weight", numbers) == 10
    assert layer_of("model.wte.weight", numbers) == REST and layer_of("weight", numbers) == REST
