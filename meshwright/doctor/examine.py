"""Runs the checks of a node one after another; one that fails, crashes or hangs doesn't end the others."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Sequence

from meshwright.doctor import devices, disk, file_system, host_memory, links, ports, shared_memory, versions
from meshwright.doctor.contract import Check, CheckResult, NodeExamination, Observation, Subject
from meshwright.doctor.time_limit import call_with_limit

CHECKS = (
    devices.CHECK,
    host_memory.CHECK,
    shared_memory.CHECK,
    disk.CHECK,
    file_system.CHECK,
    ports.CHECK,
    versions.CHECK,
    links.CHECK,
)
"""Checks of a node, in the order of their rows."""
_CLEAN_S = 10.0


def run_check(check: Check, subject: Subject) -> CheckResult:
    """Runs a check in a process of its own, within its limit."""
    start_s = time.monotonic()
    outcome = call_with_limit(lambda: check.examine(subject).to_json(), check.limit_s)
    if outcome.failure:
        sentence = f"the check '{check.name}' could not be made: {outcome.failure}; look at what it tries"
        observation = Observation(value="not known", findings=(sentence,))
    else:
        observation = Observation.from_json(outcome.value)
    return CheckResult(check=check.name, node=subject.node, observation=observation, seconds=time.monotonic() - start_s)


def examine_node(
    subject: Subject, on_check: Callable[[Check], None], checks: Sequence[Check] = CHECKS
) -> NodeExamination:
    """Runs all checks of a node, and removes what an ended one has left.

    Args:
        subject: the node.
        on_check: called before each check.
        checks: which ones.
    """
    results = []
    for check in checks:
        on_check(check)
        results.append(run_check(check, subject))
    # In a process with a limit, as a disk that hangs would hang this one too.
    call_with_limit(lambda: shutil.rmtree(subject.scratch, ignore_errors=True), _CLEAN_S)
    return NodeExamination(node=subject.node, host=socket.gethostname(), results=tuple(results))
