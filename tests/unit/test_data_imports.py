from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("meshwright.data.config", ("numpy", "tokenizers", "torch", "transformers")),
        ("meshwright.data.prepare", ("torch", "transformers", "pyarrow")),
        ("meshwright.data.loader", ("torch", "transformers", "pyarrow")),
    ],
)
def test_a_module_imports_nothing_heavier_than_it_needs(module: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250.0, check=True)
    assert result.stdout.strip() == "[]"
