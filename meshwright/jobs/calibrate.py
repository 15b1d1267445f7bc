"""The job ``calibrate``: measures the machine at hand, so that plans for it rest on what it really does."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.calibrate.host import host_times
from meshwright.calibrate.machine import chosen_sizes, measure_rank
from meshwright.cluster.calibration import Calibration
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.health import shortfalls
from meshwright.errors import ClusterError, ConfigError
from meshwright.jobs.nodes import NodeOptions
from meshwright.jobs.practice import practise_all
from meshwright.jobs.progress import Say, to_stderr
from meshwright.jobs.requests import CalibrateConfig
from meshwright.launch.choice import choose_launcher
from meshwright.launch.devices import Devices, found_devices
from meshwright.launch.machine import calibration_folder, machine_facts
from meshwright.launch.torchrun import TorchrunLauncher
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.work import measure_model
from meshwright.spec.model_shape import ModelWork


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationResult:
    """The measured speeds of a machine, and where they were written."""

    calibration: Calibration
    """The figures."""
    path: Path
    """The file; plans for this machine look for it in the user's cache."""
    practice: tuple[dict[str, Any], ...] = ()
    """For each short run of a small model ``layout``, ``priced_s``, ``measured_s`` and ``paced``."""
    shortfalls: tuple[str, ...] = ()
    """A sentence for each figure of a GPU or its links that is far below the catalogue's."""

    def to_json(self) -> dict[str, object]:
        """Returns the figures as plain values, with ``path`` and ``practice``."""
        return self.calibration.to_json() | {"path": str(self.path), "practice": list(self.practice)}


def calibrate(
    config: CalibrateConfig | None = None, *, nodes: NodeOptions | None = None, say: Say = to_stderr
) -> CalibrationResult | None:
    """Measures this machine and writes the figures; the ranks are forked from this process.

    Args:
        config: what to measure; everything, on all devices, when None.
        nodes: this node's place, when the same is done on others.
        say: takes a line of progress.

    Returns:
        What was measured and where it was written; None on the ranks of torchrun other than the first.

    Raises:
        ConfigError, ClusterError, LaunchError: for what can't be.
    """
    config = config or CalibrateConfig()
    config.check_all()
    launcher = (
        choose_launcher(config.devices) if nodes is None else nodes.group_launcher(_slots_per_node(config, nodes))
    )
    devices = found_devices(None)
    context = launcher.context if isinstance(launcher, TorchrunLauncher) else None
    count = nodes.nodes if nodes is not None else context.nodes if context else 1
    ranks = launcher.ranks * (count if nodes is not None else 1)
    machine = machine_facts(devices, ranks, count)
    sizes = chosen_sizes(devices.kind, config.quick)

    def progress(text: str) -> None:
        say(f"  {text}")

    if context is None or context.rank == 0:
        say(f"measuring {machine['device']}, ranks: {ranks}" + (f" on {count} nodes" if count > 1 else ""))
    calibration = launcher.run(measure_rank, machine, sizes, progress, config.timeout_s, timeout_s=config.timeout_s)[0]
    if context is not None and context.rank:
        return None
    # Forks ranks of its own, which a rank of torchrun can't.
    if context is None and not config.quick:
        progress("the runtime itself, with a model of next to nothing")
        calibration = calibration.merged(_add_host_times(calibration, devices))
    path = _write_calibration(calibration, config)
    return CalibrationResult(
        calibration=calibration,
        path=path,
        practice=tuple(_practise(config, calibration, progress)),
        shortfalls=tuple(_find_shortfalls(calibration)),
    )


def _practise(config: CalibrateConfig, calibration: Calibration, progress: Say) -> list[dict[str, object]]:
    """Runs a small model under each axis, for a calibration that plans will look for."""
    if config.out or config.quick or not config.practice or calibration.nodes > 1:
        return []
    progress("short runs of a small model under each axis")
    return practise_all(found_devices(None), calibration.ranks, config.practice, progress)


def _slots_per_node(config: CalibrateConfig, nodes: NodeOptions) -> int:
    """Returns the ranks of each node."""
    if nodes.slots is None and config.devices is not None and config.devices % nodes.nodes:
        raise ConfigError(
            f"devices = {config.devices} on {nodes.nodes} nodes: each has as many ranks when they are measured together"
        )
    return nodes.slots or found_devices(config.devices and config.devices // nodes.nodes).count


def _add_host_times(calibration: Calibration, devices: Devices) -> Calibration:
    """Returns a calibration with the runtime's own seconds beside operators and collectives."""

    def work_of(model: ModelConfig, rows: int) -> ModelWork:
        return measure_model(build_meta(model), rows, int(model.context or 0), torch.float32)

    return dataclasses.replace(calibration, host=host_times(calibration, devices, work_of))


def _find_shortfalls(calibration: Calibration) -> list[str]:
    """Returns a sentence for each figure far below the catalogue's; only for GPUs, whose links it knows."""
    machine, ranks_per_node = calibration.machine, calibration.ranks // calibration.nodes
    if machine["kind"] != "cuda":
        return []
    try:
        catalogue_cluster = Cluster.detected(
            ranks_per_node, "cuda", name=str(machine["device"]), nodes=calibration.nodes
        )
    except ClusterError:
        return [f"the catalogue has no {machine['device']}; docs/cluster.md says how to describe one"]
    return list(shortfalls(calibration, catalogue_cluster))


def _write_calibration(calibration: Calibration, config: CalibrateConfig) -> Path:
    """Writes the calibration and returns its path; a quick one never replaces a full one of the cache."""
    if config.out:
        path = Path(config.out)
    else:
        path = calibration_folder() / f"{calibration.key}.json"
        if config.quick and path.is_file():
            # A few seconds' figures don't replace a full calibration.
            path = path.with_name(f"{calibration.key}-quick.json")
    calibration.write(path)
    return path
