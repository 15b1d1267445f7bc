"""Progress of a job goes line by line to a function that its caller may replace."""

from __future__ import annotations

import sys
from collections.abc import Callable

Say = Callable[[str], None]
"""Takes one line, without its end."""


def to_stderr(text: str) -> None:
    """Writes a line for people to standard error; results for programs go to standard output."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def silently(text: str) -> None:
    """Drops a line."""
