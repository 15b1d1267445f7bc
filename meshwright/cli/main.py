"""The command line: finds the verb, runs it, turns errors into one clear paragraph and an exit status."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from meshwright import __version__
from meshwright.errors import REFUSED, MeshwrightError, nearest

VERBS = {
    "train": "prepare text, plan, train, evaluate, checkpoint; goes on where an earlier run of the directory stopped",
    "run": "all stages of a recipe: prepare, plan, verify, train, evaluate, export; or a sweep over settings",
    "plan": "choose the fastest layout that fits some machines, say what it takes and why the others lose",
    "verify": "prove that layouts compute what one device computes",
    "inspect": "what a model is made of, how each axis can split it, what a layout's ranks would hold",
    "prepare": "turn text into token files",
    "new": "write a commented recipe after three questions, or from another framework's file",
    "generate": "continue a prompt with a trained model",
    "doctor": "check the machines before a run: devices, links, clocks, disk, versions, ports, file system",
    "calibrate": "measure this machine: products, attention, memory, collectives; plans for it rest on that",
    "chaos": "break a rank of a run under way on purpose, and tell how the run recovered",
    "status": "where a run stands, and what the scheduler says of its job",
    "logs": "what a run printed; -f follows it",
    "drain": "take a node or a device out of a run under way, or give it back",
    "cancel": "end a run with a checkpoint, wherever it runs",
    "runs": "list the runs of a folder, compare some, remove what isn't needed any more",
    "watch": "serve the live page of a run directory",
    "trace": "write a run's recorded steps as a trace for Perfetto",
    "serve-outer": "make versions of the weights from the rounds of islands that dial in from other sites",
    "export": "write a run's model in Hugging Face format",
    "completion": "print the completion of words for bash, zsh or fish",
}
"""Each verb is a file of this folder with ``run(argv) -> int``."""

INTERRUPTED = 130
"""Exit status after a Ctrl-C that no ranks take, or a second one. Source: POSIX shells, 128 + SIGINT."""


def usage() -> str:
    """Returns the overview that ``--help`` prints."""
    verbs = "\n".join(f"  {verb:<13}{purpose}" for verb, purpose in VERBS.items())
    return (
        f"meshwright {__version__}: plans, proves, runs and recovers distributed training of language models\n\n"
        f"usage: meshwright VERB ...\n\n{verbs}\n\n"
        "meshwright VERB --help says what people use, --help-all lists everything; see docs/commands.md\n"
    )


def load_file(name: str) -> ModuleType:
    """Imports a file of this folder when it is needed: the verb that was typed, or what takes longer than its help."""
    was_enabled = gc.isenabled()
    # Imports make hundreds of thousands of objects that stay: each collection meanwhile would go through them in vain.
    gc.disable()
    try:
        return importlib.import_module(f"meshwright.cli.{name.replace('-', '_')}")
    finally:
        if was_enabled:
            gc.enable()


def answer_help(verb: str, args: Sequence[str]) -> bool:
    """Prints the help of a verb; returns whether the verb itself has nothing more to say."""
    pages = load_file("help")
    wanted = pages.wants_help(verb, args)
    if wanted:
        (pages.show_all if wanted == "all" else pages.show_help)(verb)
    return bool(wanted)


def main(argv: Sequence[str]) -> int:
    """Runs one command.

    Args:
        argv: words after the program's name.

    Returns:
        0 only for success; 1 for a failure, 2 for a refusal of what was asked, 130 after a Ctrl-C that ended it.
    """
    args = list(argv)
    if args and args[0] == "--":
        del args[0]
    if not args or args[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0 if args else REFUSED
    if args[0] == "--version":
        sys.stdout.write(f"meshwright {__version__}\n")
        return 0
    verb = args[0]
    if verb not in VERBS:
        sys.stderr.write(f"error: unknown command '{verb}'{nearest(verb, VERBS)}\n")
        return REFUSED
    try:
        if {"-h", "--help", "--help-all"} & set(args[1:]) and answer_help(verb, args[1:]):
            return 0
        # A verb without settings has one page.
        words = ["--help" if word == "--help-all" else word for word in args[1:]]
        return int(load_file(verb).run(words))
    except MeshwrightError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_status
    except BrokenPipeError:
        # Whoever read the output has gone (a pager, head); what was to be said can't be.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
