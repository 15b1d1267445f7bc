"""Makes the record of a step out of its outcome, its times on host and device, and its traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshwright.events import StepRecord
from meshwright.json_types import JsonObject
from meshwright.parallel.peak_memory import peak_bytes
from meshwright.train.launched_step import Clocks, LaunchedStep
from meshwright.train.noise_scale import NoiseScale
from meshwright.train.rate import RateSchedule
from meshwright.train.step import StepOutcome
from meshwright.train.trainer_deps import TrainerDeps

METERED_STEPS = 2
"""First steps in which the bytes of the state are measured; they don't change later."""


class StepRecorder:
    """Records the steps of a rank in order.

    Args:
        deps: of the trainer.
        noise: of the run; takes in what was measured.
        rates: of the run; follow it.
    """

    def __init__(self, deps: TrainerDeps, noise: NoiseScale, rates: RateSchedule) -> None:
        self._deps, self._noise, self._rates = deps, noise, rates
        self._recorded_at = Clocks.now()
        self.state_bytes: dict[str, int] = {}
        """This rank's bytes of state by kind, as far as they were measured."""

    def record(
        self,
        launched: LaunchedStep,
        outcome: StepOutcome,
        values: Mapping[str, float],
        *,
        tokens_before: int,
        epoch: float,
        skipped: bool,
        joined: JsonObject,
    ) -> StepRecord:
        """Returns the record of a step.

        Args:
            launched: the step.
            outcome: of its last run.
            values: of the outcome, as `StepOutcome.read` returns them.
            tokens_before: target tokens of all steps before it.
            epoch: how often the text was read with it.
            skipped: whether it left the weights as they were.
            joined: report of the join of islands after it; empty without one.
        """
        deps, tokens, now = self._deps, int(values["targets"]), Clocks.now()
        # A step that is read late overlaps with the next one, which is counted from here on.
        spent, self._recorded_at = now.since(launched.started, self._recorded_at), now
        laps, traffic = launched.take_measurements(deps.program)
        times = laps.read()
        times.pop("other", None)
        self._measure_state(launched.step + 1)
        rate = deps.config.train.batch * deps.config.data.sequence / spent.wall
        flops_per_s = deps.flops_per_token * rate
        mfu_of_measured = flops_per_s / deps.peak_flops if deps.peak_flops else None
        outer_bytes = {"outer": deps.outer.bytes()} if deps.outer is not None else {}
        snapshot_bytes = deps.memory.snapshot_bytes if deps.memory is not None else 0
        snapshots = {"snapshots": snapshot_bytes} if snapshot_bytes else {}
        record = StepRecord(
            step=launched.step + 1,
            loss=values["loss"],
            grad_norm=values["grad_norm"],
            lr=outcome.lr,
            tokens=tokens,
            tokens_total=tokens_before + tokens,
            tokens_per_s=rate,
            step_s=spent.wall,
            parts=times | {"other": max(0.0, spent.wall - sum(times.values()))},
            memory={"peak": peak_bytes()} | self.state_bytes | outer_bytes | snapshots,
            layout=str(deps.layout),
            accuracy=values["accuracy"],
            mfu=flops_per_s / deps.data_sheet_flops if deps.data_sheet_flops else mfu_of_measured,
            mfu_of_measured=mfu_of_measured,
            skipped=skipped,
            experts=outcome.experts,
            terms=outcome.terms,
            comm=traffic.read(),
            epoch=epoch,
            processor_s={"thread": spent.thread, "rank": spent.process},
            outer=joined,
        )
        # What a skipped step measured is no noise of training, as its gradient is none.
        return self._with_noise(record, None if skipped else launched.part, values["targets"])

    def _with_noise(self, record: StepRecord, small: tuple[float, float] | None, targets: float) -> StepRecord:
        """Takes in a measurement; returns the record with its scalars, and with the run's end as it looks now.

        Args:
            record: of the step.
            small: gradient norm and targets of the small batch; None where the step measured none.
            targets: of the whole batch.
        """
        if small is not None:
            scalars = self._noise.observe(small, (record.grad_norm, targets))
            scalars |= self._rates.take_measurement(record.step, self._noise.means)
            record = dataclasses.replace(record, scalars=scalars)
        last_step = self._rates.last_step(record.step) if self._rates.follows_noise else None
        return dataclasses.replace(record, last_step=last_step)

    def _measure_state(self, step: int) -> None:
        """Measures the bytes of the state, in the first steps of this rank's process alone."""
        deps = self._deps
        if deps.program.state_meter is None:
            return
        self.state_bytes = deps.program.state_meter.read(deps.optimizer.bytes())
        if step >= METERED_STEPS:
            deps.program.state_meter.close()
            deps.program.state_meter = None
