"""Prints the decisions on a layer's weights and the evidence for each as lines of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.cli.inspect_output import abbreviate_names

WIDTH = 118
"""Characters of a line."""


def explanation_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yields the printed lines of the explanations of an `InspectResult` in its JSON form."""
    for explanation in result["explanations"]:
        yield f"{explanation['module']} ({explanation['type']}), read off {explanation['read_off']}"
        if len(explanation["alike"]) > 1:
            yield f"layers of one kind share the evidence: {abbreviate_names(explanation['alike'])}"
        yield ""
        yield f"weights under tp={explanation['degree']}"
        for weight in explanation["weights"]:
            yield from _weight_lines(weight)
        if explanation["sequence"]:
            yield ""
            yield from _wrapped(f"sequence=true {explanation['sequence']}", "")
        if explanation["pipeline"]:
            yield ""
            yield "cuts between stages (pp)"
            for cut in explanation["pipeline"]:
                yield from _cut_lines(cut)
        if explanation["recompute"]:
            yield ""
            yield "recompute"
            for fact in explanation["recompute"]:
                yield from _wrapped(fact)
        for layout in explanation["stages"]:
            yield ""
            stage = f"stage {layout['stage']} of {layout['stages']}" if layout["stages"] > 1 else "all layers on a rank"
            yield f"{layout['layout']}: {stage}, recompute {layout['recomputes']}"


def _weight_lines(weight: Mapping[str, Any]) -> Iterator[str]:
    """Yields a weight's decision, its evidence and what keeps it whole."""
    shape = _shape_text(weight["shape"])
    if weight["dim"] is None:
        decision = f"{weight['split']}, whole on every rank"
    else:
        local_shapes = [_shape_text(local) for local in dict.fromkeys(map(tuple, weight["local_shapes"]))]
        decision = (
            f"{weight['split']} split, dim {weight['dim']} by {weight['units']}: {' or '.join(local_shapes)} a rank"
        )
    yield f"  {weight['name']} {shape}: {decision}"
    if weight["prevents"]:
        yield from _wrapped(f"rule: {weight['prevents']}")
    for fact in weight["evidence"]:
        yield from _wrapped(fact)
    if weight["expert_axis"]:
        yield from _wrapped(f"ep: {weight['expert_axis']}")


def _cut_lines(cut: Mapping[str, Any]) -> Iterator[str]:
    """Yields one boundary: what crosses it, or what prevents it."""
    yield from _wrapped(f"{cut['where']}: {'possible' if cut['possible'] else 'no cut: ' + cut['reason']}", "  ")
    if cut["possible"]:
        for tensor in cut["tensors"]:
            yield from _wrapped(f"crosses: {tensor}")
    for fact in cut["evidence"]:
        yield from _wrapped(fact)


def _wrapped(text: str, indent: str = "      ") -> list[str]:
    """Returns a sentence as lines of the width."""
    # Names of modules stay in one piece, so that they can be copied and searched for.
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _shape_text(shape: Sequence[int]) -> str:
    """Returns ``(32, 16)``."""
    return f"({', '.join(map(str, shape))})"
