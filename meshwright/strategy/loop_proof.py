"""Proves a custom training loop: compares its losses and weights on one device with those under layouts.

The function is called with a strategy and returns its losses. On one device the strategy is `OneDevice`, plain torch.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError, MeshwrightError, nearest
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
    """The reason for which the loop couldn't run under the layout; nothing was compared then."""

    def to_json(self) -> dict[str, object]:
        """Returns plain values; infinite errors become strings that JSON can hold."""
        plain = asdict(self).items()
        return {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in plain
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopCase:
    """The loop to be proven, and how it is run."""

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
        ConfigError: there is no such file, it can't be imported, or there is no such function in it.
    """
    path, name = loop_file(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # the loop's file imports its neighbours
    sys.path.insert(0, str(path.parent))
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    # The file's code may raise anything.
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"--loop {source}: {path.name} can't be imported: {type(error).__name__}: {error} ({place.filename}, line "
            f"{place.lineno})"
        ) from error
    loop = getattr(module, name, None)
    if not callable(loop):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        own = [key for key in functions if vars(module)[key].__module__ == module.__name__]
        raise ConfigError(f"--loop {source}: {path.name} has no function '{name}'{nearest(name, own)}")
    typed_loop: Loop = loop
    return typed_loop


def check_loop(case: LoopCase) -> None:
    """Refuses a loop that isn't there, before anything is proven; its file is imported in a process of its own.

    Raises:
        ConfigError: as `load_loop`.
    """
    loop_file(case.source)
    if refusal := _launch(1, case, _loading_refusal)[0]:
        raise ConfigError(refusal)


def _loading_refusal(_: RankContext, case: LoopCase) -> str:
    """Returns why the loop can't be loaded; "" where it can."""
    try:
        load_loop(case.source)
    except ConfigError as error:
        return str(error)
    return ""


def loop_layouts(ranks: int) -> list[Layout]:
    """Returns the layouts that a loop which calls the model itself can run on some ranks."""
    layouts = []
    copies, shards, tensor = row_axes(Holds.COPY)[0], row_axes(Holds.SHARD)[0], axes_with(Mechanics.MATRICES)[0]
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    # replicate fills the ranks that tp and shard leave
    for tp, shard in ((tp, shard) for tp in divisors for shard in divisors if ranks % (tp * shard) == 0):
        degrees = {copies: ranks // (tp * shard), shards: shard, tensor: tp}
        layouts += [Layout(degrees=degrees, zero=zero) for zero in ((1, 2, 3) if shard > 1 else (0,))]
    return layouts


def verify_loop(
    case: LoopCase, layouts: Sequence[Layout], on_verdict: Callable[[LoopVerdict], None] | None = None
) -> list[LoopVerdict]:
    """Runs the loop on one device, then under each layout, on forked ranks of this machine.

    Args:
        case: the loop.
        layouts: to be run.
        on_verdict: called with each verdict as it is reached.

    Raises:
        ConfigError: there is no such loop, or it can't run on one device.
    """
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="meshwright-loop-") as folder:
        path = Path(folder) / "reference.pt"
        _launch(1, case, _reference, str(path))
        for layout in layouts:
            try:
                if layout.is_lossy:
                    raise ConfigError(
                        "rounded numbers on the wire are another training than one device's: leave compress, "
                        "compress_weights and compress_tokens out, and prove the rounding itself by meshwright verify "
                        "--model"
                    )
                ranks = _launch(layout.world, case, _candidate, str(layout), str(path))
            # a refusal is a result: the other layouts are still run
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
                verdict = _worst_of_ranks(layout, ranks, BOUNDS[case.dtype])
            verdicts.append(verdict)
            if on_verdict is not None:
                on_verdict(verdict)
    return verdicts


def _launch(ranks: int, case: LoopCase, work: Callable[..., object], *args: object) -> list[Any]:
    """Runs a function on forked ranks of this machine's CPU."""
    devices = Devices(kind="cpu", count=ranks, found=ranks, cores=ranks)
    return ForkLauncher(ranks, devices=devices).run(work, case, *args, timeout_s=case.timeout_s)


def _run(case: LoopCase, strategy: Any) -> list[torch.Tensor | float]:
    """Runs the loop from the same random state on every rank; returns its losses, scalars."""
    loop = load_loop(case.source)
    # the number of threads changes the order of sums
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


class ExactDevice(OneDevice):
    """One device that keeps a float64 model in float64 where its code asks for float32, as under a layout."""

    def shard(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> object:
        """Returns the model, or what the function builds."""
        result = super().shard(model, optimizer, **options)
        assert self.model is not None
        if any(parameter.dtype == torch.float64 for parameter in self.model.parameters()):
            float64_ops.apply([self.model])
        return result


def _reference(_: RankContext, case: LoopCase, path: str) -> None:
    """Runs the loop on one device and saves losses and weights."""
    device = ExactDevice()
    losses = [float(loss) for loss in _run(case, device)]
    if device.model is None:
        raise ConfigError(f"--loop {case.source}: the function never called strategy.shard(model): nothing is proven")
    weights = {name: parameter.detach().clone() for name, parameter in device.model.named_parameters()}
    torch.save({"losses": losses, "weights": weights}, path)


def _candidate(context: RankContext, case: LoopCase, text: str, path: str) -> dict[str, object]:
    """Runs the loop under a layout on one rank; returns its relative errors."""
    init_group(context, timeout_s=case.timeout_s, group_s=case.timeout_s)
    expected = torch.load(path, weights_only=True)
    strategy = HybridParallelStrategy(text)
    losses = [strategy.mean(loss) for loss in _run(case, strategy)]
    # a loop that stops at another step has failed
    equal = len(losses) == len(expected["losses"])
    loss_errors = [
        _relative_gap(abs(loss - expected_loss), abs(expected_loss))
        for loss, expected_loss in zip(losses, expected["losses"])
    ]
    # A weight's error is relative to its own largest entry, but to no less than a thousandth of the model's.
    floor = 1e-3 * max(float(item.abs().max()) for item in expected["weights"].values() if item.numel())
    errors = {}
    for weight in strategy.weights:
        full_weight = expected["weights"][weight.name]
        # each rank compares its own boxes; together they cover every weight
        gap = (weight.local.cpu() - weight.extract_shard(full_weight)).abs()
        size = float(full_weight.abs().max()) if full_weight.numel() else 0.0
        errors[weight.name] = _relative_gap(float(gap.max()) if gap.numel() else 0.0, max(size, floor))
    return {"loss": max(loss_errors) if equal else math.inf, "weights": errors}


def _relative_gap(gap: float, size: float) -> float:
    """Returns a gap relative to a size; infinite when it isn't finite."""
    return gap / max(size, 1e-300) if math.isfinite(gap) else math.inf


def _worst_of_ranks(layout: Layout, ranks: Sequence[dict[str, Any]], bound: float) -> LoopVerdict:
    """Returns the verdict by the worst rank."""
    loss = max(rank["loss"] for rank in ranks)
    worst, error = max((item for rank in ranks for item in rank["weights"].items()), key=lambda item: item[1])
    return LoopVerdict(
        layout=str(layout), passed=max(loss, error) <= bound, loss_error=loss, weight_error=error, worst=worst
    )
