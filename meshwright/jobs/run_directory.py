"""A run's directory: its config and plan, and the check that a command may resume it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import tomli_w

from meshwright.config import read_toml
from meshwright.errors import ConfigError, LaunchError, MeshwrightError
from meshwright.jobs.resumption import differences
from meshwright.monitor.rundir import EVENTS, METRICS
from meshwright.resilience.run_lock import FOLDER as OWNER
from meshwright.spec.plan import Plan
from meshwright.train.run_config import RunConfig

CONFIG = "config.toml"
PLAN = "plan.json"
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
LAUNCH = "launch"
"""Folder of what a scheduler was given and of what it printed; it stands before the run does."""


def claim_directory(config: RunConfig) -> RunConfig:
    """Names a new run's directory, or checks that an existing one belongs to the same config.

    Raises:
        ConfigError: when the directory is another config's, or isn't a run's.
    """
    if not config.run:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        name = config.model.name.rstrip("/").replace("/", "-").replace(":", "-").lstrip(".-")
        return dataclasses.replace(config, run=str(Path("runs") / f"{name}-{stamp}"))
    folder = Path(config.run)
    for folder_or_parent in (folder, *folder.parents):
        if folder_or_parent.exists() and not folder_or_parent.is_dir():
            raise ConfigError(
                f"run = {folder}: {folder_or_parent} is a file, and a run is a directory; give another --run"
            )
    for name in (CONFIG, PLAN, METRICS, EVENTS, "report.html"):
        if (folder / name).is_dir():
            raise ConfigError(
                f"run directory {folder}: {name} is a folder, and a run writes a file of that name; move it away, or "
                "give another --run"
            )
    for name in ("checkpoints", "tensorboard", "chaos", OWNER, LAUNCH):
        if (folder / name).exists() and not (folder / name).is_dir():
            raise ConfigError(
                f"run directory {folder}: {name} is a file, and a run makes a folder of that name; move it away, or "
                "give another --run"
            )
    # An existing run is resumed only by a config of the same curve.
    if (folder / CONFIG).exists():
        planned = planned_outer(folder)
        old, new = run_config(folder).joining(planned), config.joining(planned)
        # What the user left open of how islands join counts as planned, else as usual.
        old, new = (dataclasses.replace(each, outer=each.outer.resolved) for each in (old, new))
        differing = differences(old, new)
        if differing:
            raise ConfigError(
                f"run directory {folder} belongs to another config: {'; '.join(differing)}; give another --run, or the "
                "settings that it was made with"
            )
    elif folder.exists() and any(path.name not in (OWNER, LAUNCH) for path in folder.iterdir()):
        raise ConfigError(f"run directory {folder} holds files but no {CONFIG}; give another --run")
    return config


@contextlib.contextmanager
def reporting_full_disk(run_dir: Path) -> Iterator[None]:
    """Turns the errors of a disk that is full or read-only into a sentence.

    Raises:
        LaunchError: names the file, where the system does.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise LaunchError(
            f"{error.filename or run_dir} can't be written: {error.strerror}; free space, and the same command goes on "
            "from the run's newest checkpoint, or give another --run"
        ) from error


def write_run(run_dir: Path, config: RunConfig, plan: Plan) -> None:
    """Writes config and plan into a run's directory, which is made; how islands joined stays where none are left."""
    run_dir.mkdir(parents=True, exist_ok=True)
    plan = plan.joining_as(planned_outer(run_dir))
    for name, text in ((CONFIG, tomli_w.dumps(config.to_dict())), (PLAN, plan.dumps())):
        # Renamed into place: a kill in between must not leave a run that no longer knows its config.
        temporary_path = run_dir / f".{name}.new"
        try:
            temporary_path.write_text(text, encoding="utf-8")
            temporary_path.replace(run_dir / name)
        except OSError:
            # What is left of it would make the directory look like somebody else's.
            temporary_path.unlink(missing_ok=True)
            raise


def wait_for(path: Path, limit_s: float) -> None:
    """Waits until rank 0 has written a file."""
    deadline_s = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise ConfigError(f"{path} didn't appear within {limit_s:g} s; the nodes must share the run directory")
        time.sleep(0.05)


def planned_outer(run_dir: Path) -> Mapping[str, int | str]:
    """Returns how the islands of a run's last plan join (`Plan.outer`); nothing for a new run, or without islands.

    A run that goes on joins them as it did, whatever the planner would choose now.
    """
    return read_plan(run_dir).outer if (run_dir / PLAN).exists() else {}


def read_plan(run_dir: Path) -> Plan:
    """Returns the plan that a run's directory holds.

    Raises:
        ConfigError: when the file is damaged.
    """
    path = run_dir / PLAN
    try:
        return Plan.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError, MeshwrightError) as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(f"{path} is damaged ({reason}); delete it, and the same train command plans anew") from None


def refuse_code(run_dir: Path, config: RunConfig, trust: bool) -> None:
    """Refuses to run the code that a run directory's config names, unless the user said that it is trusted.

    Raises:
        ConfigError: names the function.
    """
    if config.model.kind == "function" and not trust:
        raise ConfigError(
            f"{run_dir / CONFIG} names the function '{config.model.name}' as its model, which would be imported "
            "and called, and could do anything; add --trust if you trust who wrote that directory"
        )


def run_config(run_dir: Path) -> RunConfig:
    """Reads the config of a run directory.

    Raises:
        ConfigError: when the directory holds no run.
    """
    if not (run_dir / CONFIG).is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no {CONFIG}; give the directory of a run")
    return RunConfig.from_dict(read_toml(run_dir / CONFIG))
