"""An array of jobs under Slurm: many copies of one command that differ in a number."""

from __future__ import annotations

import os
import pwd
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.errors import LaunchError
from meshwright.launch.config import SlurmArrayConfig
from meshwright.launch.slurm import call_slurm, submit_script

_ASK_S = 2.0
"""Between two questions to slurmctld, which others ask too."""
_CANCEL_S = 120.0
"""Limit of the wait for cancelled jobs: Slurm's KillWait is 30 s, unless a cluster says otherwise."""


@dataclass
class SlurmArray:
    """Submits, asks for and cancels the jobs of one name."""

    config: SlurmArrayConfig
    """What is asked for."""
    folder: Path
    """Folder for the script and the jobs' output, on a file system that all nodes share."""
    name: str
    """Name of the jobs, by which those of an earlier command are found."""
    python: str = sys.executable
    """Interpreter on every node."""
    workdir: Path = field(default_factory=Path.cwd)
    """Working directory on every node."""
    _asked_at: float = 0.0
    _is_running: bool = False

    def script(self, argv: Sequence[str], size: int) -> str:
        """Returns the sbatch script of an array.

        Args:
            argv: words behind ``meshwright``; the job's number follows as the last one.
            size: jobs of the array.
        """
        config = self.config
        options: list[tuple[str, object]] = [
            ("job-name", self.name),
            ("array", f"0-{size - 1}"),
            ("ntasks", 1),
            ("cpus-per-task", config.cpus),
            ("mem", config.memory),
            ("time", config.time),
            ("partition", config.partition),
            ("account", config.account),
            ("qos", config.qos),
            ("output", self.folder / "slurm-%A-%a.out"),
            ("open-mode", "append"),
        ]
        lines = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in options if value not in (None, "")]
        # A lost node's job goes back into the queue; tasks that are finished aren't run again.
        lines += [*(f"#SBATCH --{line}" for line in config.lines), "#SBATCH --requeue"]
        command = shlex.join((self.python, "-m", "meshwright", *argv))
        body = [f"cd {shlex.quote(str(self.workdir))} || exit 1", *config.setup]
        return "\n".join(["#!/bin/bash", *lines, *body, f'exec {command} "$SLURM_ARRAY_TASK_ID"']) + "\n"

    def submit(self, argv: Sequence[str], size: int) -> str:
        """Writes the script and submits it; returns the array's job id.

        Raises:
            LaunchError: with Slurm's sentence when it refuses.
        """
        path = self.folder / "array.sh"
        path.write_text(self.script(argv, size), encoding="utf-8")
        self._is_running, self._asked_at = True, time.monotonic()
        return submit_script(path, "--parsable").partition(";")[0]

    def is_running(self) -> bool:
        """Whether any job of the name runs or waits; while slurmctld is silent, whether one did."""
        if time.monotonic() - self._asked_at >= _ASK_S:
            shown = self._list_jobs()
            self._is_running = self._is_running if shown is None else bool(shown)
            self._asked_at = time.monotonic()
        return self._is_running

    def _list_jobs(self) -> str | None:
        user = pwd.getpwuid(os.getuid()).pw_name
        return call_slurm("squeue", "--noheader", f"--name={self.name}", f"--user={user}", "--format=%i")

    def cancel(self) -> None:
        """Cancels the jobs of the name and waits for their end.

        Raises:
            LaunchError: when Slurm doesn't answer, or the jobs don't end.
        """
        jobs = self._list_jobs()
        if jobs is None:
            raise LaunchError("squeue doesn't answer; run on a login node of a Slurm cluster, or with another --engine")
        if not jobs:
            return
        user = pwd.getpwuid(os.getuid()).pw_name
        call_slurm("scancel", f"--name={self.name}", f"--user={user}")
        deadline = time.monotonic() + _CANCEL_S
        while self._list_jobs() != "":
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the jobs named {self.name} didn't end within {_CANCEL_S:g} s of scancel; see squeue"
                )
            time.sleep(_ASK_S / 4)
