"""Conversations as documents: what is written, which tokens are answers, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from meshwright.data import stages
from meshwright.data.config import DataConfig
from meshwright.data.prepare import prepare, prepared_path
from meshwright.data.tokens import TokenSet, TokenStream, compression_baselines
from meshwright.errors import ConfigError, DataError
from tests.chats import MARKED, PLAIN, THINKING, conversations, write_jsonl, write_tokenizer

ASK = {"role": "user", "content": "two plus two?"}
ANSWER = {"role": "assistant", "content": "four"}


def made(folder: Path, records: list[dict[str, Any]], template: str = PLAIN, **fields: Any) -> TokenSet:
    path = write_jsonl(folder / "chat.jsonl", records)
    settings = {"tokenizer": write_tokenizer(folder / "tokenizer", template), "targets": "answers"} | fields
    return prepare(DataConfig(paths=(path,), **settings), folder / "set", workers=1)


def documents(split: TokenStream) -> list[tuple[list[int], list[int]]]:
    """Each document's tokens, and a 1 for each that is learned."""
    learned = np.zeros(len(split.tokens), dtype=int)
    for start, stop in split.answers if split.answers is not None else ():
        learned[start:stop] = 1
    starts = [0, *split.ends.tolist()]
    return [(split.tokens[a:b].tolist(), learned[a:b].tolist()) for a, b in itertools.pairwise(starts)]


def learned_texts(token_set: TokenSet) -> list[list[str]]:
    """Of each document of the training split the runs of learned tokens, as text."""
    tokenizer, found = token_set.tokenizer(), []
    for tokens, marks in documents(token_set.train):
        edges = np.flatnonzero(np.diff([0, *marks, 0])).reshape(-1, 2)
        found.append([tokenizer.decode(tokens[start:stop], skip_special_tokens=False) for start, stop in edges])
    return found


def test_tokens_and_answers_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    chats = conversations(60)
    token_set = made(tmp_path, [{"messages": chat} for chat in chats], MARKED, normalise="none")
    peer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    expected = {}
    for chat in chats:
        answer = peer.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
        expected[tuple(answer["input_ids"])] = answer["assistant_masks"]
    found = [document for split in (token_set.train, token_set.validation) for document in documents(split)]
    assert {tuple(tokens): marks for tokens, marks in found} == expected
    assert any(0 in marks and 1 in marks for marks in expected.values())


def test_answers_of_a_template_without_marks_begin_behind_its_prompt_and_end_with_its_turn(tmp_path: Path) -> None:
    token_set = made(
        tmp_path, [{"messages": [ASK, ANSWER, ASK, ANSWER | {"content": "4 \U0001f600"}]}], validation_share=0
    )
    assert learned_texts(token_set) == [["four<|im_end|>\n", "4 \U0001f600<|im_end|>\n"]]
    assert token_set.train.answer_bytes == len(b"four<|im_end|>\n") + len("4 \U0001f600<|im_end|>\n".encode())
    # The template wrote the end token itself: none follows.
    assert token_set.train.tokens[-2] == token_set.eos_id != token_set.train.tokens[-1]


def test_a_prompt_and_its_completion(tmp_path: Path) -> None:
    records = [
        {"prompt": "two plus two is", "completion": " four"},
        {"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER]},
    ]
    token_set = made(tmp_path, records, PLAIN, validation_share=0)
    # The end token behind a completion is learned; of messages only those of the completion are.
    assert learned_texts(token_set) == [[" four<|im_end|>"], ["four<|im_end|>\n"]]
    assert token_set.train.tokens[token_set.train.ends[0] - 1] == token_set.eos_id
    marked = made_in(tmp_path / "marked", records, MARKED)
    assert learned_texts(marked) == [[" four<|im_end|>"], ["four<|im_end|>"]]


def made_in(folder: Path, records: list[dict[str, Any]], template: str) -> TokenSet:
    folder.mkdir()
    return made(folder, records, template, validation_share=0)


def test_records_of_sharegpt_and_parts_of_text_and_fields_of_none(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"conversations": [{"from": "human", "value": "two plus two?"}, {"from": "gpt", "value": "four"}]},
        {"messages": [ASK | {"tool_calls": None, "name": None}, ANSWER | {"content": "4"}], "text": "not this"},
    ]
    assert learned_texts(made(tmp_path, records, validation_share=0)) == [["four<|im_end|>\n"], ["4<|im_end|>\n"]]
    parts = "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{{ '|' }}{% endfor %}"
    folder = tmp_path / "parts"
    folder.mkdir()
    chat = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in (ASK, ANSWER)]
    assert learned_texts(made(folder, [{"messages": chat}], parts, validation_share=0)) == [["four|<|im_end|>"]]


def test_parquet_holds_conversations_too(tmp_path: Path) -> None:
    chats = [[ASK, ANSWER], [{"role": "system", "content": "be short"}, ASK, ANSWER | {"content": "4"}]]
    pq.write_table(pa.table({"id": [1, 2], "messages": chats}), tmp_path / "chat.parquet")
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    config = DataConfig(
        paths=(str(tmp_path / "chat.parquet"),), tokenizer=tokenizer, targets="answers", validation_share=0
    )
    assert learned_texts(prepare(config, tmp_path / "set")) == [["four<|im_end|>\n"], ["4<|im_end|>\n"]]


def test_every_token_of_a_conversation_is_a_target_unless_answers_alone_are_asked_for(tmp_path: Path) -> None:
    token_set = made(tmp_path, [{"messages": [ASK, ANSWER]}], targets="all", validation_share=0)
    assert token_set.train.answers is None and token_set.train.targets() == len(token_set.train.tokens) - 1
    text = token_set.tokenizer().decode(token_set.train.tokens.tolist(), skip_special_tokens=False)
    assert text == "<|im_start|>user\ntwo plus two?<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
    assert not (token_set.path / "train.answers").exists()


@pytest.mark.parametrize("tokenizer", ["bpe", "chars"])
def test_a_tokenizer_made_of_the_text_takes_a_given_template_and_learns_to_end(tmp_path: Path, tokenizer: str) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\\n' }}{% endfor %}")
    fields = {"vocab_size": 300} if tokenizer == "bpe" else {}
    records = [{"messages": [ASK, ANSWER | {"content": "na\u00efve"}]}, {"messages": [ASK, ANSWER]}]
    token_set = made(tmp_path, records, tokenizer=tokenizer, chat_template=str(template), validation_share=0, **fields)
    # Without a prompt for answers in the template, what it writes before one is learned as well.
    assert learned_texts(token_set) == [["a:na\u00efve\n<|endoftext|>"], ["a:four\n<|endoftext|>"]]
    assert (token_set.path / "chat_template.jinja").read_text() == template.read_text()


def test_a_template_of_the_user_takes_the_place_of_the_tokenizer_s(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(MARKED)
    records = [{"messages": [ASK, ANSWER]}]
    token_set = made(tmp_path, records, THINKING, chat_template=str(template), validation_share=0)
    assert learned_texts(token_set) == [["four<|im_end|>"]]
    config = DataConfig(
        paths=(str(tmp_path / "chat.jsonl"),), tokenizer=str(tmp_path / "tokenizer"), chat_template=str(template)
    )
    before = prepared_path(config, tmp_path)
    template.write_text(PLAIN)
    assert prepared_path(config, tmp_path) != before


@pytest.mark.parametrize(
    ("records", "template", "reason"),
    [
        ([{"messages": [ASK, ANSWER]}], "", "line 1: it holds messages, and the tokenizer has no chat template"),
        ([{"messages": [ASK, ANSWER]}] * 2 + [{"text": "plain"}], PLAIN, "line 3 has text, and data.targets"),
        (
            [{"messages": [ASK, ANSWER, ASK, ANSWER]}],
            THINKING,
            "where answer 2 is isn't known; give data.chat_template",
        ),
        ([{"messages": [ASK, "four"]}], PLAIN, "line 1: a message is a str"),
        (
            [{"messages": [{"content": "four"}]}],
            PLAIN,
            "a message has the fields content, and role and content are due",
        ),
        ([{"messages": [ASK | {"content": [{"type": "image"}]}]}], PLAIN, "role user holds something else than text"),
        ([{"messages": [ASK], "tools": "f(x)"}], PLAIN, "its tools are a str, and a list of JSON schemas is due"),
        ([{"messages": [ASK]}], "{{ raise_exception('roles must alternate') }}", "refuses it: roles must alternate"),
        ([{"messages": [ASK]}], "{% for m in messages", "line 1: the chat template refuses it"),
        ([{"messages": [ASK]}], "{{ ().__class__.__bases__ }}", "line 1: the chat template refuses it"),
        ([{"messages": [ANSWER | {"content": "\ud83d"}]}], PLAIN, "half a surrogate pair"),
        ([{"prompt": "two", "answer": "four"}], PLAIN, "has no text in field 'text'; fields with text: answer, prompt"),
    ],
)
def test_refusals_name_the_line(tmp_path: Path, records: list[Any], template: str, reason: str) -> None:
    with pytest.raises(DataError) as refusal:
        made(tmp_path, records, template, dedup=False)
    assert reason in str(refusal.value) and "chat.jsonl line" in str(refusal.value)


def test_refusals_before_a_file_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.chat_template = 'no\.jinja' can't be read"):
        made(tmp_path, [{"messages": [ASK, ANSWER]}], chat_template="no.jinja")
    with pytest.raises(ConfigError, match=r"data\.filters\.mask_personal changes texts"):
        config = DataConfig.from_dict({"targets": "answers", "filters": {"mask_personal": True}})
        config.check()
    with pytest.raises(ConfigError, match=r"data\.packing = 'whole' keeps them apart"):
        DataConfig(targets="answers", mask_documents=False).check()
    DataConfig(targets="answers", mask_documents=False, packing="stream").check()
    (tmp_path / "a.txt").write_text("plain")
    with pytest.raises(DataError, match=r"a\.txt is plain text, and data\.targets = 'answers' needs messages"):
        prepare(DataConfig(paths=(str(tmp_path / "a.txt"),), targets="answers"), tmp_path / "set")


def test_bytes_are_the_same_in_any_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "UNIT_BYTES", (2000, 4000))
    monkeypatch.setattr(stages, "GROUP_BYTES", 3000)
    for part in range(4):
        chats = conversations(40, seed=part)
        write_jsonl(tmp_path / f"{part}.jsonl", [{"messages": chat} for chat in chats])
    tokenizer = write_tokenizer(tmp_path / "tokenizer", MARKED)
    config = DataConfig(paths=(str(tmp_path / "*.jsonl"),), tokenizer=tokenizer, targets="answers")
    one, two = (prepare(config, tmp_path / f"set{count}", workers=count) for count in (1, 2))
    assert one.fingerprint == two.fingerprint
    assert one.train.targets() == sum(sum(marks) for _, marks in documents(two.train)) > 1000


def test_bits_per_byte_are_of_answers_and_no_compressor_is_asked(tmp_path: Path) -> None:
    # An answer that begins with white space may share its first token with what is before it.
    chats = [[m | {"content": f"<{m['content']}"} for m in chat] for chat in conversations(30)]
    token_set = made(tmp_path, [{"messages": chat} for chat in chats], MARKED)
    split = token_set.validation
    texts = [[token for token, mark in zip(*document) if mark] for document in documents(split)]
    tokenizer: Tokenizer = token_set.tokenizer()
    answer_bytes = sum(len(tokenizer.decode(tokens, skip_special_tokens=False).encode()) for tokens in texts)
    assert split.answer_bytes == answer_bytes
    assert split.bits_per_byte(np.log(2)) == pytest.approx(sum(map(len, texts)) / answer_bytes)
    assert token_set.held_out_text(1 << 20) and compression_baselines(token_set) == {}


def test_settings_that_came_later_leave_the_names_of_earlier_sets(tmp_path: Path) -> None:
    settings = DataConfig().prepared_settings()
    assert "targets" not in settings and "chat_template" not in settings and "packing" not in settings
    assert json.loads(json.dumps(DataConfig(targets="answers").prepared_settings()))["targets"] == "answers"
