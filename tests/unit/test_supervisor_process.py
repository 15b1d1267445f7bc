"""A node's supervisor as its keeper's child: started again when it was killed, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from meshwright.launch.supervisor_process import SupervisorProcess

KEEPER = """
import sys, threading
from meshwright.launch.supervisor_process import SupervisorProcess
child = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(300)"]
keeper = SupervisorProcess(0, lambda: child, print)
thread = threading.Thread(target=keeper.run)
thread.start()
thread.join()
"""


def test_a_killed_supervisor_is_started_again_and_one_that_ends_is_not(tmp_path: Path) -> None:
    said: list[str] = []
    script = f"test -e {tmp_path}/second && exit 7; touch {tmp_path}/second; kill -9 $$"
    assert SupervisorProcess(3, lambda: ["/bin/sh", "-c", script], said.append).run() == 7
    assert said == ["the supervisor of node 3 was killed by signal 9; it is started again"]


def test_a_request_ends_it_for_good() -> None:
    keeper = SupervisorProcess(0, lambda: ["/bin/sleep", "300"], print, watch=lambda: keeper.terminate())
    assert keeper.run() == 143


def test_a_supervisor_ends_with_a_keeper_that_is_killed() -> None:
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER], stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    child = int(keeper.stdout.readline())
    os.kill(child, 0)
    keeper.send_signal(signal.SIGKILL)
    keeper.wait(10)
    deadline = time.monotonic() + 10.0
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    keeper.stdout.close()
