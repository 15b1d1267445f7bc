"""``meshwright serve-outer``: the outer server of sites, islands that are runs of their own."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.cli.arguments import read_config, take_value
from meshwright.errors import ConfigError
from meshwright.jobs.serve_outer import serve_outer
from meshwright.train.run_config import RunConfig


def run(argv: Sequence[str]) -> int:
    """Serves until it is asked to end; exit status 0 when the last version is on disk."""
    args = list(argv)
    listen = take_value(args, "--listen")
    shards, save_every = take_value(args, "--shards") or "1", take_value(args, "--save-every") or "10"
    if listen is None:
        raise ConfigError("serve-outer needs --listen HOST:PORT, the address that sites dial")
    if not shards.isdigit() or not save_every.isdigit():
        raise ConfigError(f"--shards {shards} --save-every {save_every}: give whole numbers")
    serve_outer(read_config(RunConfig, args, "serve-outer"), listen, shards=int(shards), save_every=int(save_every))
    return 0
