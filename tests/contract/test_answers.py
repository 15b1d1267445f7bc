"""Training on answers alone, in packed rows: the losses of a plain loop of transformers, one conversation at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshwright
from meshwright.cli.main import main
from meshwright.data.config import DataConfig
from meshwright.data.loader import Loader
from meshwright.data.tokenizer import load_tokenizer
from meshwright.data.tokens import TokenSet
from meshwright.errors import ConfigError
from meshwright.jobs import trained_model
from meshwright.jobs.trained_model import TrainedModel
from meshwright.jobs.verify_job import tokens_with_targets
from tests.chats import MARKED, conversations, write_jsonl, write_tokenizer
from tests.runs import call, curve, events, rows, words, write_corpus
from tests.tiers import further

torch.set_num_threads(1)
LAYOUTS = (
    "replicate=1",
    "shard=2,zero=3,microbatches=2",
    "replicate=2",
    "tp=2",
    "pp=2,microbatches=4",
    "cp=2",
    "shard=2,zero=1",
)
SEQUENCE, BATCH, STEPS, RATE = 96, 8, 5, 1e-2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a small llama with a tokenizer, and its conversations."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, MARKED)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=330, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    # No answer begins with white space, which would share a token with what is before it.
    chats = [[m | {"content": f"<{m['content']}"} for m in chat] for chat in conversations(120, seed=3)]
    write_jsonl(folder / "chat.jsonl", [{"messages": chat} for chat in chats])
    return folder


def train(model: Path, run: Path, layout: str, *more: str) -> Path:
    """Trains under a layout; returns the run's directory."""
    devices = "1" if layout == "replicate=1" else "2"
    status, text = call(
        [
            *("train", "--model", str(model), "--data", str(model / "chat.jsonl"), "--data.targets", "answers"),
            *("--data.sequence", str(SEQUENCE), "--data.cache", str(model / "prepared"), "--data.workers", "1"),
            *(
                "--data.validation-share",
                "0.2",
                "--data.normalise",
                "none",
                "--train.batch",
                str(BATCH),
                "--train.steps",
                str(STEPS),
            ),
            *("--optimizer.lr", str(RATE), "--optimizer.weight-decay", "0", "--schedule.warmup", "0"),
            *(
                "--schedule.shape",
                "constant",
                "--optimizer.clip",
                "0",
                "--train.sample-tokens",
                "0",
                "--train.no-prove",
            ),
            *("--evaluation.every", "0", "--checkpoint.every", "2", "--monitor.display", "none"),
            *("--monitor.no-tensorboard", "--monitor.no-report", "--layout", layout, "--devices", devices),
            *("--run", str(run), *more),
        ],
        run.with_suffix(".txt"),
    )
    assert status == 0, text
    return run


def plainly(model: Path) -> tuple[list[float], float]:
    """Trains by transformers alone, which writes the conversations and says what the assistant said.

    Returns:
        The losses by step, and that of the held-out conversations after them. Which conversations are in a step is
        read off the loader's rows; nothing else of this package is used.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer, network = AutoTokenizer.from_pretrained(model), LlamaForCausalLM.from_pretrained(model)
    written = []
    for line in (model / "chat.jsonl").read_text(encoding="utf-8").splitlines():
        chat = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_assistant_tokens_mask=True, return_dict=True
        )
        written.append((chat["input_ids"][: SEQUENCE + 1], chat["assistant_masks"][: SEQUENCE + 1]))
    token_set = TokenSet.open(next(path for path in (model / "prepared").glob("given-*") if path.is_dir()))

    def named(ids: list[int]) -> tuple[list[int], list[int]]:
        """The conversation that a piece of a row begins with; of two that begin alike any has the same tokens."""
        return next((whole, mask) for whole, mask in written if ids[: len(whole) - 1] == whole[:-1])

    def mean_loss(step: Any) -> torch.Tensor:
        total, count = torch.zeros(()), 0
        for tokens, positions in zip(step.tokens, step.positions):
            begins = np.flatnonzero(positions == 0).tolist()
            for begin, end in zip(begins, [*begins[1:], len(tokens)]):
                ids, mask = named(tokens[begin:end].tolist())
                logits = network(torch.tensor([ids])).logits[0, :-1]
                learned = torch.tensor(mask[1:], dtype=torch.bool)
                targets = torch.tensor(ids[1:])[learned]
                total = total + torch.nn.functional.cross_entropy(logits[learned], targets, reduction="sum")
                count += int(learned.sum())
        return total / count

    loader = Loader(token_set.train, rows=BATCH, sequence=SEQUENCE, seed=0, packing="whole")
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        loss = mean_loss(loader.batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    held_out = Loader(token_set.validation, rows=1, sequence=SEQUENCE, seed=0, packing="whole")
    with torch.no_grad():
        rows_ = [held_out.batch(step) for step in range(held_out.epoch_rows)]
        sums = [(mean_loss(row).item() * row.targets_count, row.targets_count) for row in rows_]
    return losses, sum(total for total, _ in sums) / sum(count for _, count in sums)


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], float]:
    train(model, tmp_path_factory.mktemp("one") / "run", "replicate=1")  # which prepares the text
    return plainly(model)


@pytest.mark.parametrize("layout", further(LAYOUTS, range(2)))
def test_losses_are_those_of_transformers(
    model: Path, expected: tuple[list[float], float], tmp_path: Path, layout: str
) -> None:
    run = train(model, tmp_path / "run", layout)
    losses, held_out = expected
    assert [loss for loss, _ in curve(run).values()] == pytest.approx(losses, rel=2e-5)
    assert losses[-1] < losses[0]
    (evaluated,) = [event for event in rows(run, "events.jsonl") if event["kind"] == "evaluated"]
    assert evaluated["loss"] == pytest.approx(held_out, rel=2e-5)
    # All that goes through the model counts as speed, and answers alone as tokens of the loss.
    for row in rows(run):
        assert row["tokens_per_s"] == pytest.approx(BATCH * SEQUENCE / row["step_s"])
        assert row["tokens"] < 0.7 * BATCH * SEQUENCE


@pytest.mark.parametrize("packing", further(["whole", "stream", "single"]))
def test_a_job_of_answers_equals_a_plain_loop(
    model: Path, tmp_path: Path, packing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""
        [model]
        name = "{model}"
        [data]
        paths = ["{model / "chat.jsonl"}"]
        targets = "answers"
        packing = "{packing}"
        sequence = {SEQUENCE}
        validation_share = 0.2
        workers = 1
        cache = "{model / "prepared"}"
        [train]
        batch = {BATCH}
        steps = 300
        """,
        encoding="utf-8",
    )
    status = main(["verify", str(recipe), "--json", "--layout", "shard=2,zero=3"])
    report = json.loads(capsys.readouterr().out)
    assert status == 0, report
    for job in report["jobs"]:
        assert max(job["errors"].values()) < 1e-10


@pytest.fixture(scope="module", params=["mamba", "bloom"])
def unseparated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a model that can't keep documents of a row apart, with ten conversations."""
    from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    write_tokenizer(folder, MARKED)
    torch.manual_seed(0)
    network: Any
    if request.param == "mamba":
        network = MambaForCausalLM(MambaConfig(vocab_size=330, hidden_size=32, num_hidden_layers=2, state_size=8))
    else:
        network = BloomForCausalLM(BloomConfig(vocab_size=330, hidden_size=32, n_layer=2, n_head=4))
    network.save_pretrained(folder)
    chats = [[m | {"content": f"<{m['content']}"} for m in chat] for chat in conversations(BATCH, seed=7)]
    write_jsonl(folder / "chat.jsonl", [{"messages": chat} for chat in chats])
    return folder


def test_models_that_cant_keep_documents_apart_learn_one_a_row(unseparated: Path, tmp_path: Path) -> None:
    """Every step has every conversation once; the losses are those of transformers, one conversation at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = train(
        unseparated, tmp_path / "run", "shard=2,zero=3,microbatches=2", "--data.packing", "single",
        "--data.validation-share", "0",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(unseparated)
    network = AutoModelForCausalLM.from_pretrained(unseparated)
    network.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        total, count = torch.zeros(()), 0
        for line in (unseparated / "chat.jsonl").read_text(encoding="utf-8").splitlines():
            chat = tokenizer.apply_chat_template(
                json.loads(line)["messages"], return_assistant_tokens_mask=True, return_dict=True
            )
            ids, mask = torch.tensor(chat["input_ids"][: SEQUENCE + 1]), chat["assistant_masks"][: SEQUENCE + 1]
            learned = torch.tensor(mask[1:], dtype=torch.bool)
            logits = network(ids[None, :-1]).logits[0]
            total = total + torch.nn.functional.cross_entropy(logits[learned], ids[1:][learned], reduction="sum")
            count += int(learned.sum())
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append((total / count).item())
    assert [loss for loss, _ in curve(run).values()] == pytest.approx(losses, rel=2e-5)


def test_an_answer_ends_where_the_template_ends_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = []

    def draw(*arguments: Any, stop: Any, **settings: Any) -> list[int]:
        stops.append(set(stop))
        return [tokenizer.token_to_id("f")]

    tokenizer = load_tokenizer(model / "tokenizer.json")
    end, other = (tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>"))
    monkeypatch.setattr(trained_model, "generate_tokens", draw)
    # A model's directory may name several end tokens, and none of them may be its template's.
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [other, 7]}))
    assert meshwright.generate(model, "seven", chat=True).text == "f"
    meshwright.generate(model, "seven")
    assert stops == [{end, other, 7}, {other, 7}]
    # A template whose ends are plain text ends an answer there too.
    (model / "chat_template.jinja").rename(model / "kept.jinja")
    written = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' f##\n' }}{% endfor %}"
    (model / "chat_template.jinja").write_text(written + "{% if add_generation_prompt %}assistant: {% endif %}")
    monkeypatch.setattr(trained_model, "generate_tokens", lambda *_, **__: tokenizer.encode("o f## user: o").ids)
    try:
        assert meshwright.generate(model, "seven", chat=True).text == "o "
    finally:
        (model / "kept.jinja").rename(model / "chat_template.jinja")


def test_a_run_that_goes_on_reads_the_rows_that_come_next(model: Path, expected: object, tmp_path: Path) -> None:
    straight = train(model, tmp_path / "straight", "shard=2,zero=3")
    stopped = train(model, tmp_path / "stopped", "shard=2,zero=3", "--train.steps", "2")
    train(model, tmp_path / "stopped", "replicate=1")
    losses = [[loss for loss, _ in curve(run).values()] for run in (straight, stopped)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-5) and len(losses[0]) == STEPS


@pytest.mark.parametrize("share", ["0.2", "0"])
def test_a_sample_answers_the_first_question(model: Path, tmp_path: Path, share: str) -> None:
    """Of what is held out, else of what is trained on; the prompt ends with what an answer begins with."""
    run = train(
        model, tmp_path / "run", "replicate=1", "--train.sample-tokens", "3", "--train.steps", "2",
        "--data.validation-share", share,
    )  # fmt: skip
    (sampled,) = events(run, "sampled")
    lines = (model / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    written = []
    for line in lines:
        messages = json.loads(line)["messages"]
        first = next(number for number, message in enumerate(messages) if message["role"] == "assistant")
        before = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages[:first])
        written.append(f"{before}<|im_start|>assistant\n")
    assert sampled["prompt"] in written and isinstance(sampled["text"], str)


def test_rows_of_a_proof_are_long_enough_to_hold_an_answer(model: Path, tmp_path: Path) -> None:
    """A question of 60 words, of which rows of a few tokens would hold nothing that is learned."""
    asked = [{"role": "user", "content": " ".join(["seven"] * 60)}, {"role": "assistant", "content": "<cat"}]
    paths = (write_jsonl(tmp_path / "long.jsonl", [{"messages": asked}]),)
    data = DataConfig(
        paths=paths, tokenizer=str(model), targets="answers", validation_share=0.0, sequence=512, workers=1,
        cache=str(tmp_path / "prepared"),
    )  # fmt: skip
    token_set = meshwright.prepare(data, say=None)
    first = int(token_set.train.answers[0, 0])  # type: ignore[index]
    tokens = tokens_with_targets(token_set, data, 4)
    assert 60 < first <= tokens < 2 * first and tokens_with_targets(token_set, data, 400) == 400


def test_a_sample_goes_on_from_the_training_text_where_nothing_is_held_out(tmp_path: Path) -> None:
    text = write_corpus(tmp_path / "corpus.txt").read_text(encoding="utf-8")
    more = ("--data.validation-share", "0", "--train.sample-tokens", "3", "--train.steps", "3")
    status, said = call(words(tmp_path, "run", *more), tmp_path / "out.txt")
    (sampled,) = events(tmp_path / "run", "sampled")
    assert status == 0 and sampled["prompt"] == text[:64] and sampled["text"], said


def test_a_trained_run_answers_as_its_template_asks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    run = train(model, tmp_path / "run", "replicate=1")
    asked = []
    plain = TrainedModel.complete

    def complete(self: TrainedModel, prompt: str, **settings: Any) -> str:
        asked.append(self.tokenizer.encode(prompt, add_special_tokens=settings["add_special_tokens"]).ids)
        return plain(self, prompt, **settings)

    monkeypatch.setattr(TrainedModel, "complete", complete)
    result = meshwright.generate(run, "seven plus?", chat=True, max_tokens=4)
    assert result.prompt == "seven plus?" and result.text and "seven" not in result.to_json()["text"][:5]
    said = [{"role": "user", "content": "seven plus?"}]
    written = AutoTokenizer.from_pretrained(model).apply_chat_template(said, add_generation_prompt=True)
    assert asked == [written["input_ids"]]
    for folder in (run / "tokenizer", model):
        assert (folder / "chat_template.jinja").read_text() == MARKED
    (run / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template; leave it out, and prompt with text"):
        meshwright.generate(run, "seven plus?", chat=True)
