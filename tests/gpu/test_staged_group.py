"""The group that stands for NCCL's on one GPU, tried on CPU tensors: what each collective gives, late and in order."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from meshwright.launch.contract import RankContext
from meshwright.launch.rendezvous import init_group
from tests.gpu import staged_group
from tests.ranks.group import run_contexts

RANKS = 3


def _every_collective(rank: int) -> dict[str, bool]:
    own = torch.arange(6, dtype=torch.float64) + 10 * rank
    every = [torch.arange(6, dtype=torch.float64) + 10 * other for other in range(RANKS)]
    total = sum(every)
    checks: dict[str, Any] = {}
    for name, operation, expected in (
        ("sum", dist.ReduceOp.SUM, total),
        ("max", dist.ReduceOp.MAX, every[-1]),
        ("mean", dist.ReduceOp.AVG, total / RANKS),
    ):
        tensor = own.clone()
        dist.all_reduce(tensor, operation)
        checks[name] = (tensor, expected)
    half = own.to(torch.bfloat16)
    dist.all_reduce(half)
    checks["bf16"] = (half, sum(item.to(torch.bfloat16) for item in every))
    gathered = torch.empty(6 * RANKS, dtype=torch.float64)
    dist.all_gather_into_tensor(gathered, own)
    checks["gather"] = (gathered, torch.cat(every))
    listed = [torch.empty_like(own) for _ in range(RANKS)]
    dist.all_gather(listed, own)
    checks["gather list"] = (torch.cat(listed), torch.cat(every))
    scattered = torch.empty(2, dtype=torch.float64)
    dist.reduce_scatter_tensor(scattered, own)
    checks["scatter"] = (scattered, total[2 * rank : 2 * rank + 2])
    outputs = [torch.empty(rank, dtype=torch.float64) for _ in range(RANKS)]
    dist.all_to_all(outputs, [own[:peer].contiguous() for peer in range(RANKS)])
    checks["all to all"] = (torch.cat(outputs), torch.cat([item[:rank] for item in every]))
    rows = torch.empty(RANKS * rank, 1, dtype=torch.float64)
    dist.all_to_all_single(rows, own[:3].view(3, 1).contiguous(), [rank] * RANKS, list(range(RANKS)))
    first = rank * (rank - 1) // 2
    checks["rows"] = (rows.view(-1), torch.cat([item[first : first + rank] for item in every]))
    sent = own.clone()
    dist.broadcast(sent, 1)
    checks["broadcast"] = (sent, every[1])
    left, right = (rank - 1) % RANKS, (rank + 1) % RANKS
    received = torch.empty_like(own)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, own, right), dist.P2POp(dist.irecv, received, left)])
    for work in works:
        work.wait()
    checks["batch"] = (received, every[left])
    works, alone = [dist.isend(own, right), dist.irecv(received := torch.empty_like(own), left)], received
    for work in works:
        work.wait()
    checks["alone"] = (alone, every[left])
    checks["functional"] = (functional.all_reduce(own, "sum", dist.group.WORLD) + 0, total)
    dist.barrier()
    return {name: torch.equal(found, expected) for name, (found, expected) in checks.items()}


def _late(rank: int) -> tuple[bool, bool, bool]:
    """Returns whether a result is there before it is waited for, after it, and whether a late write is sent."""
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    early = bool(tensor.eq(RANKS).all())
    work.wait()
    waited = bool(tensor.eq(RANKS).all())
    gathered, shard = torch.empty(RANKS), torch.zeros(1)
    work = dist.all_gather_into_tensor(gathered, shard, async_op=True)
    shard.fill_(1.0)  # too early: the gather may read it still
    work.wait()
    return early, waited, bool(gathered.eq(1.0).all())


@pytest.mark.parametrize("work", [_every_collective, _late])
def test_each_collective_gives_what_it_should_and_no_sooner(work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_group, "DELAY_S", 0.03 if work is _late else 0.0)

    def on_rank(context: RankContext) -> Any:
        warnings.simplefilter("ignore", FutureWarning)  # names of collectives that newer torch gives others
        staged_group.install()
        init_group(context, "cpu:staged")
        result = work(context.rank)
        dist.barrier()
        return result

    found = run_contexts(RANKS, on_rank, timeout=60)
    if work is _late:
        assert found == [(False, True, True)] * RANKS
    else:
        assert all(all(checks.values()) for checks in found), found
