"""What a run's nodes printed, in the files of its launch folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright.jobs.run_directory import LAUNCH


class LaunchOutput:
    """Reads the output files of a run as they grow.

    Args:
        run_dir: the run's directory.
        from_now: leave out what stands there already.
    """

    def __init__(self, run_dir: Path, from_now: bool = False) -> None:
        self._folder = run_dir / LAUNCH
        self._positions = {path: path.stat().st_size for path in self.paths()} if from_now else {}

    def paths(self) -> list[Path]:
        """Returns the files, the one that was written last at the end."""
        return sorted(self._folder.glob("*.out"), key=lambda path: path.stat().st_mtime)

    def lines(self, ended: bool) -> Iterator[str]:
        """Yields the lines since the last call.

        Args:
            ended: whether nobody writes any more; before, only whole lines are taken.
        """
        for path in self.paths():
            with path.open("rb") as file:
                file.seek(self._positions.get(path, 0))
                text = file.read()
            text = text if ended else text[: text.rfind(b"\n") + 1]
            self._positions[path] = self._positions.get(path, 0) + len(text)
            yield from text.decode(errors="replace").splitlines()
