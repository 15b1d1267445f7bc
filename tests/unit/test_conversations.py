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
        (
            [{"messages": [ASK, ANSWER], "tools": [{"name": "f"}]}],
            PLAIN,
            "it has tools, which the chat template doesn't write",
        ),
        (
            [{"messages": [ASK, ANSWER | {"weight": 0.5}]}],
            PLAIN,
            "a message of role assistant has weight = 0.5, and an answer is learned (1, true) or isn't",
        ),
        (
            [{"messages": [ASK | {"train": True}, ANSWER]}],
            PLAIN,
            "a message of role user has train = True, and only the assistant's are learned",
        ),
        (
            [{"messages": [{"role": "system", "content": "a"}, ASK, ANSWER], "system": "b"}],
            PLAIN,
            "it has a system prompt in its field system and another one as first message",
        ),
        ([{"messages": [ASK], "chat_template_kwargs": [1]}], PLAIN, "its chat_template_kwargs are a list, and an"),
        ([{"messages": [ANSWER]}], "{{ messages[0].content }}" + PLAIN, "it begins with an answer, and the chat"),
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
    (tmp_path / "eos.jinja").write_text("{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}")
    with pytest.raises(ConfigError, match="writes eos_token, and a tokenizer that is trained on the text has no text"):
        made(tmp_path, [{"messages": [ASK, ANSWER]}], tokenizer="bpe", chat_template=str(tmp_path / "eos.jinja"))
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


def test_a_message_that_says_so_is_not_learned(tmp_path: Path) -> None:
    # The field of OpenAI's fine-tuning format, and axolotl's.
    fields: list[dict[str, Any]] = [{"weight": 0}, {"train": False}, {"training": False}]
    for number, (field, template) in enumerate(itertools.product(fields, (PLAIN, MARKED))):
        record = {"messages": [ASK, ANSWER | field, ASK, ANSWER | {"content": "4"} | dict.fromkeys(field, 1)]}
        (learned,) = learned_texts(made_in(tmp_path / str(number), [record], template))
        assert [text.strip() for text in learned] == ["4<|im_end|>"]
    # An earlier answer that the template rewrites doesn't matter where it isn't learned.
    thinking = made_in(tmp_path / "t", [{"messages": [ASK, ANSWER | {"weight": 0}, ASK, ANSWER]}], THINKING)
    assert learned_texts(thinking) == [["<|im_start|>assistant\n<think></think>four<|im_end|>\n"]]


def test_what_learns_every_token_needs_no_places_of_answers(tmp_path: Path) -> None:
    token_set = made(tmp_path, [{"messages": [ASK, ANSWER, ASK, ANSWER]}], THINKING, targets="all", validation_share=0)
    assert token_set.tokenizer().decode(token_set.train.tokens.tolist()).count("four") == 2
    with pytest.raises(DataError, match=r"weight = 0, and data\.targets = 'all' learns every token"):
        made(tmp_path / "tokenizer", [{"messages": [ASK, ANSWER | {"weight": 0}]}], targets="all")


@pytest.mark.parametrize(
    ("completion", "learned"),
    [("four<|im_end|>", "four<|im_end|>"), ("four", "four<|im_end|>"), ("", "<|im_end|>"), (" ", " <|im_end|>")],
)
def test_a_completion_ends_once(tmp_path: Path, completion: str, learned: str) -> None:
    records = [{"prompt": "two plus two is", "completion": completion}, {"prompt": "x", "completion": "y"}]
    token_set = made(tmp_path, records, "", validation_share=0)
    assert learned_texts(token_set) == [[learned], ["y<|im_end|>"]]


def test_equal_texts_with_other_answers_are_other_documents_of_the_same_split(tmp_path: Path) -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    pairs = [(" ".join(words[:cut]), " " + " ".join(words[cut:])) for cut in range(1, 7)]
    records = [{"prompt": prompt, "completion": completion} for prompt, completion in [*pairs, *pairs]]
    token_set = made(tmp_path, records, validation_share=0)
    assert sorted(learned_texts(token_set)) == sorted([f"{completion}<|im_end|>"] for _, completion in pairs)
    others = [{"prompt": f"{number} is", "completion": " odd"} for number in range(9)]
    (tmp_path / "both").mkdir()
    both = made(tmp_path / "both", [*records, *others], validation_share=0.3)
    texts = [
        {both.tokenizer().decode(tokens) for tokens, _ in documents(split)} for split in (both.train, both.validation)
    ]
    assert not texts[0] & texts[1] and sum("seven" in text for text in texts[0] | texts[1]) == 1


def test_a_conversation_is_never_cut_in_two_for_validation(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has one conversation, and .* data.validation_share = 0"):
        made(tmp_path, [{"messages": [ASK, ANSWER]}])
    with pytest.raises(ConfigError, match=r"data\.split = 'tail' cuts one document"):
        DataConfig(targets="answers", split="tail").check()


@pytest.mark.parametrize("more", ["", "{% for m in messages %}{% endfor %}"])
def test_content_of_parts_is_written_as_text_where_the_template_takes_text(tmp_path: Path, more: str) -> None:
    # The first template prints whatever the content is, as Python prints a list; the second can't add it to a text.
    printing = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|im_end|>{% endfor %}"
    parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in (ASK, ANSWER)]
    token_set = made(tmp_path, [{"messages": parts}], more + PLAIN if more else printing, validation_share=0)
    text = token_set.tokenizer().decode(token_set.train.tokens.tolist(), skip_special_tokens=False)
    assert "type" not in text and "two plus two?" in text and "four" in text
    parts[0]["content"] *= 2
    with pytest.raises(DataError, match="line 1"):
        made(tmp_path / "tokenizer", [{"messages": parts}], printing)


def test_text_is_given_as_parts_where_the_template_takes_parts(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}|{% endfor %}"
    assert learned_texts(made(tmp_path, [{"messages": [ASK, ANSWER]}], template, validation_share=0)) == [
        ["four|<|im_end|>"]
    ]
    with pytest.raises(DataError, match="line 1: the chat template writes none of its texts"):
        made(tmp_path / "tokenizer", [{"messages": [ASK, ANSWER]}], "nothing")


def test_fields_beside_the_messages(tmp_path: Path) -> None:
    template = "{% if tools %}T{{ tools[0].name }} {% endif %}{% if thinking %}THINK {% endif %}" + PLAIN
    turns = [{"from": "human", "value": "two plus two?"}, {"from": "chatgpt", "value": "four"}]
    record = {"conversations": turns, "system": "be short", "tools": '[{"name": "f"}]'}
    token_set = made(tmp_path, [record | {"chat_template_kwargs": {"thinking": 1}}], template, validation_share=0)
    text = token_set.tokenizer().decode(token_set.train.tokens.tolist(), skip_special_tokens=False)
    assert text.startswith("Tf THINK <|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\n")
    assert learned_texts(token_set) == [["four<|im_end|>\n"]]


def test_a_parquet_file_s_missing_fields_are_no_null(tmp_path: Path) -> None:
    calls = [{"tool_calls": [{"name": "f", "arguments": {name: "1"}}]} for name in "ab"]
    chats = [[ASK, {"role": "assistant", **call}] for call in calls]
    pq.write_table(pa.table({"messages": chats}), tmp_path / "chat.parquet")
    template = "{% for m in messages %}{{ m['content'] }}{% if m.tool_calls %}{{ m.tool_calls|tojson }}{% endif %};"
    tokenizer = write_tokenizer(tmp_path / "tokenizer", template + "{% endfor %}")
    config = DataConfig(
        paths=(str(tmp_path / "chat.parquet"),), tokenizer=tokenizer, targets="answers", validation_share=0
    )
    assert [json.loads(text.partition(";")[0]) for (text,) in learned_texts(prepare(config, tmp_path / "set"))] == [
        call["tool_calls"] for call in calls
    ]


def edited(folder: Path, **settings: Any) -> Path:
    """Writes a tokenizer with other settings; those of None are left out."""
    path = Path(write_tokenizer(folder / "tokenizer")) / "tokenizer_config.json"
    fields = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return path.parent


def test_the_end_token_follows_where_the_template_only_began_with_it(tmp_path: Path) -> None:
    folder = edited(tmp_path, bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + PLAIN)
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": [ASK, ANSWER]}])
    for targets in ("all", "answers"):
        config = DataConfig(paths=(path,), tokenizer=str(folder), targets=targets, validation_share=0)
        tokens = prepare(config, tmp_path / targets).train.tokens.tolist()
        assert tokens[0] == tokens[-1] == 0 and tokens.count(0) == 2


def test_special_tokens_and_templates_of_older_and_newer_tokenizers_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tool = [{"type": "function", "function": {"name": "f"}}]
    marked = "{{ bos_token }}" + MARKED.replace("<|im_end|>", "{eos}").replace("'{eos}'", "eos_token")
    # Names of special tokens in a file of their own, templates as a list in the settings, or in a folder.
    folder = edited(tmp_path, eos_token=None, chat_template=None)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"})
    )
    (folder / "chat_template.jinja").write_text(marked)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools|tojson }}" + marked)
    listed = edited(
        tmp_path / "listed",
        bos_token="<|endoftext|>",
        chat_template=[
            {"name": "default", "template": marked},
            {"name": "tool_use", "template": "{{ tools|tojson }}" + marked},
        ],
    )
    (listed / "chat_template.jinja").unlink()
    for number, tokenizer in enumerate((folder, listed)):
        records: list[dict[str, Any]] = [{"messages": [ASK, ANSWER], "tools": tool}, {"messages": [ASK, ANSWER]}]
        path = write_jsonl(tmp_path / "chat.jsonl", records)
        config = DataConfig(paths=(path,), tokenizer=str(tokenizer), targets="answers", validation_share=0)
        token_set = prepare(config, tmp_path / f"set{number}")
        peer = AutoTokenizer.from_pretrained(tokenizer)
        expected = [
            peer.apply_chat_template(
                record["messages"], tools=record.get("tools"), return_assistant_tokens_mask=True, return_dict=True
            )
            for record in records
        ]
        assert documents(token_set.train) == [(found["input_ids"], found["assistant_masks"]) for found in expected]
        assert token_set.eos_id == peer.eos_token_id


def test_a_prompt_of_text_begins_as_the_tokenizer_begins_every_text(tmp_path: Path) -> None:
    from tokenizers import processors
    from transformers import AutoTokenizer

    folder = Path(write_tokenizer(tmp_path / "tokenizer"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    records = [{"prompt": "two plus two is", "completion": " four"}, {"prompt": "", "completion": "x"}]
    config = DataConfig(
        paths=(write_jsonl(tmp_path / "chat.jsonl", [*records, {"messages": [ASK, ANSWER]}]),),
        tokenizer=str(folder), targets="answers", validation_share=0,
    )  # fmt: skip
    peer, found = AutoTokenizer.from_pretrained(folder), documents(prepare(config, tmp_path / "set").train)
    for record, (tokens, marks) in zip(records, found):
        prompt = peer(record["prompt"])["input_ids"]
        assert tokens == [*peer(record["prompt"] + record["completion"])["input_ids"], peer.eos_token_id]
        assert marks == [0] * len(prompt) + [1] * (len(tokens) - len(prompt))
    assert found[2][0] == peer.apply_chat_template([ASK, ANSWER])["input_ids"]
