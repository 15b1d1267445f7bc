"""Rewrites tyro's complaints about flags as one sentence: the flag, its value, and what it takes."""

from __future__ import annotations

import difflib
import itertools
import re
import types
from collections.abc import Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

from meshwright.config import Config

_NUMBERS = {int: "a whole number", float: "a number"}
_FRAME = "│╭╮╰╯─| \t"
_RULE = "-+"
_HEADINGS = ("Parsing error", "Unrecognized options", "Value error", "Missing argument", "Invalid choice")


def flag_type(kind: type[Config], flag: str) -> Any:
    """Returns the type of the setting that a flag such as ``--train.steps`` names; None for no setting's flag."""
    hint: Any = kind
    for name in flag.removeprefix("--").replace("-", "_").split("."):
        hint = get_type_hints(hint).get(name) if isinstance(hint, type) and issubclass(hint, Config) else None
    return hint if flag.startswith("--") else None


def describe_complaint(box: str, kind: type[Config], args: Sequence[str], base: Config | None) -> str:
    """Returns one sentence for what tyro printed about flags.

    Args:
        box: what it printed, in its frame.
        kind: type of the config that the flags set.
        args: the flags and their values.
        base: the config under the flags, whose value is the example; None without one.
    """
    text = _unframe(box)
    if unknown := re.search(r"Unrecognized options?: (\S+?),?(?:\s|$)", text):
        if unknown[1].startswith("--"):
            near = re.search(r"Perhaps you meant: (--[\w.-]+)", text)
            return f"unknown flag {unknown[1]}" + (f"; did you mean {near[1]}?" if near else "; --help lists all flags")
        return _describe_leftover(unknown[1], kind, args)
    if required := re.search(r"Required options? .*?(--[\w.-]+) ([A-Z]+)", text):
        return f"{required[1]} is missing, which has no default; --help says what it takes"
    if missing := re.search(r"Missing value for argument '(--[\w.-]+)", text):
        return f"{missing[1]} needs a value"
    if choice := re.search(r"invalid choice '(.*?)' for argument '(--[\w.-]+?)'\. Expected one of \((.*?)\)", text):
        known = [word for word in re.findall(r"'(.*?)'", choice[3]) if word]
        close = difflib.get_close_matches(choice[1], known, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        return f"{choice[2]} '{choice[1]}': it takes {', '.join(known)}{hint}"
    if wrong := re.search(r"Error parsing (--[\w.-]+): ", text):
        if get_origin(flag_type(kind, wrong[1])) is dict:
            return f"{wrong[1]}: it takes pairs of a name and its value, as {wrong[1]} NAME VALUE"
        return _describe_number(wrong[1], kind, args, base) or text
    return text


def _unframe(box: str) -> str:
    """Returns tyro's message without its frame, its heading and where it says that there is more help."""
    lines = [line.strip(_FRAME) for line in box.splitlines()]
    text = " ".join(line for line in lines if line.strip(_RULE) and line not in _HEADINGS)
    return re.sub(r" ?For full helptext, (run|see) .*? --help", "", text).removeprefix("Value error ")


def _describe_leftover(word: str, kind: type[Config], args: Sequence[str]) -> str:
    """Describes a word that is neither a flag nor a flag's value."""
    before = args[args.index(word) - 1] if word in args[1:] else ""
    if flag_type(kind, before) is bool:
        return f"{before} {word}: it takes true or false"
    return f"'{word}' belongs to no flag; a recipe comes first and alone, and a value behind its own flag"


def _describe_number(flag: str, kind: type[Config], args: Sequence[str], base: Config | None) -> str | None:
    """Describes a value that is no number; None where the flag takes something else."""
    hint, optional = flag_type(kind, flag), False
    if get_origin(hint) in (Union, types.UnionType):
        of_union = set(get_args(hint)) - {type(None)}
        hint, optional = (of_union.pop() if len(of_union) == 1 else None), True
    if hint not in _NUMBERS:
        return None
    values = [value for name, value in itertools.pairwise(args) if name == flag]
    values += [arg.removeprefix(f"{flag}=") for arg in args if arg.startswith(f"{flag}=")]
    default = base.value(flag.removeprefix("--").replace("-", "_")) if base is not None else None
    example = f", as {flag} {default}" if default is not None else ""
    value = next((value for value in reversed(values) if not _is_number(value, hint)), "")
    return f"{flag} '{value}': it takes {_NUMBERS[hint]}{' or None' if optional else ''}{example}"


def _is_number(text: str, number: type[int] | type[float]) -> bool:
    try:
        number(text)
    except ValueError:
        return False
    return True
