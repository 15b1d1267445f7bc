"""The comparison ``shared folder``: every node sees the same run directory, and one alone wins a claim in it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.doctor.contract import SCRATCH, Observation
from meshwright.resilience.claims import Claim, Claims

VISIBLE_S = 10.0
"""Time for a file that another node just created to become visible on a network file system."""
LIMIT_S = VISIBLE_S + 10.0
_MARK = "made-by-node-0"


def shared_folder(folder: Path, session: str) -> Path:
    """Returns the folder in which all nodes try; it is named by node 0's session."""
    return folder / f"{SCRATCH}{session}-shared"


def make_shared_folder(path: Path) -> None:
    """Makes the folder on node 0, before the others look for it."""
    path.mkdir()
    (path / _MARK).touch()


def remove_shared_folder(path: Path) -> None:
    """Removes the folder."""
    shutil.rmtree(path, ignore_errors=True)


def try_shared_folder(path: Path, node: int) -> dict[str, bool]:
    """Looks for what node 0 wrote, and claims a generation against all others; returns what succeeded."""
    deadline_s = time.monotonic() + VISIBLE_S
    while not (path / _MARK).exists():
        if time.monotonic() > deadline_s:
            return {"visible": False, "claimed": False}
        time.sleep(0.05)
    claim = Claim(generation=0, node=node, session="doctor", host="", port=0)
    return {"visible": True, "claimed": Claims(path).try_claim(claim)}


def compare_shared_folder(attempts: Mapping[int, Mapping[str, Any]], folder: str) -> Observation:
    """Compares the attempts of all nodes."""
    visible = [node for node, attempt in attempts.items() if attempt.get("visible") is True]
    blind = sorted(set(attempts) - set(visible))
    claimed = [node for node, attempt in attempts.items() if attempt.get("claimed") is True]
    findings = []
    if blind:
        names = ", ".join(map(str, blind))
        findings.append(
            f"node{'s' if len(blind) > 1 else ''} {names} can't see what node 0 wrote below {folder}, and all nodes "
            "share the run directory; mount the same file system there on every node, or give another --run"
        )
    if visible and len(claimed) != 1:
        findings.append(
            f"{len(claimed)} of {len(visible)} nodes won one claim below {folder}, where exactly 1 must; put the run "
            "on a file system with atomic hard links, as NFS 4"
        )
    return Observation(value=f"{len(visible)} of {len(attempts)} nodes see it", findings=tuple(findings))
