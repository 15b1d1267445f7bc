"""A checkpoint is killed, filled up, damaged and swapped: nothing wrong loads, and the last good one always does."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time

import pytest
import torch

import meshwright.checkpoint.files as files
from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.files import ChecksumWriter
from meshwright.checkpoint.manifest import MANIFEST, Manifest
from meshwright.checkpoint.store import CheckpointStore
from meshwright.errors import CheckpointError
from tests.faults.stores import PHASES, die, filled, flip, full_disk, killed, load, tensors
from tests.runs import wait_until


def test_300_bit_flips_and_none_loads(tmp_path):
    filled(tmp_path, 1, 2)
    paths = sorted((tmp_path / "step-00000002").iterdir())
    bits = [path.stat().st_size * 8 for path in paths]
    draw = random.Random(0)
    for _ in range(300):
        path, count = draw.choices(list(zip(paths, bits)), weights=[*bits])[0]
        bit = draw.randrange(count)
        flip(path, bit)
        loaded = CheckpointStore(tmp_path).find()
        assert loaded.step == 1 and [item.path.name for item in loaded.refused] == ["step-00000002"]
        flip(path, bit)
    assert load(tmp_path).step == 2


@pytest.mark.parametrize("name", ["rank-00000.image", MANIFEST])
def test_damaged_files_fall_back_and_say_why(tmp_path, name):
    filled(tmp_path / "good", 1, 2)

    def truncate(path):
        os.truncate(path, path.stat().st_size // 2)

    def zero(path):
        path.write_bytes(bytes(path.stat().st_size))

    def swap(path):
        shutil.copy(tmp_path / "good" / "step-00000001" / name, path)

    for number, damage in enumerate([truncate, zero, swap, os.remove]):
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", root)
        damage(root / "step-00000002" / name)
        loaded = load(root)
        assert loaded.step == 1
        assert name in loaded.refused[0].reason or "belongs to" in loaded.refused[0].reason, loaded.refused


def test_a_whole_checkpoint_under_another_name_and_an_empty_folder_are_refused(tmp_path):
    filled(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000002")
    (tmp_path / "step-00000003").mkdir()
    loaded = load(tmp_path)
    assert [item.path.name for item in loaded.refused] == ["step-00000003", "step-00000002"]
    assert "is missing" in loaded.refused[0].reason and "belongs to step-00000001" in loaded.refused[1].reason
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* at step 3 is good"):
        load(tmp_path, step=3)
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        load(tmp_path, step=4)
    assert CheckpointStore(tmp_path / "nowhere").load({}, required=False) is None


def test_a_good_checkpoint_of_another_model_is_an_error_and_reads_nothing(tmp_path):
    filled(tmp_path, 1, 2)
    targets = tensors(-1, n=2) | {"weights/new": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: weights/new; .*model\): weights/2"):
        CheckpointStore(tmp_path).load(targets)
    with pytest.raises(CheckpointError, match="of another type: weights/0"):
        CheckpointStore(tmp_path).load({name: value.double() for name, value in tensors(-1).items()})
    assert targets["weights/0"].eq(-1).all()
    with pytest.raises(CheckpointError, match="another model: its fingerprint is m, not n"):
        load(tmp_path, expect={"model": "n"})


def test_keep_counts_good_ones_and_the_new_one_stands_first(tmp_path):
    store = filled(tmp_path, 1, 2, 3, 4, keep=2)
    assert [entry.step for entry in store.entries()] == [3, 4] and store.latest().step == 4
    flip(tmp_path / "step-00000004" / "rank-00000.image", 999)
    again = CheckpointStore(tmp_path, CheckpointConfig(keep=2))
    assert again.load(tensors(0)).step == 3
    saved = again.save(5, tensors(5), {"step": 5})
    assert [entry.step for entry in again.entries()] == [3, 5] and saved.removed == (tmp_path / "step-00000004",)


def test_a_step_saved_twice_never_touches_the_first_and_later_steps_go(tmp_path):
    store = filled(tmp_path, 1, 2, 3)
    assert store.find(step=1).step == 1
    saved = store.save(2, tensors(2), {"step": 2})
    assert saved.path.name == "step-00000002-1" and load(tmp_path).path == saved.path
    assert [entry.path.name for entry in store.entries()] == ["step-00000001", "step-00000002", "step-00000002-1"]


def test_a_fresh_run_doesnt_write_over_another(tmp_path):
    filled(tmp_path, 7)
    with pytest.raises(CheckpointError, match="already holds step-00000007"):
        filled(tmp_path, 5)
    assert load(tmp_path).step == 7


@pytest.mark.parametrize("phase", PHASES)
def test_killed_in_each_phase(tmp_path, phase):
    filled(tmp_path, 1, keep=1)

    def work():
        store = CheckpointStore(tmp_path, CheckpointConfig(keep=1), stamp=lambda now: die() if now == phase else None)
        store.find()
        store.save(2, tensors(2), {"step": 2})

    assert killed(work) == signal.SIGKILL
    loaded = load(tmp_path)
    assert loaded.step == (2 if phase in ("renamed", "collect", "saved") else 1) and not loaded.refused
    store = CheckpointStore(tmp_path, CheckpointConfig(keep=1))
    store.find()
    store.save(3, tensors(3), {"step": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_killed_inside_writing_syncing_and_removing(tmp_path, monkeypatch):
    writes = ChecksumWriter.write
    for number, (owner, name, calls) in enumerate(
        [(ChecksumWriter, "write", 3), (os, "fsync", 1), (os, "fsync", 2), (os, "fsync", 4), (shutil, "rmtree", 1)]
    ):
        root = tmp_path / str(number)
        filled(root, 1, keep=1)

        def work(root=root, owner=owner, name=name, calls=calls):
            inner, left = getattr(owner, name), [calls]

            def wrapped(*args, **kwargs):
                left[0] -= 1
                return die() if left[0] == 0 else inner(*args, **kwargs)

            setattr(owner, name, wrapped)
            filled_again = CheckpointStore(root, CheckpointConfig(keep=1))
            filled_again.find()
            filled_again.save(2, tensors(2), {"step": 2})

        assert killed(work) == signal.SIGKILL
        loaded = load(root)
        assert loaded.step in (1, 2) and not loaded.refused
    assert ChecksumWriter.write is writes


def test_killed_at_random_moments(tmp_path):
    draw = random.Random(1)
    for _ in range(6):

        def work():
            store = CheckpointStore(tmp_path, CheckpointConfig(keep=2))
            loaded = store.load(tensors(-1), required=False)
            for step in range((loaded.step if loaded else 0) + 1, 10_000):
                store.save(step, tensors(step), {"step": step})

        before = {path.name for path in tmp_path.iterdir()}
        pid = os.fork()
        if pid == 0:
            work()
            os._exit(0)
        wait_until(lambda before=before: any(path.name not in before for path in tmp_path.glob("step-*")))
        time.sleep(draw.uniform(0.0, 0.2))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        loaded = load(tmp_path)
        assert not loaded.refused
    assert loaded.step >= 6


def test_full_disk_keeps_the_old_one_and_leaves_nothing(tmp_path, monkeypatch):
    store = filled(tmp_path, 1)
    monkeypatch.setattr(ChecksumWriter, "write", full_disk)
    with pytest.raises(CheckpointError, match=r"step 2 failed: .*No space left on device.* stand"):
        store.save(2, tensors(2), {})
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert store.save(2, tensors(2), {"step": 2}).step == 2


def test_a_disk_that_is_read_only(tmp_path, monkeypatch):
    store = filled(tmp_path, 1)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    for name in ("mkdir", "rename"):
        with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="Read-only file system"):
            patch.setattr(os, name, refuse)
            store.save(2, tensors(2), {})
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_full_device_for_real(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with pytest.raises(OSError, match="No space"), open("/dev/full", "wb") as sink:
        sink.write(b"x")
        sink.flush()
    writer = ChecksumWriter(tmp_path / "f", "crc32")
    with open("/dev/full", "wb") as sink:
        os.dup2(sink.fileno(), writer.fileno())
    writer.write(b"x")
    with pytest.raises(OSError, match="No space"):
        writer.close()
    assert writer.closed


def test_what_isnt_json_and_a_root_that_is_a_file(tmp_path):
    store = filled(tmp_path, 1)
    with pytest.raises(CheckpointError, match="plain JSON values"):
        store.save(2, tensors(2), {"x": torch.ones(1)})
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"Not a directory|File exists"):
        filled(tmp_path / "file", 1)


def test_a_write_that_lies_is_caught_before_the_name(tmp_path, monkeypatch):
    store = filled(tmp_path, 1)
    fsync = os.fsync

    def lying(handle):
        path = os.readlink(f"/proc/self/fd/{handle}")
        fsync(handle)
        if path.endswith(".image"):
            flip(path, 4000)

    monkeypatch.setattr(files.os, "fsync", lying)
    with pytest.raises(CheckpointError, match=r"right after writing, rank-00000.image is damaged"):
        store.save(2, tensors(2), {})
    monkeypatch.undo()
    assert load(tmp_path).step == 1 and len(list(tmp_path.iterdir())) == 1


def test_manifest_tells_where_it_comes_from(tmp_path):
    filled(tmp_path, 1)
    manifest = Manifest.read(tmp_path / "step-00000001")
    assert manifest.origin.model == "m" and manifest.ranks == 1 and manifest.tensors["weights/2"].shape == (4, 3)
