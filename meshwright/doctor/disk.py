"""The check ``disk``: the run directory can be written, has room for the checkpoints, and isn't too slow for them."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from meshwright.checkpoint.files import ChecksumWriter, measure
from meshwright.doctor.contract import Check, Observation, Subject
from meshwright.units import format_bytes

LEAST_BYTES = 1 << 30
"""Free bytes for a run whose model isn't known: its log, a report and some checkpoints of a small model."""
TRIAL_BYTES = 32 << 20
SLOW_BYTES_PER_S = 20e6
"""A disk that writes slower stops a run: a checkpoint of 1e9 weights, 12 GB, would take ten minutes, the limit of
``checkpoint.wait_s``."""
_BLOCK = bytes(range(256)) * 4096


def examine(subject: Subject) -> Observation:
    """Writes and syncs a file as a checkpoint's, reads it back from the disk, and asks for the free bytes."""
    folder, required = subject.folder, subject.required_bytes or LEAST_BYTES
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    facts: dict[str, object] = {"free_bytes": free, "required_bytes": required}
    findings = []
    if free < required:
        findings.append(
            f"{folder} has {format_bytes(free)} free, and the run's checkpoints take {format_bytes(required)}; free "
            "space, lower checkpoint.keep, or give another --run"
        )
    try:
        subject.scratch.mkdir()
        write_s, read_s = _time_trial_file(subject.scratch / "speed", min(TRIAL_BYTES, free // 2))
    except OSError as error:
        findings.append(f"{folder} can't be written: {error.strerror or error}; make it writable or give another --run")
        return Observation(value="can't be written", findings=tuple(findings), facts=facts)
    finally:
        shutil.rmtree(subject.scratch, ignore_errors=True)
    written = max(len(_BLOCK), min(TRIAL_BYTES, free // 2))
    rate, read_rate = written / write_s, written / read_s
    if rate < SLOW_BYTES_PER_S:
        findings.append(
            f"{folder} takes {format_bytes(rate)}/s with fsync, below {format_bytes(SLOW_BYTES_PER_S)}/s; put the run "
            "on a faster disk, or raise checkpoint.every and checkpoint.wait_s"
        )
    return Observation(
        value=f"{format_bytes(free)} free, writes {format_bytes(rate)}/s, reads {format_bytes(read_rate)}/s",
        findings=tuple(findings),
        facts=facts | {"write_bytes_per_s": rate, "read_bytes_per_s": read_rate},
    )


def _time_trial_file(path: Path, size: int) -> tuple[float, float]:
    """Returns the seconds of writing a file of at least a block, and of reading it."""
    start_s = time.perf_counter()
    with ChecksumWriter(path, "crc32") as file:
        for _ in range(max(1, size // len(_BLOCK))):
            file.write(_BLOCK)
    write_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    # The pages are dropped first, so that the disk is read.
    measure(path, "crc32", cold=True)
    return write_s, time.perf_counter() - start_s


CHECK = Check(
    name="disk", purpose="the run directory is writable, large and fast enough", limit_s=60.0, examine=examine
)
