"""Proves a custom training loop: the user's own function on one device and under layouts, losses and weights compared.

The function takes a strategy and returns its losses. On one device the strategy is `OneDevice`, plain torch.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.launch.contract import RankContext
from meshwright.launch.devices import Devices
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.rendezvous import init_group
from meshwright.parallel import float64_ops
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.groups import axes_with, row_axes
from meshwright.spec.layout import Layout
from meshwright.strategy.hybrid import HybridParallelStrategy
from meshwright.strategy.one_device import OneDevice

Loop = Callable[[Any], Iterable[torch.Tensor | float]]
"""A strategy to the losses of a training, each the mean over the rows that this rank read."""
BOUNDS = {"float64": 1e-9, "float32": 2e-3}
"""Largest relative error that passes, by torch's default type while the loop runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopVerdict:
    """The result for one layout; errors are relative."""

    layout: str
    passed: bool
    loss_error: float
    weight_error: float
    worst: str
    """The weight that is furthest off."""
    refused: str = ""
    """Why the loop couldn't run under the layout, if it couldn't; nothing was compared then."""

    def to_json(self) -> dict[str, Any]:
        """Returns plain values; infinite errors become strings that JSON can hold."""
        plain = asdict(self).items()
        return {key: str(item) if isinstance(item, float) and not math.isfinite(item) else item for key, item in plain}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopCase:
    """What is proven."""

    source: str
    """``FILE:FUNCTION``."""
    dtype: str = "float64"
    """Torch's default type while the loop runs: float64 is the proof, float32 shows rounding."""
    timeout_s: float = 600.0
    """Limit for one layout."""


def loop_file(source: str) -> tuple[Path, str]:
    """Returns (file, function) of ``FILE:FUNCTION``.

    Raises:
        ConfigError: there is no such file.
    """
    file, _, name = source.rpartition(":")
    path = Path(file).resolve()
    if not file or not name or not path.is_file():
        raise ConfigError(f"--loop {source}: write FILE:FUNCTION with a Python file that exists, as train.py:loop")
    return path, name


def load_loop(source: str) -> Loop:
    """Returns the function that ``FILE:FUNCTION`` names.

    Raises:
        ConfigError: there is no such file, or no such function in it.
    """
    path, name = loop_file(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    loop = getattr(module, name, None)
    if not callable(loop):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"--loop {source}: {path.name} has no function '{name}'; it has {', '.join(functions[:12])}")
    found: Loop = loop
    return found


def loop_layouts(ranks: int) -> list[Layout]:
    """Returns the layouts that a loop which calls the model itself can run on some ranks."""
    layouts = []
    copies, shards, tensor = row_axes(Holds.COPY)[0], row_axes(Holds.SHARD)[0], axes_with(Mechanics.MATRICES)[0]
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for tp, shard in ((tp, shard) for tp in divisors for shard in divisors if ranks % (tp * shard) == 0):
        degrees = {copies: ranks // (tp * shard), shards: shard, tensor: tp}
        layouts += [Layout(degrees=degrees, zero=zero) for zero in ((1, 2, 3) if shard > 1 else (0,))]
    return layouts


def verify_loop(
    case: LoopCase, layouts: Sequence[Layout], done: Callable[[LoopVerdict], None] | None = None
) -> list[LoopVerdict]:
    """Runs the loop on one device, and under each layout after it, on forked ranks of this machine.

    Args:
        case: the loop.
        layouts: to be tried.
        done: told of each verdict as it is reached.

    Raises:
        ConfigError: there is no such loop, or it can't run on one device.
    """
    loop_file(case.source)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="meshwright-loop-") as folder:
        path = Path(folder) / "reference.pt"
        _launch(1, case, _reference, str(path))
        for layout in layouts:
            try:
                ranks = _launch(layout.world, case, _candidate, str(layout), str(path))
            except MeshwrightError as error:
                verdict = LoopVerdict(
                    layout=str(layout),
                    passed=False,
                    loss_error=math.nan,
                    weight_error=math.nan,
                    worst="",
                    refused=str(error),
                )
            else:
                verdict = _merged(layout, ranks, BOUNDS[case.dtype])
            verdicts.append(verdict)
            if done is not None:
                done(verdict)
    return verdicts


def _launch(ranks: int, case: LoopCase, work: Callable[..., Any], *args: Any) -> list[Any]:
    devices = Devices(kind="cpu", count=ranks, found=ranks, cores=ranks)
    return ForkLauncher(ranks, devices=devices).run(work, case, *args, timeout_s=case.timeout_s)


def _run(case: LoopCase, strategy: Any) -> list[torch.Tensor | float]:
    """Runs the loop from the same random state on every rank."""
    loop = load_loop(case.source)
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, case.dtype))
    torch.manual_seed(0)
    losses = loop(strategy)
    listed = None if losses is None or isinstance(losses, (str, float)) else list(losses)
    if not listed:
        raise ConfigError(
            f"--loop {case.source}: the function gave {losses!r}; it takes a strategy and returns its losses, a list"
        )
    return [item.detach() if isinstance(item, torch.Tensor) else item for item in listed]


class _ExactDevice(OneDevice):
    """One device on which a float64 model isn't rounded to float32 where its code asks for it, as under a layout."""

    def shard(self, model: Any, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
        """Returns the model, or what the function builds."""
        made = super().shard(model, optimizer, **options)
        assert self.model is not None
        if any(item.dtype == torch.float64 for item in self.model.parameters()):
            float64_ops.apply([self.model])
        return made


def _reference(_: RankContext, case: LoopCase, path: str) -> None:
    device = _ExactDevice()
    losses = [float(loss) for loss in _run(case, device)]
    if device.model is None:
        raise ConfigError(f"--loop {case.source}: the function never called strategy.shard(model): nothing is proven")
    weights = {name: item.detach().clone() for name, item in device.model.named_parameters()}
    torch.save({"losses": losses, "weights": weights}, path)


def _candidate(context: RankContext, case: LoopCase, text: str, path: str) -> dict[str, Any]:
    init_group(context, timeout_s=case.timeout_s, group_s=case.timeout_s)
    wanted = torch.load(path, weights_only=True)
    strategy = HybridParallelStrategy(text)
    losses = [strategy.mean(loss) for loss in _run(case, strategy)]
    equal = len(losses) == len(wanted["losses"])
    gaps = [_share(abs(loss - other), abs(other)) for loss, other in zip(losses, wanted["losses"])]
    # A weight's error is relative to its own largest entry, but to no less than a thousandth of the model's.
    floor = 1e-3 * max(float(item.abs().max()) for item in wanted["weights"].values() if item.numel())
    errors = {}
    for weight in strategy.weights:
        whole = wanted["weights"][weight.name]
        gap = (weight.local.cpu() - weight.part(whole)).abs()
        size = float(whole.abs().max()) if whole.numel() else 0.0
        errors[weight.name] = _share(float(gap.max()) if gap.numel() else 0.0, max(size, floor))
    return {"loss": max(gaps) if equal else math.inf, "weights": errors}


def _share(gap: float, size: float) -> float:
    """A gap relative to a size; infinite when it isn't finite."""
    return gap / max(size, 1e-300) if math.isfinite(gap) else math.inf


def _merged(layout: Layout, ranks: Sequence[dict[str, Any]], bound: float) -> LoopVerdict:
    """Takes the worst of all ranks."""
    loss = max(rank["loss"] for rank in ranks)
    worst, error = max((item for rank in ranks for item in rank["weights"].items()), key=lambda item: item[1])
    return LoopVerdict(
        layout=str(layout), passed=max(loss, error) <= bound, loss_error=loss, weight_error=error, worst=worst
    )
