"""Which trackers there are, by name: the house's own, and those of other packages' entry points."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from meshwright.errors import ConfigError, nearest
from meshwright.monitor.trackers import mlflow, trackio, wandb
from meshwright.monitor.trackers.contract import GROUP, TrackerFactory

TENSORBOARD = "tensorboard"
"""Written by a sink of its own, always there."""
_PACKAGES: dict[str, tuple[str, TrackerFactory]] = {
    trackio.PACKAGE: (trackio.PACKAGE, trackio.TrackioTracker),
    wandb.PACKAGE: (wandb.PACKAGE, wandb.WandbTracker),
    mlflow.PACKAGE: (mlflow.PACKAGE, mlflow.MlflowTracker),
}
"""Package to install, and factory, of each tracker of the house."""


def check_trackers(names: Iterable[str]) -> None:
    """Refuses, before a rank starts, trackers that aren't there or whose package is missing; imports none of them.

    Raises:
        ConfigError: with the tracker's name and what to install.
    """
    for name in names:
        if name == TENSORBOARD:
            continue
        entry = _entry_point(name)
        if entry is None and name not in _PACKAGES:
            known = {TENSORBOARD, *_PACKAGES, *(point.name for point in entry_points(group=GROUP))}
            raise ConfigError(f"monitor.trackers: no tracker is called '{name}'{nearest(name, known)}")
        package = _PACKAGES[name][0] if entry is None else entry.module.partition(".")[0]
        if find_spec(package) is None:
            raise ConfigError(
                f"monitor.trackers = {name}: the package {package} isn't installed; pip install {package}, or "
                "leave the tracker out"
            )


def find_factory(name: str) -> TrackerFactory:
    """Returns what makes a tracker; the module of another package is imported.

    Raises:
        ConfigError: for an unknown name.
        Exception: whatever the module raises.
    """
    entry = _entry_point(name)
    if entry is not None:
        factory: TrackerFactory = entry.load()
        return factory
    if name not in _PACKAGES:
        raise ConfigError(f"monitor.trackers: no tracker is called '{name}'{nearest(name, _PACKAGES)}")
    return _PACKAGES[name][1]


def _entry_point(name: str) -> EntryPoint | None:
    """Returns the entry point of a name; None without one.

    Raises:
        ConfigError: when several packages give one, or one takes the name of a tracker of the house.
    """
    points = tuple(entry_points(group=GROUP, name=name))
    if len(points) > 1 or (points and (name in _PACKAGES or name == TENSORBOARD)):
        values = ", ".join(point.value for point in points)
        raise ConfigError(f"monitor.trackers = {name}: several have this name ({values}); uninstall all but one")
    return points[0] if points else None
