"""Weights & Biases: settings of the package itself, as ``WANDB_MODE=offline``, hold.

Source: https://docs.wandb.ai/ref/python, wandb.init and Run.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from meshwright.monitor.trackers.contract import TrackedRun

PACKAGE = "wandb"


class WandbTracker:
    """Logs to Weights & Biases, by the run's own steps."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self.id = run.id or uuid.uuid4().hex[:8]
        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True)
        self._run = wandb.init(
            project=run.project, name=run.name, id=self.id, resume="allow", dir=str(run.run_dir),
            config=dict(run.config) if run.id is None else None, settings=settings,
        )  # fmt: skip
        # wandb's own step may not go back, as ours does after a recovery.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs the scalars of a step."""
        self._run.log({"step": step, **scalars})

    def log_text(self, step: int, tag: str, text: str) -> None:
        """Replaces a text of the run's summary."""
        self._run.summary[f"text/{tag}"] = text

    def close(self, finished: bool) -> None:
        """Ends the run's process, which sends what is left."""
        self._run.finish()
