"""Collectives over shared memory: to the bit what numpy adds up in rank order, and no wait outlives a dead rank."""

from __future__ import annotations

import errno
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from meshwright.errors import ConfigError, LaunchError
from meshwright.launch import devices
from meshwright.launch.contract import RankContext
from meshwright.launch.failure import describe_exception
from meshwright.launch.rendezvous import init_group
from meshwright.parallel import shared_segment
from meshwright.parallel import wire as wire_choice
from meshwright.parallel.axis_group import AxisGroup, TrafficLog
from meshwright.parallel.shared_segment import RING_BYTES, SharedSegment
from meshwright.parallel.shared_wire import SharedWire, SharedWireError
from meshwright.parallel.wire import WireOptions, open_axis_group
from meshwright.train import session
from meshwright.train.run_config import RunConfig
from tests.ranks.group import run_contexts, run_ranks

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COPIED = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.float8_e4m3fn)
SIZES = (0, 1, 7, 1000, 33_333)
"""Elements of a shard: none, odd ones, and more than fits in what is sent whole."""
LONG = RING_BYTES // 4 + 12_345
"""float32 elements of a message that is longer than the ring."""


def _open(timeout_s: float = 60.0) -> AxisGroup:
    group = open_axis_group("tp", dist.group.WORLD, TrafficLog(), WireOptions(choice="shm", timeout_s=timeout_s))
    assert group.wire is not None
    return group


def _values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns numbers that every rank can draw for any rank; sums of them round."""
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(1000 * count + rank)) * 10.0
    return drawn.to(torch.float32).to(dtype) if dtype.is_floating_point or dtype.is_complex else drawn.to(dtype)


def _sum_in_order(summands: list[torch.Tensor]) -> torch.Tensor:
    """Adds in rank order by numpy, rounded after each addition as the type rounds."""
    dtype = summands[0].dtype
    if dtype in INTEGERS:
        return torch.from_numpy(np.add.reduce([one.numpy() for one in summands], dtype=summands[0].numpy().dtype))
    total = summands[0].to(torch.float64).numpy()
    for summand in summands[1:]:
        # In float64 the sum of two such numbers is exact or nearly so; then it is rounded once.
        exact = total + summand.to(torch.float64).numpy()
        total = torch.from_numpy(exact).to(dtype).to(torch.float64).numpy()
    return torch.from_numpy(total).to(dtype)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    flat = [one.as_strided((one.numel(),), (1,)).view(torch.uint8) for one in (left, right.contiguous())]
    return left.dtype == right.dtype and flat[0].equal(flat[1])


def _compare(rank: int, ranks: int) -> list[str]:
    """Returns what differs from the reference."""
    group, wrong = _open(), []

    def check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        if not _same(found, expected):
            wrong.append(f"{name} {found.dtype} {found.numel()}")

    for count in SIZES:
        for dtype in (*FLOATS, *INTEGERS):
            whole = [_values(one, ranks * count, dtype) for one in range(ranks)]
            total = whole[rank].clone()
            group.all_reduce(total).wait()
            check("all_reduce", total, _sum_in_order(whole))
            run = torch.empty(count, dtype=dtype)
            group.reduce_scatter(run, whole[rank]).wait()
            check("reduce_scatter", run, _sum_in_order(whole)[rank * count : (rank + 1) * count])
            largest = whole[rank].clone()
            group.all_reduce_max(largest).wait()
            check("max", largest, torch.stack(whole).amax(dim=0) if count else largest)
            # Lengths that the ranks don't divide.
            odd = _values(rank, count + 1, dtype)
            group.all_reduce(odd).wait()
            check("odd all_reduce", odd, _sum_in_order([_values(one, count + 1, dtype) for one in range(ranks)]))
        for dtype in COPIED:
            whole = [_values(one, ranks * count, dtype) for one in range(ranks)]
            gathered = torch.zeros(ranks * count, dtype=dtype)
            # In place: the shard is this rank's run of the output.
            mine = gathered.view(ranks, -1)[rank]
            mine.copy_(_values(rank, count, dtype))
            group.all_gather(gathered, mine).wait()
            check("all_gather", gathered, torch.cat([_values(one, count, dtype) for one in range(ranks)]))
            # Rank p gets p + 1 thirds of the rows: unequal runs, none from rank 0 for few rows.
            shares = [[count * (peer + one) // 3 for peer in range(ranks)] for one in range(ranks)]
            sent = [list(_values(one, sum(shares[one]), dtype).split(shares[one])) for one in range(ranks)]
            received = [torch.zeros(shares[one][rank], dtype=dtype) for one in range(ranks)]
            group.all_to_all(received, sent[rank]).wait()
            for one in range(ranks):
                check("all_to_all", received[one], sent[one][rank])
            rows = torch.zeros(sum(map(len, received)), dtype=dtype)
            group.all_to_all_rows(rows, torch.cat(sent[rank]), list(map(len, received)), shares[rank]).wait()
            check("all_to_all_rows", rows, torch.cat([sent[one][rank] for one in range(ranks)]))
    return wrong


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_collectives_are_those_of_numpy_in_rank_order(ranks: int) -> None:
    """Every collective, type and odd size, to the bit, on every rank."""
    assert run_ranks(ranks, _compare, ranks) == [[]] * ranks


def _long_messages(rank: int, ranks: int) -> list[str]:
    """Starts collectives longer than all rings together, on one rank much later, and waits in another order."""
    group, gloo, wrong = _open(), AxisGroup("tp", dist.group.WORLD, TrafficLog()), []
    tensors = [_values(rank, LONG + extra, torch.float32) for extra in range(4)]
    expected = [
        _sum_in_order([_values(one, LONG + extra, torch.float32) for one in range(ranks)]) for extra in range(4)
    ]
    gloo_sum = tensors[0].clone()
    gloo.all_reduce(gloo_sum).wait()
    if rank == 0:
        dist.barrier()  # the others have started all before this rank starts any
    pending = [group.all_reduce(tensor) for tensor in tensors]
    shard = torch.arange(LONG, dtype=torch.int32) + rank
    gathered = torch.empty(ranks * LONG, dtype=torch.int32)
    pending.append(group.all_gather(gathered, shard))
    if rank:
        dist.barrier()
    for handle in reversed(pending):
        handle.wait()
    wrong += [f"sum {at}" for at, (one, other) in enumerate(zip(tensors, expected)) if not _same(one, other)]
    if not all(
        gathered.view(ranks, -1)[one].equal(torch.arange(LONG, dtype=torch.int32) + one) for one in range(ranks)
    ):
        wrong.append("gather")
    if not torch.allclose(gloo_sum, tensors[0], rtol=1e-5, atol=1e-5):
        wrong.append("gloo")
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_longer_than_the_ring(ranks: int) -> None:
    """Pieces, many collectives under way, ranks that start late, and waits in any order."""
    assert run_ranks(ranks, _long_messages, ranks) == [[]] * ranks


def _owing_rank(rank: int) -> bool:
    """Rank 0 starts a long sum, and then waits elsewhere for what rank 1 sends after its own wait for that sum."""
    group = _open()
    tensor, token = torch.ones(LONG), torch.zeros(1)
    if rank == 0:
        pending = group.all_reduce(tensor)
        dist.recv(token, 1)
        pending.wait()
    else:
        group.all_reduce(tensor).wait()
        dist.send(token, 0)
    return bool((tensor == 2).all())


def test_a_rank_that_is_busy_elsewhere_still_sends() -> None:
    """What a started collective owes is done without a wait for it."""
    assert run_ranks(2, _owing_rank) == [True, True]


def _differing_programs(rank: int) -> str:
    group = _open()
    with pytest.raises(SharedWireError) as caught:
        group.all_reduce(torch.ones(10 + rank)).wait()
    return str(caught.value)


def test_ranks_with_different_programs_fail() -> None:
    """Lengths that differ raise on both, by name, where gloo would mix the bytes."""
    for text in run_ranks(2, _differing_programs):
        assert "ranks of tp run different programs" in text and "all_reduce" in text


def _outlive(context: RankContext, number: int, timeout_s: float, folder: Path) -> None:
    """Waits for rank 1, which gets a signal inside a collective; writes how the wait ended, and seconds since then."""
    # The launcher ends the others soon after the first failure; they are to tell theirs first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    init_group(context, timeout_s=60.0, group_s=60.0)
    group, rank = _open(timeout_s), context.rank
    group.all_reduce(torch.ones(10)).wait()
    tensor = torch.ones(LONG * 4)
    if rank == 1:
        # Its peers need more of it than what it has sent by now.
        group.all_reduce(tensor)
        (folder / "at").write_text(str(time.monotonic()))
        os.kill(os.getpid(), number)
    try:
        group.all_reduce(tensor).wait()
    except SharedWireError as error:
        died = float((folder / "at").read_text())
        echo = describe_exception(rank, error, 0.0).is_echo
        (folder / f"rank{rank}").write_text(f"{time.monotonic() - died} {echo} {error}")
        raise


def _endings(number: int, timeout_s: float, folder: Path) -> tuple[LaunchError, list[tuple[float, str, str]]]:
    """Returns the launcher's error, and by rank after how long a wait ended, whether it blames a peer, and its text."""
    with pytest.raises(LaunchError) as caught:
        run_contexts(3, _outlive, number, timeout_s, folder)
    texts = [(folder / f"rank{rank}").read_text().split(" ", 2) for rank in (0, 2)]
    return caught.value, [(float(seconds), echo, text) for seconds, echo, text in texts]


def test_a_killed_rank_fails_the_others_within_a_second(tmp_path: Path) -> None:
    """As gloo's connections would; and the launcher blames the signal, not its echoes."""
    error, endings = _endings(signal.SIGKILL, 60.0, tmp_path)
    assert "[rank 1] was killed by SIGKILL" in str(error).splitlines()[0]
    for seconds, echo, text in endings:
        assert seconds < 1.0 and echo == "True"
        # One of the two may have failed first, and ended before the other looked.
        assert "ended before all_" in text


def test_a_stopped_rank_ends_the_wait_at_its_limit(tmp_path: Path) -> None:
    """A stopped process is alive, so nothing but the limit ends a wait for it; then the others name it."""
    _, endings = _endings(signal.SIGSTOP, 1.5, tmp_path)
    first = min(endings)
    assert 1.4 < first[0] < 10.0 and "timed out after 1.5 s" in first[2] and "rank" in first[2]


def _refused(rank: int, node: str) -> tuple[bool, str, str]:
    """Returns whether ranks share memory by themselves, why not, and what asking for it raises."""
    options = WireOptions(node=f"{node}{rank}" if node else "")
    group = open_axis_group("tp", dist.group.WORLD, TrafficLog(), options)
    total = torch.ones(3)
    group.all_reduce(total).wait()
    assert total.eq(2).all()
    try:
        open_axis_group("tp", dist.group.WORLD, TrafficLog(), WireOptions(choice="shm", node=options.node))
    except ConfigError as error:
        return group.wire is not None, group.gloo_reason, str(error)
    return group.wire is not None, group.gloo_reason, ""


def _crowded(_rank: int) -> list[bool]:
    """Returns for each quota whether the wire was told that ranks outnumber the cores."""
    told: list[bool] = []

    def wire(*args: Any) -> SharedWire:
        told.append(args[-1])
        return SharedWire(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_choice, "SharedWire", wire)
        patch.setattr(wire_choice.os, "sched_getaffinity", lambda _pid: range(8))
        for quota in (math.inf, 8.0, 2.0, 1.5):
            open_axis_group("tp", dist.group.WORLD, TrafficLog(), WireOptions(cores=quota))
        patch.setattr(wire_choice.os, "sched_getaffinity", lambda _pid: range(1))
        open_axis_group("tp", dist.group.WORLD, TrafficLog(), WireOptions(cores=2.0))
    return told


def test_ranks_of_a_quota_below_their_number_give_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank polls away is taken from the quota, so from the rank that it waits for."""
    assert run_ranks(2, _crowded) == [[False, False, False, True, True]] * 2
    monkeypatch.setattr(devices, "read_quota", lambda: 0.5)
    context = RankContext(rank=0, local_rank=0, world=2, local_world=2, device="cpu")
    assert session._wire_options(context, RunConfig()).cores == 0.5


def _no_memory(ranks: int) -> SharedSegment:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_where_memory_cannot_be_shared_gloo_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another processor, where the kernel refuses on one rank, and on several nodes: with the reason."""
    monkeypatch.setattr(shared_segment.platform, "machine", lambda: "aarch64")
    for shares, reason, raised in run_ranks(2, _refused, ""):
        assert not shares and "aarch64" in reason and "no fence" in reason
        assert (
            raised.startswith("launch.wire = shm: the ranks of tp can't share memory: a aarch64") and "auto" in raised
        )
    monkeypatch.undo()
    monkeypatch.setattr(SharedSegment, "create", _no_memory)
    for shares, reason, raised in run_ranks(2, _refused, ""):
        assert (
            not shares and "the kernel gives no shared memory: Operation not permitted" in reason and reason in raised
        )
    monkeypatch.undo()
    # Ranks of several nodes go through gloo even where shared memory is asked for within nodes.
    assert run_ranks(2, _refused, "node") == [(False, "its ranks are on several machines", "")] * 2


def _leave_early(rank: int) -> bool:
    """Rank 1 has sent all that the others need, and goes while rank 0 still waits for rank 2."""
    group = _open()
    tensor = torch.full((10,), float(rank))
    if rank == 2:
        time.sleep(0.3)
    group.all_reduce(tensor).wait()
    return bool((tensor == 3).all())


def test_a_rank_that_has_sent_everything_may_go() -> None:
    """Only a rank of which something is missing fails a wait."""
    assert run_ranks(3, _leave_early) == [True] * 3
