"""What `make test` leaves to `make extended` repeats a claim that it holds itself, and is left out by nobody else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.plant import ROOT
from tests.tiers import cases, further


def claims(module: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Yields each test that is marked `extended` as a whole, and the test that it names."""
    for function in (node for node in module.body if isinstance(node, ast.FunctionDef)):
        for mark in function.decorator_list:
            call = mark if isinstance(mark, ast.Call) else None
            if ast.unparse(call.func if call else mark) == "pytest.mark.extended":
                yield function.name, ast.literal_eval(call.args[0]) if call and call.args else None


def unheld(module: ast.Module, folder: Path = ROOT) -> list[str]:
    """Returns the tests whose claim no test of the module, or of the file that is named, holds in `make test`."""
    found = []
    for name, claim in claims(module):
        file, _, test = (claim or "").rpartition("::")
        other = ast.parse((folder / file).read_text(encoding="utf-8")) if file else module
        every = {node.name for node in other.body if isinstance(node, ast.FunctionDef)}
        if test not in every - dict(claims(other)).keys():
            found.append(name)
    return found


def test_each_extended_test_names_the_one_that_holds_its_claim_each_time() -> None:
    named = 0
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        assert unheld(module, path.parent) == [], path
        named += len(list(claims(module)))
    assert named > 10


@pytest.mark.parametrize(
    ("mark", "found"),
    [
        ('@pytest.mark.extended("test_one")', []),
        ("@pytest.mark.extended", ["test_two"]),
        ('@pytest.mark.extended("test_gone")', ["test_two"]),
        ('@pytest.mark.extended("test_two")', ["test_two"]),
    ],
)
def test_a_claim_that_nobody_holds_is_seen(mark: str, found: list[str]) -> None:
    assert unheld(ast.parse(f"def test_one(): ...\n{mark}\ndef test_two(): ...\n")) == found


def test_further_cases_leave_one_for_each_time() -> None:
    marks = [[mark.name for mark in param.marks] for param in further(["a", "b", "c"], ("b",))]
    assert marks == [["extended"], [], ["extended"]]
    with pytest.raises(AssertionError, match="make test tries none"):
        further(["a", "b"], ())
    skipped = pytest.param("c", marks=pytest.mark.skip)
    marks = [[mark.name for mark in param.marks] for param in cases(["a", "b", skipped], (0,), extended=(2,))]
    assert marks == [[], ["long"], ["skip", "extended"]]


def test_what_is_left_out_is_a_job_of_its_own() -> None:
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert '-m "$(OWN) and not extended" $(TWO)\n' in rules and '-m "$(OWN) and extended" $(TWO)\n' in rules
    commands = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert commands[-1] == "exec make --no-print-directory test"
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert all(f"      - run: {job}\n" in workflow for job in (".ci/run", "make extended", "make long", "make newest"))


def test_what_simulated_gpus_leave_to_make_long_is_run_there() -> None:
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    for python, marks in (("ghost", '"not long"'), ("ghost", "long"), ("newest", '"not long and not oldest"')):
        assert f"\t@.venv-{python}/bin/python -m tests.ghost $(EACH) -m {marks}\n" in rules
    assert "\nlong: $(READY) .venv-ghost/.ready ##" in rules


def test_nobody_else_leaves_it_out() -> None:
    """Mutants ask all tests that they name, and `make ghost`, `make newest` and `make quick` run theirs whole."""
    files: list[Path] = [ROOT / "Makefile", ROOT / "pyproject.toml", *(ROOT / "tests" / "mutants").glob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    assert text.count("not extended") == 1
