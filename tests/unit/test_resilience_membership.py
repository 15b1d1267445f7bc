"""The nodes that a leader has: who joins, is lost, restarts, or doesn't end its ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.resilience import membership as membership_module
from meshwright.resilience.claims import Claim, Claims
from meshwright.resilience.membership import LeadershipLost, MinorityPartition, PeerMembership
from meshwright.resilience.messages import Fence, GenerationEnd, NodeReport, Ports, Ready
from meshwright.train.config import RecoveryConfig


class Wire:
    """Connections whose messages and ends a test says."""

    def __init__(self) -> None:
        self.inbox: list[tuple[Any, Any]] = []
        self.lost: list[Any] = []
        self.dropped: list[Any] = []
        self.sent: list[Any] = []

    def pump(self, seconds: float) -> tuple[list, list]:
        found = self.inbox, self.lost
        self.inbox, self.lost = [], []
        return found

    def drop(self, connection: Any) -> None:
        self.dropped.append(connection)

    def broadcast(self, message: Any) -> None:
        self.sent.append(message)

    def fileno(self) -> int:
        return 7


def report(node: int, session: str = "a", generation: int = -1) -> NodeReport:
    return NodeReport(
        node=node, session=session, slots=(0,), host="h", ports=Ports(store=1, snapshots=2, courier=3, disk=4),
        snapshots=(), peak_flops=None, available_bytes=0, link_bytes_s=None, end=GenerationEnd(generation=generation),
    )  # fmt: skip


def connection(silent: bool = False) -> Any:
    return SimpleNamespace(silent=silent)


class Run:
    def __init__(self, path: Path, back_s: float = 60.0) -> None:
        self.wire, self.told = Wire(), list[tuple[str, dict]]()
        self.claims = Claims(path)
        claim = Claim(generation=0, node=0, session="leads", host="h", port=1)
        assert self.claims.try_claim(claim)
        job = SimpleNamespace(config=SimpleNamespace(recovery=RecoveryConfig(back_s=back_s)))
        local: Any = SimpleNamespace(node=0, job=job, report=lambda: report(0, "leads"))
        event = lambda kind, **data: self.told.append((kind, data))  # noqa: E731
        self.members = PeerMembership(local, self.wire, self.claims, claim, event)  # type: ignore[arg-type]
        self.members.report_local()

    def hear(self, wire: Any, message: Any) -> None:
        self.wire.inbox.append((wire, message))
        self.members.pump(0.0)

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.told]


def test_a_node_joins_is_lost_and_comes_back(tmp_path: Path) -> None:
    run, first, again = Run(tmp_path), connection(), connection(silent=True)
    run.members.begin_generation()
    run.hear(first, Ready(report(1)))
    assert run.members.joined_nodes() == [1] and run.members.awaits_reconfiguration()
    run.members.begin_generation()
    assert run.members.joined_nodes() == [] and not run.members.awaits_reconfiguration()
    run.wire.lost.append(first)
    run.members.pump(0.0)
    assert run.members.lost_nodes == {1: "its connection ended"} and run.members.lost_at is not None
    run.hear(again, Ready(report(1, "b")))
    assert run.members.awaits_reconfiguration(), "lost once: used again at once"
    run.wire.lost.append(again)
    run.members.pump(0.0)
    run.hear(connection(), Ready(report(1, "c")))
    assert run.members.lost_nodes[1] == "it was silent"
    assert run.members.joined_nodes() == [1] and not run.members.awaits_reconfiguration(), "lost twice: it waits"
    assert run.kinds() == ["node_ready", "node_lost"] * 2 + ["node_ready"]


def test_a_supervisor_that_was_started_again_has_lost_its_memory(tmp_path: Path) -> None:
    run, first, again = Run(tmp_path), connection(), connection()
    run.hear(first, Ready(report(1)))
    run.members.begin_generation()
    run.hear(again, Ready(report(1, "b")))
    assert run.members.lost_nodes == {1: "it was started again"} and run.wire.dropped == [first]
    assert run.members.reports[1].session == "b"
    run.hear(again, Ready(report(1, "c")))
    assert 1 not in run.members.reports and run.wire.dropped == [first, again], "one process has one session"


def test_nobody_else_reports_for_the_leader(tmp_path: Path) -> None:
    run, stranger = Run(tmp_path), connection()
    run.hear(stranger, Ready(report(0, "b")))
    assert run.wire.dropped == [stranger] and run.members.reports[0].session == "leads"


def test_nodes_whose_ranks_do_not_end_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "_FENCE_S", 0.05)
    run, order = Run(tmp_path), SimpleNamespace(nodes=[0, 1, 2])
    run.members.reports[0] = dataclasses.replace(report(0, "leads"), end=GenerationEnd(generation=0))
    run.hear(connection(), Ready(report(1, generation=0)))
    hangs = connection()
    run.hear(hangs, Ready(report(2)))
    run.members.fence_generation(order)  # type: ignore[arg-type]
    assert run.wire.sent == [Fence(0)] and run.wire.dropped == [hangs]
    assert sorted(run.members.reports) == [0, 1] and "didn't end within" in run.members.lost_nodes[2]


def test_a_leader_of_an_older_generation_leads_no_more(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.members.claim_next_generation()
    assert run.members.generation == 1
    assert run.claims.try_claim(Claim(generation=2, node=1, session="s", host="h", port=1))
    with pytest.raises(LeadershipLost):
        run.members.pump(0.0)
    with pytest.raises(LeadershipLost):
        run.members.claim_next_generation()


def test_a_leader_gives_way_where_most_nodes_live_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "PRESENCE_S", 5.0)
    run, order = Run(tmp_path), SimpleNamespace(members=(0, 1, 2))
    run.members.check_majority(order)  # type: ignore[arg-type]
    stamps = iter(range(100))
    run.claims.read_presence = lambda nodes: {node: next(stamps) for node in nodes}  # type: ignore[method-assign]
    with pytest.raises(MinorityPartition):
        run.members.check_majority(order)  # type: ignore[arg-type]
    assert run.told[-1] == ("gave_way", {"node": 0, "reached": [0], "generation": 0})
