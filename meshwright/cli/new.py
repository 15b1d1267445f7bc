"""``meshwright new``: writes a commented recipe after three questions, or from another framework's file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.arguments import print_result, take_value
from meshwright.errors import ConfigError
from meshwright.jobs.new_recipe import migrate_recipe, new_recipe
from meshwright.jobs.progress import to_stderr

USAGE = """usage: meshwright new [--model NAME] [--data PATH ...] [--devices N] [--to FILE] [--from FILE]

Writes a commented recipe. Asks on a terminal for what no flag says; elsewhere the defaults hold. From the file of
another framework it asks nothing: each key becomes a setting, or a comment that says why not (docs/migrating.md).

  --model NAME       a Hugging Face type (llama, gpt2, qwen3), a directory, or module:function (llama)
  --data PATH ...    files, directories and globs of text (the Python source of the interpreter)
  --devices N        ranks (all GPUs, else all cores)
  --to FILE          file to make (recipe.toml)
  --from FILE        DeepSpeed's .json, accelerate's or TRL's .yaml, torchtitan's .toml, or a script with flags of
                     torchtitan, Megatron-LM or TRL, which is read and never run; --devices where it says no number

  meshwright new --model gpt2 --data my-text.txt --to mine.toml
  meshwright new --from ds_config.json --model gpt2 --devices 8 --to mine.toml
  meshwright train mine.toml --dry-run

Exit status: 0, or 2 for a file that exists, a text that doesn't, or a setting that can't be.
"""


def run(argv: Sequence[str]) -> int:
    """Asks, writes the recipe and prints its path."""
    args = list(argv)
    if {"-h", "--help", "--help-all"} & set(args):
        print_result(USAGE.rstrip())
        return 0
    model, devices, to, source = (take_value(args, flag) for flag in ("--model", "--devices", "--to", "--from"))
    data = _take_paths(args)
    if args:
        raise ConfigError(f"'{args[0]}' is not known here; meshwright new --help lists what is")
    path = Path(to or "recipe.toml")
    if source is not None:
        _migrate(path, Path(source), model, data, devices)
        return 0
    model = _answer("model: a Hugging Face type, a directory, or module:function", "llama", model)
    text = _answer("text: files, directories or globs; nothing for the Python source", "", data and " ".join(data))
    count = _answer("devices: a number, or all", "all", devices)
    if count != "all" and not count.isdecimal():
        raise ConfigError(f"--devices {count}: give a number of ranks, or all")
    new_recipe(path, model, data or text.split(), None if count == "all" else int(count))
    to_stderr(f"wrote {path}; look at it, then: meshwright train {path}")
    print_result(str(path))
    return 0


def _migrate(path: Path, source: Path, model: str | None, data: Sequence[str], devices: str | None) -> None:
    """Writes a recipe from another framework's file, and says what isn't carried over."""
    if devices is not None and (not devices.isdecimal() or not int(devices[:9])):
        raise ConfigError(f"--devices {devices}: give the number of ranks that the recipe is for")
    count = None if devices is None else int(devices)
    recipe = migrate_recipe(path, source, model, data, count)
    for sentence in recipe.missing:
        to_stderr(f"not carried over: {sentence}")
    to_stderr(
        f"wrote {path} from {source} ({recipe.framework}): {recipe.carried} settings, {len(recipe.needless)} keys "
        f"needless here, {len(recipe.missing)} not carried over; look at it, then: meshwright train {path} --dry-run"
    )
    print_result(str(path))


def _take_paths(args: list[str]) -> list[str]:
    """Removes ``--data PATH ...`` and returns the paths."""
    if "--data" not in args:
        return []
    start = args.index("--data")
    stop = next((index for index in range(start + 1, len(args)) if args[index].startswith("--")), len(args))
    paths = args[start + 1 : stop]
    if not paths:
        raise ConfigError("--data needs a value")
    del args[start:stop]
    return paths


def _answer(question: str, default: str, flag: str | list[str] | None) -> str:
    """Returns what a flag said, else what a person on a terminal types, else the default."""
    if flag:
        return str(flag)
    if not sys.stdin.isatty():
        return default
    sys.stderr.write(f"{question} [{default or 'none'}]: ")
    sys.stderr.flush()
    return sys.stdin.readline().strip() or default
