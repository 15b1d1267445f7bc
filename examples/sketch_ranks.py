"""Ranks for the sketches beside this file: forks them, where a real job would be started by torchrun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from meshwright.launch.devices import Devices
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.rendezvous import init_group


def run(ranks: int, work: Callable[[], Any]) -> None:
    """Calls ``work()`` on some ranks, within a process group."""

    def on_rank(context: Any) -> None:
        init_group(context)
        work()
        dist.barrier()
        dist.destroy_process_group()

    devices = Devices(kind="cpu", count=ranks, found=ranks, cores=ranks)
    ForkLauncher(ranks, devices=devices).run(on_rank, timeout_s=100)
