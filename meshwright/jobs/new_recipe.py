"""The job ``new``: writes a commented recipe from a model, a text and a number of devices."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from meshwright.errors import ConfigError
from meshwright.jobs.migrate.recipe import MigratedRecipe, migrate
from meshwright.launch.devices import found_devices
from meshwright.models.family import family_config
from meshwright.train.run_config import RunConfig

TEMPLATE = """\
# A run of meshwright: meshwright train {name}. Flags go over what stands here, as --train.steps 2000.
# Every setting is in the page Settings of the docs, and in meshwright train --help-all.

{devices}
# layout = "shard=2,zero=3"       # the planner chooses one of the fastest that fit when none is named

[model]
{model}
{sizes}

[data]
{paths}
sequence = 256                    # tokens of a row
# tokenizer = "auto"              # the model's own, or one that is trained on the text; chars, bytes, a directory
# vocab_size = 8192               # of one that is trained
validation_share = 0.05           # share of the documents that is held out

[train]
steps = 1000                      # or epochs = 3, passes over the text, in its place
batch = 16                        # rows of a global batch: {tokens} tokens a step
seed = 0

[optimizer]
lr = 1e-3                         # peak of the schedule; a bigger model wants a smaller one, as 3e-4
weight_decay = 0.1
clip = 1.0                        # longest gradient norm

[schedule]
shape = "cosine"                  # or linear, wsd, constant
warmup = 100

[evaluation]
every = 250

[checkpoint]
every = 500                       # steps; 0 writes only the one at the end
keep = 3
# mirror = "s3://bucket/runs"     # a second place for them

[recovery]
enabled = true                    # a lost rank is started again from the state in memory
# on_death = "shrink"             # or the run goes on with fewer ranks
"""
_SIZES = """\
layers = 4
width = 256
heads = 4                         # small enough for a CPU; a 1.1B llama: layers = 22, width = 2048, heads = 32"""
_ALL_DEVICES = "# devices = 2                     # ranks; all GPUs, else all cores, when not given"
_NO_SIZES = """\
# layers = 4                      # a directory's or function's own sizes hold; with fresh = true others can be set"""


def new_recipe(path: Path, model: str = "llama", data: Sequence[str] = (), devices: int | None = None) -> RunConfig:
    """Writes a recipe and returns the config that it is read as.

    Args:
        path: file to make, ``.toml``.
        model: a Hugging Face type, a directory, or ``module:function``.
        data: files, directories and globs; none for the Python source that comes with the interpreter.
        devices: number of ranks; all devices of the machine when None.

    Raises:
        ConfigError: when the file exists or can't be written, no text matches, there is no such model, or a setting
            can't be.
        ClusterError: when more GPUs are asked for than there are.
    """
    _check_target(path)
    found_devices(devices)
    _check_paths(data)
    text = recipe_text(path.name, model, data, devices)
    config = RunConfig.from_dict(tomllib.loads(text))
    config.check_all()
    if config.model.kind == "type":
        family_config(config.model, None, None)
    _write(path, text)
    return config


def migrate_recipe(
    path: Path, source: Path, model: str | None = None, data: Sequence[str] = (), devices: int | None = None
) -> MigratedRecipe:
    """Writes a recipe from a file of another framework.

    Args:
        path: file to make, ``.toml``.
        source: file of DeepSpeed, accelerate, torchtitan or Megatron-LM.
        model: model's name, in place of the file's.
        data: files, directories and globs of text.
        devices: number of ranks, where the file doesn't say.

    Raises:
        ConfigError: when the source can't be read or asks for a run that can't be, or as `new_recipe`.
    """
    _check_target(path)
    _check_paths(data)
    recipe = migrate(source, devices, model, data, path.name)
    _write(path, recipe.text)
    return recipe


def _check_target(path: Path) -> None:
    if path.suffix != ".toml":
        raise ConfigError(f"{path}: a recipe is a .toml file; write --to {path.with_suffix('.toml')}")


def _check_paths(data: Sequence[str]) -> None:
    for pattern in data:
        if not Path(pattern).exists() and not any(Path().glob(pattern) if not Path(pattern).is_absolute() else ()):
            raise ConfigError(f"--data {pattern}: no such file, directory or glob here; give the path of a text")


def _write(path: Path, text: str) -> None:
    """Makes the file."""
    try:
        # "x": a recipe that somebody has edited is never overwritten.
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists, and isn't overwritten; give another --to") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}; give another --to") from None


def recipe_text(name: str, model: str, data: Sequence[str], devices: int | None) -> str:
    """Returns the recipe's text."""
    # A directory or a function has sizes of its own, which sizes here would contradict.
    own_sizes = dataclasses.replace(RunConfig().model, name=model).kind != "type"
    return TEMPLATE.format(
        name=name,
        devices=_ALL_DEVICES if devices is None else f"devices = {devices}",
        model=_line({"name": model}),
        sizes=_NO_SIZES if own_sizes else _SIZES,
        paths=_line({"paths": list(data)})
        if data
        else '# paths = ["my-text.txt", "more/*.jsonl.gz"]    # without any: the Python source of the interpreter',
        tokens=16 * 256,
    )


def _line(values: dict[str, object]) -> str:
    """Returns a key and its value as TOML."""
    return tomli_w.dumps(values).rstrip()
