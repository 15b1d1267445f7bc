"""``meshwright generate``: continues a prompt with a trained model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import meshwright
from meshwright.cli.arguments import print_result, read_positional, take_flag
from meshwright.config import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig(Config):
    """usage: meshwright generate RUN|DIR --prompt TEXT [--chat] [--trust].

    --chat says TEXT as a user does and prints the answer, --trust runs the code that a run's config names.
    """

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
    args = list(argv)
    as_json, chat, trust = (take_flag(args, flag) for flag in ("--json", "--chat", "--trust"))
    target, config = read_positional(GenerateConfig, args, "generate", "RUN|DIR")
    result = meshwright.generate(
        target,
        config.prompt,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        seed=config.seed,
        chat=chat,
        trust=trust,
    )
    print_result(json.dumps(result.to_json()) if as_json else result.text if chat else result.prompt + result.text)
    return 0
