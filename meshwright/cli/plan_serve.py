"""``meshwright plan --serve``: the planner as a page on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.cli.arguments import read_config
from meshwright.errors import ConfigError
from meshwright.jobs.plan_question import PlanQuestion
from meshwright.jobs.plan_server import DEFAULT_PORT, serve_plans
from meshwright.jobs.progress import to_stderr
from meshwright.jobs.requests import PlanConfig

FLAG = "--serve"
"""Said without a value, or with the port."""


def serve(argv: Sequence[str]) -> int:
    """Serves the page; exit status 0 after Ctrl-C.

    Args:
        argv: words after ``plan``, ``--serve [PORT]`` among them.
    """
    args = list(argv)
    index, port = args.index(FLAG), DEFAULT_PORT
    del args[index]
    if index < len(args) and args[index].isdecimal():
        port = int(args.pop(index))
    if port >= 1 << 16:
        raise ConfigError(f"--serve {port}: ports go from 0 to 65535")
    # Without any setting the page begins with a question of its own.
    question = PlanQuestion.of_config(read_config(PlanConfig, args, "plan")) if args else PlanQuestion()
    serve_plans(question, port, to_stderr)
    return 0
