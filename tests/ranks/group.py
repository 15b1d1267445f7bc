"""The test tool for several ranks: forks gloo ranks from the test process and returns what each returned."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from meshwright.launch.contract import RankContext
from meshwright.launch.devices import Devices
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.rendezvous import init_group


def run_ranks(
    n: int, fn: Callable[..., Any], *args: Any, timeout: float = 150, collective_s: float | None = None
) -> list[Any]:
    """Runs ``fn(rank, *args)`` on ``n`` ranks with a gloo process group, one torch thread each.

    ``fn`` may be a closure; what it returns must be picklable (tensors are). A failure raises as the launcher does.
    """

    def work(context: RankContext) -> Any:
        store = init_group(context, timeout_s=collective_s or timeout, group_s=timeout)
        result = fn(context.rank, *args)
        # A rank that goes closes its connections, which gloo may be making still on a slower one; and rank 0 serves the
        # store, so it goes last.
        for mark in ("done", "read"):
            store.set(f"{mark}/{context.rank}", "")
            if mark == "done" or context.rank == 0:
                store.wait([f"{mark}/{rank}" for rank in range(n)], timedelta(seconds=timeout))
        return result

    return run_contexts(n, work, timeout=timeout)


def run_contexts(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 150) -> list[Any]:
    """Runs ``fn(context, *args)`` on ``n`` CPU ranks without a process group."""
    devices = Devices(kind="cpu", count=n, found=n, cores=n)
    return ForkLauncher(n, devices=devices).run(fn, *args, timeout_s=timeout)
