"""A run beside a full disk, damaged checkpoints and another run's directory."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

import pytest

import meshwright.checkpoint.files as files
from meshwright.jobs import start_checks
from tests.runs import call, curve, events, last_step, rows, words, write_corpus
from tests.tiers import cases


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and ``whole``, a finished run of 24 steps with a checkpoint every 3."""
    root = tmp_path_factory.mktemp("checkpoints")
    write_corpus(root / "corpus.txt")
    assert call(words(root, "whole", "--checkpoint.keep", "9"), root / "log")[0] == 0
    return root


@pytest.fixture
def stopped(root: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the run as it stood after 12 steps, with checkpoints of 9 and 12."""
    run = root / re.sub(r"\W", "-", request.node.name)
    shutil.copytree(root / "whole", run)
    for folder in (run / "checkpoints").iterdir():
        if folder.name not in ("step-00000009", "step-00000012"):
            shutil.rmtree(folder)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:12]))
    return run


def damage(folder: Path) -> None:
    """Flips a bit in the middle of a checkpoint's largest file."""
    file = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_passed_over_and_told(root: Path, stopped: Path) -> None:
    damage(stopped / "checkpoints" / "step-00000012")
    status, text = call(words(root, stopped.name), root / "log")
    assert status == 0, text
    (refused,) = events(stopped, "checkpoint_refused")
    assert "step-00000012" in refused["path"] and refused["reason"]
    assert [event["step"] for event in events(stopped, "resumed")] == [9]
    assert curve(stopped) == curve(root / "whole")
    assert [row["step"] for row in rows(stopped)][12:15] == [10, 11, 12]


@pytest.mark.parametrize("reader", ["the command", "the ranks"])
def test_only_damaged_checkpoints_end_the_run_with_a_cure(
    reader: str, root: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reader == "the ranks":
        monkeypatch.setattr(start_checks, "READ_BYTES", 0)
    for folder in (stopped / "checkpoints").iterdir():
        damage(folder)
    before = sorted(path.name for path in (stopped / "checkpoints").iterdir())
    status, text = call(words(root, stopped.name), root / "log")
    assert status == 1
    told = (f"{name}: rank-00000.image is damaged: its checksum is " for name in reversed(before))
    assert all(part in text for part in (*told, "name a checkpoint.mirror that has copies, or give another --run"))
    assert "Traceback" not in text and ("[rank 0]" in text) == (reader == "the ranks"), text
    assert last_step(stopped) == 12
    assert sorted(path.name for path in (stopped / "checkpoints").iterdir()) == before


def test_cut_checkpoints_are_refused_before_a_rank_starts(root: Path, stopped: Path) -> None:
    for folder, name in (("step-00000009", "rank-00000.image"), ("step-00000012", "manifest.json")):
        file = stopped / "checkpoints" / folder / name
        file.write_bytes(file.read_bytes()[:-5])
    plan = (stopped / "plan.json").read_bytes()
    status, text = call(words(root, stopped.name, layout="replicate=2", devices=2), root / "log")
    assert status == 1
    told = ("step-00000012: manifest.json is damaged", "step-00000009: rank-00000.image has", "another --run")
    assert all(part in text for part in told) and "[rank" not in text, text
    assert (stopped / "plan.json").read_bytes() == plan and last_step(stopped) == 12


def test_weights_of_another_type_are_refused_before_a_rank_starts(root: Path, stopped: Path) -> None:
    status, text = call(words(root, stopped.name, layout="replicate=2,precision=float64", devices=2), root / "log")
    assert status == 2
    told = ("step-00000012 has weights of float32", "precision=float64", "write precision=float32", "another --run")
    assert all(part in text for part in told) and "[rank" not in text, text
    assert last_step(stopped) == 12


def test_a_run_of_another_config_is_refused(root: Path, stopped: Path) -> None:
    config = (stopped / "config.toml").read_bytes()
    for flag, value, told in (
        ("--optimizer.lr", "0.5", "optimizer.lr was 0.001, is 0.5"),
        ("--model.layers", "3", "model.layers was 2, is 3"),
        ("--train.batch", "16", "train.batch was 8, is 16"),
        ("--train.seed", "4", "train.seed was 0, is 4"),
    ):
        status, text = call(words(root, stopped.name, flag, value), root / "log")
        assert status == 2
        assert "belongs to another config" in text and told in text and "another --run" in text
    assert (stopped / "config.toml").read_bytes() == config and last_step(stopped) == 12


def test_checkpoints_of_another_model_are_refused(root: Path, stopped: Path) -> None:
    config = stopped / "config.toml"
    config.write_text(config.read_text().replace("width = 32", "width = 48"))
    status, text = call(words(root, stopped.name, "--model.width", "48"), root / "log")
    assert status == 1
    assert "step-00000012" in text and "model" in text and "Traceback" not in text


def test_a_finished_run_has_nothing_to_do_and_goes_on_when_steps_are_added(root: Path) -> None:
    run = root / "longer"
    shutil.copytree(root / "whole", run)
    before = curve(run)
    status, text = call(words(root, run.name), root / "log")
    assert status == 0, text
    assert curve(run) == before
    status, text = call(words(root, run.name, "--train.steps", "27"), root / "log")
    assert status == 0, text
    assert sorted(curve(run)) == list(range(1, 28))


def _fill_disk() -> None:
    """Lets the disk be full from the third checkpoint's first file on."""
    write = files.ChecksumWriter.write
    left = [200_000]

    def full(self: files.ChecksumWriter, data):  # type: ignore[no-untyped-def]
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    files.ChecksumWriter.write = full  # type: ignore[method-assign]


@pytest.mark.parametrize(("layout", "devices"), cases([("shard=2,zero=3", 2), ("replicate=1", 1)]))
def test_a_full_disk_ends_the_run_and_the_last_checkpoint_stands(layout: str, devices: int, root: Path) -> None:
    run, whole = root / f"full-{devices}", root / f"room-{devices}"
    argv = words(root, run.name, layout=layout, devices=devices)
    status, text = call(argv, root / "log", before=_fill_disk)
    assert status == 1
    assert "checkpoint of step" in text and "stand" in text and "Traceback" not in text
    assert "No space left on device" in text
    saved = [event["step"] for event in events(run, "checkpoint_saved")]
    folders = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith("step-")]
    assert sorted(folders) == [f"step-{step:08d}" for step in saved]
    assert call(argv, root / "log")[0] == 0
    assert call(words(root, whole.name, layout=layout, devices=devices), root / "log")[0] == 0
    assert curve(run) == curve(whole)


def _no_room_for_configs() -> None:
    """Lets the disk be full when a run's config is written."""
    write = Path.write_text

    def full(self: Path, *arguments, **options) -> int:  # type: ignore[no-untyped-def]
        if self.name == ".config.toml.new":
            self.touch()
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *arguments, **options)

    Path.write_text = full  # type: ignore[method-assign]


def test_a_full_disk_before_the_first_step_is_told_and_the_same_command_goes_on(root: Path) -> None:
    argv = words(root, "full", "--train.steps", "4")
    status, text = call(argv, root / "log", before=_no_room_for_configs)
    assert status == 1 and f"{root / 'full'} can't be written: No space left on device; free space" in text, text
    assert "Traceback" not in text and "[rank" not in text
    status, text = call(argv, root / "log")
    assert status == 0, text


def test_a_run_whose_copies_failed_says_so_at_its_end(root: Path) -> None:
    (root / "copies").mkdir()
    (root / "copies" / "alone").write_text("dear")
    argv = words(root, "alone", "--train.steps", "4", "--checkpoint.mirror", str(root / "copies"))
    status, text = call(argv, root / "log")
    assert status == 0 and "the newest checkpoint is there alone: step-00000004 can't be copied" in text, text


def test_a_machine_without_its_run_goes_on_from_the_copy_elsewhere(root: Path) -> None:
    mirror = ("--checkpoint.mirror", f"file://{root}/elsewhere", "--checkpoint.keep", "9")
    status, text = call(words(root, "moved", *mirror), root / "moved.log")
    assert status == 0, text
    copies = [row["copy"] for row in events(root / "moved", "checkpoint_saved")]
    assert copies == [f"file://{root}/elsewhere/moved/step-{step:08d}" for step in range(3, 25, 3)]
    shutil.rmtree(root / "moved")
    for step in range(15, 25, 3):
        shutil.rmtree(root / "elsewhere" / "moved" / f"step-{step:08d}")
    status, text = call(words(root, "moved", *mirror), root / "moved.log")
    assert status == 0 and "checkpoint of step 12" in text and "copied back from" in text, text
    assert [row["step"] for row in events(root / "moved", "resumed")] == [12]
    assert curve(root / "moved") == {step: pair for step, pair in curve(root / "whole").items() if step > 12}
    status, text = call(words(root, "broken", "--checkpoint.mirror", "nowhere://x"), root / "broken.log")
    assert status == 2 and "checkpoint.mirror = nowhere://x" in text and not (root / "broken").exists()


def test_a_damaged_checkpoint_comes_back_from_the_copy_elsewhere(root: Path, stopped: Path) -> None:
    """No step is done again that the other place has; it is told where the state came from."""
    mirror = root / "second" / stopped.name
    shutil.copytree(stopped / "checkpoints", mirror)
    options = ("--checkpoint.mirror", f"file://{root}/second")
    damage(stopped / "checkpoints" / "step-00000012")
    status, text = call(words(root, stopped.name, *options), root / "log")
    assert status == 0, text
    (refused,) = events(stopped, "checkpoint_refused")
    (fetched,) = events(stopped, "checkpoint_fetched")
    assert "step-00000012" in refused["path"] and fetched["step"] == 12 and fetched["mirror"] == f"file://{mirror}"
    assert [event["step"] for event in events(stopped, "resumed")] == [12]
    assert curve(stopped) == curve(root / "whole") and [row["step"] for row in rows(stopped)] == list(range(1, 25))
