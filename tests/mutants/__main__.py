"""Plants bugs one by one and counts who notices: the proof first, then the tests that a mutant names.

    python -m tests.mutants                       all, one after the other
    python -m tests.mutants --shard 2/8           every eighth, from the second
    python -m tests.mutants --sample 10 --seed 3  ten of them, drawn
    python -m tests.mutants --only 'norm|clip'    by name
    python -m tests.mutants --json out.json       the outcomes, for a program
    python -m tests.mutants --reach reach.json    ask only proofs that run the statement; made if missing

Ends with status 1 when a mutant survives that isn't listed as one that computes the same.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.mutants.plant import CATALOGUE, ROOT, Mutant, load_catalogue, plant
from tests.mutants.reach import record

LIMIT_S = 1200.0
"""For one killer of one mutant: a bug may make a run hang, and that is noticed too."""
WARM = ("torch", "transformers", "pytest", "tyro", "rich", "numpy")
AROUND_THE_STEP = tuple(
    f"meshwright/{path}"
    for path in (
        "data/",
        "checkpoint/",
        "train/trainer",
        "train/step_launcher",
        "train/rate",
        "train/feed",
        "train/optimizer",
    )
)
UNASKED = 3
"""Status of a process whose tests did not run."""
PRICES = "meshwright/planner/"
"""What no layout that is proven runs."""
FAMILIES = ("llama", "gpt2", "mixtral")


class NotAsked(Exception):
    """The tests didn't run, so that nothing is said of a mutant."""


def main(argv: list[str]) -> int:
    """Runs the chosen mutants and prints a line each, and the score."""
    chosen = parse(argv)
    mutants = select(load_catalogue(chosen.catalogue), chosen)
    warm()
    if chosen.control and (false_alarm := control(mutants, chosen.by)):
        print(f"code without a bug is noticed: {false_alarm}", flush=True)
        return 2
    reach = read_reach(chosen.reach, chosen.catalogue) if chosen.reach and chosen.by != "tests" else None
    outcomes = []
    for number, mutant in enumerate(mutants, 1):
        began = time.monotonic()
        killer, why = outcome_of(mutant, chosen.by, None if reach is None else reach.get(mutant.name, []))
        outcomes.append({"name": mutant.name, "file": mutant.file, "killed_by": killer, "why": why})
        took = time.monotonic() - began
        print(
            f"[{number}/{len(mutants)}] {took:5.1f} s  {killer or 'SURVIVED':8}  {mutant.name}: {why[:160]}", flush=True
        )
        if chosen.json:
            chosen.json.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    return report(mutants, outcomes)


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", default="1/1", help="which of how many parts, as 2/8")
    parser.add_argument("--catalogue", type=Path, default=CATALOGUE, help="the mutants; held_out.toml has others")
    parser.add_argument("--sample", type=int, default=0, help="so many, drawn; all when 0")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--only", default="", help="a regular expression that the name matches")
    parser.add_argument("--by", choices=("both", "proof", "tests"), default="both", help="who is asked")
    parser.add_argument("--control", action="store_true", help="first ask the same of the code without any bug")
    parser.add_argument("--reach", type=Path, help="which proofs run which mutant's statement; made if it is missing")
    parser.add_argument("--json", type=Path, help="where to write the outcomes")
    return parser.parse_args(argv)


def select(mutants: list[Mutant], chosen: argparse.Namespace) -> list[Mutant]:
    """Returns the mutants that the command line names."""
    part, parts = map(int, chosen.shard.split("/"))
    mutants = [mutant for mutant in mutants if re.search(chosen.only, mutant.name)]
    if chosen.sample:
        mutants = random.Random(chosen.seed).sample(mutants, min(chosen.sample, len(mutants)))
    return mutants[part - 1 :: parts]


def warm() -> None:
    """Imports what isn't ours, once: a mutant's process is forked from this one."""
    sys.path.insert(0, str(ROOT))
    importlib.import_module("tests.conftest")
    warnings.simplefilter("ignore")
    for name in (*WARM, *(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES)):
        importlib.import_module(name)


def read_reach(path: Path, catalogue: Path) -> dict[str, list[int]]:
    """Returns, by mutant, the places in the battery of the proofs that run its statement; runs the battery once if the
    file is missing or older than the catalogue.

    Raises:
        RuntimeError: when a proof doesn't pass on the code as it is.
    """
    if path.exists() and path.stat().st_mtime > catalogue.stat().st_mtime:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    mutants = [mutant for mutant in load_catalogue(catalogue) if not mutant.file.startswith(PRICES)]
    reach: dict[str, list[int]] = {mutant.name: [] for mutant in mutants}
    for place in range(proof_count()):
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            if said := in_child(None, lambda place=place, folder=folder: recorded(mutants, folder, place)):  # type: ignore[misc]
                raise RuntimeError(f"proof {place} of code without a bug: {said}")
            reached = sorted(int(item.name) for item in Path(folder).iterdir())
        for index in reached:
            reach[mutants[index].name].append(place)
        print(f"proof {place}: {time.monotonic() - began:5.1f} s, runs {len(reached)} mutants", flush=True)
    path.write_text(json.dumps(reach, indent=1) + "\n", encoding="utf-8")
    return reach


def proof_count() -> int:
    """Returns how many proofs the battery has; counted in a process of its own, which imports meshwright."""
    return int(in_child(None, lambda: str(len(importlib.import_module("tests.mutants.battery").proofs()))))


def recorded(mutants: list[Mutant], folder: str, place: int) -> str:
    """Runs one proof in this process and records in ``folder`` which mutants' statements run."""
    record(mutants, Path(folder))
    return str(importlib.import_module("tests.mutants.battery").proofs()[place]())


def outcome_of(mutant: Mutant, by: str, reached: list[int] | None = None) -> tuple[str, str]:
    """Returns who noticed (``proof``, ``tests`` or "" for nobody) and what it said.

    Args:
        mutant: planted in each killer's process.
        by: who is asked.
        reached: the proofs that run its statement; None to ask all.
    """
    if by != "tests" and not mutant.file.startswith(PRICES) and reached != []:
        job_first = mutant.file.startswith(AROUND_THE_STEP)
        noticed = in_child(mutant, lambda: proof_notices(job_first, reached))
        if noticed:
            return "proof", noticed
    if by != "proof" and mutant.tests:
        noticed = in_child(mutant, lambda: tests_fail(mutant.tests))
        if noticed:
            return "tests", noticed
    return "", mutant.survives


def control(mutants: list[Mutant], by: str) -> str:
    """Asks the proof, and the tests that these mutants name, about the code as it is; returns what they noticed."""
    if by != "tests" and (said := in_child(None, lambda: proof_notices(False, None))):
        return f"proof: {said}"
    named = sorted({test for mutant in mutants for test in mutant.tests}) if by != "proof" else []
    for test in named:
        if said := in_child(None, lambda test=test: tests_fail((test,))):  # type: ignore[misc]
            return said
        print(f"control: {test} passes", flush=True)
    return ""


def proof_notices(job_first: bool, reached: list[int] | None) -> str:
    """Runs the proofs (of these places alone unless None) in this process, which has the mutant."""
    # Imported here, where the mutant is planted: whatever imports meshwright before would have it whole.
    every = importlib.import_module("tests.mutants.battery").proofs()
    places = list(range(len(every))) if reached is None else reached
    jobs = len(every) - len(importlib.import_module("tests.mutants.battery").JOBS)
    order = sorted(places, key=lambda place: (place < jobs, place)) if job_first else places
    return next((said for place in order if (said := every[place]())), "")


def tests_fail(tests: tuple[str, ...]) -> str:
    """Runs tests in this process and returns which one fails first; "" when all pass."""
    import pytest

    class FirstFailure:
        name = ""

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            """Asks in the mutant's order: whom it names first is most likely to notice, and soonest."""
            items.sort(key=lambda item: next(place for place, test in enumerate(tests) if item.nodeid.startswith(test)))

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed and not self.name:
                self.name = report.nodeid

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed and not self.name:
                self.name = f"{report.nodeid}: not collected"

    first = FirstFailure()
    quiet = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not long", "-W", "ignore:Module already imported")
    status = pytest.main([*quiet, *tests], plugins=[first])
    if not first.name and status != pytest.ExitCode.OK:
        raise NotAsked(f"pytest ended with status {status} and no test had failed")
    return first.name


def in_child(mutant: Mutant | None, killer: Callable[[], str]) -> str:
    """Runs a killer in a process of its own that has the mutant, and returns what it noticed; "" for nothing.

    Raises:
        NotAsked: when the killer didn't come to ask.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            os.close(reading)
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(nothing, number)
            if mutant:
                plant(mutant)
            noticed = killer()
            os.write(writing, noticed.encode()[:4000])
            status = 0
        except NotAsked as error:
            status = UNASKED
            os.write(writing, str(error).encode()[:4000])
        except BaseException as error:
            text = "".join(traceback.format_exception_only(error)).strip()
            os.write(writing, f"crashed: {text}".encode()[:4000])
        finally:
            os._exit(status)
    os.close(writing)
    end, said, done = time.monotonic() + LIMIT_S, b"", False
    os.set_blocking(reading, False)
    while not done and time.monotonic() < end:
        over, ended = os.waitpid(pid, os.WNOHANG)
        done = over != 0
        try:
            said += os.read(reading, 65536)
        except BlockingIOError:
            time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # ranks that a bug left behind
    if not done:
        os.waitpid(pid, 0)
        said = said or f"hangs: not over in {LIMIT_S:.0f} s".encode()
    os.close(reading)
    if done and os.waitstatus_to_exitcode(ended) == UNASKED:
        raise NotAsked(said.decode(errors="replace"))
    return said.decode(errors="replace")


def report(mutants: list[Mutant], outcomes: list[dict[str, str]]) -> int:
    """Prints the score and returns the exit status."""
    by_proof = sum(outcome["killed_by"] == "proof" for outcome in outcomes)
    by_tests = sum(outcome["killed_by"] == "tests" for outcome in outcomes)
    alive = [mutant for mutant, outcome in zip(mutants, outcomes) if not outcome["killed_by"]]
    prices = sum(mutant.file.startswith(PRICES) for mutant in mutants)
    print(
        f"{len(mutants)} mutants, {prices} of them in prices: {by_proof} noticed by the proof, "
        f"{by_tests} more by tests, {len(alive)} alive"
    )
    proven = [mutant for mutant in mutants if not mutant.file.startswith(PRICES)]
    within = [mutant for mutant in proven if not mutant.survives and not mutant.unproven]
    if within:
        print(
            f"the proof: {by_proof} of {len(proven)} outside of prices, of which {len(within)} change numbers of a "
            f"run that is well ({100 * by_proof / len(within):.0f} %)"
        )
    for mutant in alive:
        print(f"  {mutant.name} ({mutant.file}): {mutant.survives or 'nobody notices'}")
    return 1 if any(not mutant.survives for mutant in alive) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
