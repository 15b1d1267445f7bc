"""What devices and hosts must have for a layout to be priced at all, and what would be needed where they lack it."""

from __future__ import annotations

import dataclasses

import numpy as np

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.host import HostShare
from meshwright.errors import ClusterError, PlanError
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.cost.offload import HOST_USABLE
from meshwright.planner.cost.price import price
from meshwright.planner.search import search
from meshwright.planner.space import Space, layout_of
from meshwright.spec.layout import OFFLOADS, Layout
from meshwright.units import format_bytes

AMPLE = HostShare(memory_bytes=np.inf, copy_bytes_per_s=2e10, kernel_bytes_per_s=1e10)
"""A host with room for anything, to ask what would fit; its rates change nothing of that."""


def job_for(job: PricedJob, layout: Layout, cluster: Cluster) -> PricedJob:
    """Returns the job as a layout computes it: in float64 where it says so, else as it is.

    Raises:
        PlanError: when the devices have no rate for float64.
    """
    if layout.precision != "float64" or job.products:
        return job
    try:
        cluster.device.peak("float64")
    except ClusterError as error:
        raise PlanError(f"precision=float64: {error}") from error
    return dataclasses.replace(job, precision="float64")


def host_shortage(job: PricedJob, layout: Layout, cluster: Cluster, engine: FrameworkProfile) -> str:
    """Returns what is missing of the host's memory for a layout, in a sentence with numbers; empty where nothing is."""
    machine = Machine.of(cluster)
    if layout.offload == "none" or machine.host is None:
        return ""
    need, room = price(job, layout, machine, engine).host, HOST_USABLE * machine.host.memory_bytes
    if need <= room:
        return ""
    return (
        f"offload={layout.offload}: a rank's state takes {format_bytes(need)} of host memory, of {format_bytes(room)} "
        f"that its part of the node may fill ({HOST_USABLE:.0%} of {format_bytes(machine.host.memory_bytes)}); "
        "shard it over more ranks, or leave offload out"
    )


def check_host(job: PricedJob, layout: Layout, cluster: Cluster, engine: FrameworkProfile) -> None:
    """Refuses state in host memory where a node has no host memory, no link to it, or not enough of it.

    Raises:
        PlanError: with the numbers and the nearest that works.
    """
    if layout.offload == "none":
        return
    if cluster.device.name.startswith("cpu"):
        raise PlanError(
            f"offload={layout.offload} moves state from a device to host memory, but the ranks compute on processor "
            "cores, whose memory that is; leave offload out"
        )
    if cluster.host is None:
        raise PlanError(
            f"offload={layout.offload}: {_unknown(cluster)}; give it in the cluster's file, or leave offload out"
        )
    if short := host_shortage(job, layout, cluster, engine):
        raise PlanError(short)


def _unknown(cluster: Cluster) -> str:
    """What isn't known of some node's host."""
    for node in (group.node for group in cluster.groups):
        for name in ("host_link", "host_memory_bytes", "host_bandwidth_bytes_per_s"):
            if not getattr(node, name):
                return f"nodes of {node.device.name} have no {name}"
    return "nothing is known of the hosts"


def with_host_memory(
    job: PricedJob, cluster: Cluster, engine: FrameworkProfile, space: Space, room_bytes: float, base: Layout
) -> list[str]:
    """Returns, of a search that found nothing that fits, the sentence of a layout that fits with state in host memory.

    Args:
        job: model and batch.
        cluster: on which nothing fits.
        engine: how it is run.
        space: what was looked for.
        room_bytes: that each device has.
        base: what every layout shares.
    """
    if cluster.device.name.startswith("cpu") or not cluster.uniform:
        return []
    machine = dataclasses.replace(Machine.of(cluster), host=AMPLE)
    space = dataclasses.replace(space, offloads=tuple(mode for mode in OFFLOADS if mode != "none"))
    found = search(job, space, machine, engine, room_bytes).best
    if found is None:
        return []
    layout = layout_of(found[0], 0, base, len(job.shape.blocks), space.fixed)
    node = float(found[1].host[0]) * cluster.node_devices / HOST_USABLE
    told = f"offload={layout.offload} ({layout})"
    if cluster.host is None:
        return [f"{told} once the hosts are described: {_unknown(cluster)}"]
    held = cluster.host.memory_bytes * cluster.node_devices
    return [told if node <= held else f"{told} with {format_bytes(node)} of host memory a node, of which it has "
            f"{format_bytes(held)}"]  # fmt: skip
