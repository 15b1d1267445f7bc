"""``meshwright export``: writes a run's model in Hugging Face format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import meshwright
from meshwright.cli.arguments import print_result, read_positional, take_flag
from meshwright.config import Config
from meshwright.jobs.progress import to_stderr


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig(Config):
    """usage: meshwright export RUN --to DIR [--trust]; --trust runs the code that the run's config names."""

    to: str
    """Directory to make."""
    dtype: Literal["float32", "bfloat16", "float16", "as-trained"] = "as-trained"
    """Type of the written weights."""


def run(argv: Sequence[str]) -> int:
    """Exports the newest checkpoint that is whole."""
    args = list(argv)
    as_json, trust = take_flag(args, "--json"), take_flag(args, "--trust")
    source, config = read_positional(ExportConfig, args, "export", "RUN")
    result = meshwright.export(source, config.to, dtype=config.dtype, trust=trust)
    to_stderr(f"exported step {result.step} of {result.run} to {result.to}")
    if as_json:
        print_result(json.dumps(result.to_json()))
    return 0
