"""``meshwright chaos``: injects a fault into a rank of a running job and reports how the run recovered."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.cli.arguments import print_result, take_flag, take_value
from meshwright.errors import ConfigError
from meshwright.events import Event
from meshwright.jobs.progress import to_stderr as say
from meshwright.monitor.display import event_line
from meshwright.monitor.progress import read_run_progress
from meshwright.monitor.sinks import EVENTS, read_lines
from meshwright.train.faults import KINDS, Fault, ask

USAGE = """usage: meshwright chaos RUN --KIND rank=N [--at step=N[,phase=P]] [--seconds S] [--wait S] [--json]

Breaks a rank of a run that is under way in the directory RUN, and waits for the story of its recovery.

{kinds}

  --at step=N,phase=P   when: a step, counted from 1 (the next but one by default), and the place in it: data, forward,
                        backward, reduce, collective, optimizer, snapshot, checkpoint
  --seconds S           how long a slow rank sleeps in each step (1)
  --wait S              seconds to wait for it to happen and for the run to go on (600)
  --json                print the events as JSON
"""
_STORY_KINDS = (
    *("rank_lost", "node_lost", "leader_lost", "leading", "fenced", "left_out", "snapshot_refused", "damaged"),
    *("waiting", "planned", "restored", "resumed", "recovered"),
    *("step_repeated", "step_skipped", "rewinding", "rewound"),
)
"""Events that a recovery is made of, whatever the fault and however many nodes there are."""
_POLL_S = 0.05


def run(argv: Sequence[str]) -> int:
    """Requests a fault, waits for the recovery and prints its events; exit status 0 when the run went on."""
    args = list(argv)
    kinds = "\n".join(f"  --{kind:<5} rank=N       {effect}" for kind, effect in KINDS.items())
    if not args or args[0] in ("-h", "--help"):
        print_result(USAGE.format(kinds=kinds).rstrip())
        return 0
    run_dir, as_json = Path(args.pop(0)), take_flag(args, "--json")
    wait_s = _parse_wait(take_value(args, "--wait") or "600")
    fault = _parse_fault(args, run_dir)
    # Counted before the request, so that no event of this fault's recovery is skipped.
    earlier_events = len(_read_events(run_dir))
    fault_mark = ask(run_dir, fault)
    say(f"asked for {fault}")
    deadline_s = time.monotonic() + wait_s
    _wait_until(
        fault_mark.exists,
        deadline_s,
        f"the fault {fault} did not happen within {wait_s:g} s: is the run still under way?",
    )
    say("it happened")
    # A gradient that isn't finite ends no rank: its step is repeated, skipped, or the run rewound (`recovery.on_sick`).
    recovered_kinds = ("step_skipped", "step_repeated", "rewound") if fault.kind == "nan" else ("recovered",)
    # A slow step, a bit that may matter to nobody, and a process beside the ranks start no ranks again.
    if fault.kind in ("slow", "flip") or fault.rank < 0:
        return 0

    def story_events() -> list[dict[str, Any]]:
        return [event for event in _read_events(run_dir)[earlier_events:] if event["kind"] in _STORY_KINDS]

    _wait_until(
        lambda: any(event["kind"] in recovered_kinds for event in story_events()),
        deadline_s,
        f"the run did not go on within {wait_s:g} s",
    )
    for event in [] if as_json else story_events():
        data = {key: value for key, value in event.items() if key not in ("kind", "rank", "pid", "host", "time")}
        say(event_line(Event(kind=event["kind"], rank=0, data=data)) or event["kind"])
    if as_json:
        print_result(json.dumps(story_events()))
    return 0


def _parse_wait(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"--wait {text}: give seconds above 0, as --wait 600")
    return seconds


def _parse_fault(args: list[str], run_dir: Path) -> Fault:
    """Parses the flags into one fault, whose step is still ahead of the run.

    Raises:
        ConfigError: for flags that name none, or several, or leave something over.
    """
    seconds, step_text = take_value(args, "--seconds"), take_value(args, "--at")
    kinds = [kind for kind in KINDS if f"--{kind}" in args]
    if len(kinds) != 1:
        raise ConfigError(f"name one fault, as --kill rank=3; known: {', '.join('--' + kind for kind in KINDS)}")
    target = take_value(args, f"--{kinds[0]}")
    if args:
        raise ConfigError(f"'{args[0]}' is not known here; meshwright chaos --help lists what is")
    fields = ",".join(text for text in (target, step_text, f"seconds={seconds}" if seconds else "") if text)
    fault = Fault.parse(f"{kinds[0]}:{fields}")
    stamps = read_run_progress(run_dir)
    if not stamps:
        raise ConfigError(f"{run_dir} holds no run that is under way")
    last_rank = max(stamp.rank for stamp in stamps)
    if fault.rank > last_rank:
        raise ConfigError(f"rank={fault.rank}: the run has ranks 0 to {last_rank}")
    now = max(stamp.step for stamp in stamps)
    if fault.step == 0:
        # The next step may begin before its ranks have read the request.
        fault = replace(fault, step=now + 2)
    if fault.step <= now:
        raise ConfigError(f"step={fault.step} is over: the run is at step {now}; name a later one")
    return fault


def _read_events(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(run_dir / EVENTS) if "kind" in line]


def _wait_until(condition: Callable[[], bool], deadline_s: float, timeout_reason: str) -> None:
    while not condition():
        if time.monotonic() > deadline_s:
            raise ConfigError(timeout_reason)
        time.sleep(_POLL_S)
