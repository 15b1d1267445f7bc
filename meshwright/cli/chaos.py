"""``meshwright chaos``: breaks a rank of a run under way, on purpose, and tells how the run recovered."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.cli.arguments import answer, take_flag, take_value
from meshwright.errors import ConfigError
from meshwright.events import Event
from meshwright.jobs.progress import to_stderr as say
from meshwright.monitor.display import event_line
from meshwright.monitor.progress import PROGRESS, read_progress
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
_STORY = ("rank_lost", "fenced", "left_out", "planned", "restored", "resumed", "recovered", "step_skipped", "rewound")
_POLL_S = 0.05


def run(argv: Sequence[str]) -> int:
    """Asks for a fault, waits, and tells; exit status 0 when the run went on."""
    words = list(argv)
    kinds = "\n".join(f"  --{kind:<5} rank=N       {what}" for kind, what in KINDS.items())
    if not words or words[0] in ("-h", "--help"):
        answer(USAGE.format(kinds=kinds).rstrip())
        return 0
    run_dir, as_json = Path(words.pop(0)), take_flag(words, "--json")
    wait_s = float(take_value(words, "--wait") or 600)
    fault = _fault(words, run_dir)
    seen = len(_events(run_dir))
    mark = ask(run_dir, fault)
    say(f"asked for {fault}")
    end = time.monotonic() + wait_s
    _wait(mark.exists, end, f"the fault {fault} did not happen within {wait_s:g} s: is the run still under way?")
    say("it happened")
    done = ("step_skipped", "step_repeated", "rewound") if fault.kind == "nan" else ("recovered",)
    if fault.kind in ("slow", "flip"):
        return 0

    def told() -> list[dict[str, Any]]:
        return [event for event in _events(run_dir)[seen:] if event["kind"] in _STORY]

    _wait(lambda: any(event["kind"] in done for event in told()), end, f"the run did not go on within {wait_s:g} s")
    for event in [] if as_json else told():
        data = {key: value for key, value in event.items() if key not in ("kind", "rank", "pid", "host", "time")}
        say(event_line(Event(kind=event["kind"], rank=0, data=data)) or event["kind"])
    if as_json:
        answer(json.dumps(told()))
    return 0


def _fault(words: list[str], run_dir: Path) -> Fault:
    """Returns the fault that flags name.

    Raises:
        ConfigError: for flags that name none, or several, or leave something over.
    """
    seconds, at = take_value(words, "--seconds"), take_value(words, "--at")
    kinds = [kind for kind in KINDS if f"--{kind}" in words]
    if len(kinds) != 1:
        raise ConfigError(f"name one fault, as --kill rank=3; known: {', '.join('--' + kind for kind in KINDS)}")
    target = take_value(words, f"--{kinds[0]}")
    if words:
        raise ConfigError(f"'{words[0]}' is not known here; meshwright chaos --help lists what is")
    more = ",".join(text for text in (target, at, f"seconds={seconds}" if seconds else "") if text)
    fault = Fault.parse(f"{kinds[0]}:{more}")
    stamps = read_progress(run_dir / PROGRESS)
    if not stamps:
        raise ConfigError(f"{run_dir} holds no run that is under way")
    if fault.rank >= len(stamps):
        raise ConfigError(f"rank={fault.rank}: the run has ranks 0 to {len(stamps) - 1}")
    now = max(stamp.step for stamp in stamps)
    if fault.step == 0:
        fault = replace(fault, step=now + 2)
    if fault.step <= now:
        raise ConfigError(f"step={fault.step} is over: the run is at step {now}; name a later one")
    return fault


def _events(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(run_dir / EVENTS) if "kind" in line]


def _wait(condition: Any, end: float, why: str) -> None:
    while not condition():
        if time.monotonic() > end:
            raise ConfigError(why)
        time.sleep(_POLL_S)
