"""Samples the health of this node's devices while a run lasts, in a process beside its supervisor."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.doctor.nvml import Nvml
from meshwright.events import Event
from meshwright.monitor.health import FOLDER
from meshwright.monitor.rundir import RunReader
from meshwright.monitor.sinks import SUPERVISOR, JsonlSink, LineFile
from meshwright.resilience.helper import Helper

NICE = 19
_NEWEST_BYTES = 1 << 14
"""Bytes at the end of metrics.jsonl, for the step and the tokens of a sample."""
_NICS, _INFINIBAND, _POWERCAP = "sys/class/net", "sys/class/infiniband", "sys/class/powercap"
_NIC_ERRORS = ("rx_errors", "tx_errors")
_PORT_ERRORS = ("symbol_error", "link_downed", "port_rcv_errors", "port_xmit_discards")


@contextmanager
def sampling_health(every_s: float, run_dir: Path, node: int) -> Iterator[None]:
    """Samples within a block, from a forked process; does nothing where ``every_s`` is 0.

    Args:
        every_s: seconds between two samples.
        run_dir: the run directory, which exists.
        node: number of this node.
    """
    if not every_s:
        yield
        return
    helper = Helper(lambda: sample_forever(every_s, run_dir, node), nice=NICE)
    try:
        yield
    finally:
        helper.close()


def sample_forever(every_s: float, run_dir: Path, node: int) -> None:
    """Writes a sample at once and then every few seconds, and events of what got worse."""
    sampler = HealthSampler()
    (run_dir / FOLDER).mkdir(exist_ok=True)
    lines, sink = LineFile(run_dir / FOLDER / f"node-{node}.jsonl"), JsonlSink(run_dir, metrics=False)
    reader = RunReader(run_dir, newest_bytes=_NEWEST_BYTES)
    before: dict[str, Any] | None = None
    while True:
        steps = reader.read().steps
        newest = steps[-1] if steps else {}
        sample = sampler.sample() | {"step": newest.get("step", 0), "tokens": newest.get("tokens_total", 0)}
        lines.append(sample)
        for kind, fields in find_worsened(before, sample):
            sink.event(Event(kind=kind, rank=SUPERVISOR, data={"step": sample["step"], "node": node} | fields))
        before = sample
        # What was read is of no use any more, and a long run has many steps.
        reader = RunReader(run_dir, newest_bytes=_NEWEST_BYTES)
        time.sleep(every_s)


class HealthSampler:
    """Reads the state of GPUs, network devices and processors of this node; what isn't there is left out.

    Args:
        root: of the file system that ``sys`` is read from.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._nvml: Nvml | None = None
        with contextlib.suppress(OSError):
            self._nvml = Nvml()
        self._energy: dict[Path, int] = {}
        self._cpu_joules = 0.0

    def sample(self) -> dict[str, Any]:
        """Returns a line of the health file, but for the run's step and tokens."""
        gpus = self._nvml.gpus() if self._nvml is not None else []
        return {
            "time": time.time(), "host": socket.gethostname(), "gpus": [dataclasses.asdict(gpu) for gpu in gpus],
            "nics": dict(self._nic_errors()), "cpu_joules": self._read_energy(),
        }  # fmt: skip

    def _nic_errors(self) -> Iterator[tuple[str, int]]:
        """Yields each network device with the errors that it has counted since it was started."""
        for device in sorted((self._root / _NICS).glob("*/statistics")):
            yield device.parent.name, sum(_read_number(device / name) or 0 for name in _NIC_ERRORS)
        for counters in sorted((self._root / _INFINIBAND).glob("*/ports/*/counters")):
            name = f"{counters.parents[2].name}:{counters.parent.name}"
            yield name, sum(_read_number(counters / error) or 0 for error in _PORT_ERRORS)

    def _read_energy(self) -> float | None:
        """Returns the processors' joules since the first sample; None where they can't be read (often by root alone).

        Source: Documentation/power/powercap in the Linux kernel: energy_uj wraps at max_energy_range_uj.
        """
        # Packages alone, intel-rapl:0: the zones below one, intel-rapl:0:1, are part of it.
        zones = [zone for zone in (self._root / _POWERCAP).glob("intel-rapl:*") if zone.name.count(":") == 1]
        for zone in zones:
            energy = _read_number(zone / "energy_uj")
            if energy is not None:
                grown = energy - self._energy.get(zone, energy)
                if grown < 0:
                    grown += _read_number(zone / "max_energy_range_uj") or 0
                self._cpu_joules += grown / 1e6
                self._energy[zone] = energy
        return self._cpu_joules if self._energy else None


def find_worsened(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields kind and fields of an event for each device that got worse between two samples."""
    earlier = {gpu["index"]: gpu for gpu in before["gpus"]} if before is not None else {}
    for gpu in now["gpus"]:
        last = earlier.get(gpu["index"], {})
        label = {"device": f"GPU {gpu['index']}"}
        reasons = [reason for reason in gpu["slowdowns"] if reason not in last.get("slowdowns", ())]
        if reasons:
            yield "device_slowed", label | {"why": ", ".join(reasons), "celsius": gpu["celsius"]}
        if gpu["error"] and not last.get("error"):
            yield "device_errors", label | {"why": gpu["error"]}
        if before is not None and (gpu["uncorrected_errors"] or 0) > (last.get("uncorrected_errors") or 0):
            yield "device_errors", label | {"why": f"{gpu['uncorrected_errors']} uncorrected memory errors"}
    nics: Mapping[str, int] = before["nics"] if before is not None else {}
    for name, errors in now["nics"].items():
        if name in nics and errors > nics[name]:
            yield "device_errors", {"device": f"network {name}", "why": f"{errors - nics[name]} more errors"}


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
