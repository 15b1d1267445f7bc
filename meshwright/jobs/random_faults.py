"""The job ``chaos --random``: draws faults from a seed, injects them into a run, and records how the run answers.

The draws follow from the seed and the run's ranks and nodes alone. The step of a fault is the run's own at that time.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError, RankError, nearest
from meshwright.jobs.progress import Say, to_stderr
from meshwright.monitor.progress import PROGRESS, RankStamp, read_progress, read_run_progress
from meshwright.monitor.sinks import EVENTS, read_lines
from meshwright.resilience.run_lock import living_owners
from meshwright.train.faults import KINDS, Fault, ask

PAUSE, NODE = "pause", "node"
RANDOM_KINDS = {
    **KINDS,
    PAUSE: "the rank is stopped, and continues after some seconds",
    NODE: "every rank of a node is killed in one step",
}
"""Kinds of random faults: `train.faults.KINDS`, and those made of several."""
DEFAULT_KINDS = ("kill", "exit", "raise", "nan", "slow", PAUSE)
"""Kinds that a run survives without a change of its losses or a wait for the hang limit; ``node`` too with several."""
STORY_KINDS = (
    *("rank_lost", "node_lost", "leader_lost", "leading", "fenced", "left_out", "snapshot_refused", "damaged"),
    *("waiting", "planned", "restored", "resumed", "recovered"),
    *("step_repeated", "step_skipped", "rewinding", "rewound"),
)
"""Events that a recovery is made of, whatever the fault and however many nodes there are."""
JITTER = 0.25
"""A fault's time differs from its turn by up to this share of the interval."""
SLOW_S, PAUSE_S = 0.05, 2.0
_POLL_S = 0.05
_OWNER_S = 1.0
"""Interval of looks at the run's lock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The ranks of a run, as far as draws need them."""

    ranks: int
    """Number of ranks."""
    nodes: tuple[tuple[int, ...], ...] = ()
    """Ranks of each node; empty for a run of one node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """A fault that was drawn."""

    at_s: float
    """Seconds after the first look at the run."""
    kind: str
    """One of `RANDOM_KINDS`."""
    target: int
    """A rank; the number of a node for ``node``."""

    def __str__(self) -> str:
        """Returns ``12.3 s  kill rank 1``."""
        return f"{self.at_s:8.1f} s  {self.kind} {'node' if self.kind == NODE else 'rank'} {self.target}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultAnswer:
    """A fault that was injected, and the run's answer to it."""

    at_s: float
    """When it was drawn for, in seconds."""
    kind: str
    """Its kind."""
    target: int
    """Its rank or node."""
    step: int
    """The step that it was injected in."""
    answer: str
    """The event that ended the recovery; ``none`` for a fault that ends no rank, ``absent`` for a rank that
    the run has no more, ``run ended``, or ``no answer``."""
    seconds: float
    """From the fault to that event."""
    events: tuple[str, ...] = ()
    """Kinds of the events in between."""


def draw_faults(world: World, seed: int, every_s: float, kinds: Sequence[str] = ()) -> Iterator[Draw]:
    """Yields faults without end: the same for the same world, seed, interval and kinds.

    Args:
        world: ranks and nodes of the run.
        seed: of the draws.
        every_s: mean seconds between faults.
        kinds: of `RANDOM_KINDS`; `DEFAULT_KINDS` when empty.

    Raises:
        ConfigError: for an unknown kind, or ``node`` in a run of one node.
    """
    for kind in kinds:
        if kind not in RANDOM_KINDS:
            raise ConfigError(f"--kinds {kind}: unknown{nearest(kind, RANDOM_KINDS)}")
    if NODE in kinds and not world.nodes:
        raise ConfigError("--kinds node: the run is on one node; a lost node needs several")
    chosen = tuple(kinds) or (*DEFAULT_KINDS, *((NODE,) if world.nodes else ()))
    generator, turn = random.Random(seed), 0
    while True:
        turn += 1
        at_s = round(every_s * (turn + JITTER * generator.uniform(-1.0, 1.0)), 3)
        kind = generator.choice(chosen)
        yield Draw(at_s=at_s, kind=kind, target=generator.randrange(len(world.nodes) if kind == NODE else world.ranks))


def read_world(run_dir: Path) -> World:
    """Reads the ranks and nodes of a run that is under way.

    Raises:
        ConfigError: when none is.
    """
    stamps = read_run_progress(run_dir)
    if not stamps or run_ended(run_dir):
        raise ConfigError(f"{run_dir} holds no run that is under way")
    ranks = {stamp.rank for stamp in stamps}
    generation = max(stamp.generation for stamp in stamps)
    nodes = []
    for path in sorted(run_dir.glob(f"node-*-{PROGRESS}"), key=_node_number):
        node_ranks = tuple(stamp.rank for stamp in read_progress(path) if stamp.generation == generation)
        nodes.append(tuple(rank for rank in node_ranks if rank in ranks))
    nodes = [node_ranks for node_ranks in nodes if node_ranks]
    return World(ranks=max(ranks) + 1, nodes=tuple(nodes) if len(nodes) > 1 else ())


def run_ended(run_dir: Path) -> bool:
    """Whether nobody trains in a run directory any more: no command owns it, and no rank lives that stamped."""
    if living_owners(run_dir):
        return False
    return all(stamp.phase == "done" or not _lives(stamp) for stamp in read_run_progress(run_dir))


def inject_faults(
    run_dir: Path, draws: Iterator[Draw], world: World, *, for_s: float, count: int, wait_s: float, say: Say = to_stderr
) -> list[FaultAnswer]:
    """Injects faults one after another until a bound, or until the run ends.

    Args:
        run_dir: of the run.
        draws: from `draw_faults`.
        world: ranks and nodes of the run.
        for_s: no fault is drawn for a later time; infinite without a bound.
        count: most faults.
        wait_s: for which a fault may take to happen, and the run to go on.
        say: takes a line of progress.

    Raises:
        RankError: when the run doesn't answer a fault in time.
    """
    start_s = time.monotonic()
    answers: list[FaultAnswer] = []
    watch = RunWatch(run_dir)
    for draw in draws:
        if draw.at_s > for_s or len(answers) >= count:
            break
        watch.wait(lambda at_s=start_s + draw.at_s: time.monotonic() >= at_s, math.inf)  # type: ignore[misc]
        if watch.ended:
            say("the run has ended")
            break
        answer = _inject(run_dir, draw, world, watch, wait_s)
        if answer is None:
            say(f"the run ended before {draw.kind} of {draw.target} happened")
            break
        answers.append(answer)
        say(f"{draw}: step {answer.step}, {answer.answer} after {answer.seconds:.1f} s")
        if answer.answer == "no answer":
            raise RankError(f"the run did not go on within {wait_s:g} s of {draw.kind} in step {answer.step}")
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


def recovery_events(fault_kind: str) -> tuple[str, ...]:
    """Returns the kinds of events that end a recovery; empty for a fault that ends no rank."""
    if fault_kind == "nan":
        # A gradient that isn't finite ends no rank: its step is repeated, skipped, or the run rewound.
        return ("step_skipped", "step_repeated", "rewound")
    return () if fault_kind in ("slow", "flip", PAUSE) else ("recovered",)


def read_story(run_dir: Path, earlier_events: int) -> list[dict[str, Any]]:
    """Returns the events of recoveries, without the first ones of the run."""
    return [event for event in read_events(run_dir)[earlier_events:] if event["kind"] in STORY_KINDS]


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Returns every event of a run."""
    return [line for line in read_lines(run_dir / EVENTS) if "kind" in line]


def _inject(run_dir: Path, draw: Draw, world: World, watch: RunWatch, wait_s: float) -> FaultAnswer | None:
    """Injects one fault and waits for the answer; returns None when the run ended before it happened."""
    ranks = world.nodes[draw.target] if draw.kind == NODE else (draw.target,)
    # Counted before the request, so that no event of this fault's recovery is skipped.
    earlier_events = len(read_events(run_dir))
    step, happened = _request(run_dir, draw.kind, ranks, watch, wait_s)
    start_s = time.monotonic()

    def answered(answer: str) -> FaultAnswer:
        events = tuple(str(event["kind"]) for event in read_story(run_dir, earlier_events))
        seconds = round(time.monotonic() - start_s, 3)
        return FaultAnswer(**asdict(draw), step=step, answer=answer, seconds=seconds, events=events)

    if not happened:
        return None if watch.ended else answered("no answer" if step else "absent")
    if draw.kind == PAUSE:
        time.sleep(PAUSE_S)
        _continue(run_dir, draw.target)
    endings = recovery_events(draw.kind)
    if not endings:
        return answered("none")

    def ending() -> str:
        story = read_story(run_dir, earlier_events)
        return next((str(event["kind"]) for event in story if event["kind"] in endings), "")

    watch.wait(lambda: bool(ending()), wait_s)
    return answered(ending() or ("run ended" if watch.ended else "no answer"))


def _request(run_dir: Path, kind: str, ranks: Sequence[int], watch: RunWatch, wait_s: float) -> tuple[int, bool]:
    """Requests a fault of ranks until it happens; returns its step, 0 without such ranks, and whether it happened."""
    deadline_s, step, ahead = time.monotonic() + wait_s, 0, 2
    primitive = {NODE: "kill", PAUSE: "stop"}.get(kind, kind)
    while (left_s := deadline_s - time.monotonic()) > 0 and not watch.ended:
        # While ranks start, their stamps name no step; a run that shrank has some of them no more.
        if not watch.wait(lambda: bool(_current_step(run_dir, ranks)), left_s):
            break
        # The next step may begin before its ranks have read the request.
        step = _current_step(run_dir, ranks) + ahead
        marks = [ask(run_dir, Fault(kind=primitive, rank=rank, step=step, seconds=_slow_s(kind))) for rank in ranks]
        if any(mark.exists() for mark in marks):
            # The mark of an equal fault before a restart from an earlier step: a fault happens once in a run.
            ahead += 1
            _withdraw(marks)
            continue
        watch.wait(lambda: all(mark.exists() for mark in marks) or _is_past(run_dir, ranks, step), left_s)  # noqa: B023
        if all(mark.exists() for mark in marks):
            return step, True
        # The run was faster than this process: a request for a past step would strike after a restart from before it.
        _withdraw(marks)
    return step, False


def _withdraw(marks: Sequence[Path]) -> None:
    """Removes requests, so that ranks which start later don't read them."""
    for mark in marks:
        mark.with_name(f"{mark.name}.ask").unlink(missing_ok=True)


def _current_step(run_dir: Path, ranks: Sequence[int]) -> int:
    """Returns the latest step of a run; 0 while one of these ranks is absent or in no step."""
    steps = {stamp.rank: stamp.step for stamp in read_run_progress(run_dir)}
    return max(steps.values()) if all(steps.get(rank) for rank in ranks) else 0


def _is_past(run_dir: Path, ranks: Sequence[int], step: int) -> bool:
    """Whether every one of these ranks is beyond a step."""
    steps = {stamp.rank: stamp.step for stamp in read_run_progress(run_dir)}
    return all(steps.get(rank, 0) > step for rank in ranks)


def _slow_s(kind: str) -> float:
    """Returns the seconds of a fault that has some; the default of `Fault` for the others."""
    return SLOW_S if kind == "slow" else 1.0


def _continue(run_dir: Path, rank: int) -> None:
    """Continues a stopped rank, unless the run has replaced it."""
    for stamp in read_run_progress(run_dir):
        if stamp.rank == rank:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(stamp.pid, signal.SIGCONT)


def _lives(stamp: RankStamp) -> bool:
    try:
        os.kill(stamp.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _node_number(path: Path) -> int:
    return int(path.name.split("-")[1])
