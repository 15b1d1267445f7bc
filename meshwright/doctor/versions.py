"""The check ``versions`` and its comparison: all nodes run the same software."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path

from meshwright.doctor.contract import Check, NodeComparison, NodeExamination, Observation, Subject
from meshwright.doctor.nvml import Nvml

NAME = "versions"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
"""Packages whose version changes what a rank computes or writes."""
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
"""Wheels that carry NCCL for torch."""


def examine(subject: Subject) -> Observation:
    """Reads the installed versions; nothing is imported."""
    versions = {
        "python": platform.python_version(),
        "meshwright": f"{_version('meshwright')}, source {_source_digest()}",
    }
    versions |= {name: _version(name) for name in PACKAGES}
    versions["NCCL"] = next((text for name in _NCCL if (text := _version(name)) != "none"), "none")
    try:
        versions["driver"] = Nvml().driver() or "unknown"
    except OSError:
        versions["driver"] = "none"
    missing = [name for name in PACKAGES if versions[name] == "none"]
    return Observation(
        value=f"python {versions['python']}, torch {versions['torch']}, meshwright {versions['meshwright']}",
        findings=tuple(f"{name} isn't installed, and meshwright imports it; pip install {name}" for name in missing),
        facts={"versions": versions},
    )


def compare(reports: Sequence[NodeExamination]) -> Observation:
    """Compares every version between the nodes."""
    versions = {report.node: report.facts(NAME).get("versions", {}) for report in reports}
    names = sorted({name for row in versions.values() for name in row})
    findings = []
    for name in names:
        nodes_by_version: dict[str, list[int]] = {}
        for node, row in versions.items():
            nodes_by_version.setdefault(str(row.get(name, "unknown")), []).append(node)
        if len(nodes_by_version) > 1:
            seen = ", ".join(f"{text} on {_node_names(nodes)}" for text, nodes in sorted(nodes_by_version.items()))
            findings.append(
                f"{name} differs between nodes: {seen}; ranks of one run need the same; install one version everywhere"
            )
    return Observation(value=f"{len(names)} versions on {len(reports)} nodes", findings=tuple(findings))


def _source_digest() -> str:
    """Returns a digest of meshwright's own files: two checkouts may call themselves the same version."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _node_names(nodes: Sequence[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"


CHECK = Check(name=NAME, purpose="the packages are installed", limit_s=30.0, examine=examine)
COMPARISON = NodeComparison(name="same versions", purpose="all nodes run the same software", compare=compare)
