"""The loop: steps, evaluation, checkpoints and a clean end. It knows no model family and no planner."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.store import CheckpointStore
from meshwright.errors import RankError
from meshwright.events import Event, StepRecord
from meshwright.monitor.monitor import Monitor
from meshwright.monitor.progress import ProgressWriter
from meshwright.parallel.program import Program
from meshwright.parallel.stage_module import Stamp
from meshwright.spec.layout import Layout
from meshwright.train.faults import Faults
from meshwright.train.feed import Feed
from meshwright.train.health import Health, Limits
from meshwright.train.hooks import Hook, Request, StepInfo
from meshwright.train.integrity import Integrity
from meshwright.train.memory import CUT_SHARE, RankMemory
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.rank_progress import RankProgress
from meshwright.train.rate import learning_rate
from meshwright.train.run_config import RunConfig
from meshwright.train.shortage import peak_bytes
from meshwright.train.state import load_state, save_state
from meshwright.train.step import StepOutcome, Stepper, mean_terms

SICK_STEPS = 5
"""Steps in a row without a finite gradient after which the run ends, unless a loss scale explains it."""
METERED_STEPS = 2
"""First steps in which the state's bytes are read off; later ones hold the same."""


@dataclass(kw_only=True, slots=True)
class TrainerDeps:
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
    memory: RankMemory | None = None
    """Where the state is copied every few steps, when somebody watches over the ranks."""
    sick_step: int = 0
    """Step up to whose rows the text is passed over, when ranks before these turned back from it; 0 for none."""
    faults: Faults | None = None
    """What is to go wrong on purpose."""


class Trainer:
    """Runs the steps of a run from wherever its state stands."""

    def __init__(self, parts: TrainerDeps) -> None:
        self._parts = parts
        self.step = 0
        self.tokens = 0
        self.validation_loss: float | None = None
        self._sick = 0
        self._health = Health(parts.config.recovery, parts.config.schedule.warmup_steps(parts.config.train.steps))
        watched = (parts.program, parts.optimizer, parts.store.agreement)
        self._integrity = Integrity(self._health, *watched, parts.memory, self._event)
        self._rewind = False
        self.passed_over = 0
        """Steps' worth of rows that were left out: the rows of a step are those of step + this."""
        self._saved_at = -1
        self._state_bytes: dict[str, int] = {}
        self._stamp = Stamp(phase=self._phase)
        self._standing = RankProgress(parts.progress, parts.faults, lambda: self.step)
        parts.program.progress_hooks.tell = self._standing.enter
        if parts.program.mesh is not None:
            parts.program.mesh.log.on_wait = self._standing.waits

    def resume(self) -> int:
        """Takes the state that ranks before these left in memory, else that of the newest whole checkpoint, if any.

        Returns:
            The steps done.
        """
        parts, began = self._parts, time.monotonic()
        self._phase("restore", 0)
        if parts.memory is not None and parts.memory.state is not None:
            values = parts.memory.restore(parts.program, parts.optimizer, parts.stepper.scaler)
            assert values is not None
            self.step = parts.memory.state.step
            self._adopt(values)
            parts.store.went_on(self.step)
            self._pass_over()
            told = {"tier": parts.memory.state.tier, "bytes": parts.memory.state.size_bytes}
            self._event("restored", step=self.step, seconds=time.monotonic() - began, **told)
            return self.step
        found = load_state(parts.store, parts.program, parts.optimizer, parts.stepper.scaler, parts.origin)
        if found is not None:
            self.step = self._saved_at = found.step
            self._adopt(found.meta)
            for refused in found.refused:
                self._event("checkpoint_refused", path=str(refused.path), reason=refused.reason)
            for asked in found.asked:
                self._event(**asked)
            self._event("resumed", step=found.step, path=str(found.path), seconds=found.seconds)
        self._pass_over()
        return self.step

    def _pass_over(self) -> None:
        """Leaves out the rows up to a sick step that ranks before these turned back from."""
        sick = self._parts.sick_step
        if sick > self.step + self.passed_over:
            self.passed_over = sick - self.step
            self._event("rewound", step=self.step, sick=sick, passed_over=self.passed_over)

    def _counters(self) -> dict[str, Any]:
        """What the loop itself remembers of earlier steps, beside step and tokens."""
        told = {"validation_loss": self.validation_loss, "sick": self._sick, "passed_over": self.passed_over}
        return told | self._health.state()

    def _adopt(self, values: Mapping[str, Any]) -> None:
        """Takes `_counters` and tokens back from a state's plain values."""
        self.tokens, self._sick = int(values["tokens"]), int(values.get("sick", 0))
        self.validation_loss = values.get("validation_loss")
        self.passed_over = int(values.get("passed_over", 0))
        self._health.restore(values)

    def run(self) -> dict[str, Any]:
        """Trains to the last step, or until asked to stop; leaves a checkpoint either way.

        Returns:
            How it ended: ``finished``, step, loss, validation loss and bits per byte.
        """
        parts, config = self._parts, self._parts.config
        steps = config.train.steps
        parts.program.clock.drain()
        self._integrity.start(self.step)
        stopped = cut = False
        last: StepRecord | None = None
        while self.step < steps and not stopped and not cut:
            stepped = self._one_step(steps)
            if stepped is None:
                return self._go_back(last)
            record, asked = stepped
            if last is None and parts.memory is not None and parts.memory.lost_at is not None:
                self._event("recovered", step=self.step, seconds=time.monotonic() - parts.memory.lost_at)
            last = record
            wanted = self._wanted(record, steps)
            cut = (0 < asked < 1 or self._rewind) and self.step < steps
            if asked >= 1 or Request.STOP in wanted:
                stopped = self.step < steps
            if Request.EVALUATE in wanted and self.step < steps:
                self.evaluate(config.evaluation.rows)
            if self._rewind and not stopped and self.step < steps:
                break
            saves = (Request.CHECKPOINT in wanted or stopped or self.step == steps) and self._saved_at != self.step
            copies = parts.memory is not None and (cut or parts.memory.due(self.step))
            if (saves or copies or self._integrity.due(self.step)) and not self._agrees():
                return self._go_back(last)
            if saves:
                self.save()
            if copies and parts.memory is not None and parts.memory.taken < self.step:
                self._copy()
        result: dict[str, Any] = {"finished": not stopped, "step": self.step, "loss": last.loss if last else None}
        if cut and not stopped:
            sick = self.step + self.passed_over if self._rewind else 0
            parts.monitor.goes_on = True
            return result | {"finished": False, "cut": True, "sick": sick}
        if stopped:
            self._event("interrupted", step=self.step)
        else:
            before = self.validation_loss
            result |= self.evaluate(None)
            if self.validation_loss is not None and not self._integrity.sound(steps, self.validation_loss, before):
                return self._go_back(last)
        self._phase("done", 0)
        return result

    def _agrees(self) -> bool:
        """Compares what several ranks hold; a state is kept only where that is the same."""
        self._phase("compare", 0)
        agrees = self._integrity.agrees(self.step, self._counters() | {"tokens": self.tokens})
        self._parts.program.clock.lap("compare")
        return agrees

    def _go_back(self, last: StepRecord | None) -> dict[str, Any]:
        """Returns how ranks end whose run others take up from an older state."""
        damage = self._integrity.damage
        assert damage is not None
        self._parts.monitor.goes_on = True
        told = {"step": self.step, "loss": last.loss if last else None, "damage": damage.to_json()}
        return {"finished": False, "cut": True, "sick": 0} | told

    def _copy(self) -> None:
        """Copies the state to memory that outlives this rank; where there is none for it, to the disk."""
        parts = self._parts
        assert parts.memory is not None
        if not parts.memory.copies:
            return self.save() if self._saved_at < self.step else None
        self._phase("snapshot", 0)
        parts.memory.take(self.step, parts.program, parts.optimizer, parts.stepper.scaler, self.tokens, **self._more())
        parts.program.clock.lap("snapshot")
        self._phase("record", 0)

    def _more(self) -> dict[str, Any]:
        """Returns what later ranks may want to know beside the state."""
        parts = self._parts
        peak = parts.peak_flops / parts.layout.world if parts.peak_flops else None
        return self._counters() | {"peak_flops": peak}

    def _one_step(self, steps: int) -> tuple[StepRecord, float] | None:
        """Runs a step; returns its record and how many ranks were asked to end, None where others must do it again."""
        parts, config = self._parts, self._parts.config
        began = time.perf_counter()
        self._standing.begin()
        self._phase("data", 0)
        place = self.step + self.passed_over
        batches = parts.feed.micro_batches(place)
        parts.program.clock.lap("data")
        rate = learning_rate(self.step, steps, config.optimizer.lr, config.schedule)
        targets, asked = parts.feed.targets(place), float(parts.stop_asked.requested)
        if parts.memory is not None and parts.memory.cut:
            asked += CUT_SHARE

        def run(limits: Limits | None) -> StepOutcome:
            return parts.stepper.run(self.step, batches, targets, rate, asked, self._stamp, limits)

        scaled, first = parts.stepper.scaler.active, run(self._integrity.limits(self.step))
        outcome, values = self._integrity.settled(self.step, first, scaled, run)
        if self._integrity.damage is not None:
            return None
        why = self._health.judge(values["loss"], values["grad_norm"])
        record = self._record(outcome, values, time.perf_counter() - began, why is not None)
        self._judge(record, why)
        self.step += 1
        self._phase("record", 0)
        self.tokens += record.tokens
        if self.step >= METERED_STEPS and parts.program.meter is not None:
            parts.program.meter.close()
            parts.program.meter = None
        if parts.memory is not None and parts.rank == 0:
            parts.memory.check_fence()
        parts.monitor.step(record)
        return record, values["stop"]

    def _record(self, outcome: StepOutcome, values: Mapping[str, float], step_s: float, skipped: bool) -> StepRecord:
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
            memory={"peak": peak_bytes()} | self._state_bytes,
            layout=str(parts.layout),
            accuracy=values["accuracy"],
            mfu=used,
            skipped=skipped,
            experts=outcome.experts,
            terms=outcome.terms,
            comm=parts.program.mesh.log.drain() if parts.program.mesh is not None else (),
            epoch=parts.feed.epoch(self.step + self.passed_over + 1),
        )

    def _judge(self, record: StepRecord, why: str | None) -> None:
        """Adapts the loss scale; skips, turns back from or ends at a sick step."""
        scaler, policy = self._parts.stepper.scaler, self._parts.config.recovery.on_sick
        finite = math.isfinite(record.grad_norm)
        scaler.update(finite)
        if why is None:
            self._sick = 0
            return
        self._sick += 1
        self._event("step_skipped", step=record.step, loss=record.loss, grad_norm=record.grad_norm, why=why)
        if scaler.active and scaler.scale > 1.0 and not finite:
            return
        if policy == "stop":
            raise RankError(
                f"loss {record.loss} and gradient norm {record.grad_norm} at step {record.step}: {why}; "
                "recovery.on_sick = stop ends the run, whose weights are those of the step before"
            )
        self._rewind = policy == "rewind"
        if finite or self._rewind:
            return
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
            ``validation_loss`` (the model's own loss; nats per token where that is the cross-entropy), ``accuracy``
            and, over all of the text, ``bits_per_byte``.
        """
        parts, began = self._parts, time.perf_counter()
        self._phase("evaluate", 0)
        total: torch.Tensor | None = None
        for number, batch in enumerate(parts.feed.evaluation(rows)):
            self._phase("evaluate", number)
            sums = parts.program.evaluate(batch)
            total = sums if total is None else total + sums
        if total is None:
            return {}
        summed = parts.stepper.total(total)
        sums_all, terms = summed.tolist(), mean_terms(summed, parts.program.terms)
        entropy = sums_all[0] / max(1.0, sums_all[1])
        loss = sum(terms.values()) if terms else entropy
        found = {"validation_loss": loss, "accuracy": sums_all[2] / max(1.0, sums_all[1])}
        if rows is None:
            found["bits_per_byte"] = parts.feed.bits_per_byte(entropy)
        self.validation_loss = loss
        seconds = time.perf_counter() - began
        told = {key.removeprefix("validation_"): value for key, value in found.items()}
        self._event("evaluated", step=self.step, targets=int(sums_all[1]), seconds=seconds, terms=terms, **told)
        parts.program.clock.drain()
        if parts.program.mesh is not None:
            parts.program.mesh.log.drain()
        return found

    def save(self) -> None:
        """Writes a checkpoint of the steps done, or leaves it to the supervisor to write."""
        parts = self._parts
        self._phase("checkpoint", 0)
        if parts.memory is not None and parts.memory.writes:
            limit_s = parts.config.checkpoint.wait_s
            parts.memory.save(
                self.step, parts.program, parts.optimizer, parts.stepper.scaler, self.tokens, limit_s, **self._more()
            )
            self._saved_at = self.step
            parts.program.clock.lap("snapshot")
            return
        scaler, counters = parts.stepper.scaler, self._counters()
        saved = save_state(
            parts.store, self.step, parts.program, parts.optimizer, scaler, parts.origin, self.tokens, **counters
        )
        self._saved_at = self.step
        self._event("checkpoint_saved", step=self.step, **saved.told())
        parts.program.clock.drain()

    @property
    def place(self) -> str:
        """Where this rank stands: ``backward of step 12``."""
        return str(self._standing)

    def held(self) -> dict[str, int]:
        """Returns the bytes that this rank holds: of state by part, as far as they were read, and the peak."""
        return self._state_bytes | {"peak": peak_bytes()}

    def _event(self, kind: str, **data: Any) -> None:
        """Reports from rank 0 what all ranks know."""
        if self._parts.rank == 0:
            self._parts.monitor.event(Event(kind=kind, rank=0, data=data))

    def _phase(self, phase: str, micro: int) -> None:
        self._standing.phase(phase, micro)
        if phase == "reduce" and self._parts.memory is not None:
            self._parts.memory.settle(self.step + 1)
        self._standing.planned()
