"""How much of the devices' peak rate a planned layout turns into the model's own FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cluster.cluster import Cluster
from meshwright.planner.choose import Candidate
from meshwright.planner.cost.layout_batch import PricedJob


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilisation:
    """Model FLOPs that devices compute, against what they could."""

    flops_per_s: float
    """Model FLOP/s of a device, in the mean over all; recomputed layers count once."""
    peak_flops_per_s: float
    """FLOP/s of dense matrix products of a device in the layout's precision, in the mean over all."""

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the share of the peak. Source: Chowdhery et al., PaLM (2022), appendix B."""
        return self.flops_per_s / self.peak_flops_per_s


def utilisation(job: PricedJob, cluster: Cluster, candidate: Candidate) -> Utilisation:
    """Returns how well a planned layout uses the devices.

    Args:
        job: model and batch.
        cluster: the devices that the layout runs on.
        candidate: the layout with its price.

    Raises:
        ClusterError: for devices without a rate for the layout's precision.
    """
    dtype = job.products or candidate.layout.precision
    peak_flops_per_s = sum(group.devices * group.node.device.peak(dtype) for group in cluster.groups)
    return Utilisation(
        flops_per_s=job.shape.train_flops_per_token(job.sequence) * candidate.tokens_per_s / cluster.devices,
        peak_flops_per_s=peak_flops_per_s / cluster.devices,
    )
