"""The exception tree: every error a user can cause is one of these, and its message carries the cure.

A message names the field and the numbers, the rule that they break, and the change that mends it. Errors are raised
before a rank starts wherever that is possible; on a rank the launcher prefixes the mesh coordinates.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

FAILED = 1
"""Exit status of what was begun and failed."""
REFUSED = 2
"""Exit status of what was asked for and can't be: nothing was begun."""
TERMINATED = 143
"""Exit status of a run that SIGTERM ended, its last state on disk. Source: POSIX shells, 128 + SIGTERM."""
LOST_CONTACT = "lost contact with another rank"
"""Phrase in errors of a rank that failed only because a peer had failed."""
MOST_NAMES = 24
"""Known words that a message lists when none is near."""


class MeshwrightError(Exception):
    """Root of every error that meshwright raises on purpose; the command line prints it without a traceback."""

    exit_status = FAILED
    """Of the command that it ends."""


class ConfigError(MeshwrightError):
    """A setting is unknown, out of range, contradicts another setting, or would have no effect."""

    exit_status = REFUSED


class PlanError(MeshwrightError):
    """A layout does not fit the ranks, the batch or the model."""

    exit_status = REFUSED


class NoRoomError(PlanError):
    """No layout fits the memory of the devices."""


class ClusterError(MeshwrightError):
    """Devices or links are missing, unknown or unusable."""

    exit_status = REFUSED


class DataError(MeshwrightError):
    """Text or token files are missing, empty, damaged or do not fit the model."""

    exit_status = REFUSED


class CheckpointError(MeshwrightError):
    """A checkpoint is missing, damaged, incomplete or belongs to another model."""


class LaunchError(MeshwrightError):
    """Ranks could not be started, or one of them died."""


class RankError(MeshwrightError):
    """Something went wrong on one rank while the run was under way."""


def error_of(kind: str, text: str, otherwise: type[MeshwrightError] = MeshwrightError) -> MeshwrightError:
    """Returns the error that another process told of.

    Args:
        kind: name of its class, one of this module's.
        text: what it says.
        otherwise: class for other names.
    """
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, MeshwrightError):
        return found(text)
    return otherwise(text)


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


def nearest_path(path: str, known: Sequence[str]) -> str:
    """Returns a hint that names the dotted name nearest to a wrong one; "" when none is near.

    Args:
        path: what the user wrote: a name's end, as ``h.0`` of ``transformer.h.0``, or another spelling.
        known: the names that would have been right, the likeliest first.
    """
    ends = [name for name in known if path and name.endswith(f".{path}")]
    hint = f"; did you mean '{ends[0]}'?" if ends else nearest(path, known)
    return hint if hint.startswith("; did") else ""
