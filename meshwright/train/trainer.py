# long: the loop of a rank, from its restored state to its end, is one class
"""The training loop: steps, evaluation, checkpoints, snapshots and an orderly end; independent of model and planner."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping

import torch

from meshwright.errors import RankError
from meshwright.events import Event, StepRecord
from meshwright.json_types import JsonObject
from meshwright.parallel.peak_memory import peak_bytes
from meshwright.parallel.stage_module import Stamp
from meshwright.train.health import Health, Limits
from meshwright.train.hooks import Request, StepInfo
from meshwright.train.integrity import Integrity
from meshwright.train.join_report import VOTES, JoinReport
from meshwright.train.launched_step import LaunchedStep
from meshwright.train.noise_scale import NoiseScale
from meshwright.train.outcome import TrainOutcome
from meshwright.train.outer import OuterOptimizer
from meshwright.train.page_requests import split_stop_count
from meshwright.train.rank_progress import RankProgress
from meshwright.train.rate import RateSchedule
from meshwright.train.site_optimizer import SiteOptimizer, SiteReport
from meshwright.train.state import load_state, plain_values, save_state, saved_islands
from meshwright.train.step import StepAbandoned, StepOutcome, mean_terms
from meshwright.train.step_launcher import StepLauncher
from meshwright.train.step_recorder import METERED_STEPS, StepRecorder
from meshwright.train.trainer_deps import TrainerDeps

ANOMALOUS_STEPS = 5
"""Steps in a row without a finite gradient after which the run ends, unless a loss scale explains it."""


class Trainer:
    """Runs a training job's steps from its restored state to its end."""

    def __init__(self, deps: TrainerDeps) -> None:
        self._deps = deps
        self.step = self.tokens = 0
        self.validation_loss: float | None = None
        self._anomalous_steps = 0
        self._rates = RateSchedule(deps.config)
        self._health = Health(deps.config.recovery, self._rates.warmup, self._rates.progress)
        state = (deps.program, deps.optimizer, deps.store.agreement)
        events = (self._event, self._step_event)
        self._integrity = Integrity(
            self._health, *state, deps.memory, *events,
            rewinds_steps=deps.outer is None, copies_in_islands=deps.layout.within_island().world > 1,
        )  # fmt: skip
        self._join: JoinReport | SiteReport | None = None
        self._must_rewind = False
        self._last: StepRecord | None = None
        """Of the last step whose outcome was read."""
        self._unread: LaunchedStep | None = None
        """The step before the one that is queued, while its outcome wasn't read."""
        self._page_requested = Request.NONE
        self.passed_over = 0
        """Skipped batches: step s reads the batch of step s + ``passed_over``."""
        self._saved_at = -1
        self._stamp = Stamp(phase=self._phase)
        self._position = RankProgress(deps.progress, deps.faults, lambda: self.step, deps.timeline)
        self._noise = NoiseScale(deps.config.train.noise_scale, deps.config.train.batch)
        self._launcher = StepLauncher(deps, self._noise, self._rates, self._position, self._stamp)
        self._recorder = StepRecorder(deps, self._noise, self._rates)
        self._position.attach(deps.program)

    def resume(self) -> int:
        """Restores the state that the previous ranks left in memory, else the newest complete checkpoint, if any.

        Returns:
            The steps done.
        """
        deps, started = self._deps, time.monotonic()
        self._phase("restore", 0)
        if deps.memory is not None and deps.memory.state is not None:
            values = deps.memory.restore(deps.program, deps.optimizer, deps.stepper.scaler)
            assert values is not None
            self.step = deps.memory.state.step
            self._adopt(values)
            self._report_islands(saved_islands(deps.memory.state.names))
            deps.store.resumed_after(self.step)
            self._skip_anomalous_rows()
            fields = {"tier": deps.memory.state.tier, "bytes": deps.memory.state.size_bytes}
            self._event("restored", step=self.step, seconds=time.monotonic() - started, **fields)
            return self.step
        checkpoint = load_state(deps.store, deps.program, deps.optimizer, deps.stepper.scaler, deps.origin)
        if checkpoint is not None:
            self.step = self._saved_at = checkpoint.step
            self._adopt(checkpoint.meta)
            for refused in checkpoint.refused:
                self._event("checkpoint_refused", path=str(refused.path), reason=refused.reason)
            for notice in checkpoint.mirror_events:
                self._event(**notice)
            self._event("resumed", step=checkpoint.step, path=str(checkpoint.path), seconds=checkpoint.seconds)
            self._report_islands(saved_islands(checkpoint.manifest.tensors))
            if reason := self._rates.nothing_left(self.step):
                self._event("nothing_left", step=self.step, reason=reason)
        self._skip_anomalous_rows()
        return self.step

    def _report_islands(self, saved: int) -> None:
        """Reports that a state of another number of islands was restored, and what became of theirs."""
        islands = self._deps.outer.islands if self._deps.outer is not None else 0
        if saved != islands:
            why = (
                "every rank starts from the outer weights with the moments of island 0; the open round is lost"
                if saved
                else "every island starts from the run's weights and moments; the outer momentum starts at 0"
            )
            self._event("islands_changed", step=self.step, saved=max(1, saved), islands=max(1, islands), why=why)

    def _skip_anomalous_rows(self) -> None:
        """Skips the batches up to the anomalous step from which the previous ranks were rewound."""
        anomalous_step = self._deps.anomalous_step
        if anomalous_step > self.step + self.passed_over:
            self.passed_over = anomalous_step - self.step
            self._event("rewound", step=self.step, sick=anomalous_step, passed_over=self.passed_over)

    def _counters(self) -> dict[str, object]:
        """Returns the loop's own plain values for a checkpoint, beside step and tokens."""
        return self._shared_counters() | self._island_counters()

    def _shared_counters(self) -> dict[str, object]:
        """Returns those of `_counters` that all ranks share."""
        values: dict[str, object] = {"validation_loss": self.validation_loss, "passed_over": self.passed_over}
        return {**values, **self._noise.state(), **self._rates.state()}

    def _island_counters(self) -> dict[str, object]:
        """Returns those of `_counters` that follow from an island's own losses and norms."""
        return {"sick": self._anomalous_steps} | self._health.state()

    def _adopt(self, values: JsonObject) -> None:
        """Restores tokens and `_counters` from a state's plain values."""
        self.tokens, self._anomalous_steps = int(values["tokens"]), int(values.get("sick", 0))
        self.validation_loss = values.get("validation_loss")
        self.passed_over = int(values.get("passed_over", 0))
        self._health.restore(values)
        self._noise.restore(values)
        self._rates.restore(values)

    def run(self) -> TrainOutcome:
        """Trains to the last step or until asked to stop, and saves a checkpoint either way; returns how it ended."""
        deps, config = self._deps, self._deps.config
        deps.program.step_timer.drain()
        self._integrity.start(self.step)
        stopped = reconfigures = False
        while not self._is_over(self.step) and not stopped and not reconfigures:
            is_first = self._last is None
            stepped = self._one_step()
            if stepped is None:
                return self._end_damaged()
            record, stop_count = stepped
            if is_first and deps.memory is not None and deps.memory.lost_at is not None:
                self._event("recovered", step=self.step, seconds=time.monotonic() - deps.memory.lost_at)
            if is_first and deps.memory is not None:
                deps.memory.prepare(deps.program, deps.optimizer)
            requests, is_over = self._requests(record), self._is_over(self.step)
            # The all-reduced count: 1 or more from ranks that were asked to stop, below 1 for a reconfiguration.
            reconfigures = (0 < stop_count < 1 or self._must_rewind) and not is_over
            if stop_count >= 1 or Request.STOP in requests:
                stopped = not is_over
            if Request.EVALUATE in requests and not is_over:
                self.evaluate(config.evaluation.rows)
            # The supervisor restarts from a checkpoint: saving this state would be in vain.
            if self._must_rewind and not stopped and not is_over:
                break
            saves = (Request.CHECKPOINT in requests or stopped or is_over) and self._saved_at != self.step
            copies = deps.memory is not None and (reconfigures or deps.memory.due(self.step))
            # Never save a state that some ranks hold differently: it would outlive the intact one.
            if (saves or copies or self._integrity.due(self.step)) and not self._agrees():
                return self._end_damaged()
            if saves:
                self.save()
            if copies and deps.memory is not None and deps.memory.snapshot_step < self.step:
                self._copy()
        loss = self._last.loss if self._last is not None else None
        if reconfigures and not stopped:
            anomalous_step = self.step + self.passed_over if self._must_rewind else 0
            deps.monitor.continues = True
            return TrainOutcome(step=self.step, loss=loss, continues=True, anomalous_step=anomalous_step)
        metrics: dict[str, float] = {}
        if stopped:
            self._event("interrupted", step=self.step)
        else:
            previous = self.validation_loss
            metrics = self.evaluate(None)
            last_loss = self.validation_loss
            if last_loss is not None and not self._integrity.sound(self.step, last_loss, previous):
                return self._end_damaged()
            metrics |= self._rates.outcome(self.step)
        self._phase("done", 0)
        return TrainOutcome(step=self.step, loss=loss, finished=not stopped, metrics=metrics)

    def _is_over(self, step: int) -> bool:
        """Returns, the same on all ranks, whether the run ends after so many steps."""
        return self._rates.is_over(step)

    def _agrees(self) -> bool:
        """Returns whether the state's copies agree on all ranks, which is required to save it."""
        self._phase("compare", 0)
        deps, counters = self._deps, self._counters()
        if deps.outer is not None:
            counters = self._shared_counters()
            own = plain_values(deps.optimizer, deps.stepper.scaler, self.tokens) | self._island_counters()
            deps.outer.prepare_state(own)
            if deps.memory is not None:
                # No island may overwrite its older snapshot before all have completed the last one.
                deps.memory.wait()
            deps.store.agreement.gather(self.step)
        # After the last step that islands take as one their states are still equal.
        joint = self._is_joint(self.step - 1)
        agrees = self._integrity.agrees(self.step, counters | {"tokens": self.tokens}, joint)
        self._deps.program.step_timer.lap("compare")
        return agrees

    def _end_damaged(self) -> TrainOutcome:
        """Returns the outcome of ranks that end because of a damage, so that others continue from an older state."""
        damage = self._integrity.damage
        assert damage is not None
        self._deps.monitor.continues = True
        loss = self._last.loss if self._last is not None else None
        return TrainOutcome(step=self.step, loss=loss, continues=True, damage=damage)

    def _copy(self) -> None:
        """Takes a snapshot of the state; writes a checkpoint instead where host memory doesn't allow snapshots."""
        deps, memory = self._deps, self._deps.memory
        assert memory is not None
        if not memory.takes_snapshots:
            return self.save() if self._saved_at < self.step else None
        self._phase("snapshot", 0)
        scaler = deps.stepper.scaler
        memory.save_snapshot(self.step, deps.program, deps.optimizer, scaler, self.tokens, **self._values())
        deps.program.step_timer.lap("snapshot")
        self._phase("record", 0)

    def _values(self) -> dict[str, object]:
        """Returns the plain values of a snapshot."""
        deps = self._deps
        peak = deps.peak_flops / deps.layout.world if deps.peak_flops else None
        return self._counters() | {"peak_flops": peak}

    def _one_step(self) -> tuple[StepRecord, float] | None:
        """Runs steps up to one whose outcome is read at its end.

        On a GPU there may be steps before it whose outcome is read late: once the next one is queued up to its update,
        so that the device computes while the host reads. Such a step updates the weights and asks for nothing. Where
        one doesn't, the next one is abandoned, and this one handled as if it had been read at its end.

        Returns:
            The step's record and all-reduced stop count; None when a damage was detected.
        """
        while True:
            try:
                launched = self._launcher.launch(self.step, self.passed_over, self._limits)
                reads_now = self._reads_at_end(launched.step + 1)
            except StepAbandoned:
                launched, reads_now = self._step_before_abandoned(), True
            except Exception:
                self._record_before_error()
                raise
            if reads_now:
                settled = self._settle(launched)
                if settled is not None:
                    self._phase("record", 0)
                return settled
            launched.take_measurements(self._deps.program)
            self._unread, self.step = launched, launched.step + 1
            self._phase("record", 0)

    def _step_before_abandoned(self) -> LaunchedStep:
        """Returns the unread step, in whose state everything is once what the abandoned one left is dropped."""
        launched, self._unread = self._unread, None
        assert launched is not None
        self.step = launched.step
        self._position.phase("optimizer", 0)
        self._deps.program.clear_gradients()
        launched.put_measurements_back(self._deps.program)
        return launched

    def _record_before_error(self) -> None:
        """Records the step before one that raises, where its outcome wasn't read and has arrived."""
        if self._unread is None or self._unread.laps is None:
            return
        # Whatever is wrong with this one too, the error that ends the run is the other.
        with contextlib.suppress(Exception):
            if self._unread.laps.have_ended():
                try:
                    self._settle_late()
                except StepAbandoned:
                    self._record_unsettled(self._unread)

    def _record_unsettled(self, launched: LaunchedStep) -> None:
        """Records a step as it was first computed: nothing is computed again, or handled, behind an error."""
        values = launched.outcome.read()
        skipped = not self._integrity.updates(launched.step, values)
        reason = self._health.judge(values["loss"], values["grad_norm"])
        record = self._make_record(launched, launched.outcome, values, skipped)
        if reason is not None:
            self._report_skipped(record, reason)
        self._deps.monitor.step(record)

    def _limits(self) -> Limits | None:
        """Returns the limits of the step that is queued, once the step before it is settled.

        Raises:
            StepAbandoned: when the step before isn't as it must be to be read late.
        """
        self._settle_late()
        return self._integrity.limits(self.step)

    def _reads_at_end(self, step: int) -> bool:
        """Returns, the same on all ranks, whether the outcome of a step is read at its end.

        Args:
            step: steps done with it.
        """
        deps, config = self._deps, self._deps.config
        acts_on_each_step = deps.hooks or deps.outer is not None or config.recovery.faults
        # The loss scale, and buffers that forward changes: the next forward would begin with them.
        changes_next_forward = deps.stepper.scaler.active or deps.program.moving_buffers.names
        is_first = self._last is None or step <= METERED_STEPS
        evaluates = config.evaluation.every and step % config.evaluation.every == 0
        saves = self._is_over(step) or config.checkpoint.due(step) or self._integrity.due(step)
        copies = deps.memory is not None and deps.memory.due(step)
        # The rate of the next step follows from what this one measures.
        measures = self._rates.follows_noise and self._noise.is_due(step - 1)
        reads_for_state = is_first or evaluates or saves or copies or measures
        return bool(not deps.reads_late or acts_on_each_step or changes_next_forward or reads_for_state)

    def _settle_late(self) -> None:
        """Settles the step before the one that is queued, where its outcome wasn't read.

        Raises:
            StepAbandoned: when it didn't update the weights, is suspect, or ranks were asked for something in it.
        """
        if self._unread is None:
            return
        values = self._unread.outcome.read()
        if values["stop"] or not self._integrity.updates(self._unread.step, values):
            raise StepAbandoned
        unread, self._unread = self._unread, None
        settled = self._settle(unread)
        assert settled is not None
        self._deps.monitor.step(settled[0])

    def _settle(self, launched: LaunchedStep) -> tuple[StepRecord, float] | None:
        """Reads a step's outcome and acts on it.

        Returns:
            Its record and all-reduced stop count; None when a damage was detected.
        """
        deps, scaled = self._deps, self._deps.stepper.scaler.active
        outcome, values = self._integrity.settled(launched.step, launched.outcome, scaled, launched.run_within)
        if self._integrity.damage is not None:
            return None
        values["stop"] = self._take_page_requests(values["stop"])
        reason = self._health.judge(values["loss"], values["grad_norm"])
        if deps.outer is not None:
            stop_count = self._join_islands(deps.outer, values, reason is None)
            if stop_count is None:
                return None
            values |= {"stop": stop_count, "targets": launched.targets}
        self._last = record = self._make_record(launched, outcome, values, skipped=reason is not None)
        self._handle_anomaly(record, reason)
        self.step = launched.step + 1
        self.tokens += record.tokens
        if deps.memory is not None and deps.rank == 0:
            deps.memory.check_fence()
        return record, values["stop"]

    def _make_record(
        self, launched: LaunchedStep, outcome: StepOutcome, values: Mapping[str, float], skipped: bool
    ) -> StepRecord:
        return self._recorder.record(
            launched,
            outcome,
            values,
            tokens_before=self.tokens,
            epoch=self._deps.feed.epoch(launched.step + self.passed_over + 1),
            skipped=skipped,
            joined=self._join.to_json() if self._join is not None else {},
        )

    @contextlib.contextmanager
    def dialled_in(self) -> Iterator[None]:
        """Has a site take the present version of its server, where steps are left, and hang up at the context's end."""
        outer = self._deps.outer
        if not isinstance(outer, SiteOptimizer):
            yield
            return
        outer.stamp = lambda: self._phase("server", 0)
        try:
            if not self._is_over(self.step):
                version = outer.dial_in()
                self._event("site_dialled_in", step=self.step, version=version, meet=self._deps.config.outer.meet)
            yield
            outer.leave()
        finally:
            outer.close()

    def _take_page_requests(self, total: float) -> float:
        """Takes the page's requests, the same on all ranks of a step, out of its stop count; returns the rest."""
        deps = self._deps
        stop_count, self._page_requested = split_stop_count(total)
        if deps.page_requests is not None and self._page_requested:
            deps.page_requests.answer(self._page_requested)
            actions = [flag.name.lower() for flag in self._page_requested if flag.name]
            deps.monitor.event(Event(kind="requested", rank=deps.rank, data={"step": self.step + 1, "what": actions}))
        return stop_count

    def _is_joint(self, step: int) -> bool:
        """Returns whether all islands take the step after so many steps as one (`outer.warmup`)."""
        outer = self._deps.outer
        return isinstance(outer, OuterOptimizer) and outer.is_joint(step)

    def _join_islands(
        self, outer: OuterOptimizer | SiteOptimizer, values: Mapping[str, float], updated: bool
    ) -> float | None:
        """Counts a step of this island and joins the islands where a round ends.

        Args:
            outer: the outer optimizer.
            values: of the step, as `StepOutcome.read` returns them.
            updated: whether the step changed the weights.

        Returns:
            The stop count of all islands: 0 within a round, since they must agree on the step; None, on all islands,
            when a rank's state is damaged.
        """
        self._phase("join", 0)
        step, tokens = self.step + 1, values["targets"] if updated else 0.0
        last, joint = self._is_over(step), self._is_joint(self.step)
        if not joint:
            outer.request_stop(values["stop"])
        if outer.sends_ahead(step, last):
            self._integrity.note_state()
        if outer.ends_round(step, last):
            outer.receive(step, last)
            # A join would spread one rank's damage to all islands, and start their bounds from it.
            if not self._integrity.may_join(step, self._shared_counters() | {"tokens": self.tokens}):
                return None
        self._join = outer.after_step(step, tokens, values["loss"], last)
        self._deps.program.step_timer.lap("join")
        if self._join is not None:
            self._integrity.joined()
        # All islands counted alike in a step that they took as one.
        if joint:
            return values["stop"]
        return self._join.stop_count if self._join is not None else 0.0

    def _handle_anomaly(self, record: StepRecord, reason: str | None) -> None:
        """Adapts the loss scale; skips, rewinds from or stops at an anomalous step, as `recovery.on_sick` says."""
        scaler, policy = self._deps.stepper.scaler, self._deps.config.recovery.on_sick
        finite = math.isfinite(record.grad_norm)
        scaler.update(finite)
        if reason is None:
            self._anomalous_steps = 0
            return
        self._anomalous_steps += 1
        self._report_skipped(record, reason)
        if scaler.active and scaler.scale > 1.0 and not finite:
            return
        if policy == "stop":
            raise RankError(
                f"loss {record.loss} and gradient norm {record.grad_norm} at step {record.step}: {reason}; "
                "recovery.on_sick = stop ends the run, whose weights are those of the step before"
            )
        self._must_rewind = policy == "rewind"
        if finite or self._must_rewind:
            return
        if self._anomalous_steps >= ANOMALOUS_STEPS and (not scaler.active or scaler.scale <= 1.0):
            raise RankError(
                f"loss {record.loss} and gradient norm {record.grad_norm} at step {record.step}: not finite for "
                f"{self._anomalous_steps} steps in a row; lower optimizer.lr = {self._deps.config.optimizer.lr}, "
                f"lengthen schedule.warmup, or look at the data; the last checkpoint stands"
            )

    def _report_skipped(self, record: StepRecord, reason: str) -> None:
        self._step_event("step_skipped", step=record.step, loss=record.loss, grad_norm=record.grad_norm, why=reason)

    def _requests(self, record: StepRecord) -> Request:
        """Calls the hooks, and records the step with their scalars; returns what is asked for."""
        scalars = dict(record.scalars)
        try:
            return self._ask_hooks(record, scalars)
        finally:
            # A hook that raises ends the run, not the record of its last step.
            record = dataclasses.replace(record, scalars=scalars) if scalars else record
            self._deps.monitor.step(record)

    def _ask_hooks(self, record: StepRecord, scalars: dict[str, float]) -> Request:
        config = self._deps.config
        requests = Request.NONE
        if config.evaluation.every and self.step % config.evaluation.every == 0:
            requests |= Request.EVALUATE
        if config.checkpoint.due(self.step):
            requests |= Request.CHECKPOINT
        # The page's requests are executed as those of a hook.
        hook_requests, outer = self._page_requested, self._deps.outer
        if self._deps.hooks:
            counts = {"step": self.step, "steps": self._rates.last_step(self.step)}
            info = StepInfo(**counts, record=record, validation_loss=self.validation_loss, scalars=scalars)
            for hook in self._deps.hooks:
                hook_requests |= hook(info)
        # After a step that all islands took as one, their hooks saw the same.
        if outer is None or self._is_joint(self.step - 1):
            return requests | hook_requests
        # A hook sees its own island's losses: what it asks for happens on all islands after the next join.
        flags = {name: Request[name.upper()] for name in VOTES}
        outer.vote(**{name: float(flag in hook_requests) for name, flag in flags.items()})
        votes = self._join.votes if self._join is not None else [0.0] * len(VOTES)
        for vote, flag in zip(votes, flags.values()):
            requests |= flag if vote >= 1.0 else Request.NONE
        return requests

    def evaluate(self, rows: int | None) -> dict[str, float]:
        """Measures the validation loss over ``rows`` rows of the held-out text, None for all of it.

        Returns:
            ``validation_loss`` (the model's own loss; nats per token where that is the cross-entropy), ``accuracy``
            and, over all of the text and unless the loss chooses its own targets, ``bits_per_byte``.
        """
        deps, started = self._deps, time.perf_counter()
        self._phase("evaluate", 0)
        total: torch.Tensor | None = None
        with deps.outer.outer_weights() if deps.outer is not None else contextlib.nullcontext():
            for number, batch in enumerate(deps.feed.evaluation(rows)):
                self._phase("evaluate", number)
                sums = deps.program.evaluate(batch)
                total = sums if total is None else total + sums
        if total is None:
            return {}
        totals = deps.stepper.total(total)
        values, terms = totals.tolist(), mean_terms(totals, deps.program.loss_terms)
        entropy = values[0] / max(1.0, values[1])
        loss = sum(terms.values()) if terms else entropy
        metrics = {"validation_loss": loss, "accuracy": values[2] / max(1.0, values[1])}
        if rows is None and not deps.program.counts_targets:
            metrics["bits_per_byte"] = deps.feed.bits_per_byte(entropy)
        self.validation_loss = loss
        seconds = time.perf_counter() - started
        fields = {key.removeprefix("validation_"): value for key, value in metrics.items()}
        self._event("evaluated", step=self.step, targets=int(values[1]), seconds=seconds, terms=terms, **fields)
        deps.program.step_timer.drain()
        if deps.program.mesh is not None:
            deps.program.mesh.log.drain()
        return metrics

    def save(self) -> None:
        """Writes a checkpoint, or copies the state for the supervisor to write it."""
        deps = self._deps
        self._phase("checkpoint", 0)
        program, optimizer, scaler = deps.program, deps.optimizer, deps.stepper.scaler
        if deps.memory is not None and deps.memory.supervisor_writes:
            limit_s = deps.config.checkpoint.wait_s
            deps.memory.save_checkpoint(self.step, program, optimizer, scaler, self.tokens, limit_s, **self._values())
            self._saved_at = self.step
            program.step_timer.lap("snapshot")
            return
        counters = self._counters()
        saved = save_state(deps.store, self.step, program, optimizer, scaler, deps.origin, self.tokens, **counters)
        self._saved_at = self.step
        self._event("checkpoint_saved", step=self.step, **saved.event_fields())
        deps.program.step_timer.drain()

    @property
    def position(self) -> str:
        """What this rank is doing: ``backward of step 12``."""
        return str(self._position)

    def state_bytes(self) -> dict[str, int]:
        """Returns this rank's bytes of state by kind, as far as they were measured, and its peak."""
        return self._recorder.state_bytes | {"peak": peak_bytes()}

    def _event(self, kind: str, **data: object) -> None:
        """Records on rank 0 an event that all ranks know."""
        if self._deps.rank == 0:
            self._deps.monitor.event(Event(kind=kind, rank=0, data=data))

    def _step_event(self, kind: str, **data: object) -> None:
        """Records on the first rank of each island an event of a step, which its ranks alone know."""
        layout, rank = self._deps.layout, self._deps.rank
        if rank % (layout.world // layout.islands) == 0:
            island = {"island": layout.island(rank)} if layout.islands > 1 else {}
            self._deps.monitor.event(Event(kind=kind, rank=rank, data=data | island))

    def _phase(self, phase: str, micro: int) -> None:
        self._position.phase(phase, micro)
        if phase == "reduce" and self._deps.memory is not None:
            self._deps.memory.complete_snapshot(self.step + 1)
        self._position.inject()
