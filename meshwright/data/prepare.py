"""Prepares token files from text: read, select, train the tokenizer, encode, merge; each stage resumes after a kill."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from meshwright.data.batches import BatchEngine, BatchPool
from meshwright.data.config import TRAINED_TOKENIZERS, DataConfig
from meshwright.data.digests import digest_sources
from meshwright.data.files import full_disk, lone_writer, settle, sha256
from meshwright.data.filters import LANGUAGE_MODELS, check_filters
from meshwright.data.sources import CorpusFile, list_sources
from meshwright.data.stages import PrepareJob, Progress, Report, work
from meshwright.data.tokenizer import given_tokenizer, read_chat_template, tokenizer_digest
from meshwright.data.tokens import MANIFEST, VERSION, TokenSet, read_manifest
from meshwright.data.workers import Pool
from meshwright.errors import ConfigError, DataError

INLINE_BYTES = 1 << 19
"""Input bytes below which starting a worker process costs more than it saves."""
MakeEngine = Callable[[Path, int, str], BatchEngine]
"""Makes an engine of the working directory, the number of processes, and a name of the inputs."""
PARTS_VERSION = 2
"""Version of the files of an unfinished preparation; those of another one are made anew."""
LOCK_S = 6 * 3600.0
"""Longest wait for another process that prepares the same set."""


def prepared_path(config: DataConfig, cache_root: str | Path, progress: Report | None = None) -> Path:
    """Returns the directory of the token set of this config and these inputs.

    Its name depends on the inputs' contents alone, not on their paths or times.

    Args:
        config: the data settings; its ``cache``, where set, overrides ``cache_root``.
        cache_root: directory of all prepared sets.
        progress: called as files are read whose digests aren't cached.

    Raises:
        DataError: when a path doesn't exist.
    """
    config = config.resolved()
    root = Path(config.cache or cache_root).expanduser()
    tokenizer_kind = config.tokenizer if config.tokenizer in TRAINED_TOKENIZERS else "given"
    return root / f"{tokenizer_kind}-{_input_key(config, list_sources(config.paths), root, progress)[:16]}"


def prepare(
    config: DataConfig,
    out_dir: str | Path,
    progress: Report | None = None,
    workers: int | None = None,
    engine: MakeEngine | None = None,
) -> TokenSet:
    """Prepares token files from text, or opens those that an earlier call prepared from the same inputs.

    The files don't depend on the number of processes, nor on the engine. They are built in ``<out_dir>.partial`` and
    renamed when complete; after a kill, the next call continues from the finished tasks.

    Args:
        config: the data settings.
        out_dir: directory to create; see `prepared_path`.
        progress: called in this thread as tasks finish.
        workers: number of processes, instead of the config's.
        engine: makes what runs the tasks, of the working directory, the number of processes and a name that is the
            same for the same inputs; worker processes of this one when None.

    Raises:
        LaunchError: when an engine can't start its tasks.
        DataError: for missing, empty, undecodable or damaged input, a full disk, or an ``out_dir`` of something else.
        ConfigError: for settings that contradict each other or the input.
    """
    config.check()
    config = config.resolved()
    out_path = Path(os.path.abspath(Path(out_dir).expanduser()))
    sources = list_sources(config.paths)
    if config.text_field != "text" and not any(source.kind in ("jsonl", "parquet") for source in sources):
        raise ConfigError(f"data.text_field = {config.text_field!r} has no effect: no input is jsonl or parquet")
    # The key names the inputs: equal inputs find the same set, changed ones never do.
    key = _input_key(config, sources, out_path.parent, progress)
    if out_path.exists():
        return _open_existing(out_path, key)
    worker_count = config.workers if workers is None else workers
    size = sum(source.size for source in sources)
    # A tiny corpus is prepared in this process, without starting workers.
    run_inline = worker_count <= 1 and size < INLINE_BYTES
    processes = worker_count or min(len(os.sched_getaffinity(0)), 1 + size // INLINE_BYTES)
    with full_disk(out_path.parent), lone_writer(out_path.with_name(out_path.name + ".lock"), LOCK_S):
        if out_path.exists():
            return _open_existing(out_path, key)
        _check_before_reading(config)
        work_dir = out_path.with_name(out_path.name + ".partial")
        _claim_work_dir(work_dir, key)
        with BatchPool(engine(work_dir, processes, key)) if engine else Pool(processes, run_inline) as pool:
            job = PrepareJob(
                config=config, sources=sources, key=key, beside=work_dir, pool=pool, report=progress or _ignore_progress
            )
            work(job)
        # Hash again: files edited during the preparation would give a set that matches no key.
        if _input_key(config, sources, out_path.parent, None) != key:
            shutil.rmtree(work_dir)
            raise DataError("the text changed while it was being prepared; run the same command again")
        # Renamed only when complete, so that a set under its final name needs no further check.
        settle(work_dir / "whole", out_path)
        shutil.rmtree(work_dir)
    return TokenSet.open(out_path)


def _check_before_reading(config: DataConfig) -> None:
    """Tries filters and a given tokenizer: what can't be is said before the text is read, which may take hours."""
    if config.tokenizer not in TRAINED_TOKENIZERS:
        given_tokenizer(config.tokenizer)
    check_filters(config.filters)


def _ignore_progress(progress: Progress) -> None:
    del progress


def _input_key(config: DataConfig, sources: list[CorpusFile], root: Path, progress: Report | None) -> str:
    """Hashes the inputs: settings that change the files, and kind and digest of each source, in order."""
    settings = config.prepared_settings()
    language_model = config.filters.language_model
    if config.filters.languages and language_model not in LANGUAGE_MODELS:
        settings["filters"]["language_model"] = _model_digest(language_model)
    if config.tokenizer not in TRAINED_TOKENIZERS:
        settings["tokenizer"] = tokenizer_digest(config.tokenizer)
    if config.chat_template:
        settings["chat_template"] = hashlib.sha256(read_chat_template(config.chat_template).encode()).hexdigest()
    total = sum(source.size for source in sources)

    def report(done: int) -> None:
        if progress is not None:
            progress(Progress(stage="digest", done_bytes=done, total_bytes=total))

    digests = digest_sources(sources, root, report)
    contents = [(source.kind, digest) for source, digest in zip(sources, digests)]
    identity = {"version": VERSION, "settings": settings, "contents": contents}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _model_digest(path: str) -> str:
    """Returns the hash of a language model, by which it is known wherever it lies."""
    try:
        return sha256(Path(path).expanduser())
    except OSError as error:
        raise ConfigError(
            f"data.filters.language_model = {path!r} can't be read: {error.strerror}; give ft176, glotlid, or the path "
            "of a fastText model, as lid.176.bin"
        ) from None


def _open_existing(out_path: Path, key: str) -> TokenSet:
    if out_path.is_dir() and not any(out_path.iterdir()):
        raise DataError(f"{out_path} exists and is empty; remove it or choose another directory")
    if not (out_path / MANIFEST).exists():
        raise DataError(
            f"{out_path} exists and is not a prepared set (it has no {MANIFEST}); name a directory that isn't there yet"
        )
    if read_manifest(out_path)["key"] != key:
        raise DataError(f"{out_path} was prepared from other text or settings; delete it or choose another directory")
    return TokenSet.open(out_path)


def _claim_work_dir(work_dir: Path, key: str) -> None:
    """Creates the working directory, or keeps the one of an interrupted call with the same inputs."""
    key_file, mark = work_dir / "key", f"{key} {PARTS_VERSION}"
    # Leftovers of other inputs must not be merged into this set.
    if work_dir.exists() and not (key_file.is_file() and key_file.read_text(encoding="utf-8") == mark):
        shutil.rmtree(work_dir)
    work_dir.mkdir(exist_ok=True)
    for leftover in work_dir.glob("*.tmp*"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
    key_file.write_text(mark, encoding="utf-8")
