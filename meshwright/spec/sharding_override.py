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
from meshwright.spec.sharding_table import LayerSharding, ShardingGroup, ShardingTable

KINDS = ("whole", "columns", "rows")
"""What a row can say of a weight."""
REASON = "a row of the config keeps it whole"


def apply_overrides(table: ShardingTable, rows: Mapping[str, str], names: Iterable[str]) -> ShardingTable:
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
    row_of_weight = _rows_by_weight(rows, list(names))
    layers = {name: _overridden_layer(name, layer_rows, row_of_weight) for name, layer_rows in table.layers.items()}
    with_vocabulary = _overridden_vocabulary(table, row_of_weight)
    layer_weights = {
        weight for name, layer_rows in table.layers.items() for weight in row_of_weight if weight.startswith(f"{name}.")
    }
    vocabulary_weights = {f"{module}.{attribute}" for module in table.vocabulary for attribute in ("weight", "bias")}
    for weight, (kind, glob) in row_of_weight.items():
        if kind != "whole" and weight not in layer_weights | vocabulary_weights:
            raise ConfigError(_refusal(glob, kind, weight, "outside of the layers only the vocabulary is split"))
    return dataclasses.replace(with_vocabulary, layers=layers)


def _rows_by_weight(rows: Mapping[str, str], names: list[str]) -> dict[str, tuple[str, str]]:
    """Returns (kind, glob) by weight."""
    row_of_weight: dict[str, tuple[str, str]] = {}
    for glob, kind in rows.items():
        if kind not in KINDS:
            raise ConfigError(f"sharding: '{glob}' = '{kind}' is no kind of row{nearest(kind, KINDS)}")
        # A module's name stands for its weight.
        matched = [name for name in names if fnmatchcase(name, glob) or fnmatchcase(name, f"{glob}.weight")]
        if not matched:
            raise ConfigError(f"sharding: '{glob}' matches no weight of the model{nearest(glob, names)}")
        for name in matched:
            earlier = row_of_weight.setdefault(name, (kind, glob))
            if earlier[0] != kind:
                contradiction = f"'{earlier[0]}' by '{earlier[1]}' and '{kind}' by '{glob}'"
                raise ConfigError(f"sharding: {name} is {contradiction}; narrow one of the two")
    return row_of_weight


def _overridden_layer(layer: str, rows: LayerSharding, row_of_weight: Mapping[str, tuple[str, str]]) -> LayerSharding:
    rows_here = {
        name.removeprefix(f"{layer}."): row for name, row in row_of_weight.items() if name.startswith(f"{layer}.")
    }
    if not rows_here:
        return rows
    groups, refused, split, sequence_refusal = [], dict(rows.refused), set[str](), ""
    for group in rows.groups:
        roles = dict(_roles(group))
        group_rows = {name: rows_here[name] for name in roles if name in rows_here}
        split |= roles.keys()
        for name, (kind, glob) in group_rows.items():
            if kind not in ("whole", *roles[name]):
                # Experts have both roles and allow every kind, so a refused weight has one.
                (role,) = roles[name]
                reason = f"the table splits it by {role}"
                raise ConfigError(_refusal(glob, kind, f"{layer}.{name}", reason, f"'{role}' or 'whole'"))
        kinds = {kind for kind, _ in group_rows.values()}
        # A group is split together or not at all: one row keeps all of it whole.
        if "whole" not in kinds:
            groups.append(group)
            continue
        split_name = next((name for name, (kind, _) in group_rows.items() if kind != "whole"), None)
        if split_name is not None:
            whole_name = next(name for name, (kind, _) in group_rows.items() if kind == "whole")
            split_kind = group_rows[split_name][0]
            raise ConfigError(
                f"sharding: {layer}.{split_name} is '{split_kind}' but {layer}.{whole_name} 'whole', and one "
                f"can't be split without the other; write 'whole' for both: {', '.join(sorted(roles))}"
            )
        refused |= dict.fromkeys((*group.column_linears, *group.row_linears), REASON)
        if group.heads:
            # Whole attention needs all tokens of a row on every rank.
            sequence_refusal = f"{group.row_linear} isn't split and needs all tokens: {REASON}"
    for name, (kind, glob) in rows_here.items():
        if kind != "whole" and name not in split:
            reasons = (reason for module, reason in rows.refused.items() if name.startswith(f"{module}."))
            reason = next(reasons, "it is in no group")
            raise ConfigError(_refusal(glob, kind, f"{layer}.{name}", f"the table keeps it whole: {reason}"))
    overridden_rows = dataclasses.replace(rows, groups=tuple(groups), refused=refused)
    return (
        dataclasses.replace(overridden_rows, sequence=False, sequence_refused=sequence_refusal)
        if sequence_refusal and rows.sequence
        else overridden_rows
    )


def _roles(group: ShardingGroup) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields (name, allowed kinds) of every parameter that a group splits."""
    for split in group.splits:
        path = split.name.rpartition(".")[0]
        if not group.column_linears:  # experts: one module, both ways
            yield split.name, ("columns", "rows")
        else:
            yield split.name, ("rows",) if path in group.row_linears else ("columns",)


def _overridden_vocabulary(table: ShardingTable, row_of_weight: Mapping[str, tuple[str, str]]) -> ShardingTable:
    """Applies the rows to the vocabulary; embedding and head are split together or not at all: they may be tied."""
    names = {f"{module}.{attribute}": module for module in table.vocabulary for attribute in ("weight", "bias")}
    row_of_module = {module: row_of_weight[name] for name, module in names.items() if name in row_of_weight}
    for module, (kind, glob) in row_of_module.items():
        if kind == "rows":
            reason = "its dim 0, the vocabulary, is split"
            raise ConfigError(_refusal(glob, kind, module, reason, "'columns' or 'whole'"))
    kinds = {kind for kind, _ in row_of_module.values()}
    if "whole" not in kinds:
        return table
    if len(kinds) > 1:
        raise ConfigError(
            f"sharding: {' and '.join(row_of_module)} hold the vocabulary together; write the same for both"
        )
    refused = dict(table.refused) | dict.fromkeys(table.vocabulary, REASON)
    return dataclasses.replace(table, vocabulary=(), headless=True, refused=refused)


def _refusal(glob: str, kind: str, weight: str, reason: str, cure: str = "'whole', or leave the row out") -> str:
    return f"sharding: '{glob}' = '{kind}' asks for a split of {weight}, but {reason}; what works: {cure}"
