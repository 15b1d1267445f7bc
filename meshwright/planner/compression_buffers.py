"""Bytes of a rank's buffers for sums that aren't exact: the most that live at once.

Of rounded numbers these are messages under way; of sums with error feedback also what a copy owes, and what it will
owe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.planner.collectives import Collectives, StateTraffic
from meshwright.planner.model_parts import ModelParts
from meshwright.planner.rank_groups import CollectiveGroup
from meshwright.spec.axis import Mechanics
from meshwright.spec.compression import BLOCK_VALUES, Compression, chunk_blocks
from meshwright.spec.layout import Layout


@dataclass(frozen=True, slots=True)
class _MessageBytes:
    """Bytes of a message's buffers: while each of its exchanges is under way, and between it and the next."""

    waiting: tuple[int, ...]
    between: tuple[int, ...]
    """After each exchange, at most."""

    @classmethod
    def of(cls, compression: Compression, copies: int, blocks: int, element_bytes: int) -> _MessageBytes:
        """Returns the message of a sum: values, encoded blocks and received ones, as `parallel.compression` has them.

        Args:
            compression: of the layout.
            copies: ranks that sum.
            blocks: of the message's weights.
            element_bytes: of an exact gradient.
        """
        run, chunk = compression.exact_copies(copies), chunk_blocks(blocks, copies)
        exact, rounded = BLOCK_VALUES * element_bytes, compression.format.block_bytes
        part = chunk * copies // run
        # The bytes that were sent, and those received; then the sum, exact and rounded; then the gathered sums.
        waiting = (2 * part * rounded, (part + chunk) * rounded)
        between = (2 * part * rounded + chunk * (exact + rounded), (part + chunk) * rounded)
        if run == 1:
            return cls(waiting, between)
        part_bytes, whole_bytes = part * exact, (part * run + part) * exact
        return cls(
            (whole_bytes, *(size + part_bytes for size in waiting), whole_bytes),
            (max(part_bytes + waiting[0], part_bytes), *(size + part_bytes for size in between), whole_bytes),
        )


@dataclass(slots=True)
class _RecordedMessages(Collectives):
    """Keeps the rounded messages of a rank, by group, instead of their bytes alone."""

    sums: dict[str, list[_MessageBytes]] = field(default_factory=dict)
    gathers: list[int] = field(default_factory=list)
    """Bytes of a gather's buffers: this rank's blocks, and every rank's."""

    def add_compressed_sum(
        self, copies: CollectiveGroup, rank: int, blocks: int, compression: Compression, element_bytes: int
    ) -> None:
        """Records the exchanges of a rounded sum; see `Collectives`."""
        if len(copies.ranks) > 1 and blocks:
            message = _MessageBytes.of(compression, len(copies.ranks), blocks, element_bytes)
            self.sums.setdefault(copies.axis, []).append(message)

    def add_rounded_gather(self, shards: CollectiveGroup, size: int, count: int) -> None:
        """Records a gather; see `Collectives`."""
        if len(shards.ranks) > 1:
            self.gathers.append(size * (1 + len(shards.ranks)))


def compression_buffer_bytes(layout: Layout, model: ModelParts) -> int:
    """Returns the bytes of the buffers of the rank that needs most; gradients' and weights' peaks add up.

    Ranks at one index along ``pp`` and ``tp`` need equally much, since their shards are padded alike.

    Args:
        layout: that sends less than exact values.
        model: as names and sizes.
    """
    stage_ranks = layout.world // layout.degree(Mechanics.STAGES)
    firsts = range(0, layout.world, stage_ranks)
    return max(
        _rank_bytes(layout, model, first + tp) for first in firsts for tp in range(layout.degree(Mechanics.MATRICES))
    )


def _rank_bytes(layout: Layout, model: ModelParts, rank: int) -> int:
    traffic = StateTraffic(model, layout, rank)
    gradients = gathers = 0
    if layout.compress.keeps_errors:
        gradients = sum(_feedback_bytes(layout, traffic, names) for names in traffic.stages)
    for recorded in traffic.stage_collectives(_RecordedMessages):
        if traffic.is_sharded:
            # Backward begins with the head and ends with the embedding. All units wait for each other: one order.
            messages = [message for group in recorded.sums.values() for message in reversed(group)]
            peak = _steered_peak_bytes(layout, True, messages)
        else:
            peak = sum(_steered_peak_bytes(layout, False, group) for group in recorded.sums.values())
        gradients, gathers = max(gradients, peak), max([gathers, *recorded.gathers])
    return gradients + gathers


def _feedback_bytes(layout: Layout, traffic: StateTraffic, names: Sequence[str]) -> int:
    """Returns the bytes of a stage's errors, and of what its sums with error feedback need at most."""
    sizes = traffic.feedback_bytes(names)
    gathered = [traffic.feedback_bytes(message).gathered for message in traffic.gradient_messages(names)]
    # A copy's values and indices and those of all; then exact gradients, where a message has some, beside nothing.
    messages = [_MessageBytes((size * (1 + layout.copies), 0), (size * layout.copies, 0)) for size in gathered]
    return sizes.kept + sizes.selection + _steered_peak_bytes(layout, traffic.is_sharded, messages)


def _steered_peak_bytes(layout: Layout, is_sharded: bool, messages: Sequence[_MessageBytes]) -> int:
    """Returns the most bytes of messages under way, as the runtime steers them.

    Args:
        layout: of the messages.
        is_sharded: whether they are of FSDP units.
        messages: in the order in which they start.
    """
    if is_sharded:
        return _peak_bytes(messages, starts_first=False, is_alone=_waits_at_once(layout))
    waits = layout.degree(Mechanics.TOKENS) == layout.degree(Mechanics.EXPERTS) == 1
    return _peak_bytes(messages, starts_first=True, starts_all=not waits)


def _waits_at_once(layout: Layout) -> bool:
    """Whether a unit's sum ends before the next one starts, as `parallel.fsdp.FsdpSync` steers it on the CPU.

    On other devices each sum ends where it starts; there this is the most that could be under way.
    """
    return layout.degree(Mechanics.STAGES) > 1 or (layout.zero >= 2 and layout.microbatches > 1)


def _peak_bytes(
    messages: Sequence[_MessageBytes], starts_first: bool, is_alone: bool = False, starts_all: bool = False
) -> int:
    """Returns the most bytes of messages under way.

    Args:
        messages: in the order in which they start.
        starts_first: whether a message starts before those under way go on to their next exchange, or after.
        is_alone: whether a message ends before the next one starts.
        starts_all: whether all start before any goes on.
    """
    peak = 0
    under_way: list[tuple[_MessageBytes, int]] = []

    def note(extra: int = 0) -> None:
        nonlocal peak
        peak = max(peak, extra + sum(message.waiting[phase] for message, phase in under_way))

    def advance(index: int) -> bool:
        """Moves a message on; returns whether it has ended."""
        message, phase = under_way[index]
        note(message.between[phase] - message.waiting[phase])
        if phase + 1 == len(message.waiting):
            del under_way[index]
            return True
        under_way[index] = message, phase + 1
        note()
        return False

    def advance_all(count: int) -> None:
        index = 0
        for _ in range(count):
            index += not advance(index)

    for message in messages:
        before = len(under_way)
        if not starts_first and not is_alone:
            advance_all(before)
        under_way.append((message, 0))
        note()
        if starts_first and not starts_all:
            advance_all(before)
        while is_alone and under_way:
            advance(0)
    while under_way:
        advance(0)
    return peak
