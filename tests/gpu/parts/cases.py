"""The cases of a part: each is tried, told in a JSON line as soon as it is known, and ends no other one."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]
"""What a case found, as it stands in its line."""
ROOT = Path(__file__).parents[3]
LAST_LINES = 12


def process_age_s() -> float:
    """Returns the seconds since this process began: imports are most of them, and count."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


class Cases:
    """Runs cases within a time limit.

    Args:
        out: folder for logs.
        limit_s: seconds from now after which nothing more is begun.
    """

    def __init__(self, out: Path, limit_s: float) -> None:
        self.out, self._end = out, time.monotonic() + limit_s
        self.status = 0
        self._commands: list[Command] = []

    @classmethod
    def from_arguments(cls, limit_s: float) -> Cases:
        """Reads ``--out FOLDER --limit-s N`` from the command line."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--out", type=Path, required=True)
        parser.add_argument("--limit-s", type=float, default=limit_s)
        arguments = parser.parse_args()
        arguments.out.mkdir(parents=True, exist_ok=True)
        return cls(arguments.out.resolve(), arguments.limit_s)

    def start(self, name: str, words: Sequence[str], program: Sequence[str] = ()) -> Command:
        """Starts a command, which `finish` ends if nobody waits for it; arguments as `Command`."""
        self._commands.append(Command(self.out, name, words, program))
        return self._commands[-1]

    def finish(self) -> int:
        """Ends what still runs; returns the part's exit status."""
        left = [command.process for command in self._commands if command.process.poll() is None]
        for process in left:
            process.terminate()
        for process in left:
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return self.status

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return self._end - time.monotonic()

    def tell(self, case: str, /, **fields: Any) -> None:
        """Prints a case's line; one with ``error`` or a false ``ok`` makes the part fail."""
        if "error" in fields or fields.get("ok") is False:
            self.status = 1
        sys.stdout.write(json.dumps({"case": case, **fields}, default=str) + "\n")
        sys.stdout.flush()

    def run(self, name: str, case: Callable[[], Result], needs_s: float = 0.0) -> None:
        """Runs a case and tells what it found, or how it failed; one that no longer fits is skipped."""
        if self.left_s < needs_s:
            self.tell(name, skipped=f"{self.left_s:.0f} s are left, and it may need {needs_s:.0f}")
            return
        began = time.monotonic()
        try:
            fields = {"ok": True} | case()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            lines = "".join(traceback.format_exception(error)).splitlines()
            fields = {"ok": False, "error": "\n".join(lines[-LAST_LINES:])}
        self.tell(name, **fields, s=round(time.monotonic() - began, 2))


class Command:
    """A command of meshwright under way, its output in files of a folder.

    Args:
        folder: for its output.
        name: of these files.
        words: behind ``python3 -m meshwright``; or those of `program`.
        program: what runs, in place of meshwright.
    """

    def __init__(self, folder: Path, name: str, words: Sequence[str], program: Sequence[str] = ()) -> None:
        self.name, self._began = name, time.monotonic()
        self._paths = folder / f"{name}.out", folder / f"{name}.err"
        argv = [sys.executable, *(program or ("-m", "meshwright")), *words]
        with self._paths[0].open("wb") as out, self._paths[1].open("wb") as err:
            self.process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    def wait(self, limit_s: float) -> Result:
        """Returns its status, seconds and last lines; ends it at the limit."""
        try:
            status: int | str = self.process.wait(max(0.1, limit_s))
        except subprocess.TimeoutExpired:
            # Its own end takes its ranks with it.
            self.process.terminate()
            try:
                self.process.wait(3)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            status = "ended at the limit"
        seconds = round(time.monotonic() - self._began, 1)
        return {"ok": status == 0, "status": status, "command_s": seconds} | (
            {} if status == 0 else {"last": self.err()[-1200:] or self.out()[-1200:]}
        )

    def out(self) -> str:
        """Returns what it printed."""
        return self._paths[0].read_text(encoding="utf-8", errors="replace")

    def err(self) -> str:
        """Returns what it printed on its standard error."""
        return self._paths[1].read_text(encoding="utf-8", errors="replace")

    def json(self) -> Any:
        """Returns the JSON that it printed."""
        return json.loads(self.out())
