"""Measures a custom loop: its steps become the lines of a run directory, as those of `meshwright train` are."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import tomli_w
import torch
import torch.distributed as dist
from torch import nn

from meshwright.config import read_toml
from meshwright.errors import ConfigError
from meshwright.events import CommTotals, Event, StepRecord, check_scalar
from meshwright.monitor.config import MonitorConfig
from meshwright.monitor.display import RunHeader
from meshwright.monitor.loop_timer import LoopTimer
from meshwright.monitor.monitor import Monitor
from meshwright.monitor.rundir import METER_LOCK, RunReader
from meshwright.monitor.sinks import EVENTS
from meshwright.monitor.trackers.registry import check_trackers
from meshwright.parallel.peak_memory import peak_bytes
from meshwright.parallel.program import Program

_TABLE = "meter"
"""Table of config.toml by which a metered run is known."""
_NEWEST_BYTES = 1 << 20


class ShardedProgram(Protocol):
    """A model that the runtime has split: `ShardedModel` of `meshwright.strategy`."""

    program: Program
    sync: Any
    """None where the runtime calls forward and backward itself."""


class MeteredStrategy(Protocol):
    """A `HybridParallelStrategy` or `PipelineEngine`."""

    @property
    def sharded_model(self) -> Any:
        """This rank's `ShardedProgram`; raises `ConfigError` before there is one."""


class Meter:
    """Opens a run directory for a custom loop, and measures the loop's steps; use it as a context.

    ::

        with meter("runs/mine", strategy, steps=1000) as m:
            for x, y in loader:
                ...                                  # forward, backward, optimizer.step()
                m.scalar("my/norm", norm)
                m.step(loss=loss, tokens=x.numel())

    Every rank makes one and calls `step` once an optimizer step; rank 0 writes. It sends nothing between ranks.

    Args:
        run_dir: made where it is missing; one of an earlier metered loop is gone on with.
        of: the strategy or engine that runs the model, or a module of plain PyTorch: gives time parts and traffic.
        steps: of the whole loop, for displays; 0 for unknown.
        start: steps done before this loop, later lines of an earlier one are dropped; all that it recorded when None.
        settings: of the loop, for comparisons and trackers; plain values.
        config: TensorBoard, trackers, report; no display when None.

    Raises:
        ConfigError: a page is asked for, or a tracker is missing; as a context, when the directory is another run's,
            or another loop writes there.
    """

    def __init__(
        self,
        run_dir: str | Path,
        of: MeteredStrategy | nn.Module | None = None,
        *,
        steps: int = 0,
        start: int | None = None,
        settings: Mapping[str, Any] | None = None,
        config: MonitorConfig | None = None,
    ) -> None:
        self._run_dir, self._of, self._steps, self._start = Path(run_dir), of, steps, start
        self._settings, self._config = dict(settings or {}), config or MonitorConfig(display="none")
        if self._config.port is not None:
            raise ConfigError(f"monitor.port = {self._config.port}: type meshwright watch {run_dir} beside the loop")
        self._config.check_all("monitor")
        check_trackers(self._config.trackers)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._stack = contextlib.ExitStack()
        self._monitor: Monitor | None = None
        self._timer: LoopTimer | None = None
        self._program: Program | None = None
        self._scalars: dict[str, float] = {}
        self._layout = ""
        self._step, self._tokens, self._began_s = 0, 0, 0.0
        self._loss: float | None = None

    def __enter__(self) -> Self:
        """Opens the run directory, on rank 0, and attaches the hooks."""
        with contextlib.ExitStack() as stack:
            if self._rank == 0:
                self._claim_directory(stack)
            self._run_dir.mkdir(parents=True, exist_ok=True)
            header = RunHeader(steps=self._steps, rows={}, progress=self._run_dir / "progress.bin")
            resumed_step = self._step if self._step or self._start is not None else None
            monitor = Monitor.build(self._config, self._run_dir, header, self._rank, resumed_step)
            self._monitor = stack.enter_context(monitor)
            self._timer = LoopTimer(stack)
            self._attach(self._timer)
            device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else "cpu"
            monitor.event(Event(kind="rank_started", rank=self._rank, data={"device": device}))
            if self._rank == 0:
                kind = "resumed" if self._step else "run_started"
                monitor.event(Event(kind=kind, rank=0, data={"step": self._step}))
            self._stack = stack.pop_all()
        self._began_s = time.perf_counter()
        self._drain()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Records how the loop ended, and closes the run directory."""
        with self._stack:
            if self._monitor is not None and self._rank == 0:
                fields: dict[str, object] = {"step": self._step, "loss": self._loss}
                if kind is None:
                    ending = "run_finished"
                else:
                    ending = "interrupted" if issubclass(kind, KeyboardInterrupt) else "failed"
                    fields["error"] = f"{kind.__name__}: {error}"
                self._monitor.event(Event(kind=ending, rank=0, data=fields))
        self._monitor = None

    def scalar(self, name: str, value: float) -> None:
        """Adds a number to the step under way: its line of metrics, curves, Prometheus and trackers.

        Raises:
            ConfigError: for a name that can't be one.
        """
        self._scalars[check_scalar(name)] = float(value)

    def step(
        self,
        *,
        loss: float | torch.Tensor = math.nan,
        tokens: int = 0,
        lr: float | None = None,
        grad_norm: float | torch.Tensor = math.nan,
        accuracy: float = 0.0,
    ) -> None:
        """Ends a step: records its numbers, and its time since the last one; call it after the optimizer's step.

        Args:
            loss: of the step; a tensor of shape () makes the host of rank 0 wait for its device.
            tokens: target tokens of the global batch.
            lr: learning rate; that of the optimizer's first group when None.
            grad_norm: of the gradient before clipping; a number, or a tensor of shape ().
            accuracy: share of target tokens that were predicted right.

        Raises:
            ConfigError: outside of the context.
        """
        if self._monitor is None or self._timer is None:
            raise ConfigError("meter: step() belongs into `with meter(run_dir) as m:`")
        scalars, self._scalars = self._scalars, {}
        loss_value, norm_value = (_to_number(loss), _to_number(grad_norm)) if self._rank == 0 else (math.nan, math.nan)
        self._timer.wait()
        # Read before the drain, where the next step's parts begin: they lie within the step, however late the host is.
        now_s = time.perf_counter()
        parts, comm = self._drain()
        step_s, self._began_s = now_s - self._began_s, now_s
        self._step += 1
        self._tokens += tokens
        if self._rank == 0:
            self._loss = loss_value
            record = StepRecord(
                step=self._step, loss=loss_value, grad_norm=norm_value, lr=self._timer.rate if lr is None else lr,
                tokens=tokens, tokens_total=self._tokens, tokens_per_s=tokens / step_s, step_s=step_s,
                parts=parts | {"other": parts.get("other", 0.0) + max(0.0, step_s - sum(parts.values()))},
                memory={"peak": peak_bytes()} | self._timer.state_bytes, layout=self._layout, accuracy=accuracy,
                comm=comm, scalars=scalars,
            )  # fmt: skip
            self._monitor.step(record)

    def evaluated(self, loss: float | torch.Tensor, **numbers: float) -> None:
        """Records the validation loss after the steps so far, and other numbers of the evaluation by name."""
        if self._monitor is not None and self._rank == 0:
            fields = {"step": self._step, "loss": _to_number(loss)} | numbers
            self._monitor.event(Event(kind="evaluated", rank=0, data=fields))

    def _claim_directory(self, stack: contextlib.ExitStack) -> None:
        """Claims the directory for this loop, and finds the step that it goes on from.

        Raises:
            ConfigError: when it is another run's, or another loop writes there.
        """
        run_dir, path = self._run_dir, self._run_dir / "config.toml"
        if path.exists() and _TABLE not in read_toml(path):
            raise ConfigError(f"{run_dir} is the directory of another kind of run; give the loop one of its own")
        # Another rank may be here already, with its first event.
        present = {child.name for child in run_dir.iterdir()} if run_dir.is_dir() else set()
        if not path.exists() and present - {METER_LOCK, EVENTS}:
            raise ConfigError(f"{run_dir} holds files but no run; give a new directory")
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(run_dir / METER_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        stack.callback(os.close, lock)
        try:
            # The kernel lets go of it when this process ends, however it does.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{run_dir}: another loop measures itself into it; give another directory") from None
        earlier = RunReader(run_dir, newest_bytes=_NEWEST_BYTES if self._start is None else None).read().steps
        earlier = [line for line in earlier if self._start is None or line["step"] <= self._start]
        last = earlier[-1] if earlier else {}
        self._step = int(last.get("step", 0)) if self._start is None else self._start
        total = last.get("tokens_total")
        self._tokens = total if isinstance(total, int) else 0
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        steps = {"train": {"steps": self._steps}} if self._steps else {}
        temporary = run_dir / ".config.toml.new"
        temporary.write_text(tomli_w.dumps({_TABLE: {"ranks": ranks}, "settings": self._settings} | steps), "utf-8")
        temporary.replace(path)

    def _attach(self, timer: LoopTimer) -> None:
        """Finds what the model's time and traffic are read from; a model may be split after the meter is opened."""
        if isinstance(self._of, nn.Module):
            timer.watch(self._of)
        elif self._of is not None and self._program is None:
            try:
                sharded: ShardedProgram = self._of.sharded_model
            except ConfigError:
                return
            self._program = sharded.program
            if sharded.sync is not None:
                timer.watch(sharded.program.module)
            if sharded.program.mesh is not None:
                self._layout = str(sharded.program.mesh.layout)

    def _drain(self) -> tuple[dict[str, float], tuple[CommTotals, ...]]:
        """Returns the parts and the traffic since the last call."""
        assert self._timer is not None
        parts = self._timer.drain()
        if self._program is None and self._of is not None and not isinstance(self._of, nn.Module):
            self._attach(self._timer)
        if self._program is None:
            return parts, ()
        for name, seconds in self._program.step_timer.drain().items():
            parts[name] = parts.get(name, 0.0) + seconds
        return parts, self._program.mesh.log.drain() if self._program.mesh is not None else ()


meter = Meter
"""``with meter(run_dir, strategy) as m:``; see `Meter`."""


def _to_number(value: float | torch.Tensor) -> float:
    """Returns a number of the loop; a loss that still has its graph is one too."""
    return float(value.detach() if isinstance(value, torch.Tensor) else value)
