"""Finds a rank's activation as a box of the full row, from its shape and from the axes that split it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.parallel.balanced_runs import balanced_spans
from meshwright.parallel.keyed_random import RowBox

Indices = NDArray[np.int64]


class AmbiguousActivation(Exception):
    """Raised for an activation whose shape doesn't determine its rows, tokens or units; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSplit:
    """How a rank's tokens follow from those of a row: first ``cp`` takes some, then ``tp`` a part of these."""

    cp_index: int = 0
    """Along ``cp``."""
    cp_degree: int = 1
    """Degree of ``cp``."""
    balanced: bool = False
    """Whether it takes an early and a late run."""
    tp_index: int = 0
    """Index of the part along ``tp``, where the tokens are split there too."""
    tp_degree: int = 1
    """Number of these."""

    def positions(self, tokens: int) -> dict[int, Indices]:
        """Returns the places of the tokens that an activation of a row can have here, by their number."""
        cp_positions = all_positions = np.arange(tokens)
        if self.cp_degree > 1 and self.balanced:
            cp_positions = np.concatenate(
                [all_positions[slice(*span)] for span in balanced_spans(tokens, self.cp_index, self.cp_degree)]
            )
        elif self.cp_degree > 1:
            cp_positions = np.array_split(all_positions, self.cp_degree)[self.cp_index]
        tp_positions = np.array_split(cp_positions, self.tp_degree)[self.tp_index]
        # By length: the size of a tensor's token dim says which of the three it has.
        return {len(positions): positions for positions in (all_positions, cp_positions, tp_positions)}


@dataclass(frozen=True, slots=True)
class Units:
    """The units (heads, channels) [first, last) of ``count`` that a rank computes between two matrices."""

    start: int
    stop: int
    count: int

    def positions(self, size: int) -> tuple[Indices, int]:
        """Returns the places in the whole dim of which ``size`` indices are here, and the size of that."""
        indices_per_unit, remainder = divmod(size, self.stop - self.start)
        if remainder:
            raise AmbiguousActivation(f"{size} indices aren't of {self.stop - self.start} units")
        return np.arange(self.start * indices_per_unit, self.stop * indices_per_unit), self.count * indices_per_unit


def locate_box(shape: Sequence[int], rows: int, tokens: Mapping[int, Indices], units: Units | None) -> RowBox:
    """Returns the box of each row that a tensor of ``shape`` is.

    The first dim counts rows: (B, ...), or with them the tokens of (B S, D), or heads of (B H, S, S).

    Args:
        shape: of this rank's tensor.
        rows: of the micro-batch, B.
        tokens: from `TokenSplit.positions`; the largest is the whole row.
        units: what is here of the units that other ranks have too; None where nothing is split by units.

    Raises:
        AmbiguousActivation: shape and splits don't determine it.
    """
    dims = _row_dims(shape, rows, tokens)
    positions, sizes = [np.arange(size) for size in dims], list(dims)
    # Where tokens or units are split: find the dims that count them.
    if math.prod(dims) > 1 and (len(tokens) > 1 or units is not None):
        token_dim = _token_dim(dims, tokens, required=len(tokens) > 1)
        if len(tokens) > 1:
            positions[token_dim], sizes[token_dim] = tokens[dims[token_dim]], max(tokens)
        if units is not None:
            if len(dims) < 2:
                raise AmbiguousActivation("it has one dim beside the rows, and units and tokens need two")
            unit_dim = 0 if token_dim == 1 else 1
            positions[unit_dim], sizes[unit_dim] = units.positions(dims[unit_dim])
    if not dims:
        return RowBox(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    return RowBox(line_numbers(positions[:-1], sizes[:-1]), positions[-1])


def line_numbers(positions: Sequence[Indices], sizes: Sequence[int]) -> Indices:
    """Returns the numbers of lines at all combinations of places in dims of the given whole sizes."""
    lines = np.zeros(1, dtype=np.int64)
    # Row-major: line = line x size + position, for all combinations.
    for dim_positions, size in zip(positions, sizes):
        lines = (lines[:, None] * size + dim_positions[None]).reshape(-1)
    return lines


def _row_dims(shape: Sequence[int], rows: int, tokens: Mapping[int, Indices]) -> tuple[int, ...]:
    leading, *trailing = shape
    if leading == rows:
        return tuple(trailing)
    per_row, remainder = divmod(leading, rows)
    if not remainder and len(shape) == 2 and per_row in tokens:
        return per_row, *trailing
    if not remainder and len(shape) == 3 and trailing[0] in tokens and trailing[1] == max(tokens):
        return per_row, *trailing
    raise AmbiguousActivation(f"its first dim must count the {rows} rows of the micro-batch")


def _token_dim(dims: Sequence[int], tokens: Mapping[int, Indices], required: bool) -> int:
    """Returns the dim of a row that counts tokens: of (S, D) the first, of (H, S, S) the second."""
    if len(dims) == 3 and dims[1] in tokens and dims[2] == max(tokens):
        return 1
    if len(dims) == 3 and (dims[0] in tokens) != (dims[1] in tokens):
        return 0 if dims[0] in tokens else 1
    if len(dims) <= 2 and (dims[0] in tokens or not required):
        return 0
    raise AmbiguousActivation(
        f"which of {tuple(dims)} counts its {' or '.join(map(str, sorted(tokens)))} tokens can't be told"
    )
