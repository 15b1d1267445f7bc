"""The machines of published runs: devices by name, and the network that each site had."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from benchmarks.published.models import Row, number, whole
from meshwright.cluster import catalogue
from meshwright.cluster.cluster import Cluster, NodeGroup
from meshwright.cluster.node import Node, named_node, standard_node
from meshwright.cluster.traffic import all_reduce_s
from meshwright.planner.cost.groups import Machine

SITES = (
    ("BigScience", "a100", "jean-zay-a100", 0),
    ("VIA-Research", "a100", "dgx-a100", 4),
    ("nanotron", "h100", "p5", 0),
    ("torchtitan", "h100", "dgx-h100", 0),
)
"""(word in framework or source, device family, node, cards where they aren't the node's own): Jean Zay has four
Omni-Path links a node; vTrain's nodes four HDR cards, 800 Gb/s; the playbook's sweep ran on 400 Gb/s a device."""
PROBE_BYTES = 1e9
"""Message of the collective benchmark whose rates rows carry."""


def machine_of(row: Row) -> Machine:
    """Returns the machine of a row.

    Raises:
        ClusterError: for an unknown device.
    """
    where = row.get("framework", "") + " " + row.get("source_ref", "")
    return _machine(row.get("gpu_type", ""), where, whole(row, "gpus"), whole(row, "gpus_per_node", 8))


@lru_cache(maxsize=4096)
def _machine(device: str, where: str, gpus: int, per_node: int) -> Machine:
    node = _node(device, where)
    size = min(per_node, gpus)
    if node.count != size:
        node = node.resized(size)
    nodes = -(-gpus // node.count)
    return Machine.of(Cluster(groups=(NodeGroup(node=node, count=nodes),)))


def _node(device: str, where: str) -> Node:
    item = catalogue.entry(device)
    for word, family, name, cards in SITES:
        if word in where and item.family == family:
            node = named_node(name, item.device)
            return dataclasses.replace(node, outside_count=cards) if cards else node
    return standard_node(item.device)


def scales_of(row: Row, machine: Machine) -> dict[str, float]:
    """Returns measured rates over the catalogue's, where the row carries a benchmark of its machine.

    The world's all-reduce crosses the network; the links inside a node are the same in every run, so the catalogue's.
    """
    gpus = whole(row, "gpus")
    if not row.get("allreduce_gbs") or gpus <= machine.fabric.devices:
        return {}
    bus = number(row, "allreduce_gbs") * 1e9
    took = 2 * (gpus - 1) / gpus * PROBE_BYTES / bus
    nodes = gpus // machine.fabric.devices
    plain = float(all_reduce_s(PROBE_BYTES, machine.fabric.devices, nodes, machine.fabric))
    return {"outside_scale": min(2.0, plain / took)}
