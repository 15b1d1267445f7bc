"""Near-duplicates by MinHash: datatrove's signatures, buckets and clusters as tasks over the shards of a preparation.

A shard's documents get a signature of 14 x 8 hashes (Broder 1997); two documents that share all 8 hashes of a bucket
are a pair; pairs that touch are a cluster, of which the first document in corpus order stays. Pairs of Jaccard
similarity s are found with probability 1 - (1 - s^8)^14: 92 % at 0.8, 99.9 % at 0.9. Source: datatrove's `minhash.py`.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.files import full_disk, whole_file
from meshwright.data.shards import Counts, read_shard

BUCKETS = 14
"""Bands of a signature, each a task that compares all shards. Source: datatrove's `MinhashConfig`."""
_MEMBER = np.dtype([("document", "<u4"), ("cluster", "<u4")])


@dataclass(frozen=True, kw_only=True, slots=True)
class SignatureTask:
    """Computes the signatures of a shard's documents, sorted within each bucket."""

    directory: Path
    """Working directory."""
    shard: int
    """Number of the shard."""
    text_bytes: int
    """Bytes of its text."""
    language: str
    """Language whose words are counted."""

    @property
    def bytes(self) -> int:
        """Bytes of the text."""
        return self.text_bytes

    def is_finished(self) -> bool:
        """Returns whether the mark exists, which is written last."""
        return _mark(self.directory, "signature", self.shard).exists()

    def run(self, batched: bool) -> Counts:
        """Computes the signatures; see `Task.run`."""
        from datatrove.data import Document
        from datatrove.pipeline.dedup import MinhashDedupSignature

        texts = enumerate(read_shard(self.directory, self.shard))
        documents = (Document(text=text, id=str(number)) for number, text in texts)
        with _output(self.directory, "signature", self.shard) as folder:
            # The number of the shard becomes the name of its files.
            block = MinhashDedupSignature(folder, _minhash_config(), language=self.language)
            block.run(documents, rank=self.shard)
        return Counts(bytes=self.bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketTask:
    """Finds the pairs of documents that share a bucket's hashes, over all shards."""

    directory: Path
    """Working directory."""
    bucket: int
    """Number of the bucket."""
    text_bytes: int
    """The text's share of this bucket, for progress."""

    @property
    def bytes(self) -> int:
        """Bytes of text for progress."""
        return self.text_bytes

    def is_finished(self) -> bool:
        """Returns whether the mark exists, which is written last."""
        return _mark(self.directory, "bucket", self.bucket).exists()

    def run(self, batched: bool) -> Counts:
        """Compares the signatures; see `Task.run`."""
        from datatrove.pipeline.dedup import MinhashDedupBuckets

        # One file a shard is open at a time.
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        with _output(self.directory, "bucket", self.bucket) as folder:
            block = MinhashDedupBuckets(str(_folder(self.directory, "signature")), folder, config=_minhash_config())
            block.run(None, rank=self.bucket, world_size=BUCKETS)
        return Counts(bytes=self.bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterTask:
    """Joins pairs that touch into clusters; one task, which holds every paired document in memory."""

    directory: Path
    """Working directory."""

    @property
    def bytes(self) -> int:
        """No bytes of text."""
        return 0

    def is_finished(self) -> bool:
        """Returns whether the mark exists, which is written last."""
        return _mark(self.directory, "cluster", 0).exists()

    def run(self, batched: bool) -> Counts:
        """Joins the pairs; see `Task.run`."""
        from datatrove.pipeline.dedup import MinhashDedupCluster

        with _output(self.directory, "cluster", 0) as folder:
            pairs = str(_folder(self.directory, "bucket"))
            MinhashDedupCluster(pairs, folder, config=_minhash_config(), save_cluster_id=True).run(
                None, 0, world_size=1
            )
        return Counts(bytes=0)


def signature_tasks(directory: Path, shard_bytes: list[int], language: str) -> Iterator[SignatureTask]:
    """Yields the tasks of the first stage, one a shard.

    Args:
        directory: working directory.
        shard_bytes: bytes of text of each shard.
        language: whose words are counted.
    """
    for shard, text_bytes in enumerate(shard_bytes):
        yield SignatureTask(directory=directory, shard=shard, text_bytes=text_bytes, language=language)


def bucket_tasks(directory: Path, total_bytes: int) -> Iterator[BucketTask]:
    """Yields the tasks of the second stage, one a bucket."""
    for bucket in range(BUCKETS):
        # The parts of a whole number add up to it.
        share = total_bytes * (bucket + 1) // BUCKETS - total_bytes * bucket // BUCKETS
        yield BucketTask(directory=directory, bucket=bucket, text_bytes=share)


def mark_first_of_clusters(directory: Path, shard_documents: list[int]) -> NDArray[np.bool_]:
    """Marks the documents that are nearly equal to no earlier one.

    datatrove's own choice of which document of a cluster stays depends on the order of its unions; the first in corpus
    order agrees with `selection.mark_first_copies`, whatever the number of shards.

    Args:
        directory: working directory with the clusters.
        shard_documents: documents of each shard.

    Returns:
        (documents,) bool, in corpus order.
    """
    first_document = np.concatenate([[0], np.cumsum(shard_documents)])
    members, clusters = [], []
    for shard in range(len(shard_documents)):
        path = _folder(directory, "cluster") / f"{shard:06d}.clusters"
        if path.exists():
            rows = np.fromfile(path, dtype=_MEMBER)
            members.append(rows["document"].astype(np.int64) + first_document[shard])
            clusters.append(rows["cluster"])
    kept = np.ones(int(first_document[-1]), dtype=bool)
    if members:
        all_members, all_clusters = np.concatenate(members), np.concatenate(clusters)
        order = np.argsort(all_members, kind="stable")
        # np.unique returns the first place of each cluster, which is that of its earliest document.
        _, first = np.unique(all_clusters[order], return_index=True)
        kept[all_members] = False
        kept[all_members[order][first]] = True
    return kept


def _minhash_config() -> Any:
    from datatrove.pipeline.dedup.minhash import MinhashConfig

    return MinhashConfig(num_buckets=BUCKETS)


def _mark(directory: Path, stage: str, number: int) -> Path:
    return directory / f"minhash-{stage}-{number:05d}.done"


def _folder(directory: Path, stage: str) -> Path:
    return directory / f"minhash-{stage}"


@contextlib.contextmanager
def _output(directory: Path, stage: str, number: int) -> Iterator[str]:
    """Gives a block an empty folder to write into, moves its files to the stage's folder, and marks the task done.

    The blocks write under final names: what a killed one left, or another copy of this task writes, stays apart.
    """
    from loguru import logger

    logger.disable("datatrove")
    temporary = directory / f"minhash-{stage}-{number:05d}.tmp{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    with full_disk(directory), contextlib.redirect_stderr(io.StringIO()):  # a progress bar a task
        yield str(temporary)
    target_folder = _folder(directory, stage)
    target_folder.mkdir(exist_ok=True)
    for path in sorted(path for path in temporary.rglob("*") if path.is_file()):
        target = target_folder / path.relative_to(temporary)
        target.parent.mkdir(exist_ok=True)
        # Each whole or not at all: the task may have run twice.
        os.replace(path, target)
    shutil.rmtree(temporary)
    with whole_file(_mark(directory, stage, number)):
        pass
