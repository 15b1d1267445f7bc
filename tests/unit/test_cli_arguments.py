"""Flags over recipes: switches take a value or none, short forms, lists, what was said last."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.arguments import read_config
from meshwright.errors import ConfigError
from meshwright.train.run_config import RunConfig


def read(*words: str) -> RunConfig:
    return read_config(RunConfig, words, "train")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--monitor.report", "False"), False),
        (("--monitor.report", "false"), False),
        (("--monitor.no-report",), False),
        (("--monitor.report", "true"), True),
        (("--monitor.report",), True),
        ((), True),
    ],
)
def test_a_switch_takes_a_value_or_none(words: tuple[str, ...], wanted: bool) -> None:
    assert read(*words).monitor.report is wanted


def test_true_is_a_word_where_a_word_is_wanted() -> None:
    assert read("--train.sample", "true").train.sample == "true"
    assert read("--data.no-mask-documents", "--data", "a.txt", "b.txt").data.paths == ("a.txt", "b.txt")
    assert read("--launch.keep-memory", "false").launch.keep_memory is False
    with pytest.raises(ConfigError, match=r"--monitor\.report|maybe"):
        read("--monitor.report", "maybe")


def test_flags_win_over_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("layout = 'replicate=2'\n[train]\nsteps = 300\nbatch = 4\n[monitor]\nreport = false\n")
    config = read(str(recipe), "--train.steps", "250", "--model", "gpt2")
    assert (config.train.steps, config.train.batch, config.model.name) == (250, 4, "gpt2")
    assert config.layout == "replicate=2" and config.monitor.report is False
    assert read(str(recipe), "--monitor.report", "true").monitor.report is True


def test_a_config_is_a_recipe(tmp_path: Path) -> None:
    import tomli_w

    config = read("--train.steps", "250", "--model.overrides", "a", "1", "--data", "x.txt", "--optimizer.lr", "3e-4")
    recipe = tmp_path / "config.toml"
    recipe.write_text(tomli_w.dumps(config.to_dict()))
    assert read(str(recipe)) == config
