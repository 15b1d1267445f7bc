"""Prints an inspected model as lines of text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.json_types import JsonObject
from meshwright.units import format_bytes, format_count


def stack_lines(result: JsonObject) -> Iterator[str]:
    """Yields the lines that show what a call of a module goes through under each layout, outermost first."""
    for stack in result["stacks"]:
        yield f"rank {stack['rank']} of {stack['layout']}, outermost first"
        for module in stack["modules"]:
            yield ""
            yield f"{module['module'] or 'the model'} ({module['type']})"
            yield from (f"  {line}" for line in module["lines"])
        yield ""


def inspection_lines(inspected: JsonObject) -> Iterator[str]:
    """Yields the printed lines of an `InspectResult` in its JSON form."""
    shape = inspected["shape"]
    yield f"{inspected['model']}: {format_count(shape['parameters'])} parameters, {shape['layers']} layers"
    yield from _structure_lines(inspected["structure"], shape)
    yield from _expert_lines(inspected["experts"], shape)
    yield from _sharding_lines(inspected["sharding"])
    yield from _pipeline_lines(inspected["pipeline"])
    for layout in inspected["layouts"]:
        yield from _layout_lines(layout)


def _structure_lines(structure: JsonObject, shape: JsonObject) -> Iterator[str]:
    yield ""
    yield "structure"
    sizes = f"{structure['vocab']} x {structure['width']}"
    yield _row("embedding", f"{structure['embedding']} ({sizes})" if structure["embedding"] else "none found")
    if structure["position_embedding"]:
        yield _row("positions", f"{structure['position_embedding']} ({structure['positions']} learned)")
    for kind in structure["layers"]:
        each = f"{format_count(kind['parameters'])} parameters each"
        yield _row("layers", f"{len(kind['layers'])} x {kind['type']}: {abbreviate_names(kind['layers'])}, {each}")
    if shape["heads"]:
        yield _row("heads", f"{shape['heads']} of {shape['head_size']}")
    for role in ("final_norm", "head"):
        yield _row(role.replace("_", " "), structure[role] or "none found")
    for names in structure["ties"]:
        yield _row("tied", " = ".join(names))
    if structure["context"]:
        yield _row("context", f"{structure['context']} tokens")


def _expert_lines(experts: Sequence[JsonObject], shape: JsonObject) -> Iterator[str]:
    if experts:
        names = abbreviate_names([rows["module"] for rows in experts])
        counts = ", ".join(str(count) for count in sorted({rows["experts"] for rows in experts}))
        active = f", {shape['active_experts']} a token" if shape["active_experts"] else ""
        yield _row("experts", f"{counts} in each of {len(experts)} modules{active}: {names}; ep can spread them")


def _sharding_lines(sharding: JsonObject) -> Iterator[str]:
    yield ""
    yield "tensor parallel (tp): columns -> row, units that can't be divided further"
    if "refused" in sharding:
        yield _row("refused", sharding["refused"])
        return
    yield _row("vocabulary", ", ".join(sharding["vocabulary"]) or "stays whole")
    yield from (_row("whole", f"{name or 'all'}: {reason}") for name, reason in sharding["whole"].items())
    for kind in sharding["kinds"]:
        yield f"  {abbreviate_names(kind['layers'])}"
        for group in kind["groups"]:
            unit_name = "heads" if group["heads"] else "channels"
            columns = " + ".join(group["column_linears"]) or "experts"
            inputs = f", entered by {' + '.join(group['replicated_inputs'])}" if group["replicated_inputs"] else ""
            shared = f", shared: {' + '.join(group['shared'])}" if group["shared"] else ""
            yield f"    {columns} -> {group['row_linear'] or 'itself'}: {group['units']} {unit_name}{inputs}{shared}"
        for reason, names in _names_by_reason(kind["whole"]).items():
            yield f"    whole: {', '.join(names)}: {reason}"
        yield f"    sequence=true {'works' if kind['sequence'] else 'is refused: ' + kind['sequence_refused']}"


def _pipeline_lines(pipeline: JsonObject) -> Iterator[str]:
    yield ""
    yield "pipeline (pp)"
    if "refused" in pipeline:
        yield _row("refused", pipeline["refused"])
        return
    boundaries = "any" if pipeline["stages"] == pipeline["layers"] else "most"
    yield _row("stages", f"{pipeline['stages']} at most, cut between {boundaries} two of {pipeline['layers']} layers")
    ends = [
        end
        for end, boundary in (("embedding", 0), ("head", pipeline["layers"]))
        if str(boundary) not in pipeline["blocked"]
    ]
    if ends:
        yield _row("no layer", f"the stage with the {' and the one with the '.join(ends)} may have none")
    counts = " or ".join(str(count) for count in pipeline["payload"]) or "0"
    yield _row("payload", f"{counts} tensor{'' if counts == '1' else 's'} a cut")
    for reason, layer_indices in _names_by_reason(pipeline["blocked"]).items():
        behind = str(pipeline["layers"])
        texts = [
            "behind the last layer" if index == behind else f"in front of layer {index}" for index in layer_indices
        ]
        yield _row("no cut", f"{', '.join(texts)}: {reason}")


def _layout_lines(layout: JsonObject) -> Iterator[str]:
    yield ""
    yield f"{layout['layout']}: bytes of state of a rank, of {layout['ranks']}"
    # Ranks with equal bytes share a line: a mesh of thousands has a handful of kinds.
    rows = Counter(tuple(position["memory"].items()) for position in layout["positions"])
    yield f"  {'place':<24}" + "".join(f"{category:>13}" for category in (*layout["fullest"]["memory"], "together"))
    for memory in rows:
        positions = [row["place"] for row in layout["positions"] if tuple(row["memory"].items()) == memory]
        sizes = [size for _, size in memory]
        yield f"  {_position_label(positions):<24}" + "".join(
            f"{format_bytes(size):>13}" for size in (*sizes, sum(sizes))
        )
    for category, text in layout["formula"].items():
        yield _row(category, text)
    yield _row("ZeRO's paper", f"{format_bytes(layout['zero_paper_bytes'])} for the fullest rank's share")


def _position_label(positions: Sequence[Mapping[str, int]]) -> str:
    """Returns ``pp 0, tp 0-3`` for mesh positions whose ranks hold equal bytes."""
    if not positions[0]:
        return "every rank"
    axis_ranges = []
    for axis in positions[0]:
        indices = sorted({position[axis] for position in positions})
        contiguous = len(indices) > 1 and indices == list(range(indices[0], indices[-1] + 1))
        axis_ranges.append(
            f"{axis} {indices[0]}-{indices[-1]}" if contiguous else f"{axis} {','.join(map(str, indices))}"
        )
    return ", ".join(axis_ranges)


def abbreviate_names(names: Sequence[str]) -> str:
    """Returns ``h.0-11`` for numbered names, and ``h.0-2, h.5`` where numbers are left out."""
    number_runs: list[list[Any]] = []
    # A run is ((text before, text after the number), first number, last number); names come in the model's order.
    for name in names:
        head, number, tail = _split_at_number(name)
        last_number = number_runs[-1] if number_runs else None
        if last_number and number is not None and last_number[0] == (head, tail) and last_number[2] + 1 == number:
            last_number[2] = number
        else:
            number_runs.append([(head, tail), number, number])
    texts = []
    for (head, tail), first_number, last_number in number_runs:
        numbers = dict.fromkeys(number for number in (first_number, last_number) if number is not None)
        texts.append(f"{head}{'-'.join(map(str, numbers))}{tail}")
    return ", ".join(texts)


def _split_at_number(name: str) -> tuple[str, int | None, str]:
    """Returns a name's text before its first number between dots, the number, and the text after it."""
    match = re.search(r"(?:^|(?<=\.))\d+(?=\.|$)", name)
    if match is None:
        return name, None, ""
    return name[: match.start()], int(match[0]), name[match.end() :]


def _names_by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    names_of: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names_of.setdefault(reason, []).append(name or "all of it")
    return names_of


def _row(name: str, text: str) -> str:
    return f"  {name:<14}{text}"
