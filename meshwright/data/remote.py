"""Files behind a URL that fsspec knows (``s3://``, ``gs://``, ``hdfs://``, ``hf://``): list, open, identify.

Where credentials, regions and endpoints come from is fsspec's matter: its configuration files and the environment of
each store's own tools.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.core import url_to_fs

from meshwright.errors import DataError

CONTENT_FIELDS = ("ETag", "etag", "md5Hash", "crc32c", "Content-MD5", "Digest", "checksum", "blob_id", "lfs")
"""Names under which stores give a hash of a file's bytes. Source: ``info()`` of s3fs, gcsfs, HTTPFileSystem, hf."""
TIME_FIELDS = ("mtime", "LastModified", "Last-Modified", "last_modified", "modification_time", "updated")
"""Names under which stores give the time of a file's last write, where they give no hash: hdfs, sftp."""
_BLOCK_BYTES = 8 << 20


def is_remote(path: str) -> bool:
    """Returns whether a path is a URL rather than a name in this machine's file system."""
    return "://" in path


def list_remote(url: str) -> list[tuple[str, int]]:
    """Lists the files behind a URL of a file, a folder or a glob, sorted by name.

    Returns:
        URL and size in bytes of each; of a folder every file below it.

    Raises:
        DataError: when nothing is there, or the store can't be reached.
    """
    try:
        store, path = url_to_fs(url)
        if any(sign in path for sign in "*?[") and not store.exists(path):
            found = store.glob(path, detail=True)
        elif store.isdir(path):
            found = store.find(path, detail=True)
        else:
            found = {path: store.info(path)}
    except Exception as error:  # each store raises its own classes
        raise unreadable(url, error) from error
    files = {name: facts for name, facts in found.items() if facts.get("type") != "directory"}
    if not files:
        raise DataError(f"no file matches {url}; check the URL given to --data")
    sizeless = [name for name, facts in files.items() if facts.get("size") is None]
    if sizeless:
        raise DataError(
            f"{sizeless[0]}: the server doesn't say how long the file is, so that a cut-off one couldn't be told from "
            "a whole one; download it and give the file"
        )
    return [(store.unstrip_protocol(name), int(files[name]["size"])) for name in sorted(files)]


def open_remote(url: str) -> BinaryIO:
    """Opens a file behind a URL for reading.

    Raises:
        DataError: when it can't be opened.
    """
    try:
        return cast(BinaryIO, fsspec.open(url, "rb").open())
    except Exception as error:
        raise unreadable(url, error) from error


def remote_digest(url: str) -> str:
    """Returns a hash that changes with the file's bytes: of what its store says of them, else of the bytes themselves.

    A hash that the store gives is taken first, then name, size and time of the last write. A store that gives neither
    is read.

    Raises:
        DataError: when it can't be read.
    """
    try:
        store, path = url_to_fs(url)
        facts: Mapping[str, Any] = store.info(path)
        known = {name: facts[name] for name in CONTENT_FIELDS if facts.get(name)}
        if not known and (known := {name: facts[name] for name in TIME_FIELDS if facts.get(name)}):
            known["name"] = url
        if known:
            return hashlib.sha256(
                json.dumps(known | {"size": facts["size"]}, sort_keys=True, default=str).encode()
            ).hexdigest()
        digest = hashlib.sha256()
        with store.open(path, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        return digest.hexdigest()
    except Exception as error:
        raise unreadable(url, error) from error


def unreadable(url: str, error: Exception) -> DataError:
    """Returns the error of a URL that can't be read, with its cure."""
    if isinstance(error, DataError):
        return error
    if isinstance(error, ImportError):
        return DataError(f"{url} needs a package that isn't here ({error}); install it on every machine that reads")
    if isinstance(error, FileNotFoundError):
        return DataError(f"no such file: {url}; check the URL given to --data")
    return DataError(
        f"cannot read {url} ({type(error).__name__}: {str(error)[:200]}); check the URL, the network and the "
        "credentials of its store"
    )
