"""The proof as a user would run it: a few models under layouts that take every path of a step."""

from __future__ import annotations

import functools
import io
import json
import tempfile
from collections.abc import Callable
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
mask_documents = {masked}
[train]
batch = 8
steps = 300
seed = 3
[optimizer]
eps = 1e-6
clip = 0.5
[recovery]
largest_norm = {norm}
"""

NORM = 3.0
"""Some of a job's steps have a smaller gradient norm, some a larger one."""
TOGETHER = 3
"""Layouts proven by one command."""
BATTERY: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("--model", "llama", "--model.layers", "4", "--model.heads", "8", "--model.kv-heads", "4"),
        (
            "replicate=2,microbatches=2",
            "shard=2,zero=3,recompute=selective",
            "shard=2,zero=2,microbatches=2,loss_chunk=30",
            "tp=2,sequence=true,recompute=full,loss_chunk=50",
            "cp=2",
            "pp=2,microbatches=4,schedule=zbv",
            "pp=2,microbatches=4,tp=2",
            "replicate=2,shard=2,zero=2,microbatches=3",
            "pp=2,shard=2,zero=3,microbatches=4,schedule=1f1b",
            "cp=2,tp=2,loss_chunk=off",
            "cp=2,attention=gather",
            "cp=2,attention=ring",
            "tp=2,sequence=true,tp_overlap=3",
        ),
    ),
    (
        ("--model", "gpt2", "--model.layers", "4", "--model.heads", "4", "--data.mask-documents", "true"),
        (
            "replicate=2",
            "shard=2,zero=1,microbatches=2",
            "tp=2",
            "tp=2,tp_overlap=2",
            "pp=2,microbatches=4,schedule=interleaved,stages=4",
            "pp=2,microbatches=2,recompute=full",
            "cp=2,attention=heads",
            "rows=3-1,shard=2,zero=2",
            "cp=2,attention=gather",
            # Folded: embedding and head, which are one weight, lie on one rank as two.
            "pp=2,microbatches=4,schedule=zbv",
        ),
    ),
    (("--model", "gpt2", "--model.layers", "2", "--model.dropout", "0.1"), ("rows=3-1,shard=2,zero=2",)),
    (
        ("--model", "mixtral", "--model.layers", "2", "--model.heads", "4", "--model.kv-heads", "2"),
        (
            "ep=2,shard=2,zero=1",
            "tp=4",
            "ep=2,shard=4,zero=3",
            "ep=2,replicate=2,shard=2,zero=2,microbatches=2",
            "ep=4,shard=4,zero=3,ep_node=2",
            "ep=2,shard=2,zero=1,ep_overlap=2",
            "ep=2,shard=2,zero=1,ep_halves=true",
            "cp=2,shard=2,zero=2",
            # By name: where the trial of one fails, the layout takes the other, which is right.
            "cp=4,attention=heads",
            "cp=4,attention=gather",
            "cp=4,attention=ring",
        ),
    ),
    (("--model", "phi3", "--model.layers", "2", "--model.heads", "4", "--model.kv-heads", "2"), ("tp=4",)),
    (
        ("--model", "phi3", "--model.layers", "2", "--model.heads", "2", "--model.kv-heads", "1"),
        ("tp=2,shard=2,zero=1",),
    ),
    (("--model", "tests.odd_models:spare", "--sequence", "16"), ("replicate=2", "shard=2,zero=1")),
    (("--model", "tests.objectives:dropping", "--sequence", "16"), ("recompute=full", "recompute=selective")),
)

JOBS: tuple[tuple[int, str, float, str, str], ...] = (
    (120, "false", 0.0, "shard=2,zero=2,microbatches=2", "tp=2"),
    (16, "true", NORM, "replicate=2,recompute=full", "pp=2,microbatches=4"),
)
"""Sentences of the text, whether each is a document and kept apart, the largest norm that changes weights, layouts."""


def proofs() -> list[Callable[[], str]]:
    """Returns the battery's commands, the jobs last; each returns the first layout that doesn't pass, or ""."""
    # A few layouts at a time: a bug is found early, and a reference serves more than one.
    layouts = [
        functools.partial(_layouts_fail, model, together[first : first + TOGETHER])
        for model, together in BATTERY
        for first in range(0, len(together), TOGETHER)
    ]
    return [*layouts, _narrow_fails, *(functools.partial(_job_fails, *job) for job in JOBS)]


def _layouts_fail(model: tuple[str, ...], layouts: tuple[str, ...]) -> str:
    """Proves a few layouts of one model."""
    return _verify_fails([*model, "--steps", "2", "--layout", *(f"{layout},precision=float64" for layout in layouts)])


def _narrow_fails() -> str:
    """Proves what float64 doesn't run: the kernels and scales of float32."""
    return _verify_fails(["--model", "llama", "--model.layers", "2", "--layout", "replicate=2,precision=float32"])


def _job_fails(sentences: int, masked: str, norm: float, *layouts: str) -> str:
    """Proves a job with dropout and clipping, resumed under another layout."""
    with tempfile.TemporaryDirectory() as folder:
        text = write_corpus(Path(folder) / "corpus.txt", sentences=sentences)
        if masked == "true":
            lines = text.read_text(encoding="utf-8").splitlines()
            text = Path(folder) / "corpus.jsonl"
            text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
        recipe = Path(folder) / "recipe.toml"
        filled = RECIPE.format(text=text, cache=f"{folder}/prepared", masked=masked, norm=norm)
        recipe.write_text(filled, encoding="utf-8")
        return _verify_fails([str(recipe), "--layout", *layouts])


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
