"""Text from a model: sampling, token by token."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.forward import model_forward
from meshwright.models.structure import ModelStructure
from meshwright.parallel.training_modes import evaluation_mode

ONE_THREAD_PARAMETERS = 50_000_000
"""A smaller model generates in one thread: its operators are too short to be shared out."""


def generate_tokens(
    module: nn.Module,
    structure: ModelStructure,
    prompt: list[int],
    *,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    stop: Collection[int] = (),
    vocab: int | None = None,
    trained_context: int | None = None,
) -> list[int]:
    """Samples a continuation.

    A transformers model that can generate uses its key-value cache, up to its context; another model, and one beyond
    its context, reads the last tokens for each token.
    The draws come from one CPU generator, so a seed yields the same text on any device with the same logits.

    Args:
        module: the model, whole on this rank; put into eval mode for the time.
        structure: of the model.
        prompt: token ids, at least one.
        max_tokens: number of tokens to add.
        temperature: divides the logits; 0 picks the likeliest token.
        top_k: draw from the k likeliest only; None from all.
        seed: of the draws.
        stop: tokens that end the text; they are not returned.
        vocab: entries of the tokenizer, where the model has more: ids from there on are no text and never drawn.
        trained_context: tokens of the rows that it was trained on, its context where it states none: a model of other
            code may have learned no more positions.

    Returns:
        The added token ids.

    Raises:
        ConfigError: for an empty prompt, ids that the model has no row for, or a negative temperature.
    """
    _check_request(structure, prompt, temperature, top_k)
    device = next(module.parameters()).device
    limit = structure.positions or structure.context or trained_context
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    cache_name, cache = _cache_name(structure), None
    with evaluation_mode([module]), _few_threads(module), torch.no_grad():
        for step in range(max_tokens):
            logits = None
            if cache_name is not None and (limit is None or len(tokens) <= limit):
                # the cache has what all earlier tokens left: read only the newest
                new = torch.tensor([tokens if step == 0 else tokens[-1:]], device=device)
                cache, logits = _read_cached(module, new, cache_name, cache)
                cache_name = cache_name if cache is not None else None
            if logits is None:
                window = torch.tensor([tokens[-limit:] if limit else tokens], device=device)
                logits = model_forward(module, structure, window)
            token = _pick(logits[0, -1, :vocab], temperature, top_k, generator)
            if token in stop:
                break
            tokens.append(token)
    return tokens[len(prompt) :]


def _check_request(structure: ModelStructure, prompt: list[int], temperature: float, top_k: int | None) -> None:
    """Refuses prompts that can't be continued and settings that can't be drawn from."""
    if structure.vocab is not None and max(prompt, default=0) >= structure.vocab:
        raise ConfigError(
            f"the prompt holds token {max(prompt)}, the model's vocabulary has {structure.vocab} entries: the "
            "tokenizer is another model's; give the directory its own"
        )
    if not prompt:
        raise ConfigError("the prompt holds no token; give at least one character")
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ConfigError(f"temperature = {temperature} and top_k = {top_k}; they must be >= 0 and >= 1")


@contextlib.contextmanager
def _few_threads(module: nn.Module) -> Iterator[None]:
    """Computes a small model in one thread for the time.

    Where other programs keep the cores busy, each of a token's operators, of microseconds, would wait milliseconds for
    the second thread to be scheduled.
    """
    threads = torch.get_num_threads()
    if sum(parameter.numel() for parameter in module.parameters()) < ONE_THREAD_PARAMETERS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _cache_name(structure: ModelStructure) -> str | None:
    """Returns under which name forward accepts and returns the cache of earlier tokens; None where it has none."""
    if not structure.transformers or "use_cache" not in structure.arguments:
        return None
    # the second name is that of transformers before 5.24
    return next((name for name in ("cache", "past_key_values") if name in structure.arguments), None)


def _read_cached(module: nn.Module, new: torch.Tensor, cache_name: str, cache: Any) -> tuple[Any, torch.Tensor | None]:
    """Reads the tokens behind a cache; returns the cache with them, and logits (1, T, V); None for what can't be had.

    Args:
        module: of transformers.
        new: (1, T) int64, tokens that the cache doesn't have.
        cache_name: of the cache, as an argument and as an output.
        cache: of all tokens before; None in front of the first.
    """
    try:
        output = module(input_ids=new, use_cache=True, **{cache_name: cache})
    except ValueError:
        # a hybrid without an attention layer can't count the tokens in its cache
        return None, None
    return output.get(cache_name), output.logits


def _pick(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Draws one token from logits (V,)."""
    # float64 on the CPU, so that the same logits give the same draw on any device
    values = logits.double().cpu()
    if temperature == 0:
        return int(values.argmax())
    if top_k is not None and top_k < values.numel():
        values = values.masked_fill(values < values.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial((values / temperature).softmax(0), 1, generator=generator))
