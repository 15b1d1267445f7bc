"""Links between ranks, measured pair by pair: latency, bandwidth each way, and the difference of the clocks.

Each end of a pair is a process of its own with a limit, so that a broken link costs seconds and hides no other one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from meshwright.doctor.contract import Check, Observation, Subject
from meshwright.doctor.link_faults import find_link_faults
from meshwright.doctor.meeting import Meeting, serve_store
from meshwright.doctor.time_limit import LimitedCall
from meshwright.json_types import JsonObject
from meshwright.launch.addresses import LOOPBACK, open_store_socket
from meshwright.launch.contract import RankContext
from meshwright.launch.rendezvous import init_group

FORM_S = 15.0
"""Limit for the two ends to form their group."""
PAIR_S = 60.0
"""Limit of a pair, with the start of a CUDA context at each end."""
ROUND_TRIPS = 30
TRANSFER_S = 0.1
"""A transfer of this length counts; shorter ones are doubled."""
FIRST_BYTES, LAST_BYTES = 1 << 18, 1 << 26
REPEATS = 3
"""Transfers of the last size; the fastest counts, since other programs only slow it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkMeasurement:
    """One link between two nodes, or two ranks of a node."""

    first: int
    """Lower number of the two."""
    second: int
    """Higher number."""
    backend: str
    """``gloo`` or ``nccl``."""
    latency_s: float = 0.0
    """Half of the fastest round trip of 8 bytes."""
    forward_bytes_per_s: float = 0.0
    """From the first to the second."""
    backward_bytes_per_s: float = 0.0
    """From the second to the first."""
    clock_offset_s: float = 0.0
    """The second's clock less the first's."""
    fault: str = ""
    """Why nothing could be measured; empty when it could."""

    @property
    def bytes_per_s(self) -> float:
        """The slower direction."""
        return min(self.forward_bytes_per_s, self.backward_bytes_per_s)

    @classmethod
    def from_json(cls, values: JsonObject) -> Self:
        """Builds the measurement from another process's plain values.

        Raises:
            TypeError, ValueError: for values of another form.
        """
        fields = {field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values}
        numbers = {name: float(value) for name, value in fields.items() if name.endswith("_s")}
        first, second, backend = int(fields["first"]), int(fields["second"]), str(fields["backend"])
        fault = str(fields.get("fault", ""))
        return cls(first=first, second=second, backend=backend, fault=fault, **numbers)  # type: ignore[arg-type]


def pair_rounds(members: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Returns rounds of pairs: each pair of members once, and no member twice in a round.

    Source: the circle method of round-robin tournaments, Lucas 1883.
    """
    circle: list[int | None] = [*members] + [None] * (len(members) % 2)
    rounds = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], reversed(circle))
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle[1:] = [circle[-1], *circle[1:-1]]
    return rounds


def measure_node_links(meeting: Meeting, members: Sequence[int], backends: Sequence[str]) -> list[LinkMeasurement]:
    """Measures every pair that this node is an end of, in the same order on all nodes.

    Args:
        meeting: of the nodes.
        members: nodes that take part.
        backends: of the groups.
    """
    measurements = []
    for backend in backends:
        for pairs in pair_rounds(members):
            for pair in pairs:
                if meeting.node in pair:
                    end = LimitedCall(_pair_end(meeting, pair, pair.index(meeting.node), backend), PAIR_S)
                    measurements.append(_read_measurement(pair, backend, [end]))
    return measurements


def examine_local(subject: Subject) -> Observation:
    """Measures the links between the devices of this node; on cores one pair stands for all."""
    if subject.slots < 2:
        return Observation(value="one rank")
    backend = "nccl" if subject.kind == "cuda" else "gloo"
    rounds = pair_rounds(range(subject.slots)) if subject.kind == "cuda" else [[(0, 1)]]
    listener = open_store_socket(subject.slots)
    meeting = Meeting(host=LOOPBACK, port=listener.getsockname()[1], node=0, nodes=1)
    server, links = serve_store(listener), []
    try:
        for pairs in rounds:
            ends = [
                [LimitedCall(_pair_end(meeting, pair, index, backend), PAIR_S) for index in (0, 1)] for pair in pairs
            ]
            links += [_read_measurement(pair, backend, both) for pair, both in zip(pairs, ends)]
    finally:
        server.close()
    value, findings = find_link_faults(links, "GPU" if subject.kind == "cuda" else "rank")
    return Observation(
        value=value, findings=tuple(findings), facts={"links": [dataclasses.asdict(link) for link in links]}
    )


def _pair_end(meeting: Meeting, pair: tuple[int, int], index: int, backend: str) -> Callable[[], Any]:
    """Returns the work of one end of a pair."""
    slot = pair[index] if meeting.nodes == 1 else 0
    device = f"cuda:{slot}" if backend == "nccl" else "cpu"
    context = meeting.context(f"{backend}/{pair[0]}-{pair[1]}", index, 2, device, slot)
    return lambda: _measure_end(context, backend)


def _read_measurement(pair: tuple[int, int], backend: str, ends: Sequence[LimitedCall]) -> LinkMeasurement:
    """Waits for this node's ends of a pair; the last failure counts, the first value otherwise."""
    outcomes = [end.result() for end in ends]
    identity = {"first": pair[0], "second": pair[1], "backend": backend}
    for outcome in outcomes:
        if outcome.failure:
            return LinkMeasurement(**identity, fault=outcome.failure)  # type: ignore[arg-type]
    return LinkMeasurement.from_json(identity | dict(outcomes[0].value))


def _measure_end(context: RankContext, backend: str) -> dict[str, float]:
    """Measures one link at one of its ends; both return the same."""
    init_group(context, backend, timeout_s=FORM_S, group_s=FORM_S)
    try:
        device = torch.device(context.device)
        latency_s, offset_s = _time_round_trips(context.rank, device)
        rates = [_time_transfers(context.rank, sender, device) for sender in (0, 1)]
        figures = torch.tensor([latency_s, offset_s, *rates], dtype=torch.float64, device=device)
        # Each end knows the figures of what it sent; the other's are zero.
        dist.all_reduce(figures)
        latency_s, offset_s, forward, backward = figures.tolist()
        return {
            "latency_s": latency_s,
            "clock_offset_s": offset_s,
            "forward_bytes_per_s": forward,
            "backward_bytes_per_s": backward,
        }
    finally:
        dist.destroy_process_group()


def _time_round_trips(index: int, device: torch.device) -> tuple[float, float]:
    """Returns half of the fastest round trip and the other clock's lead, at end 0; zeros at end 1."""
    stamp = torch.zeros(1, dtype=torch.float64, device=device)
    fastest_s, offset_s = float("inf"), 0.0
    for _ in range(ROUND_TRIPS):
        if index:
            dist.recv(stamp, 0)
            stamp.fill_(time.time())
            dist.send(stamp, 0)
            continue
        start_s, sent_at = time.perf_counter(), time.time()
        dist.send(stamp, 1)
        dist.recv(stamp, 1)
        other_clock = float(stamp.item())
        trip_s = time.perf_counter() - start_s
        if trip_s < fastest_s:
            # The other end read its clock half a trip after this one. Source: RFC 5905, clock offset.
            fastest_s, offset_s = trip_s, other_clock - (sent_at + trip_s / 2)
    return (0.0, 0.0) if index else (fastest_s / 2, offset_s)


def _time_transfers(index: int, sender: int, device: torch.device) -> float:
    """Returns the bytes per second that ``sender`` sent; zero at the other end."""
    size, rate, repeats = FIRST_BYTES, 0.0, REPEATS
    header = torch.zeros(1, dtype=torch.float64, device=device)
    while True:
        if index == sender:
            header.fill_(size if repeats else 0)
            dist.send(header, 1 - index)
        else:
            dist.recv(header, sender)
        size = int(header.item())
        if not size:
            return rate
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        start_s = time.perf_counter()
        if index != sender:
            dist.recv(message, sender)
            dist.send(header, sender)
            continue
        dist.send(message, 1 - index)
        # The answer proves that the message has arrived: a send alone ends in a buffer.
        dist.recv(header, 1 - index)
        header.item()
        seconds = time.perf_counter() - start_s
        if seconds < TRANSFER_S and size < LAST_BYTES:
            size *= 2
        else:
            rate, repeats = max(rate, size / seconds), repeats - 1


CHECK = Check(
    name="local links", purpose="every pair of devices of a node is fast", limit_s=600.0, examine=examine_local
)
