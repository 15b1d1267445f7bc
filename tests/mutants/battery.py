"""The proof as a user would run it: a few models under layouts that take every path of a step."""

from __future__ import annotations

import io
import json
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from meshwright.cli.main import main
from tests.runs import write_corpus

RECIPE = """
[model]
name = "gpt2"
layers = 4
dropout = 0.1
[data]
paths = ["{text}"]
tokenizer = "chars"
sequence = 16
workers = 1
cache = "{cache}"
[train]
batch = 8
steps = 300
[optimizer]
clip = 0.5
"""

TOGETHER = 3
"""Layouts proven by one command."""
BATTERY: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("--model", "llama", "--model.layers", "4", "--model.heads", "8", "--model.kv-heads", "4"),
        (
            "replicate=2,microbatches=2",
            "shard=2,zero=3,recompute=selective",
            "shard=2,zero=2,microbatches=2",
            "tp=2,sequence=true,recompute=full",
            "cp=2",
            "pp=2,microbatches=4,schedule=zbv",
            "pp=2,microbatches=4,tp=2",
            "replicate=2,shard=2,zero=1,microbatches=3",
            "pp=2,shard=2,zero=3,microbatches=4,schedule=1f1b",
            "cp=2,tp=2",
        ),
    ),
    (
        ("--model", "gpt2", "--model.layers", "4", "--model.heads", "4", "--data.mask-documents", "true"),
        (
            "replicate=2",
            "shard=2,zero=1",
            "tp=2",
            "pp=2,microbatches=4,schedule=interleaved,stages=4",
            "pp=2,microbatches=2,recompute=full",
            "cp=2,attention=heads",
            "rows=3-1,shard=2,zero=2",
        ),
    ),
    (
        ("--model", "mixtral", "--model.layers", "2", "--model.heads", "4", "--model.kv-heads", "2"),
        (
            "ep=2,shard=2,zero=1",
            "tp=2",
            "ep=2,shard=4,zero=3",
            "ep=2,replicate=2,shard=2,zero=2,microbatches=2",
            "cp=2,shard=2,zero=2",
        ),
    ),
)


def proof_fails(job_first: bool = False) -> str:
    """Proves layouts, then a whole job, and returns the first that doesn't pass with what was said; "" when all pass.

    Args:
        job_first: begin with the job: the bug is in what surrounds a step.
    """
    proofs = (_job_fails, _layouts_fail) if job_first else (_layouts_fail, _job_fails)
    return proofs[0]() or proofs[1]()


def _layouts_fail() -> str:
    """Runs the battery, a few layouts at a time: a bug is found early, and a reference serves more than one."""
    for model, layouts in BATTERY:
        for first in range(0, len(layouts), TOGETHER):
            named = [f"{layout},precision=float64" for layout in layouts[first : first + TOGETHER]]
            if said := _verify_fails([*model, "--steps", "2", "--layout", *named]):
                return said
    return ""


def _job_fails() -> str:
    """Proves a job with dropout and clipping, resumed under another layout."""
    with tempfile.TemporaryDirectory() as folder:
        text = write_corpus(Path(folder) / "corpus.txt", sentences=120)
        recipe = Path(folder) / "recipe.toml"
        recipe.write_text(RECIPE.format(text=text, cache=f"{folder}/prepared"), encoding="utf-8")
        return _verify_fails([str(recipe), "--layout", "shard=2,zero=2,microbatches=2", "replicate=2"])


def _verify_fails(words: list[str]) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        status = main(["verify", *words, "--json"])
    return _reasons(printed.getvalue()) if status else ""


def _reasons(text: str) -> str:
    """Returns what the report says of the first layout that didn't pass."""
    try:
        report = json.loads(text)
        verdict = next(item for item in report.get("layouts") or report["jobs"] if not item["passed"])
    except (ValueError, LookupError, StopIteration):
        return text.strip()[-300:] or "verify ended with an error"
    numbers = verdict.get("errors") or {name: value for name, value in verdict.items() if name.endswith("_error")}
    errors = ", ".join(f"{name} {value}" for name, value in numbers.items())
    return f"{verdict['layout']}: {verdict.get('refused') or errors}"[:300]
