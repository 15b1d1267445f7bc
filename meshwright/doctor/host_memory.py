"""The check ``host memory``: what the machine and the limits of its control groups leave, and what ranks take."""

from __future__ import annotations

from meshwright.control_groups import PROCESS_BYTES, allowed_memory_bytes, available_bytes, machine_memory_bytes
from meshwright.doctor.contract import Check, Observation, Subject
from meshwright.units import format_bytes


def examine(subject: Subject) -> Observation:
    """Compares the machine's memory, the tightest limit and what is left within it."""
    machine, allowed, available = machine_memory_bytes(), allowed_memory_bytes(), available_bytes()
    value = f"{format_bytes(available)} available of {format_bytes(allowed)}"
    if allowed < machine:
        value += f", to which a control group limits the machine's {format_bytes(machine)}"
    needed, findings = subject.slots * PROCESS_BYTES, []
    if available < needed:
        cure = "raise the limit of the container, pod or job" if allowed < machine else "end other programs"
        findings.append(
            f"{format_bytes(available)} of host memory are available, and {subject.slots} ranks take about "
            f"{format_bytes(needed)} before they hold a model; {cure}, or start fewer ranks with --devices"
        )
    facts = {"machine_bytes": machine, "allowed_bytes": allowed, "available_bytes": available}
    return Observation(value=value, findings=tuple(findings), facts=facts)


CHECK = Check(name="host memory", purpose="processes have room within the limits", limit_s=10.0, examine=examine)
