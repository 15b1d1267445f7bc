# long: a stream of pieces and the collectives over it are one noun
"""Collectives of CPU ranks on one machine over a `SharedSegment`.

Each rank writes its messages, in the order of the collectives, into one stream that all others read. A collective
copies its tensor into the stream where it starts, as far as there is room, and the peers read from there where they
wait: no rank waits for another in order to start. Sums add the ranks' values in rank order, so they are bit-identical
on all ranks and in every run. A message begins with a header, so ranks whose programs differ fail instead of mixing
tensors.

    all-reduce, 2 ranks or few bytes   each writes all n bytes, and adds what the others wrote
    all-reduce, more                   reduce-scatter, then all-gather: 2 (r-1)/r n bytes written by each of r ranks
    all-gather, all-to-all             each writes its part once, and copies the others' parts out

Only copies and sums happen here; a message that is longer than the ring moves in pieces. What a collective still owes
while its rank computes, such as the rest of a long message, is done by a thread.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.errors import LOST_CONTACT
from meshwright.parallel.shared_segment import ALIGNMENT, RING_BYTES, SharedSegment

PIECE_BYTES = 256 * 2**10
"""Bytes that are copied or added before they are published: small enough to stay in a core's cache."""
WHOLE_BYTES = 64 * 2**10
"""All-reduces of more than two ranks up to these bytes are sent whole: one wait for the peers instead of two."""
SPIN_S = 0.0001
"""Seconds for which a waiting rank looks again and again, about what a sleep and a wake cost; then it sleeps."""
CHECK_S = 0.02
"""Longest sleep, after which a waiting rank asks whether its peers are alive."""
SHORT_SLEEP_S = 0.001
"""Longest sleep while this rank has still something to write, for which it may be woken by another counter."""
HELPER_S = 0.001
"""Seconds between looks of the thread that does what a collective owes."""

_Bytes = NDArray[np.uint8]
_Add = Callable[[_Bytes, _Bytes, _Bytes], object]
_Steps = Generator[bool, None, None]
"""Work that yields True after a piece, and False where it needs the peers first."""
_ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL = range(1, 5)
_NAMES = {_ALL_REDUCE: "all_reduce", _ALL_GATHER: "all_gather", _REDUCE_SCATTER: "reduce_scatter",
          _ALL_TO_ALL: "all_to_all"}  # fmt: skip
_NUMPY_SUMS = {torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
_TORCH_SUMS = {torch.bfloat16, torch.float16}
"""Types that numpy doesn't know, or adds slowly."""
_NUMPY_TYPES = {
    torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.int32: np.int32,
    torch.int16: np.int16, torch.int8: np.int8, torch.uint8: np.uint8,
}  # fmt: skip


class SharedWireError(RuntimeError):
    """A collective over shared memory failed: a peer has ended, was too slow, or runs another program."""


class WireWork:
    """A started collective of a `SharedWire`; the sender's tensors must not change before `wait` has returned."""

    __slots__ = ("_wire", "name", "number", "sent", "stream_bytes", "unread", "unsent")

    def __init__(self, wire: SharedWire, name: str, number: int, stream_bytes: int) -> None:
        self._wire, self.name, self.number, self.stream_bytes = wire, name, number, stream_bytes
        self.sent = 0
        """Bytes of this rank's payload that are in its stream."""
        self.unsent = self.unread = True
        """Whether it has still to write, and to read."""

    @property
    def is_done(self) -> bool:
        """Whether its tensors are complete and free."""
        return not (self.unsent or self.unread)

    def wait(self) -> bool:
        """Waits until it is done.

        Raises:
            SharedWireError: when a peer that it needs has ended, or the wire's time is over.
        """
        self._wire.wait(self)
        return True


class SharedWire:
    """The collectives of one group, on one rank of it; every rank must call them in the same order.

    Args:
        segment: of all its ranks, mapped by each.
        index: of this rank within the group.
        ranks: global ranks, for messages.
        axis: its name, for messages.
        timeout_s: limit of a wait.
        is_crowded: whether ranks outnumber cores: a waiting rank then gives way at once.
    """

    def __init__(
        self, segment: SharedSegment, index: int, ranks: Sequence[int], axis: str, timeout_s: float, is_crowded: bool
    ) -> None:
        self._segment, self._index, self._size = segment, index, segment.ranks
        self._ranks, self._axis, self._timeout_s = tuple(ranks), axis, timeout_s
        self._spin_s = 0.0 if is_crowded else SPIN_S
        self._peers = [peer for peer in range(self._size) if peer != index]
        self._counters, self._rings, self._ring = segment.counters, segment.rings, segment.rings[index]
        self._published = [segment.published_at(rank) for rank in range(self._size)]
        self._tails = [segment.read_at(index, peer) for peer in self._peers]
        self._tail_of = [segment.read_at(peer, index) for peer in range(self._size)]
        # This rank's positions in all streams; what others see of them is in the counters.
        self._written, self._room_until = 0, RING_BYTES
        self._read, self._seen = [0] * self._size, [0] * self._size
        self._header = struct.Struct(f"={2 + self._size}q")
        self._header_bytes = _aligned(self._header.size)
        self._scratch = np.empty(PIECE_BYTES, np.uint8)
        self._number, self._owed_bytes = 0, 0
        self._writes: deque[tuple[WireWork, _Steps]] = deque()
        self._reads: deque[tuple[WireWork, _Steps]] = deque()
        # Both are asked after: two living ranks may wait for each other's bytes, which neither has room to write as a
        # third one has ended.
        self._needed_to_write: Sequence[int] = ()
        """Peers that had read least when this rank last looked for room."""
        self._needed_to_read: Sequence[int] = ()
        """Peers whose bytes the last step that read lacked."""
        self._awaited = (0, 0)
        """The counter that must move before it can, and the value that was too low."""
        self._failure: Exception | None = None
        self._lock, self._waiting = threading.Lock(), 0
        self._helper: threading.Thread | None = None

    @staticmethod
    def can_sum(dtype: torch.dtype) -> bool:
        """Returns whether `all_reduce` and `reduce_scatter` take a type."""
        return dtype in _NUMPY_SUMS or dtype in _TORCH_SUMS

    def all_reduce(self, tensor: torch.Tensor, largest: bool = False) -> WireWork:
        """Starts a sum of ``tensor`` (any shape, contiguous, in place); ``largest``: its maximum instead."""
        data, add = as_bytes(tensor), _adder(tensor.dtype, largest)
        if self._size == 2 or data.size <= WHOLE_BYTES:
            work = self._begin(_ALL_REDUCE, self._header_bytes + _aligned(data.size))
            sizes = [data.size] * self._size
            self._writes.append((work, self._send(work, _ALL_REDUCE, sizes, [data])))
            self._reads.append((work, self._add_up(work, _ALL_REDUCE, data, data, add, work)))
            return self._start(work)
        bounds = self._even_bounds(tensor.numel(), tensor.element_size())
        parts = [data[start:stop] for start, stop in itertools.pairwise(bounds)]
        scattered = self._scatter(parts[self._index], parts, add)
        gathered = self._begin(_ALL_GATHER, self._header_bytes + _aligned(parts[self._index].size))
        self._gather(gathered, parts, parts[self._index], scattered)
        return self._start(gathered)

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> WireWork:
        """Starts a gather of every rank's ``shard: (n,)`` into ``output: (size * n,)``, but for this rank's own."""
        data, whole = as_bytes(shard), as_bytes(output)
        work = self._begin(_ALL_GATHER, self._header_bytes + _aligned(data.size))
        self._gather(work, list(whole.reshape(self._size, -1)), data, None)
        return self._start(work)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> WireWork:
        """Starts a sum of ``tensor: (size * n,)``; this rank's run of it goes into ``output: (n,)``."""
        parts = list(as_bytes(tensor).reshape(self._size, -1))
        return self._start(self._scatter(as_bytes(output), parts, _adder(tensor.dtype, False)))

    def all_to_all(self, outputs: Sequence[torch.Tensor], chunks: Sequence[torch.Tensor]) -> WireWork:
        """Starts sending ``chunks[p]: (n,)`` to rank p and receiving ``outputs[p]: (n,)`` from it, but for its own."""
        parts, targets = [as_bytes(chunk) for chunk in chunks], [as_bytes(output) for output in outputs]
        payload = [parts[peer] for peer in self._peers]
        sizes = [0 if peer == self._index else part.size for peer, part in enumerate(parts)]
        stream_bytes = max(sum(map(_aligned, sizes)), sum(_aligned(target.size) for target in targets))
        work = self._begin(_ALL_TO_ALL, self._header_bytes + stream_bytes)
        self._writes.append((work, self._send(work, _ALL_TO_ALL, sizes, payload)))
        self._reads.append((work, self._copy_out(work, _ALL_TO_ALL, targets)))
        return self._start(work)

    def wait(self, work: WireWork) -> None:
        """Waits for a collective, and does meanwhile what this rank owes to the others.

        Raises:
            SharedWireError: see `WireWork.wait`.
        """
        if work.is_done:
            return
        began = still_since = time.perf_counter()
        checked, self._waiting = began, self._waiting + 1
        try:
            while True:
                with self._lock:
                    moved = self._advance()
                if work.is_done:
                    return
                now = time.perf_counter()
                if moved:
                    still_since = checked = now
                    continue
                if now - checked > CHECK_S:
                    self._check_peers(work, now - began)
                    checked = now
                if now - still_since > self._spin_s:
                    self._segment.sleep(*self._awaited, SHORT_SLEEP_S if self._writes else CHECK_S)
        finally:
            self._waiting -= 1

    def _begin(self, kind: int, stream_bytes: int) -> WireWork:
        """Returns the next collective, of which the streams take ``stream_bytes`` at most."""
        self._number += 1
        self._owed_bytes += stream_bytes
        return WireWork(self, f"{_NAMES[kind]} over {self._axis}", self._number, stream_bytes)

    def _start(self, work: WireWork) -> WireWork:
        """Does what a collective can do at once, and leaves the rest to the thread or to `wait`."""
        with self._lock:
            self._advance()
        # Peers may wait for what this rank has still to write, or to read from their rings before they can write more.
        if self._writes or self._owed_bytes > RING_BYTES // 2:
            self._wake_helper()
        return work

    def _scatter(self, output: _Bytes, parts: Sequence[_Bytes], add: _Add) -> WireWork:
        payload = [parts[peer] for peer in self._peers]
        sizes = [0 if peer == self._index else part.size for peer, part in enumerate(parts)]
        largest = max(sum(map(_aligned, sizes)), (self._size - 1) * _aligned(output.size))
        work = self._begin(_REDUCE_SCATTER, self._header_bytes + largest)
        self._writes.append((work, self._send(work, _REDUCE_SCATTER, sizes, payload)))
        self._reads.append((work, self._add_up(work, _REDUCE_SCATTER, output, parts[self._index], add, None)))
        return work

    def _gather(self, work: WireWork, parts: Sequence[_Bytes], own: _Bytes, after: WireWork | None) -> None:
        sizes = [own.size] * self._size
        self._writes.append((work, self._send(work, _ALL_GATHER, sizes, [own], after)))
        self._reads.append((work, self._copy_out(work, _ALL_GATHER, parts)))

    def _even_bounds(self, elements: int, element_bytes: int) -> list[int]:
        """Returns the byte bounds of the part of each rank."""
        return [elements * rank // self._size * element_bytes for rank in range(self._size + 1)]

    def _advance(self) -> bool:
        """Does all that can be done now, in turns; returns whether anything could. The lock is held.

        Raises:
            SharedWireError: when the wire has failed.
        """
        if self._failure is not None:
            raise SharedWireError(str(self._failure))
        progress = False
        try:
            while True:
                moved = self._step(self._writes, "unsent")
                moved = self._step(self._reads, "unread") or moved
                if not moved:
                    return progress
                progress = True
        except Exception as error:
            self._failure = error
            raise

    def _step(self, queue: deque[tuple[WireWork, _Steps]], pending: str) -> bool:
        """Does a piece of the first collective of a queue; returns whether it could."""
        if not queue:
            return False
        work, steps = queue[0]
        try:
            return next(steps)
        except StopIteration:
            queue.popleft()
            setattr(work, pending, False)
            if work.is_done:
                self._owed_bytes -= work.stream_bytes
            return True

    def _send(
        self, work: WireWork, kind: int, sizes: Sequence[int], payload: Sequence[_Bytes], after: WireWork | None = None
    ) -> _Steps:
        """Writes a message: its kind and number, the bytes for each rank, and the bytes themselves.

        Args:
            work: the collective.
            kind: of it.
            sizes: bytes for each rank; where all read the same, its bytes.
            payload: one part that all read, or a part for each peer, in their order.
            after: the collective that makes what is sent; None where it is there.
        """
        while after is not None and after.unread:
            yield False
        while self._room() < self._header_bytes:
            yield False
        place = self._written % RING_BYTES
        # At the ring's end a header may not fit in one piece.
        header = self._header.pack(kind, work.number, *sizes)
        first = header[: RING_BYTES - place]
        self._ring[place : place + len(first)] = np.frombuffer(first, np.uint8)
        if len(first) < len(header):
            self._ring[: len(header) - len(first)] = np.frombuffer(header[len(first) :], np.uint8)
        self._written += self._header_bytes
        for part in payload:
            offset = 0
            while offset < part.size:
                place = self._written % RING_BYTES
                count = min(part.size - offset, self._room(part.size - offset), RING_BYTES - place, PIECE_BYTES)
                if count <= 0:
                    yield False
                    continue
                self._ring[place : place + count] = part[offset : offset + count]
                offset += count
                work.sent += count
                self._written += _aligned(count)
                # After the data: stores are seen in order (`ORDERED_MACHINES`).
                self._publish()
                yield True
        if not any(part.size for part in payload):
            self._publish()

    def _publish(self) -> None:
        """Shows the peers what is written, and wakes those that wait for it."""
        counter = self._published[self._index]
        self._counters[counter] = self._written
        self._segment.wake(counter)

    def _room(self, wanted: int = 0) -> int:
        """Returns the free bytes of this rank's ring, a multiple of `ALIGNMENT`; looks again if below ``wanted``."""
        if self._room_until - self._written < max(wanted, self._header_bytes):
            slowest, tail = min((self._counters[tail], tail) for tail in self._tails)
            # A peer that skips bytes it doesn't need may be ahead of what is written.
            self._room_until = RING_BYTES + min(slowest, self._written)
            behind = [peer for peer, tail in zip(self._peers, self._tails) if self._counters[tail] <= slowest]
            self._needed_to_write, self._awaited = behind, (tail, slowest)
        return self._room_until - self._written

    def _headers(self, work: WireWork, kind: int, expected: Sequence[int]) -> Generator[bool, None, list[list[int]]]:
        """Reads the headers of all peers' messages; returns the sizes in each, by rank (this rank's own is empty).

        Args:
            work: the collective.
            kind: of it.
            expected: bytes that must come from each rank.

        Raises:
            SharedWireError: when a peer sends something else.
        """
        sizes: list[list[int]] = [[] for _ in range(self._size)]
        for peer in self._peers:
            while self._available(peer) < self._header_bytes:
                self._need([other for other in self._peers if not sizes[other]])
                yield False
            place, ring = self._read[peer] % RING_BYTES, self._rings[peer]
            header = ring[place : place + self._header.size].tobytes()
            header += ring[: self._header.size - len(header)].tobytes()
            sent_kind, number, *sizes[peer] = self._header.unpack(header)
            if (sent_kind, number, sizes[peer][self._index]) != (kind, work.number, expected[peer]):
                raise SharedWireError(
                    f"ranks of {self._axis} run different programs: rank {self._ranks[peer]} sends "
                    f"{sizes[peer][self._index]} bytes by its collective {number}, {_NAMES.get(sent_kind, sent_kind)}; "
                    f"rank {self._ranks[self._index]} expects {expected[peer]} bytes by its {work.number}th, "
                    f"{_NAMES[kind]}"
                )
            self._skip(peer, self._header_bytes)
        return sizes

    def _add_up(
        self, work: WireWork, kind: int, output: _Bytes, own: _Bytes, add: _Add, sent_first: WireWork | None
    ) -> _Steps:
        """Adds the ranks' bytes in rank order.

        Args:
            work: the collective.
            kind: of it.
            output: where the sum goes.
            own: this rank's summand, which may be ``output``.
            add: adds two runs of bytes into a third.
            sent_first: the collective that must have sent what is overwritten; None where that isn't sent.
        """
        sizes = yield from self._headers(work, kind, [output.size] * self._size)
        before, behind = self._around(kind, sizes)
        for peer in self._peers:
            self._skip(peer, before[peer])
        offset = 0
        while offset < output.size:
            count = min(output.size - offset, PIECE_BYTES)
            for peer in self._peers:
                available = min(self._available(peer), RING_BYTES - self._read[peer] % RING_BYTES)
                count = min(count, available)
            if count <= 0:
                self._need([peer for peer in self._peers if self._seen[peer] <= self._read[peer]])
            if sent_first is not None:
                count = min(count, sent_first.sent - offset)
            if count <= 0:
                yield False
                continue
            summands = []
            for rank in range(self._size):
                place = self._read[rank] % RING_BYTES
                source = (
                    own[offset : offset + count] if rank == self._index else self._rings[rank][place : place + count]
                )
                summands.append(source)
            # The own summand may lie where the sum goes, so the sum of the first ones is made elsewhere.
            partial = summands[0]
            for summand in summands[1:-1]:
                add(partial, summand, self._scratch[:count])
                partial = self._scratch[:count]
            add(partial, summands[-1], output[offset : offset + count])
            offset += count
            for peer in self._peers:
                self._skip(peer, _aligned(count))
            yield True
        for peer in self._peers:
            self._skip(peer, behind[peer])

    def _copy_out(self, work: WireWork, kind: int, targets: Sequence[_Bytes]) -> _Steps:
        """Copies what each rank sends into ``targets[rank]``, as it comes."""
        sizes = yield from self._headers(work, kind, [target.size for target in targets])
        before, behind = self._around(kind, sizes)
        offsets = [0] * self._size
        for peer in self._peers:
            self._skip(peer, before[peer])
        unfinished = list(self._peers)
        while unfinished:
            moved = False
            for peer in tuple(unfinished):
                target, offset, place = targets[peer], offsets[peer], self._read[peer] % RING_BYTES
                count = min(target.size - offset, self._available(peer), RING_BYTES - place, PIECE_BYTES)
                if count > 0:
                    target[offset : offset + count] = self._rings[peer][place : place + count]
                    offsets[peer] += count
                    self._skip(peer, _aligned(count))
                    moved = True
                if offsets[peer] == target.size:
                    self._skip(peer, behind[peer])
                    unfinished.remove(peer)
            if unfinished:
                if not moved:
                    self._need(unfinished)
                yield moved

    def _around(self, kind: int, sizes: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """Returns the bytes of each peer's message before and behind those for this rank."""
        if kind in (_ALL_REDUCE, _ALL_GATHER):
            return [0] * self._size, [0] * self._size
        before = [sum(map(_aligned, of_rank[: self._index])) for of_rank in sizes]
        return before, [sum(map(_aligned, of_rank[self._index + 1 :])) for of_rank in sizes]

    def _available(self, peer: int) -> int:
        """Returns the bytes that a peer has published and this rank has not read."""
        self._seen[peer] = self._counters[self._published[peer]]
        return self._seen[peer] - self._read[peer]

    def _need(self, peers: Sequence[int]) -> None:
        """Notes that a step waits for the next bytes of some peers."""
        # The value that the step saw: if more has come since it looked, the sleep ends at once.
        self._needed_to_read, self._awaited = tuple(peers), (self._published[peers[0]], self._seen[peers[0]])

    def _skip(self, peer: int, count: int) -> None:
        """Gives bytes of a peer's stream back to it, and wakes it where its ring may have been full."""
        may_wait = self._seen[peer] - self._read[peer] > RING_BYTES // 2
        self._read[peer] += count
        self._counters[self._tail_of[peer]] = self._read[peer]
        if may_wait:
            self._segment.wake(self._tail_of[peer])

    def _check_peers(self, work: WireWork, waited_s: float) -> None:
        """Ends a wait that can't succeed.

        Raises:
            SharedWireError: when a needed peer has ended, or the time is over.
        """
        to_write, to_read = self._needed_to_write if self._writes else (), self._needed_to_read if self._reads else ()
        needed = sorted({*to_write, *to_read})
        lost = [peer for peer in needed if not self._segment.is_held(peer)]
        with self._lock:
            # What it published before its end may suffice.
            if lost and not self._advance() and not work.is_done:
                self._failure = SharedWireError(f"{LOST_CONTACT}: {self._name(lost)} ended before {work.name} was done")
                raise self._failure
        if waited_s > self._timeout_s:
            self._failure = SharedWireError(
                f"{work.name} timed out after {self._timeout_s:g} s, waiting for {self._name(needed)}"
            )
            raise self._failure

    def _name(self, peers: Sequence[int]) -> str:
        ranks = [str(self._ranks[peer]) for peer in peers] or ["others"]
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"

    def _wake_helper(self) -> None:
        """Starts the thread unless it runs; it ends once nothing is owed."""
        if self._helper is None or not self._helper.is_alive():
            self._helper = threading.Thread(target=self._help, name=f"wire {self._axis}", daemon=True)
            self._helper.start()

    def _help(self) -> None:
        """Does what is owed while the rank computes, or waits for something else."""
        while self._writes or self._owed_bytes > RING_BYTES // 2:
            time.sleep(HELPER_S)
            if self._waiting:
                continue
            try:
                with self._lock:
                    self._advance()
            except Exception:
                return  # kept as the wire's failure, which the next wait raises


def _aligned(count: int) -> int:
    """Returns bytes rounded up to `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def as_bytes(tensor: torch.Tensor) -> _Bytes:
    """Returns the memory of a contiguous CPU tensor of any shape and type, as (n,) bytes."""
    if not tensor.is_contiguous():
        raise SharedWireError(f"a collective over shared memory needs contiguous tensors; strides {tensor.stride()}")
    tensor = tensor.detach()
    if tensor.dtype not in _NUMPY_TYPES:
        # A dim of one element may have any stride, which a view as bytes doesn't take.
        tensor = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    flat: _Bytes = tensor.numpy().reshape(-1).view(np.uint8)
    return flat


def _adder(dtype: torch.dtype, largest: bool) -> _Add:
    """Returns what adds two runs of bytes, as elements of a type, into a third; or takes the larger ones."""
    if dtype in _NUMPY_SUMS:
        function, kind = np.maximum if largest else np.add, _NUMPY_TYPES[dtype]
        return lambda left, right, out: function(left.view(kind), right.view(kind), out=out.view(kind))
    operation = torch.maximum if largest else torch.add
    return lambda left, right, out: operation(
        *(torch.from_numpy(source).view(dtype) for source in (left, right)), out=torch.from_numpy(out).view(dtype)
    )
