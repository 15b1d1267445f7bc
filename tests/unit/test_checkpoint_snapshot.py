"""Snapshots in shared memory: parts kept once, whole at any moment, filled under another layout or refused."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.snapshot import (
    Segment,
    Snapshot,
    State,
    find_complete_states,
    read_snapshots,
)
from meshwright.checkpoint.snapshot_writer import SnapshotWriter
from meshwright.checkpoint.tensor_shards import (
    TensorShard,
    assign_saved_shards,
    check_covered,
    collect_local_shards,
    digest,
    fill,
    find_coverage_fault,
)
from meshwright.errors import CheckpointError
from meshwright.parallel.dcp_shards import LocalBoxes
from meshwright.spec.placement import Box

SHAPE = (7, 5)


def newest_state(snapshots: list[Snapshot]) -> State | None:
    return next(iter(find_complete_states(snapshots)), None)


def whole(offset: float = 0.0) -> torch.Tensor:
    return torch.arange(35, dtype=torch.float64).view(SHAPE) + offset


def held(*boxes: Box, offset: float = 0.0) -> dict[str, object]:
    """What a rank holds: boxes of a matrix, and a scalar."""
    parts = [(box, whole(offset)[tuple(slice(*span) for span in box)].clone()) for box in boxes]
    return {"w": LocalBoxes(SHAPE, parts, torch.float64), "b": torch.tensor(3.0 + offset)}


LAYOUTS: dict[str, list[list[Box]]] = {
    "one": [[((0, 7), (0, 5))]],
    "rows": [[((0, 3), (0, 5))], [((3, 7), (0, 5))]],
    "columns": [[((0, 7), (0, 2))], [((0, 7), (2, 5))], []],
    "copies": [[((0, 7), (0, 5))], [((0, 7), (0, 5))]],
    "crossing": [[((0, 4), (0, 5))], [((2, 7), (0, 3))], [((0, 7), (3, 5))]],
    "both": [[((0, 2), (0, 5)), ((5, 7), (0, 5))], [((2, 5), (0, 4))], [((2, 5), (4, 5))]],
}


def written(boxes: list[list[Box]], steps: int = 1, generation: int = 0) -> list[list[Segment]]:
    """Segments of ranks that took a snapshot after each step."""
    states = [held(*mine) for mine in boxes]
    tables = [[part for part, _ in collect_local_shards(state)] for state in states]
    segments = [[Segment(), Segment()] for _ in boxes]
    name = digest(part for table in tables for part in table)
    for rank, kept in enumerate(assign_saved_shards(tables)):
        writer = SnapshotWriter(
            segments[rank], rank=rank, generation=generation, tensors=name, local_shards=tables[rank], saved_shards=kept
        )
        for step in range(1, steps + 1):
            writer.save(step, held(*boxes[rank], offset=step), {"tokens": 10 * step})
        writer.wait()
    return segments


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_a_state_of_one_layout_fills_another(before: str, after: str) -> None:
    segments = written(LAYOUTS[before], steps=3)
    state = newest_state([one for pair in segments for one in read_snapshots(pair)])
    assert state is not None and state.step == 3 and state.meta == {"tokens": 30}
    assert state.size_bytes == 35 * 8 + 4, "each element is kept once"
    assert torch.equal(state.tensors()["w"], whole(3))
    for boxes in LAYOUTS[after]:
        targets = held(*boxes, offset=-1000.0)
        state.fill(targets)
        for (_, view), (_, want) in zip(collect_local_shards(targets), collect_local_shards(held(*boxes, offset=3))):
            assert torch.equal(view, want)


def test_ranks_keep_about_as_much() -> None:
    table = [TensorShard(f"w{i}", (100,), "float32", ((0, 100),)) for i in range(40)]
    kept = assign_saved_shards([table] * 4)
    assert [len(one) for one in kept] == [10, 10, 10, 10]
    assert sorted(index for one in kept for index, _ in one) == list(range(40))


def test_the_newest_step_that_every_rank_finished() -> None:
    segments = written(LAYOUTS["rows"], steps=4)
    two = read_snapshots(segments[1])
    assert {one.step for one in two} == {3, 4}
    # Rank 1 died while it wrote the fourth: its header isn't there.
    newest = max(range(2), key=lambda at: read_snapshots([segments[1][at]])[0].step)
    os.pwrite(segments[1][newest].fd, bytes(64), 0)
    state = newest_state([one for pair in segments for one in read_snapshots(pair)])
    assert state is not None and state.step == 3
    assert newest_state(read_snapshots(segments[0])) is None, "half of the ranks are no state"


def test_a_missing_tensor_is_seen() -> None:
    parts = [part for part, _ in collect_local_shards(held(((0, 7), (0, 5))))]
    writer = SnapshotWriter(
        [segment := Segment()],
        rank=0,
        generation=0,
        tensors=digest(parts),
        local_shards=parts,
        saved_shards=[(0, parts[0])],
    )
    writer.save(1, held(((0, 7), (0, 5))), {})
    writer.wait()
    assert newest_state(read_snapshots([segment])) is None


def test_a_snapshot_counts_only_once_its_copy_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [part for part, _ in collect_local_shards(held(((0, 7), (0, 5))))]
    kept = list(enumerate(parts))
    segment = Segment()
    writer = SnapshotWriter(
        [segment], rank=0, generation=0, tensors=digest(parts), local_shards=parts, saved_shards=kept
    )
    plain, counted = writer.copier.wait, list[int]()

    def wait() -> None:
        counted.append(len(read_snapshots([segment])))
        plain()

    monkeypatch.setattr(writer.copier, "wait", wait)
    writer.save(1, held(((0, 7), (0, 5))), {})
    writer.wait()
    assert counted == [0] and len(read_snapshots([segment])) == 1


def resident_bytes() -> int:
    """Returns what the kernel counts of this process's snapshots, in memory or not."""
    sizes, counts = Path("/proc/self/smaps").read_text().splitlines(), False
    total = 0
    for line in sizes:
        if "-" in line.split()[0]:
            counts = "meshwright-snapshot" in line
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads what Linux tells of a process")
def test_all_segments_are_resident_from_the_first_snapshot_on() -> None:
    """So a rank's peak holds as many bytes more with snapshots as without; a record tells them apart."""
    before, state = resident_bytes(), {"w": torch.ones(300_000)}
    shards = [shard for shard, _ in collect_local_shards(state)]
    segments = [Segment() for _ in range(3)]
    writer = SnapshotWriter(
        segments, rank=0, generation=0, tensors=digest(shards), local_shards=shards,
        saved_shards=assign_saved_shards([shards])[0],
    )  # fmt: skip
    assert writer.mapped_bytes > 3 * 4 * 300_000
    for _ in range(2):
        assert 0 <= resident_bytes() - before - writer.mapped_bytes < 3 * mmap.PAGESIZE
        writer.save(1, state, {})
        writer.wait()


def test_no_flipped_bit_is_loaded() -> None:
    segments = written(LAYOUTS["rows"])
    files = [pair[0].fd for pair in segments]
    clean = newest_state([one for pair in segments for one in read_snapshots(pair)])
    assert clean is not None
    places = [
        (rank, at)
        for rank, one in enumerate(clean.snapshots)
        for first, size in [(0, 200), *((stored.offset, stored.shard.size_bytes) for stored in one.stored_shards)]
        for at in range(first, first + size)
    ]
    draw, refused, harmless = random.Random(4), 0, 0
    for _ in range(300):
        (rank, at), bit = draw.choice(places), 1 << draw.randrange(8)
        (byte,) = os.pread(files[rank], 1, at)
        os.pwrite(files[rank], bytes([byte ^ bit]), at)
        targets = held(((0, 7), (0, 5)), offset=-1000.0)
        try:
            state = newest_state([one for pair in segments for one in read_snapshots(pair)])
            if state is None:
                raise CheckpointError("no state")
            state.fill(targets)
        except (CheckpointError, ValueError):
            refused += 1
        else:
            # The last bytes of a header are nobody's.
            harmless += 1
            want = collect_local_shards(held(((0, 7), (0, 5)), offset=1))
            assert all(torch.equal(a[1], b[1]) for a, b in zip(collect_local_shards(targets), want))
        os.pwrite(files[rank], bytes([byte]), at)
    assert refused > 280 and refused + harmless == 300


def test_what_does_not_fit_is_refused() -> None:
    source = {part: (lambda view=view: view) for part, view in collect_local_shards(held(((0, 3), (0, 5))))}
    with pytest.raises(CheckpointError, match="15 of 35 elements"):
        fill(held(((0, 7), (0, 5))), source)
    with pytest.raises(CheckpointError, match="its state float64"):
        fill({"w": torch.zeros(SHAPE)}, source)
    with pytest.raises(CheckpointError, match=r"two parts|of 35 elements"):
        check_covered(TensorShard("w", SHAPE, "float64", box) for box in [((0, 4), (0, 5)), ((3, 7), (0, 5))])
    assert find_coverage_fault((4,), [((0, 2),), ((1, 3),)]) == "has two parts at ((1, 3),)"
    assert find_coverage_fault((4,), [((0, 5),)]) == "has a part ((0, 5),) outside its shape (4,)"
    state = newest_state(read_snapshots(written(LAYOUTS["one"])[0]))
    assert state is not None
    with pytest.raises(CheckpointError, match="has no v"):
        state.fill({"v": torch.zeros(2)})


def test_a_state_that_changed_is_refused() -> None:
    parts = [part for part, _ in collect_local_shards(held(((0, 7), (0, 5))))]
    writer = SnapshotWriter(
        [Segment()],
        rank=0,
        generation=0,
        tensors=digest(parts),
        local_shards=parts,
        saved_shards=list(enumerate(parts)),
    )
    with pytest.raises(CheckpointError, match="other parts"):
        writer.save(1, held(((0, 3), (0, 5))), {})
    with pytest.raises(CheckpointError, match="65536 bytes"):
        writer.save(1, held(((0, 7), (0, 5))), {"long": "x" * 70000})
