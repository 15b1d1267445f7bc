"""``meshwright generate``: continues a prompt with a trained model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.cli.arguments import answer, read_positional, take_flag
from meshwright.config import Config
from meshwright.launch.preload import prepare_environment


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig(Config):
    """usage: meshwright generate RUN|DIR --prompt TEXT [--trust]; --trust runs the code that a run's config names."""

    prompt: str
    """Text to go on from."""
    max_tokens: int = 200
    """Tokens to add."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 50
    """Draw from the k likeliest tokens."""
    seed: int = 0
    """Of the draws."""


def run(argv: Sequence[str]) -> int:
    """Prints the prompt and its continuation."""
    words = list(argv)
    as_json, trust = take_flag(words, "--json"), take_flag(words, "--trust")
    target, config = read_positional(GenerateConfig, words, "generate", "RUN|DIR")
    prepare_environment()
    from meshwright.cli.trained_model import open_trained

    text = open_trained(Path(target), trust).complete(
        config.prompt,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        seed=config.seed,
    )
    answer(json.dumps({"prompt": config.prompt, "text": text}) if as_json else config.prompt + text)
    return 0
