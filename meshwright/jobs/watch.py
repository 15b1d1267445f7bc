"""The live page of a run: in a process beside the supervisor that trains, or in one of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.jobs.progress import Say
from meshwright.monitor.config import DRIFT_BOUND, HOST, MonitorConfig
from meshwright.monitor.live_page import LivePage
from meshwright.monitor.server import TOKEN, PageServer
from meshwright.resilience.helper import Helper
from meshwright.train.page_requests import PageRequests
from meshwright.transport.key import run_key

NICE = 19
"""How much the page's process stands back behind ranks on the same cores."""
DEFAULT_PORT = 8787
"""Port of `watch` when none is given."""
_LABELS = {"checkpoint": "Checkpoint now", "evaluate": "Evaluate now", "stop": "Stop"}


@contextmanager
def serving_page(config: MonitorConfig, run_dir: Path, requests: PageRequests | None, say: Say) -> Iterator[None]:
    """Serves a run's page within a block, from a forked process; does nothing without ``monitor.port``.

    Args:
        config: port and address.
        run_dir: the run directory, which exists.
        requests: where the page's buttons write; None without any.
        say: reports the address.

    Raises:
        ConfigError: when the address can't be bound.
    """
    if config.port is None:
        yield
        return
    server = make_server(run_dir, (config.host, config.port), requests, config.drift_bound)
    try:
        # A process of its own: ranks are forked from the supervisor, which must have no threads.
        helper = Helper(server.serve, nice=NICE)
    finally:
        server.server_close()
    say(describe_address(server, run_dir))
    try:
        yield
    finally:
        helper.close()


def watch(run_dir: Path, *, host: str = HOST, port: int = DEFAULT_PORT, started: Callable[[str], None]) -> None:
    """Serves the page of a run that is under way or has ended, without buttons, until Ctrl-C.

    Args:
        run_dir: the run directory.
        host: address to bind to.
        port: port to bind to; any free one for 0.
        started: called with the address once the page is served.

    Raises:
        ConfigError: when the directory holds no run, or the address can't be bound.
    """
    if not (run_dir / "events.jsonl").exists() and not (run_dir / "plan.json").exists():
        raise ConfigError(f"{run_dir} holds no run; give the directory that train reported")
    server = make_server(run_dir, (host, port), None, DRIFT_BOUND)
    started(describe_address(server, run_dir))
    try:
        server.serve()
    except KeyboardInterrupt:
        return
    finally:
        server.server_close()


def make_server(run_dir: Path, address: tuple[str, int], requests: PageRequests | None, bound: float) -> PageServer:
    """Returns the server of a run's page, bound and not yet serving; the run's token is created where it is missing.

    Args:
        run_dir: the run directory.
        address: host and port.
        requests: where the buttons write; None for a page without any.
        bound: relative difference from plan to measurement above which a row is marked.

    Raises:
        ConfigError: when the address can't be bound.
        LaunchError: when others may read the token's file.
    """
    token = run_key(run_dir, name=TOKEN).secret.hex()
    labels = _LABELS if requests is not None else {}
    page = LivePage(run_dir, bound, tuple(labels.items()))
    return PageServer(address, page, token, tuple(labels), requests.make if requests is not None else _refuse)


def describe_address(server: PageServer, run_dir: Path) -> str:
    """Returns the line that names the page; with the token where a person reads it, else with the token's file."""
    # What isn't a terminal may be a log, which others read.
    if sys.stderr.isatty():
        return f"page: {server.url}#token={server.token}"
    return f"page: {server.url} (its token is in {run_dir / TOKEN})"


def _refuse(action: str) -> None:
    raise ConfigError(f"this page asks nothing of a run: {action}")
