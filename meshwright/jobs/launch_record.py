"""Which launcher started a run, and how its job stands."""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from meshwright.errors import ConfigError
from meshwright.jobs.run_directory import LAUNCH
from meshwright.records import parse_json

RECORD = "job.json"
"""File of the launch folder: the launcher, and what it calls the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRecord:
    """Which launcher started a run, and what it calls the job."""

    launcher: str
    """``slurm``, ``kubernetes`` or ``ray``."""
    job: str
    """Id of the job; on Kubernetes kind and name, as ``jobset/first``."""
    nodes: int
    """Nodes that were asked for."""
    submitted: str
    """When, by the clock of the host of the submission."""
    namespace: str = ""
    """Namespace of the job; empty but on Kubernetes, and where kubectl's current one is meant."""

    @classmethod
    def submitted_now(cls, launcher: str, job: str, nodes: int) -> Self:
        """Returns the record of a job that was submitted just now."""
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(launcher=launcher, job=job, nodes=nodes, submitted=now)

    @property
    def text(self) -> str:
        """The record as its file has it."""
        return json.dumps(asdict(self))


def write_record(run_dir: Path, record: LaunchRecord) -> None:
    """Writes who started a run, for ``status``, ``logs`` and ``cancel``."""
    (run_dir / LAUNCH).mkdir(parents=True, exist_ok=True)
    (run_dir / LAUNCH / RECORD).write_text(record.text, encoding="utf-8")


def read_record(run_dir: Path) -> LaunchRecord | None:
    """Returns who started a run; None for a run that no launcher of a cluster started.

    Raises:
        ConfigError: when the file is damaged.
    """
    path = run_dir / LAUNCH / RECORD
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
        record = LaunchRecord(**values)
        if not all(isinstance(text, str) for text in (record.launcher, record.job, record.submitted, record.namespace)):
            raise TypeError("a field isn't text")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} doesn't say who started the run ({error}); remove it") from None
    # They become words of a command line.
    if not re.fullmatch(r"([a-z]+/)?[A-Za-z0-9][A-Za-z0-9_.-]*", record.job):
        raise ConfigError(f"{path}: {record.job!r} is no job's id; remove it")
    if not re.fullmatch(r"([a-z0-9][a-z0-9-]*)?", record.namespace):
        raise ConfigError(f"{path}: {record.namespace!r} is no namespace; remove it")
    return record


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerState:
    """What a scheduler says of a run's job."""

    launcher: str
    """``slurm``, ``kubernetes`` or ``ray``."""
    job: str
    """Id of the job."""
    state: str
    """As the scheduler calls it: ``PENDING``, ``RUNNING``; ``gone`` when it doesn't know the job any more."""
    nodes: str
    """The job's nodes now; empty before they are known."""
    time_left: str
    """Time left, as the scheduler writes it."""
    reason: str
    """Why the job waits; empty when it doesn't."""
