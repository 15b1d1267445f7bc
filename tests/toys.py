"""Axes and schedules that are added for a test the documented way: a file in a folder, and nothing else.

A folder joins the search path of the package's own, so that the new file is found as one beside the others is. Ranks
that are forked meanwhile have it too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType

from meshwright import parallel, schedules
from meshwright.parallel.transform import transforms
from meshwright.planner import space
from meshwright.planner.cost import axis_columns, pipeline_simulation
from meshwright.schedules.spec import known_schedules
from meshwright.spec import axes, groups

CACHES = (
    known_schedules,
    axes.known_axes,
    transforms,
    groups._known_with,
    groups._known_rows,
    axis_columns.priced_columns,
    space._fixed_copies_and_shards,
    pipeline_simulation.known_price,
)
"""What is read off the files once."""


def source(package: ModuleType, name: str) -> str:
    """Returns the text of a module of a package."""
    return Path(next(iter(package.__path__)), f"{name}.py").read_text(encoding="utf-8")


@contextmanager
def added(place: Path, files: Mapping[tuple[ModuleType, str], str]) -> Iterator[None]:
    """Adds modules to packages, as files would, and takes them away again.

    Args:
        place: an empty folder.
        files: (package, name of the module) to its text.
    """
    with ExitStack() as stack:
        for (package, name), text in files.items():
            folder = place / package.__name__
            if not folder.exists():
                folder.mkdir(parents=True)
                package.__path__.append(str(folder))
                stack.callback(package.__path__.remove, str(folder))
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
            stack.callback(_forget, package, name)
        _clear()
        stack.callback(_clear)
        yield


def _clear() -> None:
    for cache in CACHES:
        cache.cache_clear()


def _forget(package: ModuleType, name: str) -> None:
    if sys.modules.pop(f"{package.__name__}.{name}", None) is not None:
        delattr(package, name)


def copied_schedule(module: str, name: str) -> str:
    """Returns a schedule's file with another name in it, and no other change."""
    text, count = re.subn(r'(?m)^    name="\w+"', f'    name="{name}"', source(schedules, module))
    assert count == 1
    return text


def copied_axis(module: str, name: str, order: int) -> str:
    """Returns an axis's file with another name and order in it, and no other change."""
    text, count = re.subn(r'(?m)^    name="\w+"', f'    name="{name}"', source(axes, module))
    text, again = re.subn(r"(?m)^    order=\d+", f"    order={order}", text)
    assert (count, again) == (1, 1)
    return text


def copied_mechanics(module: str, axis: str, name: str) -> str:
    """Returns the file of an axis's mechanics that names another axis, and no other change."""
    text, count = re.subn(
        rf"meshwright\.spec\.axes\.{axis} import", f"meshwright.spec.axes.{name} import", source(parallel, module)
    )
    assert count == 1
    return text
