"""Answers the planner's page: one search at a time, none for a question that was replaced, none for ever."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from meshwright.errors import MeshwrightError
from meshwright.jobs.plan_question import PlanQuestion
from meshwright.json_types import JsonObject
from meshwright.monitor.guarded_server import write_json
from meshwright.records import parse_json

LIMIT_S = 30.0
"""Longest search; one of 15,360 devices and 240 layers with experts takes 20 s of a core."""
PATIENCE_S = 2.0
"""Seconds after which a search is ended when its page asks something else: beginning anew takes about as long."""
MOST_WAITING = 8
"""Questions that wait for their turn."""
MOST_ANSWERS = 64
"""Answers that are kept."""
MOST_PAGES = 256
"""Pages whose newest question is known."""
_MOST_ANSWER_BYTES = 64 * 2**20
_POLL_S = 0.05


class Unanswered(MeshwrightError):
    """A question gets no answer: the page asks another one by now, too many wait, or it took too long."""


class Superseded(Unanswered):
    """The page asks something else by now."""


class PlanProcess:
    """The process that plans, begun anew after it was ended.

    Args:
        command: its words; `meshwright.jobs.plan_worker` by default.
        limit_s: longest search.
    """

    def __init__(self, command: tuple[str, ...] = (), limit_s: float = LIMIT_S) -> None:
        # -P: the directory in which the user stands holds no modules of ours.
        self._command = command or (sys.executable, "-P", "-m", "meshwright.jobs.plan_worker")
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Starts it unless it runs, and returns it."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            # A session of its own: Ctrl-C in the terminal reaches the server alone.
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        return self._process

    def ask(self, message: JsonObject, is_wanted: Callable[[float], bool]) -> JsonObject:
        """Returns the answer to a message.

        Args:
            message: for the process.
            is_wanted: whether somebody still waits for it, given the seconds that it took so far.

        Raises:
            Superseded: when it isn't wanted any more; the search was ended.
            Unanswered: when it took longer than the limit, or the process died.
        """
        process, received = self.start(), bytearray()
        assert process.stdin is not None and process.stdout is not None
        started_s = time.monotonic()
        try:
            process.stdin.write(write_json(message).encode() + b"\n")
            process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                while not received.endswith(b"\n"):
                    spent_s = time.monotonic() - started_s
                    if spent_s > self._limit_s:
                        raise Unanswered(
                            f"the search took longer than {self._limit_s:g} s and was ended; ask for fewer devices, "
                            "layers or rows, or type the command, which has no limit"
                        )
                    if not is_wanted(spent_s):
                        raise Superseded("the page asks something else by now")
                    if selector.select(_POLL_S):
                        chunk = os.read(process.stdout.fileno(), 1 << 20)
                        received += chunk
                        if not chunk or len(received) > _MOST_ANSWER_BYTES:
                            raise Unanswered("the search ended without an answer; ask for fewer devices or layers")
        except BrokenPipeError:
            self.close()
            raise Unanswered("the search ended without an answer; ask again") from None
        except Unanswered:
            self.close()
            raise
        answer: JsonObject = parse_json(bytes(received))
        return answer

    def close(self) -> None:
        """Ends it; a second call does nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process = None


class PlanDesk:
    """Takes questions of many pages and threads, and has them answered one at a time.

    A page numbers its questions. One with a lower number than the page's newest isn't searched any more; a search under
    way is ended once it took `PATIENCE_S`.

    Args:
        process: that plans.
    """

    def __init__(self, process: PlanProcess) -> None:
        self._process = process
        self._turn = threading.Condition()
        self._busy, self._waiting = False, 0
        self._newest: OrderedDict[str, int] = OrderedDict()
        self._answers: OrderedDict[str, JsonObject] = OrderedDict()

    def answer(self, kind: str, question: PlanQuestion, page: str, number: int) -> JsonObject:
        """Returns the answer to a question, searched or remembered.

        Args:
            kind: one of `meshwright.jobs.plan_worker.KINDS`.
            question: within its bounds.
            page: name of the page that asks.
            number: of its question.

        Raises:
            Unanswered: when there is none.
        """
        message = {"kind": kind, "question": question.to_dict()}
        key = write_json(message)
        with self._turn:
            self._note(page, number)
            if key in self._answers:
                self._answers.move_to_end(key)
                return self._answers[key]
            self._wait_for_turn(page, number)
        try:
            answer = self._process.ask(
                message, lambda spent_s: spent_s < PATIENCE_S or not self._is_superseded(page, number)
            )
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()
        with self._turn:
            self._answers[key] = answer
            if len(self._answers) > MOST_ANSWERS:
                self._answers.popitem(last=False)
        return answer

    def _note(self, page: str, number: int) -> None:
        """Remembers a page's newest question, and wakes those of its questions that wait."""
        if number > self._newest.get(page, -1):
            self._newest[page] = number
            self._newest.move_to_end(page)
            if len(self._newest) > MOST_PAGES:
                self._newest.popitem(last=False)
            self._turn.notify_all()

    def _is_superseded(self, page: str, number: int) -> bool:
        return self._newest.get(page, number) > number

    def _wait_for_turn(self, page: str, number: int) -> None:
        """Waits, with the lock held, until no other search is under way, and takes the turn."""
        if self._waiting >= MOST_WAITING:
            raise Unanswered(f"{self._waiting} questions wait already; ask again in a moment")
        self._waiting += 1
        try:
            while True:
                if self._is_superseded(page, number):
                    raise Superseded("the page asks something else by now")
                if not self._busy:
                    break
                self._turn.wait()
            self._busy = True
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Ends the process that plans."""
        self._process.close()
