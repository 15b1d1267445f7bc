"""``meshwright completion``: prints a script that completes verbs, flags and their values in a shell."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from meshwright.cli.arguments import SHORT, print_result
from meshwright.cli.help import PAGES
from meshwright.cli.main import VERBS
from meshwright.config import Config
from meshwright.errors import ConfigError
from meshwright.train.faults import KINDS

SHELLS = ("bash", "zsh", "fish")
USAGE = """usage: meshwright completion bash|zsh|fish

Prints the completion of verbs, flags and their values for a shell.

  meshwright completion bash > ~/.local/share/bash-completion/completions/meshwright
  meshwright completion zsh > ~/.zfunc/_meshwright          # with fpath+=~/.zfunc before compinit
  meshwright completion fish > ~/.config/fish/completions/meshwright.fish

Exit status: 0, or 2 for another shell.
"""
_OWN_FLAGS = {
    "doctor": ("--hostfile", "--nodes", "--node", "--meet", "--slots", "--key-file", "--cluster", "--meet-s", "--json"),
    "chaos": (
        *(f"--{kind}" for kind in KINDS),
        *("--at", "--seconds", "--wait", "--json", "--random", "--every", "--seed", "--for", "--count", "--kinds"),
        "--dry-run",
    ),
    "new": ("--model", "--data", "--devices", "--to", "--from"),
    "runs": ("compare", "clean", "--json", "--html", "--whole", "--yes"),
}
"""Flags and words of the verbs without a `HelpPage`."""
_FLAG = re.compile(r"--[a-z][\w.-]*")


def run(argv: Sequence[str]) -> int:
    """Prints the script for a shell."""
    if not argv or argv[0] in ("-h", "--help", "--help-all"):
        print_result(USAGE.rstrip())
        return 0
    if len(argv) > 1 or argv[0] not in SHELLS:
        raise ConfigError(f"completion {' '.join(argv)}: name one shell, {', '.join(SHELLS)}")
    writers = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
    print_result(writers[argv[0]](flags_by_verb()).rstrip())
    return 0


def flags_by_verb() -> dict[str, dict[str, tuple[str, ...]]]:
    """Returns the flags of each verb, each with its possible values; none where any value is possible."""
    flags: dict[str, dict[str, tuple[str, ...]]] = {verb: {} for verb in VERBS}
    for verb, page in PAGES.items():
        for config in page.configs:
            flags[verb] |= dict(_config_flags(config))
        flags[verb] |= {flag: () for text, _ in page.options for flag in _FLAG.findall(text)}
    flags["doctor"] |= flags["train"]
    for verb, own_flags in _OWN_FLAGS.items():
        flags[verb] |= dict.fromkeys(own_flags, ())
    for verb in flags:
        flags[verb] |= {short: () for short, long in SHORT.items() if long in flags[verb]}
        flags[verb] |= {"--help": (), "--help-all": ()}
    flags["completion"] |= dict.fromkeys(SHELLS, ())
    return flags


def _config_flags(config: type[Config], prefix: str = "--") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields each flag of a config and of those in it, with its possible values."""
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        name, hint = prefix + field.name.replace("_", "-"), hints[field.name]
        if isinstance(hint, type) and issubclass(hint, Config):
            yield from _config_flags(hint, f"{name}.")
        else:
            yield name, _values(hint)


def _values(hint: Any) -> tuple[str, ...]:
    if hint in (bool, bool | None):
        return ("true", "false")
    return tuple(map(str, get_args(hint))) if get_origin(hint) is Literal else ()


def bash_script(flags: dict[str, dict[str, tuple[str, ...]]]) -> str:
    """Returns the script for bash."""
    cases = "\n".join(f'    {verb}) words="{" ".join(sorted(rows))}" ;;' for verb, rows in flags.items())
    values = {f"{verb}:{flag}": row for verb, rows in flags.items() for flag, row in rows.items() if row}
    value_cases = "\n".join(f'    {place}) words="{" ".join(row)}" ;;' for place, row in sorted(values.items()))
    return f"""# bash completion of meshwright
_meshwright() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} verb=${{COMP_WORDS[1]}} words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(flags)}" -- "$current"))
    return
  fi
  # A flag that takes true or false may stand without either.
  [[ "$current" == -* ]] || case "$verb:$previous" in
{value_cases}
  esac
  if [ -n "$words" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    return
  fi
  case "$verb" in
{cases}
  esac
  if [[ "$current" == -* || "$verb" == completion ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
  else
    COMPREPLY=($(compgen -f -- "$current"))
  fi
}}
complete -o filenames -F _meshwright meshwright
"""


def zsh_script(flags: dict[str, dict[str, tuple[str, ...]]]) -> str:
    """Returns the script for zsh, for a folder of ``fpath`` or to be sourced."""
    # _describe splits at colons.
    purposes = {verb: VERBS[verb].replace(":", "\\:") for verb in flags}
    verbs = " ".join(f"'{verb}:{_quoted(purpose)}'" for verb, purpose in purposes.items())
    cases = "\n".join(f"    {verb}) flags=({' '.join(sorted(rows))}) ;;" for verb, rows in flags.items())
    values = {f"{verb}:{flag}": row for verb, rows in flags.items() for flag, row in rows.items() if row}
    value_cases = "\n".join(
        f"    {flag}) compadd -- {' '.join(row)}; return ;;" for flag, row in sorted(values.items())
    )
    return f"""#compdef meshwright
_meshwright() {{
  local -a verbs flags
  if (( CURRENT == 2 )); then
    verbs=({verbs})
    _describe command verbs
    return
  fi
  # A flag that takes true or false may stand without either.
  [[ "$words[CURRENT]" == -* ]] || case "$words[2]:$words[CURRENT-1]" in
{value_cases}
  esac
  case "$words[2]" in
{cases}
  esac
  if [[ "$words[CURRENT]" == -* || "$words[2]" == completion ]]; then
    compadd -- $flags
  else
    _files
  fi
}}
if [ "$funcstack[1]" = _meshwright ]; then _meshwright "$@"; else compdef _meshwright meshwright; fi
"""


def fish_script(flags: dict[str, dict[str, tuple[str, ...]]]) -> str:
    """Returns the script for fish."""
    lines = ["# fish completion of meshwright"]
    for verb in flags:
        lines.append(f"complete -c meshwright -f -n __fish_use_subcommand -a {verb} -d '{_quoted(VERBS[verb])}'")
    for verb, rows in flags.items():
        condition = f"-n '__fish_seen_subcommand_from {verb}'"
        for flag, values in sorted(rows.items()):
            if not flag.startswith("--"):
                lines.append(f"complete -c meshwright -f {condition} -a {flag}")
                continue
            choices = f" -x -a '{' '.join(values)}'" if values else ""
            lines.append(f"complete -c meshwright {condition} -l {flag[2:]}{choices}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Returns a text for single quotes of a shell."""
    return text.replace("'", "'\\''")
