"""Something of one's own between steps: a hook sees a StepInfo and returns a request; it never holds the trainer.

Here: stop when the validation loss has not improved for some evaluations. A hook decides from what all ranks share, so
all ranks decide alike.

python examples/hooks.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import meshwright
from meshwright import (
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    Request,
    RunConfig,
    ScheduleConfig,
    StepInfo,
    TrainConfig,
)


class Patience:
    """Stops a run whose validation loss no longer falls."""

    def __init__(self, evaluations: int) -> None:
        """Takes how many evaluations without progress are borne."""
        self.left = self.evaluations = evaluations
        self.best, self.seen = float("inf"), None

    def __call__(self, info: StepInfo) -> Request:
        """Called after each step on every rank."""
        loss = info.validation_loss
        if loss is None or loss == self.seen:
            return Request.NONE
        self.seen = loss
        self.left = self.evaluations if loss < self.best else self.left - 1
        self.best = min(self.best, loss)
        return Request.STOP if self.left <= 0 else Request.NONE


def main() -> None:
    """Trains with a learning rate far too high, and ends early."""
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            layout="replicate=2",
            devices=2,
            run=str(Path(folder) / "run"),
            model=ModelConfig(name="llama", layers=1, width=32, heads=2),
            data=DataConfig(limit_bytes=300_000, vocab_size=300, sequence=32, cache=folder),
            train=TrainConfig(steps=200, batch=8, sample_tokens=0, prove=False),
            optimizer=OptimizerConfig(lr=0.5),
            schedule=ScheduleConfig(shape="constant", warmup=2),
            evaluation=EvaluationConfig(every=4, rows=16),
        )
        result = meshwright.train(config, hooks=[Patience(evaluations=2)])
    print(f"stopped after step {result.step}" if not result.finished else "never lost patience")


if __name__ == "__main__":
    main()
