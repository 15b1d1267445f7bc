"""What of a run of queries sees what of a run of keys: tiles, cut at windows and documents, and their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

from meshwright.parallel.block_attention import Segments
from meshwright.spec.key_ring import KeyRing
from meshwright.spec.placement import Span


class Tile(NamedTuple):
    """Queries of a row's run that see some keys of a run: both of one document."""

    row: int
    queries: Span
    """In the run of queries."""
    keys: Span
    """In the run of keys."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles that one call of the kernel computes."""

    tiles: tuple[Tile, ...]
    segments: Segments
    is_whole: bool
    """Whether they are all queries and keys of both runs, one after the other."""


@lru_cache(maxsize=1024)
def find_tiles(
    ring: KeyRing, query_run: int, key_run: int, rows: int, starts: tuple[int, ...] | None
) -> tuple[Tiles, ...]:
    """Returns what of a run of queries sees what of a run of keys.

    Args:
        ring: of the rows.
        query_run: number of the run of queries.
        key_run: number of the run of keys.
        rows: B.
        starts: first token of each document, the rows one after the other, then B S; None for one document a row.
    """
    size = ring.run_tokens
    if query_run == key_run:
        return (_diagonal_tiles(ring, query_run, rows, starts),)
    first_key = ring.first_seen(query_run, key_run)
    if first_key == size:
        return ()
    # Query i sees the keys from i + lag on, where there is a window: the last query is the one that sees one key.
    distance = (query_run - key_run) * size
    lag = distance - ring.window + 1 if ring.window else -size
    last_query = min(size, size - lag)
    tiles_by_window: dict[int, list[Tile]] = {}
    for row in range(rows):
        first, last = first_key, last_query
        if starts is not None:
            # Only the document of the first query can reach back to another run, and then it holds that run's end.
            row_start = row * 2 * ring.ranks * size
            document = _document_of(starts, row_start + query_run * size)
            first = max(first, document[0] - row_start - key_run * size)
            last = min(last, document[1] - row_start - query_run * size)
        if first < size:
            # Aligned at the last query and key; -1 where the window reaches further than the first key.
            left = size - last - lag if last - 1 + lag > first else -1
            tiles_by_window.setdefault(left, []).append(Tile(row, (0, last), (first, size)))
    whole = ((0, size), (0, size))
    found = []
    for left, tiles in tiles_by_window.items():
        lengths = tuple(tile.queries[1] for tile in tiles), tuple(size - tile.keys[0] for tile in tiles)
        is_whole = len(tiles) == rows and all((tile.queries, tile.keys) == whole for tile in tiles)
        found.append(Tiles(tuple(tiles), Segments(*lengths, (left, -1)), is_whole))
    return tuple(found)


def _diagonal_tiles(ring: KeyRing, run: int, rows: int, starts: tuple[int, ...] | None) -> Tiles:
    """Returns the documents of a run, whose queries see its own keys up to themselves."""
    size, tiles = ring.run_tokens, []
    for row in range(rows):
        first = (2 * ring.ranks * row + run) * size
        inside = [start - first for start in starts or () if first < start < first + size]
        bounds = [0, *inside, size]
        tiles += [Tile(row, span, span) for span in pairwise(bounds)]
    lengths = tuple(tile.queries[1] - tile.queries[0] for tile in tiles)
    left = ring.window - 1 if 0 < ring.window < max(lengths) else -1
    return Tiles(tuple(tiles), Segments(lengths, lengths, (left, 0)), is_whole=True)


def _document_of(starts: Sequence[int], token: int) -> Span:
    """Returns the first token of a token's document, and the one after its last."""
    last = next(index for index, start in enumerate(starts) if start > token)
    return starts[last - 1], starts[last]


def take_queries(run: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """Returns (T, ...), the tiles' queries of ``run: (B, L, ...)``, one after the other."""
    if tiles.is_whole:
        return run.flatten(0, 1)
    return _joined([run[tile.row, slice(*tile.queries)] for tile in tiles.tiles])


def take_keys(run: torch.Tensor, tiles: Tiles, first: int) -> torch.Tensor:
    """Returns (U, ...), the tiles' keys of ``run: (B, L, ...)``, which begins at token ``first`` of its run."""
    if tiles.is_whole:
        return run.flatten(0, 1)
    return _joined([run[tile.row, tile.keys[0] - first : tile.keys[1] - first] for tile in tiles.tiles])


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def query_views(run: torch.Tensor, tiles: Tiles) -> list[torch.Tensor]:
    """Returns views of the tiles' queries in ``run: (B, L, ...)``: all of it, or one for each tile."""
    return [run] if tiles.is_whole else [run[tile.row, slice(*tile.queries)] for tile in tiles.tiles]


def key_views(run: torch.Tensor, tiles: Tiles, first: int) -> list[torch.Tensor]:
    """Returns views of the tiles' keys in ``run: (B, L, ...)``, which begins at token ``first`` of its run."""
    if tiles.is_whole:
        return [run]
    return [run[tile.row, tile.keys[0] - first : tile.keys[1] - first] for tile in tiles.tiles]


def split_queries(x: torch.Tensor, tiles: Tiles, rows: int) -> Sequence[torch.Tensor]:
    """Returns ``x: (T, ...)`` in the shapes of `query_views`."""
    return [x.unflatten(0, (rows, -1))] if tiles.is_whole else x.split(list(tiles.segments.query_lengths))


def split_keys(x: torch.Tensor, tiles: Tiles, rows: int) -> Sequence[torch.Tensor]:
    """Returns ``x: (U, ...)`` in the shapes of `key_views`."""
    return [x.unflatten(0, (rows, -1))] if tiles.is_whole else x.split(list(tiles.segments.key_lengths))
