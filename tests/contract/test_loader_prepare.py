"""Preparing in several processes: the same bytes for any number, after any kill, on a real full disk."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from meshwright.data import stages
from meshwright.data.config import DataConfig
from meshwright.data.prepare import prepare
from meshwright.data.tokens import TokenSet
from meshwright.errors import DataError

WORDS = ["".join(random.Random(i).choices("abcdeghi", k=1 + i % 7)) for i in range(300)]
WORDS += ["na\u00efve", "\u65e5\u672c", "<|endoftext|>", "12", "3.5", "(", ")", ":", "\n"] * 8

SCRIPT = """
import sys, time
from meshwright.data import stages
from meshwright.data.config import DataConfig
from meshwright.data.prepare import prepare
stages.UNIT_BYTES = (2000, 4000)
stages.GROUP_BYTES = 8000
held = sys.argv[3:]
def report(progress):
    print(progress.stage, progress.done_bytes, flush=True)
    if progress.stage in held and (progress.done_bytes or progress.stage == "train"):
        print("held", flush=True)
        time.sleep(600)
config = DataConfig(paths=(sys.argv[1],), vocab_size=400, validation_share=0.2)
prepare(config, sys.argv[2], progress=report, workers=2)
"""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "UNIT_BYTES", (2000, 4000))
    monkeypatch.setattr(stages, "GROUP_BYTES", 8000)


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    generator = random.Random(0)
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(40):
        lines = [" ".join(generator.choices(WORDS, k=8)) for _ in range(generator.choice((1, 9, 90)))]
        (folder / f"{number:02d}.txt").write_text("\n".join(lines), encoding="utf-8")
    return DataConfig(paths=(str(folder),), vocab_size=400, validation_share=0.2)


def held(config: DataConfig, out: Path, stage: str) -> subprocess.Popen[str]:
    """Starts to prepare in another process, and returns it where it waits for ever, within a stage."""
    command = [sys.executable, "-c", SCRIPT, config.paths[0], str(out), stage]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert "held\n" in iter(process.stdout.readline, ""), "it ended before"
    return process


def contents(token_set: TokenSet) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in token_set.path.iterdir()}


def test_any_number_of_processes_writes_the_same_bytes(config: DataConfig, tmp_path: Path) -> None:
    sets = [prepare(config, tmp_path / f"set{workers}", workers=workers) for workers in (1, 2, 3)]
    assert contents(sets[0]) == contents(sets[1]) == contents(sets[2])
    assert sets[0].vocab_size == 400 and len(sets[0].train.tokens) > 10_000


def test_tokens_are_those_of_the_tokenizer_on_whole_documents(config: DataConfig, tmp_path: Path) -> None:
    """Units cut long documents and workers encode in batches; neither may change a token."""
    made = prepare(config, tmp_path / "set", workers=2)
    tokenizer: Tokenizer = made.tokenizer()
    tokenizer.encode_special_tokens = True
    texts = {path.read_text(encoding="utf-8") for path in Path(config.paths[0]).iterdir()}
    expected = sorted([*tokenizer.encode(text).ids, made.eos_id] for text in texts)
    found = [
        part.tolist() for split in (made.train, made.validation) for part in np.split(split.tokens, split.ends[:-1])
    ]
    assert sorted(found) == expected
    assert sum(tokens.count(made.eos_id) for tokens in found) == len(texts)


@pytest.mark.parametrize("stage", ["read", "train", "encode"])
def test_a_kill_at_any_stage_resumes_to_the_same_bytes(config: DataConfig, tmp_path: Path, stage: str) -> None:
    expected = contents(prepare(config, tmp_path / "clean", workers=1))
    process = held(config, tmp_path / "set", stage)
    process.send_signal(signal.SIGKILL)
    assert process.wait(100.0) == -signal.SIGKILL
    assert not (tmp_path / "set").exists()
    with pytest.raises(DataError, match="not a prepared set"):
        TokenSet.open(tmp_path / "set.partial")
    finished = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "set.partial").glob("read-*.documents")}
    assert finished
    redone: list[str] = []
    resumed = prepare(config, tmp_path / "set", workers=2, progress=lambda progress: redone.append(progress.stage))
    assert contents(resumed) == expected
    if stage == "encode":
        assert "train" not in redone
    assert not (tmp_path / "set.partial").exists()


def test_a_kill_leaves_no_orphan(config: DataConfig, tmp_path: Path) -> None:
    process = held(config, tmp_path / "set", "encode")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    process.kill()
    process.wait(100.0)
    limit = time.monotonic() + 100.0
    while any(_alive(int(child)) for child in children) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(_alive(int(child)) for child in children)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_bad_text_in_a_worker_is_named_in_the_parent(config: DataConfig, tmp_path: Path) -> None:
    bad = Path(config.paths[0]) / "17.txt"
    bad.write_bytes(b"abc\xff")
    with pytest.raises(DataError, match=r"17\.txt is not UTF-8: byte 0xff at byte offset 3"):
        prepare(config, tmp_path / "set", workers=2)


def test_a_worker_that_is_killed_is_named_and_the_next_call_goes_on(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill_a_child(progress: stages.Progress) -> None:
        if progress.stage == "encode" and progress.done_bytes:
            for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)

    with pytest.raises(DataError, match=r"ended by signal SIGKILL.*finished parts are kept"):
        prepare(config, tmp_path / "set", workers=2, progress=kill_a_child)
    resumed = prepare(config, tmp_path / "set", workers=1)
    assert contents(resumed) == contents(prepare(config, tmp_path / "clean", workers=1))


def test_a_disk_that_is_really_full(config: DataConfig, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        for workers in (1, 2):
            with pytest.raises(DataError, match=r"disk full while writing under .*data\.cache"):
                prepare(config, disk / "set", workers=workers)
            assert not (disk / "set").exists()
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        assert contents(prepare(config, disk / "set", workers=2)) == contents(prepare(config, tmp_path / "set"))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_two_calls_at_once_make_one_set(config: DataConfig, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, config.paths[0], str(tmp_path / "set")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=200.0)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    made = [any(not line.startswith("digest") for line in output.splitlines()) for output in outputs]
    assert sorted(made) == [False, True]  # both look at what the text is; one makes the set
    assert TokenSet.open(tmp_path / "set", verify=True).vocab_size == 400


@pytest.mark.parametrize("tokenizer", ["bpe", "chars"])
def test_transformers_loads_the_tokenizer(config: DataConfig, tmp_path: Path, tokenizer: str) -> None:
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"vocab_size": 400} if tokenizer == "bpe" else {}
    chosen = DataConfig(paths=config.paths, tokenizer=tokenizer, **vocabulary)
    made = prepare(chosen, tmp_path / "set", workers=1)
    loaded = PreTrainedTokenizerFast.from_pretrained(made.path)
    text = "aged beach\n  3.5 na\u00efve"
    ids = made.tokenizer().encode(text, add_special_tokens=False).ids
    assert loaded(text, add_special_tokens=False)["input_ids"] == ids
    assert loaded.decode(ids) == text
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|endoftext|>", made.eos_id)
