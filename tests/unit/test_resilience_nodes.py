"""What recovery over several nodes is made of: claims, lines, orders, and snapshots kept and read elsewhere."""

from __future__ import annotations

import socket
import time
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
from meshwright.launch.rendezvous import address_to, interface_of, listen_at
from meshwright.resilience import claims as claims_module
from meshwright.resilience import peers as wire_module
from meshwright.resilience.claims import Claim, Claims
from meshwright.resilience.generation_ranks import Patience
from meshwright.resilience.messages import End, Reconfigure
from meshwright.resilience.orders import choose, compose, copies, shortage
from meshwright.resilience.peers import SILENCE_S, Hub, PeerConnection, until
from meshwright.resilience.spare_copies import ranks_to_copy
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import RecoveryConfig
from meshwright.transport.key import RunKey

KEY = RunKey.fresh()


def called(server: Hub, client: Hub, port: int) -> PeerConnection:
    """A line from one hub to another, which both belong to this process."""
    with ThreadPoolExecutor(1) as pool:
        line = pool.submit(client.call, "127.0.0.1", port)
        assert until(line.done, 20.0, server.pump)
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
    fence = one.fence(0)
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
    leader.end(0, {"finished": True})
    assert other.age_s() == float("inf")
    assert other.ending(0) is None and other.ending(-1) == {"finished": True}
    leader.end(0, None)
    with pytest.raises(LaunchError, match="ended by an error"):
        other.ending(-1)


def test_a_checkpoint_gets_no_name_behind_the_fence(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    claims.try_claim(claim(0, 0))
    store = CheckpointStore(tmp_path / "checkpoints", fence=claims.fence(0))
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
        line.send(End(result=None, error="x" * 300_000))
        heard: list = []

        def pump(seconds: float) -> None:
            client.pump(0.0)
            heard.extend(message for _, message in server.pump(seconds)[0])

        assert until(lambda: bool(heard), 100.0, pump)
        assert isinstance(heard[0], End) and len(heard[0].error) == 300_000
        client.drop(line)
        lost: list = []
        assert until(lambda: bool(lost), 100.0, lambda seconds: lost.extend(server.pump(seconds)[1]))
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
        assert until(lambda: bool(heard), 100.0, lambda seconds: heard.extend(server.pump(seconds)[0]))
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


def report(node: int, held: list, slots: int = 2) -> dict:
    ports = {"store": 10 + node, "shelf": 20 + node, "courier": 30 + node, "disk": 40 + node}
    return {"node": node, "host": f"h{node}", "slots": list(range(slots)), "ports": ports, "held": held, "peak": None}


def test_the_newest_state_that_is_whole_anywhere_is_chosen() -> None:
    # Generation, step, rank, ranks, own: rank 1's node has gone; node 2 has its copy of step 4, not of step 5.
    held = {
        0: [[0, 4, 0, 3, True], [0, 5, 0, 3, True], [0, 4, 2, 3, False]],
        2: [[0, 4, 2, 3, True], [0, 5, 2, 3, True], [0, 4, 1, 3, False]],
    }
    assert complete_steps([row for rows in held.values() for row in rows]) == [(4, 0)]
    reports = {node: report(node, rows) for node, rows in held.items()}
    state, _ = choose(reports, set(), -1)
    places = {"0": 0, "1": 2, "2": 0}
    assert state == {"step": 4, "generation": 0, "tier": "peer", "places": places, "alone": [0, 1]}
    assert choose(reports, {(4, 0)}, -1)[0] is None, "it turned out damaged"
    assert choose(reports, set(), 6)[0] is None, "the disk is newer"
    assert choose(reports, set(), -1, floor=0)[0] is None, "the run turned back from it"
    order = compose(reports, [(0, 0), (0, 1), (2, 1)])
    assert order["world"] == 3 and order["store"] == ["h0", 10]
    assert order["nodes"]["2"] == {"first": 2, "slots": [1], "host": "h2", "courier": 32, "disk": 42}


def test_snapshots_over_nodes_need_room_on_each_and_time_on_the_way() -> None:
    prediction = Prediction(memory={"parameters": 10**9, "optimizer": 2 * 10**9}, step_s=0.1)
    plan = Plan(layout=Layout.parse("shard=3,zero=3"), prediction=prediction, ranks=3, reason="")
    reports = {node: report(node, [], slots=2 - node) for node in (0, 1)}
    nodes = compose(reports, [(0, 0), (0, 1), (1, 0)])["nodes"]
    # Node 0 holds 3 of each of its own two and 2 of the other's: 8 times 3 GB, of half of what it has; node 1 holds 7.
    reports[0] |= {"available": 2 * 24 * 10**9, "link": None}
    reports[1] |= {"available": 2 * 21 * 10**9, "link": None}
    four, learned = RecoveryConfig(snapshot_every=4), RecoveryConfig()
    assert copies(plan, nodes, reports, four) == {"every": 4, "disk": False, "peers": 1}
    assert copies(plan, nodes, reports, learned)["every"] > 15
    assert copies(plan, nodes, reports, RecoveryConfig(snapshot_every=0))["every"] == 0
    reports[1]["link"] = 1e7
    assert copies(plan, nodes, reports, learned)["every"] == 6000, "node 0 sends 2 times 3 GB, 600 s, in steps of 0.1 s"
    reports[1]["available"] -= 2
    assert copies(plan, nodes, reports, four)["every"] == 0
    alone = compose(reports, [(1, 0)])["nodes"]
    assert copies(plan, alone, reports, four) == {"every": 4, "disk": True, "peers": 0}, "its own rank's alone"


def test_more_copies_take_more_room_and_fewer_are_held_where_it_is_short() -> None:
    prediction = Prediction(memory={"parameters": 10**9, "optimizer": 2 * 10**9}, step_s=0.1)
    plan = Plan(layout=Layout.parse("shard=4,zero=3"), prediction=prediction, ranks=4, reason="")
    reports = {node: report(node, [], slots=1) for node in range(4)}
    nodes = compose(reports, [(node, 0) for node in range(4)])["nodes"]
    two = RecoveryConfig(snapshot_every=4, copies=2)

    def held(available: int) -> dict:
        for one in reports.values():
            one.update(available=available, link=1e9)
        return copies(plan, nodes, reports, two)

    # Three of its own and three of each of two others, of 3 GB, of half of what a node has; three more to the disk.
    room = 2 * 3 * 10**9
    assert held(12 * room) == {"every": 4, "disk": True, "peers": 2} and held(9 * room)["peers"] == 2
    assert held(9 * room - 2) == {"every": 4, "disk": True, "peers": 1}, "three of its own and two of the one before"
    assert held(5 * room)["peers"] == 1 and held(5 * room - 2) == {"every": 0, "disk": False, "peers": 0}
    told = shortage({"nodes": nodes} | held(5 * room), two)
    assert told == {"kind": "copies_reduced", "nodes": [0, 1, 2, 3], "copies": 1, "wanted": 2}
    off = shortage({"nodes": nodes} | held(room), two)
    assert off is not None and off["kind"] == "snapshots_off"
    assert shortage({"nodes": nodes} | held(12 * room), two) is None
    left = dict(list(nodes.items())[:2])
    assert copies(plan, left, reports, two)["peers"] == 1, "there is one other node"
    assert shortage({"nodes": left} | copies(plan, left, reports, two), two) is None
    with pytest.raises(ConfigError, match=r"recovery.copies = 3 .* takes 4 nodes .* there are 3; .*copies = 2"):
        RecoveryConfig(copies=3).check_nodes(3)
    RecoveryConfig(copies=2).check_nodes(3)
    RecoveryConfig().check_nodes(1)


def test_most_nodes_are_those_that_live_and_are_not_reached(tmp_path: Path) -> None:
    """Of three, the leader sees one of two others that live no more, and both of them when it is cut off."""
    leaders, others = Claims(tmp_path), [Claims(tmp_path) for _ in (1, 2)]
    assert leaders.try_claim(claim(0, 0)) and leaders.stamps([1, 2]) == {}
    for node, one in enumerate(others, 1):
        one.be_present(node)
    first = leaders.stamps([1, 2])
    assert sorted(first) == [1, 2]
    others[0]._present_at = 0.0
    time.sleep(0.02)
    others[0].be_present(1)
    now = leaders.stamps([1, 2])
    assert now[1] > first[1] and now[2] == first[2]
    others[1].newest()
    assert others[1].age_s() < float("inf")
    leaders.give_way(0)
    assert others[1].age_s() == float("inf"), "anybody may lead"


def test_a_failure_that_returns_ends_the_run() -> None:
    patience = Patience(attempts=2)
    error = LaunchError("gone")
    assert not patience.ends(error, 5, raised=None) and not patience.ends(error, 5, raised=None)
    assert patience.ends(error, 5, raised=None), "three times the same step"
    assert Patience(attempts=3).ends(CheckpointError("disk full"), 5, raised=5)
    patience = Patience(attempts=3)
    assert not patience.ends(error, 5, raised=5) and not patience.ends(error, 7, raised=6), "another step than before"
    assert patience.ends(error, 8, raised=6), "the same, however far others had come this time"


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
    rows = [[0, step, rank, 3, rank == 2] for rank, steps in whole.items() for step in steps]
    state, _ = choose({2: report(2, rows)}, set(), -1)
    assert state is not None and state["step"] == 4 and state["tier"] == "peer"
    assert state["places"] == {"0": 2, "1": 2, "2": 2}


def test_what_one_node_alone_holds_is_copied_by_the_next_of_the_ring() -> None:
    state = {"step": 4, "generation": 1, "places": {"0": 0, "1": 0, "2": 7}, "tier": "memory", "alone": [1, 2]}
    order = {"state": state, "nodes": {"0": {}, "2": {}, "3": {}}, "every": 1, "peers": 1}
    assert {node: ranks_to_copy(order, node) for node in (0, 2, 3)} == {0: {2: 7}, 2: {1: 0}, 3: {}}
    assert ranks_to_copy(order | {"peers": 2}, 3) == {1: 0}
    assert not ranks_to_copy(order | {"every": 0}, 2) and not ranks_to_copy(order | {"state": None}, 2)
