"""``meshwright calibrate``: measures the machine at hand, so that plans for it rest on what it really does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cli.arguments import answer, read_config, say, take_flag
from meshwright.cli.calibrate_output import told
from meshwright.cli.nodes import NodeWords, take_nodes
from meshwright.cluster.calibration import Calibration
from meshwright.config import Config
from meshwright.errors import ClusterError, ConfigError
from meshwright.launch.choice import choose_launcher
from meshwright.launch.devices import Devices, found_devices
from meshwright.launch.machine import calibration_folder, machine_facts
from meshwright.launch.preload import prepare_environment
from meshwright.models.config import ModelConfig
from meshwright.spec.model_shape import ModelWork


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateConfig(Config):
    """What to measure."""

    devices: int | None = None
    """Ranks, as the run will have on all nodes; None for all GPUs, else all cores, of each."""
    out: str = ""
    """File to write; empty for the user's cache, where plans for this machine look for it."""
    quick: bool = False
    """A few sizes for a few seconds, for a first idea; kept beside one that is in the cache."""
    practice: int = 1
    """Rounds of short runs of a small model under each axis, which teach what the runtime takes beside operators and
    collectives; three are surer where the machine isn't quiet, 0 leaves them out."""
    timeout_s: float = 300.0
    """Limit for all of it."""

    def check(self) -> None:
        """Refuses a limit that leaves no time, and fewer rounds than none."""
        if self.practice < 0:
            raise ConfigError(f"calibrate: practice = {self.practice} must be 0 or more")
        if self.timeout_s <= 0:
            raise ConfigError(f"calibrate: timeout_s = {self.timeout_s} must be above 0")


def run(argv: Sequence[str]) -> int:
    """Measures, writes the calibration and prints it as a table or as JSON; exit status 0.

    With ``--nodes N --node I --meet HOST:PORT`` on each of several nodes, or under torchrun, all of them measure
    together; each node writes, or rank 0 of torchrun.
    """
    words = list(argv)
    as_json = take_flag(words, "--json")
    nodes = take_nodes(words)
    config = read_config(CalibrateConfig, words, "calibrate")
    prepare_environment()
    found = calibrate(config, quiet=as_json, nodes=nodes)
    if found is None:
        return 0
    calibration, path = found
    runs = _practised(config, calibration, as_json)
    if as_json:
        answer(json.dumps(calibration.to_json() | {"path": str(path), "practice": runs}, indent=2))
    else:
        say("\n".join([*told(calibration, path), *_sick(calibration)]))
    return 0


def calibrate(
    config: CalibrateConfig, quiet: bool = False, nodes: NodeWords | None = None
) -> tuple[Calibration, Path] | None:
    """Measures and writes; for use from Python, in a process that has run no tensor operation yet.

    Args:
        config: what to measure.
        quiet: say nothing of each part.
        nodes: this node's place, when the same is done on others.

    Returns:
        What was measured and where it was written; None on the ranks of torchrun other than the first.
    """
    from meshwright.calibrate.machine import chosen_sizes, measure_rank
    from meshwright.launch.torchrun import TorchrunLauncher

    launcher = choose_launcher(config.devices) if nodes is None else nodes.together(_slots(config, nodes))
    devices = found_devices(None)
    context = launcher.context if isinstance(launcher, TorchrunLauncher) else None
    count = nodes.nodes if nodes is not None else context.nodes if context else 1
    ranks = launcher.ranks * (count if nodes is not None else 1)
    machine = machine_facts(devices, ranks, count)
    sizes = chosen_sizes(devices.kind, config.quick)

    def progress(text: str) -> None:
        if not quiet:
            say(f"  {text}")

    if not quiet and (context is None or context.rank == 0):
        say(f"measuring {machine['device']}, ranks: {ranks}" + (f" on {count} nodes" if count > 1 else ""))
    found = launcher.run(measure_rank, machine, sizes, progress, config.timeout_s, timeout_s=config.timeout_s)[0]
    if context is not None and context.rank:
        return None
    if context is None and devices.kind == "cpu" and not config.quick:
        progress("the runtime itself, with a model of next to nothing")
        found = found.merged(_with_host(found, devices))
    return found, _kept(found, config)


def _slots(config: CalibrateConfig, nodes: NodeWords) -> int:
    """Returns the ranks of each node."""
    if nodes.slots is None and config.devices is not None and config.devices % nodes.nodes:
        raise ConfigError(
            f"devices = {config.devices} on {nodes.nodes} nodes: each has as many ranks when they are measured together"
        )
    return nodes.slots or found_devices(config.devices and config.devices // nodes.nodes).count


def _with_host(found: Calibration, devices: Devices) -> Calibration:
    """Returns a calibration with what the runtime takes beside operators and collectives, on processor cores."""
    import torch

    from meshwright.calibrate.host import host_times
    from meshwright.models.build import build_meta
    from meshwright.models.work import measure_model

    def work_of(model: ModelConfig, rows: int) -> ModelWork:
        return measure_model(build_meta(model), rows, int(model.context or 0), torch.float32)

    return dataclasses.replace(found, host=host_times(found, devices, work_of))


def _practised(config: CalibrateConfig, calibration: Calibration, quiet: bool) -> list[dict[str, Any]]:
    """Runs a small model under each axis, for a calibration that plans will look for."""
    if config.out or config.quick or not config.practice or calibration.nodes > 1:
        return []
    from meshwright.cli.practice import practise_all

    def tell(text: str) -> None:
        if not quiet:
            say(f"  {text}")

    tell("short runs of a small model under each axis")
    return practise_all(found_devices(None), calibration.ranks, config.practice, tell)


def _sick(calibration: Calibration) -> list[str]:
    """Returns what is far below its kind; of GPUs alone, whose links the catalogue knows."""
    from meshwright.cluster.cluster import Cluster
    from meshwright.cluster.health import shortfalls

    machine, each = calibration.machine, calibration.ranks // calibration.nodes
    if machine["kind"] != "cuda":
        return []
    try:
        plain = Cluster.detected(each, "cuda", name=str(machine["device"]), nodes=calibration.nodes)
    except ClusterError:
        return [f"the catalogue has no {machine['device']}; docs/cluster.md says how to describe one"]
    return list(shortfalls(calibration, plain))


def _kept(found: Calibration, config: CalibrateConfig) -> Path:
    """Writes what was measured and returns where; a quick one goes beside a full one of the cache."""
    if config.out:
        path = Path(config.out)
    else:
        path = calibration_folder() / f"{found.key}.json"
        if config.quick and path.is_file():
            path = path.with_name(f"{found.key}-quick.json")
    found.write(path)
    return path
