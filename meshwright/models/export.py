"""A trained model to a directory that others load: Hugging Face format, or safetensors with a note."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from meshwright.errors import CheckpointError
from meshwright.models.build import BuiltModel
from meshwright.models.deferred import retie


def export_hf(
    built: BuiltModel,
    tensors: Iterable[tuple[str, torch.Tensor]],
    out: Path,
    *,
    tokenizer: Path | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Writes the model; on one rank, which needs memory for the whole of it.

    A transformers model goes through its own ``save_pretrained``, which undoes the conversions of loading, so that
    ``AutoModelForCausalLM.from_pretrained`` gives the same logits. Another module becomes ``model.safetensors`` and
    ``meshwright.json``. Everything is written beside the target and renamed.

    Args:
        built: from `build_meta`; its module becomes real here.
        tensors: (name, whole value) of every parameter; of tied names one is enough.
        out: directory to make; it must be absent or empty.
        tokenizer: directory whose tokenizer files go along.
        dtype: type of the written weights; None keeps that of ``tensors``.

    Returns:
        ``out``.

    Raises:
        CheckpointError: when ``out`` is in use, cannot be written, or parameters are missing or foreign.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is in use; export into a new directory")
    values = _complete(built, {name: value.detach().cpu() for name, value in tensors})
    beside = out.with_name(f".{out.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        if built.hf_config is not None:
            _save_transformers(built, values, beside, dtype)
        else:
            _save_plain(built, values, beside, dtype)
        for file in sorted(tokenizer.iterdir()) if tokenizer else ():
            if _is_tokenizer(file.name) and not (beside / file.name).exists():
                shutil.copy(file, beside / file.name)
        with contextlib.suppress(FileNotFoundError):
            out.rmdir()
        beside.rename(out)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise CheckpointError(f"can't export to {out}: {error}") from error
    return out


def _is_tokenizer(name: str) -> bool:
    """True for the files that transformers reads a tokenizer from. Source: its ``save_pretrained`` of tokenizers."""
    known = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model")
    return name.startswith(("tokenizer", "chat_template")) or name in known


def _complete(built: BuiltModel, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns one value for every parameter name that stands first among its ties."""
    names = dict(built.module.named_parameters())
    every = {name for name, _ in built.module.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in built.module.named_buffers()}
    for group in built.recipe.ties:
        given = next((values[name] for name in group if name in values), None)
        if given is not None:
            values.setdefault(next(name for name in group if name in names), given)
    missing = sorted(set(names) - set(values))
    foreign = sorted(set(values) - every - buffers)
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
    module = built.module
    kind = dtype or next((value.dtype for value in values.values() if value.is_floating_point()), torch.float32)
    module.to(kind)
    module.to_empty(device="cpu")
    retie(module, built.recipe.ties)
    built.fill_buffers(module, "cpu")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values[name])
        for name, buffer in module.named_buffers():
            if name in values:
                buffer.copy_(values[name])
    module.config.dtype = kind
    for config in built.caching:
        config.use_cache = True
    module.save_pretrained(folder)


def _save_plain(built: BuiltModel, values: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype | None) -> None:
    names = dict(built.module.named_parameters())
    kept = {name: values[name].to(dtype or values[name].dtype).contiguous().clone() for name in names}
    for name in built.module.state_dict():
        if name not in kept and not any(name in group for group in built.recipe.ties):
            kept[name] = values[name] if name in values else built.tensor(name)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    note = {"model": built.config.to_dict(), "ties": [list(group) for group in built.recipe.ties], "format": 1}
    (folder / "meshwright.json").write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
