"""What a join of the islands reports, and what they vote on in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

VOTES = ("stop", "evaluate", "checkpoint")
"""What an island's hooks may ask of all islands; it happens after the next join."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinReport:
    """A join of the islands, the same on every rank but for the bytes."""

    losses: tuple[float, ...]
    """Mean loss of each island over the targets of its round."""
    tokens: tuple[float, ...]
    """Target tokens of each island's round."""
    pseudo_gradient_norm: float | None
    """2-norm of the mean movement of the islands' weights; None where no island has that mean."""
    consensus_distance: float
    """Root of the mean over islands of the squared distance of their weights from the mean that they got."""
    raw_bytes: int
    """Bytes of this rank's movement in the type of its weights."""
    sent_bytes: int
    """Bytes that this rank sent to other islands for it."""
    wait_s: float
    """Seconds that this rank stood still for it."""
    fragments: tuple[int, ...]
    """Fragments of the weights that joined; norm and distance are of these alone."""
    votes: tuple[float, ...]
    """Sums of `VOTES` over islands."""
    stop_count: float
    """Sum over islands of what their ranks were asked (`OuterOptimizer.request_stop`)."""

    def to_json(self) -> dict[str, object]:
        """Returns plain values for a line of metrics."""
        return {
            "island_losses": list(self.losses),
            "island_tokens": list(self.tokens),
            "pseudo_gradient_norm": self.pseudo_gradient_norm,
            "consensus_distance": self.consensus_distance,
            "raw_bytes": self.raw_bytes,
            "sent_bytes": self.sent_bytes,
            "wait_s": self.wait_s,
            "fragments": list(self.fragments),
        }


def merge_reports(reports: Sequence[JoinReport]) -> JoinReport | None:
    """Returns the report of all joins after one step, of which the last ends all rounds; None for none."""
    if len(reports) < 2:
        return reports[0] if reports else None
    norms = [report.pseudo_gradient_norm for report in reports if report.pseudo_gradient_norm is not None]
    return JoinReport(
        losses=reports[-1].losses,
        tokens=reports[-1].tokens,
        pseudo_gradient_norm=math.hypot(*norms),
        consensus_distance=math.hypot(*(report.consensus_distance for report in reports)),
        raw_bytes=sum(report.raw_bytes for report in reports),
        sent_bytes=sum(report.sent_bytes for report in reports),
        wait_s=sum(report.wait_s for report in reports),
        fragments=tuple(index for report in reports for index in report.fragments),
        votes=tuple(map(sum, zip(*(report.votes for report in reports)))),
        stop_count=sum(report.stop_count for report in reports),
    )
