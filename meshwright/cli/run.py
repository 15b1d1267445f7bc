"""``meshwright run``: all stages of a recipe in one command, or a sweep over some of its settings."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

from meshwright.cli.arguments import align_columns, print_result, read_config, take_flag, take_value
from meshwright.cli.nodes import take_nodes
from meshwright.errors import TERMINATED, ConfigError
from meshwright.jobs.progress import to_stderr
from meshwright.jobs.recipe import ExportType, RecipeResult, run_recipe
from meshwright.jobs.sweep import SweepRow, parse_sweep, run_sweep, sweep_flags
from meshwright.train.run_config import RunConfig
from meshwright.units import format_seconds

USAGE = """usage: meshwright run RECIPE.toml [--run DIR] [--export TYPE | --no-export] [--sweep KEY=VALUE,VALUE ...]
           [--section.field VALUE ...] [--nodes N --node I --meet HOST] [--json]

Does what a recipe needs, and leaves out what is done: prepares the text, plans a layout, verifies it on a small copy of
the model, trains, evaluates over all held-out text, exports in Hugging Face format to DIR/export.

  --run DIR          of the run; runs/ and the recipe's name when not given, so the same command goes on
  --export TYPE      of the exported weights: as-trained (default), float32, bfloat16, float16
  --no-export        leave the export out
  --sweep KEY=A,B    a run for each value, each in a directory of its own, and one table; several --sweep combine
  --json             the result as JSON on standard output

Every setting of `meshwright train` is one here: meshwright train --help.
"""


def run(argv: Sequence[str]) -> int:
    """Runs a recipe; exit status 0 when all stages are done, 1 when interrupted or a sweep's run failed."""
    args = list(argv)
    if not args or args[0] in ("-h", "--help"):
        print_result(USAGE.rstrip())
        return 0 if args else 2
    recipe = args[0]
    if recipe.startswith("-"):
        raise ConfigError("meshwright run needs RECIPE.toml first; meshwright run --help lists the rest")
    as_json = take_flag(args, "--json")
    export_type = _take_export(args)
    sweeps = []
    while (sweep := take_value(args, "--sweep")) is not None:
        sweeps.append(sweep)
    if sweeps:
        return _sweep(args, sweeps, export_type, as_json)
    nodes = take_nodes(args)
    result = run_recipe(_read_run(args), export_type=export_type, nodes=nodes)
    if result.leads:
        to_stderr(_stage_table(result))
        if as_json:
            print_result(json.dumps(result.to_json(), indent=2))
    if result.finished:
        return 0
    return TERMINATED if result.terminated else 1


def _take_export(args: list[str]) -> ExportType | None:
    """Removes ``--export TYPE`` or ``--no-export`` and returns the type."""
    none, name = take_flag(args, "--no-export"), take_value(args, "--export")
    known = get_args(ExportType)
    if name is not None and (none or name not in known):
        raise ConfigError(f"--export {name}: give one of {', '.join(known)}, or --no-export alone")
    return None if none else cast(ExportType, name or "as-trained")


def _read_run(args: Sequence[str]) -> RunConfig:
    """Returns the config of a recipe and flags; its directory is named after the recipe where neither names one."""
    config = read_config(RunConfig, args, "run")
    return config if config.run else dataclasses.replace(config, run=str(Path("runs") / Path(args[0]).stem))


def _sweep(args: list[str], sweeps: Sequence[str], export_type: ExportType | None, as_json: bool) -> int:
    combinations, folder = parse_sweep(sweeps), Path(_read_run(args).run)
    if "--nodes" in args:
        raise ConfigError("--sweep starts its runs one after the other on this node; leave out --nodes, or --sweep")
    for settings in combinations:
        # A wrong key or value of any run is known before the first one trains.
        read_config(RunConfig, [*args, *sweep_flags(settings)], "run")
    export_words = ["--no-export"] if export_type is None else ["--export", export_type]
    rows = run_sweep([*args, *export_words], combinations, folder)
    to_stderr(_sweep_table(rows))
    if as_json:
        print_result(json.dumps([row.to_json() for row in rows], indent=2))
    return 0 if len(rows) == len(combinations) and all(row.state == "finished" for row in rows) else 1


def _stage_table(result: RecipeResult) -> str:
    lines = [""]
    for stage in result.stages:
        lines.append(f"{stage.name:<9} {'was done' if stage.was_done else 'done':<9} {stage.summary}")
        lines.append(f"{'':<19} {stage.path}")
    if not result.finished:
        lines.append("interrupted; the same command goes on from there")
    return "\n".join(lines)


def _sweep_table(rows: Sequence[SweepRow]) -> str:
    keys = list(rows[0].settings) if rows else []
    table = [[*keys, "validation loss", "loss", "steps", "a step", "state"]]
    for row in rows:
        validation = "" if row.validation_loss is None else f"{row.validation_loss:.4f}"
        loss = "" if row.loss is None else f"{row.loss:.4f}"
        step = "" if row.step_s is None else format_seconds(row.step_s)
        state = f"{row.state}: {row.message}" if row.message else row.state
        table.append([*(row.settings[key] for key in keys), validation, loss, str(row.step), step, state])
    return "\n".join(["", *align_columns(table, range(len(keys), len(keys) + 4))])
