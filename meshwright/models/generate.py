"""Text from a model: sampling, token by token."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.forward import model_forward
from meshwright.models.structure import ModelStructure
from meshwright.parallel.training_modes import evaluation_mode


def generate_tokens(
    module: nn.Module,
    structure: ModelStructure,
    prompt: list[int],
    *,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    stop: int | None = None,
    vocab: int | None = None,
) -> list[int]:
    """Samples a continuation.

    A transformers model that can generate uses its key-value cache; another model reads the last tokens for each token.
    The draws come from one CPU generator, so a seed yields the same text on any device with the same logits.

    Args:
        module: the model, whole on this rank; put into eval mode for the time.
        structure: of the model.
        prompt: token ids, at least one.
        max_tokens: number of tokens to add.
        temperature: divides the logits; 0 picks the likeliest token.
        top_k: draw from the k likeliest only; None from all.
        seed: of the draws.
        stop: token that ends the text; it is not returned.
        vocab: entries of the tokenizer, where the model has more: ids from there on are no text and never drawn.

    Returns:
        The added token ids.

    Raises:
        ConfigError: for an empty prompt, ids that the model has no row for, or a negative temperature.
    """
    _check_request(structure, prompt, temperature, top_k)
    device = next(module.parameters()).device
    limit = structure.positions or structure.context
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    cached = _cached(module, structure) and (limit is None or len(prompt) + max_tokens <= limit)
    cache = None
    with evaluation_mode([module]), torch.no_grad():
        for step in range(max_tokens):
            if cached:
                # the cache has the keys of all earlier tokens: read only the newest
                new = torch.tensor([tokens if step == 0 else tokens[-1:]], device=device)
                output = module(input_ids=new, past_key_values=cache, use_cache=True)
                cache, logits = output.past_key_values, output.logits
            else:
                window = torch.tensor([tokens[-limit:] if limit else tokens], device=device)
                logits = model_forward(module, structure, window)
            token = _pick(logits[0, -1, :vocab], temperature, top_k, generator)
            if token == stop:
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


def _cached(module: nn.Module, structure: ModelStructure) -> bool:
    """Returns whether forward accepts and returns the key-value cache of attention."""
    return structure.transformers and {"past_key_values", "use_cache"} <= structure.arguments


def _pick(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Draws one token from logits (V,)."""
    # float64 on the CPU, so that the same logits give the same draw on any device
    values = logits.double().cpu()
    if temperature == 0:
        return int(values.argmax())
    if top_k is not None and top_k < values.numel():
        values = values.masked_fill(values < values.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial((values / temperature).softmax(0), 1, generator=generator))
