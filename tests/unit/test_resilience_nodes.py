"""What recovery over several nodes is made of: claims, lines, orders, and snapshots kept and read elsewhere."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.remote import complete_steps
from meshwright.checkpoint.snapshot import Segment, State, read_snapshots
from meshwright.checkpoint.snapshot_writer import SnapshotWriter
from meshwright.checkpoint.star import StarAgreement
from meshwright.checkpoint.store import CheckpointStore
from meshwright.checkpoint.tensor_shards import TensorShard, collect_local_shards, digest
from meshwright.errors import CheckpointError, ConfigError, LaunchError
from meshwright.launch.addresses import address_to, interface_of, listen_at
from meshwright.resilience import claims as claims_module
from meshwright.resilience import peers as wire_module
from meshwright.resilience.claims import Claim, Claims
from meshwright.resilience.messages import (
    Address,
    CopyPlan,
    End,
    GenerationEnd,
    NodeReport,
    NodeShare,
    Order,
    Ports,
    Reconfigure,
    SnapshotRecord,
    StateLocation,
)
from meshwright.resilience.orders import (
    assign_ranks,
    choose_state,
    describe_shortage,
    plan_copies,
    plan_local_copies,
    ranks_to_copy,
)
from meshwright.resilience.peers import SILENCE_S, Hub, PeerConnection, pump_until
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import RecoveryConfig
from meshwright.train.outcome import TrainOutcome
from meshwright.transport.key import RunKey

KEY = RunKey.fresh()


def called(server: Hub, client: Hub, port: int) -> PeerConnection:
    """A line from one hub to another, which both belong to this process."""
    with ThreadPoolExecutor(1) as pool:
        line = pool.submit(client.call, "127.0.0.1", port)
        assert pump_until(line.done, 20.0, server.pump)
        found = line.result()
    assert found is not None
    return found


def claim(generation: int, node: int) -> Claim:
    return Claim(generation=generation, node=node, session=f"s{node}", host="127.0.0.1", port=1)


def test_a_generation_belongs_to_one_node(tmp_path: Path) -> None:
    one, two = Claims(tmp_path), Claims(tmp_path)
    assert one.newest() is None
    assert one.try_claim(claim(0, 0)) and not two.try_claim(claim(0, 1))
    assert two.newest() == claim(0, 0)
    fence = one.make_fence(0)
    fence()
    assert two.try_claim(claim(1, 1)) and one.superseded(0) and not one.superseded(1)
    with pytest.raises(CheckpointError, match="generation 0 of the run was given up"):
        fence()
    assert one.newest() == claim(1, 1)
    assert Claims(tmp_path).newest() == claim(1, 1), "also for who comes later"


def test_a_claim_that_is_not_renewed_grows_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(claims_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    leader, other = Claims(tmp_path), Claims(tmp_path)
    assert other.age_s() == float("inf")
    leader.try_claim(claim(0, 0))
    other.newest()
    assert other.age_s() == 0.0, "counted from the first look"
    clock.now += 3.0
    assert other.age_s() == 3.0
    time.sleep(0.05)  # a tick of the file system's clock, by which renewals are seen
    leader.renew(0)
    clock.now += 1.0
    assert other.age_s() == 0.0
    outcome = TrainOutcome(step=9, loss=2.5, finished=True, metrics={"validation_loss": 2.75})
    leader.record_outcome(0, outcome)
    assert other.age_s() == float("inf")
    assert other.read_outcome(0) is None and other.read_outcome(-1) == outcome
    leader.record_outcome(0, None)
    with pytest.raises(LaunchError, match="ended by an error"):
        other.read_outcome(-1)


def test_a_checkpoint_gets_no_name_behind_the_fence(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    claims.try_claim(claim(0, 0))
    store = CheckpointStore(tmp_path / "checkpoints", fence=claims.make_fence(0))
    store.save(1, {"weights/a": torch.ones(3)}, {})
    claims.try_claim(claim(1, 1))
    with pytest.raises(CheckpointError, match="was given up"):
        store.save(2, {"weights/a": torch.ones(3)}, {})
    assert [entry.step for entry in store.entries()] == [1]


def test_lines_carry_messages_and_tell_of_their_end() -> None:
    listener = listen_at("127.0.0.1")
    port = listener.getsockname()[1]
    server, client = Hub(listener, KEY), Hub(listen_at("127.0.0.1"), KEY)
    try:
        line = called(server, client, port)
        line.send(End(outcome=None, error="x" * 300_000))
        heard: list = []

        def pump(seconds: float) -> None:
            client.pump(0.0)
            heard.extend(message for _, message in server.pump(seconds)[0])

        assert pump_until(lambda: bool(heard), 100.0, pump)
        assert isinstance(heard[0], End) and len(heard[0].error) == 300_000
        client.drop(line)
        lost: list = []
        assert pump_until(lambda: bool(lost), 100.0, lambda seconds: lost.extend(server.pump(seconds)[1]))
    finally:
        server.close()
        with pytest.raises(ConnectionRefusedError):
            client.call("127.0.0.1", port)
        client.close()


def test_who_slept_gives_others_time_to_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = listen_at("127.0.0.1")
    port = listener.getsockname()[1]
    server, client = Hub(listener, KEY), Hub(listen_at("127.0.0.1"), KEY)
    try:
        line = called(server, client, port)
        line.send(Reconfigure(0))
        heard: list = []
        assert pump_until(lambda: bool(heard), 100.0, lambda seconds: heard.extend(server.pump(seconds)[0]))
        clock = SimpleNamespace(now=time.monotonic())
        monkeypatch.setattr(wire_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
        clock.now += 10 * SILENCE_S
        assert server.pump()[1] == [], "it was this one that didn't listen"
        for _ in range(3):
            clock.now += 0.3 * SILENCE_S
            assert server.pump()[1] == []
        clock.now += 0.3 * SILENCE_S
        assert len(server.pump()[1]) == 1
    finally:
        server.close()
        client.close()


def test_addresses_of_this_machine() -> None:
    assert address_to("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    with pytest.raises(LaunchError, match="can't listen at"):
        listen_at("192.0.2.1")


def report(
    node: int,
    snapshots: Sequence[tuple[int, int, int, int, bool]] = (),
    slots: int = 2,
    available: int = 0,
    link: float | None = None,
) -> NodeReport:
    ports = Ports(store=10 + node, snapshots=20 + node, courier=30 + node, disk=40 + node)
    return NodeReport(
        node=node, session=f"s{node}", slots=tuple(range(slots)), host=f"h{node}", ports=ports,
        snapshots=tuple(SnapshotRecord(*fields) for fields in snapshots), peak_flops=None, available_bytes=available,
        link_bytes_s=link, end=GenerationEnd(),
    )  # fmt: skip


def order_of(plan: Plan, shares: tuple[NodeShare, ...], copies: CopyPlan, state: StateLocation | None = None) -> Order:
    servers = {node: Address(f"h{node}", 20 + node) for node in range(10)}
    members, store = tuple(share.node for share in shares), Address("h0", 10)
    return Order(
        generation=2,
        plan=plan,
        shares=shares,
        members=members,
        store=store,
        snapshot_servers=servers,
        state=state,
        copies=copies,
    )


def plan_of(layout: str, memory: dict[str, int] | None = None, step_s: float | None = None) -> Plan:
    parsed = Layout.parse(layout)
    return Plan(layout=parsed, prediction=Prediction(memory=memory or {}, step_s=step_s), ranks=parsed.world, reason="")


def test_the_newest_state_that_is_whole_anywhere_is_chosen() -> None:
    # Generation, step, rank, ranks, own: rank 1's node has gone; node 2 has its copy of step 4, not of step 5.
    held = {
        0: [(0, 4, 0, 3, True), (0, 5, 0, 3, True), (0, 4, 2, 3, False)],
        2: [(0, 4, 2, 3, True), (0, 5, 2, 3, True), (0, 4, 1, 3, False)],
    }
    assert complete_steps([row for rows in held.values() for row in rows]) == [(4, 0)]
    reports = {node: report(node, rows) for node, rows in held.items()}
    expected = StateLocation(step=4, generation=0, holders={0: 0, 1: 2, 2: 0}, tier="peer", single_copies=(0, 1))
    assert choose_state(reports, set(), -1) == expected
    assert choose_state(reports, {(4, 0)}, -1) is None, "it turned out damaged"
    assert choose_state(reports, set(), 6) is None, "the disk is newer"
    assert choose_state(reports, set(), -1, floor=0) is None, "the run turned back from it"
    first, second = assign_ranks(reports, [(0, 0), (0, 1), (2, 1)])
    assert (first.node, first.first_rank, first.slots) == (0, 0, (0, 1))
    assert second == NodeShare(node=2, first_rank=2, slots=(1,), courier=Address("h2", 32), disk=Address("h2", 42))


def test_snapshots_over_nodes_need_room_on_each_and_time_on_the_way() -> None:
    plan = plan_of("shard=3,zero=3", {"parameters": 10**9, "optimizer": 2 * 10**9}, 0.1)
    four, learned = RecoveryConfig(snapshot_every=4), RecoveryConfig()
    devices = [(0, 0), (0, 1), (1, 0)]

    def copies(config: RecoveryConfig, available: int, link: float | None = None) -> CopyPlan:
        # Node 0 holds 3 of each of its own two and 2 of the other's: 8 times 3 GB, of half of what it has; node 1, 7.
        reports = {0: report(0, available=2 * 24 * 10**9), 1: report(1, slots=1, available=available, link=link)}
        return plan_copies(plan, assign_ranks(reports, devices), reports, config)

    room = 2 * 21 * 10**9
    assert copies(four, room) == CopyPlan(every=4, disk=False, peers=1)
    assert copies(learned, room).every > 15
    assert copies(RecoveryConfig(snapshot_every=0), room).every == 0
    assert copies(learned, room, 1e7).every == 6000, "node 0 sends 2 times 3 GB, 600 s, in steps of 0.1 s"
    assert copies(four, room - 2).every == 0
    reports = {1: report(1, slots=1, available=room - 2)}
    alone = plan_copies(plan, assign_ranks(reports, [(1, 0)]), reports, four)
    assert alone == CopyPlan(every=4, disk=True, peers=0), "its own rank's alone"


def test_on_a_run_of_one_node_a_shortage_is_told_with_its_bytes() -> None:
    plan = plan_of("replicate=2", {"parameters": 400, "optimizer": 600})
    assert plan_local_copies(plan, report(0, available=6000), RecoveryConfig(snapshot_every=4)) == (
        CopyPlan(every=4, disk=True),
        None,
    )
    copies, told = plan_local_copies(plan, report(0, available=5998), RecoveryConfig(snapshot_every=4))
    assert copies == CopyPlan(every=0, disk=True)
    assert told == {"kind": "snapshots_off", "state_bytes": 1000, "available_bytes": 5998, "from_disk_only": True}


def test_more_copies_take_more_room_and_fewer_are_held_where_it_is_short() -> None:
    plan = plan_of("shard=4,zero=3", {"parameters": 10**9, "optimizer": 2 * 10**9}, 0.1)
    two = RecoveryConfig(snapshot_every=4, copies=2)

    def held(available: int, nodes: int = 4) -> CopyPlan:
        reports = {node: report(node, slots=1, available=available, link=1e9) for node in range(4)}
        shares = assign_ranks(reports, [(node, 0) for node in range(nodes)])
        return plan_copies(plan, shares, reports, two)

    def told(copies: CopyPlan, nodes: int = 4) -> dict | None:
        reports = {node: report(node, slots=4 // nodes) for node in range(nodes)}
        devices = [(node, slot) for node in range(nodes) for slot in range(4 // nodes)]
        return describe_shortage(order_of(plan, assign_ranks(reports, devices), copies), two)

    # Three of its own and three of each of two others, of 3 GB, of half of what a node has; three more to the disk.
    room = 2 * 3 * 10**9
    assert held(12 * room) == CopyPlan(every=4, disk=True, peers=2) and held(9 * room).peers == 2
    assert held(9 * room - 2) == CopyPlan(every=4, disk=True, peers=1), "three of its own and two of the one before"
    assert held(5 * room).peers == 1 and held(5 * room - 2) == CopyPlan(every=0, disk=False, peers=0)
    assert told(held(5 * room)) == {"kind": "copies_reduced", "nodes": [0, 1, 2, 3], "copies": 1, "wanted": 2}
    off = told(held(room))
    assert off is not None and off["kind"] == "snapshots_off"
    assert told(held(12 * room)) is None
    left = held(12 * room, nodes=2)
    assert left.peers == 1, "there is one other node"
    assert told(left, nodes=2) is None
    with pytest.raises(ConfigError, match=r"recovery.copies = 3 .* takes 4 nodes .* there are 3; .*copies = 2"):
        RecoveryConfig(copies=3).check_nodes(3)
    RecoveryConfig(copies=2).check_nodes(3)
    RecoveryConfig().check_nodes(1)


def test_most_nodes_are_those_that_live_and_are_not_reached(tmp_path: Path) -> None:
    """Of three, the leader sees one of two others that live no more, and both of them when it is cut off."""
    leaders, others = Claims(tmp_path), [Claims(tmp_path) for _ in (1, 2)]
    assert leaders.try_claim(claim(0, 0)) and leaders.read_presence([1, 2]) == {}
    for node, one in enumerate(others, 1):
        one.renew_presence(node)
    first = leaders.read_presence([1, 2])
    assert sorted(first) == [1, 2]
    others[0]._present_at = 0.0
    time.sleep(0.02)
    others[0].renew_presence(1)
    now = leaders.read_presence([1, 2])
    assert now[1] > first[1] and now[2] == first[2]
    others[1].newest()
    assert others[1].age_s() < float("inf")
    leaders.yield_lead(0)
    assert others[1].age_s() == float("inf"), "anybody may lead"


def test_writers_of_several_nodes_make_one_checkpoint_or_none(tmp_path: Path) -> None:
    """Each writes what its ranks left; one that fails, or never comes, fails it for all, and nothing gets a name."""
    listener = listen_at("127.0.0.1")
    address = listener.getsockname()

    def write(node: int, step: int, limit_s: float = 20.0) -> str:
        own = listener if node == 0 else None
        agreement = StarAgreement(node, 2, (0, step), address, own, limit_s, KEY)
        store = CheckpointStore(tmp_path / "checkpoints", group=agreement)
        tensors = {f"weights/{node}": torch.full((3,), float(step)), "weights/both": torch.ones(2)}
        held = [part for part, _ in collect_local_shards(tensors)]
        kept = [(at, part) for at, part in enumerate(held) if node == 0 or "both" not in part.name]
        segment, whole = Segment(), [TensorShard(f"weights/{one}", (3,), "float32", ((0, 3),)) for one in (0, 1)]
        fingerprint = digest([*whole, *held])
        writer = SnapshotWriter(
            [segment], rank=node, generation=0, tensors=fingerprint, ranks=2, local_shards=held, saved_shards=kept
        )
        writer.save(step, tensors, {"tokens": step})
        writer.wait()
        (snapshot,) = read_snapshots([segment])
        segment.close()
        try:
            store.save_state(step, State(step, [snapshot]), snapshot.meta, Origin())
        except CheckpointError as error:
            return str(error)
        finally:
            agreement.close()
        return ""

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(write, (1, 0), (1, 1))) == ["", ""]
        found = CheckpointStore(tmp_path / "checkpoints").find()
        assert found is not None and found.step == 1 and len(found.manifest.files) == 2
        stale = pool.submit(write, 1, 2)  # for a step that the other one never writes
        time.sleep(0.1)
        assert list(pool.map(write, (0, 1), (3, 3))) == ["", ""]
        assert "lost contact with the writer of another node" in stale.result()
        (told,) = pool.map(write, (0,), (4,), (0.2,))
        assert "lost contact" in told
    assert [entry.step for entry in CheckpointStore(tmp_path / "checkpoints").entries()] == [1, 3]
    listener.close()


def test_a_writer_that_never_came_is_missed_at_once_when_its_supervisor_says_so() -> None:
    """Nothing else would before the limit, which is far off; who greets for another step or says nothing costs none."""
    listener = listen_at("127.0.0.1")
    address = listener.getsockname()

    def end(rank: int, step: int) -> StarAgreement:
        return StarAgreement(rank, 2, (0, step), address, listener if rank == 0 else None, 3600.0, KEY)

    with ThreadPoolExecutor(2) as pool:
        end(1, 1).give_up()
        alone = end(0, 1)
        with pytest.raises(CheckpointError, match="lost contact with the writer of another node"):
            alone.gather("here")
        alone.close()
        end(1, 2).give_up()
        socket.create_connection(address).close()
        first, other = end(0, 3), end(1, 3)
        heard = pool.submit(other.gather, "there")
        assert first.gather("here") == ["here", "there"] == heard.result()
        first.close()
        other.close()
    listener.close()


def test_two_neighbours_of_three_may_go_where_the_third_holds_both() -> None:
    """Whatever the ranks had begun: one may be a snapshot ahead of another, and no more."""
    # Generation, step, rank, ranks, own. Rank 1 has begun step 6, which node 2 takes in over the oldest of three; of
    # rank 0 step 5 is still on its way there.
    whole = {0: (3, 4), 1: (4, 5), 2: (4, 5)}
    rows = [(0, step, rank, 3, rank == 2) for rank, steps in whole.items() for step in steps]
    state = choose_state({2: report(2, rows)}, set(), -1)
    assert state is not None and state.step == 4 and state.tier == "peer"
    assert state.holders == {0: 2, 1: 2, 2: 2}


def test_what_one_node_alone_holds_is_copied_by_the_next_of_the_ring() -> None:
    state = StateLocation(step=4, generation=1, holders={0: 0, 1: 0, 2: 7}, tier="memory", single_copies=(1, 2))
    reports = {node: report(node, slots=1) for node in (0, 2, 3)}
    shares = assign_ranks(reports, [(node, 0) for node in reports])

    def copied(node: int, state: StateLocation | None = state, every: int = 1, peers: int = 1) -> dict[int, int]:
        copies = CopyPlan(every=every, disk=False, peers=peers)
        return ranks_to_copy(order_of(plan_of("replicate=3"), shares, copies, state), node)

    assert {node: copied(node) for node in (0, 2, 3)} == {0: {2: 7}, 2: {1: 0}, 3: {}}
    assert copied(3, peers=2) == {1: 0}
    assert not copied(2, every=0) and not copied(2, None)
