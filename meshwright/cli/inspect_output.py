"""An inspected model in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.units import format_bytes, format_count


def stack_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines that show what a call of a module goes through under each layout, outermost first."""
    for stack in result["stacks"]:
        yield f"rank {stack['rank']} of {stack['layout']}, outermost first"
        for module in stack["modules"]:
            yield ""
            yield f"{module['module'] or 'the model'} ({module['type']})"
            yield from (f"  {line}" for line in module["lines"])
        yield ""


def told(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines that say what `cli.inspect.inspect` found."""
    shape = found["shape"]
    yield f"{found['model']}: {format_count(shape['parameters'])} parameters, {shape['layers']} layers"
    yield from _structure(found["structure"], shape)
    yield from _experts(found["experts"], shape)
    yield from _sharding(found["sharding"])
    yield from _pipeline(found["pipeline"])
    for layout in found["layouts"]:
        yield from _layout(layout)


def _structure(structure: Mapping[str, Any], shape: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield "structure"
    sizes = f"{structure['vocab']} x {structure['width']}"
    yield _row("embedding", f"{structure['embedding']} ({sizes})" if structure["embedding"] else "none found")
    if structure["position_embedding"]:
        yield _row("positions", f"{structure['position_embedding']} ({structure['positions']} learned)")
    for kind in structure["layers"]:
        each = f"{format_count(kind['parameters'])} parameters each"
        yield _row("layers", f"{len(kind['layers'])} x {kind['type']}: {runs(kind['layers'])}, {each}")
    if shape["heads"]:
        yield _row("heads", f"{shape['heads']} of {shape['head_size']}")
    for part in ("final_norm", "head"):
        yield _row(part.replace("_", " "), structure[part] or "none found")
    for names in structure["ties"]:
        yield _row("tied", " = ".join(names))
    if structure["context"]:
        yield _row("context", f"{structure['context']} tokens")


def _experts(experts: Sequence[Mapping[str, Any]], shape: Mapping[str, Any]) -> Iterator[str]:
    if experts:
        names = runs([rows["module"] for rows in experts])
        counts = ", ".join(str(count) for count in sorted({rows["experts"] for rows in experts}))
        active = f", {shape['active_experts']} a token" if shape["active_experts"] else ""
        yield _row("experts", f"{counts} in each of {len(experts)} modules{active}: {names}; ep can spread them")


def _sharding(sharding: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield "tensor parallel (tp): columns -> row, units that can't be divided further"
    if "refused" in sharding:
        yield _row("refused", sharding["refused"])
        return
    yield _row("vocabulary", ", ".join(sharding["vocabulary"]) or "stays whole")
    yield from (_row("whole", f"{name or 'all'}: {why}") for name, why in sharding["whole"].items())
    for kind in sharding["kinds"]:
        yield f"  {runs(kind['layers'])}"
        for group in kind["groups"]:
            what = "heads" if group["heads"] else "channels"
            columns = " + ".join(group["column_linears"]) or "experts"
            entries = f", entered by {' + '.join(group['replicated_inputs'])}" if group["replicated_inputs"] else ""
            shared = f", shared: {' + '.join(group['shared'])}" if group["shared"] else ""
            yield f"    {columns} -> {group['row_linear'] or 'itself'}: {group['units']} {what}{entries}{shared}"
        for why, names in _by_reason(kind["whole"]).items():
            yield f"    whole: {', '.join(names)}: {why}"
        yield f"    sequence=true {'works' if kind['sequence'] else 'is refused: ' + kind['sequence_refused']}"


def _pipeline(pipeline: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield "pipeline (pp)"
    if "refused" in pipeline:
        yield _row("refused", pipeline["refused"])
        return
    where = "most" if pipeline["blocked"] else "any"
    yield _row("stages", f"{pipeline['stages']} at most, cut between {where} two of {pipeline['layers']} layers")
    counts = " or ".join(str(count) for count in pipeline["payload"]) or "0"
    yield _row("payload", f"{counts} tensor{'' if counts == '1' else 's'} a cut")
    for why, places in _by_reason(pipeline["blocked"]).items():
        yield _row("no cut", f"in front of layer {', '.join(places)}: {why}")


def _layout(layout: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield f"{layout['layout']}: bytes of state of a rank, of {layout['ranks']}"
    rows = Counter(tuple(position["memory"].items()) for position in layout["positions"])
    yield f"  {'place':<24}" + "".join(f"{part:>13}" for part in (*layout["fullest"]["memory"], "together"))
    for memory in rows:
        places = [row["place"] for row in layout["positions"] if tuple(row["memory"].items()) == memory]
        sizes = [size for _, size in memory]
        yield f"  {_places(places):<24}" + "".join(f"{format_bytes(size):>13}" for size in (*sizes, sum(sizes)))
    for part, text in layout["formula"].items():
        yield _row(part, text)
    yield _row("ZeRO's paper", f"{format_bytes(layout['zero_paper_bytes'])} for the fullest rank's share")


def _places(places: Sequence[Mapping[str, int]]) -> str:
    """``pp 0, tp 0-3`` for places that hold as much."""
    if not places[0]:
        return "every rank"
    told = []
    for axis in places[0]:
        indices = sorted({place[axis] for place in places})
        whole = len(indices) > 1 and indices == list(range(indices[0], indices[-1] + 1))
        told.append(f"{axis} {indices[0]}-{indices[-1]}" if whole else f"{axis} {','.join(map(str, indices))}")
    return ", ".join(told)


def runs(names: Sequence[str]) -> str:
    """Returns ``h.0-11`` for numbered names, and ``h.0-2, h.5`` where numbers are left out."""
    found: list[list[Any]] = []
    for name in names:
        head, number, tail = _numbered(name)
        last = found[-1] if found else None
        if last and number is not None and last[0] == (head, tail) and last[2] + 1 == number:
            last[2] = number
        else:
            found.append([(head, tail), number, number])
    texts = [
        head + ("" if first is None else str(first) if first == last else f"{first}-{last}") + tail
        for (head, tail), first, last in found
    ]
    return ", ".join(texts)


def _numbered(name: str) -> tuple[str, int | None, str]:
    """The name before, of and after its first number between dots."""
    match = re.search(r"(?:^|(?<=\.))\d+(?=\.|$)", name)
    if match is None:
        return name, None, ""
    return name[: match.start()], int(match[0]), name[match.end() :]


def _by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, why in reasons.items():
        found.setdefault(why, []).append(name or "all of it")
    return found


def _row(name: str, text: str) -> str:
    return f"  {name:<14}{text}"
