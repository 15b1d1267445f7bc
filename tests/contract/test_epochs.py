"""``train.epochs``: rows are read so often, known from the text's characters and answers; a run goes on with more."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from meshwright.cli.arguments import read_config
from meshwright.data.config import DataConfig
from meshwright.data.tokens import TokenStream
from meshwright.errors import ConfigError
from meshwright.jobs.epochs import with_counted_steps
from meshwright.jobs.kubernetes import is_finished
from meshwright.jobs.recipe import run_recipe
from meshwright.proof.job import scaled_config
from meshwright.train.config import OptimizerConfig, OuterConfig, ScheduleConfig, TrainConfig
from meshwright.train.run_config import RunConfig
from tests.chats import conversations, write_jsonl, write_tokenizer
from tests.runs import call, curve, events, rows, words, write_corpus

ROW, BATCH = 16, 8


def epoch_words(root: Path, run: str, epochs: str, *more: str) -> list[str]:
    """Returns the command of a tiny run over epochs; the default number of steps is as none."""
    return words(root, run, "--train.steps", "1000", "--train.epochs", epochs, "--checkpoint.every", "0", *more)


def run(root: Path, argv: list[str]) -> tuple[int, str]:
    """Runs a command; returns its exit status and what it printed."""
    return call(argv, root / "out.log")


def test_steps_are_counted_by_the_text_and_a_run_goes_on_with_more(tmp_path: Path) -> None:
    """A quarter, then the same command, then half of an epoch, which a pod of it takes for the end as well."""
    text = write_corpus(tmp_path / "corpus.txt", 120).read_text(encoding="utf-8")
    held_out = ("--data.split", "tail", "--data.validation-share", "0.25")
    status, said = run(tmp_path, epoch_words(tmp_path, "run", "0.25", *held_out))
    assert status == 0, said
    (manifest,) = tmp_path.glob("prepared/*/manifest.json")
    trained = json.loads(manifest.read_text())["splits"]["train"]["tokens"]
    assert 0.7 * len(text) < trained < 0.8 * len(text)  # of characters, with few tokens between documents
    a_pass = (trained - ROW) // ROW  # windows that fit behind any shift of their origin
    steps = -(-a_pass // (4 * BATCH))
    assert f"train.epochs = 0.25: {steps} steps of {BATCH} rows, {a_pass} rows an epoch" in said
    assert [line["step"] for line in rows(tmp_path / "run")] == list(range(1, steps + 1))
    epochs = [line["epoch"] for line in rows(tmp_path / "run")]
    assert epochs[-2] < 0.25 <= epochs[-1]
    # The command again has nothing to do, in steps as well; more epochs go on.
    for argv in (
        epoch_words(tmp_path, "run", "0.25", *held_out),
        words(tmp_path, "run", "--train.steps", str(steps), *held_out),
    ):
        status, said = run(tmp_path, argv)
        assert (status, f"{steps} steps are done, and train.steps = {steps} asks for no more" in said) == (0, True), (
            said
        )
    status, said = run(tmp_path, epoch_words(tmp_path, "run", "0.5", *held_out))
    assert status == 0, said
    more = -(-a_pass // (2 * BATCH))
    assert max(curve(tmp_path / "run")) == more
    config = read_config(RunConfig, epoch_words(tmp_path, "run", "0.5", *held_out)[1:], "train")
    said_lines: list[str] = []
    assert is_finished(config, said_lines.append)
    further = read_config(RunConfig, epoch_words(tmp_path, "run", "0.75", *held_out)[1:], "train")
    assert not is_finished(further, said_lines.append)


def test_every_answer_is_learned_once_an_epoch(tmp_path: Path) -> None:
    """Packed conversations: after two passes each answer's tokens were targets twice, under dp as well."""
    folder = Path(write_tokenizer(tmp_path / "tokenizer"))
    drawn = [chat for chat in conversations(60, seed=5) if len(chat) == 2]
    # Each begins with a token of its own, which merges with nothing before it; prepared text is in the normal form.
    chats = [[m | {"content": unicodedata.normalize("NFC", f"<{m['content']}")} for m in chat] for chat in drawn]
    data = write_jsonl(tmp_path / "chat.jsonl", [{"messages": chat} for chat in chats])
    argv = [
        *("train", "--model", "gpt2", "--model.layers", "1", "--model.width", "16", "--model.heads", "2"),
        *("--data", data, "--data.targets", "answers", "--data.tokenizer", str(folder), "--data.sequence", "200"),
        *("--data.cache", str(tmp_path / "prepared"), "--data.validation-share", "0", "--data.workers", "1"),
        *("--train.batch", "2", "--train.epochs", "2", "--train.sample-tokens", "0", "--train.no-prove"),
        *("--monitor.display", "none", "--monitor.no-tensorboard", "--monitor.no-report"),
        *("--layout", "replicate=2", "--devices", "2", "--run", str(tmp_path / "run")),
    ]
    status, said = run(tmp_path, argv)
    assert status == 0, said
    tokenizer = AutoTokenizer.from_pretrained(folder)
    learned = 0
    for chat in chats:
        prompt = tokenizer.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(chat, tokenize=False)
        learned += len(tokenizer(whole)["input_ids"]) - len(tokenizer(prompt)["input_ids"])
    match = re.search(r"rows: (\d+) of 200 tokens", said)
    assert match is not None
    lines = rows(tmp_path / "run")
    assert len(lines) == int(match.group(1))  # rows x 2 epochs / 2 rows a step
    assert lines[-1]["tokens_total"] == 2 * learned


def test_a_recipe_is_done_after_its_epochs(tmp_path: Path) -> None:
    """``run`` a second time leaves training out, and trains on for more epochs."""
    write_corpus(tmp_path / "corpus.txt", 60)
    said: list[str] = []

    def recipe(epochs: str) -> RunConfig:
        return read_config(RunConfig, epoch_words(tmp_path, "run", epochs)[1:], "train")

    (tmp_path / "recipe.toml").write_text("")
    for epochs in ("0.5", "1"):
        argv = ["run", str(tmp_path / "recipe.toml"), *epoch_words(tmp_path, "run", epochs)[1:], "--no-export"]
        status, text = run(tmp_path, argv)
        assert status == 0, text
        result = run_recipe(recipe(epochs), export_type=None, say=said.append)
        assert result.finished and all(stage.was_done for stage in result.stages)
    assert len(events(tmp_path / "run", "run_finished")) == 2


def test_shares_of_an_epoch_are_as_they_are_written() -> None:
    """0.07 of 100 rows are 7, and 7.000000000000001 as floats; three sites read three times the rows a step."""
    split = TokenStream(
        name="train", tokens=np.zeros(404, dtype=np.uint16), ends=np.array([404]), text_bytes=1, fingerprint="x"
    )
    text: Any = SimpleNamespace(train=split)
    for batch, sites, steps in ((1, 1, 7), (2, 1, 4), (1, 3, 3)):
        config = RunConfig(
            train=TrainConfig(epochs=0.07, batch=batch), data=DataConfig(sequence=4), outer=OuterConfig(sites=sites)
        )
        counted = with_counted_steps(config, text)
        assert (counted.train.steps, counted.train.epochs) == (steps, 0.0)


def test_a_proof_of_a_recipe_is_of_few_steps() -> None:
    scaled = scaled_config(RunConfig(train=TrainConfig(epochs=3.0), schedule=ScheduleConfig(warmup_share=0.1)), steps=4)
    scaled.check_all()
    assert (scaled.train.steps, scaled.train.epochs, scaled.schedule.warmup_steps(5) > 0) == (5, 0.0, True)


def test_what_epochs_cant_be_is_refused(tmp_path: Path) -> None:
    """Beside steps, below nothing, with rates that follow the noise; and a warm-up that outlasts the counted steps."""
    write_corpus(tmp_path / "corpus.txt", 60)
    for epochs in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=r"train\.epochs = .*give passes over the text, as 3 or 0\.5"):
            TrainConfig(epochs=epochs).check()
    with pytest.raises(ConfigError, match=r"train\.steps = 7 has no effect unless train\.epochs is 0"):
        RunConfig(train=TrainConfig(steps=7, epochs=1.0)).check_all()
    with pytest.raises(ConfigError, match=r"schedule\.warmup_share = 0\.1 both say how long"):
        RunConfig(schedule=ScheduleConfig(warmup=3, warmup_share=0.1)).check_all()
    with pytest.raises(ConfigError, match=r"leaves none of train\.steps = 2"):
        RunConfig(train=TrainConfig(steps=2), schedule=ScheduleConfig(warmup_share=0.9)).check_all()
    noise = OptimizerConfig(lr_batch=4, lr_rule="adascale")
    with pytest.raises(ConfigError, match=r"not by the rows that they read; give train\.steps"):
        RunConfig(train=TrainConfig(epochs=1.0, noise_scale=3), optimizer=noise).check_all()
    status, said = run(tmp_path, epoch_words(tmp_path, "run", "0.1", "--schedule.warmup", "900"))
    assert status == 2 and "schedule.warmup = 900 leaves none of train.steps = " in said
    assert not (tmp_path / "run").exists()
