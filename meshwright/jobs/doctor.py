"""The job ``doctor``: checks the machines of a run before it starts, on one node or on several together."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cluster.cluster import Cluster
from meshwright.doctor.clocks import compare_clocks
from meshwright.doctor.contract import Check, CheckResult, NodeExamination, Observation, Subject
from meshwright.doctor.examine import examine_node
from meshwright.doctor.link_faults import find_link_faults
from meshwright.doctor.links import LinkMeasurement, measure_node_links
from meshwright.doctor.meeting import Meeting, serve_store
from meshwright.doctor.shared_folder import (
    LIMIT_S,
    compare_shared_folder,
    make_shared_folder,
    remove_shared_folder,
    shared_folder,
    try_shared_folder,
)
from meshwright.doctor.time_limit import LimitedCall, call_with_limit
from meshwright.doctor.versions import COMPARISON as SAME_VERSIONS
from meshwright.errors import ConfigError, LaunchError
from meshwright.jobs.nodes import NodeOptions
from meshwright.jobs.progress import Say, to_stderr
from meshwright.launch.addresses import address_to, interface_of, link_bytes_s, listen_at
from meshwright.launch.choice import choose_launcher
from meshwright.launch.devices import found_devices
from meshwright.launch.torchrun import TorchrunLauncher
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.train.run_config import RunConfig

MEET_S = 120.0
"""For which node 0 waits for the other nodes, whose own checks may take longer than its own."""
_MODEL_S = 120.0
_STATE_BYTES = 12
"""Bytes of a checkpoint for each weight: master and two moments in float32. Source: docs/architecture.md."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A fault that a check found."""

    check: str
    """Name of the check."""
    node: int | None
    """Node that has it; None for one between nodes."""
    sentence: str
    """The rule, the value that breaks it, and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorReport:
    """What the checks of all nodes saw."""

    nodes: tuple[NodeExamination, ...]
    """Reports of the nodes that answered."""
    comparisons: tuple[CheckResult, ...] = ()
    """What the nodes' reports say together, and what the links between them gave."""
    links: tuple[LinkMeasurement, ...] = ()
    """Links between the nodes."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Every finding, node by node."""
        results = [result for report in self.nodes for result in report.results] + list(self.comparisons)
        return tuple(
            Finding(check=result.check, node=result.node, sentence=sentence)
            for result in results
            for sentence in result.observation.findings
        )

    def to_json(self) -> dict[str, Any]:
        """Returns plain values: ``healthy``, ``findings``, ``nodes``, ``comparisons``, ``links``."""
        return {
            "healthy": not self.findings,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "nodes": {str(report.node): report.to_json() for report in self.nodes},
            "comparisons": [result.to_json() for result in self.comparisons],
            "links": [dataclasses.asdict(link) for link in self.links],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DoctorReport:
        """Builds the report from another command's plain values.

        Raises:
            KeyError, TypeError, ValueError: for values of another form.
        """
        return cls(
            nodes=tuple(NodeExamination.from_json(int(node), row) for node, row in values["nodes"].items()),
            comparisons=tuple(CheckResult.from_json(row, None) for row in values["comparisons"]),
            links=tuple(LinkMeasurement.from_json(row) for row in values["links"]),
        )


def doctor(
    config: RunConfig | None = None,
    *,
    nodes: NodeOptions | None = None,
    cluster: str = "",
    meet_s: float = MEET_S,
    say: Say = to_stderr,
) -> DoctorReport | None:
    """Checks this node, and together with the others the links, clocks, versions and the folder between them.

    Args:
        config: of the run: its directory, devices and model; the defaults when None.
        nodes: this node's place, when the same is done on the others.
        cluster: text or file of the cluster, whose links are what is expected; the other links when empty.
        meet_s: for which node 0 waits for the others.
        say: takes a line of progress.

    Returns:
        What was seen; None on ranks of torchrun beyond the first of a node.

    Raises:
        ConfigError, ClusterError: for what was asked and can't be.
    """
    config = config or RunConfig()
    expected = _expected_rate(cluster)
    launcher = choose_launcher(config.devices) if nodes is None else None
    context = launcher.context if isinstance(launcher, TorchrunLauncher) else None
    if context is not None and context.local_rank:
        return None
    count = nodes.nodes if nodes is not None else context.nodes if context is not None else 1
    node = nodes.node if nodes is not None else context.rank // context.local_world if context is not None else 0
    devices = found_devices(
        nodes.slots or (config.devices and -(-config.devices // count))
        if nodes is not None
        else context.local_world
        if context is not None
        else config.devices
    )
    subject = Subject(
        run_dir=Path(config.run or "runs"),
        session=uuid.uuid4().hex[:12],
        kind=devices.kind,
        slots=devices.count,
        node=node,
        nodes=count,
        required_bytes=_required_bytes(config),
    )
    if count == 1:
        return DoctorReport(nodes=(_examine(subject, say),))
    if nodes is not None:
        meeting, listening = _node_meeting(nodes), True
    else:
        assert context is not None
        meeting = Meeting(host=context.host, port=context.port, node=node, nodes=count)
        listening = not context.agent_store
    return _NodeDoctor(subject, meeting, expected, meet_s, say).examine(listening and node == 0)


def _node_meeting(nodes: NodeOptions) -> Meeting:
    host, _, port = nodes.meet.partition(":")
    if not host or not port:
        raise ConfigError(f"--meet {nodes.meet}: give address and port of node 0, as --meet 10.0.0.1:29500")
    try:
        interface = interface_of(host if nodes.node == 0 else address_to(host))
    except LaunchError:
        # No route: the attempt to connect says so, as a finding.
        interface = ""
    return Meeting(host=host, port=int(port), node=nodes.node, nodes=nodes.nodes, interface=interface)


def _examine(subject: Subject, say: Say) -> NodeExamination:
    def show_check(check: Check) -> None:
        say(f"  node {subject.node}: {check.name}: {check.purpose}")

    return examine_node(subject, show_check)


class _NodeDoctor:
    """The checks of one node of several, in step with the others.

    Args:
        subject: this node.
        meeting: of all nodes.
        expected: bytes per second of a link by the cluster's file; None without one.
        meet_s: for which node 0 waits for the others.
        say: takes a line of progress.
    """

    def __init__(self, subject: Subject, meeting: Meeting, expected: float | None, meet_s: float, say: Say) -> None:
        self._subject, self._meeting, self._say = subject, meeting, say
        self._expected, self._meet_s = expected, meet_s

    def examine(self, serves: bool) -> DoctorReport:
        """Runs this node's checks, meets the others, and returns the report of all; ``serves`` on node 0."""
        server: LimitedCall | None = None
        if serves:
            try:
                # Before the checks, so that the others find it.
                server = serve_store(listen_at(self._meeting.host, self._meeting.port))
            except LaunchError as error:
                sentence = f"{error}, or end the process that listens there (ss -ltnp), before the run needs that port"
                return DoctorReport(nodes=(_examine(self._subject, self._say),), comparisons=(_trouble(sentence),))
        folder = shared_folder(self._subject.folder, self._subject.session)
        try:
            own_report = _examine(self._subject, self._say)
            if self._subject.node == 0:
                call_with_limit(lambda: make_shared_folder(folder), LIMIT_S)
            return self._meet(own_report)
        finally:
            if server is not None:
                server.close()
            if self._subject.node == 0:
                call_with_limit(lambda: remove_shared_folder(folder), LIMIT_S)

    def _meet(self, own_report: NodeExamination) -> DoctorReport:
        """Exchanges reports with the other nodes, then measures the links to them."""
        everyone = list(range(self._subject.nodes))
        self._say(f"  node {self._subject.node}: waits for the other nodes")
        own_values = {"report": own_report.to_json(), "session": self._subject.session}
        outcome = self._meeting.gather("reports", own_values, everyone, self._meet_s)
        if outcome.failure:
            sentence = f"node {self._subject.node} could not meet node 0: {outcome.failure}"
            return DoctorReport(nodes=(own_report,), comparisons=(_trouble(sentence),))
        rows = _valid_rows(outcome.value, "report")
        reports = tuple(NodeExamination.from_json(node, row["report"]) for node, row in sorted(rows.items()))
        comparisons = [_compare_presence(everyone, list(rows), self._meet_s)]
        comparisons.append(_comparison(SAME_VERSIONS.name, SAME_VERSIONS.compare(reports)))
        if self._subject.node not in rows or len(rows) < 2:
            return DoctorReport(nodes=reports, comparisons=tuple(comparisons))
        links, attempts = self._measure(sorted(rows), str(rows[0].get("session")) if 0 in rows else "")
        comparisons.append(_comparison("shared folder", compare_shared_folder(attempts, str(self._subject.folder))))
        comparisons.append(_comparison("clocks", compare_clocks(link for link in links if link.backend == "gloo")))
        value, findings = find_link_faults(links, "node", self._expected, link_bytes_s(self._meeting.host))
        comparisons.append(_comparison("links", Observation(value=value, findings=tuple(findings))))
        return DoctorReport(nodes=reports, comparisons=tuple(comparisons), links=tuple(links))

    def _measure(
        self, members: Sequence[int], session: str
    ) -> tuple[list[LinkMeasurement], dict[int, Mapping[str, Any]]]:
        """Tries the shared folder, named by node 0's session, and measures the links; returns what all nodes saw."""
        attempt, node = None, self._subject.node
        # A name from the network: letters and digits alone, so that it leads nowhere else.
        if session.isalnum():
            folder = shared_folder(self._subject.folder, session)
            attempt = call_with_limit(lambda: try_shared_folder(folder, node), LIMIT_S).value
        self._say(f"  node {node}: links to the other nodes")
        backends = ("gloo", "nccl") if self._subject.kind == "cuda" else ("gloo",)
        own_links = measure_node_links(self._meeting, members, backends)
        values = {"links": [dataclasses.asdict(link) for link in own_links], "attempt": attempt or {}}
        # The others may still wait for the limits of broken links.
        outcome = self._meeting.gather("links", values, list(members), self._meet_s)
        rows = _valid_rows(outcome.value or {str(node): values}, "attempt")
        return _merge_links(rows), {node: row["attempt"] for node, row in sorted(rows.items())}


def _valid_rows(values: Mapping[str, Any], name: str) -> dict[int, dict[str, Any]]:
    """Returns the nodes' values that have the form of this program; others count as absent."""
    return {
        int(node): row
        for node, row in values.items()
        if node.isdigit() and isinstance(row, dict) and isinstance(row.get(name), dict)
    }


def _merge_links(rows: Mapping[int, Mapping[str, Any]]) -> list[LinkMeasurement]:
    """Returns each link once; a fault that one of its ends saw counts."""
    merged: dict[tuple[str, int, int], LinkMeasurement] = {}
    for _, row in sorted(rows.items()):
        for values in row.get("links", ()):
            link = LinkMeasurement.from_json(values)
            key = (link.backend, link.first, link.second)
            if key not in merged or link.fault:
                merged[key] = link
    return [link for _, link in sorted(merged.items())]


def _comparison(name: str, observation: Observation) -> CheckResult:
    return CheckResult(check=name, node=None, observation=observation)


def _trouble(sentence: str) -> CheckResult:
    return _comparison("meeting", Observation(value="failed", findings=(sentence,)))


def _compare_presence(everyone: Sequence[int], present: Sequence[int], meet_s: float) -> CheckResult:
    missing = sorted(set(everyone) - set(present))
    findings = [
        f"node {node} of {len(everyone)} didn't come within {meet_s:g} s; start meshwright doctor there with --node "
        f"{node}, and look at what it says"
        for node in missing
    ]
    value = f"{len(present)} of {len(everyone)} nodes"
    return _comparison("meeting", Observation(value=value, findings=tuple(findings)))


def _expected_rate(cluster: str) -> float | None:
    """Returns the bytes per second between two nodes by a cluster's text or file."""
    if not cluster:
        return None
    outside = Cluster.parse(cluster).fabric().outside
    if outside is None:
        raise ConfigError(f"--cluster {cluster} has no network between nodes; give it 'outside', or drop --cluster")
    return outside.rate


def _count_weights(model: ModelConfig) -> int:
    return sum(weight.numel() for weight in build_meta(model).module.parameters())


def _required_bytes(config: RunConfig) -> int:
    """Returns the bytes of the checkpoints that stand at once; 0 where no model was named or none can be built."""
    if config.model == ModelConfig():
        return 0
    outcome = call_with_limit(lambda: _count_weights(config.model), _MODEL_S)
    if outcome.failure:
        return 0
    # The new one is written before the oldest is removed.
    return (config.checkpoint.keep + 1) * _STATE_BYTES * int(outcome.value)
