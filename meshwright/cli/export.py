"""``meshwright export``: writes a run's model in Hugging Face format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.cli.arguments import answer, read_positional, say, take_flag
from meshwright.config import Config
from meshwright.launch.preload import prepare_environment


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig(Config):
    """usage: meshwright export RUN --to DIR [--trust]; --trust runs the code that the run's config names."""

    to: str
    """Directory to make."""
    dtype: Literal["float32", "bfloat16", "float16", "as-trained"] = "as-trained"
    """Type of the written weights."""


def run(argv: Sequence[str]) -> int:
    """Exports the newest checkpoint that is whole."""
    words = list(argv)
    as_json, trust = take_flag(words, "--json"), take_flag(words, "--trust")
    source, config = read_positional(ExportConfig, words, "export", "RUN")
    prepare_environment()
    import torch

    from meshwright.cli.run_contents import read_text
    from meshwright.cli.trained_model import newest_weights, run_model
    from meshwright.models.export import export_hf

    run_dir = Path(source)
    step, values = newest_weights(run_dir, trust)
    dtype = None if config.dtype == "as-trained" else getattr(torch, config.dtype)
    built, folder = run_model(run_dir, trust), read_text(run_dir).folder
    out = export_hf(built, values, Path(config.to), tokenizer=folder, dtype=dtype)
    say(f"exported step {step} of {run_dir} to {out}")
    if as_json:
        answer(json.dumps({"step": step, "run": str(run_dir), "to": str(out)}))
    return 0
