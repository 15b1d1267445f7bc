"""A collective that never ends: NCCL's watchdog ends its rank soon after the group's limit."""

from __future__ import annotations

import ctypes
import os
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import LaunchError
from meshwright.launch.contract import RankContext
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.rendezvous import init_group
from tests.ghost.runs import has_ghost
from tests.runs import Running

pytestmark = [pytest.mark.skipif(not has_ghost(), reason="runs under the simulated GPU: make ghost")]
LIMIT_S, WITHIN_S = 2.0, 10.0


def hang(context: RankContext) -> None:
    """Waits for a collective of a device that finishes nothing more."""
    init_group(context, timeout_s=LIMIT_S)
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    ctypes.CDLL(None).ghost_hang()
    dist.all_reduce(torch.ones(1, device="cuda"), async_op=True).wait()
    torch.cuda.synchronize()


def launch() -> None:
    """Starts the rank and ends this process: 0 where the launcher tells in time that it died."""
    began, status = time.monotonic(), 1
    try:
        ForkLauncher(1).run(hang, timeout_s=40.0)
    except LaunchError as error:
        print(f"{error} after {time.monotonic() - began:.1f} s", flush=True)
        status = int(time.monotonic() - began > WITHIN_S or "SIGABRT" not in str(error))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def test_a_rank_whose_collective_hangs_ends_at_the_limit(root: Path) -> None:
    running = Running([], root / "hang.log", launch)
    assert running.wait(60.0) == 0, running.text()
    assert f"Timeout(ms)={1000 * LIMIT_S:.0f}" in running.text()
