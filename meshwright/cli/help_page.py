"""A verb's help as a page that fits a screen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.config import Config

Row = tuple[str, str]
"""A flag as it is written, and what it does."""
_FLAG_WIDTH = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class HelpPage:
    """The help of a verb."""

    usage: str
    """Words behind ``meshwright``."""
    purpose: str
    """What it does."""
    settings: tuple[Row, ...]
    """Settings that people use; fields of the configs."""
    options: tuple[Row, ...]
    """Flags and words that are no fields of a config; complete."""
    examples: tuple[str, ...]
    """Commands to copy."""
    status: str
    """Exit statuses."""
    configs: tuple[type[Config], ...] = ()
    """Configs whose fields are flags."""

    def basic_lines(self, verb: str) -> Iterator[str]:
        """Yields the page that fits a screen."""
        yield f"usage: meshwright {self.usage}"
        yield from ("", self.purpose, "")
        yield from map(format_row, self.options)
        if self.settings:
            yield from ("", f"Settings that people use; meshwright {verb} --help-all lists every one:")
            yield from map(format_row, self.settings)
        yield ""
        yield from (f"  {example}" for example in self.examples)
        yield from ("", f"Exit status: {self.status}")


def format_row(row: Row) -> str:
    """Returns a flag and its meaning as a line."""
    flag, meaning = row
    return f"  {flag:<{_FLAG_WIDTH}}{meaning}" if len(flag) < _FLAG_WIDTH else f"  {flag}  {meaning}"


JSON = ("--json", "print the result as JSON on standard output")
