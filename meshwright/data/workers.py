"""Processes that do tasks: plain interpreters that speak JSON lines, so that no torch or threads come along."""

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
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Self

from meshwright.data.tasks import perform
from meshwright.errors import DataError

SILENCE_S = 300.0
"""A worker that says nothing for so long, not even that it lives, is taken for stuck."""
_BEAT_S = 1.0
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from meshwright.data.workers import serve; serve()"


class Worker:
    """One process that does one task at a time."""

    def __init__(self) -> None:
        """Starts the process; it ends when its input does, so a killed parent leaves no orphan."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._rest = b""

    def perform(self, task: dict[str, Any]) -> dict[str, Any]:
        """Does a task there and returns its counts.

        Raises:
            DataError: what the task raised, or that the process died or fell silent.
        """
        try:
            self._send(json.dumps(task).encode() + b"\n")
            answer = json.loads(self._line())
        except BrokenPipeError:
            raise DataError(self._death()) from None
        if "error" in answer:
            raise DataError(answer["error"])
        counts: dict[str, Any] = answer["counts"]
        return counts

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) :]

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                if line:
                    return line
                continue
            if not select.select([self._process.stdout], [], [], SILENCE_S)[0]:
                raise DataError(f"a prepare worker said nothing for {SILENCE_S:.0f} s; run again: finished parts stay")
            data = self._process.stdout.read(1 << 16)
            if not data:
                raise DataError(self._death())
            self._rest += data

    def _death(self) -> str:
        code = self._process.wait(timeout=10.0)
        why = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
        return (
            f"a prepare worker ended {why}; when it was killed for memory, use fewer processes (data.workers). "
            "Run the same command again: finished parts are kept"
        )

    def kill(self) -> None:
        """Ends the process at once; what it had begun leaves no file under a final name."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process and lets go of its pipes."""
        self.kill()
        self._process.wait(timeout=10.0)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Pool:
    """Does tasks in several processes, or in this one when there is too little to do for starting another."""

    def __init__(self, processes: int, inline: bool) -> None:
        """Sets the number; the processes start with the ``with`` block.

        Args:
            processes: workers at most.
            inline: do tasks in this process; training, which starts the library's threads, gets its own all the same.
        """
        self._processes, self._inline = processes, inline
        self._workers: list[Worker] = []

    def __enter__(self) -> Self:
        if not self._inline:
            for _ in range(self._processes):  # all at once, since each takes a third of a second to import
                self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def run(self, tasks: Iterable[dict[str, Any]], done: Callable[[dict[str, Any]], None]) -> None:
        """Does all tasks; the first error ends the others.

        Args:
            tasks: drawn one by one, as processes get free.
            done: called in this thread with the counts of each task as it ends.

        Raises:
            DataError: what a task raised.
        """
        if self._inline:
            for task in tasks:
                done(self._worker().perform(task) if task["kind"] == "train" else perform(task, batched=False))
            return
        rest = iter(tasks)
        idle = list(self._workers)
        with ThreadPoolExecutor(self._processes) as threads:
            pending: dict[Any, Worker] = {}
            try:
                while True:
                    for task in itertools.islice(rest, self._processes - len(pending)):
                        worker = idle.pop()
                        pending[threads.submit(worker.perform, task)] = worker
                    if not pending:
                        return
                    for future in wait(pending, timeout=SILENCE_S * 2, return_when=FIRST_COMPLETED).done:
                        idle.append(pending.pop(future))
                        done(future.result())
            except BaseException:
                for worker in self._workers:
                    worker.kill()  # the threads that wait for answers end with them
                raise

    def _worker(self) -> Worker:
        return self._workers[0] if self._workers else self._start()

    def _start(self) -> Worker:
        self._workers.append(Worker())
        return self._workers[-1]


def serve() -> None:
    """Does the tasks that come as lines on standard input, until it ends; answers go to standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    lock = threading.Lock()
    threading.Thread(target=_beat, args=(answers, lock), daemon=True).start()
    for task in _tasks():
        answer = json.dumps(_answer(task)).encode() + b"\n"
        with lock:
            view = memoryview(answer)
            while view:
                view = view[os.write(answers, view) :]


def _tasks() -> Iterator[dict[str, Any]]:
    for line in sys.stdin.buffer:
        yield json.loads(line)


def _answer(task: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"counts": perform(task, batched=True)}
    except DataError as error:
        return {"error": str(error)}
    except Exception:
        return {"error": f"a prepare worker failed:\n{traceback.format_exc()}"}


def _beat(answers: int, lock: threading.Lock) -> None:
    """Says every second that this process lives, and ends it when nobody listens any more."""
    while True:
        time.sleep(_BEAT_S)
        try:
            with lock:
                os.write(answers, b"\n")
        except OSError:
            os._exit(1)
