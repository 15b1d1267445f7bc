"""What commands are given by name: the corpus of ``prepare``, a loop, a run, devices; refused before anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.main import main
from tests.runs import write_corpus


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_corpus(tmp_path / "corpus.txt", 60)


@pytest.mark.parametrize("form", [["{}"], ["--paths", "{}"], ["--data", "{}"], ["--data={}"]])
def test_a_corpus_is_named_before_the_flags_or_as_train_names_it(
    form: list[str], corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(corpus) for word in form]
    assert main(["prepare", *words, "--tokenizer", "chars", "--to", "set"]) == 0
    assert capsys.readouterr().out.strip().endswith("set")
    assert (corpus.parent / "set").is_dir()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data"], "--data needs a value"),
        (["--paths", "--tokenizer", "chars"], "--paths needs a value"),
        (["corpus.txt", "--data", "other.txt"], "paths are named twice, before the flags (corpus.txt) and by"),
    ],
)
def test_no_path_and_two_lists_of_paths_are_refused(
    words: list[str], told: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", *words]) == 2
    assert f"error: {told}" in capsys.readouterr().err
    assert [path.name for path in corpus.parent.iterdir()] == ["corpus.txt"]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("loops.py:lop", "loops.py has no function 'lop'; did you mean 'loop'?"),
        ("loops.py:zzz", "loops.py has no function 'zzz'; known: loop"),
        ("broken.py:loop", "broken.py can't be imported: ModuleNotFoundError: No module named 'nowhere_at_all' ("),
        ("nowhere.py:loop", "write FILE:FUNCTION with a Python file that exists"),
    ],
)
def test_a_loop_that_is_not_there_is_refused_before_anything_is_said(
    source: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loops.py").write_text("from pathlib import Path\n\n\ndef loop(strategy):\n    return []\n")
    (tmp_path / "broken.py").write_text("import nowhere_at_all\n")
    assert main(["verify", "--loop", source]) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"error: --loop {source}: ") and told in said and "Traceback" not in said


def test_a_trace_of_no_run_is_refused_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path / "nowhere")]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {tmp_path / 'nowhere'} holds no run; give the directory that train reported\n"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--devices", "8-512"],
            "devices = 8-512: give a number, as 64, several, as 8,24,64, or each doubling, as 8..512",
        ),
        (["--lost", "9"], "a loss of 9 nodes leaves nothing of 64xh100, 8 nodes; lose at most 7"),
        (["--emit", "torchtitn"], "it takes torchtitan, megatron, deepspeed; did you mean 'torchtitan'?"),
    ],
)
def test_a_plan_of_devices_that_are_no_number_of_them_is_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--sizes", "layers=2,width=256,heads=4,vocab=1000", "--cluster", "64xh100", "--batch", "64"]
    assert main(["plan", *sizes, *words]) == 2
    assert told in capsys.readouterr().err


def test_an_export_without_a_target_names_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: --to is missing, which has no default; --help says what it takes\n"
