"""A run from Python instead of the command line: the same config tree, the same result.

python examples/train_from_python.py [STEPS]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from meshwright import DataConfig, EvaluationConfig, ModelConfig, RunConfig, ScheduleConfig, TrainConfig, train


def main(steps: int = 40) -> None:
    """Trains a small GPT-2 on two ranks with its optimizer state sharded, and prints how far it came."""
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            layout="shard=2,zero=1",
            devices=2,
            run=str(Path(folder) / "run"),
            model=ModelConfig(name="gpt2", layers=2, width=64, heads=2),
            data=DataConfig(limit_bytes=400_000, vocab_size=512, sequence=64, cache=folder),
            train=TrainConfig(steps=steps, batch=16, sample="import ", sample_tokens=40, prove=False),
            schedule=ScheduleConfig(warmup=steps // 4),
            evaluation=EvaluationConfig(every=20, rows=64),
        )
        result = train(config)
    print(f"loss {result.loss:.3f}, validation {result.validation_loss:.3f} after {result.step} steps")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
