"""Layers that torch.compile traces train along the curve of plain ones, under each way to split a model.

Traced by Dynamo, whose graphs then run as they are: what breaks or is left out of a graph shows here, in a fraction of
the time that kernels take to be made. There are several layers, and evaluation has other shapes than training, so that
sizes become symbols.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import pytest
import torch

from tests.runs import call, curve, words, write_corpus
from tests.tiers import cases

pytestmark = pytest.mark.slow
LAYOUTS = (
    ("tp=2", ()),
    ("tp=2,sequence=true,recompute=full", ()),
    ("cp=2,attention=heads", ()),
    ("pp=2,microbatches=2", ()),
    ("shard=2,zero=3,recompute=selective", ()),
    ("shard=2,ep=2", ("--model", "mixtral", "--model.experts", "4")),
)
SIZES = ("--model.layers", "3", "--model.width", "32", "--model.heads", "4", "--train.steps", "4")


def traced() -> None:
    """Lets torch.compile trace without making kernels; the compiler warns of its own deprecated parts."""
    warnings.simplefilter("ignore")
    torch.compile = functools.partial(torch.compile, backend="eager")


@pytest.mark.parametrize(("layout", "more"), cases(LAYOUTS, (1, 4)), ids=[layout for layout, _ in LAYOUTS])
def test_compiled_layers_train_as_plain_ones(tmp_path: Path, layout: str, more: tuple[str, ...]) -> None:
    write_corpus(tmp_path / "corpus.txt", 60)
    rest = ("--model", "llama", *SIZES, *more, "--checkpoint.every", "0", "--evaluation.every", "2")
    curves = []
    for name, written in (("plain", layout), ("compiled", f"{layout},compile=true")):
        argv = words(tmp_path, name, *rest, layout=f"{written},precision=float64", devices=2)
        status, text = call(argv, tmp_path / "log", before=traced)
        assert status == 0, text
        assert "recompile_limit" not in text, text
        curves.append(curve(tmp_path / name))
    plain, compiled = curves
    assert sorted(plain) == sorted(compiled) == [1, 2, 3, 4]
    for step in plain:
        assert compiled[step] == pytest.approx(plain[step], rel=1e-9)
