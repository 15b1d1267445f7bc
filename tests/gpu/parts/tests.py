"""The tests of `tests/gpu`, side by side on one GPU; a line a test."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[3]
OUTCOME = re.compile(r"^\[gw\d+\].*?(PASSED|FAILED|ERROR|SKIPPED) (tests/.*)")


def main() -> int:
    """Runs pytest and prints what each test came to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--processes", default="6")
    options = parser.parse_args()
    report = options.out / "junit.xml"
    words = [sys.executable, "-m", "pytest", "tests/gpu", "-vv", "-n", options.processes, "-p", "no:cacheprovider"]
    # Where it is installed it warns of processes side by side, and warnings are errors here.
    words += ["-p", "no:benchmark"]
    words += [f"--junitxml={report}", "--tb=short"]
    with (options.out / "pytest.txt").open("w") as log:
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            found = OUTCOME.search(line)
            if found:
                print(json.dumps({"case": found[2].strip(), "ok": found[1] not in ("FAILED", "ERROR")}), flush=True)
        status = process.wait()
    if report.exists():
        suite = next(ElementTree.parse(report).iter("testsuite"))
        print(json.dumps({"case": "all", **dict(suite.attrib)}), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
