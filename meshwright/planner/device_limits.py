"""Checks that devices and hosts have the rates and memory that a layout needs, and names what is missing."""

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
from meshwright.spec.layout import Layout
from meshwright.spec.layout_fields import OFFLOADS
from meshwright.units import format_bytes

UNLIMITED_HOST = HostShare(memory_bytes=np.inf, copy_bytes_per_s=2e10, kernel_bytes_per_s=1e10, norm_bytes_per_s=1e10)
"""A host with unlimited memory, to search for what would fit; its rates don't matter for that."""


def job_for(job: PricedJob, layout: Layout, cluster: Cluster) -> PricedJob:
    """Returns the job in a layout's precision where that is float64 or has products in another; else as it is.

    Raises:
        PlanError: when the devices have no rate for it.
    """
    check_products(layout, cluster)
    if job.products or (layout.precision != "float64" and not layout.product_precision):
        return job
    try:
        cluster.device.peak(layout.product_precision or layout.precision)
    except ClusterError as error:
        raise PlanError(f"precision={layout.precision}: {error}") from error
    return dataclasses.replace(job, precision=layout.compute_precision, products=layout.product_precision)


def check_products(layout: Layout, cluster: Cluster) -> None:
    """Refuses products in float8 or TF32 on devices without them; processor cores emulate float8.

    Raises:
        PlanError: with the nearest layout that works.
    """
    dtype, device = layout.product_precision, cluster.device
    if dtype and (device.units or dtype == "tf32") and dtype not in device.peak_flops:
        nearest_precision = "float32" if dtype == "tf32" else "bf16"
        raise PlanError(
            f"precision={layout.precision}: {device.name} has no products in {dtype}; nearest that works: "
            f"precision={nearest_precision}"
        )


def host_shortage(job: PricedJob, layout: Layout, cluster: Cluster, engine: FrameworkProfile) -> str:
    """Returns a sentence on the host memory that a layout lacks; empty where it has enough."""
    machine = Machine.of(cluster)
    if layout.offload == "none" or machine.host is None:
        return ""
    needed_bytes, usable_bytes = price(job, layout, machine, engine).host, HOST_USABLE * machine.host.memory_bytes
    if needed_bytes <= usable_bytes:
        return ""
    return (
        f"offload={layout.offload}: a rank's state takes {format_bytes(needed_bytes)} of host memory, of "
        f"{format_bytes(usable_bytes)} that its part of the node may fill ({HOST_USABLE:.0%} of "
        f"{format_bytes(machine.host.memory_bytes)}); shard it over more ranks, or leave offload out"
    )


def check_host(job: PricedJob, layout: Layout, cluster: Cluster, engine: FrameworkProfile) -> None:
    """Refuses state in host memory where a node has no host memory, no link to it, or not enough of it.

    Raises:
        PlanError: with the sizes and the nearest layout that works.
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
            f"offload={layout.offload}: {_missing_host_fact(cluster)}; give it in the cluster's file, or leave offload "
            "out"
        )
    if shortage := host_shortage(job, layout, cluster, engine):
        raise PlanError(shortage)


def _missing_host_fact(cluster: Cluster) -> str:
    """Returns which fact of some node's host is unknown."""
    for node in (group.node for group in cluster.groups):
        for name in ("host_link", "host_memory_bytes", "host_bandwidth_bytes_per_s"):
            if not getattr(node, name):
                return f"nodes of {node.device.name} have no {name}"
    return "nothing is known of the hosts"


def with_host_memory(
    job: PricedJob, cluster: Cluster, engine: FrameworkProfile, space: Space, room_bytes: float, base: Layout
) -> list[str]:
    """Returns the remedy of offload for a job that fits nowhere: a layout that fits with state in host memory.

    Args:
        job: model and batch.
        cluster: on which nothing fits.
        engine: the runtime's profile.
        space: the bounds of the search that found nothing.
        room_bytes: that a layout may fill on each device.
        base: the choices that every layout shares.
    """
    if cluster.device.name.startswith("cpu") or not cluster.uniform:
        return []
    machine = dataclasses.replace(Machine.of(cluster), host=UNLIMITED_HOST)
    space = dataclasses.replace(space, offloads=tuple(mode for mode in OFFLOADS if mode != "none"))
    best = search(job, space, machine, engine, room_bytes).best
    if best is None:
        return []
    layout = layout_of(best[0], 0, base, len(job.shape.blocks), space.fixed)
    node_host_bytes = float(best[1].host[0]) * cluster.node_devices / HOST_USABLE
    remedy = f"offload={layout.offload} ({layout})"
    if cluster.host is None:
        return [f"{remedy} once the hosts are described: {_missing_host_fact(cluster)}"]
    available_bytes = cluster.host.memory_bytes * cluster.node_devices
    if node_host_bytes <= available_bytes:
        return [remedy]
    needed, available = format_bytes(node_host_bytes), format_bytes(available_bytes)
    return [f"{remedy} with {needed} of host memory a node, of which it has {available}"]
