"""Prepares Python files with Hugging Face datasets as `meshwright prepare` does: normalise, drop copies, split, encode.

``pip install datasets``, then compare with ``meshwright prepare --paths FOLDER --tokenizer TOKENIZER --workers 2``::

    python benchmarks/scripts/datasets_prepare.py FOLDER TOKENIZER/tokenizer.json OUT
"""

from __future__ import annotations

import functools
import hashlib
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path

import datasets
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

WORKERS = 2


def read(files: list[str]) -> Iterator[dict[str, str]]:
    """Yields a document a file."""
    for file in files:
        text = unicodedata.normalize("NFC", Path(file).read_text(encoding="utf-8").removeprefix("\ufeff"))
        if text:
            yield {"text": text, "digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}


@functools.cache
def _tokenizer(path: str) -> Tokenizer:
    return Tokenizer.from_file(path)


def encode(batch: Mapping[str, list[str]], path: str) -> dict[str, list[NDArray[np.uint16]]]:
    """Returns the ids of each text, with an end token."""
    encodings = _tokenizer(path).encode_batch_fast(batch["text"], add_special_tokens=False)
    return {"ids": [np.array([*encoding.ids, 0], dtype=np.uint16) for encoding in encodings]}


def main(folder: str, tokenizer: str, out: str) -> None:
    """Writes the tokens and document ends of both splits."""
    datasets.disable_progress_bars()
    files = sorted(map(str, Path(folder).rglob("*.py")))
    documents = datasets.Dataset.from_generator(
        read, gen_kwargs={"files": files}, num_proc=WORKERS, cache_dir=f"{out}/cache"
    )
    # The first copy of each text: datasets has no operation for it.
    first = {digest: row for row, digest in reversed(list(enumerate(documents["digest"])))}
    documents = documents.select(sorted(first.values()))
    features = datasets.Features({"ids": datasets.Sequence(datasets.Value("uint16"))})
    for name in ("train", "validation"):
        held_out = name == "validation"
        split = documents.filter(
            lambda row, held_out: (int(row["digest"][:8], 16) < 0.05 * 2**32) == held_out,
            fn_kwargs={"held_out": held_out},
            num_proc=WORKERS,
        )
        tokens = split.map(
            encode,
            fn_kwargs={"path": tokenizer},
            batched=True,
            batch_size=64,
            num_proc=WORKERS,
            remove_columns=split.column_names,
            features=features,
        )
        count = 0
        with open(f"{out}/{name}.bin", "wb") as stream, open(f"{out}/{name}.idx", "wb") as index:
            for batch in tokens.with_format("arrow").iter(64):
                for chunk in batch["ids"].chunks:
                    stream.write(chunk.flatten().to_numpy().tobytes())
                    ends = count + np.cumsum(np.diff(chunk.offsets.to_numpy()))
                    index.write(ends.astype("<u8").tobytes())
                    count = int(ends[-1])


if __name__ == "__main__":
    main(*sys.argv[1:])
