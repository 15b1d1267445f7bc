from __future__ import annotations

import mmap
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from meshwright.data.selection import (
    DOCUMENT,
    TextSpan,
    document_row,
    held_out,
    mark_first_copies,
    split_document,
    within_limit,
)
from meshwright.data.tokenizer import splits_at_newlines, train_bpe


def rows(texts: list[str]) -> np.ndarray:
    return np.array([document_row(text.encode()) for text in texts], dtype=DOCUMENT)


def test_the_first_of_equal_documents_stays() -> None:
    assert mark_first_copies(rows(["a", "b", "a", "c", "b", "a"])).tolist() == [True, True, False, True, False, False]


def test_split_follows_the_document_not_its_place() -> None:
    texts = [f"document {i}" for i in range(500)]
    every = np.ones(500, dtype=bool)
    held = {texts[i] for i in np.flatnonzero(held_out(rows(texts), every, 0.2))}
    shuffled = random.Random(0).sample(texts, 500)
    again = {shuffled[i] for i in np.flatnonzero(held_out(rows(shuffled), every, 0.2))}
    assert held == again
    assert 60 < len(held) < 140
    more = held_out(rows([*texts, "new"]), np.ones(501, dtype=bool), 0.2)
    assert held <= {[*texts, "new"][i] for i in np.flatnonzero(more)}


def test_neither_split_is_left_empty() -> None:
    for share in (1e-9, 0.999999):
        held = held_out(rows(["a", "b", "c"]), np.ones(3, dtype=bool), share)
        assert 1 <= held.sum() <= 2
    assert held_out(rows(["a", "b"]), np.ones(2, dtype=bool), 0.0).sum() == 0


def test_limit_takes_what_fits_in_hash_order() -> None:
    documents = rows([f"{i:010d}" for i in range(100)])
    kept = within_limit(documents, np.ones(100, dtype=bool), 255)
    assert kept.sum() == 25
    assert documents["order"][kept].max() < documents["order"][~kept].min()
    assert within_limit(documents, np.ones(100, dtype=bool), 1).sum() == 1


def test_a_cut_changes_no_token(tmp_path: Path) -> None:
    generator = random.Random(1)
    words = ["def", " x", "\n", "\n\n", "    ", "\t", "  \n ", "'s", "é", " 日本", "12", "..", " \u00a0", "\r\n", "a\n"]
    text = "".join(generator.choices(words, k=6000))
    files = train_bpe([text], 300)
    assert splits_at_newlines(files.text)
    tokenizer = Tokenizer.from_str(files.text)
    path = tmp_path / "text"
    data = text.encode()
    path.write_bytes(b"before" + data)
    whole = TextSpan(shard=0, start=6, stop=6 + len(data), ends_document=True)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        pieces = list(split_document(view, whole, 500))
    assert len(pieces) > 20
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    parts = [(b"before" + data)[piece.start : piece.stop].decode() for piece in pieces]
    assert "".join(parts) == text
    assert [i for part in parts for i in tokenizer.encode(part).ids] == tokenizer.encode(text).ids


def test_a_text_without_lines_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * 200_000)
    whole = TextSpan(shard=0, start=0, stop=200_000, ends_document=True)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        assert list(split_document(view, whole, 1000)) == [whole]
