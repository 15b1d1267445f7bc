"""``python -m meshwright.schedules``: the table of known schedules, or one of them as a picture."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from meshwright.errors import MeshwrightError
from meshwright.schedules import draw, table
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.file import build_schedule
from meshwright.schedules.simulate import simulate


def main(arguments: list[str]) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m meshwright.schedules", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="degree of the pipeline (4)")
    parser.add_argument("--microbatches", type=int, default=8, help="micro-batches of a step (8)")
    parser.add_argument("--stages-per-rank", type=int, help="with --draw (the fewest that the schedule allows)")
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    parser.add_argument("--draw", metavar="NAME", help="one schedule as lines of text: a name, or file:PATH")
    parser.add_argument("--svg", action="store_true", help="with --draw: as SVG")
    parser.add_argument("--csv", action="store_true", help="with --draw: its actions, a row per rank")
    options = parser.parse_args(arguments)
    try:
        sys.stdout.write(_render(options))
    except MeshwrightError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _render(options: argparse.Namespace) -> str:
    if not options.draw:
        table_rows = table.rows(options.ranks, options.microbatches)
        if options.json:
            return json.dumps([dataclasses.asdict(row) for row in table_rows], indent=1) + "\n"
        return table.as_text(table_rows)
    schedule = build_schedule(options.draw, options.ranks, options.stages_per_rank or 0, options.microbatches)
    if options.csv:
        return schedule.to_csv()
    simulation = simulate(schedule, ActionCosts.uniform(schedule.stages))
    return draw.svg(simulation) + "\n" if options.svg else draw.text(simulation)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
