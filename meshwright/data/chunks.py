"""Checksums of token files in chunks, compared as a chunk is first read: an epoch is checked while it is trained on.

A whole-file hash would cost a pass over the text before the first step. A chunk is no longer than what a disk reads
ahead, so that a row of some thousand tokens costs little more than itself: 64 KiB, at 1 to 4 GiB/s of CRC-32 40 µs,
in the thread that reads ahead. CRC-32 finds every error of up to 32 bits in a row; it is no seal against a forger.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from meshwright.data.files import whole_file
from meshwright.errors import DataError

SUMS = "chunks.crc32"
"""Little-endian uint32 of each chunk of each file, one file after the other."""
CHUNK_BYTES = 1 << 16
_READ_CHUNKS = 64


def write_sums(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Writes the checksums of files beside them; returns the size of a chunk, and the files, for the manifest."""
    with whole_file(folder / SUMS) as sums:
        for name in names:
            with (folder / name).open("rb") as file:
                while block := file.read(_READ_CHUNKS * CHUNK_BYTES):
                    found = [zlib.crc32(block[at : at + CHUNK_BYTES]) for at in range(0, len(block), CHUNK_BYTES)]
                    sums.write(np.array(found, dtype="<u4").tobytes())
    return {"bytes": CHUNK_BYTES, "files": list(names)}


class ChunkSums:
    """The checksums of one file.

    Args:
        path: of the file.
        size: its bytes.
        sums: (chunks,) uint32.
        chunk_bytes: of a chunk.
    """

    def __init__(self, path: Path, size: int, sums: NDArray[np.uint32], chunk_bytes: int) -> None:
        self._path, self._size, self._sums, self._chunk_bytes = path, size, sums, chunk_bytes
        self._checked = np.zeros(len(sums), dtype=bool)

    @classmethod
    def open_all(cls, folder: Path, manifest: Mapping[str, Any]) -> dict[str, Self]:
        """Opens the checksums of a set's files, by name.

        Raises:
            DataError: when they aren't those of the manifest.
        """
        table, files = manifest["chunks"], manifest["files"]
        counts = [-(-files[name]["bytes"] // table["bytes"]) for name in table["files"]]
        path = folder / SUMS
        whole = np.fromfile(path, dtype="<u4")
        if hashlib.sha256(whole.tobytes()).hexdigest() != files[SUMS]["sha256"] or len(whole) != sum(counts):
            raise DataError(f"{path} is damaged: its SHA-256 is not the manifest's; delete {folder} and prepare again")
        parts = np.split(whole, np.cumsum(counts)[:-1])
        return {
            name: cls(folder / name, files[name]["bytes"], part, table["bytes"])
            for name, part in zip(table["files"], parts)
        }

    def check(self, data: NDArray[np.uint8], start: int, stop: int) -> list[tuple[int, int]]:
        """Compares the chunks that hold bytes [start, stop), unless they were compared before.

        Args:
            data: (bytes,) the whole file, mapped.
            start: first byte.
            stop: byte after the last.

        Returns:
            The stretches of bytes that were compared now.

        Raises:
            DataError: names the file and the chunk.
        """
        size, compared = self._chunk_bytes, []
        for chunk in range(start // size, -(-min(stop, self._size) // size)):
            if self._checked[chunk]:
                continue
            first, last = chunk * size, min((chunk + 1) * size, self._size)
            if zlib.crc32(data[first:last].tobytes()) != int(self._sums[chunk]):
                raise DataError(
                    f"{self._path} is damaged: chunk {chunk} (bytes {first} to {last}) doesn't give its checksum; "
                    f"delete {self._path.parent} and prepare again, and look at the disk"
                )
            self._checked[chunk] = True
            compared.append((first, last))
        return compared
