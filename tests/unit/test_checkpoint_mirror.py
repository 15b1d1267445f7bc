"""Checkpoints in a second place: copied whole or not at all, brought back checked, never written over."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.folder import is_complete
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.mirror import Mirror, check_mirror
from meshwright.checkpoint.store import CheckpointStore
from meshwright.errors import CheckpointError, ConfigError


def saved(root: Path, steps: range, mirror: Path, keep: int = 2) -> CheckpointStore:
    """A run's checkpoints, each copied."""
    config = CheckpointConfig(backend="dcp", keep=keep, mirror=f"file://{mirror}")
    store = CheckpointStore(root / "run" / "checkpoints", config)
    for step in steps:
        one = store.save(step, {"weight": torch.full((4, 8), float(step))}, {"tokens": step})
        assert one.event_fields()["copy"].endswith(f"/run/step-{step:08d}"), one.event_fields()
    return store


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def weight(root: Path) -> float:
    target = {"weight": torch.zeros(4, 8)}
    CheckpointStore(root).load(target)
    return float(target["weight"][0, 0])


def test_each_is_copied_and_the_newest_comes_back(tmp_path: Path) -> None:
    saved(tmp_path, range(1, 5), tmp_path / "other")
    assert names(tmp_path / "other" / "run") == ["step-00000003", "step-00000004"]
    mirror, here = Mirror(f"file://{tmp_path}/other", "run"), tmp_path / "new" / "checkpoints"
    found = mirror.fetch(here)
    assert found is not None and found.step == 4 and names(here) == ["step-00000004"]
    assert weight(here) == 4.0
    assert mirror.fetch(here, newer_than=(4, 0)) is None
    assert Mirror(f"file://{tmp_path}/other", "another").fetch(here) is None
    saved(tmp_path / "more", range(1, 8), tmp_path / "third", keep=9)
    assert len(names(tmp_path / "third" / "run")) == 7


def test_a_damaged_copy_is_passed_over_and_none_is_taken_without_its_manifest(tmp_path: Path) -> None:
    saved(tmp_path, range(1, 4), tmp_path / "other", keep=3)
    copies = tmp_path / "other" / "run"
    (copies / "step-00000003" / MANIFEST).unlink()
    (data,) = [path for path in (copies / "step-00000002").iterdir() if path.suffix == ".distcp"]
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    mirror, here = Mirror(f"file://{tmp_path}/other", "run"), tmp_path / "new" / "checkpoints"
    found = mirror.fetch(here)
    assert found is not None and found.step == 1 and names(here) == ["step-00000001"] and weight(here) == 1.0
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is good: step-00000002: .* is damaged"):
        mirror.fetch(here, newer_than=(1, 0))
    assert names(here) == ["step-00000001"], "nothing is left of what didn't come whole"


def test_nothing_is_written_over_and_a_failure_costs_the_copy_alone(tmp_path: Path) -> None:
    store = saved(tmp_path, range(1, 2), tmp_path / "other")
    folder = store.entries()[0].path
    assert Mirror(f"file://{tmp_path}/other", "run").put(folder, 2) == 0, "it is there already"
    another = CheckpointStore(tmp_path / "another" / "checkpoints", CheckpointConfig(backend="dcp"))
    foreign = another.save(1, {"weight": torch.zeros(4, 8)}, {"tokens": 9}).path
    with pytest.raises(CheckpointError, match="holds another checkpoint of that name"):
        Mirror(f"file://{tmp_path}/other", "run").put(foreign, 2)
    (tmp_path / "file").write_text("in the way")
    config = CheckpointConfig(backend="dcp", mirror=f"file://{tmp_path}/file/below")
    one = CheckpointStore(tmp_path / "third" / "checkpoints", config).save(1, {"weight": torch.ones(2)}, {"tokens": 1})
    assert (
        one.path.is_dir()
        and "can't be copied" in one.event_fields()["copy_failed"]
        and "copy" not in one.event_fields()
    )


def test_a_run_that_went_back_takes_its_later_copies_away(tmp_path: Path) -> None:
    store = saved(tmp_path, range(1, 4), tmp_path / "other", keep=3)
    store.resumed_after(1)
    store.save(2, {"weight": torch.zeros(4, 8)}, {"tokens": 2})
    assert names(tmp_path / "other" / "run") == ["step-00000001", "step-00000002", "step-00000002-1"]


def test_an_unknown_place_is_refused_with_what_to_install() -> None:
    check_mirror("")
    check_mirror("file:///mnt/runs")
    check_mirror("/mnt/runs")
    with pytest.raises(ConfigError, match=r"checkpoint.mirror = nowhere://x: .*known"):
        check_mirror("nowhere://x")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_mirror(f"file://{tmp_path}/a/b")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match=rf"{tmp_path} can't be written"):
        check_mirror(f"file://{tmp_path}/a/b")


def damaged(folder: Path) -> None:
    """Flips a bit in the middle of a checkpoint's largest file."""
    file = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def loaded(store: CheckpointStore) -> tuple[float, list[str], list[dict]]:
    target = {"weight": torch.zeros(4, 8)}
    found = store.load(target)
    assert found is not None
    return (
        float(target["weight"][0, 0]),
        [one.path.name for one in found.refused],
        [dict(one) for one in found.mirror_events],
    )


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    """A file system that is none of this machine's, for the one process that uses it."""
    import fsspec

    url = f"memory://{tmp_path.name}"
    yield url
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def test_a_damaged_one_is_replaced_by_its_copy(tmp_path: Path, remote: str) -> None:
    """In another file system than files: what is put there, listed, read back and removed goes by fsspec alone."""
    config = CheckpointConfig(backend="dcp", keep=3, mirror=remote)
    root = tmp_path / "run" / "checkpoints"
    store = CheckpointStore(root, config)
    for step in range(1, 6):
        one = store.save(step, {"weight": torch.full((4, 8), float(step))}, {"tokens": step})
        assert one.event_fields()["copy"] == f"{remote}/run/step-{step:08d}", one.event_fields()
    assert Mirror(remote, "run")._list_complete() == ["step-00000003", "step-00000004", "step-00000005"]
    damaged(root / "step-00000005")
    (root / "step-00000004" / MANIFEST).unlink()
    value, refused, (asked,) = loaded(CheckpointStore(root, config))
    assert (value, refused) == (5.0, ["step-00000005"])
    assert asked["kind"] == "checkpoint_fetched" and asked["step"] == 5 and asked["mirror"] == f"{remote}/run"
    assert loaded(CheckpointStore(root, config)) == (5.0, [], []), "it stands here in its place"
    assert names(root) == ["step-00000003", "step-00000004", "step-00000005"], "and nothing else is left"


def test_the_next_good_one_here_is_taken_where_the_mirror_has_no_later_one(tmp_path: Path) -> None:
    store = saved(tmp_path, range(1, 4), tmp_path / "other", keep=3)
    config, copies = CheckpointConfig(mirror=f"file://{tmp_path}/other"), tmp_path / "other" / "run"
    damaged(store.root / "step-00000003")
    shutil.rmtree(copies / "step-00000003")
    assert loaded(CheckpointStore(store.root, config)) == (2.0, ["step-00000003"], [])
    damaged(store.root / "step-00000002")
    value, refused, (asked,) = loaded(CheckpointStore(store.root, config))
    assert (value, refused, asked["step"]) == (2.0, ["step-00000003", "step-00000002"], 2)
    damaged(store.root / "step-00000002")
    damaged(copies / "step-00000002")
    value, refused, (asked,) = loaded(CheckpointStore(store.root, config))
    assert value == 1.0 and asked["kind"] == "mirror_failed" and "is damaged" in asked["reason"]
    damaged(store.root / "step-00000001")
    damaged(copies / "step-00000001")
    with pytest.raises(CheckpointError, match=r"step-00000001: .* is damaged.*; asking the mirror failed: no "):
        loaded(CheckpointStore(store.root, config))
    assert loaded_step(store.root, config, 3) is None


def loaded_step(root: Path, config: CheckpointConfig, step: int) -> int | None:
    """The step that is found where it alone will do."""
    try:
        found = CheckpointStore(root, config).find(step)
    except CheckpointError:
        return None
    return found.step if found is not None else None


def test_only_the_step_that_is_wanted_is_asked_for(tmp_path: Path) -> None:
    store = saved(tmp_path, range(1, 4), tmp_path / "other", keep=3)
    config = CheckpointConfig(mirror=f"file://{tmp_path}/other")
    damaged(store.root / "step-00000002")
    assert loaded_step(store.root, config, 2) == 2 and is_complete(store.root / "step-00000002")


def test_a_name_that_is_taken_by_a_damaged_one_is_no_obstacle_to_a_copy(tmp_path: Path) -> None:
    """As when a run begins: one that has lost its manifest isn't counted, and its copy takes its place."""
    store = saved(tmp_path, range(1, 4), tmp_path / "other", keep=3)
    (store.root / "step-00000003" / MANIFEST).unlink()
    latest = store.latest()
    assert latest is not None and latest.step == 2
    found = Mirror(f"file://{tmp_path}/other", "run").fetch(store.root, latest[:2])
    assert found is not None and found.step == 3 and is_complete(store.root / "step-00000003")
    assert names(store.root) == ["step-00000001", "step-00000002", "step-00000003"]
