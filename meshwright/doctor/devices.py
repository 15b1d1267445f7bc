"""The check ``devices``: GPUs that the driver can't reach, that are damaged, busy or slowed down; cores otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright.doctor.contract import Check, Observation, Subject
from meshwright.doctor.nvml import GpuState, Nvml
from meshwright.launch.devices import count_cores
from meshwright.units import format_bytes

BUSY_SHARE = 0.1
"""Share of a GPU's memory that may be in use before a run; a desktop's or monitor's contexts take less."""
_REGISTERED = Path("/proc/driver/nvidia/gpus")


def examine(subject: Subject) -> Observation:
    """Reads the state of every GPU from the driver, and counts the cores."""
    cores = count_cores()
    try:
        nvml = Nvml()
    except OSError:
        if subject.kind == "cuda":
            return Observation(value="no NVML", findings=(_NO_LIBRARY,))
        return Observation(value=f"no GPU; ranks {subject.slots} on cores {cores}", facts={"gpus": [], "driver": ""})
    gpus = nvml.gpus()
    findings = [f"the driver's library fails: {nvml.error}; see dmesg, reload the driver"] if nvml.error else []
    findings += [sentence for gpu in gpus for sentence in _gpu_findings(gpu)]
    registered = len(list(_REGISTERED.iterdir())) if _REGISTERED.is_dir() else len(gpus)
    if registered > len(gpus):
        findings.append(
            f"the driver has {registered} GPUs registered and reaches {len(gpus)}; see dmesg for Xid errors, reset or "
            "drain this node"
        )
    good = sum(not gpu.error for gpu in gpus)
    names = ", ".join(sorted({gpu.name for gpu in gpus if gpu.name}))
    return Observation(
        value=f"{good} of {len(gpus)} GPUs answer" + (f": {names}" if names else ""),
        findings=tuple(findings),
        facts={"gpus": [gpu.name for gpu in gpus], "driver": nvml.driver()},
    )


_NO_LIBRARY = (
    "the run is for GPUs, and the driver's library libnvidia-ml.so.1 can't be loaded; install the driver, or start the "
    "container with its GPUs"
)


def _gpu_findings(gpu: GpuState) -> Iterator[str]:
    label = f"GPU {gpu.index}" + (f" ({gpu.name})" if gpu.name else "")
    if gpu.error:
        yield f"{label} doesn't answer: {gpu.error}; see dmesg for Xid errors, reset or drain this node"
        return
    if gpu.uncorrected_errors:
        yield (
            f"{label} has {gpu.uncorrected_errors} uncorrected memory errors since its reset, and a good one has 0; "
            "reset it, and replace it if they come again"
        )
    if gpu.slowdowns:
        heat = f" at {gpu.celsius} degrees Celsius" if gpu.celsius else ""
        yield f"{label} lowers its clocks{heat}: {', '.join(gpu.slowdowns)}; look after cooling and power"
    if gpu.used_bytes is not None and gpu.total_bytes and gpu.used_bytes > BUSY_SHARE * gpu.total_bytes:
        yield (
            f"{label} has {format_bytes(gpu.used_bytes)} of {format_bytes(gpu.total_bytes)} in use, more than "
            f"{BUSY_SHARE:.0%}; end the processes that nvidia-smi lists"
        )


CHECK = Check(name="devices", purpose="every GPU answers, is whole, free and cool", limit_s=30.0, examine=examine)
