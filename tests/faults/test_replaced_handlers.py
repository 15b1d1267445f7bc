"""A library that replaces a rank's signal handlers behind Python's back, as LLVM does when Triton first compiles."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

from meshwright.train.step import Stepper
from tests.runs import Running, events, last_step, rows, wait_until, words, write_corpus

SIG_DFL, SIG_IGN = 0, 1
AT = 5


def replace_handlers() -> None:
    """Has each rank lose what it does at SIGUSR1 and SIGTERM in a step."""
    step_of = Stepper.run

    def replacing(self: Stepper, step: int, *args: Any, **kwargs: Any) -> Any:
        if step == AT:
            library = ctypes.CDLL(None)
            library.signal(int(signal.SIGUSR1), ctypes.c_void_p(SIG_IGN))
            library.signal(int(signal.SIGTERM), ctypes.c_void_p(SIG_DFL))
        return step_of(self, step, *args, **kwargs)

    Stepper.run = replacing  # type: ignore[method-assign]


def test_a_run_obeys_sigterm_after_a_library_took_its_handlers(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt")
    run = tmp_path / "run"
    running = Running(words(tmp_path, "run", "--train.steps", "100000"), tmp_path / "log", replace_handlers)
    try:
        wait_until(lambda: last_step(run) > AT + 2)
        # As Slurm does to the whole tree: the rank leaves it to its supervisor.
        os.kill(events(run, "rank_started")[-1]["pid"], signal.SIGTERM)
        running.kill(signal.SIGTERM)
        assert running.wait(60) == 143, running.text()
    finally:
        running.end()
    assert not events(run, "rank_lost")
    assert events(run, "checkpoint_saved")[-1]["step"] == rows(run)[-1]["step"]
