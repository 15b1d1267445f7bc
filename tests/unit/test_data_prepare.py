from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import lzma
import os
import resource
import socket
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from meshwright.data import digests, files, stages, tasks, tokenizer
from meshwright.data import prepare as module
from meshwright.data.config import DataConfig
from meshwright.data.prepare import prepare, prepared_path
from meshwright.data.selection import TextSpan
from meshwright.data.tokenizer import character_tokenizer
from meshwright.data.tokens import TokenSet, compression_baselines
from meshwright.errors import ConfigError, DataError


def corpus(directory: Path, documents: int = 30) -> DataConfig:
    texts = [f"Document {i}: {'the cat sat on the mat. ' * (1 + i % 7)}\r\nna\u00efve\r\n" for i in range(documents)]
    path = directory / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, texts[0]]))
    return DataConfig(paths=(str(path),), tokenizer="chars", validation_share=0.2)


def test_tokens_and_index_give_the_text_back(tmp_path: Path) -> None:
    config = corpus(tmp_path)
    made = prepare(config, tmp_path / "set")
    assert made.manifest["documents_dropped"] == 1
    tokenizer = made.tokenizer()
    whole = []
    for split in (made.train, made.validation):
        begin = 0
        for end in split.ends.tolist():
            assert split.tokens[end - 1] == made.eos_id
            whole.append(tokenizer.decode(split.tokens[begin : end - 1].tolist(), skip_special_tokens=False))
            begin = end
        assert begin == len(split.tokens)
    texts = [json.loads(line)["text"] for line in Path(config.paths[0]).read_text().splitlines()]
    assert sorted(whole) == sorted(set(texts))
    held = made.held_out_text(1 << 30)
    assert len(held) == made.validation.text_bytes > 0
    assert made.train.text_bytes + len(held) == sum(len(text.encode()) for text in set(texts))


def test_the_set_is_reused_and_bound_to_its_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = corpus(tmp_path)
    first = prepare(config, tmp_path / "set")
    monkeypatch.setattr(module, "work", lambda job: pytest.fail("prepared again"))
    again = prepare(dataclasses.replace(config, workers=3, sequence=8), tmp_path / "set")
    assert again.fingerprint == first.fingerprint
    with pytest.raises(DataError, match="prepared from other text or settings"):
        prepare(dataclasses.replace(config, dedup=False), tmp_path / "set")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(DataError, match=r"exists and is not a prepared set .* name a directory that isn't there yet"):
        prepare(config, tmp_path / "mine")


def test_the_path_follows_settings_and_inputs(tmp_path: Path) -> None:
    config = corpus(tmp_path)
    path = prepared_path(config, tmp_path / "cache")
    assert path.parent == tmp_path / "cache"
    assert prepared_path(dataclasses.replace(config, workers=2, sequence=8, mask_documents=False), path.parent) == path
    for change in ({"dedup": False}, {"validation_share": 0.1}, {"normalise": "none"}, {"limit_bytes": 99}):
        assert prepared_path(dataclasses.replace(config, **change), path.parent) != path
    assert prepared_path(dataclasses.replace(config, cache=str(tmp_path / "else")), path.parent).parent.name == "else"


def test_the_path_follows_contents_not_place_or_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, cache = corpus(tmp_path), tmp_path / "cache"
    text = Path(config.paths[0])
    path = prepared_path(config, cache)
    os.utime(text, ns=(1, 1))
    assert prepared_path(config, cache) == path
    (tmp_path / "else").mkdir()
    moved = text.rename(tmp_path / "else" / "other.jsonl")
    config = dataclasses.replace(config, paths=(str(moved),))
    assert prepared_path(config, cache) == path
    old, data = moved.stat(), moved.read_bytes()
    assert data.count(b"cat") > 1
    moved.write_bytes(data.replace(b"cat", b"dog", 1))
    os.utime(moved, ns=(old.st_atime_ns, old.st_mtime_ns))  # as long and as old as before
    assert prepared_path(config, cache) != path


def test_a_file_that_stays_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, cache = corpus(tmp_path), tmp_path / "cache"
    monkeypatch.setattr(digests, "SETTLED_NS", -(10**9))  # what was written just now counts as settled
    path = prepared_path(config, cache)
    with monkeypatch.context() as patch:
        patch.setattr(digests, "sha256", lambda path: pytest.fail("read again"))
        assert prepared_path(config, cache) == path
    for damage in (b"", b"[]", b'{"x": 1}', b'{"/x": [1, 2, 3, 4, 5]}'):
        (cache / digests.DIGESTS).write_bytes(damage)
        assert prepared_path(config, cache) == path


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = corpus(tmp_path)
    made = prepare(config, tmp_path / "cache" / "set")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(digests, "whole_file", lambda path: (_ for _ in ()).throw(PermissionError(13, "no")))
    (tmp_path / "cache" / digests.DIGESTS).unlink()
    assert prepare(config, tmp_path / "cache" / "set").fingerprint == made.fingerprint


def test_a_full_disk_under_the_cache_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = corpus(tmp_path)
    path = prepared_path(config, tmp_path / "cache")
    (tmp_path / "cache" / digests.DIGESTS).unlink()

    def no_space(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    assert prepared_path(config, tmp_path / "cache") == path
    assert not (tmp_path / "cache" / digests.DIGESTS).exists()


def test_the_first_digests_of_a_cache_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, cache = corpus(tmp_path), tmp_path / "not" / "made" / "yet"
    monkeypatch.setattr(digests, "SETTLED_NS", -(10**9))
    path = prepared_path(config, cache)
    monkeypatch.setattr(digests, "sha256", lambda path: pytest.fail("read again"))
    assert prepared_path(config, cache) == path


def test_a_character_that_the_tokenizer_lacks_is_no_token(tmp_path: Path) -> None:
    (tmp_path / "read-00000.text").write_text("abba\u00e9", encoding="utf-8")
    tasks.write_tokenizer(tmp_path, character_tokenizer(["a", "b"], with_end_token=False))
    span = TextSpan(shard=0, start=0, stop=6, ends_document=True)
    task = tasks.EncodeTask(
        directory=tmp_path, unit=0, spans=(span,), dtype="<u2", eos_id=None, characters=True, literal=False
    )
    with pytest.raises(DataError, match="character '\u00e9'"):
        task.run(batched=False)
    task = dataclasses.replace(task, spans=(dataclasses.replace(span, stop=4),))
    task.run(batched=False)
    assert tasks.read_unit(tasks.unit_file(tmp_path, 0), "<u2")[0].tolist() == [0, 1, 1, 0]


def test_text_that_changes_while_it_is_prepared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = corpus(tmp_path)
    done = module.work

    def change(job: module.Job) -> None:
        done(job)
        with open(config.paths[0], "a") as file:
            file.write('{"text": "late"}\n')

    monkeypatch.setattr(module, "work", change)
    with pytest.raises(DataError, match="changed while it was being prepared"):
        prepare(config, tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_the_tail_of_one_document_is_held_out_and_has_no_end_token(tmp_path: Path) -> None:
    text = "".join(chr(97 + i % 26) + ("\u00e9\n" if i % 9 == 0 else "") for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    config = DataConfig(paths=(str(tmp_path / "a.txt"),), tokenizer="chars", split="tail", validation_share=0.1)
    made = prepare(config, tmp_path / "set")
    assert made.eos_id is None
    assert made.vocab_size == len(set(text))
    characters = sorted(set(text))
    place = int(len(text) * 0.9)
    assert [characters[token] for token in made.train.tokens] == list(text[:place])
    assert made.held_out_text(1 << 30).decode() == text[place:]
    assert made.tokenizer().encode(text[:50]).ids == made.train.tokens[:50].tolist()
    hashed = prepare(dataclasses.replace(config, split="hash"), tmp_path / "hashed")
    assert hashed.fingerprint == made.fingerprint


def test_a_tail_needs_one_document(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="takes the end of one document, and the corpus has 30"):
        prepare(dataclasses.replace(corpus(tmp_path), split="tail"), tmp_path / "set")


def test_limit_and_share_of_nothing(tmp_path: Path) -> None:
    config = corpus(tmp_path)
    made = prepare(dataclasses.replace(config, limit_bytes=800, validation_share=0.0), tmp_path / "set")
    assert 400 < made.train.text_bytes <= 800
    assert len(made.validation.tokens) == len(made.validation.ends) == made.validation.text_bytes == 0
    assert compression_baselines(made) == {}


def test_a_given_tokenizer_is_taken_as_it_is(tmp_path: Path) -> None:
    config = corpus(tmp_path)
    own = prepare(config, tmp_path / "own")
    again = prepare(dataclasses.replace(config, tokenizer=str(own.path)), tmp_path / "again")
    assert again.eos_id == own.eos_id
    assert np.array_equal(again.train.tokens, own.train.tokens)
    with pytest.raises(DataError, match=r"data\.tokenizer = .*missing.*no such file"):
        prepare(dataclasses.replace(config, tokenizer=str(tmp_path / "missing.json")), tmp_path / "no")


def begin_tokenizer(directory: Path) -> str:
    """Writes a tokenizer that puts ``<s>`` before every text, as Llama's and Gemma's do, and returns its directory."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special_tokens = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat."], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(directory)


@pytest.mark.parametrize("unit_bytes", [1 << 20, 40])
def test_documents_begin_as_the_tokenizer_begins_every_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit_bytes: int
) -> None:
    monkeypatch.setattr(stages, "UNIT_BYTES", (unit_bytes, unit_bytes))
    directory = begin_tokenizer(tmp_path / "tokenizer")
    config = dataclasses.replace(corpus(tmp_path, documents=12), tokenizer=directory)
    texts = [json.loads(line)["text"] for line in Path(config.paths[0]).read_text().splitlines()]
    texts += ["<s>it begins by itself", "it ends by itself</s>", "<s>both, and long: " + "the cat\n\nsat" * 9 + "</s>"]
    Path(config.paths[0]).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = prepare(config, tmp_path / "set")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    expected = set()
    for text in texts:
        ids = tokenizer(text.removeprefix("<s>").removesuffix("</s>")).input_ids
        expected.add((*ids, tokenizer.eos_token_id))
    begins, found = 0, set()
    for split in (made.train, made.validation):
        edges = [0, *split.ends.tolist()]
        found |= {tuple(split.tokens[start:stop].tolist()) for start, stop in itertools.pairwise(edges)}
        begins += split.begin_tokens
    assert found == expected
    assert begins == len(expected) - 2  # two of the texts had theirs
    # A text's tokens, and its end, are what is measured; nothing is said by what begins every text.
    held = made.validation
    text_tokens = len(held.tokens) - held.begin_tokens
    assert held.bits_per_byte(np.log(2.0)) == pytest.approx(text_tokens / held.text_bytes)


def test_nothing_begins_documents_where_nothing_is_asked_for(tmp_path: Path) -> None:
    directory = begin_tokenizer(tmp_path / "tokenizer")
    config = dataclasses.replace(corpus(tmp_path), tokenizer=directory, add_bos=False)
    made = prepare(config, tmp_path / "set")
    assert 0 not in made.train.tokens and made.train.begin_tokens == 0
    assert prepare(dataclasses.replace(config, add_bos=True), tmp_path / "other").fingerprint != made.fingerprint


def test_a_hub_that_says_nothing_is_asked_for_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own client would ask for each of a tokenizer's files again and again, each time for longer."""
    requests = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(tokenizer, "HUB_WAIT_S", 0.2)
        with pytest.raises(DataError, match=r"neither a directory nor in the hub's cache, and http.* doesn't answer"):
            prepare(dataclasses.replace(corpus(tmp_path), tokenizer="nobody/nothing"), tmp_path / "no")
        listener.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                connection = listener.accept()[0]
                with connection:
                    requests.append(connection.recv(4096))
    assert sum(request.startswith(b"HEAD / ") for request in requests) == 1
    assert not any(b"nobody" in request for request in requests)


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "train.idx", "tokenizer.json"])
def test_truncated_missing_and_changed_files_are_refused(tmp_path: Path, name: str) -> None:
    made = prepare(corpus(tmp_path), tmp_path / "set")
    path = made.path / name
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    with pytest.raises(DataError, match=f"{name} is truncated: {len(data) - 3} bytes, the manifest says {len(data)}"):
        TokenSet.open(made.path)
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    if name != "tokenizer.json":
        TokenSet.open(made.path)  # token files are compared as they are read
    with pytest.raises(DataError, match=f"{name} was changed"):
        TokenSet.open(made.path, verify=True)
    path.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        TokenSet.open(made.path)


def test_a_directory_without_or_with_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no manifest\.json; run meshwright prepare"):
        TokenSet.open(tmp_path)
    (tmp_path / "manifest.json").write_text('{"version": 1')
    with pytest.raises(DataError, match="damaged"):
        TokenSet.open(tmp_path)
    (tmp_path / "manifest.json").write_text('{"version": 99}')
    with pytest.raises(DataError, match="format version 99"):
        TokenSet.open(tmp_path)


def test_an_empty_corpus_is_refused_and_leaves_no_set(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="the corpus is empty"):
        prepare(DataConfig(paths=(str(tmp_path / "a.txt"),)), tmp_path / "set")
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    "file", ["read-00000.text", "read-00000.documents", "unit-000000.bin", "train.bin", "manifest.json"]
)
def test_a_full_disk_is_said_and_nothing_half_done_is_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    config = corpus(tmp_path)
    real = os.fsync

    def fsync(handle: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{handle}")).name.startswith(file):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(files.os, "fsync", fsync)
    with pytest.raises(DataError, match=r"disk full while writing under .*data\.cache"):
        prepare(config, tmp_path / "set")
    assert not (tmp_path / "set").exists()
    assert not list(tmp_path.rglob(f"{file}*"))
    monkeypatch.setattr(files.os, "fsync", real)
    assert prepare(config, tmp_path / "set").fingerprint == prepare(config, tmp_path / "clean").fingerprint
    assert not (tmp_path / "set.partial").exists()


def test_bits_per_byte_stand_beside_the_compressors(tmp_path: Path) -> None:
    made = prepare(corpus(tmp_path, 300), tmp_path / "set")
    found = compression_baselines(made)
    assert found["bytes"] == made.validation.text_bytes
    assert 0.0 < found["xz"] < 8.0 and 0.0 < found["gzip"] < 8.0
    # As xz -9e, whose tables for 64 MiB a small text doesn't need.
    text = made.held_out_text(1 << 20)
    assert found["xz"] == 8.0 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    compression_baselines(made)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < (8 << 20) // resource.getpagesize()
    targets = len(made.validation.tokens) - 1
    loss = np.log(2.0) * 8.0 * made.validation.text_bytes / targets  # eight bits for each byte
    assert made.validation.bits_per_byte(loss) == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 256}, "257 at least"),
        ({"tokenizer": "chars", "vocab_size": 99}, "no effect"),
        ({"validation_share": 1.0}, "below 1"),
        ({"split": "tail", "validation_share": 0.0}, "no effect"),
        ({"limit_bytes": 0}, "1 or more"),
        ({"sequence": 0}, "1 or more"),
        ({"workers": -1}, "1 or more"),
        ({"tokenizer": ""}, "empty"),
        ({"tokenizer": "bpe", "add_bos": False}, "no effect"),
        ({"paths": ("",)}, "empty path"),
    ],
)
def test_settings_that_contradict_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(**values).check()  # type: ignore[arg-type]


def test_a_field_name_without_fields_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(ConfigError, match=r"data\.text_field = 'body' has no effect"):
        prepare(DataConfig(paths=(str(tmp_path),), text_field="body"), tmp_path / "set")


def test_the_manifest_vouches_for_every_file(tmp_path: Path) -> None:
    made = prepare(corpus(tmp_path), tmp_path / "set")
    found = {path.name for path in made.path.iterdir()}
    assert found == {*made.manifest["files"], "manifest.json"}
    for name, facts in made.manifest["files"].items():
        assert hashlib.sha256((made.path / name).read_bytes()).hexdigest() == facts["sha256"]


def test_a_tokenizer_that_is_none_is_refused_before_the_text_is_read(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words to read\n" * 40)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    config = DataConfig(paths=(str(tmp_path / "text.txt"),), tokenizer=str(folder), workers=1)
    stages: list[str] = []
    with pytest.raises(DataError, match="cannot be read"):
        prepare(config, tmp_path / "set", progress=lambda progress: stages.append(progress.stage))
    assert "read" not in stages
    assert not (tmp_path / "set.partial").exists()
