"""Models of transformers are listed once, and the list is the one that transformers itself would make."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import transformers.utils.import_utils as imports
read, fetch = [], imports.fetch__all__
imports.fetch__all__ = lambda text: read.append(1) or fetch(text)
import meshwright.models.hugging_face
again = len(read)
import sys, transformers.models as models
plain = imports.define_import_structure(models.__file__)
assert len(read) > 1000, "another list than transformers' own"
spared = type(models)("transformers.models", models.__file__, plain, module_spec=models.__spec__)
for name in ("_modules", "_class_to_module", "_object_missing_backend"):
    assert getattr(models, name) == getattr(spared, name), name
assert sorted(models.__all__) == sorted(spared.__all__) and "LlamaForCausalLM" in models.__all__
print(again)
"""


def test_transformers_reads_its_models_once() -> None:
    out = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    # The first reading was over before the count began; some small files beside the models are read still.
    assert int(out.stdout) < 100
