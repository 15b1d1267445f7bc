"""The check ``shared memory``: /dev/shm is present, writable and large enough, and snapshots can live in memory."""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.doctor.contract import Check, Observation, Subject
from meshwright.units import format_bytes

FOLDER = Path("/dev/shm")
RANK_BYTES = 64 << 20
"""Free bytes for each rank. NCCL takes some 10 MB a connection of ranks that share a node; 64 MB, Docker's default for
a whole container, is known to be too little for one. Source: NCCL user guide, Troubleshooting, Shared memory."""


def examine(subject: Subject) -> Observation:
    """Writes a file there, reads its free bytes, and makes a file without a name as snapshots do."""
    findings = []
    try:
        # `checkpoint/snapshot.py` keeps the ranks' snapshots in such a file.
        os.close(os.memfd_create("meshwright-doctor", os.MFD_CLOEXEC))
    except (OSError, AttributeError) as error:
        findings.append(f"memfd_create fails ({error}), by which snapshots outlive a rank; allow it in the sandbox")
    if not FOLDER.is_dir():
        findings.append(
            f"{FOLDER} is missing, and NCCL and torch share memory there; mount a tmpfs on it, with docker --ipc=host "
            "or --shm-size"
        )
        return Observation(value="missing", findings=tuple(findings))
    path, required = FOLDER / f"meshwright-doctor-{subject.session}", RANK_BYTES * subject.slots
    try:
        path.write_bytes(bytes(4096))
    except OSError as error:
        findings.append(
            f"{FOLDER} can't be written: {error.strerror}; NCCL and torch share memory there, so mount it writable and "
            "with free space"
        )
    finally:
        path.unlink(missing_ok=True)
    status = os.statvfs(FOLDER)
    free = status.f_bavail * status.f_frsize
    if free < required:
        findings.append(
            f"{FOLDER} has {format_bytes(free)} free, and {subject.slots} ranks take {format_bytes(required)}; enlarge "
            "it, with docker --shm-size or mount -o remount,size="
        )
    return Observation(value=f"{format_bytes(free)} free", findings=tuple(findings), facts={"free_bytes": free})


CHECK = Check(name="shared memory", purpose="/dev/shm is writable and large enough", limit_s=10.0, examine=examine)
