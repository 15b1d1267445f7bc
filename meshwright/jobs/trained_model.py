"""A trained model in one process: from a run's newest whole checkpoint, or from a Hugging Face directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from meshwright.checkpoint.store import CheckpointStore
from meshwright.data.tokenizer import load_tokenizer, vocabulary_size
from meshwright.errors import CheckpointError, ConfigError, DataError
from meshwright.jobs.progress import Say, to_stderr
from meshwright.jobs.run_contents import model_folder, read_text
from meshwright.jobs.run_directory import CONFIG, refuse_code, run_config
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.deferred import retie
from meshwright.models.generate import generate_tokens
from meshwright.records import parse_json
from meshwright.train.state import BUFFERS, WEIGHTS


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """A whole model on this process's device, with its tokenizer."""

    built: BuiltModel
    tokenizer: Tokenizer
    ends: frozenset[int]
    """Tokens that end a text."""
    vocab: int | None = None
    """Entries of the tokenizer."""
    trained_context: int | None = None
    """Tokens of the rows that it was trained on."""

    def complete(
        self,
        prompt: str,
        *,
        max_tokens: int,
        temperature: float = 0.8,
        top_k: int = 50,
        seed: int = 0,
        add_special_tokens: bool = True,
        end: str = "",
    ) -> str:
        """Returns a sampled continuation.

        Args:
            prompt: text to go on from.
            max_tokens: tokens to add.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: draw from the k likeliest tokens.
            seed: of the draws.
            add_special_tokens: as for the tokenizer.
            end: text that ends the continuation too, and isn't in it; empty for none.
        """
        check_prompt(self.tokenizer, prompt)
        ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens).ids
        new_ids = generate_tokens(
            self.built.module,
            self.built.structure,
            ids,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            stop=self.ends | _first_special(self.tokenizer, end),
            vocab=self.vocab,
            trained_context=self.trained_context,
        )
        # Decoded together, since a token's text may depend on the one before it; then the prompt is cut off.
        text = str(self.tokenizer.decode(ids + new_ids))[len(self.tokenizer.decode(ids)) :]
        return text.partition(end.strip())[0] if end.strip() else text


def _first_special(tokenizer: Tokenizer, text: str) -> frozenset[int]:
    """Returns the first token of a text where it is one that no other text has; nothing otherwise."""
    first = tokenizer.encode(text.lstrip(), add_special_tokens=False).ids[:1]
    return frozenset(first) & tokenizer.get_added_tokens_decoder().keys()


def check_prompt(tokenizer: Tokenizer, prompt: str) -> None:
    """Refuses a prompt with characters that the vocabulary has no token for.

    Raises:
        ConfigError: names the characters without a token.
    """
    unknown = sorted({character for character in prompt if not tokenizer.encode(character).ids})
    if unknown or not prompt:
        problem = f"has no token for {', '.join(map(repr, unknown[:8]))}" if unknown else "can't go on from nothing"
        raise ConfigError(f"the prompt {prompt[:40]!r}: the vocabulary {problem}; use characters of the training text")


def newest_weights(
    run_dir: Path, trust: bool = False, say: Say = to_stderr
) -> tuple[int, Iterator[tuple[str, torch.Tensor]]]:
    """Returns (step, iterator of (name, whole weight or buffer)) of a run's newest checkpoint that is whole.

    Says which newer ones were refused, and why.

    Args:
        run_dir: the run's directory.
        trust: ask the mirror that the directory's config names where the newest checkpoint here is damaged.
        say: takes a line for each newer one that was refused.

    Raises:
        CheckpointError: when there is none.
    """
    config = run_config(run_dir).checkpoint
    # An untrusted run directory must not make this machine contact the mirror that it names.
    config = config if trust else dataclasses.replace(config, mirror="")
    store = CheckpointStore(run_dir / "checkpoints", config)
    checkpoint = store.find()
    for refused in checkpoint.refused if checkpoint is not None else ():
        say(f"passed over {refused.path}: {refused.reason}")
    if checkpoint is None:
        raise CheckpointError(f"{run_dir} has no checkpoint yet; train it first")
    tensor_names = [name for name in checkpoint.manifest.tensors if name.partition("/")[0] in (WEIGHTS, BUFFERS)]
    return checkpoint.step, (
        (name.partition("/")[2], value) for name, value in store.read_full(checkpoint, tensor_names)
    )


def run_model(run_dir: Path, trust: bool = False) -> BuiltModel:
    """Builds a run's model on the meta device, from what the run directory itself holds.

    A function's code is no part of a run directory: it must be importable where this runs.

    Args:
        run_dir: the run's directory.
        trust: import and call the function that the directory's config names, as the user said.

    Raises:
        ConfigError: when it names one and isn't trusted.
    """
    config, text, folder = run_config(run_dir), read_text(run_dir), model_folder(run_dir)
    if folder is None:
        refuse_code(run_dir, config, trust)
        return build_meta(config.model, vocab=text.vocab_size, context=config.data.sequence)
    trained_config = config.model
    # The run directory's own copy of the config: the original may have moved or changed.
    kept_config = ModelConfig(
        name=str(folder), dropout=trained_config.dropout, attention=trained_config.attention, seed=trained_config.seed
    )
    return build_meta(kept_config, weights=False)


def open_run(run_dir: Path, trust: bool = False, say: Say = to_stderr) -> TrainedModel:
    """Loads a run's newest whole checkpoint into memory; ``trust`` as for `run_model`."""
    built, text = run_model(run_dir, trust), read_text(run_dir)
    _, values = newest_weights(run_dir, trust, say)
    _materialise(built, dict(values))
    return TrainedModel(
        built=built,
        tokenizer=text.tokenizer(),
        ends=frozenset() if text.eos_id is None else frozenset({text.eos_id}),
        vocab=text.vocab_size,
        trained_context=run_config(run_dir).data.sequence,
    )


def tokenizer_folder(path: Path) -> Path:
    """Returns where the tokenizer of a run directory or of a Hugging Face directory lies."""
    return read_text(path).folder if (path / CONFIG).is_file() else path


def open_directory(folder: Path) -> TrainedModel:
    """Loads a Hugging Face directory with its ``tokenizer.json``."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{folder} has no tokenizer.json, which a prompt needs; export a run, or add the tokenizer")
    built = build_meta(ModelConfig(name=str(folder)))
    _materialise(built, {name: built.tensor(name) for name, _ in built.module.named_parameters()})
    tokenizer = load_tokenizer(path)
    ends = _end_tokens(folder, getattr(built.hf_config, "eos_token_id", None))
    return TrainedModel(built=built, tokenizer=tokenizer, ends=ends, vocab=vocabulary_size(tokenizer))


def _end_tokens(folder: Path, configured: Any) -> frozenset[int]:
    """Returns the tokens that end a text: of its settings of generation, or of the model.

    Args:
        folder: in Hugging Face format.
        configured: the model's ``eos_token_id``: a number, several, or None.
    """
    settings = folder / "generation_config.json"
    if settings.is_file():
        given = parse_json(settings.read_text(encoding="utf-8"))
        named = given.get("eos_token_id") if isinstance(given, dict) else None
        configured = configured if named is None else named
    ends = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in ends if isinstance(token, int))


def open_trained(path: Path, trust: bool = False, say: Say = to_stderr) -> TrainedModel:
    """Opens a run directory or a Hugging Face directory.

    Args:
        path: the directory.
        trust: run the code that a run's config names.
        say: takes a line for each checkpoint that was passed over.

    Raises:
        ConfigError: when it is neither, or names code and isn't trusted.
    """
    if (path / CONFIG).is_file():
        return open_run(path, trust, say)
    if (path / "config.json").is_file():
        return open_directory(path)
    raise ConfigError(f"{path} is neither a run directory ({CONFIG}) nor a Hugging Face directory (config.json)")


def _materialise(built: BuiltModel, values: dict[str, torch.Tensor]) -> None:
    """Allocates the meta module on the CPU and copies the full weights and buffers into it."""
    module = built.module
    module.to_empty(device="cpu")
    retie(module, built.recipe.ties)
    built.fill_buffers(module, "cpu")
    buffers = dict(module.named_buffers())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            # Checkpoints hold no weight without elements.
            if parameter.numel():
                parameter.copy_(values[name])
        # Buffers that the checkpoint has; all others were computed by `fill_buffers`.
        for name in values.keys() & buffers.keys():
            buffers[name].copy_(values[name])
    module.eval()
