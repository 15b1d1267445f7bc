"""Tokens a second and core of `prepare`'s tasks, against datatrove's own tokenisation of the same text.

Both write token files from the same documents with the same tokenizer, one process each, interleaved. Processor time is
compared, which other programs of the machine disturb less than the clock. ``encode`` is a task of the encode stage
against `DocumentTokenizer`; ``all`` is every task that an engine runs, reading and normalising the text, hashing it and
encoding it, against datatrove's `JsonlReader` and `DocumentTokenizer`.

    python benchmarks/text_engines.py [--megabytes 8] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from loguru import logger

from benchmarks.text import corpus
from meshwright.data.config import DataConfig
from meshwright.data.documents import Reading
from meshwright.data.filters import FilterConfig
from meshwright.data.prepare import prepare
from meshwright.data.selection import TextSpan
from meshwright.data.shards import read_shard, shard_documents
from meshwright.data.sources import list_sources
from meshwright.data.tasks import EncodeTask, ReadTask, unit_file


def main() -> None:
    """Measures and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=8.0, help="text of the interpreter's library to use")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logger.disable("datatrove")
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), int(options.megabytes * 1e6), options.rounds)
    if options.json:
        print(json.dumps(results))
        return
    width = max(map(len, results))
    for name, value in results.items():
        print(f"{name:<{width}}  {value:>14,.2f}")


def measure(folder: Path, limit_bytes: int, rounds: int) -> dict[str, float]:
    """Returns medians: tokens per second and core of both, and the ratio of each pair of rounds."""
    text = corpus(folder, limit_bytes)
    made = prepare(DataConfig(paths=(str(text),), validation_share=0.0), folder / "set")
    (folder / "tokenizer.json").write_bytes((made.path / "tokenizer.json").read_bytes())
    tokenizer = str(folder / "tokenizer.json")
    read = ReadTask(
        directory=folder, shard=0, sources=tuple(list_sources((str(text),))),
        reading=Reading(text_field="text", normalise="NFC"), characters=False, filters=FilterConfig(),
    )  # fmt: skip
    read.run(batched=True)
    stop, spans = 0, []
    for size in shard_documents(folder, 0)["bytes"].tolist():
        spans.append(TextSpan(shard=0, start=stop, stop=stop + size, ends_document=True))
        stop += size
    encode = EncodeTask(
        directory=folder, unit=0, spans=tuple(spans), dtype="<u2", eos_id=made.eos_id, characters=False, literal=True
    )
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(read_shard(folder, 0))]

    def datatrove(data: object) -> None:
        block = DocumentTokenizer(
            str(folder / "datatrove"), tokenizer, eos_token="<|endoftext|>", shuffle_documents=False, batch_size=100
        )
        for _ in block.run(data, rank=0) or ():  # type: ignore[arg-type]
            pass

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "encode": (lambda: encode.run(batched=True), lambda: datatrove(iter(documents))),
        "all": (
            lambda: (read.run(batched=True), encode.run(batched=True)),
            lambda: datatrove(JsonlReader(str(text)).run(None, 0, 1)),
        ),
    }
    tokens = encode.run(batched=True).tokens
    datatrove(iter(documents))  # both have imported and loaded everything
    results = {"text MB": stop / 1e6, "tokens": float(tokens), "file bytes": float(unit_file(folder, 0).stat().st_size)}
    for name, (ours, theirs) in pairs.items():
        times = [(processor_s(ours), processor_s(theirs)) for _ in range(rounds)]
        results[f"{name}: prepare tokens/s/core"] = tokens / statistics.median(own for own, _ in times)
        results[f"{name}: datatrove tokens/s/core"] = tokens / statistics.median(other for _, other in times)
        results[f"{name}: prepare / datatrove"] = statistics.median(other / own for own, other in times)
    return results


def processor_s(work: Callable[[], object]) -> float:
    """Returns the processor time of a call, over all threads of this process."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


if __name__ == "__main__":
    main()
