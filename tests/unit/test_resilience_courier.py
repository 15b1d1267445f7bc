"""Couriers carry a node's snapshots to the next nodes, which hold them and give them back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import pytest
import torch

from meshwright.checkpoint.remote import RemoteSnapshot, Shelf
from meshwright.checkpoint.snapshot import Segment, State, read_snapshots
from meshwright.checkpoint.snapshot_writer import SnapshotWriter
from meshwright.checkpoint.tensor_shards import collect_local_shards, digest
from meshwright.errors import CheckpointError
from meshwright.launch.addresses import listen_at
from meshwright.resilience.courier import CourierInbox, start_courier, start_snapshot_server
from meshwright.train.memory import PeerCopies
from meshwright.transport.key import RunKey

KEY = RunKey.fresh()


def inbox(others: Mapping[int, Sequence[Segment]]) -> CourierInbox:
    return CourierInbox(segments=others, max_bytes=1 << 20, key=KEY)


def test_snapshots_travel_to_the_next_node_and_back() -> None:
    tensors = {"weights/a": torch.arange(1000.0).view(10, 100), "weights/b": torch.tensor(3.5)}
    held = [part for part, _ in collect_local_shards(tensors)]
    own, others = tuple(Segment() for _ in range(3)), tuple(Segment() for _ in range(2))
    writer = SnapshotWriter(
        own, rank=4, generation=2, tensors=digest(held), ranks=5, local_shards=held, saved_shards=list(enumerate(held))
    )
    to, at = listen_at("127.0.0.1"), listen_at("127.0.0.1")
    copied, nothing = PeerCopies(1), PeerCopies(1)
    address = to.getsockname()
    receiver = start_courier(to, [at.getsockname()], {}, inbox({4: others}), nothing)
    sender = start_courier(at, [address], {4: own}, inbox({}), copied)
    server = None
    try:
        for step in (1, 2, 3, 4):
            tensors["weights/b"].fill_(step)
            writer.save(step, tensors, {"tokens": step})
            writer.wait()
            copied.wait(0, step)
        found = read_snapshots(others)
        assert sorted(one.step for one in found) == [3, 4]
        listener = listen_at("127.0.0.1")
        server = start_snapshot_server(listener, found, KEY)
        client = Shelf(*listener.getsockname(), KEY)
        remote = RemoteSnapshot(client, (2, 4, 4))
        assert (remote.rank, remote.ranks, remote.meta["tokens"]) == (4, 5, 4)
        back = State(4, [lambda: remote]).tensors()
        assert torch.equal(back["weights/a"], tensors["weights/a"]) and back["weights/b"] == 4
        with pytest.raises(CheckpointError, match="no snapshot of step 9"):
            RemoteSnapshot(client, (2, 9, 4))
    finally:
        for helper in (sender, receiver, server):
            if helper is not None:
                helper.close()
    with pytest.raises(CheckpointError, match="lost contact"):
        remote.values(remote.stored_shards[0])
    for pid in (sender.pid, receiver.pid):
        assert pid == 0
    client.close()
    for one in (to, at, listener):
        one.close()
    for segment in (*own, *others):
        os.close(segment.fd)


def test_snapshots_travel_to_two_nodes_and_the_next_waits_for_the_slower_one() -> None:
    """Of the slower one nothing arrives until it listens; what is held there then outlives sender and first peer."""
    tensors = {"weights/a": torch.arange(500.0)}
    held = [part for part, _ in collect_local_shards(tensors)]
    own = tuple(Segment() for _ in range(3))
    peers = [tuple(Segment() for _ in range(3)) for _ in range(2)]
    writer = SnapshotWriter(
        own, rank=0, generation=0, tensors=digest(held), ranks=1, local_shards=held, saved_shards=list(enumerate(held))
    )
    at, listeners = listen_at("127.0.0.1"), [listen_at("127.0.0.1") for _ in peers]
    copied, nothing = PeerCopies(1, 2), PeerCopies(1)
    receivers = [start_courier(listeners[0], [at.getsockname()], {}, inbox({0: peers[0]}), nothing)]
    sender = start_courier(at, [one.getsockname() for one in listeners], {0: own}, inbox({}), copied)
    try:
        writer.save(1, tensors, {"tokens": 1})
        writer.wait()
        one = PeerCopies(1, 2)
        one.record(0, 1, 0)
        assert one.newest_step(0) == -1, "the other one has nothing yet"
        one.close()
        receivers.append(start_courier(listeners[1], [at.getsockname()], {}, inbox({0: peers[1]}), nothing))
        for step in (1, 2, 3, 4):
            if step > 1:
                writer.save(step, tensors, {"tokens": step})
                writer.wait()
            while copied.newest_step(0) < step:
                copied.wait(0, step)
    finally:
        for helper in (sender, *receivers):
            helper.close()
    for segments in peers:
        assert sorted(found.step for found in read_snapshots(segments)) == [2, 3, 4]
    for one in (at, *listeners):
        one.close()
    for segment in (*own, *(one for segments in peers for one in segments)):
        os.close(segment.fd)
