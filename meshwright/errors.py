"""The exception tree: every error a user can cause is one of these, and its message carries the cure.

A message names the field and the numbers, the rule that they break, and the change that mends it. Errors are raised
before a rank starts wherever that is possible; on a rank the launcher prefixes the mesh coordinates.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST_NAMES = 24
"""Known words that a message lists when none is near."""


class MeshwrightError(Exception):
    """Root of every error that meshwright raises on purpose; the command line prints it without a traceback."""


class ConfigError(MeshwrightError):
    """A setting is unknown, out of range, contradicts another setting, or would have no effect."""


class PlanError(MeshwrightError):
    """A layout does not fit the ranks, the batch or the model."""


class ClusterError(MeshwrightError):
    """Devices or links are missing, unknown or unusable."""


class DataError(MeshwrightError):
    """Text or token files are missing, empty, damaged or do not fit the model."""


class CheckpointError(MeshwrightError):
    """A checkpoint is missing, damaged, incomplete or belongs to another model."""


class LaunchError(MeshwrightError):
    """Ranks could not be started, or one of them died."""


class RankError(MeshwrightError):
    """Something went wrong on one rank while the run was under way."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns a hint that names the known word nearest to a wrong one.

    Args:
        word: what the user wrote.
        known: the words that would have been right.

    Returns:
        ``"; did you mean 'x'?"`` when one is near, else ``"; known: a, b, c"``.
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    more = ", ..." if len(names) > MOST_NAMES else ""
    return "; known: " + ", ".join(names[:MOST_NAMES]) + more
