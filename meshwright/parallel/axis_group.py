# long: a group, its collectives and the log of their traffic are one noun
"""Collectives over one axis's group, with a log of the bytes sent and of the time that ranks were blocked.

On gloo the gather and the scatter are direct exchanges between pairs: every rank sends each peer its part at once and
sums in rank order. That is the same number of bytes as a ring, with one message latency instead of n-1, the sum is
bit-identical on all ranks, and it avoids gloo's own reduce-scatter, which all-reduces the whole tensor.

CPU ranks of one machine have a `SharedWire` instead, which carries all but `exchange`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from meshwright.events import CommTotals
from meshwright.parallel.host_copy import HostCopy
from meshwright.parallel.live_bytes import LiveBytes
from meshwright.parallel.shared_wire import SharedWire, WireWork

DIRECT_RANKS = 16
"""Largest gloo group that exchanges directly; beyond it the number of messages per rank outweighs the latency saved."""
MOST_TRANSFERS = 1 << 14
"""Collectives of which times are kept until the log is drained; a custom loop may never drain it."""

_MOST_EVENTS = 1 << 17
_TimedCollective = tuple[str, str, torch.cuda.Event, torch.cuda.Event, torch.cuda.Event, int]
"""Axis, operation, start, wait, resume and bytes of `TrafficLog.add_events`."""


@dataclass
class StepTraffic:
    """This rank's traffic by axis and operation between two calls of `TrafficLog.take`."""

    totals: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """Calls, bytes, seconds, exposed seconds and bytes uncompressed."""
    transfers: dict[tuple[str, str], deque[tuple[float, int]]] = field(default_factory=dict)
    """(seconds, bytes) of single collectives."""
    squares: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """(2,) float64 of compressed sums, on their device: squared rounding error, squared sum."""
    host_squares: dict[tuple[str, str], HostCopy] = field(default_factory=dict)
    """``squares`` on their way to the host, once the traffic was taken."""
    events: deque[_TimedCollective] = field(default_factory=lambda: deque(maxlen=_MOST_EVENTS))

    def add_transfer(self, axis: str, op: str, seconds: float, sent_bytes: int) -> None:
        """Notes the time of one collective, for the quantiles."""
        transfers = self.transfers.get((axis, op))
        if transfers is None:
            transfers = self.transfers[axis, op] = deque(maxlen=MOST_TRANSFERS)
        transfers.append((seconds, sent_bytes))

    def read(self) -> tuple[CommTotals, ...]:
        """Returns the totals; on CUDA the caller has synchronised with the end of what was taken. Call it once."""
        for axis, op, start, wait, resume, sent_bytes in self.events:
            # An event that hasn't happened would make elapsed_time raise; its collective counts without a time.
            if resume.query():
                total, seconds = self.totals[axis, op], start.elapsed_time(resume) / 1e3
                total[2] += seconds
                total[3] += wait.elapsed_time(resume) / 1e3
                self.add_transfer(axis, op, seconds, sent_bytes)
        return tuple(
            CommTotals(
                axis=axis,
                op=op,
                calls=int(calls),
                bytes=int(byte_count),
                seconds=seconds,
                exposed_s=exposed,
                raw_bytes=int(raw_bytes),
                rounding_error=self._rounding_error(axis, op),
                **_quantiles(self.transfers.get((axis, op), ())),
            )
            for (axis, op), (calls, byte_count, seconds, exposed, raw_bytes) in self.totals.items()
        )

    def _rounding_error(self, axis: str, op: str) -> float:
        """Returns the relative error of the compressed sums of an operation; 0 where none was compressed."""
        if (axis, op) not in self.host_squares:
            return 0.0
        squared_error, squared_sum = self.host_squares[axis, op].read().tolist()
        return math.sqrt(squared_error / squared_sum) if squared_sum > 0 else 0.0


@dataclass
class TrafficLog:
    """Adds up the traffic of this rank by axis and operation until `take` or `drain` empties it.

    ``on_wait`` is called with ``"all_gather over shard of layer 3"`` before the rank blocks on a collective and with
    ``""`` after it; with the collective's number since the log was emptied, counted from 1; and with the bytes that the
    rank sends for it.
    """

    on_wait: Callable[[str, int, int], None] | None = None
    started: int = 0
    """Collectives that were started since the log was emptied."""
    stage_wait_s: float = 0.0
    """Seconds that a pipeline's stages have waited for their inputs and gradients; on the CPU alone, never drained."""
    buffers: LiveBytes = field(default_factory=LiveBytes)
    """Buffers of rounded numbers: of ``gradients``, and of gathered ``weights``."""
    _traffic: StepTraffic = field(default_factory=StepTraffic)

    def add(
        self, axis: str, op: str, sent_bytes: int, seconds: float, exposed_s: float, raw_bytes: int | None = None
    ) -> None:
        """Books one collective; ``raw_bytes`` is what it would send uncompressed, None for the same."""
        total = self._traffic.totals.setdefault((axis, op), [0, 0, 0.0, 0.0, 0])
        total[0] += 1
        total[1] += sent_bytes
        total[2] += seconds
        total[3] += exposed_s
        total[4] += sent_bytes if raw_bytes is None else raw_bytes
        if seconds > 0.0:
            self._traffic.add_transfer(axis, op, seconds, sent_bytes)

    def add_rounding(self, axis: str, op: str, squared_error: torch.Tensor, squared_sum: torch.Tensor) -> None:
        """Books the rounding of a compressed sum: scalars on its device, read with the rest."""
        squares, key = torch.stack([squared_error, squared_sum]).to(torch.float64), (axis, op)
        earlier = self._traffic.squares.get(key)
        self._traffic.squares[key] = squares if earlier is None else earlier + squares

    def add_events(
        self,
        axis: str,
        op: str,
        start: torch.cuda.Event,
        wait: torch.cuda.Event,
        resume: torch.cuda.Event,
        sent_bytes: int = 0,
    ) -> None:
        """Books the device times of a collective, which are read with the rest.

        Args:
            axis: as in `add`.
            op: as in `add`.
            start: CUDA event where the computing stream started the collective.
            wait: event where that stream had nothing left to do but wait for it.
            resume: event from which on it computes again; from ``wait`` to here it stands still.
            sent_bytes: as in `add`; they are booked there.
        """
        self._traffic.events.append((axis, op, start, wait, resume, sent_bytes))

    def start_operation(self) -> int:
        """Returns the number of a collective that starts now."""
        self.started += 1
        return self.started

    @contextlib.contextmanager
    def waiting(self, description: str, number: int) -> Iterator[None]:
        """Reports to ``on_wait`` a wait that lasts as long as the context.

        Args:
            description: the text for ``on_wait``.
            number: from `start_operation`.
        """
        if self.on_wait:
            self.on_wait(description, number, 0)
        yield
        if self.on_wait:
            self.on_wait("", number, 0)

    def take(self) -> StepTraffic:
        """Returns the traffic so far, to be read when it suits, and starts again."""
        taken, self._traffic, self.started = self._traffic, StepTraffic(), 0
        taken.host_squares = {key: HostCopy(squares) for key, squares in taken.squares.items()}
        return taken

    def put_back(self, traffic: StepTraffic) -> None:
        """Goes on after traffic that was taken and not read; what came since is dropped."""
        self._traffic, self.started = traffic, 0

    def drain(self) -> tuple[CommTotals, ...]:
        """Returns the totals so far and starts again. On CUDA the caller has synchronised with the step's end."""
        return self.take().read()


def _quantiles(transfers: Iterable[tuple[float, int]]) -> dict[str, float]:
    """Returns the quantiles of `CommTotals` of (seconds, bytes) of collectives; none where no time is known."""
    timed = [(seconds, sent_bytes) for seconds, sent_bytes in transfers if seconds > 0.0]
    if not timed:
        return {}
    seconds = sorted(seconds for seconds, _ in timed)
    rates = sorted((sent_bytes / seconds for seconds, sent_bytes in timed), reverse=True)
    middle, last = (math.ceil(share * len(timed)) - 1 for share in (0.5, 0.99))
    return {
        "latency_p50_s": seconds[middle], "latency_p99_s": seconds[last],
        "bandwidth_p50": rates[middle], "bandwidth_p99": rates[last],
    }  # fmt: skip


class PendingCollective(dist.Work):  # type: ignore[misc]
    """A started collective: `wait` finishes it once, books it, and runs what must follow (a sum, a copy).

    Args:
        works: what was started.
        finish_transfer: called after the transfer: a copy or a sum.
        axis_group: its ranks.
        op: its kind.
        sent_bytes: bytes that this rank sends.
        subject: the weights or gradients that travel, as ``layer 3``; empty for activations.
        starting_s: seconds of this rank's own that the start took.
    """

    def __init__(
        self,
        works: Sequence[dist.Work | WireWork],
        finish_transfer: Callable[[], None],
        axis_group: AxisGroup,
        op: str,
        sent_bytes: int,
        subject: str = "",
        starting_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.raw_bytes = sent_bytes
        """What it would send uncompressed."""
        self._name = f"{op} over {axis_group.axis} of {subject}" if subject else f"{op} over {axis_group.axis}"
        self._pending_works, self._finish_transfer, self._axis_group, self._op, self._bytes = (
            works,
            finish_transfer,
            axis_group,
            op,
            sent_bytes,
        )
        self._starting_s, self._finished = starting_s, False
        self._started = time.perf_counter() - starting_s
        # From here to `wait` the transfer overlaps with compute.
        self._event = _record_event() if axis_group.on_cuda else None
        self._number = axis_group.log.start_operation()

    def wait(self, timeout: object = None) -> bool:
        """Waits for the transfer; the process group's own timeout bounds it."""
        if self._finished:
            return True
        log = self._axis_group.log
        wait_began = time.perf_counter()
        # On CUDA the host doesn't wait, the computing stream does: its events say for how long.
        wait_event = _record_event() if self._event is not None else None
        if log.on_wait:
            log.on_wait(self._name, self._number, self._bytes)
        for pending in self._pending_works:
            pending.wait()
        self._finish_transfer()
        self._finished = True
        if log.on_wait:
            log.on_wait("", self._number, 0)
        now = time.perf_counter()
        if self._event is None:
            exposed_s = now - wait_began + self._starting_s
            log.add(self._axis_group.axis, self._op, self._bytes, now - self._started, exposed_s, self.raw_bytes)
        else:
            # Calls and bytes now; the device's times when the log is drained.
            log.add(self._axis_group.axis, self._op, self._bytes, 0.0, 0.0, self.raw_bytes)
            log.add_events(self._axis_group.axis, self._op, self._event, wait_event, _record_event(), self._bytes)
        return True

    def advance(self) -> bool:
        """Waits for the transfer, after which nothing follows; see `compression.PhasedCollective`."""
        return self.wait()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class DifferentiableCollectives:
    """Runs autograd functions whose forward and backward communicate."""

    def __init__(self) -> None:
        self.operator_name = ""
        """Name by which the operators of compiled graphs find the group; empty where nothing is compiled."""

    def apply(self, function: type[torch.autograd.Function], *args: object) -> object:
        """Applies an autograd function, whose forward and backward communicate over this group."""
        return function.apply(*args)

    @property
    def is_traced(self) -> bool:
        """Whether torch.compile traces the call, so that the group's operators stand for its collectives."""
        return bool(self.operator_name) and torch.compiler.is_compiling()


class AxisGroup(DifferentiableCollectives):
    """The collectives of one group.

    Args:
        axis: name in the account.
        group: the process group.
        log: where traffic is booked.
        wire: over shared memory; None for the group's own collectives.
        gloo_reason: why CPU ranks don't share memory; empty where they do, or nobody asked.
    """

    def __init__(
        self,
        axis: str,
        group: dist.ProcessGroup,
        log: TrafficLog,
        wire: SharedWire | None = None,
        gloo_reason: str = "",
    ) -> None:
        super().__init__()
        self.axis, self.group, self.log, self.wire, self.gloo_reason = axis, group, log, wire, gloo_reason
        self.size, self.index = group.size(), group.rank()
        self._global = dist.get_process_group_ranks(group)
        backends = dist.get_backend_config(group)
        self.on_cuda = "cuda:nccl" in backends or backends == "nccl"
        # NCCL's own collectives are kept; gloo's are replaced where n - 1 messages a rank are few.
        self._direct = not self.on_cuda and "gloo" in backends and self.size <= DIRECT_RANKS

    def all_reduce(self, tensor: torch.Tensor, of: str = "") -> PendingCollective:
        """Starts a sum of ``tensor`` (any shape, contiguous, in place) over the group; ``of`` names it."""
        # A ring moves 2 (n-1)/n of the tensor per rank: reduce-scatter, then all-gather.
        sent = 2 * tensor.nbytes * (self.size - 1) // self.size
        if self.wire is not None and self.wire.can_sum(tensor.dtype):
            return self._shared("all_reduce", sent, self.wire.all_reduce, tensor, of=of)
        return self._native("all_reduce", sent, lambda: dist.all_reduce(tensor, group=self.group, async_op=True), of)

    def all_reduce_max(self, tensor: torch.Tensor) -> PendingCollective:
        """Starts an element-wise maximum of ``tensor`` (any shape, contiguous, in place) over the group."""
        sent = 2 * tensor.nbytes * (self.size - 1) // self.size
        if self.wire is not None and self.wire.can_sum(tensor.dtype):
            return self._shared("all_reduce", sent, self.wire.all_reduce, tensor, True)
        maximum = dist.ReduceOp.MAX
        return self._native(
            "all_reduce", sent, lambda: dist.all_reduce(tensor, maximum, group=self.group, async_op=True)
        )

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, of: str = "") -> PendingCollective:
        """Starts a gather of every rank's ``shard: (n,)`` into ``output: (size * n,)``, in rank order.

        ``shard`` may be this rank's own slice of ``output``.
        """
        sent = shard.nbytes * (self.size - 1)
        if self.size == 1:
            return PendingCollective([], lambda: _copy(output, shard), self, "all_gather", 0, of)
        if self.wire is not None:
            _copy(output.view(self.size, -1)[self.index], shard)
            return self._shared("all_gather", sent, self.wire.all_gather, output, shard, of=of)
        if not self._direct:
            gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            return self._native("all_gather", sent, lambda: gather(output, shard, group=self.group, async_op=True), of)
        chunks = output.view(self.size, -1)
        # Receives are posted first: gloo sends nothing until the receiver has said where to.
        works = self._receive(lambda peer: chunks[peer]) + self._send(lambda peer: shard)
        return PendingCollective(works, lambda: _copy(chunks[self.index], shard), self, "all_gather", sent, of)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, of: str = "") -> PendingCollective:
        """Starts a sum of ``tensor: (size * n,)`` over the group; this rank gets its run of it in ``output: (n,)``."""
        sent = output.nbytes * (self.size - 1)
        if self.size == 1:
            return PendingCollective([], lambda: _copy(output, tensor), self, "reduce_scatter", 0, of)
        if self.wire is not None and self.wire.can_sum(tensor.dtype):
            return self._shared("reduce_scatter", sent, self.wire.reduce_scatter, output, tensor, of=of)
        if not self._direct:
            scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
            return self._native(
                "reduce_scatter", sent, lambda: scatter(output, tensor, group=self.group, async_op=True), of
            )
        chunks = tensor.view(self.size, -1)
        # This rank's own chunk needs no buffer: it is read where it lies.
        received_chunks = {peer: torch.empty_like(output) for peer in range(self.size) if peer != self.index}
        works = self._receive(received_chunks.__getitem__) + self._send(lambda peer: chunks[peer])
        received_chunks[self.index] = chunks[self.index]

        # In rank order, whatever order the chunks arrive in, so that rounding doesn't depend on timing.
        def add_up() -> None:
            torch.add(received_chunks[0], received_chunks[1], out=output)
            for peer in range(2, self.size):
                output.add_(received_chunks[peer])

        return PendingCollective(works, add_up, self, "reduce_scatter", sent, of)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], chunks: Sequence[torch.Tensor], of: str = ""
    ) -> PendingCollective:
        """Starts sending ``chunks[p]`` to rank p and receiving ``outputs[p]`` from it; any shapes, contiguous."""
        sent = sum(chunk.nbytes for peer, chunk in enumerate(chunks) if peer != self.index)
        if self.wire is not None:
            _copy(outputs[self.index], chunks[self.index])
            return self._shared("all_to_all", sent, self.wire.all_to_all, outputs, chunks, of=of)
        if not self._direct:
            output_list, inputs = list(outputs), list(chunks)
            return self._native(
                "all_to_all", sent, lambda: dist.all_to_all(output_list, inputs, group=self.group, async_op=True), of
            )
        works = self._receive(outputs.__getitem__) + self._send(chunks.__getitem__)
        return PendingCollective(
            works, lambda: _copy(outputs[self.index], chunks[self.index]), self, "all_to_all", sent, of
        )

    def all_to_all_rows(
        self, output: torch.Tensor, rows: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> PendingCollective:
        """Starts sending each rank its rows, and receiving those of each, both in rank order.

        Args:
            output: (n_received, ...), contiguous; n_received is the sum of ``received``.
            rows: (n_sent, ...), contiguous; n_sent is the sum of ``sent``.
            received: rows from each rank.
            sent: rows for each rank.
        """
        if self.wire is not None:
            return self.all_to_all(output.split(list(received)), rows.split(list(sent)))
        sent_bytes = rows[:1].nbytes * (sum(sent) - sent[self.index])
        return self._native(
            "all_to_all",
            sent_bytes,
            lambda: dist.all_to_all_single(output, rows, list(received), list(sent), group=self.group, async_op=True),
        )

    def exchange(self, outputs: Mapping[int, torch.Tensor], chunks: Mapping[int, torch.Tensor]) -> PendingCollective:
        """Starts sending ``chunks[p]`` to rank p and receiving ``outputs[p]`` from it, of any peers and shapes."""
        # Receives first, as in `all_gather`; NCCL takes all of them as one.
        operations = [
            dist.P2POp(dist.irecv, output, self._global[peer], group=self.group) for peer, output in outputs.items()
        ]
        operations += [
            dist.P2POp(dist.isend, chunk, self._global[peer], group=self.group) for peer, chunk in chunks.items()
        ]
        sent = sum(chunk.nbytes for chunk in chunks.values())
        works = dist.batch_isend_irecv(operations) if operations else []
        return PendingCollective(works, lambda: None, self, "send", sent)

    def _peers(self) -> list[int]:
        """Peers in an order that spreads the load: each rank starts with its right-hand neighbour."""
        # Without it all ranks would send to rank 0 first.
        return [(self.index + step) % self.size for step in range(1, self.size)]

    def _receive(self, buffer_of_peer: Callable[[int], torch.Tensor]) -> list[dist.Work]:
        return [dist.irecv(buffer_of_peer(peer), self._global[peer], group=self.group) for peer in self._peers()]

    def _send(self, chunk_for_peer: Callable[[int], torch.Tensor]) -> list[dist.Work]:
        return [dist.isend(chunk_for_peer(peer), self._global[peer], group=self.group) for peer in self._peers()]

    def _shared(
        self, op: str, sent_bytes: int, start: Callable[..., WireWork], *args: object, of: str = ""
    ) -> PendingCollective:
        began = time.perf_counter()
        work = start(*args)
        return PendingCollective([work], lambda: None, self, op, sent_bytes, of, time.perf_counter() - began)

    def _native(self, op: str, sent_bytes: int, start: Callable[[], dist.Work], of: str = "") -> PendingCollective:
        return PendingCollective([start()], lambda: None, self, op, sent_bytes, of)
