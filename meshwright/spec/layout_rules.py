"""The rules that a layout's choices obey: which exclude each other, and which have no effect; each with its cure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshwright.errors import PlanError, nearest
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.compression import TOKEN_FORMATS, WEIGHT_FORMATS
from meshwright.spec.error_feedback import check_error_feedback
from meshwright.spec.groups import axis_with, reader, row_axes, state_shards
from meshwright.spec.layout_fields import (
    ATTENTIONS,
    FLOAT8_RECIPES,
    MECHANICS_OF_CHOICE,
    OFFLOADS,
    PRECISIONS,
    LayoutFields,
)


def check_layout(layout: LayoutFields) -> None:
    """Refuses fields that no run could have.

    Raises:
        PlanError: names the field, the rule and what to write in its place.
    """
    _check_zero(layout)
    _check_compression(layout)
    _check_secondary(layout)
    _check_overlap(layout)
    _check_experts(layout)
    if layout.microbatches < 1:
        raise PlanError(f"microbatches={layout.microbatches}: it is a whole number of at least 1")
    for name, value, known_values in (
        ("precision", layout.precision, PRECISIONS),
        ("offload", layout.offload, OFFLOADS),
        ("compress_weights", layout.compress_weights, WEIGHT_FORMATS),
        ("compress_tokens", layout.compress_tokens, TOKEN_FORMATS),
    ):
        if value not in known_values:
            raise PlanError(f"{name}={value} is unknown{nearest(value, known_values)}")
    _check_unused_choices(layout)
    if layout.rows:
        _check_shares(layout)
    if layout.stages < 0:
        raise PlanError(f"stages={layout.stages}: each rank runs 1 stage or more")
    _check_axes(layout)


def _check_zero(layout: LayoutFields) -> None:
    """Refuses a ZeRO level without ranks to shard over, and such ranks without a level."""
    if layout.zero not in (0, 1, 2, 3):
        raise PlanError(f"zero={layout.zero}: the ZeRO level is 0, 1, 2 or 3")
    copy_axes, (name, shard) = row_axes(Holds.COPY), _shard_degree(layout)
    if layout.zero and shard == 1:
        ranks = math.prod(layout.degree(axis) for axis in copy_axes)
        cure = f"{name}={ranks},zero={layout.zero}" if ranks > 1 else "zero=0"
        raise PlanError(f"zero={layout.zero} shards over the axis '{name}', whose degree is 1; write {cure}")
    if shard > 1 and not layout.zero:
        cure = f"{copy_axes[0]}={shard}, or zero=1, 2 or 3"
        raise PlanError(f"{name}={shard} with zero=0 shards nothing; write {cure}")


def _check_compression(layout: LayoutFields) -> None:
    """Refuses compressed gradients or weights that no ranks send each other, and errors that can't be kept."""
    name, shard = _shard_degree(layout)
    layout.compress.check(layout.copies, (row_axes(Holds.COPY)[0], row_axes(Holds.SHARD)[0], shard))
    if layout.compress.keeps_errors:
        check_error_feedback(str(layout.compress), layout.degrees, layout.offload)
    if layout.compress_weights != "none" and not layout.zero:
        raise PlanError(f"compress_weights rounds what ZeRO gathers, and zero=0 gathers none; write {name}=2,zero=3")


def _shard_degree(layout: LayoutFields) -> tuple[str, int]:
    """Returns (name, degree) of the axis that shards state over ranks with other rows; the first one where none is."""
    axes = row_axes(Holds.SHARD)
    name = next((name for name in axes if layout.degree(name) > 1), axes[0])
    return name, layout.degree(name)


def _check_secondary(layout: LayoutFields) -> None:
    """Refuses a secondary copy of the weights that no backward would read, and runs that don't divide the ranks."""
    size, shards = layout.secondary, layout.state_shards
    if not size:
        return
    if layout.zero != 3:
        raise PlanError(
            f"secondary={size} says how ZeRO-3 keeps weights between forward and backward, and zero={layout.zero} "
            "frees none in between; write zero=3, or drop it"
        )
    if layout.degree(Mechanics.STAGES) > 1:
        raise PlanError(
            f"secondary={size} has no effect with {layout.format_degree(Mechanics.STAGES)}: a pipeline keeps the "
            "weights of its stages gathered between forward and backward; drop it"
        )
    if not fits_secondary(size, shards):
        fitting = [count for count in range(2, shards) if fits_secondary(count, shards)]
        nearest_size = min(fitting, key=lambda count: abs(count - size), default=0)
        raise PlanError(
            f"secondary={size}: runs of 2 ranks or more must divide the {shards} ranks that share the state, and "
            f"be fewer; nearest that works: " + (f"secondary={nearest_size}" if nearest_size else "drop it")
        )


def _check_overlap(layout: LayoutFields) -> None:
    """Refuses chunks of no number, and products that can't be divided into chunks."""
    if layout.tp_overlap < 0:
        raise PlanError(f"tp_overlap={layout.tp_overlap}: it is a number of chunks, 1 or more, or 0 for none")
    if layout.tp_overlap and layout.precision in FLOAT8_RECIPES:
        raise PlanError(
            f"tp_overlap={layout.tp_overlap} computes products in chunks of tokens, and precision={layout.precision} "
            "computes them whole, by torchao's kernels; nearest that works: precision=bf16, or drop tp_overlap"
        )


def _check_experts(layout: LayoutFields) -> None:
    """Refuses nodes that aren't runs of the ranks of ``ep``, and chunks of no number."""
    if layout.ep_overlap < 0 or layout.ep_overlap == 1:
        raise PlanError(
            f"ep_overlap={layout.ep_overlap}: it is a number of chunks, 2 or more, or 0 for none; nearest that "
            "works: ep_overlap=2"
        )
    if layout.ep_halves and layout.degree(Mechanics.EXPERTS) > 1 and not layout.can_halve:
        raise PlanError(
            "ep_halves=true: while one half is in a layer the other leaves it, which at zero=3 frees the layer's "
            "weights, but in a pipeline; nearest that works: zero=2"
        )
    if layout.ep_keep and not layout.recompute:
        raise PlanError(
            "ep_keep=true keeps what recompute would exchange again, and recompute=none keeps it anyway; drop it, "
            "or write recompute=full"
        )
    degree = layout.degree(Mechanics.EXPERTS)
    if not layout.ep_node or degree == 1 or fits_expert_node(layout.ep_node, degree):
        return
    fitting = [count for count in range(1, degree) if fits_expert_node(count, degree)]
    nearest_size = min(fitting, key=lambda count: abs(count - layout.ep_node))
    raise PlanError(
        f"ep_node={layout.ep_node}: runs of ranks of {layout.format_degree(Mechanics.EXPERTS)} must divide them, and "
        f"be fewer; nearest that works: ep_node={nearest_size}"
    )


def _check_unused_choices(layout: LayoutFields) -> None:
    """Refuses choices of an axis that isn't used, and an unknown way of attention."""
    for name, mechanics in MECHANICS_OF_CHOICE.items():
        choice = getattr(layout, name)
        if choice and choice != "none" and layout.degree(mechanics) == 1:
            value, axis = str(choice).lower(), layout.axis(mechanics)
            raise PlanError(f"{name}={value} has no effect without {axis}; write {axis}=2 or more, or drop it")
    if layout.attention not in ("", *ATTENTIONS):
        raise PlanError(f"attention={layout.attention} is unknown{nearest(layout.attention, ATTENTIONS)}")


def _check_axes(layout: LayoutFields) -> None:
    """Refuses two axes that split the same work, and expert degrees that the other axes can't carry."""
    axes = known_axes()
    for name in layout.degrees:
        axis, degree = axes[name], layout.degree(name)
        if axis.mechanics is not Mechanics.NONE and name != (other_axis := layout.axis(axis.mechanics)):
            other_degree = layout.degree(other_axis)
            raise PlanError(
                f"{other_axis}={other_degree} and {name}={degree} both split the same work "
                f"({axis.mechanics.name.lower()}), which one axis does; write {other_axis}={other_degree * degree}"
            )
        # An axis that carves (ep) factorises other axes' ranks a second time.
        carved_ranks = math.prod(layout.degree(carved_axis) for carved_axis in axis.carves)
        if axis.carves and carved_ranks % degree:
            raise PlanError(
                f"{name}={degree} divides the ranks of {' x '.join(axis.carves)} a second time, and those are "
                f"{carved_ranks}; nearest that works: {name}={math.gcd(carved_ranks, degree)}"
            )


def _check_shares(layout: LayoutFields) -> None:
    """Refuses shares that aren't one for each reader, and equal ones."""
    readers = reader(0, layout.degrees)[1]
    shares = layout.rows.shares
    if len(shares) != readers:
        even = "-".join(["1"] * readers)
        raise PlanError(f"rows={layout.rows} has {len(shares)} shares, but {readers} readers; for one, rows={even}")
    if len(set(shares)) == 1:
        raise PlanError(f"rows={layout.rows} shares the rows evenly, which has no effect; drop it")


def secondary_over(size: int, degrees: Mapping[str, int], zero: int) -> int:
    """Returns the ranks that can share gathered weights between passes over other degrees: ``size``, or 0."""
    is_pipelined = degrees.get(axis_with(Mechanics.STAGES, degrees), 1) > 1
    fits = zero == 3 and not is_pipelined and fits_secondary(size, int(state_shards(degrees, zero)))
    return size if fits else 0


def expert_node_over(size: int, degrees: Mapping[str, int]) -> int:
    """Returns the neighbours of ``ep`` that a token can travel to once over other degrees: ``size``, or 0."""
    degree = degrees.get(axis_with(Mechanics.EXPERTS, degrees), 1)
    return size if fits_expert_node(size, degree) else 0


def fits_expert_node(size: int, degree: int) -> bool:
    """Returns whether runs of ``size`` ranks are parts of ``degree`` ranks of ``ep``, as `Layout.ep_node` asks."""
    return 1 <= size < degree and degree % size == 0


def fits_secondary(size: int, shards: int) -> bool:
    """Returns whether runs of ``size`` ranks are parts of ``shards`` ranks, as `Layout.secondary` asks."""
    return 2 <= size < shards and shards % size == 0
