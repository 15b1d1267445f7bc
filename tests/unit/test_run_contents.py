"""A finished run is used without what it was made of: its text, the prepared set and the model's directory may go."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.data.config import DataConfig
from meshwright.errors import ConfigError
from meshwright.jobs.prepare import text_config
from meshwright.models.config import ModelConfig
from tests.runs import call, words, write_corpus

pytestmark = pytest.mark.slow

TINY = ("--train.steps", "2", "--schedule.warmup", "0", "--checkpoint.every", "2")


def one_run(root: Path, name: str, *more: str) -> Path:
    status, text = call(words(root, name, *TINY, *more), root / f"{name}.out")
    assert status == 0, text
    return root / name


def used(run: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, bytes]]:
    """Returns what a run generates and the files that it exports."""
    assert main(["generate", str(run), "--prompt", "the cat", "--max-tokens", "12", "--temperature", "0"]) == 0
    text = capsys.readouterr().out
    assert main(["export", str(run), "--to", str(out)]) == 0
    capsys.readouterr()
    return text, {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a text, from which a run is started by relative paths."""
    root = tmp_path / "home"
    root.mkdir()
    write_corpus(root / "corpus.txt", 60)
    monkeypatch.chdir(root)
    return Path()


def test_a_run_is_used_elsewhere_without_its_text(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = one_run(home, "run").absolute()
    before = used(run, tmp_path / "before", capsys)
    assert {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"} <= set(before[1])
    os.utime("corpus.txt", ns=(1, 1))
    assert used(run, tmp_path / "touched", capsys) == before
    shutil.copytree(run, tmp_path / "elsewhere" / "copy")
    shutil.rmtree(run.parent)  # the text, the prepared set and the run itself
    (tmp_path / "stranger").mkdir()
    monkeypatch.chdir(tmp_path / "stranger")
    assert used(tmp_path / "elsewhere" / "copy", tmp_path / "after", capsys) == before
    facts = json.loads((tmp_path / "elsewhere" / "copy" / "text.json").read_text())
    assert facts["splits"]["validation"]["text_bytes"] > 0 and facts["vocab_size"] > 10


def test_a_run_of_a_directory_is_used_without_the_directory(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = one_run(home, "first")
    assert main(["export", str(made), "--to", "donor"]) == 0
    Path("donor/chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    argv = words(home, "second", *TINY, "--model", "donor", "--data.tokenizer", "auto")
    for flag in ("--model.layers", "--model.width"):  # the directory has its own
        place = argv.index(flag)
        del argv[place : place + 2]
    status, text = call(argv, Path("second.out"))
    assert status == 0, text
    run = Path("second").absolute()
    before = used(run, tmp_path / "before", capsys)
    assert before[1]["tokenizer.json"] == Path("donor/tokenizer.json").read_bytes()
    assert before[1]["chat_template.jinja"] == b"{{ messages[0]['content'] }}"
    shutil.move(str(run), tmp_path / "moved")
    shutil.rmtree(run.parent)
    monkeypatch.chdir(tmp_path)
    assert used(tmp_path / "moved", tmp_path / "after", capsys) == before


def test_a_run_without_its_contents_says_what_adds_them(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = one_run(home, "run")
    (run / "text.json").unlink()
    assert main(["generate", str(run), "--prompt", "the"]) == 2
    assert "the same train command adds it" in capsys.readouterr().err
    one_run(home, "run")
    assert main(["generate", str(run), "--prompt", "the", "--max-tokens", "2"]) == 0


def test_a_directory_is_trained_on_its_own_tokenizer(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("donor").mkdir()
    run = one_run(home, "first")
    assert main(["export", str(run), "--to", "donor"]) == 0
    model, plain = ModelConfig(name="donor"), ModelConfig(name="gpt2")
    own = text_config(model, DataConfig())
    assert own.tokenizer == str(Path("donor").absolute())
    assert text_config(plain, DataConfig()).tokenizer == "bpe"
    assert text_config(ModelConfig(name="donor", fresh=True), DataConfig(tokenizer="bpe")).tokenizer == "bpe"
    for tokenizer in (str(Path("donor").absolute()), "donor/tokenizer.json", str(run / "tokenizer")):
        assert text_config(model, DataConfig(tokenizer=tokenizer)).tokenizer == tokenizer
    for tokenizer in ("bpe", "chars"):
        with pytest.raises(ConfigError, match=r"another tokenizer than that of donor.*data\.foreign_tokenizer"):
            text_config(model, DataConfig(tokenizer=tokenizer))
        allowed = DataConfig(tokenizer=tokenizer, foreign_tokenizer=True)
        assert text_config(model, allowed) == allowed
    with pytest.raises(ConfigError, match=r"data\.vocab_size = 999 has no effect"):
        text_config(model, DataConfig(vocab_size=999))
    for other, data in ((plain, DataConfig(tokenizer="bpe")), (model, DataConfig())):
        with pytest.raises(ConfigError, match=r"data\.foreign_tokenizer has no effect"):
            text_config(other, dataclasses.replace(data, foreign_tokenizer=True))
    Path("donor/tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"weights and no tokenizer.*add its tokenizer\.json"):
        text_config(model, DataConfig())


def test_train_refuses_another_tokenizer_before_a_rank_starts(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = one_run(home, "first")
    assert main(["export", str(run), "--to", "donor"]) == 0
    capsys.readouterr()
    argv = ["train", "--model", "donor", "--data", "corpus.txt", "--data.tokenizer", "bpe", "--run", "second"]
    assert main(argv) == 2
    assert "data.foreign_tokenizer = true" in capsys.readouterr().err
    assert not Path("second").exists()


def test_a_prompt_beyond_the_vocabulary_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = one_run(home, "first")
    assert main(["export", str(run), "--to", "donor"]) == 0
    rule = json.loads(Path("donor/tokenizer.json").read_text())
    rule["model"]["vocab"] = {key: place + 1000 for key, place in rule["model"]["vocab"].items()}
    Path("donor/tokenizer.json").write_text(json.dumps(rule))
    assert main(["generate", "donor", "--prompt", "the"]) == 2
    assert "the tokenizer is another model's" in capsys.readouterr().err
