"""A Slurm job as its batch script, or a person in salloc, runs it: the nodes' commands by srun, signals, requeueing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from meshwright.errors import LaunchError
from meshwright.launch.config import SlurmConfig
from meshwright.launch.signals import handle_interrupts
from meshwright.launch.slurm import SlurmPlace, call_slurm, cancel_replacements, watched_environment
from meshwright.launch.slurm_node import SRUN, NodeRevival

PREEMPTED = 143
_POLL_S = 0.1
_LOOK_S = 1.0
_ENDED_LOOKS = 3
"""Looks in a row that find the run ended while srun waits, after which it isn't waited for."""
_END_S = 45.0
_MARGIN_S = 10.0


class SlurmJob:
    """Starts a supervisor on each node of an allocation and waits for the run's end.

    Args:
        place: the allocation.
        argv: words of the command for each node, which finds its number by itself.
        config: what was asked for.
        is_finished: whether the run has reached its last step.
        say: takes a line for people.
        revival: starts lost nodes again.
    """

    def __init__(
        self,
        place: SlurmPlace,
        argv: Sequence[str],
        config: SlurmConfig,
        is_finished: Callable[[], bool],
        say: Callable[[str], None],
        revival: NodeRevival,
    ) -> None:
        self._revival = revival
        self._place, self._argv, self._config = place, tuple(argv), config
        self._is_finished, self._say = is_finished, say
        self._asked: list[int] = []
        self._limit_at: float | None = None

    def command(self) -> list[str]:
        """Returns the srun command."""
        nodes, cores = str(self._place.nodes), self._config.cpus_per_node
        share = (f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1")
        threads = (f"--cpus-per-task={cores}",) if cores else ()
        return [*SRUN, *share, *threads, sys.executable, "-m", "meshwright", *self._argv, "--on", "slurm"]

    def run(self) -> int:
        """Runs to the run's end, or to a signal's; returns the exit status."""
        earlier_handler = signal.signal(signal.SIGUSR1, self._record)
        try:
            with handle_interrupts(self._record):
                try:
                    # A session of its own: Ctrl-C is passed on in order, once.
                    step = subprocess.Popen(
                        self.command(), stdin=subprocess.DEVNULL, start_new_session=True, env=watched_environment()
                    )
                except OSError as error:
                    raise LaunchError(f"srun can't be run: {error.strerror}; is this a Slurm job?") from None
                try:
                    self._wait(step)
                finally:
                    self._end(step)
        finally:
            signal.signal(signal.SIGUSR1, earlier_handler)
            cancel_replacements(self._place.job, self._place.nodes)
        return self._conclude()

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._asked.append(number)

    def _end(self, step: subprocess.Popen[bytes]) -> None:
        """Ends srun where it hasn't ended by itself: at once when all supervisors have."""
        if step.poll() is None and not self._revival.has_ended:
            step.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.wait(_END_S)
        if step.poll() is None:
            step.kill()
            step.wait()

    def _wait(self, step: subprocess.Popen[bytes]) -> None:
        handled, ended_looks, looked_at = 0, 0, time.monotonic()
        while step.poll() is None:
            time.sleep(_POLL_S)
            if time.monotonic() - looked_at > _LOOK_S:
                looked_at = time.monotonic()
                self._revival.poll(revives=not self._asked)
                # Of a node that was away for a moment srun waits for ever for the task's end.
                ended_looks = ended_looks + 1 if self._revival.has_ended else 0
                if ended_looks > _ENDED_LOOKS or self._revival.is_silent:
                    return
            for number in self._asked[handled:]:
                handled += 1
                self._pass_on(number, handled == 1)
            if self._limit_at is not None and time.monotonic() > self._limit_at:
                # The time limit would end the job for good; what is in memory is lost either way.
                return

    def _pass_on(self, number: int, first: bool) -> None:
        if number == signal.SIGUSR1:
            self._say(f"the job's time is over in {self._config.warn_s} s: the run ends with a checkpoint")
            self._limit_at = time.monotonic() + self._config.warn_s - min(_MARGIN_S, self._config.warn_s / 2)
        if not first:
            raise KeyboardInterrupt
        # At a time limit, a preemption or scancel, Slurm has sent its SIGTERM to the nodes' commands too.
        if number != signal.SIGTERM or not self._place.is_batch:
            call_slurm("scancel", "--signal=TERM", f"{self._place.job}.{self._step_id()}")

    def _step_id(self) -> str:
        steps = call_slurm("squeue", "--noheader", "--steps", f"--jobs={self._place.job}", "--format=%i") or ""
        numbers = [line.rpartition(".")[2].strip() for line in steps.splitlines()]
        # One node that ends its supervisor in order ends the run on all.
        return min((number for number in numbers if number.isdigit()), key=int, default="0")

    def _conclude(self) -> int:
        if self._is_finished():
            return 0
        if signal.SIGUSR1 not in self._asked:
            return PREEMPTED if signal.SIGTERM in self._asked else 1
        if self._config.requeue and self._place.is_batch:
            restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
            self._say(f"the job goes back into the queue, for the {restarts}. time, and on from the checkpoint")
            call_slurm("scontrol", "requeue", self._place.job)
        return PREEMPTED
