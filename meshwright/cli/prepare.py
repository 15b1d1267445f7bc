"""``meshwright prepare``: turns text into token files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import meshwright
from meshwright.cli.arguments import print_result, read_config, take_flag, take_value
from meshwright.errors import ConfigError
from meshwright.jobs.prepare_engines import PrepareConfig, run_share
from meshwright.jobs.progress import to_stderr as say

_SHORT = {"--data": "--paths"}
"""train's flag for the same: here settings of the data have no section."""


def run(argv: Sequence[str]) -> int:
    """Prepares ``[PATH...] [--to DIR] [--json]`` and the fields of the data section, without its prefix.

    ``--batch DIR --of N --task I`` is what a job of an array runs: its share of the tasks that such a command wrote.
    """
    args = list(argv)
    if "--batch" in args:
        return _run_share(args)
    as_json = take_flag(args, "--json")
    to = take_value(args, "--to")
    paths: list[str] = []
    while args and not args[0].startswith("-"):
        paths.append(args.pop(0))
    if paths and any(arg.partition("=")[0] in ("--paths", "--data") for arg in args):
        raise ConfigError(
            f"paths are named twice, before the flags ({' '.join(paths)}) and by --paths or --data; name all once"
        )
    config = read_config(PrepareConfig, (["--paths", *paths] if paths else []) + args, "prepare", _SHORT)
    token_set = meshwright.prepare(config, to or None)
    summary = {
        "path": str(token_set.path),
        "fingerprint": token_set.fingerprint,
        "vocab_size": token_set.vocab_size,
        "train_tokens": len(token_set.train.tokens),
        "validation_tokens": len(token_set.validation.tokens),
    }
    print_result(json.dumps(summary, indent=2) if as_json else str(token_set.path))
    return 0


def _run_share(args: list[str]) -> int:
    batch, task, shares = (take_value(args, flag) for flag in ("--batch", "--task", "--of"))
    if args or not (batch and task and shares and task.isdecimal() and shares.isdecimal()):
        raise ConfigError("a job of an array runs prepare --batch DIR --of N --task I, and nothing else")
    count = run_share(Path(batch), int(task), int(shares))
    say(f"{count} tasks of {batch} done")
    return 0
