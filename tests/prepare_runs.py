"""Text for the tests of `prepare`, and what of an interrupted preparation was finished."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable
from pathlib import Path

from meshwright.data.stages import Progress

WORDS = ["".join(random.Random(i).choices("abcdeghi", k=1 + i % 7)) for i in range(300)]
WORDS += ["na\u00efve", "\u65e5\u672c", "<|endoftext|>", "12", "3.5", "(", ")", ":", "\n"] * 8


def write_texts(folder: Path, files: int = 40, most_lines: int = 90) -> str:
    """Writes files of random words, one of them twice; returns the folder."""
    generator = random.Random(0)
    folder.mkdir()
    for number in range(files):
        lines = [" ".join(generator.choices(WORDS, k=8)) for _ in range(generator.choice((1, 9, most_lines)))]
        (folder / f"{number:02d}.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "copy.txt").write_bytes((folder / "02.txt").read_bytes())
    return str(folder)


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
