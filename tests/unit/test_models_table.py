"""The sharding table's arithmetic: blocks and units, and shares of heads that don't divide."""

import dataclasses

import pytest
import torch
from torch import nn

from meshwright.models.analysis import table as tables
from meshwright.models.analysis.evidence import ModelTrial, SplitTrial
from meshwright.models.analysis.rescale import rescale_group
from meshwright.models.analysis.units import blocks_of, finest_units, parameter_blocks, unit_masks
from meshwright.parallel.context import refusal
from meshwright.spec.sharding_table import (
    Block,
    Cutting,
    CuttingKind,
    LayerSharding,
    ParameterSplit,
    ShardingGroup,
    ShardingTable,
)

torch.set_num_threads(1)


def group_of(units: int, *counts: int) -> ShardingGroup:
    splits = tuple(
        ParameterSplit(name=f"w{place}", dim=0, blocks=(Block(start=0, size=2, count=count),))
        for place, count in enumerate(counts)
    )
    return ShardingGroup(
        module="",
        column_linears=(),
        column_inputs=(),
        replicated_inputs=(),
        row_linear="w0",
        units=units,
        splits=splits,
    )


def test_blocks_come_back_from_their_masks():
    blocks = (Block(start=0, size=2, count=4), Block(start=8, size=3, count=2), Block(start=14, size=5, count=1))
    assert blocks_of(unit_masks(blocks, 4)) == blocks
    irregular = unit_masks(blocks, 4)
    irregular[0, 7] = True
    assert blocks_of(irregular) == ()
    assert blocks_of(torch.ones(4, 6, dtype=torch.bool)) is None


def test_a_kind_of_layer_that_does_not_fit_is_refused_and_the_others_stay(monkeypatch: pytest.MonkeyPatch):
    group = group_of(4, 4, 4)
    good, bad, plain = (LayerSharding(groups=groups) for groups in ((group,), (group,), ()))
    table = ShardingTable(layers={"a.0": good, "a.1": bad, "a.2": good, "a.3": plain})
    tried: list[set[str]] = []

    def rehearse(_: object, table: ShardingTable, ranks: int) -> SplitTrial:
        tried.append({name for name, rows in table.layers.items() if rows.groups})
        return SplitTrial(degree=ranks, failure="its logits are off by 2.0e-01" if table.layers["a.1"].groups else "")

    monkeypatch.setattr(tables, "rehearse_model", rehearse)
    clone = tables.Clone(module=nn.Module(), structure=None, vocab=7, full_size=True)  # type: ignore[arg-type]
    trials: list[ModelTrial] = []
    found = tables._keep_working_layers(clone, table, "all of it is off", trials)
    assert [trial.layers for trial in trials] == [("a.0", "a.2"), ("a.1",)]
    assert [bool(trial.trial.failure) for trial in trials] == [False, True]
    assert tried == [{"a.0", "a.2"}, {"a.0", "a.1", "a.2"}]
    assert [bool(rows.groups) for rows in found.layers.values()] == [True, False, True, False]
    assert "with a.1 split over 2 ranks its logits are off" in found.layers["a.1"].refused[""]
    assert found.layers["a.3"].refused == {"": "all of it is off"}
    assert "isn't the model: with a.1" in found.refused[""]


def test_the_finest_units_that_what_is_read_allows():
    heads = torch.block_diag(*[torch.ones(3, 3) for _ in range(4)]).bool()
    assert finest_units(12, [heads, torch.eye(12).bool()])[0] == 12
    assert finest_units(12, [heads, heads])[0] == 4
    assert finest_units(12, [torch.ones(12, 12, dtype=torch.bool)]) is None


def test_a_parameter_seen_by_runs_of_units_is_split_by_units():
    masks = [torch.zeros(3, 8, dtype=torch.bool) for _ in range(4)]
    for place, mask in enumerate(masks):
        mask[:, 2 * place : 2 * place + 2] = True
    assert parameter_blocks(masks, 8) == (1, (Block(start=0, size=1, count=8),))
    assert parameter_blocks([torch.ones(3, dtype=torch.bool)] * 4, 4) is None


@pytest.mark.parametrize(
    ("counts", "units", "degree", "shares"),
    [
        ((8, 2), 8, 4, ((0, 2), (2, 4), (4, 6), (6, 8))),
        ((8, 2), 8, 3, None),
        ((6,), 6, 4, ((0, 2), (2, 4), (4, 5), (5, 6))),
        ((3,), 3, 2, ((0, 2), (2, 3))),
        ((3,), 3, 4, None),
    ],
)
def test_shares_of_heads(counts, units, degree, shares):
    assert group_of(units, *counts).shares(degree) == shares


@pytest.mark.parametrize(
    ("key_heads", "degree", "possible"), [(8, 4, True), (2, 2, True), (2, 4, False), (4, 8, False), (6, 4, False)]
)
def test_a_norm_over_key_heads_needs_heads_of_its_own_on_every_rank(key_heads, degree, possible):
    blocks = (Block(start=0, size=3, count=key_heads),)
    norm = Cutting(kind=CuttingKind.GLOBAL_NORM, module="k_norm", dim=-1, blocks=blocks)
    group = dataclasses.replace(group_of(8, 8, key_heads), cuttings=(norm,))
    assert (group.shares(degree) is not None) == possible


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, ""),
        (
            {"inner_row_linears": ("mix",)},
            "mix sums over all heads, before w0 reads them",
        ),
        ({"kind": CuttingKind.GLOBAL_NORM, "module": "norm"}, "norm holds all heads at once"),
        ({"kind": CuttingKind.BUFFER, "module": "mix", "key": "slopes"}, "mix.slopes holds all heads at once"),
        (
            {"kind": CuttingKind.ARGUMENT, "module": "mix", "key": "bias"},
            "argument 'bias' of mix holds all heads at once",
        ),
    ],
)
def test_heads_are_exchanged_only_where_nothing_between_holds_them_all(more, why):
    group = dataclasses.replace(group_of(4, 4), heads=True)
    if "kind" in more:
        cutting = Cutting(dim=-1, blocks=(Block(start=0, size=1, count=4),), **more)
        group = dataclasses.replace(group, cuttings=(cutting,))
    else:
        group = dataclasses.replace(group, **more)
    found = refusal(LayerSharding(groups=(group,)), 2, 1)
    assert why in found and bool(found) == bool(why)
    assert not refusal(LayerSharding(groups=(dataclasses.replace(group, heads=False),)), 2, 1)


class Part(nn.Module):
    """Four heads; a norm over all of them, one slope for each, and a table as wide as the layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w0, self.w1 = (nn.Parameter(torch.zeros(4 * size)) for _ in range(2))
        self.norm = nn.LayerNorm(4 * size)
        self.register_buffer("slopes", torch.zeros(4))
        self.register_buffer("table", torch.zeros(3, 8 * size))


def test_what_a_narrow_layer_cuts_grows_with_it():
    heads, one_each = (Block(start=0, size=2, count=4),), (Block(start=0, size=1, count=4),)
    cuttings = (
        Cutting(kind=CuttingKind.GLOBAL_NORM, module="norm", dim=-1, blocks=heads),
        Cutting(kind=CuttingKind.BUFFER, module="", key="slopes", dim=0, blocks=one_each),
        Cutting(kind=CuttingKind.BUFFER, module="", key="table", dim=1, blocks=heads),
        Cutting(kind=CuttingKind.ARGUMENT, module="", key="1", dim=1, blocks=one_each),
        Cutting(kind=CuttingKind.WIDTH, module="", dim=-1, blocks=heads),
        Cutting(kind=CuttingKind.ARGUMENT, module="", key="2", dim=2, blocks=heads),
    )
    group = dataclasses.replace(group_of(4, 4, 4), heads=True, cuttings=cuttings)
    grown = rescale_group(group, Part(2), Part(6))
    assert grown is not None and grown.units == 4
    large = (Block(start=0, size=6, count=4),)
    assert [item.blocks for item in (*grown.splits, *grown.cuttings)] == [
        large, large, large, one_each, large, one_each, large, large
    ]  # fmt: skip
    odd = dataclasses.replace(cuttings[-1], blocks=(Block(start=0, size=4, count=2),))
    assert rescale_group(dataclasses.replace(group, cuttings=(odd,)), Part(2), Part(6)) is None


def test_channels_that_are_cut_become_more():
    channels = (Block(start=0, size=1, count=8),)
    splits = tuple(ParameterSplit(name=name, dim=0, blocks=channels) for name in ("w0", "w1"))
    cutting = Cutting(kind=CuttingKind.ARGUMENT, module="", key="1", dim=1, blocks=channels)
    group = dataclasses.replace(group_of(8, 8), splits=splits, cuttings=(cutting,))
    grown = rescale_group(group, Part(2), Part(6))
    assert grown is not None and grown.units == 24
    assert {item.blocks for item in (*grown.splits, *grown.cuttings)} == {(Block(start=0, size=1, count=24),)}
    slopes = dataclasses.replace(cutting, kind=CuttingKind.BUFFER, key="slopes", dim=0)
    assert rescale_group(dataclasses.replace(group, cuttings=(slopes,)), Part(2), Part(6)) is None
