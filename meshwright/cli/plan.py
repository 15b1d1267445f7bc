"""``meshwright plan``: which layout is fastest on some machines, what it takes, and why the others lose."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from meshwright.cli.arguments import read_config, take_flag
from meshwright.cli.main import load_file
from meshwright.jobs.plan_model import model_name
from meshwright.jobs.requests import PlanConfig

MODEL_FLAGS = ("--model", "--model.name")
"""Flags that name the model."""


def run(argv: Sequence[str]) -> int:
    """Plans; exit status 0 when something fits."""
    args = _joined_clusters(_named_models(argv))
    if "--serve" in args:
        return int(load_file("plan_serve").serve(args))
    as_json = take_flag(args, "--json")
    config = read_config(PlanConfig, args, "plan")
    return int(load_file("plan_output").answer_plan(config, as_json))


def _named_models(argv: Sequence[str]) -> list[str]:
    """Returns the words with a model's ``config.json`` as its directory, whose weights a plan doesn't need."""
    args = list(argv)
    for index, (flag, value) in enumerate(itertools.pairwise(argv)):
        if flag in MODEL_FLAGS:
            args[index + 1] = model_name(value)
    return args


def _joined_clusters(args: list[str]) -> list[str]:
    """Returns the words with several ``--cluster`` as one, whose values are separated by commas."""
    clusters = [value for flag, value in itertools.pairwise(args) if flag == "--cluster"]
    if len(clusters) < 2:
        return args
    joined: list[str] = []
    for index, word in enumerate(args):
        if word != "--cluster" and (not index or args[index - 1] != "--cluster"):
            joined.append(word)
    return [*joined, "--cluster", ",".join(clusters)]
