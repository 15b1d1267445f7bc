"""Writes a trained model to a directory in Hugging Face format, or as safetensors with a note of its config."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from meshwright.errors import CheckpointError
from meshwright.models.build import BuiltModel, copy_generation_config
from meshwright.models.deferred import retie


def export_hf(
    built: BuiltModel,
    tensors: Iterable[tuple[str, torch.Tensor]],
    out: Path,
    *,
    tokenizer: Path | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Writes the model; on one rank, which needs memory for the full model.

    A transformers model goes through its own ``save_pretrained``, which undoes the conversions of loading, so that
    ``AutoModelForCausalLM.from_pretrained`` returns the same logits. Another module becomes ``model.safetensors`` and
    ``meshwright.json``; beside these peft saves the adapters of its own models, with their configuration. Everything is
    written beside the target and renamed.

    Args:
        built: from `build_meta`; its module becomes real here.
        tensors: (name, full value) of every parameter; of tied names one is enough.
        out: directory to create; it must be absent or empty.
        tokenizer: directory whose tokenizer files are copied.
        dtype: type of the written weights; None keeps that of ``tensors``.

    Returns:
        ``out``.

    Raises:
        CheckpointError: when ``out`` is in use, cannot be written, or parameters are missing or foreign.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is in use; export into a new directory")
    values = _complete_values(built, {name: value.detach().cpu() for name, value in tensors})
    # a reader never sees a half-written directory: rename is atomic
    temporary_folder = out.with_name(f".{out.name}.part")
    shutil.rmtree(temporary_folder, ignore_errors=True)
    try:
        temporary_folder.mkdir(parents=True)
        if built.hf_config is not None:
            _save_transformers(built, values, temporary_folder, dtype)
        else:
            _save_plain(built, values, temporary_folder, dtype)
            if built.has_adapters:
                _save_adapters(built, values, temporary_folder, dtype)
        for file in sorted(tokenizer.iterdir()) if tokenizer else ():
            if _is_tokenizer(file.name) and not (temporary_folder / file.name).exists():
                shutil.copy(file, temporary_folder / file.name)
        with contextlib.suppress(FileNotFoundError):
            # rename replaces no directory on every system, so remove the empty one first
            out.rmdir()
        temporary_folder.rename(out)
    except OSError as error:
        raise CheckpointError(f"can't export to {out}: {error}") from error
    finally:
        # Whatever ended it, Ctrl-C too; after a rename nothing is there. What a kill leaves, the next export removes.
        shutil.rmtree(temporary_folder, ignore_errors=True)
    return out


def _is_tokenizer(name: str) -> bool:
    """Returns whether transformers reads a tokenizer from a file. Source: its tokenizers' ``save_pretrained``."""
    other_names = (
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "spiece.model",
    )
    return name.startswith(("tokenizer", "chat_template")) or name in other_names


def _complete_values(built: BuiltModel, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns one full value, of the parameter's shape, for every parameter name that is first among its ties."""
    names = dict(built.module.named_parameters())
    all_names = {name for name, _ in built.module.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in built.module.named_buffers()}
    for group in built.recipe.ties:
        tied_value = next((values[name] for name in group if name in values), None)
        if tied_value is not None:
            # a tied weight may arrive under any of its names; the module lists the first
            values.setdefault(next(name for name in group if name in names), tied_value)
    missing = sorted(set(names) - set(values))
    foreign = sorted(set(values) - all_names - buffers)
    if missing or foreign:
        raise CheckpointError(
            f"the weights don't fit '{built.config.name}': missing {missing[:8]}, foreign {foreign[:8]}; "
            "they belong to another model config"
        )
    for name, parameter in names.items():
        if values[name].shape != parameter.shape:
            raise CheckpointError(f"'{name}' is {tuple(values[name].shape)}, the model's {tuple(parameter.shape)}")
    return values


def _save_transformers(
    built: BuiltModel, values: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype | None
) -> None:
    """Fills the module with the values and saves it by transformers."""
    module = built.module
    module.config.dtype = _fill(built, values, dtype)
    # as the config was before training turned the cache off
    for config in built.caching:
        config.use_cache = True
    module.save_pretrained(folder)
    if built.config.kind == "directory" and not built.config.fresh:
        copy_generation_config(Path(built.config.name), folder)


def _fill(built: BuiltModel, values: dict[str, torch.Tensor], dtype: torch.dtype | None) -> torch.dtype:
    """Makes the module real, with the values; returns the type of its weights."""
    module = built.module
    saved_dtype = dtype or next((value.dtype for value in values.values() if value.is_floating_point()), torch.float32)
    module.to(saved_dtype)
    module.to_empty(device="cpu")
    retie(module, built.recipe.ties)
    built.fill_buffers(module, "cpu")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values[name])
        for name, buffer in module.named_buffers():
            if name in values:
                buffer.copy_(values[name])
    return saved_dtype


def _save_adapters(built: BuiltModel, values: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype | None) -> None:
    """Saves a peft model's adapters by peft: ``adapter_model.safetensors`` and ``adapter_config.json``.

    ``PeftModel.from_pretrained`` puts them into the base model that the function began from.
    """
    _fill(built, values, dtype)
    built.module.save_pretrained(folder)


def _save_plain(built: BuiltModel, values: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype | None) -> None:
    """Saves parameters and persistent buffers as safetensors, with the config and ties as JSON."""
    names = dict(built.module.named_parameters())
    saved_tensors = {name: values[name].to(dtype or values[name].dtype).contiguous().clone() for name in names}
    # persistent buffers, which aren't among the trained values
    for name in built.module.state_dict():
        if name not in saved_tensors and not any(name in group for group in built.recipe.ties):
            saved_tensors[name] = values[name] if name in values else built.tensor(name)
    save_file(saved_tensors, folder / "model.safetensors", metadata={"format": "pt"})
    note = {"model": built.config.to_dict(), "ties": [list(group) for group in built.recipe.ties], "format": 1}
    (folder / "meshwright.json").write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
