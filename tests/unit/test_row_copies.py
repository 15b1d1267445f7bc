"""Copies of rows for several places, and their sums, against loops over sets."""

from __future__ import annotations

import pytest
import torch

from meshwright.parallel.row_copies import RowCopies


@pytest.mark.parametrize(("rows", "places", "share"), [(7, 4, 0.5), (5, 1, 0.5), (6, 3, 0.0), (4, 3, 1.0), (0, 3, 0.5)])
def test_copies_lie_by_place_and_add_up_by_row(rows: int, places: int, share: float) -> None:
    draw = torch.Generator().manual_seed(rows)
    wanted = torch.rand(rows, places, generator=draw) < share
    pairs = [(row, place) for place in range(places) for row in range(rows) if wanted[row, place]]
    copies = RowCopies.at(wanted, len(pairs))
    assert copies.source.tolist() == [row for row, _ in pairs]
    values = torch.rand(rows, 3, dtype=torch.float64, generator=draw)
    assert torch.equal(copies.copy(values), values[[row for row, _ in pairs]])
    returned = torch.rand(len(pairs), 3, dtype=torch.float64, generator=draw)
    sums = torch.zeros(rows, 3, dtype=torch.float64)
    for (row, _), value in zip(pairs, returned):
        sums[row] += value
    torch.testing.assert_close(copies.total(returned), sums)
    marks = torch.arange(rows * places).view(rows, places)
    assert copies.choose(marks).tolist() == [row * places + place for row, place in pairs]


def test_gradients_are_those_of_numbers() -> None:
    wanted = torch.tensor([[True, False, True], [False, False, False], [False, True, True], [True, True, True]])
    copies = RowCopies.at(wanted, 7)
    scale = torch.arange(1.0, 8.0, dtype=torch.float64).unsqueeze(1)
    rows = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: copies.total(copies.copy(x) ** 2 * scale), (rows,))
