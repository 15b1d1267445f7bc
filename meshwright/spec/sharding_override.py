"""A user's rows over the sharding table: which weights of the layers stay whole, whatever inference found.

A row is a glob on the full name of a weight and what becomes of it: ``whole``, ``columns`` (its output is split) or
``rows`` (its input is split). A group is the smallest thing that can be split and still compute the same, so a row that
keeps one weight whole keeps its group whole; ``columns`` and ``rows`` state what is expected and refuse another table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from meshwright.errors import ConfigError, nearest
from meshwright.spec.sharding_table import LayerRows, ShardingGroup, ShardingTable

KINDS = ("whole", "columns", "rows")
"""What a row can say of a weight."""
REASON = "a row of the config keeps it whole"


def overridden(table: ShardingTable, rows: Mapping[str, str], names: Iterable[str]) -> ShardingTable:
    """Returns the table under a user's rows.

    Args:
        table: as it was read.
        rows: glob on weight names to one of `KINDS`; ``model.layers.*.mlp.down_proj.weight = "whole"``. A name without
            its last part, such as ``*.mlp.down_proj``, means the module's weight. Where several match, all must agree.
        names: of every weight of the model.

    Raises:
        ConfigError: for an unknown kind, a row that matches nothing, rows that contradict each other or within a group,
            and a split that the table hasn't; each with what would work.
    """
    wanted = _wanted(rows, list(names))
    layers = {name: _layer(name, found, wanted) for name, found in table.layers.items()}
    kept = _vocabulary(table, wanted)
    inside = {weight for name, found in table.layers.items() for weight in wanted if weight.startswith(f"{name}.")}
    heads = {f"{module}.{part}" for module in table.vocabulary for part in ("weight", "bias")}
    for weight, (kind, glob) in wanted.items():
        if kind != "whole" and weight not in inside | heads:
            raise ConfigError(_refusal(glob, kind, weight, "outside of the layers only the vocabulary is split"))
    return dataclasses.replace(kept, layers=layers)


def _wanted(rows: Mapping[str, str], names: list[str]) -> dict[str, tuple[str, str]]:
    """(kind, glob) by weight."""
    wanted: dict[str, tuple[str, str]] = {}
    for glob, kind in rows.items():
        if kind not in KINDS:
            raise ConfigError(f"sharding: '{glob}' = '{kind}' is no kind of row{nearest(kind, KINDS)}")
        matched = [name for name in names if fnmatchcase(name, glob) or fnmatchcase(name, f"{glob}.weight")]
        if not matched:
            raise ConfigError(f"sharding: '{glob}' matches no weight of the model{nearest(glob, names)}")
        for name in matched:
            before = wanted.setdefault(name, (kind, glob))
            if before[0] != kind:
                both = f"'{before[0]}' by '{before[1]}' and '{kind}' by '{glob}'"
                raise ConfigError(f"sharding: {name} is {both}; narrow one of the two")
    return wanted


def _layer(layer: str, rows: LayerRows, wanted: Mapping[str, tuple[str, str]]) -> LayerRows:
    own = {name.removeprefix(f"{layer}."): row for name, row in wanted.items() if name.startswith(f"{layer}.")}
    if not own:
        return rows
    groups, refused, split, needs = [], dict(rows.refused), set[str](), ""
    for group in rows.groups:
        roles = dict(_roles(group))
        asked = {name: own[name] for name in roles if name in own}
        split |= roles.keys()
        for name, (kind, glob) in asked.items():
            if kind not in ("whole", *roles[name]):
                (role,) = roles[name]
                why = f"the table splits it by {role}"
                raise ConfigError(_refusal(glob, kind, f"{layer}.{name}", why, f"'{role}' or 'whole'"))
        kinds = {kind for kind, _ in asked.values()}
        if "whole" not in kinds:
            groups.append(group)
            continue
        held = next((name for name, (kind, _) in asked.items() if kind != "whole"), None)
        if held is not None:
            whole = next(name for name, (kind, _) in asked.items() if kind == "whole")
            raise ConfigError(
                f"sharding: {layer}.{held} is '{asked[held][0]}' but {layer}.{whole} 'whole', and one can't be split "
                f"without the other; write 'whole' for both: {', '.join(sorted(roles))}"
            )
        refused |= dict.fromkeys((*group.column_linears, group.row_linear), REASON)
        if group.heads:
            needs = f"{group.row_linear} isn't split and needs all tokens: {REASON}"
    for name, (kind, glob) in own.items():
        if kind != "whole" and name not in split:
            known = (text for part, text in rows.refused.items() if name.startswith(f"{part}."))
            why = next(known, "it is in no group")
            raise ConfigError(_refusal(glob, kind, f"{layer}.{name}", f"the table keeps it whole: {why}"))
    kept = dataclasses.replace(rows, groups=tuple(groups), refused=refused)
    return dataclasses.replace(kept, sequence=False, sequence_refused=needs) if needs and rows.sequence else kept


def _roles(group: ShardingGroup) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name, kinds that are true of it) of every parameter that a group splits."""
    for split in group.splits:
        path = split.name.rpartition(".")[0]
        if not group.column_linears:  # experts: one module, both ways
            yield split.name, ("columns", "rows")
        else:
            yield split.name, ("rows",) if path == group.row_linear else ("columns",)


def _vocabulary(table: ShardingTable, wanted: Mapping[str, tuple[str, str]]) -> ShardingTable:
    """Embedding and head are split together or not at all, since they may be one weight."""
    names = {f"{module}.{part}": module for module in table.vocabulary for part in ("weight", "bias")}
    asked = {module: wanted[name] for name, module in names.items() if name in wanted}
    for module, (kind, glob) in asked.items():
        if kind == "rows":
            why = "its dim 0, the vocabulary, is split"
            raise ConfigError(_refusal(glob, kind, module, why, "'columns' or 'whole'"))
    kinds = {kind for kind, _ in asked.values()}
    if "whole" not in kinds:
        return table
    if len(kinds) > 1:
        raise ConfigError(f"sharding: {' and '.join(asked)} hold the vocabulary together; write the same for both")
    refused = dict(table.refused) | dict.fromkeys(table.vocabulary, REASON)
    return dataclasses.replace(table, vocabulary=(), headless=True, refused=refused)


def _refusal(glob: str, kind: str, weight: str, why: str, works: str = "'whole', or leave the row out") -> str:
    return f"sharding: '{glob}' = '{kind}' asks for a split of {weight}, but {why}; what works: {works}"
