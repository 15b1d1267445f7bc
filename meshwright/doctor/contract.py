"""The contract of a check: what it gets, what it returns, and how long it may take."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from meshwright.json_types import JsonObject

SCRATCH = ".meshwright-doctor-"
"""Beginning of the name of a folder that checks write into; it is removed again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The node that is checked, and the run that it is checked for."""

    run_dir: Path
    """Directory of the run; it need not exist yet."""
    session: str
    """Random name of this command on this node."""
    kind: Literal["cpu", "cuda"] = "cpu"
    """Kind of the devices."""
    slots: int = 1
    """Ranks on this node."""
    node: int = 0
    """Number of this node."""
    nodes: int = 1
    """Number of nodes."""
    required_bytes: int = 0
    """Free bytes that the run's checkpoints need; 0 where the model isn't known."""

    @property
    def folder(self) -> Path:
        """The run directory, or its nearest parent that exists."""
        folder = self.run_dir.absolute()
        # os.path.exists is False for a parent that may not be read, too: the check of that folder names the reason.
        while not os.path.isdir(folder) and folder != folder.parent:
            folder = folder.parent
        return folder

    @property
    def scratch(self) -> Path:
        """The folder of this node's trial files."""
        return self.folder / f"{SCRATCH}{self.session}-{self.node}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The outcome of a check."""

    value: str
    """What was seen, in a few words."""
    findings: tuple[str, ...] = ()
    """A sentence for each fault: the rule, the value that breaks it, and what to do; empty when all is well."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Figures as JSON values, for comparisons between nodes and for programs."""

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, which `from_json` reads."""
        return {"value": self.value, "findings": list(self.findings), "facts": dict(self.facts)}

    @classmethod
    def from_json(cls, values: JsonObject) -> Self:
        """Builds the observation from another process's plain values; whatever isn't a text becomes one."""
        facts, findings = values.get("facts"), values.get("findings")
        return cls(
            value=str(values.get("value", "")),
            findings=tuple(map(str, findings)) if isinstance(findings, list) else (),
            facts=facts if isinstance(facts, dict) else {},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A check of one node."""

    name: str
    """Short name, as ``disk``."""
    purpose: str
    """What it makes sure of."""
    limit_s: float
    """Seconds after which it is ended."""
    examine: Callable[[Subject], Observation]
    """Runs in a process of its own, so that it may hang, crash or use CUDA."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeComparison:
    """A check of all nodes together: a pure function of their facts."""

    name: str
    """Short name, as ``versions``."""
    purpose: str
    """What it makes sure of."""
    compare: Callable[[Sequence[NodeExamination]], Observation]
    """Gets the report of each node that answered, by number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """A check's observation, with its name and place."""

    check: str
    """Name of the check."""
    node: int | None
    """Node that it ran on; None for a comparison of all."""
    observation: Observation
    """What it saw."""
    seconds: float = 0.0
    """How long it took."""

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, which `from_json` reads."""
        place = {"check": self.check, "node": self.node, "seconds": round(self.seconds, 3)}
        return place | self.observation.to_json()

    @classmethod
    def from_json(cls, values: JsonObject, node: int | None) -> Self:
        """Builds the result from another node's plain values; the node is the receiver's knowledge."""
        seconds = values.get("seconds", 0.0)
        return cls(
            check=str(values.get("check", "?")),
            node=node,
            observation=Observation.from_json(values),
            seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeExamination:
    """Everything that one node's own checks saw."""

    node: int
    """Number of the node."""
    host: str
    """Name of its host."""
    results: tuple[CheckResult, ...]
    """One for each check."""

    def facts(self, check: str) -> Mapping[str, Any]:
        """Returns the facts of a check; empty when it saw none."""
        return next((result.observation.facts for result in self.results if result.check == check), {})

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, which `from_json` reads."""
        return {"host": self.host, "results": [result.to_json() for result in self.results]}

    @classmethod
    def from_json(cls, node: int, values: JsonObject) -> Self:
        """Builds the report from another node's plain values."""
        results = values.get("results")
        rows = [row for row in results if isinstance(row, dict)] if isinstance(results, list) else []
        return cls(
            node=node,
            host=str(values.get("host", "?")),
            results=tuple(CheckResult.from_json(row, node) for row in rows),
        )
