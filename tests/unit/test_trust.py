"""Files run no code and name no file outside of their own folder."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from meshwright.checkpoint.agreement import CODEC
from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.contract import FileRecord
from meshwright.checkpoint.dcp import BACKEND
from meshwright.checkpoint.manifest import MANIFEST, Manifest, Origin
from meshwright.checkpoint.mirror import Mirror
from meshwright.checkpoint.store import CheckpointStore
from meshwright.checkpoint.tensor_shards import TensorShard
from meshwright.cli.main import main
from meshwright.errors import CheckpointError, ConfigError, DataError
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.weights import SafetensorsSource
from meshwright.names import plain_name
from meshwright.records import RecordError
from meshwright.strategy.shared_analysis import CODEC as FACTS


class Call:
    """Pickles as the call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._reduced = (function, args)

    def __reduce__(self) -> Any:
        return self._reduced


def test_a_checkpoints_metadata_runs_no_code(tmp_path: Path) -> None:
    import torch.distributed.checkpoint.state_dict_loader as loader
    from torch.distributed.checkpoint import FileSystemReader

    tensors = {"weights/a": torch.ones(3)}
    BACKEND.write(tmp_path, tensors, None)
    assert BACKEND.describe(tmp_path)["weights/a"].shape == (3,)
    mark = tmp_path / "mark"
    for bad in (
        Call(os.system, f"touch {mark}"),
        Call(torch.load, str(mark)),
        Call(loader._load_state_dict_from_keys, None),
        Call(FileSystemReader, str(tmp_path)),
        Call(getattr, Metadata, "__init__"),
        Metadata({"a": Call(os.system, f"touch {mark}")}, storage_data={}),  # type: ignore[dict-item]
    ):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(bad))
        with pytest.raises(CheckpointError, match="doesn't belong into a checkpoint's metadata"):
            BACKEND.describe(tmp_path)
    # An entry of the memo far away, which the C unpickler would make 32 GiB of room for.
    (tmp_path / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\xff.")
    with pytest.raises(CheckpointError, match="holds no metadata"):
        BACKEND.describe(tmp_path)
    assert not mark.exists()


def test_a_tensor_that_the_metadata_calls_bytes_is_not_unpickled(tmp_path: Path) -> None:
    """DCP's own planner would load them with weights_only=False."""
    from meshwright.checkpoint.dcp import _LoadPlanner

    with pytest.raises(CheckpointError, match="isn't a tensor in the file"):
        planner = _LoadPlanner()
        planner.load_bytes(type("Item", (), {"dest_index": type("Index", (), {"fqn": "a"})})(), None)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "C:x", "a\0b", "a\nb", "x" * 300, None, 7, ["a"]]
)
def test_names_are_plain_in_all_readers(name: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="only plain names"):
        plain_name(name, "here", DataError)
    index = {"weight_map": {"a.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        SafetensorsSource(tmp_path, torch.nn.Linear(2, 2))
    if isinstance(name, str):
        folder = tmp_path / "step-00000001"
        folder.mkdir()
        files = {name: FileRecord(1, "crc32:00000000")}
        forged = Manifest(
            name=folder.name, step=1, ranks=1, backend="image", files=files, tensors={}, origin=Origin(), meta={}
        )
        (folder / MANIFEST).write_bytes(forged.render())
        with pytest.raises(CheckpointError):
            Manifest.read(folder)
    assert plain_name("model-00001-of-00002.safetensors", "here", DataError) and plain_name(".metadata", "", DataError)


def test_a_mirrors_manifest_writes_nothing_outside(tmp_path: Path) -> None:
    place = tmp_path / "mirror" / "run" / "step-00000001"
    place.mkdir(parents=True)
    (place / "evil").write_bytes(b"x")
    (tmp_path / "mirror" / "run" / "outside").write_bytes(b"x")
    forged = Manifest(
        name=place.name,
        step=1,
        ranks=1,
        backend="image",
        files={"../outside": FileRecord(1, "crc32:8cdc1683")},
        tensors={},
        origin=Origin(),
        meta={},
    )
    (place / MANIFEST).write_bytes(forged.render())
    root = tmp_path / "here" / "checkpoints"
    with pytest.raises(CheckpointError, match="only plain names"):
        Mirror(str(tmp_path / "mirror"), "run").fetch(root)
    assert list(root.iterdir()) == []
    config = CheckpointConfig(mirror=str(tmp_path / "mirror"))
    assert CheckpointStore(root, config).entries() == []


def test_a_run_directory_runs_code_only_where_it_is_trusted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    mark = tmp_path / "mark"
    (run / "config.toml").write_text(f'[model]\nname = "os:system"\n[model.overrides]\ncommand = "touch {mark}"\n')
    facts = {"vocab_size": 300, "eos_id": None}
    (run / "text.json").write_text(json.dumps(facts))
    for verb, *more in (["generate", "--prompt", "a"], ["export", "--to", str(tmp_path / "out")]):
        assert main([verb, str(run), *more]) != 0
        told = capsys.readouterr().err
        assert "names the function 'os:system'" in told or "no checkpoint" in told
        assert not mark.exists()
    from meshwright.jobs.trained_model import run_model

    with pytest.raises(ConfigError, match=r"would be imported and called, and could do anything; add --trust"):
        run_model(run)
    assert not mark.exists()
    with pytest.raises(ConfigError, match=r"must return an nn\.Module"):
        run_model(run, trust=True)
    assert mark.exists(), "what --trust says is what it does"


def test_kernels_of_the_hub_are_code_and_refused(tmp_path: Path) -> None:
    config = {"model_type": "llama", "attn_implementation": "somebody/kernels", "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="names code of the hub"):
        build_meta(ModelConfig(name=str(tmp_path)), weights=False)
    remote = {"model_type": "theirs", "auto_map": {"AutoConfig": "evil.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(remote))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nclass Config: pass\n")
    with pytest.raises(ConfigError):
        build_meta(ModelConfig(name=str(tmp_path)), weights=False)
    assert not (tmp_path / "mark").exists()


def test_what_processes_tell_each_other_is_of_a_closed_list() -> None:
    part = TensorShard("weights/a", (3, 2), "float32", ((0, 3), (0, 2)))
    for value in ([part], {"a": FileRecord(3, "crc32:0")}, ("x", None, 1.5), {1: {2}}, Path("/a")):
        assert CODEC.loads(CODEC.dumps(value)) == value
    with pytest.raises(RecordError, match="isn't among what passes"):
        CODEC.dumps(Call(os.system, "true"))
    with pytest.raises(RecordError, match=r"TensorShard\.shape"):
        CODEC.loads(CODEC.dumps(part).replace(b"[3,2]", b'["x",2]'))
    for bad in (b"", b"\x80\x04N.", b"[" * 100_000, b'{"!":"os.system","items":["true"]}', b'{"!":"tuple"}', b"\xff"):
        for codec in (CODEC, FACTS):
            with pytest.raises(RecordError):
                codec.loads(bad)
