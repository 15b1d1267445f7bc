"""The cases of a part: each is tried, told in a JSON line as soon as it is known, and ends no other one."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.cli.main import main
from meshwright.forking import die_with_parent
from tests.runs import Running

Result = dict[str, Any]
"""What a case found, as it stands in its line."""
ROOT = Path(__file__).parents[3]
LAST_LINES = 12


def process_age_s() -> float:
    """Returns the seconds since this process began: imports are most of them, and count."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def part_parser(limit_s: float) -> argparse.ArgumentParser:
    """Returns what reads the arguments that every part has: ``--out FOLDER --limit-s N``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=limit_s)
    return parser


def sharing_parser(limit_s: float) -> argparse.ArgumentParser:
    """Returns that of a part whose ranks share the device (`staged_group.share_device`)."""
    parser = part_parser(limit_s)
    parser.add_argument("--on-cpu", action="store_true", help="try it without a GPU: the same class on CPU tensors")
    return parser


class Cases:
    """Runs cases within a time limit.

    Args:
        out: folder for logs.
        limit_s: seconds from now after which nothing more is begun.
        only: names of cases to choose, by their beginnings; all when there is none.
    """

    def __init__(self, out: Path, limit_s: float, only: Sequence[str] = ()) -> None:
        self.out, self._end, self._only = out, time.monotonic() + limit_s, tuple(only)
        self.status = 0
        self._commands: list[Command] = []

    @classmethod
    def from_arguments(cls, limit_s: float) -> Cases:
        """Reads ``--out FOLDER --limit-s N --only NAME NAME`` from the command line."""
        parser = part_parser(limit_s)
        parser.add_argument("--only", nargs="*", default=())
        arguments = parser.parse_args()
        arguments.out.mkdir(parents=True, exist_ok=True)
        return cls(arguments.out.resolve(), arguments.limit_s, arguments.only)

    def wants(self, name: str) -> bool:
        """Returns whether a case was chosen; a name of several words by the first."""
        return not self._only or name.replace(" ", "-").startswith(self._only)

    def start(
        self,
        name: str,
        words: Sequence[str] = (),
        program: Sequence[str] = (),
        work: Callable[[], object] | None = None,
    ) -> Command:
        """Starts a command, which `finish` ends if nobody waits for it; arguments as `Command`."""
        self._commands.append(Command(self.out, name, words, program, work))
        return self._commands[-1]

    def finish(self) -> int:
        """Ends what still runs; returns the part's exit status."""
        for command in self._commands:
            command.end()
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

    It is forked from this process, which has imported everything: a start costs no import. Under `program` it is a
    process of its own.

    Args:
        folder: for its output.
        name: of these files.
        words: behind ``python3 -m meshwright``; or those of `program`.
        program: what runs, in place of meshwright.
        work: what a fork does, in place of the command.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        words: Sequence[str] = (),
        program: Sequence[str] = (),
        work: Callable[[], object] | None = None,
    ) -> None:
        self.name, self._began = name, time.monotonic()
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        self._process: subprocess.Popen | None = None
        self._fork: Running | None = None
        if program:
            with self._out.open("wb") as out, self._err.open("wb") as err:
                self._process = subprocess.Popen(
                    [*program, *words], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                    start_new_session=True,
                )  # fmt: skip
        else:
            parent, act = os.getpid(), work or (lambda: main(list(words)))
            self._fork = Running(words, self._out, lambda: self._run(parent, act))

    def _run(self, parent: int, act: Callable[[], object]) -> None:
        """Does the work of the fork and ends it."""
        status = 99
        try:
            die_with_parent(parent)
            warnings.simplefilter("ignore")
            file = os.open(self._err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 2)
            status = int(act() or 0)  # type: ignore[call-overload]
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(status)

    def alive(self) -> bool:
        """Returns whether it still runs."""
        if self._process is not None:
            return self._process.poll() is None
        assert self._fork is not None
        return self._fork.poll() is None

    def signal(self, number: int, group: bool = False) -> None:
        """Sends a signal to its process, or to its whole group as a terminal does."""
        pid = self._process.pid if self._process is not None else self._fork.pid  # type: ignore[union-attr]
        (os.killpg if group else os.kill)(pid, number)

    def end(self) -> None:
        """Ends what still runs, its ranks with it."""
        if self._fork is not None:
            self._fork.end()
        elif self.alive():
            self.signal(signal.SIGKILL, group=True)

    def wait(self, limit_s: float) -> Result:
        """Returns its status, seconds and last lines; ends it at the limit."""
        end = time.monotonic() + max(0.1, limit_s)
        while self.alive() and time.monotonic() < end:
            time.sleep(0.02)
        status: int | str = "ended at the limit"
        if self.alive():
            self.end()
        elif self._process is not None:
            status = self._process.returncode
        elif self._fork is not None and self._fork.status is not None:
            status = self._fork.status
        seconds = round(time.monotonic() - self._began, 1)
        return {"ok": status == 0, "status": status, "command_s": seconds} | (
            {} if status == 0 else {"last": self.err()[-1200:] or self.out()[-1200:]}
        )

    def out(self) -> str:
        """Returns what it printed."""
        return _text(self._out)

    def err(self) -> str:
        """Returns what it printed on its standard error."""
        return _text(self._err)

    def json(self) -> Any:
        """Returns the JSON that it printed."""
        return json.loads(self.out())


def _text(path: Path) -> str:
    """Returns what is in a file, nothing before a fork has made it."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
