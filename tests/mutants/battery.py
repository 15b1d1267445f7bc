"""The proof as a user would run it: a few models under layouts that take every path of a step."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout

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
            "ep=2,replicate=2,microbatches=2",
            "cp=2,shard=2,zero=2",
        ),
    ),
)


def proof_fails() -> str:
    """Runs the battery and returns the first layouts that don't pass, with what was said; "" when all pass.

    A few layouts at a time, so that a bug is found early and a reference serves more than one of them.
    """
    from meshwright.cli.main import main

    for model, layouts in BATTERY:
        for first in range(0, len(layouts), TOGETHER):
            named = [f"{layout},precision=float64" for layout in layouts[first : first + TOGETHER]]
            printed = io.StringIO()
            with redirect_stdout(printed):
                status = main(["verify", *model, "--steps", "2", "--layout", *named, "--json"])
            if status:
                return _reasons(printed.getvalue())
    return ""


def _reasons(text: str) -> str:
    """Returns what the report says of the first layout that didn't pass."""
    try:
        verdict = next(item for item in json.loads(text)["layouts"] if not item["passed"])
    except (ValueError, LookupError, StopIteration):
        return text.strip()[-300:] or "verify ended with an error"
    errors = ", ".join(f"{name} {value}" for name, value in verdict.items() if name.endswith("_error"))
    return f"{verdict['layout']}: {verdict.get('refused') or errors}"[:300]
