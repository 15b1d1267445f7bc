"""The report of the doctor for people: a table of the checks, then the findings, a sentence each."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from meshwright.doctor.contract import CheckResult
from meshwright.jobs.doctor import DoctorReport


def show_report(report: DoctorReport) -> None:
    """Prints the report on standard error."""
    console = Console(stderr=True, highlight=False, markup=False)
    table = Table(box=None, pad_edge=False)
    for title in ("check", "node", "what was seen", "verdict"):
        table.add_column(title, overflow="fold")
    for result in _results(report):
        count = len(result.observation.findings)
        table.add_row(
            result.check,
            "all" if result.node is None else str(result.node),
            result.observation.value,
            f"{count} finding{'s' if count > 1 else ''}" if count else "ok",
            style="red" if count else None,
        )
    console.print(table)
    findings = report.findings
    console.print()
    for number, finding in enumerate(findings, start=1):
        place = "" if finding.node is None or len(report.nodes) < 2 else f"node {finding.node}: "
        console.print(f"{number}. {place}{finding.sentence}", soft_wrap=True)
    checked = f"{len(_results(report))} checks on {len(report.nodes)} node{'s' if len(report.nodes) != 1 else ''}"
    console.print(f"{checked}: " + (f"{len(findings)} findings" if findings else "all is well"))


def _results(report: DoctorReport) -> list[CheckResult]:
    return [result for node in report.nodes for result in node.results] + list(report.comparisons)
