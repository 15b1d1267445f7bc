"""Engines of `prepare`: the bytes of the own pipeline, after kills in the middle too, and no finished task again."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from meshwright.data import batches, stages
from meshwright.data.batches import BatchPool, run_batch_task, share_of_batch
from meshwright.data.config import DataConfig
from meshwright.data.documents import Reading
from meshwright.data.filters import FilterConfig
from meshwright.data.local_executor import LocalExecutor
from meshwright.data.prepare import prepare
from meshwright.data.shards import Counts
from meshwright.data.sources import CorpusFile
from meshwright.data.tasks import CODEC, ReadTask
from meshwright.errors import ConfigError, DataError
from meshwright.jobs.prepare_engines import PrepareConfig, run_share
from tests.prepare_runs import FILTERS_LACK, FinishedFiles, check_filtered, contents, write_filtered_texts, write_texts

HAS_DATATROVE = importlib.util.find_spec("datatrove") is not None
needs_datatrove = pytest.mark.skipif(not HAS_DATATROVE, reason="datatrove isn't here: pip install 'meshwright[text]'")
READING = Reading(text_field="text", normalise="NFC")
SCRIPT = """
import sys
from pathlib import Path
from meshwright.data import stages
from meshwright.data.config import DataConfig
from meshwright.data.local_executor import LocalExecutor
from meshwright.data.prepare import prepare
stages.UNIT_BYTES, stages.GROUP_BYTES = (2000, 4000), 8000
config = DataConfig(paths=(sys.argv[1],), vocab_size=400, validation_share=0.2)
report = lambda progress: print(progress.stage, progress.done_bytes, progress.total_bytes, flush=True)
prepare(config, sys.argv[2], report, engine=lambda folder, processes, key: LocalExecutor(2))
"""

GATES = """
import os, time
from pathlib import Path
from meshwright.data import tasks

def gate(kind, stage, pattern):
    run = kind.run
    def wait_and_run(self, batched):
        # Some tasks of a stage finish; the others wait until its gate is open.
        while len(list(self.directory.glob(pattern))) >= 2 and not Path(os.environ["GATES"], stage).exists():
            time.sleep(0.01)
        return run(self, batched)
    kind.run = wait_and_run

gate(tasks.ReadTask, "read", "read-*.documents")
gate(tasks.EncodeTask, "encode", "unit-*.bin")
"""
"""Imported by each interpreter that starts, datatrove's workers among them."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "UNIT_BYTES", (2000, 4000))
    monkeypatch.setattr(stages, "GROUP_BYTES", 8000)


class _ThisProcess:
    """An engine that runs tasks in this process, and loses some of them at first."""

    def __init__(self, lost: int = 0) -> None:
        self.launches: list[list[int]] = []
        self._lost = lost

    def start(self, batch: Path, numbers: Sequence[int]) -> None:
        self.launches.append(list(numbers))
        lost = self._lost if len(self.launches) == 1 else 0
        for number in numbers[lost:]:
            run_batch_task(str(batch), number)

    def why_ended(self) -> str:
        return "its node was lost"

    def stop(self) -> None:
        pass


def test_lost_tasks_are_launched_again_and_alone(tmp_path: Path) -> None:
    config = DataConfig(paths=(write_texts(tmp_path / "text"),), vocab_size=400)
    engines: list[_ThisProcess] = []

    def make(folder: Path, processes: int, key: str) -> _ThisProcess:
        engines.append(_ThisProcess(lost=2))
        return engines[0]

    made = prepare(config, tmp_path / "set", engine=make)
    assert contents(made.path) == contents(prepare(config, tmp_path / "own", workers=1).path)
    read, again = engines[0].launches[:2]
    assert len(read) > 2 and again == read[:2]


def test_an_engine_that_never_answers_is_given_up(tmp_path: Path) -> None:
    class Dead(_ThisProcess):
        def start(self, batch: Path, numbers: Sequence[int]) -> None:
            self.launches.append(list(numbers))

    config = DataConfig(paths=(write_texts(tmp_path / "text"),), vocab_size=400)
    with pytest.raises(DataError, match=r"tasks of a stage have no answer after 3 launches: its node was lost"):
        prepare(config, tmp_path / "set", engine=lambda folder, processes, key: Dead())


def test_a_task_that_fails_is_named_and_a_record_is_data(tmp_path: Path) -> None:
    missing = CorpusFile(path=str(tmp_path / "gone.txt"), kind="text", size=1)
    task = ReadTask(
        directory=tmp_path, shard=0, sources=(missing,), reading=READING, characters=False,
        filters=FilterConfig(),
    )  # fmt: skip
    done: list[Counts] = []
    with pytest.raises(DataError, match=r"cannot read .*gone\.txt"):
        BatchPool(_ThisProcess()).run([task], done.append)
    assert not done and share_of_batch(tmp_path / "batch", 0, 1) == []
    record = tmp_path / "batch" / "task-000000.json"
    for damage in (b"", b"\x80\x04cos\nsystem\n", b'{"!":"Popen","fields":["true"]}', CODEC.dumps(Counts(bytes=1))):
        record.write_bytes(damage)
        with pytest.raises(DataError, match=r"task-000000\.json (can't be read|holds no task)"):
            run_batch_task(str(tmp_path / "batch"), 0)


def test_a_second_copy_of_a_job_leaves_a_finished_task_alone(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("text")
    task = ReadTask(
        directory=tmp_path, shard=0, sources=(CorpusFile(path=str(source), kind="text", size=4),), reading=READING,
        characters=False, filters=FilterConfig(),
    )  # fmt: skip
    done: list[Counts] = []
    BatchPool(_ThisProcess()).run([task], done.append)
    answer = tmp_path / "batch" / "answer-000000.json"
    answer.unlink()
    source.unlink()
    run_batch_task(str(tmp_path / "batch"), 0)
    assert CODEC.loads(answer.read_bytes()) == done[0] == Counts(bytes=4)


def test_jobs_of_an_array_share_a_batch_without_overlap(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"task-{number:06d}.json").touch()
    (tmp_path / "answer-000004.json").touch()
    shares = [share_of_batch(tmp_path, index, 3) for index in range(3)]
    assert shares == [[0, 3, 6], [1], [2, 5]]
    with pytest.raises(DataError, match="is no batch of tasks"):
        run_share(tmp_path / "none", 0, 1)


@pytest.mark.skipif(bool(FILTERS_LACK), reason=FILTERS_LACK)
def test_every_filter_gives_the_same_bytes_by_an_engine(tmp_path: Path) -> None:
    """A task of an engine has its filters from its record alone."""
    text, filters = write_filtered_texts(tmp_path / "texts")
    config = DataConfig(paths=(text,), vocab_size=400, validation_share=0.2, filters=filters)
    own = prepare(config, tmp_path / "own", workers=1)
    made = prepare(config, tmp_path / "set", engine=lambda folder, processes, key: _ThisProcess(lost=1))
    check_filtered(made.path)
    assert contents(made.path) == contents(own.path)


@needs_datatrove
def test_datatroves_executor_gives_the_same_bytes_after_two_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first kill comes while text is read, the second while it is encoded; what was finished stays as it is."""
    (tmp_path / "gates").mkdir()
    (tmp_path / "gates" / "sitecustomize.py").write_text(GATES)
    monkeypatch.setenv("GATES", str(tmp_path / "gates"))
    path = os.pathsep.join([str(tmp_path / "gates"), *filter(None, sys.path)])
    text = write_texts(tmp_path / "text")
    config = DataConfig(paths=(text,), vocab_size=400, validation_share=0.2)
    counts: dict[str, int] = {}

    def count_files(progress: stages.Progress) -> None:
        counts.update(
            {name: len(list((tmp_path / "own.partial").glob(name))) for name in ("read-*.documents", "unit-*.bin")}
        )

    own = prepare(config, tmp_path / "own", count_files, workers=1)
    finished = FinishedFiles(tmp_path / "set.partial")
    for stage, pattern in (("read", "read-*.documents"), ("encode", "unit-*.bin")):
        with monkeypatch.context() as gated:
            gated.setenv("PYTHONPATH", path)
            process = _run_until(stage, lambda name=pattern: len(finished.list(name)) >= 2, text, tmp_path / "set")
        children = _descendants(process.pid)
        process.kill()
        assert process.wait(60.0) == -signal.SIGKILL and children
        _wait_until(lambda living=children: not any(map(_alive, living)))  # no worker goes on without its parent
        assert 2 <= len(finished.list(pattern)) < counts[pattern], "in the middle"
        finished.remember(pattern)
        (tmp_path / "gates" / stage).touch()
    made = prepare(
        config,
        tmp_path / "set",
        finished.check_at_end_of("encode"),
        engine=lambda folder, processes, key: LocalExecutor(2),
    )
    assert finished.checks == 1 and contents(made.path) == contents(own.path)


def _run_until(stage: str, condition: Callable[[], bool], text: str, out: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, text, str(out)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if line.startswith(stage):
                _wait_until(condition)
                return process
    process.wait(60.0)
    raise AssertionError("it ended before")


def _wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def _descendants(pid: int) -> list[int]:
    found = []
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        found += [child, *_descendants(child)]
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@needs_datatrove
def test_the_executor_names_what_it_died_of(tmp_path: Path) -> None:
    config = DataConfig(paths=(write_texts(tmp_path / "text"),), vocab_size=400)
    (Path(config.paths[0]) / "07.txt").write_bytes(b"abc\xff")
    with pytest.raises(DataError, match=r"07\.txt is not UTF-8"):
        prepare(config, tmp_path / "set", engine=lambda folder, processes, key: LocalExecutor(2))


def test_settings_of_another_engine_are_refused() -> None:
    with pytest.raises(ConfigError, match="settings of slurm have no effect with engine = 'own'"):
        PrepareConfig.from_dict({"slurm": {"jobs": 3}}).check_all()
    with pytest.raises(ConfigError, match=r"workers = 3 has no effect with engine = 'ray'"):
        PrepareConfig(engine="ray", workers=3).check_all()
    with pytest.raises(ConfigError, match=r"slurm\.time = 'soon'"):
        PrepareConfig.from_dict({"engine": "slurm", "slurm": {"time": "soon"}}).check_all()


def test_a_batch_begins_although_a_process_of_the_last_one_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing its folder leaves what was written meanwhile: the next batch ended with FileExistsError."""
    (tmp_path / "batch").mkdir()
    removed: list[Path] = []

    def remove(path: Path, ignore_errors: bool) -> None:
        removed.append(path)
        if len(removed) == 3:
            shutil_rmtree(path, ignore_errors)

    shutil_rmtree = shutil.rmtree
    monkeypatch.setattr(batches.shutil, "rmtree", remove)
    assert batches._fresh_batch(tmp_path).is_dir() and len(removed) == 3
    monkeypatch.setattr(batches, "_REMOVALS", 2)
    monkeypatch.setattr(batches.shutil, "rmtree", lambda path, ignore_errors: None)
    with pytest.raises(DataError, match="another process writes into it"):
        batches._fresh_batch(tmp_path)
