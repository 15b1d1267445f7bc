"""A user's rows keep weights whole, and are refused where they match nothing, contradict, or ask what can't be."""

from __future__ import annotations

import pytest

from meshwright.errors import ConfigError
from meshwright.spec.sharding_override import REASON, apply_overrides
from meshwright.spec.sharding_table import Block, LayerSharding, ParameterSplit, ShardingGroup, ShardingTable


def group(module: str, columns: tuple[str, ...], row: str, heads: bool) -> ShardingGroup:
    block = (Block(start=0, size=2, count=4),)
    splits = [
        ParameterSplit(name=f"{name}.{part}", dim=0, blocks=block) for name in columns for part in ("weight", "bias")
    ]
    splits.append(ParameterSplit(name=f"{row}.weight", dim=1, blocks=block))
    return ShardingGroup(
        module=module,
        column_linears=columns,
        column_inputs=columns,
        replicated_inputs=(),
        row_linear=row,
        units=4,
        splits=tuple(splits),
        heads=heads,
    )


ATTENTION = group("attn", ("attn.q", "attn.k"), "attn.o", True)
CHANNELS = group("mlp", ("mlp.up",), "mlp.down", False)
EXPERTS = ShardingGroup(
    module="mlp", column_linears=(), column_inputs=("mlp.experts",), replicated_inputs=(), row_linear="mlp.experts",
    units=4,
    splits=(ParameterSplit(name="mlp.experts.up", dim=1, blocks=(Block(start=0, size=1, count=4),)),),
)  # fmt: skip
ROWS = LayerSharding(groups=(ATTENTION, CHANNELS), refused={"gate": "its output meets everything"})
TABLE = ShardingTable(
    layers={"h.0": ROWS, "h.1": ROWS, "h.2": LayerSharding(groups=(EXPERTS,))},
    vocabulary=("embed", "head"),
    vocab=32,
)
NAMES = [
    "embed.weight", "norm.weight", "head.weight", "h.2.mlp.experts.up",
    *(f"h.{at}.{split.name}" for at in range(2) for found in ROWS.groups for split in found.splits),
    *(f"h.{at}.gate.weight" for at in range(2)),
]  # fmt: skip


def test_a_row_keeps_its_group_whole_where_it_matches() -> None:
    found = apply_overrides(TABLE, {"h.0.mlp.*": "whole"}, NAMES)
    assert found.layers["h.0"].groups == (ATTENTION,) and found.layers["h.1"] is ROWS
    assert found.layers["h.0"].refused == ROWS.refused | {"mlp.up": REASON, "mlp.down": REASON}
    assert found.layers["h.0"].sequence and found.vocabulary == TABLE.vocabulary
    one = apply_overrides(TABLE, {"h.*.mlp.down": "whole"}, NAMES)
    assert all(one.layers[name].groups == (ATTENTION,) for name in ("h.0", "h.1"))
    assert sum(1 for _ in found.splits(2)) == sum(1 for _ in TABLE.splits(2)) - len(CHANNELS.splits)


def test_attention_that_stays_whole_needs_all_tokens() -> None:
    rows = apply_overrides(TABLE, {"h.1.attn.o": "whole"}, NAMES).layers["h.1"]
    assert rows.groups == (CHANNELS,) and not rows.sequence and "attn.o" in rows.sequence_refused


def test_the_vocabulary_stays_whole_as_one() -> None:
    found = apply_overrides(TABLE, {"embed": "whole"}, NAMES)
    assert found.vocabulary == () and found.headless and set(found.refused) == {"embed", "head"}
    assert found.layers == TABLE.layers


def test_rows_that_say_what_is_so_change_nothing() -> None:
    rows = {"h.*.attn.q.*": "columns", "*.down": "rows", "head": "columns", "norm": "whole", "*.gate": "whole"}
    assert apply_overrides(TABLE, rows | {"*.experts.*": "rows"}, NAMES) == TABLE
    assert apply_overrides(TABLE, {"*.experts.up": "columns"}, NAMES) == apply_overrides(TABLE, {}, NAMES) == TABLE


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ({"h.*.mlp.up": "column"}, ["'column'", "did you mean 'columns'"]),
        ({"h.0.mlp.upp.weight": "whole"}, ["matches no weight", "did you mean 'h.0.mlp.up.weight'"]),
        ({"h.0.mlp.*": "whole", "h.*.mlp.down": "rows"}, ["h.0.mlp.down.weight", "'whole'", "'rows'", "narrow"]),
        ({"h.0.attn.q": "columns", "h.0.attn.o": "whole"}, ["h.0.attn.q", "without the other", "attn.k.weight"]),
        ({"h.*.mlp.down": "columns"}, ["h.0.mlp.down.weight", "splits it by rows", "'rows' or 'whole'"]),
        ({"h.*.gate": "columns"}, ["h.0.gate.weight", "its output meets everything", "leave the row out"]),
        ({"norm": "columns"}, ["norm.weight", "only the vocabulary"]),
        ({"head": "rows"}, ["vocabulary", "'columns' or 'whole'"]),
        ({"head": "whole", "embed": "columns"}, ["embed and head", "same for both"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_cure(rows: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        apply_overrides(TABLE, rows, NAMES)
    assert all(part in str(refused.value) for part in parts), str(refused.value)
