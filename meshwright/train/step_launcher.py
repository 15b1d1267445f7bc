"""Queues the training steps of a rank: reads their rows and computes them up to the copy of their outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.parallel.stage_module import Stamp
from meshwright.train.feed import MicroBatch
from meshwright.train.health import Limits
from meshwright.train.launched_step import Clocks, LaunchedStep
from meshwright.train.memory import CUT_SHARE
from meshwright.train.noise_scale import NoiseScale, small_batch
from meshwright.train.rank_progress import RankProgress
from meshwright.train.rate import RateSchedule
from meshwright.train.step import StepOutcome
from meshwright.train.trainer_deps import TrainerDeps


class StepLauncher:
    """Queues one step behind another; the rows of one that was abandoned are those of the next.

    Args:
        deps: of the trainer.
        noise: of the run; says in which steps it is measured.
        rates: of the run.
        position: of this rank, which is told.
        stamp: reports the progress of a step.
    """

    def __init__(
        self, deps: TrainerDeps, noise: NoiseScale, rates: RateSchedule, position: RankProgress, stamp: Stamp
    ) -> None:
        self._deps, self._noise, self._rates = deps, noise, rates
        self._position, self._stamp = position, stamp
        self._batches: Sequence[MicroBatch] | None = None
        """Of a step that was abandoned; None where the next ones are to be read."""

    def launch(self, step: int, passed_over: int, limits: Callable[[], Limits | None]) -> LaunchedStep:
        """Queues a step.

        Args:
            step: steps done before it.
            passed_over: steps whose batches were skipped.
            limits: as `Stepper.run` takes them.

        Raises:
            StepAbandoned: by ``limits``; no weight is updated then.
        """
        deps = self._deps
        started = Clocks.now()
        self._position.begin_step()
        self._stamp.phase("data", 0)
        data_step = step + passed_over
        # Batches are read in order: those of an abandoned step are kept for its second run.
        self._batches = batches = self._batches or deps.feed.micro_batches(data_step)
        deps.program.step_timer.lap("data")
        rate = self._rates.rate(step)
        deps.stop_asked.restore()
        targets, stop_share = deps.feed.targets(data_step), float(deps.stop_asked.requested)
        if deps.memory is not None and deps.memory.reconfiguration_requested:
            stop_share += CUT_SHARE
        if deps.page_requests is not None:
            stop_share += deps.page_requests.share()

        def run(limits: Callable[[], Limits | None]) -> StepOutcome:
            return deps.stepper.run(step, batches, targets, rate, stop_share, self._stamp, limits)

        part = self._measure_part(step, batches, targets)
        launched = LaunchedStep(step=step, targets=targets, started=started, part=part, outcome=run(limits), run=run)
        self._batches = None
        return launched

    def _measure_part(self, step: int, batches: Sequence[MicroBatch], targets: int) -> tuple[float, float] | None:
        """Returns gradient norm and targets of the noise scale's small batch; None in steps that don't measure it."""
        deps = self._deps
        if not self._noise.is_due(step):
            return None
        own_rows = sum(len(batch.tokens) for batch in batches)
        part = small_batch(batches, deps.program.first_row(own_rows), deps.config.train.batch)
        return deps.stepper.part_norm(step, part, targets, self._stamp)
