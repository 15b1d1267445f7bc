"""A flipped bit in prepared text never trains: every file of a set is checked before, or as, it is read."""

from __future__ import annotations

import random
import shutil
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from meshwright.data.chunks import CHUNK_BYTES, ChunkSums
from meshwright.data.config import DataConfig
from meshwright.data.loader import Loader, evaluation_batches
from meshwright.data.prepare import prepare
from meshwright.data.tokens import MANIFEST, TokenSet, compression_baselines, render_manifest
from meshwright.errors import DataError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TokenSet:
    root = tmp_path_factory.mktemp("text")
    words = random.Random(1)
    text = "\n\n".join(" ".join(words.choices("abcdefgh", k=400)) for _ in range(400))
    (root / "a.txt").write_text(text)
    config = DataConfig(paths=(str(root / "a.txt"),), tokenizer="chars", split="tail", validation_share=0.2)
    return prepare(config, root / "set", workers=1)


def use(path: Path) -> None:
    """Does what a run does with a set in its first epoch."""
    token_set = TokenSet.open(path)
    loader = Loader(token_set.train, rows=16, sequence=512, seed=1)
    for step in range(2 + loader.epoch_rows // 16):
        loader.batch(step)
    for _ in evaluation_batches(token_set.validation, rows=16, sequence=512):
        pass
    token_set.validation.check_index()
    token_set.tokenizer()
    compression_baselines(token_set)


def test_none_of_a_hundred_flipped_bits_is_silent(made: TokenSet, tmp_path: Path) -> None:
    use(made.path)
    draw = random.Random(7)
    files = sorted(path.name for path in made.path.iterdir())
    told: dict[str, int] = {}
    for number in range(100):
        damaged = tmp_path / str(number)
        shutil.copytree(made.path, damaged)
        # Every file in turn, and most often those that hold the tokens.
        name = files[number % len(files)] if number < 40 else ("train.bin", "validation.bin", "train.idx")[number % 3]
        data = bytearray((damaged / name).read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (damaged / name).write_bytes(data)
        with pytest.raises(DataError):
            use(damaged)
        told[name] = told.get(name, 0) + 1
        shutil.rmtree(damaged)
    assert set(told) == set(files)


def test_the_error_names_file_and_chunk_when_the_chunk_is_read(made: TokenSet, tmp_path: Path) -> None:
    shutil.copytree(made.path, tmp_path / "set")
    path = tmp_path / "set" / "train.bin"
    data = bytearray(path.read_bytes())
    assert len(data) > 2 * CHUNK_BYTES
    data[CHUNK_BYTES + 5] ^= 1
    path.write_bytes(data)
    split = TokenSet.open(tmp_path / "set").train
    assert len(split.read(0, 100)) == 100, "another chunk"
    place = rf"chunk 1 \(bytes {CHUNK_BYTES} to {2 * CHUNK_BYTES}\)"
    with pytest.raises(DataError, match=rf"train\.bin is damaged: {place}"):
        split.read(CHUNK_BYTES // 2 - 10, CHUNK_BYTES // 2 + 10)


def test_a_set_of_before_the_checksums_is_refused_with_its_cure(made: TokenSet, tmp_path: Path) -> None:
    shutil.copytree(made.path, tmp_path / "set")
    old = {key: value for key, value in made.manifest.items() if key not in ("chunks", "checksum")} | {"version": 1}
    (tmp_path / "set" / MANIFEST).write_bytes(render_manifest(old))
    with pytest.raises(DataError, match=r"format version 1, whose files have no checksums .* prepare it again"):
        TokenSet.open(tmp_path / "set")


def test_ids_that_the_vocabulary_has_not_are_refused_though_their_checksum_holds(made: TokenSet) -> None:
    split = made.train
    tokens = np.full(1000, 60_000, dtype="<u2")
    sums = ChunkSums(made.path / "x.bin", 2000, np.array([zlib.crc32(tokens.tobytes())], dtype="<u4"), CHUNK_BYTES)
    forged = type(split)(
        name="train", tokens=tokens, ends=split.ends, text_bytes=1, fingerprint="", vocab_size=300, sums={"bin": sums}
    )
    with pytest.raises(DataError, match="holds token 60000, its vocabulary has 300"):
        forged.read(0, 10)


def test_a_second_epoch_costs_nothing(made: TokenSet) -> None:
    split = TokenSet.open(made.path).train
    split.read(0, len(split.tokens))
    began = time.perf_counter()
    for _ in range(1000):
        split.read(0, 512)
    assert time.perf_counter() - began < 1.0
