"""``meshwright inspect``: what a model is made of, how each axis can split it, and what a layout's ranks would hold."""

from __future__ import annotations

import json
from collections.abc import Sequence

import meshwright
from meshwright.cli.arguments import print_result, read_config, take_flag
from meshwright.cli.explain_output import explanation_lines
from meshwright.cli.inspect_output import inspection_lines, stack_lines
from meshwright.errors import ConfigError
from meshwright.jobs.progress import to_stderr
from meshwright.jobs.requests import InspectConfig


def run(argv: Sequence[str]) -> int:
    """Prints what there is to know of a model, for people or as JSON; exit status 0."""
    args = list(argv)
    as_json = take_flag(args, "--json")
    if args and not args[0].startswith("-"):
        args[:1] = ["--model", args[0]]
    named = {arg.partition("=")[0] for arg in args} & {"--model", "--model.name", "-h", "--help"}
    if not named:
        raise ConfigError("meshwright inspect needs a model: a type such as gpt2, a directory, or module:function")
    config = read_config(InspectConfig, args, "inspect")
    result = meshwright.inspect(config).to_json()
    if as_json:
        print_result(json.dumps(result, indent=2))
    else:
        lines = explanation_lines if config.explain else stack_lines if config.stack else inspection_lines
        to_stderr("\n".join(lines(result)))
    return 0
