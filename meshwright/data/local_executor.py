"""datatrove's LocalPipelineExecutor as an engine: a process of its own, which pickles only to its own children."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from meshwright.data.batches import run_batch_task

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from meshwright.data.local_executor import execute; execute(*json.loads(sys.argv[2]))"
)
_LOG_TAIL_BYTES = 2000


class LocalExecutor:
    """Runs batches by datatrove's executor for one machine.

    Args:
        workers: processes.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path()

    def start(self, batch: Path, numbers: Sequence[int]) -> None:
        """Starts the executor's process; it ends with its standard input, so a killed parent leaves no orphan."""
        self.stop()
        self._log = batch / "executor.log"
        arguments = json.dumps([str(batch), list(numbers), min(self._workers, len(numbers))])
        with self._log.open("ab") as log:
            # A session of its own, which ends as a whole.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path), arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def why_ended(self) -> str:
        """Returns why the executor ended; empty while it runs."""
        status = self._process.poll() if self._process is not None else 0
        if status is None:
            return ""
        lines = self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL_BYTES:].strip().splitlines()
        cause = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return f"datatrove's executor ended with {cause}: {lines[-1] if lines else 'it printed nothing'}"

    def stop(self) -> None:
        """Kills the executor and its workers."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10.0)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None


class _RunTask:
    """The pipeline's only step: a rank is a task, whose blocks run inside of it."""

    def __init__(self, batch: str, numbers: Sequence[int]) -> None:
        self._batch, self._numbers = batch, tuple(numbers)

    def __call__(self, data: object, rank: int, world_size: int) -> None:
        run_batch_task(self._batch, self._numbers[rank])


def execute(batch: str, numbers: Sequence[int], workers: int) -> None:
    """Runs tasks of a batch by datatrove's executor, in this process and its children.

    Args:
        batch: folder of the tasks.
        numbers: of the tasks.
        workers: processes.
    """
    from datatrove.executor import LocalPipelineExecutor

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # What is done is known by the files of the tasks: datatrove's own marks say nothing of them.
    LocalPipelineExecutor(
        pipeline=[_RunTask(batch, numbers)],
        tasks=len(numbers),
        workers=workers,
        logging_dir=str(Path(batch) / "logs"),
        skip_completed=False,
    ).run()


def _end_with_parent() -> None:
    """Waits for the end of standard input, which the parent holds, and kills the session that it leads."""
    while os.read(0, 1 << 10):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)
