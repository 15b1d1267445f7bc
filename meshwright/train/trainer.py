"""The loop: steps, evaluation, checkpoints and a clean end. It knows no model family and no planner."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.store import CheckpointStore
from meshwright.errors import RankError
from meshwright.events import Event, StepRecord
from meshwright.monitor.monitor import Monitor
from meshwright.monitor.progress import ProgressWriter
from meshwright.plan import Layout
from meshwright.runtime.program import Program, Stamp
from meshwright.train.hooks import Hook, Request, StepInfo
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.rate import learning_rate
from meshwright.train.run_config import RunConfig
from meshwright.train.state import load_state, save_state
from meshwright.train.step import Outcome, Stepper

SICK_STEPS = 5
"""Steps in a row without a finite gradient after which the run ends, unless a loss scale explains it."""
METERED_STEPS = 2
"""First steps in which the state's bytes are read off; later ones hold the same."""


class Feed(Protocol):
    """Where a trainer gets its micro-batches from."""

    def micro_batches(self, step: int) -> Sequence[Any]:
        """Returns this rank's micro-batches of a step (steps done before it)."""

    def targets(self, step: int) -> int:
        """Returns the target tokens of a step's whole global batch."""

    def epoch(self, step: int) -> float:
        """Returns the passes over the training rows before a step."""

    def evaluation(self, rows: int | None) -> Iterator[Any]:
        """Yields this rank's batches of held-out rows, as many on every rank; None for all rows."""

    def bits_per_byte(self, loss: float) -> float:
        """Converts a loss over all held-out text, nats per token, to bits per byte of it."""


@dataclass(kw_only=True, slots=True)
class Parts:
    """What a trainer is made of, built by the session."""

    config: RunConfig
    layout: Layout
    program: Program
    optimizer: LocalAdamW
    stepper: Stepper
    feed: Feed
    store: CheckpointStore
    monitor: Monitor
    progress: ProgressWriter
    origin: Origin
    rank: int
    stop_asked: Any
    """Says by ``.requested`` whether this rank was asked to end."""
    flops_per_token: float = 0.0
    peak_flops: float | None = None
    """Of all devices together."""
    hooks: Sequence[Hook] = field(default_factory=tuple)


class Trainer:
    """Runs the steps of a run from wherever its state stands."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.step = 0
        self.tokens = 0
        self.validation_loss: float | None = None
        self._sick = 0
        self._saved_at = -1
        self._state_bytes: dict[str, int] = {}
        self._stamp = Stamp(phase=self._phase, waits=self._waits)
        self._now = ("start", 0)
        if parts.program.mesh is not None:
            parts.program.mesh.log.on_wait = self._waits

    def resume(self) -> int:
        """Takes the state of the newest checkpoint that is whole, if there is one; returns the steps done."""
        parts = self._parts
        found = load_state(parts.store, parts.program, parts.optimizer, parts.stepper.scaler, parts.origin)
        if found is None:
            return 0
        self.step, self.tokens = found.step, int(found.meta["tokens"])
        self._saved_at = found.step
        for refused in found.refused:
            self._event("checkpoint_refused", path=str(refused.path), reason=refused.reason)
        self._event("resumed", step=found.step, path=str(found.path), seconds=found.seconds)
        return self.step

    def run(self) -> dict[str, Any]:
        """Trains to the last step, or until asked to stop; leaves a checkpoint either way.

        Returns:
            How it ended: ``finished``, step, loss, validation loss and bits per byte.
        """
        parts, config = self._parts, self._parts.config
        steps = config.train.steps
        parts.program.clock.drain()
        stopped = False
        last: StepRecord | None = None
        while self.step < steps and not stopped:
            record, asked = self._one_step(steps)
            last = record
            wanted = self._wanted(record, steps)
            if asked or Request.STOP in wanted:
                stopped = self.step < steps
            if Request.EVALUATE in wanted and self.step < steps:
                self.evaluate(config.evaluation.rows)
            if (Request.CHECKPOINT in wanted or stopped or self.step == steps) and self._saved_at != self.step:
                self.save()
        result: dict[str, Any] = {"finished": not stopped, "step": self.step, "loss": last.loss if last else None}
        if stopped:
            self._event("interrupted", step=self.step)
        else:
            result |= self.evaluate(None)
        self._phase("done", 0)
        return result

    def _one_step(self, steps: int) -> tuple[StepRecord, bool]:
        parts, config = self._parts, self._parts.config
        began = time.perf_counter()
        self._phase("data", 0)
        batches = parts.feed.micro_batches(self.step)
        parts.program.clock.lap("data")
        rate = learning_rate(self.step, steps, config.optimizer.lr, config.schedule)
        targets, asked = parts.feed.targets(self.step), parts.stop_asked.requested
        outcome = parts.stepper.run(self.step, batches, targets, rate, asked, self._stamp)
        values = outcome.read()
        record = self._record(outcome, values, time.perf_counter() - began)
        self._judge(record)
        self.step += 1
        self.tokens += record.tokens
        if self.step >= METERED_STEPS and parts.program.meter is not None:
            parts.program.meter.close()
            parts.program.meter = None
        parts.monitor.step(record)
        return record, values["stop"] > 0

    def _record(self, outcome: Outcome, values: Mapping[str, float], step_s: float) -> StepRecord:
        parts, tokens = self._parts, int(values["targets"])
        spent = parts.program.clock.drain()
        rate = tokens / step_s
        if parts.program.meter is not None:
            self._state_bytes = parts.program.meter.read(parts.optimizer.bytes())
        used = parts.flops_per_token * rate / parts.peak_flops if parts.peak_flops else None
        return StepRecord(
            step=self.step + 1,
            loss=values["loss"],
            grad_norm=values["grad_norm"],
            lr=outcome.lr,
            tokens=tokens,
            tokens_total=self.tokens + tokens,
            tokens_per_s=rate,
            step_s=step_s,
            parts=spent | {"other": max(0.0, step_s - sum(spent.values()))},
            memory={"peak": _peak_bytes()} | self._state_bytes,
            layout=str(parts.layout),
            accuracy=values["accuracy"],
            mfu=used,
            skipped=not values["finite"],
            comm=parts.program.mesh.log.drain() if parts.program.mesh is not None else (),
            epoch=parts.feed.epoch(self.step + 1),
        )

    def _judge(self, record: StepRecord) -> None:
        """Adapts the loss scale; ends a run that only makes numbers that aren't finite."""
        scaler = self._parts.stepper.scaler
        scaler.update(not record.skipped)
        if not record.skipped:
            self._sick = 0
            return
        self._sick += 1
        self._event("step_skipped", step=record.step, loss=record.loss, grad_norm=record.grad_norm)
        if self._sick >= SICK_STEPS and (not scaler.active or scaler.scale <= 1.0):
            raise RankError(
                f"loss {record.loss} and gradient norm {record.grad_norm} at step {record.step}: not finite for "
                f"{self._sick} steps in a row; lower optimizer.lr = {self._parts.config.optimizer.lr}, lengthen "
                f"schedule.warmup, or look at the data; the last checkpoint stands"
            )

    def _wanted(self, record: StepRecord, steps: int) -> Request:
        config = self._parts.config
        wanted = Request.NONE
        if config.evaluation.every and self.step % config.evaluation.every == 0:
            wanted |= Request.EVALUATE
        if config.checkpoint.due(self.step):
            wanted |= Request.CHECKPOINT
        if self._parts.hooks:
            info = StepInfo(step=self.step, steps=steps, record=record, validation_loss=self.validation_loss)
            for hook in self._parts.hooks:
                wanted |= hook(info)
        return wanted

    def evaluate(self, rows: int | None) -> dict[str, float]:
        """Measures the validation loss over ``rows`` rows of the held-out text, or all of it.

        Returns:
            ``validation_loss`` (nats per token), ``accuracy`` and, over all of the text, ``bits_per_byte``.
        """
        parts, began = self._parts, time.perf_counter()
        self._phase("evaluate", 0)
        total: torch.Tensor | None = None
        for batch in parts.feed.evaluation(rows):
            sums = parts.program.evaluate(batch)
            total = sums if total is None else total + sums
        if total is None:
            return {}
        sums_all = parts.stepper.total(total).tolist()
        loss = sums_all[0] / max(1.0, sums_all[1])
        found = {"validation_loss": loss, "accuracy": sums_all[2] / max(1.0, sums_all[1])}
        if rows is None:
            found["bits_per_byte"] = parts.feed.bits_per_byte(loss)
        self.validation_loss = loss
        seconds = time.perf_counter() - began
        told = {key.removeprefix("validation_"): value for key, value in found.items()}
        self._event("evaluated", step=self.step, targets=int(sums_all[1]), seconds=seconds, **told)
        parts.program.clock.drain()
        if parts.program.mesh is not None:
            parts.program.mesh.log.drain()
        return found

    def save(self) -> None:
        """Writes a checkpoint of the steps done."""
        parts = self._parts
        self._phase("checkpoint", 0)
        saved = save_state(
            parts.store, self.step, parts.program, parts.optimizer, parts.stepper.scaler, parts.origin, self.tokens
        )
        self._saved_at = self.step
        told = {"path": str(saved.path), "bytes": saved.size_bytes, "seconds": saved.seconds}
        self._event("checkpoint_saved", step=self.step, **told)
        parts.program.clock.drain()

    def _event(self, kind: str, **data: Any) -> None:
        """Reports from rank 0 what all ranks know."""
        if self._parts.rank == 0:
            self._parts.monitor.event(Event(kind=kind, rank=0, data=data))

    def _phase(self, phase: str, micro: int) -> None:
        self._now = (phase, micro)
        self._parts.progress.stamp(phase, self.step + 1, micro)

    def _waits(self, what: str) -> None:
        phase, micro = self._now
        self._parts.progress.stamp(phase, self.step + 1, micro, what)


def _peak_bytes() -> int:
    """Returns the most memory this rank has used: allocated on its GPU, or resident on the host."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
