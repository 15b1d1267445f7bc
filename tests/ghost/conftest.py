"""What every file of these tests begins with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ghost.runs import prepare


def pytest_configure(config: pytest.Config) -> None:
    """Names the mark that these tests alone have."""
    config.addinivalue_line("markers", "oldest: simulated GPUs under the oldest torch alone; left out by make newest")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Returns a folder with the text that runs train on; each file of tests has its own, for its runs' names."""
    root = tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2])
    prepare(root)
    return root
