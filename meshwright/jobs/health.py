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

from meshwright.doctor.nvml import FAILING_XIDS, Nvml, visible_gpus
from meshwright.errors import ConfigError
from meshwright.events import Event
from meshwright.launch.devices import cuda_environment
from meshwright.monitor.health import FOLDER
from meshwright.monitor.rundir import RunReader
from meshwright.monitor.sinks import SUPERVISOR, JsonlSink, LineFile
from meshwright.resilience.drain_requests import DrainRequest, write_request
from meshwright.resilience.helper import Helper

NICE = 19
RISING_SAMPLES = 3
"""Samples in a row, each with more errors of a network device than the one before, after which its node leaves."""
_NEWEST_BYTES = 1 << 14
"""Bytes at the end of metrics.jsonl, for the step and the tokens of a sample."""
_NICS, _INFINIBAND, _POWERCAP = "sys/class/net", "sys/class/infiniband", "sys/class/powercap"
_NIC_ERRORS = ("rx_errors", "tx_errors")
_PORT_ERRORS = ("symbol_error", "link_downed", "port_rcv_errors", "port_xmit_discards")


@contextmanager
def sampling_health(every_s: float, run_dir: Path, node: int, policy: DrainPolicy | None = None) -> Iterator[None]:
    """Samples within a block, from a forked process; does nothing where ``every_s`` is 0.

    Args:
        every_s: seconds between two samples.
        run_dir: the run directory, which exists.
        node: number of this node.
        policy: decides which devices are asked to leave the run; None reports only.
    """
    if not every_s:
        yield
        return
    helper = Helper(lambda: sample_forever(every_s, run_dir, node, policy), nice=NICE)
    try:
        yield
    finally:
        helper.close()


def sample_forever(every_s: float, run_dir: Path, node: int, policy: DrainPolicy | None) -> None:
    """Writes a sample at once and then every few seconds, events of what got worse, and requests of what fails."""
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
        for request in policy.judge(before, sample) if policy is not None else ():
            # A directory that can't be written just now: the next sample tries again.
            with contextlib.suppress(ConfigError):
                write_request(run_dir, request)
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
            self._nvml.watch_xids()
        self._energy: dict[Path, int] = {}
        self._cpu_joules = 0.0

    def sample(self) -> dict[str, Any]:
        """Returns a line of the health file, but for the run's step and tokens."""
        gpus = self._nvml.gpus() if self._nvml is not None else []
        xids = self._nvml.take_xids() if self._nvml is not None else []
        return {
            "time": time.time(), "host": socket.gethostname(), "gpus": [dataclasses.asdict(gpu) for gpu in gpus],
            "xids": xids, "visible": visible_gpus(gpus, cuda_environment()),
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
        if gpu["remap_failed"] and not last.get("remap_failed"):
            yield "device_errors", label | {"why": "a faulty row of memory couldn't be replaced"}
    for index, xid in now["xids"]:
        text = f"XID {xid}" + (f": {FAILING_XIDS[xid]}" if xid in FAILING_XIDS else "")
        yield "device_errors", {"device": f"GPU {index}", "why": text}
    nics: Mapping[str, int] = before["nics"] if before is not None else {}
    for name, errors in now["nics"].items():
        if name in nics and errors > nics[name]:
            yield "device_errors", {"device": f"network {name}", "why": f"{errors - nics[name]} more errors"}


class DrainPolicy:
    """Decides which devices should leave before they fail: those whose hardware reports errors that don't go away.

    A GPU leaves that the driver can't reach, whose memory had an error that ECC couldn't correct or a row that couldn't
    be replaced, or that reported an XID of `FAILING_XIDS`; the whole node leaves whose network's errors rise in
    `RISING_SAMPLES` samples in a row.

    Args:
        node: number of this node.
        has_gpus: whether its ranks run on them.
    """

    def __init__(self, node: int, has_gpus: bool) -> None:
        self._node, self._has_gpus = node, has_gpus
        self._rises: dict[str, int] = {}

    def judge(self, before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> Iterator[DrainRequest]:
        """Yields a request for each device that fails, given two samples one after the other."""
        failing = {index: f"XID {xid}: {FAILING_XIDS[xid]}" for index, xid in now["xids"] if xid in FAILING_XIDS}
        earlier = {gpu["index"]: gpu for gpu in before["gpus"]} if before is not None else {}
        for gpu in now["gpus"]:
            last = earlier.get(gpu["index"])
            # What lasts asks once, so that somebody may let the device come back all the same.
            if gpu["error"] and not (last and last["error"]):
                failing.setdefault(gpu["index"], gpu["error"])
            elif gpu["remap_failed"] and not (last and last["remap_failed"]):
                failing.setdefault(gpu["index"], "a faulty row of memory couldn't be replaced")
            elif last is not None and (gpu["uncorrected_errors"] or 0) > (last["uncorrected_errors"] or 0):
                failing.setdefault(gpu["index"], f"{gpu['uncorrected_errors']} uncorrected memory errors")
        # Where torch's numbers can't be told from the driver's, the wrong device might leave: none does.
        for device, index in enumerate(now["visible"] or ()):
            if self._has_gpus and index in failing:
                yield DrainRequest(node=self._node, device=device, why=f"GPU {index}: {failing[index]}")
        nics: Mapping[str, int] = before["nics"] if before is not None else {}
        for name, errors in now["nics"].items():
            self._rises[name] = self._rises.get(name, 0) + 1 if errors > nics.get(name, errors) else 0
            if self._rises[name] >= RISING_SAMPLES:
                self._rises[name] = 0
                yield DrainRequest(
                    node=self._node, why=f"network {name}: errors rose in {RISING_SAMPLES} samples running"
                )


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
