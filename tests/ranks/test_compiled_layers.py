"""Layers that torch.compile traces train along the curve of plain ones, under each way to split a model.

Traced by Dynamo and AOTAutograd, whose graphs then run as they are: what breaks or is left out of a graph shows here,
in a fraction of the time that kernels take to be made. There are several layers, and evaluation has other shapes than
training, so that sizes become symbols. A layer must be one graph, which Dynamo itself refuses to break; the few where
experts' tokens travel, whose number no graph knows, are counted.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import call, curve, rows, words, write_corpus
from tests.tiers import cases

pytestmark = pytest.mark.slow
MIXTRAL = ("--model", "mixtral", "--model.experts", "4")
LAYOUTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("tp=2", ()),
    ("tp=2,sequence=true,recompute=full", ()),
    ("tp=2,sequence=true", ("--model", "qwen3")),
    ("tp=2", ("--model", "gpt2", "--model.dropout", "0")),
    ("tp=2", ("--model", "gemma3", "--model.layers", "3")),
    ("cp=2,attention=heads", ()),
    ("pp=2,microbatches=2", ()),
    ("shard=2,zero=3,recompute=selective", ()),
    ("replicate=2", ()),
    ("tp=2", MIXTRAL),
    ("shard=2,ep=2", MIXTRAL),
)
SIZES = ("--model.layers", "3", "--model.width", "32", "--model.heads", "4", "--train.steps", "4")
GRAPHS = 3
"""Most graphs of a layer: training's, evaluation's, which keeps nothing, and one whose sizes are symbols."""


def traced(graphs: Path, whole: bool) -> Callable[[], None]:
    """Returns what lets torch.compile trace without making kernels, and writes a line a graph.

    Args:
        graphs: gets the process and the operators of each graph that is compiled.
        whole: Dynamo raises where it would break a graph.
    """

    def install() -> None:
        warnings.simplefilter("ignore")  # the compiler warns of its own deprecated parts
        aot_eager = importlib.import_module("torch._dynamo").lookup_backend("aot_eager")

        def backend(graph: Any, inputs: Any) -> Any:
            with graphs.open("a", encoding="ascii") as file:
                file.write(f"{os.getpid()} {sum(node.op.startswith('call') for node in graph.graph.nodes)}\n")
            return aot_eager(graph, inputs)

        torch.compile = functools.partial(torch.compile, backend=backend, fullgraph=whole)

    return install


def sent(run: Path) -> Counter[tuple[str, str]]:
    """Returns the bytes that a run's steps have booked by axis and operation, but for what all ranks agree on."""
    total: Counter[tuple[str, str]] = Counter()
    for line in rows(run):
        for row in line.get("comm", ()):
            if row["axis"] != "world":  # how often these travel depends on the time
                total[row["axis"], row["op"]] += row["bytes"]
    return total


@pytest.mark.parametrize(
    ("layout", "more"), cases(LAYOUTS, (1, 2, 10)), ids=["-".join((layout, *more[1:2])) for layout, more in LAYOUTS]
)
def test_compiled_layers_train_as_plain_ones(tmp_path: Path, layout: str, more: tuple[str, ...]) -> None:
    write_corpus(tmp_path / "corpus.txt", 60)
    rest = ("--model", "llama", *SIZES, *more, "--checkpoint.every", "0", "--evaluation.every", "2")
    curves, graphs = [], tmp_path / "graphs"
    # Inside of a graph a recomputed layer may neither change its hooks' state nor have float64's mode.
    is_whole = "mixtral" not in more and "cp=" not in layout and "recompute" not in layout
    for name, written in (("plain", layout), ("compiled", f"{layout},compile=true")):
        argv = words(tmp_path, name, *rest, layout=f"{written},precision=float64", devices=2)
        status, text = call(argv, tmp_path / "log", before=traced(graphs, is_whole))
        assert status == 0, text
        assert "recompile_limit" not in text, text
        curves.append(curve(tmp_path / name))
    plain, compiled = curves
    assert sorted(plain) == sorted(compiled) == [1, 2, 3, 4]
    for step in plain:
        assert compiled[step] == pytest.approx(plain[step], rel=1e-9)
    # A compiler that repeated or dropped a collective would be found in its bytes.
    assert sent(tmp_path / "compiled") == sent(tmp_path / "plain")
    if "recompute" in layout:
        return
    graphs_of_rank = Counter(line.split()[0] for line in graphs.read_text().splitlines())
    assert max(graphs_of_rank.values()) <= GRAPHS * (1 if is_whole else 8), graphs.read_text()
