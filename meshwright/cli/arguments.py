"""From words to configs: a recipe first, flags over it, short forms for what is typed most."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from meshwright.config import Config, read_toml
from meshwright.errors import ConfigError

SHORT = {"--model": "--model.name", "--data": "--data.paths", "--run-dir": "--run"}
"""Short forms of flags: the section's name stands for its main field. torchrun takes ``--run`` for its own
``--run-path`` wherever it stands, so there ``--run-dir`` says the same."""

C = TypeVar("C", bound=Config)


def take_flag(words: list[str], flag: str) -> bool:
    """Removes a flag without value from ``words`` and returns whether it was there."""
    if flag in words:
        words.remove(flag)
        return True
    return False


def take_value(words: list[str], flag: str) -> str | None:
    """Removes ``flag VALUE`` from ``words`` and returns the value, or None when the flag isn't there."""
    if flag not in words:
        return None
    place = words.index(flag)
    if place + 1 >= len(words):
        raise ConfigError(f"{flag} needs a value")
    value = words[place + 1]
    del words[place : place + 2]
    return value


def read_positional(kind: type[C], words: Sequence[str], verb: str, name: str) -> tuple[str, C]:
    """Splits ``NAME --field value ...`` into the name and a config.

    Raises:
        ConfigError: when the name is missing, or as `read_config`.
    """
    rest = list(words)
    if rest and rest[0] in ("-h", "--help"):
        return "", _parsed(kind, rest, f"{verb} {name}", None)
    if not rest or rest[0].startswith("-"):
        raise ConfigError(f"meshwright {verb} needs {name} first; meshwright {verb} --help lists the rest")
    return rest[0], _parsed(kind, rest[1:], f"{verb} {name}", None)


def read_config(kind: type[C], words: Sequence[str], verb: str) -> C:
    """Builds a config from ``[RECIPE.toml] [--section.field value ...]``; flags win.

    Raises:
        ConfigError: for a recipe that isn't there, an unknown key or flag (naming the nearest), or a wrong value.
        SystemExit: after ``--help``.
    """
    rest = [_long(word) for word in words]
    base = kind()
    if rest and not rest[0].startswith("-"):
        base = kind.from_dict(read_toml(Path(rest.pop(0))), base=base)
    return _parsed(kind, rest, verb, base)


def _parsed(kind: type[C], words: Sequence[str], verb: str, base: C | None) -> C:
    """Lets tyro read the flags over ``base``; its complaints become a `ConfigError`."""
    import tyro

    complaint = io.StringIO()
    start: Any = {} if base is None else {"default": base}
    try:
        with contextlib.redirect_stderr(complaint):
            config = cast(C, tyro.cli(kind, prog=f"meshwright {verb}", args=_switched(kind, words), **start))
    except SystemExit as end:
        if not end.code:
            raise
        raise ConfigError(_plain(complaint.getvalue()) or f"meshwright {verb}: the flags are not valid") from None
    config.check_all()
    return config


def _switched(kind: type[Config], words: Sequence[str]) -> list[str]:
    """Turns ``--section.switch true`` and ``... false`` into tyro's ``--section.switch``, ``--section.no-switch``."""
    found: list[str] = []
    for word in words:
        if word.lower() not in ("true", "false") or not found or not _is_switch(kind, found[-1]):
            found.append(word)
        elif word.lower() == "false":
            section, dot, name = found[-1][2:].rpartition(".")
            found[-1] = f"--{section}{dot}no-{name}"
    return found


def _is_switch(kind: type[Config], flag: str) -> bool:
    hint: Any = kind
    for name in flag.removeprefix("--").replace("-", "_").split("."):
        hint = get_type_hints(hint).get(name) if isinstance(hint, type) and issubclass(hint, Config) else None
    return flag.startswith("--") and hint is bool


def _long(word: str) -> str:
    name, equals, value = word.partition("=")
    return SHORT.get(name, name) + equals + value


def _plain(box: str) -> str:
    """Takes the frame off tyro's message, and of an unknown flag's all but the flag and the nearest one."""
    lines = [line.strip("│╭╮╰╯─ \t") for line in box.splitlines()]
    text = " ".join(line for line in lines if line and line not in ("Parsing error", "Unrecognized options"))
    unknown = re.search(r"Unrecognized options?: (--\S+?),?(?:\s|$)", text)
    if unknown is None:
        return text.removeprefix("Value error ")
    near = re.search(r"Perhaps you meant: (--[\w.-]+)", text)
    return f"unknown flag {unknown[1]}" + (f"; did you mean {near[1]}?" if near else "; --help lists all flags")


def answer(text: str) -> None:
    """Prints a result on standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
