"""The tests of `tests/gpu`, in several processes on one GPU, which fork from this one; a line a test."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import pytest

from meshwright.forking import die_with_parent
from tests.runs import warm

ROOT = Path(__file__).parents[3]
PROCESSES = 4


class Lines:
    """Prints a line a test, to what is the part's standard output.

    Args:
        output: its descriptor.
    """

    def __init__(self, output: int) -> None:
        self._output = output
        self.found: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Keeps the tests' names."""
        self.found = [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tells a test's outcome, once."""
        if report.when == "call" or report.outcome != "passed":
            told = {"case": report.nodeid, "ok": report.outcome != "failed", "outcome": report.outcome}
            told |= {"s": round(report.duration, 1)}
            if report.outcome == "failed":
                told["error"] = report.longreprtext[-1500:]
            os.write(self._output, (json.dumps(told) + "\n").encode())


def run(names: list[str], folder: Path, lines: Lines, *more: str) -> int:
    """Runs pytest in this process, what it prints in a file."""
    log = os.open(folder / "pytest.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    words = [*names, "-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:benchmark", "--tb=short", *more]
    # Its plugins may have been imported before.
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*words, f"--basetemp={folder / 'tmp'}", f"--rootdir={ROOT}"], plugins=[lines]))


def main() -> int:
    """Runs the tests and prints what each came to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--only", default="", help="parts of names, joined by +")
    options = parser.parse_args()
    warm()
    lines, output, errors = Lines(os.dup(1)), os.dup(1), os.dup(2)
    chosen = ("-k", options.only.replace("+", " or ")) if options.only else ()
    run(["tests/gpu"], options.out, lines, "--collect-only", "-q", *chosen)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    parent, pids = os.getpid(), []
    for number in range(PROCESSES):
        names = lines.found[number::PROCESSES]
        if not names:
            continue
        pid = os.fork()
        if not pid:
            die_with_parent(parent)
            folder = options.out / f"process-{number}"
            folder.mkdir(exist_ok=True)
            os._exit(run(names, folder, lines))
        pids.append(pid)
    statuses, end = [], time.monotonic() + options.limit_s
    while pids and time.monotonic() < end:
        for pid in list(pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                pids.remove(pid)
                statuses.append(os.waitstatus_to_exitcode(status))
        time.sleep(0.1)
    print(json.dumps({"case": "all", "tests": len(lines.found), "statuses": statuses, "left": len(pids)}), flush=True)
    return int(any(statuses) or bool(pids) or not lines.found)


if __name__ == "__main__":
    sys.exit(main())
