"""Chooses a layout by model state alone: replicas if the state fits, else the lowest ZeRO level that fits."""

from __future__ import annotations

from meshwright.errors import PlanError
from meshwright.planner.compression_buffers import compression_buffer_bytes
from meshwright.planner.memory import ModelParts, StateSizes, paper_memory, position_memory, rest_bytes, state_memory
from meshwright.planner.rounds import OUTER, Rounds
from meshwright.spec.axis import Holds
from meshwright.spec.groups import row_axes
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.units import format_bytes

STATE_SHARE = 0.6
"""Share of a device's memory that model state may fill; the rest is for activations, buffers and the framework."""


def predict(layout: Layout, sizes: StateSizes | ModelParts, outer_tensors: int = 2) -> Prediction:
    """Returns the prediction of a layout's model state alone, with that of the outer optimizer under islands.

    Args:
        layout: any.
        sizes: of the model.
        outer_tensors: of the outer optimizer for each weight, under islands.
    """
    memory, formula = state_memory(layout, sizes)
    rank_elements = sizes.total
    if isinstance(sizes, ModelParts):
        if layout.islands > 1:
            memory = {**memory, OUTER: outer_tensors * rest_bytes(layout, sizes, 0)}
        if layout.is_lossy:
            memory = {**memory, "buffers": compression_buffer_bytes(layout, sizes)}
        fullest = max(position_memory(layout, sizes), key=lambda position: position.total_bytes)
        rank_elements = fullest.weights.elements
    return Prediction(memory=memory, formula=formula | {"zero_paper_bytes": str(paper_memory(layout, rank_elements))})


def named_plan(layout: Layout, ranks: int, sizes: StateSizes | ModelParts, rounds: Rounds | None = None) -> Plan:
    """Returns the plan for a layout that the user named.

    Args:
        layout: any.
        ranks: number of ranks.
        sizes: of the model.
        rounds: how islands join; None for the usual way.
    """
    layout.check_ranks(ranks)
    rounds = rounds or Rounds()
    prediction, outer = predict(layout, sizes, rounds.outer_tensors), rounds.settings if layout.islands > 1 else {}
    return Plan(layout=layout, prediction=prediction, ranks=ranks, reason=named(layout), outer=outer)


def named(layout: Layout) -> str:
    """Returns the reason for a layout that the user named, with a note where its backward isn't split as named."""
    return (
        f"named by the user; {layout.unsplit_backward_reason}"
        if layout.unsplit_backward_reason
        else "named by the user"
    )


def choose(ranks: int, rows: int, sizes: StateSizes, memory_bytes: int, precision: str) -> Plan:
    """Chooses among copies and ZeRO levels over all ranks, with the fewest micro-batches.

    Args:
        ranks: number of ranks.
        rows: rows of the global batch, which the ranks must divide.
        sizes: the model.
        memory_bytes: memory of each rank.
        precision: of the layout.

    Raises:
        PlanError: when no level fits; the message has the sizes.
    """
    rejected: dict[str, str] = {}
    candidates = [Layout(precision=precision)] if ranks == 1 else [
        Layout(degrees={row_axes(Holds.COPY)[0]: ranks}, precision=precision),
        *(Layout(degrees={row_axes(Holds.SHARD)[0]: ranks}, zero=level, precision=precision) for level in (1, 2, 3)),
    ]  # fmt: skip
    for layout in candidates:
        layout.check_batch(rows)
        prediction = predict(layout, sizes)
        needed_bytes, allowed_bytes = sum(prediction.memory.values()), int(memory_bytes * STATE_SHARE)
        if needed_bytes <= allowed_bytes:
            advantage = "copies need the least communication" if not layout.zero else "the lowest ZeRO level that fits"
            needed, allowed = format_bytes(needed_bytes), format_bytes(allowed_bytes)
            reason = f"{advantage}: state takes {needed} of the {allowed} allowed on each rank"
            return Plan(layout=layout, prediction=prediction, ranks=ranks, reason=reason, rejected=rejected)
        rejected[str(layout)] = (
            f"state takes {format_bytes(needed_bytes)}, more than the {format_bytes(allowed_bytes)} allowed"
        )
    rejections = "; ".join(f"{name}: {cause}" for name, cause in rejected.items())
    raise PlanError(
        f"no layout of {ranks} ranks holds the model's state ({rejections}); take more devices or fewer layers"
    )
