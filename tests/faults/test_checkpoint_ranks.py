"""Several ranks write one checkpoint: one of them fails, dies or never comes, and all say the same or go on."""

from __future__ import annotations

import time

import pytest
import torch

from meshwright.checkpoint.agreement import build_group
from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.files import ChecksumWriter
from meshwright.checkpoint.store import CheckpointStore
from meshwright.errors import CheckpointError, MeshwrightError
from tests.faults.stores import die, flip, full_disk, load, tensors
from tests.ranks.group import run_ranks
from tests.runs import wait_until


def failing_rank(rank, root, bad):
    store = CheckpointStore.build(root, CheckpointConfig(wait_s=60))
    store.save(1, tensors(1), {"step": 1})
    if rank == bad:
        ChecksumWriter.write = full_disk
    try:
        store.save(2, tensors(2), {"step": 2})
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("bad", [0, 1])
def test_one_rank_fails_and_all_raise_the_same(tmp_path, bad):
    first, second = run_ranks(2, failing_rank, tmp_path, bad)
    assert first == second and f"rank {bad}: No space left on device" in first
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert load(tmp_path).step == 1


def uneven_phases(rank, root, phase):
    def stamp(now):
        if now == phase and rank == 1:
            raise ValueError("planted")

    store = CheckpointStore(root, group=build_group(60), stamp=stamp)
    try:
        store.save(1, tensors(1), {"step": 1})
    except CheckpointError as error:
        return str(error)


def test_an_error_before_the_backends_collectives_hangs_nobody(tmp_path):
    first, second = run_ranks(2, uneven_phases, tmp_path, "written")
    assert first == second and "ValueError: planted" in first


def uneven_tensors(rank, root):
    store = CheckpointStore.build(root, CheckpointConfig(wait_s=60))
    mine = tensors(1) | ({"weights/0": torch.empty(4, 1, device="meta")} if rank else {})
    texts = []
    for call in (lambda: store.save(1, mine, {}), lambda: store.load(mine)):
        with pytest.raises(CheckpointError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_a_tensor_without_values_on_one_rank_is_refused_on_all(tmp_path):
    first, second = run_ranks(2, uneven_tensors, tmp_path)
    assert first == second and all("rank 1: tensors on the meta device" in text for text in first)


def dying(rank, root, victim, phase):
    def stamp(now):
        if (rank, now, step) == (victim, phase, 2):
            die()

    store = CheckpointStore.build(root, CheckpointConfig(wait_s=60, keep=1), stamp)
    for step in (1, 2):
        store.save(step, tensors(step), {"step": step})


@pytest.mark.parametrize(
    ("victim", "phase", "step"), [(1, "write", 1), (1, "written", 1), (0, "rename", 1), (0, "renamed", 2)]
)
def test_one_rank_of_two_is_killed(tmp_path, victim, phase, step):
    with pytest.raises(MeshwrightError):
        run_ranks(2, dying, tmp_path, victim, phase)
    loaded = load(tmp_path)
    assert loaded.step == step and not loaded.refused


def damaged_between(rank, root):
    store = CheckpointStore.build(root, CheckpointConfig(wait_s=60))
    for step in (1, 2):
        store.save(step, tensors(step), {"step": step})
    torch.distributed.barrier()
    if rank == 0:
        flip(root / "step-00000002" / "rank-00001.image", 800)
    torch.distributed.barrier()
    targets = tensors(-1)
    loaded = store.load(targets)
    return loaded.step, loaded.refused[0].reason, targets["weights/0"][0, 0].item()


def test_ranks_agree_on_what_is_refused(tmp_path):
    first, second = run_ranks(2, damaged_between, tmp_path)
    assert first == second and first[0] == first[2] == 1 and "rank-00001.image is damaged" in first[1]


def lost_peer(rank, root):
    store = CheckpointStore.build(root, CheckpointConfig(wait_s=4))
    store.save(1, tensors(1), {"step": 1})
    told = root.with_name("told")
    if rank == 1:
        wait_until(told.exists)
        return "late"
    started = time.monotonic()
    try:
        store.save(2, tensors(2), {"step": 2})
    except CheckpointError as error:
        told.touch()
        return str(error), time.monotonic() - started


def test_a_rank_that_doesnt_come_is_waited_for_within_the_limit(tmp_path):
    (text, seconds), _ = run_ranks(2, lost_peer, tmp_path / "checkpoints")
    assert "lost contact" in text and seconds < 60
    assert load(tmp_path / "checkpoints").step == 1
