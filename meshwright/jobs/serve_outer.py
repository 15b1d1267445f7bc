"""The job ``serve-outer``: makes versions of the outer weights until it is asked to end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.jobs.progress import Say, to_stderr
from meshwright.launch.signals import StopFlag
from meshwright.sites.server import OuterServer
from meshwright.train.run_config import RunConfig
from meshwright.train.site_optimizer import server_settings
from meshwright.transport.key import NAME, run_key

ADDRESS = "address.json"
"""File of the server's directory that says where it listens."""


def serve_outer(config: RunConfig, listen: str, *, shards: int = 1, save_every: int = 10, say: Say = to_stderr) -> None:
    """Serves the sites of a recipe until SIGTERM or Ctrl-C, after which the last version is on disk.

    Args:
        config: the recipe, of which ``outer`` and ``run``, the server's own directory, count.
        listen: ``HOST:PORT``; shards listen at the ports after it. Port 0 takes free ones.
        shards: processes that share the weights.
        save_every: versions between two saved ones.
        say: takes a line of progress.

    Raises:
        ConfigError: for settings that can't be.
        LaunchError: when the ports are taken, or a shard ended.
    """
    config.outer.check()
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) + shards >= 1 << 16:
        raise ConfigError(f"--listen {listen}: give HOST:PORT, an address of this machine; shards take the next ports")
    if not config.run:
        raise ConfigError("serve-outer needs --run, a directory of its own for state and log")
    if save_every < 1:
        raise ConfigError(f"--save-every {save_every}: give at least 1 version")
    run_dir = Path(config.run)
    if (run_dir / "config.toml").exists():
        raise ConfigError(f"run = {run_dir} is the directory of a training run; give the server one of its own")
    run_dir.mkdir(parents=True, exist_ok=True)
    key_file = Path(config.outer.key_file).expanduser() if config.outer.key_file else None
    key = run_key(run_dir, key_file)
    server = OuterServer(
        server_settings(config.outer),
        run_dir,
        host=host.strip("[]"),
        port=int(port),
        shards=shards,
        save_every=save_every,
        key=key,
        say=say,
    )
    stop = StopFlag().install(signal.SIGTERM, signal.SIGINT)
    beside = run_dir / f".{ADDRESS}.new"
    beside.write_text(json.dumps({"host": host, "port": server.port, "pid": os.getpid()}), encoding="utf-8")
    beside.replace(run_dir / ADDRESS)
    say(
        f"outer server at {host}:{server.port}, {shards} shards, version {server.book.version}; sites take "
        f"--outer.meet {host}:{server.port} --outer.key-file with a copy of {key_file or run_dir / NAME}"
    )
    server.serve(lambda: stop.requested)
    say(f"ended at version {server.book.version}")
