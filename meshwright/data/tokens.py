"""Prepared text: token files mapped into memory, their document ends, and the manifest that verifies them."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from meshwright.data.chunks import SUMS, ChunkSums
from meshwright.data.files import sha256
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import DataError
from meshwright.names import plain_name
from meshwright.records import parse_json

MANIFEST = "manifest.json"
VERSION = 2
"""Version of the files' format: since 2 with checksums of chunks, and of the manifest itself."""
CHECKED = ("train.bin", "train.idx", "validation.bin", "validation.idx", "validation.txt")
"""Files with chunk checksums in every set; all other files are small, and verified when a set is opened."""
ANSWERS = ("train.answers", "validation.answers")
"""Files of a set in which only answers are targets, beside `CHECKED`."""
SPLITS = ("train", "validation")
DTYPES = ("<u2", "<u4")
"""Types of token ids in files."""
_BASELINE_BYTES = 64 << 20
_SMALLEST_XZ_DICT = 4096
"""Source: lzma/lzma12.h, LZMA_DICT_SIZE_MIN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStream:
    """One of the two token streams of a set."""

    name: str
    """``train`` or ``validation``."""
    tokens: NDArray[np.unsignedinteger]
    """(tokens,) little-endian uint16 or uint32, mapped into memory."""
    ends: NDArray[np.int64]
    """(documents,) int64, for each document the index after its last token, mapped into memory."""
    text_bytes: int
    """UTF-8 bytes of the text behind the tokens."""
    fingerprint: str
    """Hash of the whole set's contents."""
    vocab_size: int | None = None
    """Bound of the ids; None where it is unknown."""
    answers: NDArray[np.int64] | None = None
    """(runs, 2) int64, ascending, of each run of tokens that are to be learned the first and the one after its last,
    mapped into memory; None where all are."""
    begin_tokens: int = 0
    """Tokens that the tokenizer put before documents, of which there is no text."""
    answer_bytes: int = 0
    """UTF-8 bytes of the text behind those."""
    sums: Mapping[str, ChunkSums] = field(default_factory=dict)
    """Chunk checksums of ``bin``, ``idx`` and ``answers``; empty for arrays in memory."""

    def read(self, start: int, stop: int) -> NDArray[np.unsignedinteger]:
        """Reads tokens [start, stop), clipped to the stream, from chunks that it verifies first.

        Returns:
            (tokens,) uint16 or uint32, a view of the mapped file.

        Raises:
            DataError: when a chunk is damaged, naming file and chunk.
        """
        if "bin" in self.sums:
            token_bytes = self.tokens.dtype.itemsize
            # Only chunks verified by this call need a look at their ids; each is looked at once.
            for byte_start, byte_stop in self.sums["bin"].check(
                self.tokens.view(np.uint8), start * token_bytes, stop * token_bytes
            ):
                # A tokenizer change or a damaged disk could give ids beyond the embedding's rows.
                self._check_ids(byte_start // token_bytes, -(-byte_stop // token_bytes))
        return self.tokens[start:stop]

    def _check_ids(self, start: int, stop: int) -> None:
        largest = int(self.tokens[start:stop].max(initial=0))
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise DataError(
                f"the {self.name} split holds token {largest}, its vocabulary has {self.vocab_size}; prepare it again"
            )

    def check_index(self) -> None:
        """Verifies the whole index of document ends, which every step searches.

        Raises:
            DataError: when it is damaged, or its ends don't ascend to the split's length at most.
        """
        if "idx" not in self.sums or not len(self.ends):
            return
        self.sums["idx"].check(self.ends.view(np.uint8), 0, self.ends.nbytes)
        # Searches in the index are only right if ends ascend.
        if self.ends[0] < 0 or self.ends[-1] > len(self.tokens) or bool((self.ends[1:] < self.ends[:-1]).any()):
            raise DataError(f"the {self.name} split's index isn't one of {len(self.tokens)} tokens; prepare it again")

    def check_answers(self) -> None:
        """Verifies the runs of answers, which every step searches.

        Raises:
            DataError: when they are damaged, or don't ascend within the split.
        """
        if self.answers is None or not len(self.answers):
            return
        if "answers" in self.sums:
            self.sums["answers"].check(self.answers.view(np.uint8).reshape(-1), 0, self.answers.nbytes)
        edges = self.answers.reshape(-1)
        # Runs of two units may touch, and none is empty.
        if (
            edges[0] < 1
            or edges[-1] > len(self.tokens)
            or bool((edges[1:] - edges[:-1] < (np.arange(1, len(edges)) % 2)).any())
        ):
            raise DataError(
                f"the {self.name} split's answers aren't runs of {len(self.tokens)} tokens; prepare it again"
            )

    def targets(self) -> int:
        """Returns the number of tokens that are learned: all but the first, or those of answers."""
        if self.answers is None:
            return max(0, len(self.tokens) - 1)
        return int((self.answers[:, 1] - self.answers[:, 0]).sum())

    def bits_per_byte(self, loss: float) -> float:
        """Converts a mean loss over this split's targets to bits per byte of their text.

        Source: Gao et al. 2020 (The Pile), section 3.1: L_T / L_B * loss / ln 2.

        Args:
            loss: mean cross-entropy, nats per target token.
        """
        text_bytes, text_tokens = self.text_bytes, self.targets()
        if self.answers is not None:
            text_bytes = self.answer_bytes
        elif self.begin_tokens:
            # What was put before documents is no text, and each document's first token is a target behind it.
            text_tokens = len(self.tokens) - self.begin_tokens
        return loss / math.log(2.0) * text_tokens / max(1, text_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSet:
    """A directory of prepared token files, written by `prepare`."""

    path: Path
    """The directory."""
    manifest: Mapping[str, Any]
    """Contents of ``manifest.json``."""
    train: TokenStream
    """Training split."""
    validation: TokenStream
    """Held-out split; empty when the share was 0."""
    sums: Mapping[str, ChunkSums]
    """Chunk checksums of `CHECKED` files, by name."""

    @classmethod
    def open(cls, path: str | Path, verify: bool = False) -> Self:
        """Opens a prepared directory and checks that its files have the manifest's sizes.

        Args:
            path: the directory.
            verify: also compare the files' SHA-256 with the manifest's (reads every byte).

        Raises:
            DataError: when the directory isn't a prepared set, or a file is missing, truncated or changed.
        """
        path = Path(path)
        manifest = read_manifest(path)
        for name, facts in manifest["files"].items():
            # Small files are hashed now; large ones are verified by chunk as they are read.
            small = name not in checked_files(manifest) and name != SUMS
            _check_file(path, plain_name(name, path / MANIFEST, DataError), facts, verify or small)
        sums = ChunkSums.open_all(path, manifest)
        splits = {name: _open_split(path, name, manifest, sums) for name in SPLITS}
        return cls(path=path, manifest=manifest, sums=sums, **splits)

    @property
    def fingerprint(self) -> str:
        """Hash of the token files, the index and the tokenizer: equal sets give equal rows anywhere."""
        return str(self.manifest["fingerprint"])

    @property
    def vocab_size(self) -> int:
        """Largest token id that the tokenizer can give, plus one."""
        return int(self.manifest["vocab_size"])

    @property
    def eos_id(self) -> int | None:
        """Token that ends each document, or None where the tokenizer has none."""
        value = self.manifest["eos_id"]
        return None if value is None else int(value)

    def held_out_text(self, limit_bytes: int) -> bytes:
        """Returns the first bytes of the held-out documents, one after the other, as UTF-8.

        Raises:
            DataError: when a chunk of it is damaged.
        """
        path = self.path / "validation.txt"
        if not (size := path.stat().st_size):
            return b""
        # Mapped, so that verifying and reading touch only the first bytes.
        text = np.memmap(path, dtype=np.uint8, mode="r")
        self.sums[path.name].check(text, 0, min(size, limit_bytes))
        return text[:limit_bytes].tobytes()

    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer."""
        return load_tokenizer(self.path / "tokenizer.json")


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads the manifest of a prepared directory.

    Raises:
        DataError: when it is missing, damaged or of another format.
    """
    try:
        manifest = parse_json((path / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path} is not a prepared set: it has no {MANIFEST}; run meshwright prepare") from None
    except ValueError as error:
        raise DataError(f"{path / MANIFEST} is damaged ({error}); delete {path} and prepare again") from None
    if not isinstance(manifest, dict) or manifest.get("version") != VERSION:
        version = manifest.get("version") if isinstance(manifest, dict) else None
        raise DataError(
            f"{path} has format version {version}, whose files have no checksums of their chunks where it is 1; this "
            f"program reads {VERSION}; prepare it again"
        )
    # Rendering must give the same bytes: no byte of the file is free to change.
    if render_manifest(manifest) != (path / MANIFEST).read_bytes() or not _is_complete(manifest):
        raise DataError(f"{path / MANIFEST} is damaged: it doesn't give its checksum; delete {path} and prepare again")
    return manifest


def render_manifest(manifest: Mapping[str, Any]) -> bytes:
    """Renders a manifest with its checksum, as the only file contents that `read_manifest` accepts."""
    body = {name: value for name, value in manifest.items() if name != "checksum"}
    checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps(body | {"checksum": checksum}, indent=2, sort_keys=True).encode("utf-8")


def fingerprint_of(files: Mapping[str, Mapping[str, Any]], dtype: str) -> str:
    """Hashes a set's contents: token files, indexes, tokenizer and the ids' type."""
    # Times, paths and settings don't enter: equal contents have equal fingerprints.
    identity = [files[name] for name in ("train.bin", "train.idx", "validation.bin", "validation.idx")]
    identity += [files[name] for name in ANSWERS if name in files]
    return hashlib.sha256(json.dumps([identity, files["tokenizer.json"]["sha256"], dtype]).encode()).hexdigest()


def learns_answers(manifest: Mapping[str, Any]) -> bool:
    """Returns whether only answers are targets in a set."""
    return bool(manifest["config"].get("targets") == "answers")


def checked_files(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the files of a set that have chunk checksums."""
    return CHECKED + ANSWERS if learns_answers(manifest) else CHECKED


def _is_complete(manifest: Mapping[str, Any]) -> bool:
    """Returns whether a manifest has every field that its readers rely on, with the right types."""
    try:
        files, splits, chunks = manifest["files"], manifest["splits"], manifest["chunks"]
        counts = [splits[name][count_name] for name in SPLITS for count_name in ("tokens", "documents", "text_bytes")]
        counts += [splits[name].get("begin_tokens", 0) for name in SPLITS]
        counts += [splits[name]["answer_bytes"] for name in SPLITS if learns_answers(manifest)]
        sizes = [facts["bytes"] for facts in files.values()] + counts
        checked = set(checked_files(manifest))
        has_files = {*checked, SUMS, "tokenizer.json"} <= files.keys() and checked == set(chunks["files"])
        has_hashes = all(isinstance(facts["sha256"], str) for facts in files.values())
        has_sizes = all(type(size) is int and size >= 0 for size in sizes) and isinstance(manifest["key"], str)
        has_vocabulary = isinstance(manifest["vocab_size"], int) and isinstance(manifest["eos_id"], int | None)
        has_types = manifest["dtype"] in DTYPES and type(chunks["bytes"]) is int and chunks["bytes"] > 0
        fingerprint_matches = manifest["fingerprint"] == fingerprint_of(files, manifest["dtype"])
        return bool(has_files and has_hashes and has_sizes and has_vocabulary and has_types and fingerprint_matches)
    except (KeyError, TypeError, AttributeError):
        return False


def _check_file(path: Path, name: str, file_facts: Mapping[str, Any], verify: bool) -> None:
    """Compares a file with the manifest: its size, and with ``verify`` its SHA-256."""
    file = path / name
    size = file.stat().st_size if file.is_file() else None
    cure = f"delete {path} and prepare again"
    if size is None:
        raise DataError(f"{file} is missing, the manifest says {file_facts['bytes']} bytes; {cure}")
    if size != file_facts["bytes"]:
        fault = "truncated" if size < file_facts["bytes"] else "too long"
        raise DataError(f"{file} is {fault}: {size} bytes, the manifest says {file_facts['bytes']}; {cure}")
    if verify and sha256(file) != file_facts["sha256"]:
        raise DataError(f"{file} was changed: its SHA-256 is not the manifest's; {cure}")


def _open_split(path: Path, name: str, manifest: Mapping[str, Any], sums: Mapping[str, ChunkSums]) -> TokenStream:
    """Maps the tokens and document ends of a split."""
    split_facts = manifest["splits"][name]
    # Ends are stored unsigned and mapped signed: numpy compares unsigned with signed as float64, copying the index.
    document_ends = _map_array(path / f"{name}.idx", "<i8", split_facts["documents"])
    tokens = _map_array(path / f"{name}.bin", manifest["dtype"], split_facts["tokens"])
    kinds: tuple[str, ...] = ("bin", "idx")
    answers = None
    if learns_answers(manifest):
        kinds, file = (*kinds, "answers"), path / f"{name}.answers"
        answers = _map_array(file, "<i8", file.stat().st_size // 8).reshape(-1, 2)
    return TokenStream(
        name=name,
        tokens=tokens,
        ends=document_ends,
        text_bytes=split_facts["text_bytes"],
        fingerprint=manifest["fingerprint"],
        vocab_size=manifest["vocab_size"],
        answers=answers,
        answer_bytes=split_facts.get("answer_bytes", 0),
        begin_tokens=split_facts.get("begin_tokens", 0),
        sums={kind: sums[f"{name}.{kind}"] for kind in kinds},
    )


def _map_array(path: Path, dtype: str, count: int) -> NDArray[Any]:
    """Maps a file as an array: (count,) of ``dtype``."""
    if path.stat().st_size != count * np.dtype(dtype).itemsize:
        raise DataError(f"{path} does not hold the {count} entries that the manifest counts; prepare it again")
    if count == 0:
        return np.empty(0, dtype=dtype)  # an empty file can't be mapped
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))


def compression_baselines(token_set: TokenSet, limit_bytes: int = _BASELINE_BYTES) -> dict[str, float]:
    """Compresses the held-out text with gzip -9 and xz -9e.

    Args:
        token_set: the prepared text.
        limit_bytes: most bytes to compress, from the start.

    Returns:
        ``gzip`` and ``xz`` in bits per byte, and ``bytes``, the size of the input; empty without held-out text.
    """
    data = token_set.held_out_text(limit_bytes)
    # Of answers alone no compressor is asked: it would see them without what they answer.
    if not data or learns_answers(token_set.manifest):
        return {}
    # xz -9 clears tables for 64 MiB of text, 40 ms and as much memory; those for this text find the same matches.
    xz = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": max(len(data), _SMALLEST_XZ_DICT)}
    packed = {
        "gzip": gzip.compress(data, compresslevel=9, mtime=0),
        "xz": lzma.compress(data, filters=[xz]),
    }
    return {name: 8.0 * len(result) / len(data) for name, result in packed.items()} | {"bytes": float(len(data))}
