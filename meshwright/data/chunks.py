"""Checksums of token files in chunks, verified when a chunk is first read: training verifies the text as it goes.

A hash of the whole file would cost a pass over the text before the first step. A chunk is no longer than a disk's
read-ahead, so that verifying a row of some thousand tokens reads little more than the row: 64 KiB, 40 µs at 1 to
4 GiB/s of CRC-32, in the prefetching thread. CRC-32 detects every burst error of up to 32 bits; it stops no forger.
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
    """Writes the chunk checksums of files into `SUMS`; returns the manifest's entry: chunk size and file names."""
    with whole_file(folder / SUMS) as sums:
        for name in names:
            with (folder / name).open("rb") as file:
                while block := file.read(_READ_CHUNKS * CHUNK_BYTES):
                    checksums = [
                        zlib.crc32(block[start : start + CHUNK_BYTES]) for start in range(0, len(block), CHUNK_BYTES)
                    ]
                    sums.write(np.array(checksums, dtype="<u4").tobytes())
    return {"bytes": CHUNK_BYTES, "files": list(names)}


class ChunkSums:
    """The chunk checksums of one file, and which chunks were verified.

    Args:
        path: of the file.
        size: its bytes.
        sums: (chunks,) uint32, CRC-32 of each chunk.
        chunk_bytes: size of a chunk.
    """

    def __init__(self, path: Path, size: int, sums: NDArray[np.uint32], chunk_bytes: int) -> None:
        self._path, self._size, self._sums, self._chunk_bytes = path, size, sums, chunk_bytes
        self._checked = np.zeros(len(sums), dtype=bool)

    @classmethod
    def open_all(cls, folder: Path, manifest: Mapping[str, Any]) -> dict[str, Self]:
        """Opens the checksums of a token set's files, by name.

        Raises:
            DataError: when the file of checksums differs from the manifest's hash.
        """
        chunk_table, files = manifest["chunks"], manifest["files"]
        # Number of chunks of each file, rounded up; the checksums of all files lie one after the other.
        counts = [-(-files[name]["bytes"] // chunk_table["bytes"]) for name in chunk_table["files"]]
        path = folder / SUMS
        # Checksums are themselves covered by the manifest's SHA-256.
        all_sums = np.fromfile(path, dtype="<u4")
        if hashlib.sha256(all_sums.tobytes()).hexdigest() != files[SUMS]["sha256"] or len(all_sums) != sum(counts):
            raise DataError(f"{path} is damaged: its SHA-256 is not the manifest's; delete {folder} and prepare again")
        sums_by_file = np.split(all_sums, np.cumsum(counts)[:-1])
        return {
            name: cls(folder / name, files[name]["bytes"], file_sums, chunk_table["bytes"])
            for name, file_sums in zip(chunk_table["files"], sums_by_file)
        }

    def check(self, data: NDArray[np.uint8], start: int, stop: int) -> list[tuple[int, int]]:
        """Verifies the chunks that hold bytes [start, stop), unless they were verified before.

        Args:
            data: (bytes,) uint8, the whole file mapped into memory.
            start: first byte.
            stop: byte after the last.

        Returns:
            (start, stop) in bytes of each chunk that was verified by this call.

        Raises:
            DataError: when a chunk is damaged, naming file and chunk.
        """
        size, compared = self._chunk_bytes, []
        # A chunk is verified whole, once a process: later reads of it cost nothing.
        for chunk in range(start // size, -(-min(stop, self._size) // size)):
            # Verified once a process; the mapped pages may be read again at no cost.
            if self._checked[chunk]:
                continue
            # The last chunk may be shorter.
            chunk_start, chunk_stop = chunk * size, min((chunk + 1) * size, self._size)
            if zlib.crc32(data[chunk_start:chunk_stop].tobytes()) != int(self._sums[chunk]):
                raise DataError(
                    f"{self._path} is damaged: chunk {chunk} (bytes {chunk_start} to {chunk_stop}) doesn't give its "
                    f"checksum; delete {self._path.parent} and prepare again, and look at the disk"
                )
            self._checked[chunk] = True
            compared.append((chunk_start, chunk_stop))
        return compared
