"""The job ``doctor`` on the hosts of a hostfile: one command a host over ssh, and the report of all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from meshwright.doctor.contract import CheckResult, NodeExamination, Observation
from meshwright.jobs.doctor import DoctorReport
from meshwright.launch.hostfile import HostfileLauncher, HostOutput, read_hostfile

LIMIT_S = 1200.0
"""For all hosts together."""
_COMPLAINT_CHARACTERS = 300


def doctor_on_hosts(args: Sequence[str], hostfile: str, limit_s: float = LIMIT_S) -> DoctorReport:
    """Checks every host of a hostfile, and the links between them.

    Args:
        args: the command's arguments without ``--hostfile`` and ``--devices``.
        hostfile: path of a file with a ``host slots=8`` a line.
        limit_s: for all hosts together.

    Raises:
        ClusterError: for a hostfile that can't be read.
        LaunchError: when ssh can't be run.
    """
    launcher = HostfileLauncher(read_hostfile(Path(hostfile)), supervised=True)
    return merge_outputs(launcher.collect(["doctor", *args, "--json"], limit_s), limit_s)


def merge_outputs(outputs: Sequence[HostOutput], limit_s: float) -> DoctorReport:
    """Returns node 0's report of all nodes, with what it lacks from the others, and a finding for each silent host."""
    reports: dict[int, DoctorReport] = {}
    findings = []
    for node, output in enumerate(outputs):
        try:
            reports[node] = DoctorReport.from_json(json.loads(output.output))
        except (ValueError, KeyError, TypeError, AttributeError):
            findings.append(_silence(node, output, limit_s))
    nodes: dict[int, NodeExamination] = {}
    # Node 0 last: what it gathered is what all nodes agreed on.
    for _, report in sorted(reports.items(), reverse=True):
        nodes |= {row.node: row for row in report.nodes}
    leading = reports.get(0) or next(iter(reports.values()), DoctorReport(nodes=()))
    comparisons = list(leading.comparisons)
    if leading is not reports.get(0) or len(leading.nodes) < len(outputs):
        # A node that could not meet the others says why; they only miss it.
        comparisons += [
            result
            for report in reports.values()
            if report is not leading
            for result in report.comparisons
            if result.check == "meeting" and result.observation.findings and result not in comparisons
        ]
    hosts = Observation(value=f"{len(reports)} of {len(outputs)} hosts answer", findings=tuple(findings))
    return DoctorReport(
        nodes=tuple(report for _, report in sorted(nodes.items())),
        comparisons=(*comparisons, CheckResult(check="hosts", node=None, observation=hosts)),
        links=leading.links,
    )


def _silence(node: int, output: HostOutput, limit_s: float) -> str:
    """Returns the sentence for a host that gave no report."""
    complaint = " ".join(output.complaint.split())[-_COMPLAINT_CHARACTERS:]
    detail = f" ({complaint})" if complaint else ""
    if output.status is None:
        return f"node {node}, {output.name}, gave no report within {limit_s:g} s{detail}; run meshwright doctor there"
    if not output.connected:
        return f"node {node}, {output.name}, can't be reached by ssh{detail}; try: ssh {output.name} true"
    return (
        f"node {node}, {output.name}, ended with status {output.status} and no report{detail}; meshwright must be "
        "installed there, in the same folder and with the same Python"
    )
