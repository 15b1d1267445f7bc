"""A follower whose leader drops it: pauses that grow up to a cap, and one event of it."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.errors import LaunchError
from meshwright.launch.addresses import listen_at
from meshwright.resilience import reconnect_backoff as backoff_module
from meshwright.resilience.agent import Agent, NodeEndpoint
from meshwright.resilience.claims import Claim, Claims
from meshwright.resilience.messages import End
from meshwright.resilience.peers import Hub
from meshwright.resilience.reconnect_backoff import CAP_S, FIRST_S, ReconnectBackoff
from meshwright.spec.layout import Layout
from meshwright.train.config import RecoveryConfig
from meshwright.train.outcome import TrainOutcome
from meshwright.transport.key import RunKey
from tests.runs import events


def test_pauses_grow_to_a_cap_and_end_with_another_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(backoff_module.time, "monotonic", lambda: now)
    backoff, pauses = ReconnectBackoff(draw=lambda: 1.0), []
    for _ in range(12):
        assert backoff.may_call("a")
        backoff.record_failed_call()
        pauses.append(backoff._next_call_at - now)
        assert not backoff.may_call("a")
        now += pauses[-1]
    assert pauses[:3] == pytest.approx([FIRST_S, 2 * FIRST_S, 4 * FIRST_S]) and pauses[-2:] == [CAP_S, CAP_S]
    backoff.record_failed_call()
    assert not backoff.may_call("a") and backoff.may_call("b")
    nodes = {ReconnectBackoff() for _ in range(4)}
    for one in nodes:
        one.record_failed_call()
    assert len({one._next_call_at for one in nodes}) == 4 and all(
        FIRST_S / 2 <= one._next_call_at - now <= FIRST_S for one in nodes
    )


def test_a_loss_is_told_once_until_a_connection_has_stood() -> None:
    backoff = ReconnectBackoff()
    assert [backoff.record_loss("a"), backoff.record_loss("a"), backoff.record_loss("b")] == [True, False, True]
    backoff.mark_stable()
    assert backoff.record_loss("b")


def follower(path: Path, key: RunKey) -> Agent:
    """Returns node 1 of two, which has one device."""
    config = SimpleNamespace(
        recovery=RecoveryConfig(),
        launch=SimpleNamespace(group_s=60.0, stop_s=60.0),
        monitor=SimpleNamespace(display="none"),
    )
    job = SimpleNamespace(run_dir=path, config=config, plan=SimpleNamespace(layout=Layout.parse("replicate=2")))
    devices = SimpleNamespace(count=1, kind="cpu", slot=lambda at: at)
    endpoint = NodeEndpoint(node=1, nodes=2, address="127.0.0.1", key=key)
    return Agent(job, devices, endpoint, SimpleNamespace(make_job=None))  # type: ignore[arg-type]


@pytest.mark.parametrize("says_so", [True, False])
def test_the_end_of_a_run_counts_though_the_connection_ends_with_it(says_so: bool, tmp_path: Path) -> None:
    """Also of a leader that was there first, and where its last message is lost and only its file says so."""
    key, listener, outcome = RunKey.fresh(), listen_at("127.0.0.1"), TrainOutcome(step=5)
    hub, claims, over = Hub(listener, key), Claims(tmp_path), threading.Event()
    claims.try_claim(Claim(generation=0, node=0, session="leads", host="127.0.0.1", port=listener.getsockname()[1]))

    def lead() -> None:
        while not over.is_set():
            claims.renew(0)
            for connection, _ in hub.pump(0.01)[0]:
                if says_so:
                    connection.send(End(outcome=outcome, error=""))
                claims.record_outcome(0, outcome)
                hub.drop(connection)

    leader = threading.Thread(target=lead)
    agent = follower(tmp_path, key)
    leader.start()
    try:
        found = None
        for _ in range(3):
            found = found or agent._lead_or_follow()
    finally:
        over.set()
        leader.join()
        agent._close()
        hub.close()
    assert found == outcome and not agent.leads


def test_a_leader_that_drops_each_connection_is_called_seldom_and_told_of_once(tmp_path: Path) -> None:
    """A second of it: without pauses there were thousands of calls and events."""
    key, listener = RunKey.fresh(), listen_at("127.0.0.1")
    hub, claims, dropped = Hub(listener, key), Claims(tmp_path), 0
    claims.try_claim(Claim(generation=0, node=0, session="leads", host="127.0.0.1", port=listener.getsockname()[1]))
    over = threading.Event()

    def lead() -> None:
        nonlocal dropped
        while not over.is_set():
            claims.renew(0)
            hub.pump(0.01)
            dropped += len(hub._connections)
            hub.drop_all()

    agent = follower(tmp_path, key)
    timer = threading.Timer(1.0, lambda: agent._local.interrupts.record(signal.SIGINT))
    leader = threading.Thread(target=lead)
    leader.start()
    timer.start()
    try:
        with contextlib.suppress(LaunchError):
            while not agent._local.interrupts.count:
                agent._lead_or_follow()
    finally:
        over.set()
        leader.join()
        agent._close()
        hub.close()
    assert 1 <= dropped <= 12
    assert len(events(tmp_path, "leader_lost")) == 1
