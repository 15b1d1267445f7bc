"""The job ``chaos --random``: injects drawn faults into a run under way, and records how the run answers each.

Faults that are drawn by steps are requested before the run gets there, so that they strike in these steps whatever the
speed of the run; those that are drawn by time are requested for the next step but one.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, takewhile
from pathlib import Path

from meshwright.errors import RankError
from meshwright.jobs.progress import Say, to_stderr
from meshwright.jobs.random_faults import NODE, PAUSE, Draw, World, run_ended
from meshwright.json_types import JsonObject
from meshwright.monitor.progress import RankStamp, read_run_progress
from meshwright.monitor.sinks import EVENTS, read_lines
from meshwright.train.faults import FOLDER, Fault, ask, mark_path

STORY_KINDS = (
    *("rank_lost", "node_lost", "leader_lost", "leading", "fenced", "left_out", "snapshot_refused", "damaged"),
    *("waiting", "planned", "restored", "resumed", "recovered"),
    *("step_repeated", "step_skipped", "rewinding", "rewound"),
)
"""Events that a recovery is made of, whatever the fault and however many nodes there are."""
SLOW_S, PAUSE_S = 0.05, 2.0
AHEAD = 3
"""Faults by steps that are requested at once: more of them would strike after this process was killed."""
_LOSSES = ("rank_lost", "node_lost", "leader_lost")
_POLL_S = 0.05
_OWNER_S = 1.0
"""Interval of looks at the run's lock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultAnswer:
    """A fault that was drawn, and the run's answer to it."""

    at_s: float
    """When it was drawn for, in seconds; 0 for one by steps."""
    kind: str
    """Its kind."""
    target: int
    """Its rank or node."""
    at_step: int = 0
    """The step that it was drawn for; 0 for one by time."""
    step: int
    """The step that it was injected in; 0 where it wasn't."""
    answer: str
    """The event that ended the recovery; ``none`` for a fault that ended no rank, ``absent`` for a rank that
    the run has no more, ``missed`` for a step that was over, ``run ended``, or ``no answer``."""
    seconds: float
    """From the fault to that event."""
    events: tuple[str, ...] = ()
    """Kinds of the events in between."""


def inject_faults(
    run_dir: Path, draws: Iterator[Draw], world: World, *, until: float, count: int, wait_s: float, say: Say = to_stderr
) -> list[FaultAnswer]:
    """Injects faults one after another until a bound, or until the run ends.

    Args:
        run_dir: of the run.
        draws: from `draw_faults`.
        world: ranks and nodes of the run.
        until: no fault is drawn for a later time or step; infinite without a bound.
        count: most faults.
        wait_s: for which a fault may take to happen, and the run to go on.
        say: takes a line of progress.

    Raises:
        RankError: when the run doesn't answer a fault in time.
    """
    injector = FaultInjector(run_dir, world, wait_s)
    bounded = islice(takewhile(lambda draw: draw.turn <= until, draws), count)
    answers: list[FaultAnswer] = []
    try:
        while (draw := injector.next_draw(bounded)) is not None:
            answer = injector.inject(draw)
            if answer is None:
                say("the run has ended" if injector.ended_early else f"the run ended before {draw} happened")
                break
            answers.append(answer)
            say(f"{draw}: step {answer.step}, {answer.answer} after {answer.seconds:.1f} s")
            if answer.answer == "no answer":
                raise RankError(f"the run did not go on within {wait_s:g} s of {draw.kind} in step {answer.step}")
    finally:
        injector.withdraw()
    return answers


class RunWatch:
    """Waits for conditions of a run, no longer than the run lives."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._looked_at = run_dir, -math.inf
        self.ended = False
        """Whether the run was seen to have ended."""

    def wait(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Returns whether the condition came true within the limit, and before the run's end."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline_s:
                return False
            if time.monotonic() - self._looked_at > _OWNER_S:
                self._looked_at = time.monotonic()
                self.ended = run_ended(self._run_dir)
            if self.ended:
                # What it did last may have come between the two looks.
                return condition()
            time.sleep(_POLL_S)
        return True


class FaultInjector:
    """Requests drawn faults of a run and waits for its answers, one fault after another.

    Args:
        run_dir: of the run.
        world: its ranks and nodes.
        wait_s: for which a fault may take to happen, and the run to go on.
    """

    def __init__(self, run_dir: Path, world: World, wait_s: float) -> None:
        self._run_dir, self._world, self._wait_s = run_dir, world, wait_s
        self._watch, self._started_s = RunWatch(run_dir), time.monotonic()
        self._requested: deque[tuple[Draw, list[Path]]] = deque()
        # Events before this one belong to earlier faults.
        self._position = len(read_events(run_dir))
        self.ended_early = False
        """Whether the run ended before the time of the last fault."""

    def next_draw(self, draws: Iterator[Draw]) -> Draw | None:
        """Returns the next fault, None after the last; requests those by steps in advance."""
        while len(self._requested) < AHEAD and (draw := next(draws, None)) is not None:
            if not draw.at_step:
                return draw
            faults = self._faults(draw, draw.at_step)
            marks = [mark_path(self._run_dir / FOLDER, fault) for fault in faults]
            # The mark of an equal fault of an earlier command: a fault happens once in a run.
            happened = [mark for mark in marks if mark.exists()]
            if not happened:
                for fault in faults:
                    ask(self._run_dir, fault)
            self._requested.append((draw, [] if happened else marks))
        return self._requested[0][0] if self._requested else None

    def inject(self, draw: Draw) -> FaultAnswer | None:
        """Injects a fault and waits for the answer; returns None when the run ended before it happened."""
        if draw.at_step:
            return self._await_step(draw)
        self._watch.wait(lambda: time.monotonic() >= self._started_s + draw.at_s, math.inf)
        if self._watch.ended:
            self.ended_early = True
            return None
        self._position = len(read_events(self._run_dir))
        step, happened = self._request(draw)
        if happened:
            return self._follow(draw, step)
        return None if self._watch.ended else self._answer(draw, step, "no answer" if step else "absent")

    def withdraw(self) -> None:
        """Removes the requests of faults that haven't happened."""
        for _, marks in self._requested:
            _withdraw(marks)
        self._requested.clear()

    def _await_step(self, draw: Draw) -> FaultAnswer | None:
        """Waits until a requested fault has happened, or the run is past its step."""
        _, marks = self._requested.popleft()
        ranks = self._ranks(draw)

        def happened() -> bool:
            return bool(marks) and all(mark.exists() for mark in marks)

        def is_past() -> bool:
            steps = _current_steps(self._run_dir)
            present = [steps[rank] for rank in ranks if rank in steps]
            # Of ranks that the run has no more, the others say how far it is.
            return min(present or steps.values(), default=0) > draw.at_step

        if marks:
            self._watch.wait(lambda: happened() or is_past(), math.inf)
        if happened():
            return self._follow(draw, draw.at_step)
        _withdraw(marks)
        if self._watch.ended:
            return None
        absent = not _current_steps(self._run_dir).keys() & set(ranks)
        return self._answer(draw, 0, "absent" if absent else "missed")

    def _request(self, draw: Draw) -> tuple[int, bool]:
        """Requests a fault until it happens; returns its step, 0 without its ranks, and whether it happened."""
        run_dir, ranks, watch = self._run_dir, self._ranks(draw), self._watch
        deadline_s, step, ahead = time.monotonic() + self._wait_s, 0, 2
        while (left_s := deadline_s - time.monotonic()) > 0 and not watch.ended:
            # While ranks start, their stamps name no step; a run that shrank has some of them no more.
            if not watch.wait(lambda: bool(_current_step(run_dir, ranks)), left_s):
                break
            # The next step may begin before its ranks have read the request.
            step = _current_step(run_dir, ranks) + ahead
            marks = [ask(run_dir, fault) for fault in self._faults(draw, step)]
            if any(mark.exists() for mark in marks):
                # The mark of an equal fault before a restart from an earlier step: a fault happens once in a run.
                ahead += 1
                _withdraw(marks)
                continue
            watch.wait(lambda: all(mark.exists() for mark in marks) or _is_past(run_dir, ranks, step), left_s)  # noqa: B023
            if all(mark.exists() for mark in marks):
                return step, True
            # The run was faster than this process: a request for a past step would strike after a restart.
            _withdraw(marks)
        return step, False

    def _follow(self, draw: Draw, step: int) -> FaultAnswer:
        """Waits for the run's answer to a fault that happened."""
        start_s, endings = time.monotonic(), recovery_events(draw.kind)
        if draw.kind == PAUSE:
            # A supervisor takes a stopped rank for dead after a while; torchrun doesn't.
            replaced = self._pause(draw.target, step)
            endings = ("recovered",) if replaced else ()
        if not endings:
            return self._answer(draw, step, "none", start_s)

        def has_ended() -> bool:
            return any(event["kind"] in endings for event in read_story(self._run_dir, self._position))

        self._watch.wait(has_ended, self._wait_s)
        events = read_events(self._run_dir)
        indices = [index for index in range(self._position, len(events)) if events[index]["kind"] in endings]
        if not indices:
            return self._answer(draw, step, "run ended" if self._watch.ended else "no answer", start_s)
        # The next fault may have struck already: its events come after the end of this one's recovery.
        return self._answer(draw, step, str(events[indices[0]]["kind"]), start_s, indices[0] + 1)

    def _pause(self, rank: int, step: int) -> bool:
        """Lets a rank be stopped for a while; returns whether the run replaced it."""
        paused = next((stamp for stamp in read_run_progress(self._run_dir) if stamp.rank == rank), None)
        time.sleep(PAUSE_S)
        if paused is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(paused.pid, signal.SIGCONT)

        def replaced() -> bool:
            return any(event["kind"] in _LOSSES for event in read_story(self._run_dir, self._position))

        def went_on() -> bool:
            stamps: list[RankStamp] = read_run_progress(self._run_dir)
            return paused is None or any(stamp.pid == paused.pid and stamp.step > step for stamp in stamps)

        self._watch.wait(lambda: replaced() or went_on(), self._wait_s)
        return replaced()

    def _answer(
        self, draw: Draw, step: int, answer: str, start_s: float | None = None, end: int | None = None
    ) -> FaultAnswer:
        """Returns an answer with the events until the one before ``end``, after which those of the next fault begin."""
        events = read_events(self._run_dir)[self._position : end]
        kinds = tuple(str(event["kind"]) for event in events if event["kind"] in STORY_KINDS)
        if end is not None:
            self._position = end
        seconds = round(time.monotonic() - start_s, 3) if start_s is not None else 0.0
        return FaultAnswer(**asdict(draw), step=step, answer=answer, seconds=seconds, events=kinds)

    def _ranks(self, draw: Draw) -> Sequence[int]:
        return self._world.nodes[draw.target] if draw.kind == NODE else (draw.target,)

    def _faults(self, draw: Draw, step: int) -> list[Fault]:
        """Returns the faults of ranks that a drawn one is made of."""
        kind = {NODE: "kill", PAUSE: "stop"}.get(draw.kind, draw.kind)
        seconds = SLOW_S if kind == "slow" else 1.0
        return [Fault(kind=kind, rank=rank, step=step, seconds=seconds) for rank in self._ranks(draw)]


def recovery_events(fault_kind: str) -> tuple[str, ...]:
    """Returns the kinds of events that end a recovery; empty for a fault that ends no rank."""
    if fault_kind == "nan":
        # A gradient that isn't finite ends no rank: its step is repeated, skipped, or the run rewound.
        return ("step_skipped", "step_repeated", "rewound")
    return () if fault_kind in ("slow", "flip", PAUSE) else ("recovered",)


def read_story(run_dir: Path, earlier_events: int) -> list[JsonObject]:
    """Returns the events of recoveries, without the first ones of the run."""
    return [event for event in read_events(run_dir)[earlier_events:] if event["kind"] in STORY_KINDS]


def read_events(run_dir: Path) -> list[JsonObject]:
    """Returns every event of a run."""
    return [line for line in read_lines(run_dir / EVENTS) if "kind" in line]


def _withdraw(marks: Sequence[Path]) -> None:
    """Removes requests, so that ranks which start later don't read them."""
    for mark in marks:
        mark.with_name(f"{mark.name}.ask").unlink(missing_ok=True)


def _current_steps(run_dir: Path) -> dict[int, int]:
    """Returns the step of each rank; 0 while it starts."""
    return {stamp.rank: stamp.step for stamp in read_run_progress(run_dir)}


def _current_step(run_dir: Path, ranks: Sequence[int]) -> int:
    """Returns the latest step of a run; 0 while one of these ranks is absent or in no step."""
    steps = _current_steps(run_dir)
    return max(steps.values()) if all(steps.get(rank) for rank in ranks) else 0


def _is_past(run_dir: Path, ranks: Sequence[int], step: int) -> bool:
    """Whether every one of these ranks is beyond a step."""
    steps = _current_steps(run_dir)
    return all(steps.get(rank, 0) > step for rank in ranks)
