"""What a layout needs to know of a model, read by the first rank and told to the others."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
import torch.distributed as dist

from meshwright.axes.table import ShardingTable
from meshwright.errors import MeshwrightError
from meshwright.models.anatomy import Anatomy
from meshwright.models.build import BuiltModel
from meshwright.plan import Layout
from meshwright.strategy.own import tried_on
from meshwright.train.facts import Facts, read_facts


def shared_facts(
    built: BuiltModel, layout: Layout, example: torch.Tensor | None, split_vocabulary: bool
) -> Facts:
    """Reads what the layout needs of the model; only the first rank tries the model out.

    Args:
        built: on meta; it stays as it is.
        layout: to be run.
        example: (B, ...) one input of a model that takes no tokens.
        split_vocabulary: whether a rank's logits may be of its part of the vocabulary alone.

    Raises:
        PlanError: the model doesn't allow the layout; raised on every rank.
    """
    if all(layout.degree(name) == 1 for name in ("pp", "tp", "ep")):
        return Facts()
    pretend = dist.get_backend() == "fake"
    found: list[Any] = [None]
    if pretend or dist.get_rank() == 0:
        found[0] = _read(built, layout, example)
    if not pretend:
        with warnings.catch_warnings():
            # What a layer returns is described by a tree, and torch warns of its own way to unpickle one.
            warnings.filterwarnings("ignore", message=".*treespec.*", category=FutureWarning)
            dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], MeshwrightError):
        raise found[0]
    facts: Facts = found[0]
    if facts.table is not None and not split_vocabulary:
        facts = dataclasses.replace(facts, table=_with_whole_head(facts.table, built.anatomy))
    return facts


def _read(built: BuiltModel, layout: Layout, example: torch.Tensor | None) -> Facts | MeshwrightError:
    needs_trial = layout.degree("pp") > 1 or layout.degree("tp") > 1
    try:
        return read_facts(tried_on(built, example) if needs_trial else built, layout)
    except MeshwrightError as error:
        return error


def _with_whole_head(table: ShardingTable, anatomy: Anatomy) -> ShardingTable:
    """Returns the table with logits whole on every rank: without the head, nor an embedding that is the same weight."""
    kept = tuple(name for name in table.vocabulary if name != anatomy.head)
    tied = {name for group in anatomy.ties for name in group}
    kept = tuple(name for name in kept if f"{name}.weight" not in tied)
    return dataclasses.replace(table, vocabulary=kept, headless=True)
