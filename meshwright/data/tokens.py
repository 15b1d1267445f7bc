"""Prepared text: token files mapped into memory, their document ends, and the manifest that vouches for them."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from meshwright.data.chunks import SUMS, ChunkSums
from meshwright.data.files import sha256
from meshwright.errors import DataError
from meshwright.names import plain_name
from meshwright.records import parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MANIFEST = "manifest.json"
VERSION = 2
"""Version of the files' format: since 2 with checksums of chunks, and of the manifest itself."""
CHECKED = ("train.bin", "train.idx", "validation.bin", "validation.idx", "validation.txt")
"""Files whose chunks have checksums; the others are small, and compared whole when a set is opened."""
SPLITS = ("train", "validation")
DTYPES = ("<u2", "<u4")
"""Of token ids."""
_BASELINE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStream:
    """One of the two token streams of a set."""

    name: str
    """``train`` or ``validation``."""
    tokens: NDArray[np.unsignedinteger]
    """(tokens,) little-endian uint16 or uint32, mapped into memory."""
    ends: NDArray[np.int64]
    """(documents,) for each document the place after its last token, mapped into memory."""
    text_bytes: int
    """UTF-8 bytes of the text behind the tokens."""
    fingerprint: str
    """Hash of the whole set's contents."""
    vocab_size: int | None = None
    """Ids are below it; None where there is none to hold them against."""
    sums: Mapping[str, ChunkSums] = field(default_factory=dict)
    """Checksums of ``bin`` and ``idx``; none for arrays in memory."""

    def read(self, start: int, stop: int) -> NDArray[np.unsignedinteger]:
        """Returns tokens [start, stop), as far as there are any, from chunks whose checksums hold.

        Raises:
            DataError: when a chunk is damaged: file and chunk are named.
        """
        if "bin" in self.sums:
            width = self.tokens.dtype.itemsize
            for first, last in self.sums["bin"].check(self.tokens.view(np.uint8), start * width, stop * width):
                self._check_ids(first // width, -(-last // width))
        return self.tokens[start:stop]

    def _check_ids(self, start: int, stop: int) -> None:
        largest = int(self.tokens[start:stop].max(initial=0))
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise DataError(
                f"the {self.name} split holds token {largest}, its vocabulary has {self.vocab_size}; prepare it again"
            )

    def check_index(self) -> None:
        """Compares the whole index of document ends, which is searched at each step.

        Raises:
            DataError: when it is damaged, or its ends don't ascend to the split's length at most.
        """
        if "idx" not in self.sums or not len(self.ends):
            return
        self.sums["idx"].check(self.ends.view(np.uint8), 0, self.ends.nbytes)
        if self.ends[0] < 0 or self.ends[-1] > len(self.tokens) or bool((self.ends[1:] < self.ends[:-1]).any()):
            raise DataError(f"the {self.name} split's index isn't one of {len(self.tokens)} tokens; prepare it again")

    def bits_per_byte(self, loss: float) -> float:
        """Converts a mean loss over this split's targets to bits per byte of its text.

        All tokens but the first are targets. Source: Gao et al. 2020 (The Pile), section 3.1: L_T / L_B * loss / ln 2.

        Args:
            loss: mean cross-entropy, nats per target token.
        """
        return loss / math.log(2.0) * max(0, len(self.tokens) - 1) / max(1, self.text_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSet:
    """A directory that `prepare` made."""

    path: Path
    """The directory."""
    manifest: Mapping[str, Any]
    """Contents of ``manifest.json``."""
    train: TokenStream
    """What is trained on."""
    validation: TokenStream
    """What is held out; empty when the share was 0."""
    sums: Mapping[str, ChunkSums]
    """Checksums of the files that are read in parts."""

    @classmethod
    def open(cls, path: str | Path, verify: bool = False) -> Self:
        """Opens a prepared directory and checks that its files are as long as the manifest says.

        Args:
            path: the directory.
            verify: also compare the files' SHA-256 with the manifest's (reads every byte).

        Raises:
            DataError: when the directory isn't a prepared set, or a file is missing, truncated or changed.
        """
        path = Path(path)
        manifest = read_manifest(path)
        for name, facts in manifest["files"].items():
            # Small ones at once; the checksums of chunks when the first is needed.
            small = name not in CHECKED and name != SUMS
            _check_file(path, plain_name(name, path / MANIFEST, DataError), facts, verify or small)
        sums = ChunkSums.open_all(path, manifest)
        splits = {name: _split(path, name, manifest, sums) for name in SPLITS}
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

    def held_out_text(self, most_bytes: int) -> bytes:
        """Returns the first bytes of the held-out documents, one after the other, as UTF-8.

        Raises:
            DataError: when what is read is damaged.
        """
        path = self.path / "validation.txt"
        if not (size := path.stat().st_size):
            return b""
        text = np.memmap(path, dtype=np.uint8, mode="r")
        self.sums[path.name].check(text, 0, min(size, most_bytes))
        return text[:most_bytes].tobytes()

    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer."""
        from meshwright.data.tokenizer import load_tokenizer

        return load_tokenizer(self.path / "tokenizer.json")


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads the manifest of a prepared directory.

    Raises:
        DataError: when there is none, or it isn't one of this format.
    """
    try:
        manifest = parse_json((path / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path} is not a prepared set: it has no {MANIFEST}; run meshwright prepare") from None
    except ValueError as error:
        raise DataError(f"{path / MANIFEST} is damaged ({error}); delete {path} and prepare again") from None
    if not isinstance(manifest, dict) or manifest.get("version") != VERSION:
        found = manifest.get("version") if isinstance(manifest, dict) else None
        raise DataError(
            f"{path} has format version {found}, whose files have no checksums of their chunks where it is 1; this "
            f"program reads {VERSION}; prepare it again"
        )
    if render_manifest(manifest) != (path / MANIFEST).read_bytes() or not _is_whole(manifest):
        raise DataError(f"{path / MANIFEST} is damaged: it doesn't give its checksum; delete {path} and prepare again")
    return manifest


def render_manifest(manifest: Mapping[str, Any]) -> bytes:
    """Returns a manifest's only valid file contents, the checksum of the rest in it."""
    body = {name: value for name, value in manifest.items() if name != "checksum"}
    checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps(body | {"checksum": checksum}, indent=2, sort_keys=True).encode("utf-8")


def fingerprint_of(files: Mapping[str, Mapping[str, Any]], dtype: str) -> str:
    """Returns the hash of a set's contents: of token files, indexes and tokenizer."""
    identity = [files[name] for name in ("train.bin", "train.idx", "validation.bin", "validation.idx")]
    return hashlib.sha256(json.dumps([identity, files["tokenizer.json"]["sha256"], dtype]).encode()).hexdigest()


def _is_whole(manifest: Mapping[str, Any]) -> bool:
    """Whether everything stands in a manifest that its readers take for granted, of the right types."""
    try:
        files, splits, chunks = manifest["files"], manifest["splits"], manifest["chunks"]
        counts = [splits[name][what] for name in SPLITS for what in ("tokens", "documents", "text_bytes")]
        sizes = [facts["bytes"] for facts in files.values()] + counts
        known = {*CHECKED, SUMS, "tokenizer.json"} <= files.keys() and set(CHECKED) == set(chunks["files"])
        sums = all(isinstance(facts["sha256"], str) for facts in files.values())
        plain = all(type(size) is int and size >= 0 for size in sizes) and isinstance(manifest["key"], str)
        tokens = isinstance(manifest["vocab_size"], int) and isinstance(manifest["eos_id"], int | None)
        kinds = manifest["dtype"] in DTYPES and type(chunks["bytes"]) is int and chunks["bytes"] > 0
        same = manifest["fingerprint"] == fingerprint_of(files, manifest["dtype"])
        return bool(known and sums and plain and tokens and kinds and same)
    except (KeyError, TypeError, AttributeError):
        return False


def _check_file(path: Path, name: str, facts: Mapping[str, Any], verify: bool) -> None:
    file = path / name
    size = file.stat().st_size if file.is_file() else None
    cure = f"delete {path} and prepare again"
    if size is None:
        raise DataError(f"{file} is missing, the manifest says {facts['bytes']} bytes; {cure}")
    if size != facts["bytes"]:
        word = "truncated" if size < facts["bytes"] else "too long"
        raise DataError(f"{file} is {word}: {size} bytes, the manifest says {facts['bytes']}; {cure}")
    if verify and sha256(file) != facts["sha256"]:
        raise DataError(f"{file} was changed: its SHA-256 is not the manifest's; {cure}")


def _split(path: Path, name: str, manifest: Mapping[str, Any], sums: Mapping[str, ChunkSums]) -> TokenStream:
    facts = manifest["splits"][name]
    # Ends are stored unsigned and mapped signed: numpy compares unsigned with signed as float64, copying the index.
    ends = _map(path / f"{name}.idx", "<i8", facts["documents"])
    tokens = _map(path / f"{name}.bin", manifest["dtype"], facts["tokens"])
    return TokenStream(
        name=name,
        tokens=tokens,
        ends=ends,
        text_bytes=facts["text_bytes"],
        fingerprint=manifest["fingerprint"],
        vocab_size=manifest["vocab_size"],
        sums={kind: sums[f"{name}.{kind}"] for kind in ("bin", "idx")},
    )


def _map(path: Path, dtype: str, count: int) -> NDArray[Any]:
    if path.stat().st_size != count * np.dtype(dtype).itemsize:
        raise DataError(f"{path} does not hold the {count} entries that the manifest counts; prepare it again")
    if count == 0:
        return np.empty(0, dtype=dtype)  # an empty file can't be mapped
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))


def check_vocabulary(token_set: TokenSet, model_vocab: int) -> None:
    """Refuses tokens that a model's embedding has no row for.

    Args:
        token_set: the prepared text.
        model_vocab: rows of the model's embedding (V).

    Raises:
        DataError: when the set's vocabulary is the larger one.
    """
    if token_set.vocab_size > model_vocab:
        raise DataError(
            f"the text's vocabulary has {token_set.vocab_size} tokens, the model's {model_vocab}: token ids must be "
            f"below the model's; set data.vocab_size to {model_vocab} or less, take the model's own tokenizer "
            f"(data.tokenizer), or give the model a vocabulary of {token_set.vocab_size}"
        )


def compression_baselines(token_set: TokenSet, limit_bytes: int = _BASELINE_BYTES) -> dict[str, float]:
    """Compresses the held-out text with gzip -9 and xz -9e.

    Args:
        token_set: the prepared text.
        limit_bytes: compress no more than the first so many bytes.

    Returns:
        ``gzip`` and ``xz`` in bits per byte, and ``bytes``, what was compressed; empty without held-out text.
    """
    data = token_set.held_out_text(limit_bytes)
    if not data:
        return {}
    packed = {
        "gzip": gzip.compress(data, compresslevel=9, mtime=0),
        "xz": lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
    }
    return {name: 8.0 * len(result) / len(data) for name, result in packed.items()} | {"bytes": float(len(data))}
