"""The job ``export``: writes a run's model in Hugging Face format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from meshwright.jobs.progress import Say, to_stderr
from meshwright.jobs.run_contents import read_text
from meshwright.jobs.trained_model import newest_weights, run_model
from meshwright.launch.signals import interrupted_by_signals
from meshwright.models.export import export_hf

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "as-trained": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """Which state of a run was written where."""

    step: int
    """Optimizer steps of the checkpoint."""
    run: Path
    """The run's directory."""
    to: Path
    """The directory that was made: ``model.safetensors``, ``config.json``, the tokenizer; adapters of a peft model."""

    def to_json(self) -> dict[str, object]:
        """Returns plain values under the names of the fields."""
        return {"step": self.step, "run": str(self.run), "to": str(self.to)}


def export(
    run: str | Path,
    to: str | Path,
    *,
    dtype: Literal["float32", "bfloat16", "float16", "as-trained"] = "as-trained",
    trust: bool = False,
    say: Say = to_stderr,
) -> ExportResult:
    """Exports a run's newest checkpoint that is whole.

    Args:
        run: the run's directory.
        to: directory to make.
        dtype: type of the written weights.
        trust: import and call the function that the run's config names as its model.
        say: takes a line for each checkpoint that was passed over.

    Raises:
        ConfigError: when the directory holds no run, or names code and isn't trusted.
        CheckpointError: when the run has no checkpoint yet.
    """
    run_dir = Path(run)
    step, values = newest_weights(run_dir, trust, say)
    built, folder = run_model(run_dir, trust), read_text(run_dir).folder
    with interrupted_by_signals():
        exported = export_hf(built, values, Path(to), tokenizer=folder, dtype=_DTYPES[dtype])
    return ExportResult(step=step, run=run_dir, to=exported)
