"""The state of a run in memory that outlives its ranks: copied every few steps, taken up by those that come after."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from meshwright.checkpoint.agreement import Agreement
from meshwright.checkpoint.snapshot import Segment, SnapshotWriter, State
from meshwright.checkpoint.tensor_shards import digest, keepers, parts_of
from meshwright.errors import CheckpointError
from meshwright.parallel.program import Program
from meshwright.train.flight import Flight
from meshwright.train.integrity import Damage
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.state import BUFFERS, adopt_values, plain_values, state_places, state_tensors

_WORD = struct.Struct("<q")
CUT_SHARE = 2.0**-20
"""What a rank that was asked to cut adds to the sum of those that were asked to stop: far less than one of these."""


RESTORING = "restoring from memory failed"
"""How the error of a state in memory that can't be taken up begins."""


class Control:
    """Words that a supervisor writes and every rank reads."""

    def __init__(self) -> None:
        self._segment = Segment()
        self._map = self._segment.map(3 * _WORD.size)

    def ask_cut(self) -> None:
        """Asks all ranks to end after a step that they agree on, keeping the state."""
        _WORD.pack_into(self._map, 0, 1)

    @property
    def cut(self) -> bool:
        """Whether that was asked."""
        return _WORD.unpack_from(self._map, 0)[0] != 0

    def tell_written(self, step: int, good: bool) -> None:
        """Tells that the state of a step, copied for the disk, was written or couldn't be."""
        _WORD.pack_into(self._map, 2 * _WORD.size, int(good))
        _WORD.pack_into(self._map, _WORD.size, step)

    @property
    def written(self) -> tuple[int, bool]:
        """The last step of which that was told, 0 before the first, and whether it was written."""
        return _WORD.unpack_from(self._map, _WORD.size)[0], _WORD.unpack_from(self._map, 2 * _WORD.size)[0] != 0

    def close(self) -> None:
        """Lets go of the memory."""
        self._map.close()
        self._segment.close()


class Copied:
    """For each rank of a node the step of its newest snapshot that other nodes have: written by what sends them.

    Args:
        ranks: of this node.
        peers: how many other nodes take them in.
    """

    LIMIT_S = 20.0
    """A rank waits no longer for its copy to arrive; a node that takes longer is missed by then."""

    def __init__(self, ranks: int, peers: int = 1) -> None:
        self._peers = peers
        self._segment = Segment()
        self._map = self._segment.map(_WORD.size * ranks * peers)
        for rank in range(ranks):
            for peer in range(peers):
                self.arrived(rank, -1, peer)

    def arrived(self, local_rank: int, step: int, peer: int = 0) -> None:
        """Takes note that one of the other nodes has a rank's snapshot of a step."""
        _WORD.pack_into(self._map, _WORD.size * (local_rank * self._peers + peer), step)

    def step(self, local_rank: int) -> int:
        """Returns the newest step of which all of them have a rank's snapshot, or a later one."""
        first = local_rank * self._peers
        return min(_WORD.unpack_from(self._map, _WORD.size * (first + peer))[0] for peer in range(self._peers))

    def wait(self, local_rank: int, step: int) -> None:
        """Waits until all of them have the snapshot of a step, or a later one: a limited time."""
        end = time.monotonic() + self.LIMIT_S
        while self.step(local_rank) < step and time.monotonic() < end:
            time.sleep(0.0005)

    def close(self) -> None:
        """Lets go of the memory."""
        self._map.close()
        self._segment.close()


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a supervisor hands to the ranks it starts."""

    segments: tuple[tuple[Segment, ...], ...]
    """For each rank of this node, where it writes its snapshots: one more than two of them where they are copied."""
    disk: tuple[Segment, ...]
    """For each rank, where it leaves what is to be written to disk; none when ranks write themselves."""
    control: Control
    """How the supervisor asks for an end."""
    every: int
    """Steps between snapshots; 0 for none."""
    state: State | None = None
    """What the ranks before these left."""
    lost_at: float | None = None
    """time.monotonic() at which it was seen that a rank had failed, when these ranks replace others."""
    sick_step: int = 0
    """Place in the text, in steps, up to which it is passed over; 0 for none."""
    damage: Damage | None = None
    """What the ranks before these went back for; None when they didn't."""
    peak_flops: float | None = None
    """Matrix-product rate of one device as the ranks before these measured it."""
    copied: Copied | None = None
    """Which snapshots other nodes have; None where they aren't copied. A rank's next one waits until the last one is
    there, so that with three segments there is always a step of which every rank's snapshot stands here and there."""
    fence: Callable[[], None] | None = None
    """Raises once other ranks have taken over; asked before anything is written."""
    flight: Flight | None = None
    """Where ranks say what their GPUs are at, when they are asked; None for ranks on the CPU."""


class Aimed:
    """A writer of snapshots that looks up where the state lies only when it has moved.

    Args:
        make: makes the writer for a state's tensors.
    """

    def __init__(self, make: Callable[[Mapping[str, Any]], SnapshotWriter]) -> None:
        self._make = make
        self._writer: SnapshotWriter | None = None
        self._places: list[int] = []

    def take(self, step: int, program: Program, optimizer: LocalAdamW, values: Mapping[str, Any]) -> None:
        """Copies the state; the optimizer's next update waits for the copy where it runs beside the training."""
        places = state_places(program, optimizer)
        # The writer holds the tensors of the last time, so that nothing else can lie where they were.
        tensors = state_tensors(program, optimizer) if self._writer is None or places != self._places else None
        if self._writer is None:
            assert tensors is not None
            self._writer = self._make(tensors)
        self._writer.take(step, tensors, values)
        if tensors is not None:
            # Moments that weren't there yet have been made by now.
            self._places = state_places(program, optimizer)
        optimizer.wait_for(self._writer.copier.done)

    def wait(self) -> None:
        """Waits until the last snapshot counts."""
        if self._writer is not None:
            self._writer.wait()


class RankMemory:
    """One rank's side of it; every method is called by all ranks at once.

    Args:
        memory: from the supervisor.
        rank: this rank.
        generation: how many times ranks were started before.
        agreement: how ranks exchange what they hold.
        local_rank: its index among the ranks of this node.
    """

    def __init__(
        self, memory: Memory, rank: int, generation: int, agreement: Agreement, local_rank: int | None = None
    ) -> None:
        self._memory, self._rank, self._generation, self._agreement = memory, rank, generation, agreement
        self._make: Callable[[Sequence[Segment]], SnapshotWriter] | None = None
        self._local = rank if local_rank is None else local_rank
        self._writer: Aimed | None = None
        self._disk: Aimed | None = None
        self._asked = 0
        self.taken = -1
        """Step of the last snapshot."""

    @property
    def state(self) -> State | None:
        """What the ranks before these left."""
        return self._memory.state

    @property
    def damage(self) -> Damage | None:
        """What the ranks before these went back for."""
        return self._memory.damage

    @property
    def lost_at(self) -> float | None:
        """time.monotonic() at which the failure before was seen."""
        return self._memory.lost_at

    def check_fence(self) -> None:
        """Sees to it that a rank whose place others have taken writes nothing.

        Raises:
            CheckpointError: when they have.
        """
        if self._memory.fence is not None:
            self._memory.fence()

    @property
    def cut(self) -> bool:
        """Whether the supervisor asked for an end."""
        return self._memory.control.cut

    def restore(self, program: Program, optimizer: LocalAdamW, scaler: LossScaler) -> Mapping[str, Any] | None:
        """Fills weights, moments and counters from the state that was left; returns its plain values, if any.

        Raises:
            CheckpointError: on every rank when the state is damaged on any.
        """
        state = self._memory.state
        if state is None:
            return None
        tensors = state_tensors(program, optimizer)
        self._agreement.everywhere(RESTORING, lambda: state.fill(tensors))
        adopt_values(state.meta, optimizer, scaler)
        return state.meta

    @property
    def copies(self) -> bool:
        """Whether the state is copied along the way."""
        return self._memory.every > 0

    def due(self, step: int) -> bool:
        """Returns whether a snapshot is to be taken after this step; over several nodes always after the first.

        What a node held that is gone lies in one place only until then.
        """
        first = self._memory.copied is not None and self.taken < 0
        return self._memory.every > 0 and (first or step % self._memory.every == 0)

    def take(
        self, step: int, program: Program, optimizer: LocalAdamW, scaler: LossScaler, tokens: int, **more: Any
    ) -> float:
        """Copies the state after ``step`` steps; returns the seconds that it held up training."""
        began = time.perf_counter()
        if self._memory.copied is not None and self.taken >= 0:
            self._memory.copied.wait(self._local, self.taken)
        if self._writer is None:
            self._writer = Aimed(lambda tensors: self._planned(tensors)(self._memory.segments[self._local]))
        self._writer.take(step, program, optimizer, plain_values(optimizer, scaler, tokens) | more)
        self.taken = step
        return time.perf_counter() - began

    def settle(self, step: int) -> None:
        """Waits until the last snapshot counts, where one is due after this step; to be called before its last sum.

        A rank that is done with the step writes over the snapshot before the last. Until every rank has the last one
        whole none may, or there would be a moment without a state that all of them have.
        """
        if self._writer is not None and (self.cut or self.due(step)):
            self._writer.wait()

    @property
    def writes(self) -> bool:
        """Whether the supervisor writes checkpoints."""
        return bool(self._memory.disk)

    def save(
        self,
        step: int,
        program: Program,
        optimizer: LocalAdamW,
        scaler: LossScaler,
        tokens: int,
        limit_s: float,
        **more: Any,
    ) -> float:
        """Copies the state to where the supervisor takes it from to write it to disk, beside the training.

        Returns:
            Seconds that training was held up: the copy, and what the disk still needs for the checkpoint before.

        Raises:
            CheckpointError: when that one isn't written within ``limit_s`` seconds.
        """
        began = time.perf_counter()
        while self._memory.control.written[0] < self._asked:
            if time.perf_counter() - began > limit_s:
                raise CheckpointError(
                    f"the checkpoint of step {self._asked} was not written within checkpoint.wait_s = {limit_s:g} s; "
                    "raise it, or checkpoint.every"
                )
            time.sleep(0.002)
        if self._disk is None:
            place = self._memory.disk[self._local : self._local + 1]
            self._disk = Aimed(lambda tensors: self._planned(tensors)(place))
        self._disk.take(step, program, optimizer, plain_values(optimizer, scaler, tokens) | more)
        self._asked = step
        if self._memory.copied is None:
            self.taken = step  # it counts as a snapshot, but isn't sent to another node
        return time.perf_counter() - began

    def _planned(self, tensors: Mapping[str, Any]) -> Callable[[Sequence[Segment]], SnapshotWriter]:
        """Agrees with the other ranks, once, who keeps what; returns what makes a writer of it."""
        if self._make is None:
            held = [part for part, _ in parts_of(tensors)]
            tables = self._agreement.gather(held)
            self._make = partial(
                SnapshotWriter,
                rank=self._rank,
                generation=self._generation,
                ranks=len(tables),
                tensors=digest(part for table in tables for part in table),
                held=held,
                kept=keepers(tables)[self._rank],
                changing=f"{BUFFERS}/",
            )
        return self._make

    def close(self) -> None:
        """Waits until the last snapshots count, and until other nodes have those that the next ranks go on from."""
        for writer in (self._writer, self._disk):
            if writer is not None:
                writer.wait()
        if self.cut and self._memory.copied is not None and self.taken >= 0:
            self._memory.copied.wait(self._local, self.taken)
