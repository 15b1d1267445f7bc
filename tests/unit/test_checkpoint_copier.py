"""What a snapshot copies: the same memory again without looking it up, other memory once the state has moved."""

from __future__ import annotations

import errno
import mmap
import struct
import threading
import time
import zlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.checkpoint.copier import Copier
from meshwright.checkpoint.snapshot import Segment, Snapshot, find_complete_states, read_snapshots, read_step
from meshwright.checkpoint.snapshot_writer import SnapshotWriter
from meshwright.checkpoint.tensor_shards import collect_local_shards, digest
from meshwright.errors import CheckpointError
from meshwright.parallel.weights import named_weights
from meshwright.train.config import OptimizerConfig
from meshwright.train.memory import StateSnapshots
from meshwright.train.optimizer import LocalAdamW


def writer_of(tensors: dict[str, Any], segments: list[Segment], **more: Any) -> SnapshotWriter:
    held = [part for part, _ in collect_local_shards(tensors)]
    return SnapshotWriter(
        segments,
        rank=0,
        generation=0,
        tensors=digest(held),
        local_shards=held,
        saved_shards=list(enumerate(held)),
        changing="buffers/",
        **more,
    )


def newest(segments: list[Segment]) -> tuple[int, dict[str, torch.Tensor]]:
    state = find_complete_states(read_snapshots(segments))[0]
    return state.step, state.tensors()


def test_the_same_memory_is_copied_without_its_tensors() -> None:
    state = {"w": torch.zeros(5, 3), "cut": torch.arange(12.0).view(3, 4)[:, 1:3], "none": torch.empty(0)}
    segments = [Segment(), Segment()]
    writer = writer_of(state, segments)
    with pytest.raises(CheckpointError, match="needs its tensors"):
        writer.save(1, None, {})
    for step in range(1, 5):
        state["w"].fill_(step)
        state["cut"].add_(1)
        writer.save(step, state if step == 1 else None, {"tokens": step})
    writer.wait()
    step, found = newest(segments)
    assert step == 4 and torch.equal(found["w"], state["w"]) and torch.equal(found["cut"], state["cut"])


def test_a_copy_without_its_checksums_is_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    state, segments = {"w": torch.zeros(5, 3)}, [Segment(), Segment()]
    writer = writer_of(state, segments)
    for step in (1, 2):
        state["w"].fill_(step)
        writer.save(step, state, {})
    writer.wait()
    assert sorted(one.step for one in read_snapshots(segments)) == [1, 2]
    # The rank is killed when it has copied, before a thread has made checksums and written the header.
    monkeypatch.setattr(SnapshotWriter, "_commit_snapshot", lambda self, *_: None)
    state["w"].fill_(3.0)
    writer.save(3, None, {})
    writer.wait()
    assert [one.step for one in read_snapshots(segments)] == [2]
    step, found = newest(segments)
    assert step == 2 and bool((found["w"] == 2.0).all())


def test_no_header_stands_while_checksums_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    state, segment, seen = {"w": torch.zeros(5, 3)}, Segment(), []
    checksum = zlib.crc32

    def looked(*data: Any) -> int:
        seen.append(read_step(segment))
        return checksum(*data)

    monkeypatch.setattr("meshwright.checkpoint.snapshot_writer.zlib", SimpleNamespace(crc32=looked))
    writer = writer_of(state, [segment])
    for step in (1, 2):
        writer.save(step, state, {})
        writer.wait()
        assert read_step(segment) == (0, step)
    assert seen and set(seen) == {None}


def test_the_next_copy_waits_for_the_checksums_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    state, segment, summed = {"w": torch.zeros(5, 3)}, Segment(), []
    checksum = zlib.crc32

    def slow(data: Any, *more: Any) -> int:
        if len(data) == state["w"].nbytes:
            time.sleep(0.1)
            summed.append(struct.unpack_from("<f", data)[0])
        return checksum(data, *more)

    monkeypatch.setattr("meshwright.checkpoint.snapshot_writer.zlib", SimpleNamespace(crc32=slow))
    writer = writer_of(state, [segment])
    for step in (1, 2, 3):
        state["w"].fill_(step)
        writer.save(step, state, {})
    writer.wait()
    assert summed == [1.0, 2.0, 3.0]


def test_memory_for_a_gpus_state_is_allocated_and_registered_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, registered = threading.Event(), []
    allocate = Segment.allocate

    def allocate_later(segment: Segment, size: int) -> None:
        assert threading.current_thread() is not threading.main_thread() and allowed.wait(30)
        allocate(segment, size)

    monkeypatch.setattr(Segment, "allocate", allocate_later)
    monkeypatch.setattr("meshwright.checkpoint.snapshot_writer.PIECE_BYTES", 2 * mmap.PAGESIZE)
    monkeypatch.setattr(Copier, "register", lambda self, memory, *told: registered.append((len(memory), *told)))
    state, segments = {"w": torch.zeros(5000, 3), "v": torch.ones(7), "u": torch.ones(3)}, [Segment(), Segment()]
    writer = writer_of(state, segments, device=torch.device("cuda:1"), threads=3)
    assert not registered and [segment.size for segment in segments] == [0, 0], "the constructor doesn't wait"
    allowed.set()
    for step in (1, 2):
        state["w"].fill_(step)
        writer.save(step, state, {})
    writer.wait()
    assert [told[:2] for told in registered] == [(segment.size, torch.device("cuda:1")) for segment in segments]
    assert registered[0][2] == registered[1][2]
    assert sum(segment.size for segment in segments) == writer.mapped_bytes
    # Three threads' checksums are one's, each shard's own.
    plain = writer_of(state, [Segment()])
    plain.save(2, state, {})
    plain.wait()
    one, other = (Snapshot(memoryview(each._memories[at])) for each, at in ((writer, 1), (plain, 0)))
    sums = [[stored.checksum for stored in each.stored_shards] for each in (one, other)]
    assert sums[0] == sums[1] and len(set(sums[0])) == 3
    # Whole pages, so that no shard lies in two pieces that the driver is told of one after the other.
    pieces, shards = registered[0][2], [(stored.offset, stored.shard.size_bytes) for stored in one.stored_shards]
    assert len(pieces) == 2 and pieces[0].stop == pieces[1].start and pieces[-1].stop == segments[0].size
    assert all(piece.start % mmap.PAGESIZE == piece.stop % mmap.PAGESIZE == 0 for piece in pieces)
    assert all(sum(piece.start <= at and at + size <= piece.stop for piece in pieces) == 1 for at, size in shards)
    step, found = newest(segments)
    assert step == 2 and torch.equal(found["w"], state["w"])


def test_memory_that_a_thread_could_not_have_is_told_by_the_first_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    state = {"w": torch.zeros(5, 3)}
    writer = writer_of(state, [Segment(), Segment()], device=torch.device("cuda:0"))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"no memory for a snapshot of .* No space left.*snapshot_every = 0"):
            writer.save(1, state, {})


class Optimizer:
    """Stands for one: moments that are there from the first snapshot on."""

    outer = None

    def __init__(self) -> None:
        self.moments: list[torch.Tensor] = []
        self.waits_for: list[Any] = []

    def moment_addresses(self) -> list[int]:
        return [moment.data_ptr() for moment in self.moments]

    def state(self) -> Any:
        self.moments = self.moments or [torch.full((3,), 2.0)]
        yield "exp_avg/w", self.moments[0]

    def wait_for(self, event: Any) -> None:
        self.waits_for.append(event)

    @property
    def steps(self) -> int:
        return 0


@pytest.mark.parametrize("moved", ["", "buffer", "moment"])
def test_a_state_that_moved_is_looked_up_again(moved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, optimizer, segments = {"b": torch.zeros(4)}, Optimizer(), [Segment(), Segment()]
    program = SimpleNamespace(weights=(), frozen=(), buffers=lambda: iter(buffers.items()), error_feedback=None)
    looked: list[int] = []
    monkeypatch.setattr(
        "meshwright.checkpoint.copier.collect_local_shards",
        lambda tensors: looked.append(len(tensors)) or collect_local_shards(tensors),
    )
    aimed = StateSnapshots(lambda tensors: writer_of(dict(tensors), segments))
    for step in range(1, 4):
        if step == 3 and moved == "buffer":
            buffers["b"] = torch.zeros(4)
        if step == 3 and moved == "moment":
            optimizer.moments = [torch.full((3,), 2.0)]
        buffers["b"].fill_(step)
        optimizer.moments and optimizer.moments[0].fill_(10 * step)
        aimed.save(step, program, optimizer, {})  # type: ignore[arg-type]
    aimed.wait()
    step, found = newest(segments)
    assert step == 3 and found["buffers/b"].tolist() == [3.0] * 4 and found["exp_avg/w"].tolist() == [30.0] * 3
    assert len(looked) == (2 if moved else 1), "what lies where it lay costs no look"
    assert optimizer.waits_for == [None] * 3, "from host memory the copy is done"


def test_other_parts_than_planned_are_refused() -> None:
    writer = writer_of({"w": torch.zeros(3)}, [Segment()])
    with pytest.raises(CheckpointError, match="other parts"):
        writer.save(1, {"w": torch.zeros(4)}, {})


def test_an_update_waits_on_the_device_for_the_copy_of_the_state() -> None:
    module = nn.Linear(3, 2)
    optimizer = LocalAdamW(named_weights(module, {}, 1), OptimizerConfig())
    seen: list[torch.Tensor] = []

    class Copied:
        def wait(self) -> None:
            seen.append(module.weight.detach().clone())

    first = module.weight.detach().clone()
    for step in range(3):
        module.weight.grad, module.bias.grad = torch.ones(2, 3), torch.ones(2)
        if step == 1:
            first = module.weight.detach().clone()
            optimizer.wait_for(Copied())
        optimizer.step(1e-2, torch.ones((), dtype=torch.float64))
    (weight,) = seen
    assert torch.equal(weight, first), "it waits before it writes, once"
