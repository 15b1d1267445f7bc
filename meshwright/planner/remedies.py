"""What would make a job fit where nothing does: shorter rows, fewer of them, a leaner optimizer; what each gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from meshwright.errors import PlanError
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.search import search
from meshwright.planner.space import Space, layout_of
from meshwright.spec.layout import Layout
from meshwright.units import format_bytes, format_count, format_seconds

SHORTEST_ROWS = 128
"""Tokens of a row below which nobody would go."""
MOMENTS_BYTES = 8.0
"""Bytes a parameter of Adam's two moments in float32. Source: Rajbhandari et al., ZeRO (2020), 3.1."""


def smaller_jobs(
    job: PricedJob, machine: Machine, engine: FrameworkProfile, space: Space, room_bytes: float, base: Layout
) -> list[str]:
    """Returns the remedies of shorter rows and of fewer rows: the most of each, halved, that fits on the devices.

    Args:
        job: model and batch that fit nowhere.
        machine: devices and links.
        engine: the runtime's profile.
        space: the bounds of the search that found nothing.
        room_bytes: that a layout may fill on each device.
        base: the choices that every layout shares.
    """
    space = dataclasses.replace(space, offloads=("none",))

    def layout_and_speed(smaller: PricedJob) -> str:
        """Returns the fastest layout of a job with its speed; an empty text where none fits."""
        try:
            best = search(smaller, space, machine, engine, room_bytes).best
        except PlanError:
            return ""
        if best is None:
            return ""
        layout, step_s = layout_of(best[0], 0, base, len(job.shape.blocks), space.fixed), float(best[1].step_s[0])
        rate = format_count(smaller.rows * smaller.sequence / step_s)
        return f"{layout}, {format_seconds(step_s)} a step, {rate} tokens/s, {format_bytes(float(best[1].peak[0]))}"

    remedies = []
    for what, jobs in (
        ("rows of {0.sequence} tokens", _halved(job, "sequence", SHORTEST_ROWS)),
        ("{0.rows} rows", _halved(job, "rows", 1)),
    ):
        largest_first = list(jobs)
        # Where the smallest doesn't fit, none does.
        if not largest_first or not layout_and_speed(largest_first[-1]):
            continue
        smaller, text = next((smaller, text) for smaller in largest_first if (text := layout_and_speed(smaller)))
        remedies.append(f"{what.format(smaller)} ({text})")
    return remedies


def _halved(job: PricedJob, field: str, least: int) -> Iterator[PricedJob]:
    """Yields the job with a field halved again and again."""
    size = getattr(job, field) // 2
    while size >= least:
        # What the model's modules keep and move was counted for rows of the job's own length.
        counted = job if field == "rows" else job.uncounted()
        yield dataclasses.replace(counted, **{field: size})
        size //= 2


def leaner_optimizer(memory: Mapping[str, float], room_bytes: float) -> list[str]:
    """Returns the remedy of an optimizer with fewer bytes, where its bytes are what is missing.

    Args:
        memory: bytes of the leanest layout's fullest rank by part.
        room_bytes: that a layout may fill on each device.
    """
    missing, moments = sum(memory.values()) - room_bytes, memory["optimizer"]
    if not 0 < missing < moments:
        return []
    bytes_left = MOMENTS_BYTES * (1 - missing / moments)
    return [
        f"an optimizer with at most {bytes_left:.1f} bytes a parameter instead of {MOMENTS_BYTES:.0f}, "
        f"{format_bytes(missing)} less on the fullest rank, which this runtime doesn't have"
    ]
