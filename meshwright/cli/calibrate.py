"""``meshwright calibrate``: measures the machine at hand, so that plans for it rest on what it really does."""

from __future__ import annotations

import json
from collections.abc import Sequence

import meshwright
from meshwright.cli.arguments import print_result, read_config, take_flag
from meshwright.cli.calibrate_output import calibration_lines
from meshwright.cli.nodes import take_nodes
from meshwright.jobs.progress import silently, to_stderr
from meshwright.jobs.requests import CalibrateConfig


def run(argv: Sequence[str]) -> int:
    """Measures, writes the calibration and prints it as a table or as JSON; exit status 0.

    With ``--nodes N --node I --meet HOST:PORT`` on each of several nodes, or under torchrun, all of them measure
    together; each node writes, or rank 0 of torchrun.
    """
    args = list(argv)
    as_json = take_flag(args, "--json")
    nodes = take_nodes(args)
    config = read_config(CalibrateConfig, args, "calibrate")
    result = meshwright.calibrate(config, nodes=nodes, say=silently if as_json else to_stderr)
    if result is None:  # a rank of torchrun other than the first
        return 0
    if as_json:
        print_result(json.dumps(result.to_json(), indent=2))
    else:
        to_stderr("\n".join([*calibration_lines(result.calibration, result.path), *result.shortfalls]))
    return 0
