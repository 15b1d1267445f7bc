"""Text for the tests of `prepare`, and what of an interrupted preparation was finished."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

from meshwright.data.filters import FilterConfig
from meshwright.data.stages import Progress
from meshwright.data.tokens import TokenSet

_ABSENT = [name for name in ("datatrove", "spacy", "xxhash", "fasttext") if importlib.util.find_spec(name) is None]
FILTERS_LACK = f"no {', '.join(_ABSENT)} here: pip install 'meshwright[text]'" if _ABSENT else ""
"""Why no filter can be tried here; empty where all can."""
ENGLISH = [
    "the", "of", "and", "to", "in", "that", "was", "with", "have", "for", "it", "his", "be", "not",
    "but", "they", "which", "you", "were", "her", "all", "this", "one", "had",
]  # fmt: skip
GERMAN = [
    "der", "die", "und", "das", "nicht", "von", "mit", "sich", "auf", "den", "ist", "ein", "dem", "wird",
    "auch", "nach", "bei", "einer", "war", "noch", "wie", "hat", "sie",
]  # fmt: skip
NOUNS = ["".join(random.Random(i).choices("aeiouklmnrst", k=3 + i % 6)) for i in range(400)]
WORDS = ["".join(random.Random(i).choices("abcdeghi", k=1 + i % 7)) for i in range(300)]
WORDS += ["na\u00efve", "\u65e5\u672c", "<|endoftext|>", "12", "3.5", "(", ")", ":", "\n"] * 8


def sentences(generator: random.Random, small_words: list[str], count: int) -> str:
    lines = []
    for _ in range(count):
        words = [generator.choice(small_words if i % 2 else NOUNS) for i in range(12)]
        lines.append(" ".join(words).capitalize() + ".")
    return "\n".join(lines)


def write_texts(folder: Path, files: int = 40, most_lines: int = 90) -> str:
    """Writes files of random words, one of them twice; returns the folder."""
    generator = random.Random(0)
    folder.mkdir()
    for number in range(files):
        lines = [" ".join(generator.choices(WORDS, k=8)) for _ in range(generator.choice((1, 9, most_lines)))]
        (folder / f"{number:02d}.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "copy.txt").write_bytes((folder / "02.txt").read_bytes())
    return str(folder)


def write_language_model(path: Path) -> str:
    """Trains a fastText model that tells "en" from "de"; returns its path."""
    import fasttext

    generator = random.Random(5)
    both = [("en", ENGLISH), ("de", GERMAN)] * 60
    lines = [f"__label__{name} {sentences(generator, words, 2)}".replace("\n", " ") for name, words in both]
    path.with_suffix(".txt").write_text("\n".join(lines))
    # First weights of every word, and one thread: fastText 0.9.2 fills a tenth of them a thread and leaves the rest as
    # the memory was, and threads that race end in NaN now and then.
    known = sorted({word for line in lines for word in line.split()[1:]} | {"</s>"})
    rows = [" ".join([word, *(f"{generator.uniform(-0.125, 0.125):.4f}" for _ in range(8))]) for word in known]
    path.with_suffix(".vec").write_text("\n".join([f"{len(known)} 8", *rows]) + "\n")
    first = str(path.with_suffix(".vec"))
    model = fasttext.train_supervised(
        str(path.with_suffix(".txt")), epoch=40, dim=8, thread=1, verbose=0, pretrainedVectors=first
    )
    model.save_model(str(path))
    return str(path)


def write_filtered_texts(folder: Path, files: int = 8) -> tuple[str, FilterConfig]:
    """Writes files of which every filter drops or changes something; returns their folder, and all filters."""
    generator = random.Random(11)
    folder.mkdir(parents=True)
    (folder / "text").mkdir()
    near = ""
    for number in range(files):
        texts = [sentences(generator, ENGLISH, 14) for _ in range(6)]
        texts[1] += "\nWrite to jane.doe@uni-bonn.de from 8.8.4.4."
        # A word of the first document of the file before is another one here.
        copy = near.replace(near.split(" ")[40], "changed", 1) if near else texts[2]
        near = texts[0]
        code = sentences(generator, ENGLISH, 14).replace(".", " {x}.", 1)
        lines = "The ships left the harbour of that town with the tide.\n" * 20
        dropped = [sentences(generator, GERMAN, 14), sentences(generator, ENGLISH, 3), code, lines]
        everything = [*texts, copy, *dropped]
        path = folder / "text" / f"{number}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in everything))
    filters = FilterConfig(
        languages=("en",), language_model=write_language_model(folder / "model.bin"), mask_personal=True,
        quality=("gopher-quality", "gopher-repetition", "c4", "fineweb"), near_duplicates=True,
    )  # fmt: skip
    return str(folder / "text"), filters


def check_filtered(path: Path) -> None:
    """Asserts that each filter of `write_filtered_texts` did something in a set."""
    made = TokenSet.open(path)
    text = made.tokenizer().decode([*made.train.tokens, *made.validation.tokens])
    assert "uni-bonn" not in text and "8.8.4.4" not in text and "@example" in text
    rules = {"LanguageFilter", "gopher_short_doc", "dup_line_frac", "curly_bracket"}
    assert rules <= made.manifest["documents_filtered"].keys() and made.manifest["documents_dropped"] > 0


def contents(path: Path) -> dict[str, bytes]:
    """Returns every file of a prepared set."""
    return {file.name: file.read_bytes() for file in path.iterdir()}


class FinishedFiles:
    """Files that finished tasks have written: a task that runs again replaces its file, which then is another inode.

    Args:
        folder: working directory of the preparation.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inodes: dict[Path, tuple[int, int]] = {}
        self.checks = 0

    def list(self, pattern: str) -> list[Path]:
        """Returns the files that are there now."""
        return sorted(self._folder.glob(pattern))

    def remember(self, pattern: str) -> None:
        """Notes which files are there."""
        self._inodes |= {path: _identity(path) for path in self.list(pattern)}

    def remembered(self) -> dict[Path, tuple[int, int]]:
        """Returns the files that were noted."""
        return dict(self._inodes)

    def identities(self, paths: Iterable[Path]) -> dict[Path, tuple[int, int]]:
        """Returns the identities of those files that are there."""
        found = {}
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                found[path] = _identity(path)
        return found

    def check_at_end_of(self, stage: str) -> Callable[[Progress], None]:
        """Returns a report that, when a stage ends, compares the files with those remembered."""

        def report(progress: Progress) -> None:
            if progress.stage == stage and progress.done_bytes == progress.total_bytes:
                self.checks += 1
                assert self._inodes and {path: _identity(path) for path in self._inodes} == self._inodes

        return report


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns
