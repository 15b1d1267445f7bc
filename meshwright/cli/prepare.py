"""``meshwright prepare``: turns text into token files."""

from __future__ import annotations

import json
from collections.abc import Sequence

import meshwright
from meshwright.cli.arguments import print_result, read_config, take_flag, take_value
from meshwright.data.config import DataConfig


def run(argv: Sequence[str]) -> int:
    """Prepares ``[PATH...] [--to DIR] [--json]`` and the fields of the data section, without its prefix."""
    args = list(argv)
    as_json = take_flag(args, "--json")
    to = take_value(args, "--to")
    paths: list[str] = []
    while args and not args[0].startswith("-"):
        paths.append(args.pop(0))
    config = read_config(DataConfig, (["--paths", *paths] if paths else []) + args, "prepare")
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
