"""What makes scripts comparable step by step: meshwright's own first weights and rows, written for them to read."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from meshwright.data.loader import Loader
from meshwright.data.tokens import TokenSet
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.family import family_config

SIZES = {"name": "llama", "layers": 8, "width": 384, "heads": 6, "ffn": 1024, "vocab": 8000, "context": 256}
"""20.3M parameters; embedding and head are two weights."""
STEPS = 64
"""Global batches that are written."""


def write_reference(folder: Path, data: Path, rows: int, sequence: int) -> Path:
    """Writes the llama in Hugging Face format with its first weights, and ``rows.npy: (STEPS, 2, rows, S)``.

    Args:
        folder: under which it goes.
        data: prepared text.
        rows: of the global batch.
        sequence: tokens a row, S.

    Returns:
        Its folder; one that is there already is taken as it is.
    """
    from transformers import AutoModelForCausalLM

    place = folder / f"llama-{data.name}-{rows}x{sequence}"
    if (place / "rows.npy").exists():
        return place
    config = ModelConfig.from_dict(SIZES)
    built = build_meta(config)
    model = AutoModelForCausalLM.from_config(family_config(config, None, None), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(built.tensor(name))
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as made:
        model.save_pretrained(made)
        tokens = TokenSet.open(data)
        loader = Loader(tokens.train, rows=rows, sequence=sequence, seed=0, index=0, count=1, mask_documents=False)
        batches = [loader.batch(step) for step in range(STEPS)]
        np.save(Path(made) / "rows.npy", np.stack([[one.tokens, one.targets] for one in batches]).astype(np.int32))
        shutil.copytree(made, place)
    return place


def model_words() -> list[str]:
    """Returns the llama as words for ``meshwright train``."""
    sizes = [word for key, value in SIZES.items() if key != "name" for word in (f"--model.{key}", str(value))]
    return ["--model", str(SIZES["name"]), *sizes]
