"""Filters of documents and near-duplicates, against rules written out here and the exact Jaccard similarity."""

from __future__ import annotations

import functools
import importlib.util
import json
import random
import re
from pathlib import Path

import pytest

from meshwright.data import stages
from meshwright.data.config import DataConfig
from meshwright.data.filters import FilterConfig, check_filters
from meshwright.data.prepare import prepare, prepared_path
from meshwright.data.tokens import TokenSet
from meshwright.errors import ConfigError, DataError
from tests.prepare_runs import ENGLISH, FILTERS_LACK, GERMAN, NOUNS, sentences, write_language_model

pytestmark = pytest.mark.skipif(bool(FILTERS_LACK), reason=FILTERS_LACK)


def prepared(root: Path, texts: list[str], filters: FilterConfig, **more: object) -> TokenSet:
    path = root / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = DataConfig(paths=(str(path),), tokenizer="chars", validation_share=0.0, filters=filters, **more)  # type: ignore[arg-type]
    config.check_all()
    return prepare(config, root / f"set{len(list(root.iterdir()))}", workers=1)


def documents(made: TokenSet) -> list[str]:
    tokenizer, begin, found = made.tokenizer(), 0, []
    for end in made.train.ends.tolist():
        found.append(tokenizer.decode(made.train.tokens[begin : end - 1].tolist(), skip_special_tokens=False))
        begin = end
    return found


@functools.cache
def shingles(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z]+", text.lower())
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def similarity(left: str, right: str) -> float:
    return len(shingles(left) & shingles(right)) / max(1, len(shingles(left) | shingles(right)))


def test_planted_near_duplicates_are_found_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(3)
    texts = [sentences(generator, ENGLISH, 20) for _ in range(80)]
    planted = {}
    for number in range(0, 80, 2):
        words = texts[number].split(" ")
        for _ in range(generator.randint(1, 3)):
            words[generator.randrange(len(words))] = generator.choice(NOUNS)
        planted[" ".join(words)] = number
    everything = [*texts, *planted]
    generator.shuffle(everything)
    made = prepared(tmp_path, everything, FilterConfig(near_duplicates=True))
    kept = documents(made)
    assert kept == [text for text in everything if text in set(kept)], "in corpus order"
    dropped = [text for text in everything if text not in set(kept)]

    def place(text: str) -> int:
        return everything.index(text)

    # Of each pair that is as similar as MinHash promises to see, the first stays and the second goes.
    pairs = [sorted((copy, texts[number]), key=place) for copy, number in planted.items()]
    similar = [pair for pair in pairs if similarity(*pair) >= 0.85]
    found = [pair for pair in similar if pair[1] in dropped]
    assert len(similar) >= 30 and len(found) >= 0.95 * len(similar), f"recall {len(found)} of {len(similar)}"
    assert not [first for first, _ in pairs if first in dropped]
    true = [text for text in dropped if max(similarity(text, other) for other in everything[: place(text)]) >= 0.5]
    assert len(true) == len(dropped), f"precision {len(true)} of {len(dropped)}"
    assert made.manifest["documents_dropped"] == len(dropped)

    # The number of shards changes nothing.
    monkeypatch.setattr(stages, "GROUP_BYTES", 1)
    halves = tmp_path / "halves"
    halves.mkdir()
    for name, part in (("a", everything[:60]), ("b", everything[60:])):
        (halves / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    config = DataConfig(
        paths=(str(halves),), tokenizer="chars", validation_share=0.0, filters=FilterConfig(near_duplicates=True)
    )
    assert documents(prepare(config, tmp_path / "split", workers=1)) == kept


def test_exact_and_near_duplicates_leave_one_together(tmp_path: Path) -> None:
    text = sentences(random.Random(1), ENGLISH, 20)
    near = text.replace(text.split(" ")[7], "changed", 1)
    for order in ([text, near, text, near], [near, text, near]):
        assert documents(prepared(tmp_path, order, FilterConfig(near_duplicates=True))) == [order[0]]
    short = ["two words", "two words or so"]  # fewer than five words have no 5-gram: never near-duplicates
    assert documents(prepared(tmp_path, short, FilterConfig(near_duplicates=True))) == short


def test_rules_of_quality_drop_what_they_say(tmp_path: Path) -> None:
    generator = random.Random(2)
    good = [sentences(generator, ENGLISH, 12) for _ in range(5)]
    few_words = sentences(generator, ENGLISH, 3)
    code = sentences(generator, ENGLISH, 12).replace(".", " {x}.", 1)
    no_stop_words = sentences(generator, NOUNS, 12)
    texts = [good[0], few_words, good[1], code, no_stop_words, *good[2:]]
    made = prepared(tmp_path, texts, FilterConfig(quality=("gopher-quality", "c4")))
    assert documents(made) == good
    assert made.manifest["documents_filtered"] == {
        "curly_bracket": 1, "gopher_enough_stop_words": 1, "gopher_short_doc": 1
    }  # fmt: skip
    assert made.manifest["documents_read"] == len(good) and made.manifest["datatrove"]
    with pytest.raises(DataError, match=r"data\.filters dropped every document \(gopher_short_doc 1\)"):
        prepared(tmp_path, [few_words], FilterConfig(quality=("gopher-quality",)))


def test_addresses_of_people_are_replaced(tmp_path: Path) -> None:
    text = "Write to jane.doe@uni-bonn.de from 8.8.4.4, not from 192.168.0.7 or 10.1.2.3; version 1.2.3."
    masked, other = documents(prepared(tmp_path, [text, "Another one."], FilterConfig(mask_personal=True)))
    assert not re.search(r"jane|uni-bonn|8\.8\.4\.4", masked) and other == "Another one."
    assert re.sub(r"\S+@\S+ from \S+,", "X", masked) == "Write to X not from 192.168.0.7 or 10.1.2.3; version 1.2.3."


@pytest.mark.skipif(importlib.util.find_spec("fasttext") is None, reason="fasttext isn't here")
def test_a_language_model_of_ones_own_chooses_documents(tmp_path: Path) -> None:
    model = write_language_model(tmp_path / "model.bin")
    generator = random.Random(5)
    texts = [sentences(generator, words, 4) for words in (ENGLISH, GERMAN) * 10]
    filters = FilterConfig(languages=("de",), language_model=model)
    made = prepared(tmp_path, texts, filters)
    assert documents(made) == texts[1::2] and made.manifest["documents_filtered"] == {"LanguageFilter": 10}
    with pytest.raises(ConfigError, match=r"the model has no label fr; it has de, en"):
        check_filters(FilterConfig(languages=("fr",), language_model=model))

    # The key follows the model's bytes, not its path.
    config = DataConfig(paths=(str(tmp_path / "text.jsonl"),), tokenizer="chars", filters=filters)
    path = prepared_path(config, tmp_path)
    (tmp_path / "model.bin").rename(tmp_path / "moved.bin")
    with pytest.raises(ConfigError, match=r"language_model = .*model\.bin' can't be read"):
        prepared_path(config, tmp_path)
    moved = FilterConfig(languages=("de",), language_model=str(tmp_path / "moved.bin"))
    assert prepared_path(DataConfig(paths=config.paths, tokenizer="chars", filters=moved), tmp_path) == path
    (tmp_path / "moved.bin").write_bytes(b"no model")
    with pytest.raises(ConfigError, match=r"can't be loaded \(ValueError.*give the path of a fastText model"):
        check_filters(moved)


def test_filters_without_effect_are_refused_and_none_changes_nothing(tmp_path: Path) -> None:
    for filters, sentence in (
        (FilterConfig(language_threshold=0.5), "language_threshold has no effect without data.filters.languages"),
        (FilterConfig(word_language="deu"), r"word_language has no effect without data.filters.quality or near_dup"),
        (FilterConfig(quality=("c4", "c4")), "names a rule twice"),
        (FilterConfig(languages=("en",), language_threshold=1.0), "must be at least 0 and below 1"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            filters.check_all()
    with pytest.raises(ConfigError, match=r"word_language = 'xxx': datatrove has no words for it"):
        check_filters(FilterConfig(near_duplicates=True, word_language="xxx"))
    assert "filters" not in DataConfig().prepared_settings()
    assert DataConfig(filters=FilterConfig(near_duplicates=True)).prepared_settings()["filters"]["near_duplicates"]
