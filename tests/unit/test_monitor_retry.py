"""A disk that is full for a while costs no line and no rank; one that stays full costs a sentence."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from meshwright.errors import RankError
from meshwright.events import Event, StepRecord
from meshwright.monitor import retry
from meshwright.monitor.retry import RetryingFile
from meshwright.monitor.sinks import JsonlSink, read_lines


class Disk:
    """Stands for the disk: takes so many bytes, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: float = float("inf")
        self.error = errno.ENOSPC
        self._write = os.write
        monkeypatch.setattr(retry.os, "write", self.write)
        monkeypatch.setattr(retry, "PAUSE_S", 0.0)
        monkeypatch.setattr(retry, "LAST_S", 0.05)

    def write(self, fd: int, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(self.error, os.strerror(self.error))
        part = data[: int(min(self.room, len(data)))]
        self.room -= len(part)
        return self._write(fd, part)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step, loss=1.0, grad_norm=1.0, lr=1.0, tokens=1, tokens_total=step, tokens_per_s=1.0, step_s=1.0,
        parts={}, memory={}, layout="replicate=1", accuracy=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("room", [0, 1, 17, 300])
def test_every_line_is_there_once_the_disk_has_room(room: int, error: int, tmp_path: Path, disk: Disk) -> None:
    sink = JsonlSink(tmp_path)
    sink.step(record(1))
    disk.room, disk.error = room, error
    for step in range(2, 8):
        sink.step(record(step))
    disk.room = float("inf")
    sink.step(record(8))
    sink.close()
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, 9))
    (told,) = read_lines(tmp_path / "events.jsonl")
    assert told["kind"] == "disk_writable" and told["path"] == "metrics.jsonl" and told["lost"] == 0


def test_events_of_a_full_disk_come_later_and_two_writers_never_mix(tmp_path: Path, disk: Disk) -> None:
    one, other = JsonlSink(tmp_path), JsonlSink(tmp_path, metrics=False)
    disk.room = 10
    one.event(Event(kind="first", rank=0, data={}))
    disk.room = float("inf")
    other.event(Event(kind="second", rank=1, data={}))
    one.event(Event(kind="third", rank=0, data={}))
    for sink in (one, other):
        sink.close()
    kinds = [row["kind"] for row in read_lines(tmp_path / "events.jsonl")]
    assert kinds == ["second", "first", "third", "disk_writable"]


def test_what_waits_is_bounded_and_its_loss_is_said(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(retry, "LIMIT_BYTES", 1000)
    sink = JsonlSink(tmp_path)
    disk.room = 0
    for step in range(1, 100):
        sink.step(record(step))
    began = time.monotonic()
    sink.close()
    assert time.monotonic() - began < 5
    assert "metrics.jsonl: the last 99 lines couldn't be written: No space left on device" in capsys.readouterr().err


def test_a_file_of_its_own_is_cut_back_to_the_last_whole_chunk(tmp_path: Path, disk: Disk) -> None:
    file = RetryingFile(tmp_path / "records", shared=False)
    disk.room = 10
    for chunk in (b"abcdef", b"ghijkl", b"mnopqr"):
        file.write(chunk)
    assert (tmp_path / "records").read_bytes() == b"abcdef"
    disk.room = float("inf")
    assert file.write(b"stu") is not None and file.close() == 0
    assert (tmp_path / "records").read_bytes() == b"abcdefghijklmnopqrstu"


def test_what_can_never_be_written_is_an_error(tmp_path: Path, disk: Disk) -> None:
    with pytest.raises(RankError, match="can't be written"):
        JsonlSink(tmp_path / "missing")
    sink = JsonlSink(tmp_path)
    disk.room, disk.error = 0, errno.EBADF
    with pytest.raises(RankError, match="can't be written"):
        sink.step(record(1))
