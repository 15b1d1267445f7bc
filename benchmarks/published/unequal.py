"""Runs on devices of several kinds: what their ``gpu_type`` says, and what such a run takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.published.models import Unpriced
from meshwright.cluster.cluster import Cluster, NodeGroup
from meshwright.cluster.node import standard_node
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.layer_sums import LayerCosts
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.price import price_many
from meshwright.planner.cost.ranks import RankTimes
from meshwright.planner.cost.unequal_ranks import UnequalRankTimes
from meshwright.planner.device_kinds import DeviceKinds, kinds_of

BETWEEN = re.compile(r"\s*(?:[+;&|,/]|\band\b)\s*")
"""What stands between the names of kinds."""
COUNTED = re.compile(r"(?:(\d+)\s*[x*]\s+|(\d+)[x*])?\s*(.+)")
"""How many, and of what."""


def named_kinds(text: str) -> list[tuple[int, str]]:
    """Returns (how many, 0 where it isn't said; device) of each kind that a column names, in its order.

    Args:
        text: such as ``8x Titan-RTX + 8x RTX-3090``; what stands in brackets is left out.
    """
    found = []
    for part in BETWEEN.split(re.sub(r"\(.*?\)", " ", text).strip()):
        match = COUNTED.fullmatch(part)
        if match and match[3].strip():
            found.append((int(match[1] or match[2] or 0), match[3].strip()))
    return found


def unequal_kinds(text: str, gpus: int, per_node: int) -> DeviceKinds | None:
    """Returns the kinds of a run's devices; None where they are all of one.

    Args:
        text: the column that names them; where it doesn't say how many there are, they are equally many of each.
        gpus: all of them.
        per_node: of a node.

    Raises:
        Unpriced: when their numbers don't come out.
        ClusterError: for an unknown device among several.
    """
    named = named_kinds(text)
    if len({name for _, name in named}) < 2:
        return None
    nodes = [standard_node(name) for _, name in named]
    counts = [count for count, _ in named]
    if not all(counts):
        counts = [gpus // len(named)] * len(named)
    if sum(counts) != gpus:
        raise Unpriced("the kinds of devices aren't as many as the devices")
    groups = []
    for node, count in zip(nodes, counts):
        size = min(per_node, count)
        if count % size:
            raise Unpriced("the kinds of devices don't fill their nodes")
        groups.append(NodeGroup(node=node.resized(size), count=count // size))
    return kinds_of(Cluster(groups=tuple(groups)))


def unequal_costs(
    job: PricedJob,
    columns: Mapping[str, Any],
    split: tuple[float, ...] | None,
    kinds: DeviceKinds,
    engine: FrameworkProfile,
) -> dict[str, Any]:
    """Returns what a layout takes that lies on several kinds, which fill the pipeline's stages in their order.

    Readers of one pipeline get equally many rows, so the slowest decide; where no stage lies on two kinds, each stage
    takes what its own kind does.

    Args:
        job: model and batch.
        columns: the layout's degrees.
        split: layers of each stage where they are named.
        kinds: of the devices.
        engine: how it is run.

    Returns:
        ``step_s``; bytes ``first``, ``reserved``, ``allocated``, ``device``; ``room``, the memory of the kind that is
        fullest.
    """
    degrees = LayoutBatch.of({name: [value] for name, value in columns.items()} | {"rows": [job.rows]}, [split])
    prices = [price_many(job, degrees, machine, engine) for machine in kinds.machines]
    pp = int(degrees.pp[0])
    places = kinds.of_runs(int(degrees.world[0]) // pp) if pp > 1 else None
    fits = places is not None and len(places) == pp and float(degrees.stages[0]) == 1
    slowest = max(float(one.step_s[0]) for one in prices)
    seconds = slowest
    if fits and places:
        by_kind = [RankTimes(LayerCosts.of(job, degrees, machine, engine)) for machine in kinds.machines]
        seconds = float(UnequalRankTimes(by_kind, places).step_s()[0])
    sizes = [machine.device.memory_bytes for machine in kinds.machines]
    fullest = int(np.argmax([float(one.peak[0]) / size for one, size in zip(prices, sizes)]))
    return {
        "step_s": seconds,
        "first": float(prices[0].first_reserved[0]),
        "reserved": max(float(one.reserved[0]) for one in prices),
        "allocated": max(float(one.allocated[0]) for one in prices),
        "device": float(prices[fullest].peak[0]),
        "room": sizes[fullest],
    }
