"""How much of the devices a step uses: model FLOP/s, and their share of the data sheet's dense peak (MFU)."""

from __future__ import annotations

from meshwright.cluster import catalogue
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.device import Device
from meshwright.errors import ClusterError
from meshwright.planner.cost.layout_batch import PricedJob


def model_flops_per_s(job: PricedJob, step_s: float) -> float:
    """Returns the model FLOP/s of all devices together.

    Args:
        job: model and batch.
        step_s: seconds of a step, predicted or measured.
    """
    return job.step_flops / step_s


def data_sheet_flops(cluster: Cluster, dtype: str) -> float:
    """Returns the dense FLOP/s of all devices together by their data sheets.

    A calibration may have raised a device's peak to what a product reached; the catalogue's figure counts then.

    Args:
        cluster: the devices.
        dtype: of the products.
    """
    return sum(_data_sheet(group.node.device).peak(dtype) * group.devices for group in cluster.groups)


def _data_sheet(device: Device) -> Device:
    """Returns a device with the catalogue's figures; itself where it has none there, or is a share of a processor."""
    if device.source != "calibration" or not device.units:
        return device
    try:
        return catalogue.device(device.name)
    except ClusterError:
        return device
