"""Help that fits a screen, completion that a shell understands, exit statuses that the docs name."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright.cli.arguments import SHORT
from meshwright.cli.completion import SHELLS, fish_script, flags_by_verb, zsh_script
from meshwright.cli.help import PAGES
from meshwright.cli.main import VERBS, main
from meshwright.config import Config
from tests.house.source import ROOT
from tests.house.test_docs import flags_of

LINES, CHARACTERS = 40, 120
OWN_PAGES = ("doctor", "chaos", "new", "completion")


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_a_screen(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= CHARACTERS
    assert lines[0].startswith(f"usage: meshwright {verb}")
    assert any(line.startswith(f"  meshwright {verb}") for line in lines[1:]) or verb not in PAGES
    if verb in PAGES or verb in OWN_PAGES:
        assert "Exit status: 0" in "\n".join(lines)


def known_flags(configs: tuple[type[Config], ...]) -> set[str]:
    return {f"--{flag}" for config in configs for flag in flags_of(config)} | set(SHORT)


def test_help_names_settings_that_are_there() -> None:
    for verb, page in PAGES.items():
        flags = {flag for text, meaning in page.settings for flag in re.findall(r"--[a-z][\w.-]*", f"{text} {meaning}")}
        assert flags <= known_flags(page.configs), verb
    assert len(PAGES["train"].settings) == 12


def test_all_help_has_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the settings are held to the config's fields, those of the command to what its file takes."""
    assert main(["train", "--help-all"]) == 0
    printed = capsys.readouterr().out
    for flag in known_flags(PAGES["train"].configs) - set(SHORT):
        name = flag.removeprefix("--").replace(".no-", ".")
        # A config of its own is a section, and only switches have a negative.
        assert f"--{name}" in printed or f"{name} options" in printed or name.startswith("no-"), flag
    for flag in ("RECIPE.toml", "--hostfile", "--nodes", "--node", "--meet", "--slots", "--key-file", "--dry-run"):
        assert flag in printed
    assert printed.count("--json") >= 1


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_every_verb_and_flag(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for verb, flags in flags_by_verb().items():
        assert verb in script and all(flag.removeprefix("--") in script for flag in flags)
    path = tmp_path / "script"
    path.write_text(script)
    if shutil.which(shell):
        assert subprocess.run([shell, "-n", str(path)], timeout=60, check=False).returncode == 0


def test_descriptions_are_quoted_for_their_shell() -> None:
    """Within single quotes fish reads a backslash before a colon as one; zsh's _describe needs it."""
    flags = flags_by_verb()
    assert "stages of a recipe: prepare, plan" in fish_script(flags) and "what a layout'\\''s ranks" in fish_script(
        flags
    )
    assert "run:all stages of a recipe\\: prepare, plan" in zsh_script(flags)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("meshwright do", ["doctor"]),
        ("meshwright train --hostf", ["--hostfile"]),
        ("meshwright train --model.att", ["--model.attention"]),
        ("meshwright verify --dtype float3", ["float32"]),
        ("meshwright completion z", ["zsh"]),
        ("meshwright plan --largest --lay", ["--layout"]),
        ("meshwright plan --largest fa", ["false"]),
    ],
)
def test_bash_completes(line: str, completions: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", "bash"]) == 0
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out)
    words = line.split()
    setup = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _meshwright; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", f". {path}; {setup}"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == completions


def test_a_new_recipe_is_one_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a text")
    words = ["--model", "gpt2", "--data", "text.txt", "--devices", "2", "--to", "mine.toml"]
    assert main(["new", *words]) == 0
    assert capsys.readouterr().out == "mine.toml\n"
    assert main(["train", "mine.toml", "--dry-run"]) == 0
    assert "meshwright train mine.toml" in capsys.readouterr().out
    assert main(["new", *words]) == 2, "a recipe that stands is never overwritten"
    assert main(["new", "--data", "nothing.txt", "--to", "b.toml"]) == 2
    assert main(["new", "--devices", "many", "--to", "b.toml"]) == 2
    capsys.readouterr()
    assert main(["new", "--model", "lama", "--to", "b.toml"]) == 2
    assert "model.name = 'lama' is no directory, function or model type; did you mean 'llama" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.glob("*.toml")) == ["mine.toml"]
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=300)).save_pretrained("dir")
    Path("a_module_of_mine.py").write_text("def build(vocab, context): ...")
    monkeypatch.syspath_prepend(tmp_path)
    for to, model in (("a.toml", "dir"), ("c.toml", "a_module_of_mine:build")):
        assert main(["new", "--model", model, "--to", to]) == 0
        assert main(["train", to, "--dry-run"]) == 0


def test_a_commented_setting_of_a_new_recipe_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person takes the # away: the line must then be read."""
    monkeypatch.chdir(tmp_path)
    assert main(["new"]) == 0
    text = Path("recipe.toml").read_text()
    body = "\n".join(re.sub(r"^# (?=\w+ = )", "", line) for line in text.splitlines())
    assert body.count("\n# ") < text.count("\n# ")
    Path("bare.toml").write_text(body)
    Path("my-text.txt").write_text("a text")
    Path("more").mkdir()
    Path("more/one.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}'))
    assert main(["train", "bare.toml", "--dry-run"]) == 0


def test_exit_statuses_are_those_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusals and failures that need no run; those of a run are held by tests of runs."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    stated = {int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert stated == {0, 1, 2, 3, 130, 143}
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert main(["tarin"]) == 2
    assert main(["train", "--layuot", "x"]) == 2
    assert main(["train", "none.toml"]) == 2
    assert main(["completion", "tcsh"]) == 2
    assert main(["chaos", str(tmp_path), "--random", "--dry-run", "--every", "0"]) == 2
    assert main(["plan", "--sizes", "layers=96,width=12288,heads=96,vocab=51200", "--cluster", "1xv100-16"]) == 2
