"""Text at scale: `prepare` with filters on a real Slurm and a real Ray of this machine, killed twice in the middle.

    python benchmarks/bench_text_engines.py slurm ray [--megabytes 220] [--kept 0.2] [--pairs 2000] [--folder F]

A corpus is drawn: documents of two languages, `--kept` of them in the one that stays, addresses of people in some, and
pairs of near-duplicates far apart. `prepare` keeps that language by a fastText model that is trained here, masks the
addresses, drops near-duplicates and tokenises: by its own processes, and beside it by each engine. There the command is
killed (SIGKILL) while it reads, a node is killed while signatures are computed, and the command once more while it
encodes. Bars: each engine gives the bytes of the own processes; of the planted pairs whose exact Jaccard similarity is
0.85 or more, 95 % are found; nothing else is dropped, and no address is left.

`--against` compares processor seconds with datatrove's own pipeline of the same steps on a part of the corpus, in one
process each, interleaved; bar 0.9 of its tokens a second and core. Exit status 1 when a bar is missed. It needs
`pip install 'meshwright[text]' orjson`; Slurm needs root, munge and slurm-wlm, Ray `pip install 'meshwright[ray]'`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import fasttext
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.filters import LanguageFilter
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.pipeline.readers import JsonlReader, ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.pipeline.writers import ParquetWriter
from loguru import logger

from benchmarks.text_engines import processor_s
from meshwright.data import filters as our_filters
from meshwright.data import stages
from meshwright.data.batches import run_batch_task
from meshwright.data.config import DataConfig
from meshwright.data.filters import FilterConfig
from meshwright.data.near_duplicates import BUCKETS
from meshwright.data.prepare import prepare
from meshwright.data.tokens import TokenSet
from tests import ray_cluster, slurm_cluster
from tests.prepare_runs import contents
from tests.ray_cluster import RayTestCluster
from tests.slurm_cluster import SlurmCluster

FILE_BYTES, PART_BYTES, LEAST_FILES = 4e6, 12e6, 12
SIMILAR, RECALL_BAR, SPEED_BAR = 0.85, 0.95, 0.9
STALL_S = 1200.0
COMMAND = """
import sys
from meshwright.cli.main import main
from meshwright.data import stages
stages.GROUP_BYTES, stages.UNIT_BYTES = {}, {}
sys.exit(main(sys.argv[1:]))
"""
"""The command, with the sizes of tasks that a text needs: names that replace addresses go round within a task."""
LETTERS = {"en": "aeioulmnrst", "de": "aeuzkwpfgbh"}
ADDRESS = "Write to person{}@uni-bonn.de."
ENGINES: dict[str, tuple[Callable[[Path], Any], Callable[[], str]]] = {
    "slurm": (SlurmCluster, slurm_cluster.missing),
    "ray": (RayTestCluster, ray_cluster.missing),
}


def main() -> int:
    """Prepares by each engine and prints what came of it; returns 1 when a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", help="slurm, ray")
    parser.add_argument("--megabytes", type=float, default=220.0)
    parser.add_argument("--kept", type=float, default=0.2, help="share of the documents in the language that stays")
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--against", type=int, default=0, metavar="ROUNDS", help="rounds beside datatrove's own")
    parser.add_argument("--folder", type=Path, help="where the files go, and stay; a next call finds them")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if unknown := set(options.engines) - ENGINES.keys():
        parser.error(f"no engine {', '.join(unknown)}; there are {', '.join(ENGINES)}")
    for name in options.engines:
        if why := ENGINES[name][1]():
            print(why)
            return 2
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    logger.disable("datatrove")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        corpus = Corpus(folder, options.megabytes * 1e6, options.kept, options.pairs)
        results: dict[str, Any] = {"text MB": corpus.bytes / 1e6, "documents": corpus.documents, "files": corpus.files}
        missed: list[str] = []
        if options.against:
            results |= against_datatrove(corpus, folder / "against", options.against)
            if results["prepare / datatrove"] < SPEED_BAR:
                missed.append("tokens a second and core")
        if options.engines:
            with ThreadPoolExecutor() as threads:
                engines = {name: threads.submit(killed_twice, corpus, name, folder) for name in options.engines}
                stages.GROUP_BYTES, stages.UNIT_BYTES = corpus.group_bytes, corpus.unit_bytes
                made = prepare(corpus.config(), folder / "own", workers=2)
            found = corpus.judge(made)
            results |= found
            missed += [name for name, bar in BARS.items() if not bar(found[name])]
            for name, engine in engines.items():
                try:
                    told = engine.result()
                except AssertionError as error:
                    missed.append(f"{name}: {error}")
                    continue
                results |= {f"{name}: {title}": value for title, value in told.items()}
                is_equal = contents(folder / f"set-{name}") == contents(made.path)
                results[f"{name}: same bytes"] = is_equal
                missed += [] if is_equal else [name]
    width = max(map(len, results))
    for name, value in results.items():
        print(f"{name:<{width}}  {value:>14,.4g}" if isinstance(value, float) else f"{name:<{width}}  {value:>14}")
    print(f"missed: {', '.join(missed)}" if missed else "all bars held")
    if options.json:
        options.json.write_text(json.dumps(results | {"missed": missed, "load": os.getloadavg()[0]}, indent=1))
    return 1 if missed else 0


BARS: dict[str, Callable[[Any], bool]] = {
    "recall of similar pairs": lambda value: value >= RECALL_BAR,
    "dropped, and no later one of a pair": lambda value: value == 0,
    "of the other language, kept": lambda value: value == 0,
    "addresses left": lambda value: value == 0,
}


class Corpus:
    """A drawn text, of which is known what a preparation has to find.

    Args:
        folder: for the text and the language model.
        size: bytes of text.
        kept: share of the documents in the language that stays.
        pairs: of near-duplicates, all in that language.
    """

    def __init__(self, folder: Path, size: float, kept: float, pairs: int) -> None:
        self.bytes = self.documents = self.files = 0
        self.file_bytes = min(FILE_BYTES, size / LEAST_FILES)
        # A small text is still read and encoded in tasks enough to be killed in the middle of them.
        self.group_bytes = min(stages.GROUP_BYTES, int(self.file_bytes))
        self.unit_bytes = (min(stages.UNIT_BYTES[0], int(size * kept / 2 / LEAST_FILES)), stages.UNIT_BYTES[1])
        self._languages: list[str] = []
        self._pairs: list[tuple[int, int, float]] = []
        self.folder, self.model = folder / "text", folder / "languages.bin"
        self.folder.mkdir(parents=True, exist_ok=True)
        draw = random.Random(0)
        self._words = {name: _words(draw, letters) for name, letters in LETTERS.items()}
        self._train_model(draw)
        self._write(draw, size, kept, pairs)

    def _train_model(self, draw: random.Random) -> None:
        lines = [f"__label__{name} {' '.join(draw.choices(self._words[name], k=30))}" for name in LETTERS] * 200
        labelled, trained = self.model.with_suffix(".txt"), self.model.with_suffix(".part")
        if self.model.exists():
            return  # no two trainings by threads are equal, and the set of an earlier call was made by this one
        labelled.write_text("\n".join(lines))
        # Ten threads fill all first weights in fastText 0.9.2, one leaves them as the memory was.
        model = fasttext.train_supervised(str(labelled), epoch=40, dim=8, minn=1, maxn=2, thread=10, verbose=0)
        model.save_model(str(trained))
        trained.rename(self.model)

    def _write(self, draw: random.Random, size: float, kept: float, pairs: int) -> None:
        """Writes files until the text is long enough; the copies of a pair lie at random places behind it."""
        waiting: list[tuple[int, int, str]] = []
        expected = int(size / 3500)
        is_kept = [draw.random() < kept for _ in range(2 * expected)]
        originals = [number for number in range(expected - expected // 10) if is_kept[number]]
        chosen = set(draw.sample(originals, min(pairs, len(originals) // 2)))
        while self.bytes < size:
            with (self.folder / f"{self.files:05d}.jsonl").open("w", encoding="utf-8") as file:
                end = self.bytes + self.file_bytes
                while self.bytes < end:
                    number = self.documents
                    if waiting and waiting[0][0] <= number:
                        _, original, text = waiting.pop(0)
                        near = self._changed(draw, number, text)
                        self._pairs.append((original, number, similarity(text, near)))
                        self._add(file, "en", near)
                        continue
                    language = "en" if is_kept[number] else "de"
                    text = self._document(draw, number, language)
                    if number in chosen:
                        waiting.append((draw.randrange(number + 1, expected), number, text))
                        waiting.sort()
                    self._add(file, language, text)
            self.files += 1

    def _document(self, draw: random.Random, number: int, language: str) -> str:
        words = draw.choices(self._words[language], k=draw.randrange(200, 900))
        lines = [" ".join(words[start : start + 12]).capitalize() + "." for start in range(0, len(words), 12)]
        address = [ADDRESS.format(number)] if number % 50 == 0 else []
        return "\n".join([f"Number {number:07d}.", *lines, *address])

    def _changed(self, draw: random.Random, number: int, text: str) -> str:
        """Returns a text with its own number and some words replaced, one in a hundred or fewer."""
        words = text.split(" ")
        for _ in range(draw.randrange(1, 1 + max(2, len(words) // 100))):
            words[draw.randrange(3, len(words))] = draw.choice(self._words["en"])
        return re.sub(r"Number \d+", f"Number {number:07d}", " ".join(words), count=1)

    def _add(self, file: Any, language: str, text: str) -> None:
        file.write(json.dumps({"text": text}) + "\n")
        self.bytes += len(text)
        self.documents += 1
        self._languages.append(language)

    def config(self, more: Sequence[Path] = (), **settings: object) -> DataConfig:
        """Returns the settings of all runs; of some files alone where they are named."""
        chosen = FilterConfig(
            languages=("en",), language_model=str(self.model), mask_personal=True, near_duplicates=True
        )
        paths = tuple(map(str, more)) or (str(self.folder),)
        return DataConfig(paths=paths, validation_share=0.01, filters=chosen, **settings)  # type: ignore[arg-type]

    def judge(self, made: TokenSet) -> dict[str, Any]:
        """Returns what of the planted was found, by the documents that a set holds."""
        kept, addresses = set[int](), 0
        for text in _texts(made):
            kept.add(int(re.match(r"Number (\d+)\.", text)[1]))  # type: ignore[index]
            addresses += "uni-bonn" in text
        english = {number for number, language in enumerate(self._languages) if language == "en"}
        similar = [pair for pair in self._pairs if pair[2] >= SIMILAR]
        later = {pair[1] for pair in self._pairs}
        return {
            "planted pairs": len(self._pairs),
            "similar pairs": len(similar),
            "recall of similar pairs": sum(pair[1] not in kept for pair in similar) / len(similar),
            "dropped, and no later one of a pair": len(english - kept - later),
            "of the other language, kept": len(kept - english),
            "addresses left": addresses,
            "tokens": len(made.train.tokens) + len(made.validation.tokens),
        }


def _words(draw: random.Random, letters: str) -> list[str]:
    return ["".join(draw.choices(letters, k=draw.randrange(2, 10))) for _ in range(5000)]


def _texts(made: TokenSet) -> Iterator[str]:
    tokenizer = made.tokenizer()
    for split in (made.train, made.validation):
        for begin, end in itertools.pairwise([0, *split.ends.tolist()]):
            yield tokenizer.decode(split.tokens[begin : end - 1].tolist(), skip_special_tokens=False)


def similarity(left: str, right: str) -> float:
    """Returns the exact Jaccard similarity of two texts' 5-grams of words."""
    sets = []
    for text in (left, right):
        words = re.findall(r"\w+", text.lower())
        sets.append({tuple(words[start : start + 5]) for start in range(len(words) - 4)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


class Killed:
    """A command that is killed in the middle of its stages.

    Args:
        corpus: to prepare.
        name: of the engine.
        settings: of it.
        folder: for the set.
    """

    def __init__(self, corpus: Corpus, name: str, settings: Sequence[str], folder: Path) -> None:
        filters = corpus.config().filters
        self.out, self._log = folder / f"set-{name}", folder / f"{name}.log"
        self._started: list[subprocess.Popen[bytes]] = []
        self._argv = [
            *(sys.executable, "-c", COMMAND.format(corpus.group_bytes, corpus.unit_bytes)),
            *("prepare", str(corpus.folder), "--to", str(self.out)),
            *("--engine", name, *settings, "--validation-share", "0.01", "--filters.languages", "en"),
            *("--filters.language-model", filters.language_model),
            *("--filters.mask-personal", "true", "--filters.near-duplicates", "true"),
        ]

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the command."""
        with self._log.open("ab") as log:
            self._started.append(subprocess.Popen(self._argv, stdout=log, stderr=log))
        return self._started[-1]

    def count(self, pattern: str) -> int:
        """Returns how many files of a stage are finished."""
        return len(list(self.out.with_name(self.out.name + ".partial").glob(pattern)))

    def wait(self, process: subprocess.Popen[bytes], pattern: str, least: int) -> int:
        """Waits until a stage has finished some files; returns how many."""
        end, most = time.monotonic() + STALL_S, -1
        while (count := self.count(pattern)) < least:
            end = time.monotonic() + STALL_S if count > most else end
            most = max(most, count)
            assert process.poll() is None and time.monotonic() < end, self._log.read_text()[-3000:]
            time.sleep(0.05)
        return count

    def kill_at(self, process: subprocess.Popen[bytes], pattern: str, least: int) -> int:
        """Kills the command in the middle of a stage; returns how many files that has finished."""
        count = self.wait(process, pattern, least)
        process.send_signal(signal.SIGKILL)
        process.wait(30.0)
        return count

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        """Waits for the command's end, no longer than `STALL_S` behind the last file that was finished."""
        end, last = time.monotonic() + STALL_S, -1
        while process.poll() is None:
            if (count := self.count("*")) != last:
                end, last = time.monotonic() + STALL_S, count
            assert time.monotonic() < end, self._log.read_text()[-3000:]
            time.sleep(0.2)
        assert process.returncode == 0, self._log.read_text()[-3000:]

    def stop(self) -> None:
        """Kills what still runs of the commands that were started."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait(30.0)


def killed_twice(corpus: Corpus, name: str, folder: Path) -> dict[str, Any]:
    """Prepares by an engine, with two kills of the command and one of a node; returns what came of it."""
    for earlier in (folder / name, *folder.glob(f"set-{name}*")):
        shutil.rmtree(earlier, ignore_errors=True)
    ground: AbstractContextManager[Any] = ENGINES[name][0](folder / name)
    with ground as cluster, ExitStack() as cleanup:
        if name == "slurm":
            os.environ["SLURM_CONF"] = cluster.environment["SLURM_CONF"]
            settings: tuple[str, ...] = ("--slurm.jobs", "3", "--slurm.time", "60")
        else:
            settings = ("--ray.address", cluster.address)
        run, begun = Killed(corpus, name, settings, folder), time.monotonic()
        cleanup.callback(run.stop)
        reading = run.kill_at(run.start(), "read-*.index", max(2, int(0.3 * corpus.files)))
        process = run.start()
        signatures = run.wait(process, "minhash-signature-*.done", max(2, int(0.3 * corpus.files)))
        cluster.kill_node(1)
        encoding = run.kill_at(process, "unit-*.bin", LEAST_FILES // 2)
        # A daemon may take minutes to start on busy cores: too late for the kill before.
        cluster.start_node(1)
        run.finish(run.start())
        seconds = time.monotonic() - begun
        return {
            "seconds, kills included": seconds,
            "finished when killed": f"{reading} read, {encoding} units; node at {signatures} signatures",
        }


class ThisProcess:
    """An engine that runs tasks in this process, whose imports are there already."""

    def start(self, batch: Path, numbers: Sequence[int]) -> None:
        """Runs them."""
        for number in numbers:
            run_batch_task(str(batch), number)

    def why_ended(self) -> str:
        """Returns that nothing runs any more."""
        return "every task has ended"

    def stop(self) -> None:
        """Does nothing."""


def against_datatrove(corpus: Corpus, folder: Path, rounds: int) -> dict[str, Any]:
    """Returns tokens a second and core of both, and the median ratio of the rounds."""
    folder.mkdir(parents=True)
    files = sorted(corpus.folder.iterdir())[: max(1, int(PART_BYTES / corpus.file_bytes))]
    part = folder / "part"
    part.mkdir()
    for path in files:
        os.link(path, part / path.name)
    numbers = itertools.count()

    def ours(tokenizer: str = "bpe") -> TokenSet:
        config = corpus.config(sorted(part.iterdir()), tokenizer=tokenizer)
        return prepare(config, folder / f"set-{next(numbers)}", engine=lambda *_: ThisProcess())

    made = ours()
    tokenizer = str(made.path / "tokenizer.json")
    datatrove = DatatroveOwn(corpus, part, tokenizer)
    datatrove.run(folder / "warm")
    times = [
        (processor_s(lambda: ours(tokenizer)), processor_s(lambda: datatrove.run(folder / f"own-{next(numbers)}")))
        for _ in range(rounds)
    ]
    tokens = len(made.train.tokens) + len(made.validation.tokens)
    return {
        "compared MB": len(files) * corpus.file_bytes / 1e6,
        "prepare tokens/s/core": tokens / statistics.median(own for own, _ in times),
        "datatrove tokens/s/core": tokens / statistics.median(other for _, other in times),
        "prepare / datatrove": statistics.median(other / own for own, other in times),
    }


class DatatroveOwn:
    """The same steps as datatrove's users run them: four pipelines, one after the other.

    Args:
        corpus: its language model is taken.
        part: folder of the text.
        tokenizer: file.
    """

    def __init__(self, corpus: Corpus, part: Path, tokenizer: str) -> None:
        self._corpus, self._part, self._tokenizer = corpus, part, tokenizer

    def run(self, folder: Path) -> None:
        """Runs them; results go to a folder."""
        language = LanguageFilter(["en"], 0.65)
        our_filters._give_model(language, self._corpus.model)
        config, files = our_minhash(), len(list(self._part.iterdir()))
        for rank in range(files):
            writer = ParquetWriter(str(folder / "texts"), output_filename="${rank}.parquet")
            documents: Any = JsonlReader(str(self._part)).run(None, rank, files)
            for block in (language, PIIFormatter(), writer):
                documents = block.run(documents, rank, files)
            _exhaust(documents)
            MinhashDedupSignature(str(folder / "signatures"), config, language="eng").run(
                ParquetReader(str(folder / "texts")).run(None, rank, files), rank, files
            )
        for bucket in range(BUCKETS):
            MinhashDedupBuckets(str(folder / "signatures"), str(folder / "buckets"), config=config).run(
                None, bucket, BUCKETS
            )
        MinhashDedupCluster(str(folder / "buckets"), str(folder / "clusters"), config=config).run(None, 0, 1)
        for rank in range(files):
            tokens = DocumentTokenizer(
                str(folder / "tokens"), self._tokenizer, eos_token="<|endoftext|>", shuffle_documents=False,
                batch_size=100,
            )  # fmt: skip
            kept = MinhashDedupFilter(str(folder / "clusters")).run(
                ParquetReader(str(folder / "texts")).run(None, rank, files), rank, files
            )
            _exhaust(tokens.run(kept, rank, files))


def our_minhash() -> Any:
    """Returns the settings of near-duplicates that `prepare` has."""
    from datatrove.pipeline.dedup.minhash import MinhashConfig

    return MinhashConfig(num_buckets=BUCKETS)


def _exhaust(documents: Any) -> None:
    for _ in documents or ():
        pass


if __name__ == "__main__":
    raise SystemExit(main())
