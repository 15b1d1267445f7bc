"""Types of JSON values: what functions write into files and messages, and read from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A value that JSON can hold."""
JsonObject: TypeAlias = Mapping[str, Any]
"""A decoded JSON object; whoever reads a field converts or checks it."""
