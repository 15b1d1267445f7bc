"""Reads the flags of a training command out of a shell script, without running any of it.

Variables and arrays that the script sets are put in where a command uses them. What only a run could know (positional
arguments, the environment, the output of a command, a branch) stays open, and the caller reports it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.errors import ConfigError

LONGEST = 1 << 16
"""Characters of a variable's value: a script whose variables double each other mustn't fill the memory."""
MOST_WORDS = 20000
"""Words of a script and of its commands, all together."""
MOST_CHARACTERS = 1 << 22
"""Characters of all words with their variables put in."""
_HERE = re.compile(r"<<-?[ \t]*\\?(['\"]?)([A-Za-z_][\w.-]*)\1")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_SUBSTITUTION = re.compile(r"\$\([^()]*\)|`[^`]*`")
_VARIABLE = re.compile(r"\$\{(=[^}]*|\w+)(?:\[[@*]\])?(?::?[-=]([^{}]*))?\}|\$(\w+)")
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_SPOKEN = ("echo", "printf", "logger")
"""Commands whose words are shown, not run."""
_OPENERS, _CLOSERS = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
_DECLARING = ("export", "local", "declare", "typeset", "readonly")
_SKIPPED = ("then", "else", "do", "elif", *_DECLARING, "exec", "time", "!", "{", "}")


@dataclass(slots=True)
class ScriptFlags:
    """A script's training command."""

    flags: dict[str, list[str]] = field(default_factory=dict)
    """Each flag of the program, without dashes, and its values; the last one where it is repeated."""
    launcher: dict[str, list[str]] = field(default_factory=dict)
    """Flags that stand before the program, of torchrun or srun."""
    undecided: list[str] = field(default_factory=list)
    """Words with flags under a condition or in a loop, which only a run decides."""
    program: str = ""
    """File or module that the command runs; empty for a list of flags."""


@dataclass(slots=True)
class _Script:
    variables: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    branches: list[tuple[str, str]] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    words: int = 0
    characters: int = 0

    def count(self, words: int, characters: int = 0) -> None:
        self.words += words
        self.characters += characters
        if self.words > MOST_WORDS or self.characters > MOST_CHARACTERS:
            raise ConfigError(f"the script has more than {MOST_WORDS} words; give the command with its flags alone")


def read_script(text: str) -> ScriptFlags:
    """Returns the flags of the training command of a shell script, or of a list of flags.

    Args:
        text: the script, or flags one a line.

    Raises:
        ConfigError: when quotes don't end, two different commands have flags, or none has.
    """
    script, depth = _Script(), 0
    for statement in _statements(text):
        words = list(statement)
        script.count(len(words))
        while words and (words[0] in _SKIPPED or words[0] in _OPENERS or words[0] in _CLOSERS):
            head = words.pop(0)
            depth = max(0, depth + (head in _OPENERS) - (head in _CLOSERS))
            if head == "for" and words:
                script.variables.pop(words[0], None)  # only a run knows it
            if head in _OPENERS or head == "elif":
                words = []  # the condition itself
            while head in _DECLARING and words and words[0].startswith("-"):
                words.pop(0)
        if words:
            _take_statement(script, words, depth > 0)
    return _chosen(script)


def _statements(text: str) -> Iterator[list[str]]:
    """Yields the words of each statement; an array's parentheses are words."""
    text = _without_comments(text.replace("\r\n", "\n"))
    text = _ARITHMETIC.sub(lambda match: "${=" + re.sub(r"[\s${}]", "", match[1]) + "}", text)
    for _ in range(4):  # nested commands, inside first
        text = _SUBSTITUTION.sub("$?", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();&|\n<>")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    words: list[str] = []
    array = False
    try:
        for token in lexer:
            if not set(token) <= set("();&|\n<>"):
                words.append(token)
                continue
            for char in token:
                array = (array or (char == "(" and bool(words) and words[-1].endswith("="))) and char != ")"
                if char == "(" and array:
                    words.append("(")
                elif not array and words and char != ")":
                    yield words
                    words = []
    except ValueError:
        raise ConfigError("the script has a quote that doesn't end; give the command with its flags alone") from None
    if words:
        yield words


def _without_comments(text: str) -> str:
    """Returns a script without comments and here-documents, its continued lines joined.

    A comment begins at a word that begins with ``#`` outside of quotes, and ends with its line, however that ends.
    """
    kept, quote, index = list[str](), "", 0
    lines = {line.strip() for line in text.split("\n")}
    ends = list[str]()  # of here-documents that begin on the next line
    while index < len(text):
        char = text[index]
        if char == "\\" and quote != "'":
            kept.append("" if text[index + 1 : index + 2] == "\n" else text[index : index + 2])
            index += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "#" and (index == 0 or text[index - 1] in " \t\n;&|()"):
            index = _line_end(text, index)
            continue
        elif char == "<" and text[index - 1 : index] != "<" and (match := _HERE.match(text, index)):
            if match[2] not in lines:
                kept.append(char)  # a shift of bits
                index += 1
                continue
            ends.append(match[2])
            kept.append(" ")
            index = match.end()
            continue
        kept.append(char)
        index += 1
        if char == "\n" and not quote:
            while ends:
                stop = _line_end(text, index)
                if text[index:stop].strip() == ends[0] or index >= len(text):
                    ends.pop(0)
                index = stop + 1
    return "".join(kept)


def _line_end(text: str, index: int) -> int:
    stop = text.find("\n", index)
    return len(text) if stop < 0 else stop


def _take_statement(script: _Script, words: list[str], conditional: bool) -> None:
    """Takes in assignments, or keeps a command with its variables put in."""
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        name, adds, value = match.groups()
        values = words[2:] if words[1:2] == ["("] and not value else [value]
        expanded = [piece for item in values for piece in _expand(script, item)]
        if conditional and any(piece.startswith("--") for piece in expanded):
            script.undecided += expanded
        else:
            if conditional:
                script.branches.append((name, f"{name}={' '.join(expanded)}"))
            if not conditional or name not in script.variables:
                script.variables[name] = [*script.variables.get(name, []), *expanded] if adds else expanded
        words = [] if len(values) != 1 or words[1:2] == ["("] else words[1:]
    if words and words[0] not in _SPOKEN:
        expanded = [piece for word in words for piece in _expand(script, word)]
        if expanded and Path(expanded[0]).name == "run_train.sh":
            expanded = _torchtitan_command(script, expanded[1:])
        script.count(len(expanded))
        if any(word.startswith("--") or word.startswith("activation-checkpoint:") for word in expanded):
            script.commands.append(expanded)


def _torchtitan_command(script: _Script, flags: list[str]) -> list[str]:
    """Returns the command that torchtitan's run_train.sh starts, by its variables and their defaults."""

    def variable(name: str, default: str = "") -> str:
        return " ".join(script.variables.get(name, [default]))

    # Before 2026 a file had the settings, since then a function has.
    module, function = variable("MODULE", "llama3"), variable("CONFIG", "llama3_debugmodel")
    chosen = ["--module", module, "--config", function]
    if file := variable("CONFIG_FILE"):
        chosen = ["--job.config_file", file]
    return ["torchrun", "--nproc_per_node", variable("NGPU", "8"), "-m", "torchtitan.train", *chosen, *flags]


def _expand(script: _Script, word: str) -> list[str]:
    """Returns a word with its variables put in, split again at spaces; what isn't known stays as ``$NAME``."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        script.used.add(name)
        if name.startswith("="):
            return _product(script, name[1:])
        if name in script.variables:
            return " ".join(script.variables[name])
        return f"${name}" if default is None else default

    for _ in range(4):  # defaults that name variables
        expanded = _VARIABLE.sub(value, word)
        if len(expanded) > LONGEST:
            raise ConfigError(f"a variable of the script has more than {LONGEST} characters; give the flags alone")
        if expanded == word:
            break
        word = expanded
    script.count(0, len(word))
    if not re.search(r"\s", word):
        return [word]
    try:
        return shlex.split(word)
    except ValueError:
        return word.split()


def _product(script: _Script, expression: str) -> str:
    """Returns a product of numbers and variables; other arithmetic stays open."""
    result = 1
    for factor in expression.split("*"):
        text = " ".join(script.variables.get(factor, [factor]))
        if not text.isdecimal() or len(text) > 9:
            return "$?"
        result *= int(text)
    return str(result)


def _chosen(script: _Script) -> ScriptFlags:
    """Returns the flags of the command that trains."""
    if all(words[0].startswith(("--", "activation-checkpoint:")) for words in script.commands):
        script.commands = [[word for words in script.commands for word in words]]  # flags one a line
    parsed = [_parse(words) for words in script.commands]
    trained = [item for item in parsed if len(item.flags) > 1 or "job.config_file" in item.flags]
    if not trained:
        raise ConfigError("no command with flags of Megatron-LM, torchtitan or TRL is in it; give the command itself")
    first = trained[0]
    if any(item.flags != first.flags for item in trained):
        raise ConfigError(
            f"it has {len(trained)} commands with different flags, and only a run decides which one trains; leave one"
        )
    first.undecided += script.undecided + [text for name, text in script.branches if name in script.used]
    return first


def _parse(words: list[str]) -> ScriptFlags:
    """Splits a command at its program, and reads the flags on either side."""
    programs = [index for index, word in enumerate(words) if word.endswith(".py")]
    # torchrun -m module, without a file
    modules = [
        index + 1 for index, word in enumerate(words[:-1]) if word == "-m" and not words[index + 1].startswith("-")
    ]
    # A later file may be the value of a flag.
    trains = [index for index in programs if re.search("gpt|torchtitan|train", words[index])]
    start = ((trains or programs)[:1] or modules[-1:] or [-1])[0] + 1
    program = words[start - 1] if start else ""
    if words[1:] and Path(words[0]).name == "trl":
        start, program = 2, f"trl {words[1]}"
    first = next((index for index in range(start, len(words)) if words[index].startswith("--")), len(words))
    return ScriptFlags(
        flags=_flags(words[start:]),
        launcher=_flags(words[:start]),
        program=program,
        undecided=[word for word in words[start:first] if "$" in word],
    )


def _flags(words: list[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            flags[name] = [value] if equals else []
        elif word.startswith("activation-checkpoint:"):
            name, flags["activation-checkpoint"] = "", [word.partition(":")[2]]
        elif name:
            flags[name].append(word)
    return flags
