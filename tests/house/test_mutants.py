"""The catalogue of planted bugs follows the code: each stands where it says, and is still a program."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.mutants.plant import ROOT, load_catalogue


def test_every_mutant_can_be_planted() -> None:
    mutants = load_catalogue()
    assert len(mutants) >= 120
    for mutant in mutants:
        ast.parse(mutant.source())
        assert mutant.put != mutant.find
        for test in mutant.tests:
            assert (ROOT / Path(test.partition("::")[0])).exists(), f"{mutant.name}: {test}"
