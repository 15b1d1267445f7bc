"""Parses command lines into configs: a recipe first, flags over it, short forms for the most frequent flags."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from meshwright.cli.flag_errors import describe_complaint, flag_type
from meshwright.config import Config, read_toml
from meshwright.errors import ConfigError
from meshwright.jobs.progress import to_stderr

SHORT = {"--model": "--model.name", "--data": "--data.paths", "--outer": "--outer.kind", "--run-dir": "--run"}
"""Short forms of flags: the section's name stands for its main field. torchrun takes ``--run`` for its own
``--run-path`` wherever it stands, so there ``--run-dir`` says the same."""

_PATHS = ("--data.paths", "--paths")
"""Flags of a corpus, with and without the section."""

C = TypeVar("C", bound=Config)


def take_flag(args: list[str], flag: str) -> bool:
    """Removes a flag without value from ``args`` and returns whether it was there."""
    if flag in args:
        args.remove(flag)
        return True
    return False


def take_value(args: list[str], flag: str) -> str | None:
    """Removes ``flag VALUE`` from ``args`` and returns the value, or None when the flag isn't there."""
    if flag not in args:
        return None
    index = args.index(flag)
    if index + 1 >= len(args):
        raise ConfigError(f"{flag} needs a value")
    value = args[index + 1]
    del args[index : index + 2]
    return value


def read_positional(kind: type[C], args: Sequence[str], verb: str, name: str) -> tuple[str, C]:
    """Splits ``NAME --field value ...`` into the name and a config.

    Raises:
        ConfigError: when the name is missing, or as `read_config`.
    """
    remaining = list(args)
    if remaining and remaining[0] in ("-h", "--help"):
        return "", _parse_with_tyro(kind, remaining, f"{verb} {name}", None)
    if not remaining or remaining[0].startswith("-"):
        raise ConfigError(f"meshwright {verb} needs {name} first; meshwright {verb} --help lists the rest")
    return remaining[0], _parse_with_tyro(kind, remaining[1:], f"{verb} {name}", None)


def read_config(kind: type[C], args: Sequence[str], verb: str, short: Mapping[str, str] = SHORT) -> C:
    """Builds a config from ``[RECIPE.toml] [--section.field value ...]``; flags win.

    Args:
        kind: of the config.
        args: the words behind the verb.
        verb: for messages.
        short: short forms of flags.

    Raises:
        ConfigError: for a recipe that isn't there, an unknown key or flag (naming the nearest), or a wrong value.
        SystemExit: after ``--help``.
    """
    expanded = [_expand_short_flag(arg, short) for arg in args]
    for typed, flag, following in zip(args, expanded, [*expanded[1:], "--"]):
        # No path at all would be the interpreter's own source: what an unset variable leaves must not mean that.
        if flag in _PATHS and following.startswith("--"):
            raise ConfigError(f"{typed} needs a value")
    base = kind()
    # Only the first word can be a recipe: later ones may be values of flags.
    if expanded and not expanded[0].startswith("-"):
        base = kind.from_dict(read_toml(Path(expanded.pop(0))), base=base)
    return _parse_with_tyro(kind, expanded, verb, base)


def print_settings(kind: type[C], verb: str) -> None:
    """Prints every setting of a config by section.

    Raises:
        SystemExit: always.
    """
    _parse_with_tyro(kind, ["--help"], verb, None)


def _parse_with_tyro(kind: type[C], args: Sequence[str], verb: str, base: C | None) -> C:
    """Parses the flags over ``base`` with tyro; its complaints become a `ConfigError`."""
    import tyro

    complaint = io.StringIO()
    start: Any = {} if base is None else {"default": base}
    try:
        with contextlib.redirect_stderr(complaint):
            config = cast(C, tyro.cli(kind, prog=f"meshwright {verb}", args=_spell_switches(kind, args), **start))
    except SystemExit as exit_request:
        if not exit_request.code:
            raise
        message = describe_complaint(complaint.getvalue(), kind, args, base)
        raise ConfigError(message or f"meshwright {verb}: the flags are not valid") from None
    if base is not None:
        config = _leave_out_idle(base, config)
    config.check_all()
    return config


def _leave_out_idle(recipe: C, config: C) -> C:
    """Returns the config without a recipe's settings that flags have taken the effect from, and says so.

    The flags' own settings, and a recipe's that never had an effect, stay and are refused.
    """
    idle_in_recipe = {setting.path for setting in recipe.idle_settings()}
    for path, _ in config.idle_settings():
        value = config.value(path)
        if recipe.value(path) == value and path not in idle_in_recipe:
            to_stderr(f"{path} = {value} of the recipe has no effect with these flags, and is left out")
            config = config.with_value(path, type(recipe)().value(path))
    return config


def _spell_switches(kind: type[Config], args: Sequence[str]) -> list[str]:
    """Turns ``--section.switch true`` and ``... false`` into tyro's ``--section.switch``, ``--section.no-switch``.

    One that may be left open, ``bool | None``, has a value for tyro, which ``--switch`` and ``--no-switch`` become.
    """
    switched: list[str] = []
    for arg, following in zip(args, [*args[1:], ""]):
        is_value = arg.lower() in ("true", "false")
        # Only a value behind a boolean field's flag is folded into the flag: "true" may be a text field's value.
        if is_value and switched and flag_type(kind, switched[-1]) is bool:
            if arg.lower() == "false":
                switched[-1] = _opposite(switched[-1])
        elif is_value and switched and flag_type(kind, switched[-1]) == bool | None:
            switched.append(arg.capitalize())
        elif flag_type(kind, arg) == bool | None and following.lower() not in ("true", "false", "none"):
            switched += [arg, "True"]
        elif (
            arg.rpartition(".")[2].removeprefix("--").startswith("no-") and flag_type(kind, _named(arg)) == bool | None
        ):
            switched += [_named(arg), "False"]
        else:
            switched.append(arg)
    return switched


def _opposite(flag: str) -> str:
    """Returns ``--section.no-switch`` of ``--section.switch``."""
    section, dot, name = flag[2:].rpartition(".")
    return f"--{section}{dot}no-{name}"


def _named(flag: str) -> str:
    """Returns ``--section.switch`` of ``--section.no-switch``."""
    section, dot, name = flag[2:].rpartition(".")
    return f"--{section}{dot}{name.removeprefix('no-')}"


def _expand_short_flag(arg: str, short: Mapping[str, str]) -> str:
    name, equals, value = arg.partition("=")
    return short.get(name, name) + equals + value


def align_columns(rows: Sequence[Sequence[str]], numeric: Collection[int] = ()) -> list[str]:
    """Returns rows of cells as lines; what a terminal would take for a command is shown as ``?``.

    Args:
        rows: as many cells in each; the first one has the headings.
        numeric: columns that are aligned to the right.
    """
    cells = [["".join(char if char.isprintable() else "?" for char in cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            f"{cell:>{width}}" if index in numeric else f"{cell:<{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def print_result(text: str) -> None:
    """Prints a result on standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
