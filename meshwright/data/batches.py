"""Batches: the tasks of a stage as files, so that processes anywhere on a shared file system run them by number.

``task-000007.json`` is a task's record, ``answer-000007.json`` what came of it. Both are JSON of a closed list of
classes: a process that runs a task reads data, never code.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from meshwright.data.files import whole_file
from meshwright.data.shards import Counts
from meshwright.data.tasks import CODEC, KINDS, Task, TaskError, answer_of
from meshwright.errors import DataError
from meshwright.records import RecordError

_REMOVALS = 100
"""Times that a batch's folder is removed at most, while processes that end write into it."""
_ATTEMPTS = 3
"""Launches of what a stage lacks, before its engine is given up."""
_POLL_S = 0.2
_ANSWER = re.compile(r"answer-(\d+)\.json")


class BatchEngine(Protocol):
    """Runs a batch's tasks somewhere, each by `run_batch_task`."""

    def start(self, batch: Path, numbers: Sequence[int]) -> None:
        """Starts tasks of a batch, and returns at once.

        Args:
            batch: folder of the tasks.
            numbers: of the tasks to run.

        Raises:
            LaunchError: when they can't be started.
        """

    def why_ended(self) -> str:
        """Returns why nothing runs any more; an empty text while something does or may."""

    def stop(self) -> None:
        """Ends what runs, of an earlier command too, and returns when it has ended."""


class BatchPool:
    """Runs the tasks of a stage through an engine; a context manager that leaves nothing running."""

    def __init__(self, engine: BatchEngine) -> None:
        self._engine = engine

    def __enter__(self) -> Self:
        # What a killed command left would write beside this one.
        self._engine.stop()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.stop()

    def run(self, tasks: Iterable[Task], on_done: Callable[[Counts], None]) -> None:
        """Runs all tasks; the first error ends the others.

        Args:
            tasks: of one stage.
            on_done: called in this thread with the counts of each task as it ends.

        Raises:
            DataError: when a task raised one, or the engine ends again and again before they are done.
            LaunchError: when they can't be started.
        """
        pending: dict[int, Task] = {}
        batch = Path()
        for number, task in enumerate(tasks):
            if not pending:
                batch = _fresh_batch(task.directory)
            with whole_file(batch / f"task-{number:06d}.json") as file:
                file.write(CODEC.dumps(task))
            pending[number] = task
        reason = ""
        for _ in range(_ATTEMPTS):
            if not pending:
                return
            self._engine.start(batch, sorted(pending))
            reason = ""
            while pending and not reason:
                # Asked for before the answers are read: a task answers before its process ends.
                reason = self._engine.why_ended()
                _collect_answers(batch, pending, on_done)
                if pending and not reason:
                    time.sleep(_POLL_S)
        if pending:
            raise DataError(
                f"{len(pending)} tasks of a stage have no answer after {_ATTEMPTS} launches: {reason}. Run the same "
                "command again: finished parts are kept"
            )


def _fresh_batch(directory: Path) -> Path:
    """Makes the folder of a batch anew; a process of the one before may still write its last lines into it.

    Raises:
        DataError: when something goes on writing there.
    """
    batch = directory / "batch"
    for _ in range(_REMOVALS):
        shutil.rmtree(batch, ignore_errors=True)
        try:
            batch.mkdir()
        except FileExistsError:
            time.sleep(_POLL_S)
        else:
            return batch
    raise DataError(f"{batch} can't be removed: another process writes into it, or it is another user's; end that one")


def _collect_answers(batch: Path, pending: dict[int, Task], on_done: Callable[[Counts], None]) -> None:
    """Takes the answers that have come since the last time."""
    for path in sorted(batch.iterdir()):
        match = _ANSWER.fullmatch(path.name)
        if match is None or int(match[1]) not in pending:
            continue
        task, answer = pending[int(match[1])], _read_record(path)
        if isinstance(answer, TaskError):
            raise DataError(answer.message)
        # On a network file system an answer may be seen before the file that it speaks of.
        if isinstance(answer, Counts) and task.is_finished():
            del pending[int(match[1])]
            on_done(answer)


def run_batch_task(batch: str, number: int) -> None:
    """Runs one task of a batch, unless it is finished, and writes its answer.

    Args:
        batch: folder of the tasks.
        number: of the task.

    Raises:
        DataError: when its record can't be read.
    """
    folder = Path(batch)
    task = _read_record(folder / f"task-{number:06d}.json")
    if not isinstance(task, KINDS):
        raise DataError(f"{folder}/task-{number:06d}.json holds no task; run meshwright prepare again")
    answer = Counts(bytes=task.bytes) if task.is_finished() else answer_of(task)
    with whole_file(folder / f"answer-{number:06d}.json") as file:
        file.write(CODEC.dumps(answer))


def share_of_batch(batch: Path, index: int, shares: int) -> list[int]:
    """Returns the numbers of the tasks that one of some processes runs, without those that have answers.

    Args:
        batch: folder of the tasks.
        index: of the process.
        shares: number of processes.

    Raises:
        DataError: when there is no such batch.
    """
    if not batch.is_dir():
        raise DataError(f"{batch} is no batch of tasks; meshwright prepare --engine slurm writes one")
    numbers = sorted(int(path.stem.removeprefix("task-")) for path in batch.glob("task-[0-9]*.json"))
    return [
        number for number in numbers if number % shares == index and not (batch / f"answer-{number:06d}.json").exists()
    ]


def _read_record(path: Path) -> object:
    try:
        return CODEC.loads(path.read_bytes())
    except (OSError, RecordError) as error:
        raise DataError(f"{path} can't be read: {error}; run meshwright prepare again") from None
