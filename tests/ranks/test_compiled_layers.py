"""Layers that torch.compile traces train along the curve of plain ones, under each way to split a model.

Traced by Dynamo and AOTAutograd, cut by the compiler's partitioner, rewritten as the compiler's options ask, and then
run as they are: what breaks or is left out of a graph shows here, in a fraction of the time that kernels take. There
are several layers, and evaluation has other shapes than training, so that sizes become symbols. A layer must be one
graph, which Dynamo itself refuses to break; the few where experts' tokens travel, whose number no graph knows, are
counted. No layout may run without a graph: a compiler that skips what it can't trace says nothing.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import traced_graphs
from tests.runs import call, curve, rows, warm_compiler, words, write_corpus
from tests.tiers import cases

pytestmark = pytest.mark.slow
MIXTRAL = ("--model", "mixtral", "--model.experts", "4")
LAYOUTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("tp=2", ()),
    ("tp=2,sequence=true,recompute=full", ()),
    ("tp=2,sequence=true", ("--model", "qwen3")),
    ("tp=2", ("--model", "gpt2", "--model.dropout", "0")),
    ("tp=2,tp_overlap=3", ()),
    ("tp=2,sequence=true,tp_overlap=2", ("--model", "gpt2", "--model.dropout", "0")),
    ("tp=2,sequence=true,tp_overlap=3,recompute=full", ()),
    ("tp=2,tp_overlap=2", MIXTRAL),
    ("tp=2", ("--model", "gemma3", "--model.layers", "3")),
    ("cp=2,attention=heads", ()),
    ("pp=2,microbatches=2", ()),
    ("shard=2,zero=3,recompute=selective,precision=float32", ()),
    ("shard=2,zero=3,recompute=full", ()),
    ("replicate=2,recompute=full,precision=float32", ()),
    ("tp=2,recompute=full:2", ()),
    ("tp=2,recompute=selective", ()),
    ("tp=2,sequence=true,recompute=full:1+selective", ("--model", "qwen3")),
    ("tp=2,recompute=selective,tp_overlap=2", ("--model", "gpt2", "--model.dropout", "0")),
    ("tp=2,sequence=true,recompute=selective,tp_overlap=2", ()),
    ("tp=2,sequence=true,recompute=selective,precision=bf16", MIXTRAL),
    ("cp=2,attention=heads,recompute=selective", ()),
    ("cp=2,tp=2,sequence=true,recompute=selective:2", ()),
    ("shard=2,ep=2,recompute=selective", MIXTRAL),
    ("shard=2,ep=2,recompute=selective,ep_keep=true", MIXTRAL),
    ("cp=2,attention=heads,recompute=full", ()),
    ("shard=2,ep=2,recompute=full", MIXTRAL),
    ("replicate=2", ()),
    ("tp=2", MIXTRAL),
    ("shard=2,ep=2", MIXTRAL),
    ("replicate=2,precision=bf16", ()),
    ("tp=2,recompute=selective", ("--model", "bloom")),
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

    def write(graph: Any) -> None:
        with graphs.open("a", encoding="ascii") as file:
            file.write(f"{os.getpid()} {sum(node.op.startswith('call') for node in graph.nodes)}\n")

    return functools.partial(traced_graphs.install, write, whole=whole)


def sent(run: Path) -> Counter[tuple[str, str]]:
    """Returns the bytes that a run's steps have booked by axis and operation, but for what all ranks agree on.

    That vector counts experts' tokens too, which compiled layers don't.
    """
    total: Counter[tuple[str, str]] = Counter()
    for line in rows(run):
        for row in line.get("comm", ()):
            if row["axis"] != "world":
                total[row["axis"], row["op"]] += row["bytes"]
    return total


def step_bytes(run: Path, axis: str) -> int:
    """Returns the bytes that a step has booked on an axis, the same in each step."""
    booked = [line["comm"] for line in rows(run) if "comm" in line]
    (total,) = {sum(row["bytes"] for row in step if row["axis"] == axis) for step in booked}
    return int(total)


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    warm_compiler()


@pytest.mark.parametrize(
    ("layout", "more"),
    cases(LAYOUTS, (16, 22), extended=(1, 2, 4, 5, 18, 19, 20, 21, 28, 30)),
    ids=["-".join((layout, *more[1:2])) for layout, more in LAYOUTS],
)
def test_compiled_layers_train_as_plain_ones(tmp_path: Path, layout: str, more: tuple[str, ...]) -> None:
    write_corpus(tmp_path / "corpus.txt", 60)
    rest = ("--model", "llama", *SIZES, *more, "--checkpoint.every", "0", "--evaluation.every", "2")
    curves, graphs = [], tmp_path / "graphs"
    layout, tolerance = (layout, 1e-4) if "precision" in layout else (f"{layout},precision=float64", 1e-9)
    is_whole = "mixtral" not in more
    devices = 4 if "cp=2,tp=2" in layout else 2
    for name, written in (("plain", layout), ("compiled", f"{layout},compile=true")):
        argv = words(tmp_path, name, *rest, layout=written, devices=devices)
        status, text = call(argv, tmp_path / "log", before=traced(graphs, is_whole))
        assert status == 0, text
        assert "recompile_limit" not in text, text
        curves.append(curve(tmp_path / name))
    plain, compiled = curves
    assert sorted(plain) == sorted(compiled) == [1, 2, 3, 4]
    for step in plain:
        assert compiled[step] == pytest.approx(plain[step], rel=tolerance)
    # A compiler that repeated or dropped a collective would be found in its bytes; with recompute those of tp and cp
    # lie beside the plan's: of several graphs full repeats the last sum too, selective keeps what came between.
    booked = {name: sent(tmp_path / name) for name in ("plain", "compiled")}
    axes = [axis for axis in ("tp", "cp") if f"{axis}=2" in layout]
    if axes and "recompute" in layout:
        for name in booked:
            planned = json.loads((tmp_path / name / "plan.json").read_text())["prediction"]["traffic"]
            assert [planned[axis] for axis in axes] == [step_bytes(tmp_path / name, axis) for axis in axes]
    else:
        assert booked["compiled"] == booked["plain"]
    graphs_of_rank = Counter(line.split()[0] for line in graphs.read_text().splitlines())
    assert len(graphs_of_rank) == devices, "a rank compiled nothing"
    # Under cp the first layer takes a rank's tokens, so that it is another one than those after it.
    most = GRAPHS * (1 if is_whole else 8) * (2 if ":" in layout else 1) * (2 if "cp=" in layout else 1)
    assert max(graphs_of_rank.values()) <= most, graphs.read_text()
