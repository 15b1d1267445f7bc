"""``meshwright drain``: takes a node or a device out of a run under way, and gives it back."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from meshwright.cli.arguments import print_result, take_flag, take_value
from meshwright.errors import ConfigError
from meshwright.jobs.drain import drain, list_requests
from meshwright.resilience.drain_requests import DrainRequest


def run(argv: Sequence[str]) -> int:
    """Drains a device or lists those that are drained; exit status 0 when the run did it, or will at its start."""
    args = list(argv)
    undo, as_json = take_flag(args, "--undo"), take_flag(args, "--json")
    node, device = _take_number(args, "--node"), _take_number(args, "--device")
    why, wait_text = take_value(args, "--why") or "", take_value(args, "--wait") or "300"
    try:
        wait_s = float(wait_text)
    except ValueError:
        wait_s = math.nan
    if not 0 < wait_s < math.inf:
        raise ConfigError(f"--wait {wait_text}: give seconds above 0, as --wait 300")
    if len(args) != 1:
        raise ConfigError("drain takes the directory of one run; meshwright drain --help")
    run_dir = Path(args[0])
    if node is None and device is None:
        if undo or why:
            raise ConfigError("--undo and --why need --node or --device: name what they are about")
        requests = list_requests(run_dir)
        lines = [f"{_label(request)}{': ' * bool(request.why)}{request.why}" for request in requests]
        shown = json.dumps([asdict(request) for request in requests]) if as_json else "\n".join(lines)
        print_result(shown or "nothing is drained")
        return 0
    answer = drain(run_dir, DrainRequest(node=node or 0, device=device, why=why), undo, wait_s)
    print_result(json.dumps(answer.to_json()) if as_json else answer.text)
    return 0


def _take_number(args: list[str], flag: str) -> int | None:
    text = take_value(args, flag)
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 6:
        raise ConfigError(f"{flag} {text}: give a number, as {flag} 1")
    return int(text)


def _label(request: DrainRequest) -> str:
    return f"node {request.node}" + ("" if request.device is None else f" device {request.device}")
