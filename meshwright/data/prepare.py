"""Text to token files: read, select, train the tokenizer, encode, merge; each step resumes where a kill left it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from meshwright.data.config import PREPARED_FIELDS, TRAINED_TOKENIZERS, DataConfig
from meshwright.data.digests import digest_sources
from meshwright.data.files import full_disk, lone_writer, settle
from meshwright.data.sources import CorpusFile, list_sources
from meshwright.data.stages import PrepareJob, Progress, Report, work
from meshwright.data.tokenizer import tokenizer_digest
from meshwright.data.tokens import VERSION, TokenSet, read_manifest
from meshwright.data.workers import Pool
from meshwright.errors import ConfigError, DataError

INLINE_BYTES = 1 << 19
"""Below this many bytes of input, starting a process costs more than it saves."""
LOCK_S = 6 * 3600.0
"""Longest wait for another process that prepares the same set."""


def prepared_path(config: DataConfig, cache_root: str | Path, progress: Report | None = None) -> Path:
    """Returns where the set of this config and these inputs belongs.

    It is named by what the inputs contain, wherever they lie and whenever they were written.

    Args:
        config: the data settings; its ``cache``, where set, goes before ``cache_root``.
        cache_root: directory of all prepared sets.
        progress: called as files are read that weren't before.

    Raises:
        DataError: when a path isn't there.
    """
    config = config.resolved()
    root = Path(config.cache or cache_root).expanduser()
    kind = config.tokenizer if config.tokenizer in TRAINED_TOKENIZERS else "given"
    return root / f"{kind}-{_key(config, list_sources(config.paths), root, progress)[:16]}"


def prepare(
    config: DataConfig, out_dir: str | Path, progress: Report | None = None, workers: int | None = None
) -> TokenSet:
    """Makes token files of text, or opens those that an earlier call made of the same inputs.

    The files are the same whatever the number of processes. Work lies in ``<out_dir>.partial`` until all of it is
    done and is renamed then; after a kill, the next call goes on from the finished parts.

    Args:
        config: what to read and how.
        out_dir: directory to make; see `prepared_path`.
        progress: called in this thread as parts get done.
        workers: processes, instead of the config's.

    Raises:
        DataError: for missing, empty, undecodable or damaged input, a full disk, or an ``out_dir`` of something else.
        ConfigError: for settings that contradict each other or the input.
    """
    config.check()
    config = config.resolved()
    out = Path(os.path.abspath(Path(out_dir).expanduser()))
    sources = list_sources(config.paths)
    if config.text_field != "text" and not any(source.kind in ("jsonl", "parquet") for source in sources):
        raise ConfigError(f"data.text_field = {config.text_field!r} has no effect: no input is jsonl or parquet")
    key = _key(config, sources, out.parent, progress)
    if out.exists():
        return _reuse(out, key)
    asked = config.workers if workers is None else workers
    size = sum(source.size for source in sources)
    inline = asked <= 1 and size < INLINE_BYTES
    processes = asked or min(len(os.sched_getaffinity(0)), 1 + size // INLINE_BYTES)
    with full_disk(out.parent), lone_writer(out.with_name(out.name + ".lock"), LOCK_S):
        if out.exists():
            return _reuse(out, key)
        beside = out.with_name(out.name + ".partial")
        _claim(beside, key)
        with Pool(processes, inline) as pool:
            job = PrepareJob(
                config=config, sources=sources, key=key, beside=beside, pool=pool, report=progress or _silent
            )
            work(job)
        if _key(config, sources, out.parent, None) != key:
            shutil.rmtree(beside)
            raise DataError("the text changed while it was being prepared; run the same command again")
        settle(beside / "whole", out)
        shutil.rmtree(beside)
    return TokenSet.open(out)


def _silent(progress: Progress) -> None:
    del progress


def _key(config: DataConfig, sources: list[CorpusFile], root: Path, progress: Report | None) -> str:
    """Hashes the inputs: the settings that change the files, and kind and contents of each source, in order."""
    settings = {name: getattr(config, name) for name in PREPARED_FIELDS}
    if config.tokenizer not in TRAINED_TOKENIZERS:
        settings["tokenizer"] = tokenizer_digest(config.tokenizer)
    total = sum(source.size for source in sources)

    def report(done: int) -> None:
        if progress is not None:
            progress(Progress(stage="digest", done_bytes=done, total_bytes=total))

    digests = digest_sources(sources, root, report)
    contents = [(source.kind, digest) for source, digest in zip(sources, digests)]
    whole = {"version": VERSION, "settings": settings, "contents": contents}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def _reuse(out: Path, key: str) -> TokenSet:
    if out.is_dir() and not any(out.iterdir()):
        raise DataError(f"{out} exists and is empty; remove it or choose another directory")
    if read_manifest(out)["key"] != key:
        raise DataError(f"{out} was prepared from other text or settings; delete it or choose another directory")
    return TokenSet.open(out)


def _claim(beside: Path, key: str) -> None:
    """Makes the working directory, or keeps what an interrupted call with the same inputs left in it."""
    mark = beside / "key"
    if beside.exists() and not (mark.is_file() and mark.read_text(encoding="utf-8") == key):
        shutil.rmtree(beside)
    beside.mkdir(exist_ok=True)
    for left in beside.glob("*.tmp*"):
        left.unlink()
    mark.write_text(key, encoding="utf-8")
