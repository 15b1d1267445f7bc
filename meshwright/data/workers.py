"""Worker processes for tasks: plain interpreters that exchange JSON lines, without torch and without a fork."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

from meshwright.data.shards import Counts
from meshwright.data.tasks import CODEC, Task, TaskError, TrainTask, answer_of
from meshwright.errors import DataError

SILENCE_S = 300.0
"""Seconds without an answer or a heartbeat after which a worker counts as stuck."""
_HEARTBEAT_S = 1.0
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from meshwright.data.workers import serve; serve()"


class Worker:
    """One process that runs one task at a time."""

    def __init__(self) -> None:
        """Starts the process; it ends with its standard input, so a killed parent leaves no orphan."""
        # sys.path is passed on: the worker must import the same package, wherever this one was found.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._unread = b""

    def run_task(self, task: Task) -> Counts:
        """Runs a task in the process and returns its counts.

        Raises:
            DataError: when the task raised one, or the process died or fell silent.
        """
        try:
            self._send(CODEC.dumps(task) + b"\n")
            answer = CODEC.loads(self._read_answer())
        except BrokenPipeError:
            raise DataError(self._describe_exit()) from None
        if isinstance(answer, TaskError):
            raise DataError(answer.message)
        assert isinstance(answer, Counts)
        return answer

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            # The pipe is unbuffered: a write may take only a prefix.
            view = view[self._process.stdin.write(view) :]

    def _read_answer(self) -> bytes:
        """Reads the next line of the process that isn't a heartbeat."""
        assert self._process.stdout is not None
        while True:
            line, newline, remaining = self._unread.partition(b"\n")
            if newline:
                self._unread = remaining
                # An empty line is a heartbeat.
                if line:
                    return line
                continue
            # Heartbeats come every second, so silence means a stuck process, not a long task.
            if not select.select([self._process.stdout], [], [], SILENCE_S)[0]:
                raise DataError(f"a prepare worker said nothing for {SILENCE_S:.0f} s; run again: finished parts stay")
            data = self._process.stdout.read(1 << 16)
            if not data:
                raise DataError(self._describe_exit())
            self._unread += data

    def _describe_exit(self) -> str:
        code = self._process.wait(timeout=10.0)
        cause = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
        return (
            f"a prepare worker ended {cause}; when it was killed for memory, use fewer processes (data.workers). "
            "Run the same command again: finished parts are kept"
        )

    def kill(self) -> None:
        """Kills the process; an unfinished task leaves no file under a final name."""
        self._process.kill()

    def close(self) -> None:
        """Kills the process and closes its pipes."""
        self.kill()
        self._process.wait(timeout=10.0)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Pool:
    """Runs tasks in several processes, or in this one when there is too little work for another."""

    def __init__(self, processes: int, inline: bool) -> None:
        """Sets the number of workers; they start with the ``with`` block.

        Args:
            processes: most workers.
            inline: run tasks in this process, except for training, which starts the library's threads.
        """
        self._processes, self._inline = processes, inline
        self._workers: list[Worker] = []

    def __enter__(self) -> Self:
        if not self._inline:
            for _ in range(self._processes):  # all at once, since each takes a third of a second to import
                self._start_worker()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def run(self, tasks: Iterable[Task], on_done: Callable[[Counts], None]) -> None:
        """Runs all tasks; the first error kills all workers.

        Args:
            tasks: drawn one by one, as workers become idle.
            on_done: called in this thread with the counts of each task as it ends.

        Raises:
            DataError: when a task raised one.
        """
        if self._inline:
            for task in tasks:
                on_done(self._any_worker().run_task(task) if isinstance(task, TrainTask) else task.run(batched=False))
            return
        task_iterator = iter(tasks)
        idle = list(self._workers)
        with ThreadPoolExecutor(self._processes) as threads:
            pending: dict[Future[Counts], Worker] = {}
            try:
                while True:
                    # One task a worker at a time: drawing all at once would hold all of them in memory.
                    for task in itertools.islice(task_iterator, self._processes - len(pending)):
                        worker = idle.pop()
                        pending[threads.submit(worker.run_task, task)] = worker
                    if not pending:
                        return
                    for future in wait(pending, timeout=SILENCE_S * 2, return_when=FIRST_COMPLETED).done:
                        idle.append(pending.pop(future))
                        on_done(future.result())
            except BaseException:
                for worker in self._workers:
                    worker.kill()  # the threads that wait for answers end with them
                raise

    def _any_worker(self) -> Worker:
        return self._workers[0] if self._workers else self._start_worker()

    def _start_worker(self) -> Worker:
        self._workers.append(Worker())
        return self._workers[-1]


def serve() -> None:
    """Runs tasks that arrive as lines on standard input, until it ends; answers go to standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    # Keep the real standard output for answers alone.
    answer_fd = os.dup(1)
    os.dup2(2, 1)  # a library's prints must not mix with the answers
    lock = threading.Lock()
    threading.Thread(target=_send_heartbeats, args=(answer_fd, lock), daemon=True).start()
    for line in sys.stdin.buffer:
        answer = CODEC.dumps(answer_of(CODEC.loads(line))) + b"\n"
        with lock:
            view = memoryview(answer)
            while view:
                view = view[os.write(answer_fd, view) :]


def _send_heartbeats(answer_fd: int, lock: threading.Lock) -> None:
    """Sends a heartbeat (an empty line) every second, and ends this process when nobody reads it."""
    while True:
        time.sleep(_HEARTBEAT_S)
        try:
            with lock:
                os.write(answer_fd, b"\n")
        except OSError:
            # sys.exit would end this thread alone.
            os._exit(1)
