"""The catalogue of planted bugs follows the code: each stands where it says, and is still a program."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.plant import CATALOGUE, ROOT, load_catalogue


@pytest.mark.parametrize(("catalogue", "fewest"), [(CATALOGUE, 120), (CATALOGUE.with_name("held_out.toml"), 20)])
def test_every_mutant_can_be_planted(catalogue: Path, fewest: int) -> None:
    mutants = load_catalogue(catalogue)
    assert len(mutants) >= fewest
    for mutant in mutants:
        ast.parse(mutant.source())
        assert mutant.put != mutant.find
        for test in mutant.tests:
            assert (ROOT / Path(test.partition("::")[0])).exists(), f"{mutant.name}: {test}"
