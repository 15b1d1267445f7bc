"""Monitoring of a run: sinks of records and events, displays, progress of ranks, drift from the plan, report.

``meshwright.monitor.meter``, also ``meshwright.meter``, measures a custom loop; it is loaded when it is used
first, torch with it.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Loads `meter` when it is used first."""
    if name != "meter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("meshwright.monitor.loop_meter").meter
