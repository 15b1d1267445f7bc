from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from meshwright.checkpoint import fit
from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.contract import FileRecord, TensorRecord, find_backend
from meshwright.checkpoint.files import ChecksumWriter, find_damage, measure
from meshwright.checkpoint.manifest import MANIFEST, Manifest, Origin
from meshwright.errors import CheckpointError, ConfigError
from meshwright.spec.layout import Layout


def small_manifest(name="step-00000007"):
    return Manifest(
        name=name,
        step=7,
        ranks=2,
        backend="dcp",
        files={"a": FileRecord(3, "crc32:00000001")},
        tensors={"w": TensorRecord((2, 3), "float32")},
        origin=Origin(model="m", layout=Layout.parse("replicate=2"), config={"x": 1}),
        meta={"loss": [1.5, 0.1], "position": 12},
    )


def test_config_refuses_what_cant_be_and_says_when_a_step_is_due():
    for field in ({"every": -1}, {"keep": 0}, {"wait_s": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(field))):
            CheckpointConfig(**field).check()
    assert [step for step in range(11) if CheckpointConfig(every=5).due(step)] == [5, 10]
    assert not CheckpointConfig(every=0).due(0)
    with pytest.raises(ConfigError, match="did you mean 'dcp'"):
        find_backend("dpc")


def test_config_module_is_free_of_torch():
    code = "import sys, meshwright.checkpoint.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=250).returncode == 0


def test_manifest_comes_back_and_no_bit_of_it_is_free(tmp_path):
    folder = tmp_path / "step-00000007"
    folder.mkdir()
    raw = small_manifest().render()
    (folder / MANIFEST).write_bytes(raw)
    assert Manifest.read(folder) == small_manifest()
    for bit in range(0, len(raw) * 8, 17):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        (folder / MANIFEST).write_bytes(flipped)
        with pytest.raises(CheckpointError):
            Manifest.read(folder)


def test_manifest_of_another_step_is_refused(tmp_path):
    folder = tmp_path / "step-00000008"
    folder.mkdir()
    (folder / MANIFEST).write_bytes(small_manifest().render())
    with pytest.raises(CheckpointError, match="belongs to step-00000007"):
        Manifest.read(folder)


def test_summed_writer_agrees_with_reading_back_and_never_overwrites(tmp_path):
    path = tmp_path / "f"
    for algorithm in ("crc32", "sha256"):
        path.unlink(missing_ok=True)
        with ChecksumWriter(path, algorithm) as stream:
            stream.write(b"abc")
            stream.write(torch.arange(300_000).numpy())
        assert measure(path, algorithm) == stream.record
    with pytest.raises(FileExistsError):
        ChecksumWriter(path, "crc32")
    assert find_damage(path, stream.record) is None
    assert "missing" in find_damage(tmp_path / "g", stream.record)
    with open(path, "r+b") as handle:
        handle.truncate(5)
    assert "5 bytes instead of 2400003" in find_damage(path, stream.record)


def test_misfit_names_every_kind():
    saved = {"a": TensorRecord((2,), "float32"), "b": TensorRecord((2,), "float32"), "c": TensorRecord((2,), "float32")}
    wanted = {"b": TensorRecord((3,), "float32"), "c": TensorRecord((2,), "bfloat16"), "d": TensorRecord((1,), "int64")}
    text = fit.describe_misfit(wanted, saved)
    assert "missing in the checkpoint: d" in text and "not in the model): a" in text
    assert "b (saved (2,), wanted (3,))" in text and "c (saved float32, wanted bfloat16)" in text
    assert fit.describe_misfit(saved, saved) is None
    with pytest.raises(CheckpointError, match="meta device"):
        fit.tabulate_tensors({"m": torch.empty(2, device="meta")})
    with pytest.raises(CheckpointError, match="rank 1 has 'b'"):
        fit.merge_tables([saved, wanted])
