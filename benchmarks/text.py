"""How fast text becomes tokens and tokens become rows, against the tokenizers library itself.

Runs are interleaved and medians reported. ``encode_batch`` is the library's own call, all cores, on the same documents
in memory; prepare also reads, normalises, hashes, writes and checks. Two comparisons: with a finished tokenizer, and
with training one (the library trains on the same sample).

    python benchmarks/text.py [--megabytes 8] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from meshwright.data import stages
from meshwright.data.config import DataConfig
from meshwright.data.documents import Reading, read_documents
from meshwright.data.loader import Loader
from meshwright.data.prepare import prepare
from meshwright.data.sources import list_sources
from meshwright.data.tokenizer import train_bpe
from meshwright.data.tokens import TokenSet


def main() -> None:
    """Measures and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=8.0, help="text of the interpreter's library to use")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), int(options.megabytes * 1e6), options.rounds)
    if options.json:
        print(json.dumps(results))
        return
    width = max(map(len, results))
    for name, value in results.items():
        print(f"{name:<{width}}  {value:>14,.2f}")


def measure(folder: Path, limit_bytes: int, rounds: int) -> dict[str, float]:
    """Returns medians: tokens per second, ratios to the library, and tokens per second of the loader."""
    cores = len(os.sched_getaffinity(0))
    config = DataConfig(paths=(str(corpus(folder, limit_bytes)),))
    made = prepare(config, folder / "first")
    given = dataclasses.replace(config, tokenizer=str(made.path))
    texts = [
        document.text
        for source in list_sources(config.paths)
        for document in read_documents(source, Reading(text_field="text", normalise="NFC"))
    ]
    tokenizer = made.tokenizer()
    times: dict[str, list[float]] = {"encode_batch": [], "prepare": [], "train": [], "prepare_with_training": []}
    ratios: dict[str, list[float]] = {"given": [], "trained": []}
    for number in range(rounds):
        times["encode_batch"].append(seconds(lambda: library(tokenizer, texts)))
        times["prepare"].append(seconds(functools.partial(prepare, given, folder / f"given{number}")))
        times["train"].append(seconds(lambda: train_bpe(sample(texts), config.vocab_size)))
        times["prepare_with_training"].append(seconds(functools.partial(prepare, config, folder / f"trained{number}")))
        last = {name: values[-1] for name, values in times.items()}
        ratios["given"].append(last["encode_batch"] / last["prepare"])
        ratios["trained"].append((last["encode_batch"] + last["train"]) / last["prepare_with_training"])
    tokens = len(made.train.tokens) + len(made.validation.tokens)
    results = {"cores": float(cores), "text MB": sum(len(t.encode()) for t in texts) / 1e6, "tokens": float(tokens)}
    for name in ("encode_batch", "prepare"):
        results[f"{name} tokens/s"] = tokens / statistics.median(times[name])
        results[f"{name} tokens/s/core"] = results[f"{name} tokens/s"] / cores
    results["prepare / encode_batch"] = statistics.median(ratios["given"])
    results["prepare with training / (train + encode_batch)"] = statistics.median(ratios["trained"])
    return results | loader_speeds(made)


def corpus(folder: Path, limit_bytes: int) -> Path:
    """Writes the interpreter's library as JSON lines, up to a size."""
    path = folder / "corpus.jsonl"
    size = 0
    seen = set()
    with open(path, "w", encoding="utf-8") as file:
        for source in list_sources(()):
            for document in read_documents(source, Reading(text_field="text", normalise="none")):
                text = document.text
                if size < limit_bytes and text not in seen:
                    seen.add(text)
                    file.write(json.dumps({"text": text}) + "\n")
                    size += len(text.encode())
    return path


def library(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Encodes as the library does it, to lists of ids."""
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def sample(texts: list[str]) -> list[str]:
    """Returns as much text as prepare trains a tokenizer on."""
    chosen, size = [], 0
    for text in texts:
        if size < stages.SAMPLE_BYTES:
            chosen.append(text)
            size += len(text)
    return chosen


def seconds(work: Callable[[], object]) -> float:
    """Returns how long a call takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def read_batches(loader: Loader, steps: range) -> None:
    """Reads the batches of steps and drops them."""
    for step in steps:
        loader.batch(step)


def loader_speeds(made: TokenSet) -> dict[str, float]:
    """Measures batches of a few shapes in one thread, documents masked."""
    speeds = {}
    for rows, sequence in ((12, 64), (32, 256), (16, 1024)):
        loader = Loader(made.train, rows=rows, sequence=sequence, seed=0)
        taken = []
        for first in range(0, 300, 100):
            taken.append(seconds(functools.partial(read_batches, loader, range(first, first + 100))) / 100)
        speeds[f"loader B={rows} S={sequence} tokens/s"] = rows * sequence / statistics.median(taken)
    return speeds


if __name__ == "__main__":
    main()
