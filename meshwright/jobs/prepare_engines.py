"""The engines that run the tasks of a preparation: this machine's processes, datatrove's executor, Slurm, Ray."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from meshwright.data.batches import run_batch_task, share_of_batch
from meshwright.data.config import DataConfig
from meshwright.data.local_executor import LocalExecutor
from meshwright.data.prepare import MakeEngine
from meshwright.errors import ConfigError, LaunchError
from meshwright.launch.config import RayTasksConfig, SlurmArrayConfig
from meshwright.launch.ray_tasks import RayTasks
from meshwright.launch.slurm_array import SlurmArray


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareConfig(DataConfig):
    """What ``meshwright prepare`` reads, how, and by which engine."""

    engine: Literal["own", "local", "slurm", "ray"] = "own"
    """What runs the tasks: ``own`` is this command's processes, ``local`` datatrove's executor for one machine,
    ``slurm`` an array of jobs, ``ray`` tasks on a Ray cluster. The files are the same."""
    slurm: SlurmArrayConfig = field(default_factory=SlurmArrayConfig)
    """What ``engine = slurm`` asks for."""
    ray: RayTasksConfig = field(default_factory=RayTasksConfig)
    """What ``engine = ray`` asks for."""

    def check(self) -> None:
        """Raises `ConfigError` for settings of an engine that isn't the one asked for, and as `DataConfig.check`."""
        DataConfig.check(self)
        for name, default in (("slurm", SlurmArrayConfig()), ("ray", RayTasksConfig())):
            if self.engine != name and getattr(self, name) != default:
                raise ConfigError(f"settings of {name} have no effect with engine = {self.engine!r}; leave them out")
        if self.engine in ("slurm", "ray") and self.workers:
            cure = "slurm.jobs" if self.engine == "slurm" else "the cluster's cores and ray.cpus"
            raise ConfigError(f"workers = {self.workers} has no effect with engine = {self.engine!r}; see {cure}")


def engine_of(config: PrepareConfig) -> MakeEngine | None:
    """Returns what makes the engine that is asked for; None for this command's own processes.

    Raises:
        ConfigError: for ``local`` without datatrove.
    """
    if config.engine == "own":
        return None
    if config.engine == "local":
        if importlib.util.find_spec("datatrove") is None:
            raise ConfigError("engine = 'local' needs datatrove, which isn't here: pip install 'meshwright[text]'")
        return lambda work_dir, processes, key: LocalExecutor(processes)
    if config.engine == "slurm":
        return lambda work_dir, processes, key: _SlurmEngine(config.slurm, work_dir, f"meshwright-{key[:16]}")
    return lambda work_dir, processes, key: _RayEngine(config.ray)


class _SlurmEngine:
    """Runs a batch by an array of jobs, each of which does every so-many-th task."""

    def __init__(self, config: SlurmArrayConfig, work_dir: Path, name: str) -> None:
        self._config = config
        self._array = SlurmArray(config=config, folder=work_dir, name=name)

    def start(self, batch: Path, numbers: Sequence[int]) -> None:
        size = min(self._config.jobs, len(numbers))
        self._array.submit(("prepare", "--batch", str(batch), "--of", str(size), "--task"), size)

    def why_ended(self) -> str:
        if self._array.is_running():
            return ""
        return f"no job of Slurm named {self._array.name} is left; see slurm-*.out in {self._array.folder}"

    def stop(self) -> None:
        self._array.cancel()


class _RayEngine:
    """Runs a batch by Ray's tasks."""

    def __init__(self, config: RayTasksConfig) -> None:
        self._tasks = RayTasks(config, run_batch_task)

    def start(self, batch: Path, numbers: Sequence[int]) -> None:
        self._tasks.start((str(batch),), numbers)

    def why_ended(self) -> str:
        return self._tasks.why_ended()

    def stop(self) -> None:
        self._tasks.stop()


def run_share(batch: Path, index: int, shares: int) -> int:
    """Runs a job's share of a batch, one task after the other; returns how many.

    Args:
        batch: folder of the tasks.
        index: number of this job in its array.
        shares: jobs of the array.

    Raises:
        LaunchError: for a number that isn't one of the array's.
        DataError: when there is no such batch.
    """
    if not 0 <= index < shares:
        raise LaunchError(f"--task {index} --of {shares}: the first must be at least 0 and less than the second")
    numbers = share_of_batch(batch, index, shares)
    for number in numbers:
        run_batch_task(str(batch), number)
    return len(numbers)
