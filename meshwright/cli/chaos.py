"""``meshwright chaos``: injects faults into ranks of a running job and reports how the run recovered."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice, takewhile
from pathlib import Path

from meshwright.cli.arguments import print_result, take_flag, take_value
from meshwright.errors import ConfigError, RankError, nearest
from meshwright.events import Event
from meshwright.jobs.fault_injection import RunWatch, inject_faults, read_events, read_story, recovery_events
from meshwright.jobs.progress import to_stderr as say
from meshwright.jobs.random_faults import RANDOM_KINDS, Draw, World, draw_faults, read_world, run_ended
from meshwright.monitor.display import event_line
from meshwright.monitor.progress import read_run_progress
from meshwright.train.faults import KINDS, Fault, ask

USAGE = """usage: meshwright chaos RUN --KIND rank=N [--at step=N[,phase=P]] [--seconds S] [--wait S] [--json]
       meshwright chaos RUN --random [--every 30s|40steps] [--seed N] [--for 10m] [--count N] [--kinds A,B]
                        [--dry-run] [--json]

Breaks a rank of a run that is under way in the directory RUN, and waits for the story of its recovery.

{kinds}

  --at step=N,phase=P   when: a step, counted from 1 (the next but one by default), and the place in it: data, forward,
                        backward, reduce, collective, optimizer, snapshot, checkpoint
  --seconds S           how long a slow rank sleeps in each step (1)
  --wait S              seconds to wait for it to happen and for the run to go on (600)
  --json                print the events as JSON

With --random faults are drawn, the same for the same seed and the same ranks, until a bound or the end of the run:
  --every T, --seed N   mean time between faults, as 30s or 2m (30s), and the seed of the draws (0); 40steps draws the
                        steps of the run instead, so that the same seed breaks the same ranks in the same steps
  --for T, --count N    bounds: no later fault (10m, 400steps), no more faults
  --kinds A,B           of: kill, exit, raise, nan, slow, pause, node (by default these; node with several nodes), and
                        stop, hang, gil, flip; pause stops a rank for 2 s, node kills all ranks of a node
  --ranks N             with --dry-run: ranks, where no run is under way yet
  --dry-run             print the faults and inject none

Exit status: 0 the run went on, 1 it ended or did not go on, 2 for a fault or a run that can't be.
"""
_PREVIEW = 10
"""Faults of a dry run without a bound."""
_TIME = re.compile(r"(\d+(?:\.\d*)?)(s|m|h|)")
_STEPS = re.compile(r"(\d+) ?steps?")


_FAULT_FLAGS = (*(f"--{kind}" for kind in KINDS), "--at", "--json", "--random", "--seconds", "--wait")
"""What `chaos RUN` knows of one fault."""


def run(argv: Sequence[str]) -> int:
    """Requests a fault, waits for the recovery and prints its events; exit status 0 when the run went on."""
    args = list(argv)
    kinds = "\n".join(f"  --{kind:<5} rank=N       {effect}" for kind, effect in KINDS.items())
    if not args or args[0] in ("-h", "--help", "--help-all"):
        print_result(USAGE.format(kinds=kinds).rstrip())
        return 0
    run_dir, as_json = Path(args.pop(0)), take_flag(args, "--json")
    wait_s = _parse_wait(take_value(args, "--wait") or "600")
    if take_flag(args, "--random"):
        return _run_random(args, run_dir, as_json, wait_s)
    fault = _parse_fault(args, run_dir)
    # Counted before the request, so that no event of this fault's recovery is skipped.
    earlier_events, watch = len(read_events(run_dir)), RunWatch(run_dir)
    fault_mark = ask(run_dir, fault)
    say(f"asked for {fault}")
    if not watch.wait(fault_mark.exists, wait_s):
        if watch.ended:
            raise RankError(f"the run ended before the fault {fault} happened; name an earlier step")
        raise ConfigError(f"the fault {fault} did not happen within {wait_s:g} s: is the run still under way?")
    say("it happened")
    endings = recovery_events(fault.kind)
    # A slow step, a bit that may matter to nobody, and a process beside the ranks start no ranks again.
    if not endings or fault.rank < 0:
        return 0
    recovered = watch.wait(
        lambda: any(event["kind"] in endings for event in read_story(run_dir, earlier_events)), wait_s
    )
    story = read_story(run_dir, earlier_events)
    for event in [] if as_json else story:
        data = {key: value for key, value in event.items() if key not in ("kind", "rank", "pid", "host", "time")}
        say(event_line(Event(kind=event["kind"], rank=0, data=data)) or event["kind"])
    if as_json:
        print_result(json.dumps(story))
    if recovered:
        return 0
    if watch.ended:
        raise RankError(f"the run ended by {fault} and did not go on; its output and events.jsonl say why")
    raise ConfigError(f"the run did not go on within {wait_s:g} s")


def _run_random(args: list[str], run_dir: Path, as_json: bool, wait_s: float) -> int:
    """Injects random faults, or lists them."""
    dry_run, ranks = take_flag(args, "--dry-run"), take_value(args, "--ranks")
    (every, by_steps), (until, until_steps) = _parse_turn(args, "--every", "30s"), _parse_turn(args, "--for", "inf")
    seed, count = _parse_number(args, "--seed", "0"), _parse_number(args, "--count", "0")
    kinds = [kind for kind in (take_value(args, "--kinds") or "").split(",") if kind]
    if args:
        raise ConfigError(f"'{args[0]}' is not known here; meshwright chaos --help lists what is")
    if ranks is not None and (not dry_run or not ranks.isdigit() or int(ranks) < 1):
        raise ConfigError(f"--ranks {ranks}: give a number above 0, with --dry-run; a run under way has its own")
    if until < math.inf and by_steps != until_steps:
        raise ConfigError("--every and --for differ in their units: give both as a time, or both as 40steps")
    world = World(ranks=int(ranks)) if ranks is not None else read_world(run_dir)
    draws = draw_faults(world, seed, every, kinds, by_steps=by_steps)
    if dry_run:
        bound = count or (_PREVIEW if until == math.inf else 10**6)
        listed = list(islice(takewhile(lambda draw: draw.turn <= until, draws), bound))
        _show_draws(listed, as_json)
        return 0
    bound = count or 10**6
    if not as_json:
        say(f"random faults every {every:g} {'steps' if by_steps else 's'}, seed {seed}, in {world.ranks} ranks")
    answers = inject_faults(run_dir, draws, world, until=until, count=bound, wait_s=wait_s, say=say)
    if as_json:
        print_result(json.dumps([asdict(answer) for answer in answers], indent=2))
    return 1 if any(answer.answer == "run ended" for answer in answers) else 0


def _show_draws(draws: Sequence[Draw], as_json: bool) -> None:
    if as_json:
        print_result(json.dumps([asdict(draw) for draw in draws], indent=2))
        return
    for draw in draws:
        print_result(f"{draw}: {RANDOM_KINDS[draw.kind]}")


def _parse_turn(args: list[str], flag: str, default: str) -> tuple[float, bool]:
    """Removes ``flag T``; returns T in seconds (90, 90s, 1.5m, 2h) or steps (40steps), and whether it is in steps."""
    text = take_value(args, flag)
    if text is None and default == "inf":
        return math.inf, False
    if (steps := _STEPS.fullmatch(text or default)) and int(steps[1]) > 0:
        return float(steps[1]), True
    match = _TIME.fullmatch(text or default)
    seconds = float(match[1]) * {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}[match[2]] if match else 0.0
    if not seconds > 0:
        raise ConfigError(f"{flag} {text}: give a time above 0, as 30s, 5m or 1h, or 40steps")
    return seconds, False


def _parse_number(args: list[str], flag: str, default: str) -> int:
    text = take_value(args, flag) or default
    if not text.isdigit():
        raise ConfigError(f"{flag} {text}: give a whole number from 0 on")
    return int(text)


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
    unknown = next((arg for arg in args if arg.startswith("--") and arg[2:] not in KINDS), None)
    if unknown is not None:
        raise ConfigError(f"unknown flag {unknown}{nearest(unknown, _FAULT_FLAGS)}")
    if len(kinds) != 1:
        raise ConfigError(f"name one fault, as --kill rank=3; known: {', '.join('--' + kind for kind in KINDS)}")
    target = take_value(args, f"--{kinds[0]}")
    if args:
        raise ConfigError(f"'{args[0]}' is not known here; meshwright chaos --help lists what is")
    fields = ",".join(text for text in (target, step_text, f"seconds={seconds}" if seconds else "") if text)
    fault = Fault.parse(f"{kinds[0]}:{fields}")
    stamps = read_run_progress(run_dir)
    if not stamps or run_ended(run_dir):
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
