"""Parts of which nothing is timed, side by side: forks of one process, which imports everything once.

    python -m tests.gpu.parts.together --out FOLDER --parts train,verify [--limits train=100,...] [--limit-s 200]
        [--more "ranks --only tensor"]

Each part has a folder beside `FOLDER`, and its lines say its name.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import selectors
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

from meshwright.forking import die_with_parent, fork_obstacle, release_threads
from tests.runs import warm

IMPORTED = ("pytest", "torch._dynamo", "torch._inductor.compile_fx", "transformers.models.llama.modeling_llama",
            "meshwright.jobs.verify", "meshwright.jobs.doctor", "meshwright.jobs.generate", "meshwright.jobs.export",
            "meshwright.strategy", *(f"transformers.models.{name}.modeling_{name}" for name in ("gemma3", "mixtral",
            "qwen3")))  # fmt: skip
"""What several parts would import, each in its own process, where it touches no GPU."""
END_S = 2.0
"""Of the limit, kept for the end."""


@dataclass
class Fork:
    """A part under way."""

    name: str
    pid: int
    folder: Path
    end: float
    began: float
    rest: bytes = b""
    status: int | str | None = None


def begin(name: str, folder: Path, limit_s: float, more: list[str], selector: selectors.BaseSelector) -> Fork:
    """Forks a part; its standard output comes through a pipe."""
    folder.mkdir(parents=True, exist_ok=True)
    there, here = os.pipe()
    parent, began = os.getpid(), time.monotonic()
    pid = os.fork()
    if not pid:
        status = 99
        try:
            die_with_parent(parent)
            errors = os.open(folder / "stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(here, 1)
            os.dup2(errors, 2)
            # Not closed with the object, which forks of this one replace.
            sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = [name, "--out", str(folder), "--limit-s", f"{limit_s:.0f}", *more]
            status = int(importlib.import_module(f"tests.gpu.parts.{name}").main())
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(status)
    os.close(here)
    fork = Fork(name, pid, folder, began + limit_s, began)
    selector.register(there, selectors.EVENT_READ, fork)
    return fork


def import_all() -> str | None:
    """Imports what is not harmful; returns why this process can't fork then, which would be this file's fault.

    A child tries before: what of it uses the driver is left to the parts.
    """
    for name in IMPORTED:
        pid = os.fork()
        if not pid:
            try:
                importlib.import_module(name)
                os._exit(fork_obstacle() is not None)
            except BaseException:
                os._exit(2)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            say({"case": f"import {name}", "ok": False, "status": status})
        else:
            importlib.import_module(name)
    return fork_obstacle()


def say(fields: dict[str, object]) -> None:
    """Prints a line."""
    print(json.dumps(fields), flush=True)


def relay(fork: Fork, data: bytes) -> None:
    """Prints a part's results with its name; what is no JSON object goes to a file."""
    *lines, fork.rest = (fork.rest + data).split(b"\n")
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if isinstance(found, dict):
            say({"part": fork.name} | found)
        else:
            with (fork.folder / "stdout.txt").open("ab") as file:
                file.write(line + b"\n")


def descendants(pid: int) -> list[int]:
    """Returns a process and all that came from it, the youngest last."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def kill(pid: int) -> None:
    """Ends a part and what it started."""
    for one in descendants(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def watch(forks: list[Fork], selector: selectors.BaseSelector) -> None:
    """Relays what parts print until all have ended, each by its limit."""
    while any(fork.status is None for fork in forks):
        for key, _ in selector.select(0.05):
            data = os.read(key.fd, 1 << 16)
            if data:
                relay(key.data, data)
            else:
                selector.unregister(key.fd)
                os.close(key.fd)
        for fork in forks:
            if fork.status is None and time.monotonic() > fork.end:
                kill(fork.pid)
                os.waitpid(fork.pid, 0)
                told(fork, "killed at its limit")
            elif fork.status is None:
                pid, status = os.waitpid(fork.pid, os.WNOHANG)
                if pid:
                    told(fork, os.waitstatus_to_exitcode(status))


def told(fork: Fork, status: int | str) -> None:
    """Keeps and prints how a part ended."""
    fork.status = status
    fields: dict[str, object] = {"part": fork.name, "end": status, "seconds": round(time.monotonic() - fork.began, 1)}
    if status:
        fields["stderr"] = (fork.folder / "stderr.txt").read_text(errors="replace")[-1500:]
    say(fields)


def main() -> int:
    """Imports, forks the parts and returns 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=200.0)
    parser.add_argument("--parts", required=True, help="names, separated by commas")
    parser.add_argument("--limits", default="", help="of parts, where shorter: train=100,ranks=150")
    parser.add_argument("--more", action="append", default=[], help="a part and more arguments for it")
    options = parser.parse_args()
    began = time.monotonic()
    # Python 3.12 warns of any thread, those of libraries too, which hold nothing here.
    warnings.simplefilter("ignore", DeprecationWarning)
    warm()
    release_threads()
    obstacle = import_all()
    say({"case": "imported", "ok": obstacle is None, "seconds": round(time.monotonic() - began, 1), "why": obstacle})
    limits = dict(one.split("=") for one in options.limits.split(",") if one)
    left_s = options.limit_s - (time.monotonic() - began) - END_S
    selector, forks = selectors.DefaultSelector(), []
    for name in options.parts.split(","):
        more = [word for text in options.more for word in text.split()[1:] if text.split()[0] == name]
        limit_s = min(left_s, float(limits.get(name, left_s)))
        forks.append(begin(name, options.out.parent / name, limit_s, more, selector))
    watch(forks, selector)
    # A child may still hold a pipe: what it wrote is there.
    for key in list(selector.get_map().values()):
        os.set_blocking(key.fd, False)
        with contextlib.suppress(BlockingIOError):
            relay(key.data, os.read(key.fd, 1 << 20))
    return int(any(fork.status for fork in forks))


if __name__ == "__main__":
    sys.exit(main())
