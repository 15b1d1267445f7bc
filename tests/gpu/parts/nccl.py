"""NCCL with one rank: every collective that meshwright starts, FSDP2 on a mesh of one, the flight recorder's dump.

With one rank nothing travels, but all of ProcessGroupNCCL runs: communicators, streams, events, the watchdog, the
recorder.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshwright.errors import LaunchError
from meshwright.launch.contract import RankContext
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.rendezvous import init_group
from meshwright.monitor.flight import find_recorder, read_dump, unfinished
from meshwright.parallel.axis_group import AxisGroup, TrafficLog
from meshwright.parallel.byte_collectives import all_gather_bytes, broadcast_bytes
from meshwright.parallel.wire import WireOptions, open_axis_group
from tests.gpu.parts.cases import Cases, Command, Result
from tests.runs import warm

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
HANG_S = 4.0
"""Limit of the collective that hangs."""
LATE_S = 6.0
"""Within which the rank must end then: 1.0 s on an H100, and far less than the kernel that it waits for."""
CYCLES = 50 * 1_980_000_000
"""Of a kernel that runs for 50 s or more on an H100, whose clock is at most 1.98 GHz: longer than anybody waits."""


def main() -> int:
    """Tells what NCCL does with one rank, in a rank that the launcher starts as a run's."""
    cases = Cases.from_arguments(limit_s=80.0)
    warm()
    hanging = cases.start("hang", work=lambda: hang(cases.out))
    statuses = ForkLauncher(1).run(in_rank, cases, timeout_s=max(5.0, cases.left_s))
    cases.status |= statuses[0]
    cases.run("a collective that hangs", lambda: hung(cases, hanging))
    return cases.finish()


def in_rank(context: RankContext, cases: Cases) -> int:
    """Runs all cases that end; returns the part's status."""
    device = torch.device(context.device)
    began = time.perf_counter()
    init_group(context, timeout_s=60.0)
    initialised_s = time.perf_counter() - began
    x = torch.ones(4, device=device)
    began = time.perf_counter()
    dist.all_reduce(x)
    torch.cuda.synchronize()
    cases.tell(
        "init", ok=True, group_s=round(initialised_s, 3), first_all_reduce_s=round(time.perf_counter() - began, 4),
        backend=str(dist.get_backend_config()), nccl=".".join(map(str, torch.cuda.nccl.version())),
        device=torch.cuda.get_device_name(device), seen=context.device,
    )  # fmt: skip
    cases.run("a second group", lambda: second_group(device))
    group = open_axis_group("shard", dist.new_group([0]), TrafficLog(), WireOptions())
    cases.run("collectives of axis_group", lambda: axis_collectives(group, device))
    cases.run("collectives of torch", lambda: torch_collectives(device))
    cases.run("send to self", lambda: send_to_self(group, device))
    cases.run("bytes", lambda: {"gathered": all_gather_bytes(b"one"), "sent": broadcast_bytes(b"two")})
    cases.run("fsdp2 on a mesh of one", lambda: fsdp(device))
    cases.run("flight recorder", lambda: recorded(cases, device))
    began = time.perf_counter()
    dist.destroy_process_group()
    cases.tell("destroy", ok=True, s=round(time.perf_counter() - began, 3))
    return cases.status


def second_group(device: torch.device) -> Result:
    """Times a communicator that is made at its first use, and one that is split off eagerly."""
    began = time.perf_counter()
    group = dist.new_group([0])
    made_s = time.perf_counter() - began
    began = time.perf_counter()
    dist.all_reduce(torch.ones(1, device=device), group=group)
    torch.cuda.synchronize()
    first_s = time.perf_counter() - began
    began = time.perf_counter()
    mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("replicate", "shard"))
    seconds = {"new_group_s": made_s, "first_use_s": first_s, "mesh_s": time.perf_counter() - began}
    return {name: round(value, 4) for name, value in seconds.items()} | {"mesh": str(mesh.mesh_dim_names)}


def axis_collectives(group: AxisGroup, device: torch.device) -> Result:
    """Runs each of `AxisGroup`'s, by the library: with one rank two of them would copy."""
    told: Result = {"on_cuda": group.on_cuda}
    for dtype in DTYPES:
        x = (torch.arange(64, device=device) % 2).to(dtype)
        for op, start in _axis_operations(group, x).items():
            try:
                work, output = start()
                work.wait()
                torch.cuda.synchronize()
                same = torch.equal(output, x)
                assert same, "other values"
            except Exception as error:
                told.setdefault("failed", {})[f"{op} {dtype}"] = str(error).splitlines()[0][:160]
    totals = group.log.drain()
    told["booked"] = [f"{item.op} {item.calls}" for item in totals]
    told["ok"] = "failed" not in told
    return told


def _axis_operations(group: AxisGroup, x: torch.Tensor) -> dict[str, Callable[[], tuple[Any, torch.Tensor]]]:
    def run(op: str, output: torch.Tensor, *args: Any) -> Callable[[], tuple[Any, torch.Tensor]]:
        return lambda: (getattr(group, op)(*args), output)

    copy, target = x.clone(), torch.zeros_like(x)
    rows, other = torch.zeros_like(x.view(8, 8)), torch.zeros_like(x)
    return {
        "all_gather": run("all_gather", target, target, x),
        "reduce_scatter": run("reduce_scatter", other, other, x),
        "all_to_all": run("all_to_all", copy, [copy], [x]),
        "all_to_all_rows": run("all_to_all_rows", rows.view(-1), rows, x.view(8, 8), [8], [8]),
        # uint8 and bool as they travel: masks and counts
        "all_reduce": run("all_reduce", copy, copy),
        "all_reduce_max": run("all_reduce_max", copy, copy),
    }


def torch_collectives(device: torch.device) -> Result:
    """Runs torch's own, also the coalesced and functional ones that FSDP2, DTensor and compiled layers use.

    Not NCCL's sum of multiples, by which FSDP2 can divide: NCCL 2.28 gives other values for a group of one, and units
    here sum (`parallel.fsdp`).
    """
    functional: Any = __import__("torch.distributed._functional_collectives", fromlist=["all_reduce"])
    x = torch.randn(1024, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(x)

    def coalesced() -> torch.Tensor:
        with dist._coalescing_manager(group=dist.group.WORLD, device=device, async_ops=True) as manager:
            dist.all_gather_into_tensor(out[:512], x[:512])
            dist.all_gather_into_tensor(out[512:], x[512:])
        manager.wait()
        return out

    def coalesced_scatter() -> torch.Tensor:
        with dist._coalescing_manager(group=dist.group.WORLD, device=device, async_ops=True) as manager:
            dist.reduce_scatter_tensor(out[:512], x[:512])
            dist.reduce_scatter_tensor(out[512:], x[512:])
        manager.wait()
        return out

    def average() -> torch.Tensor:
        dist.reduce_scatter_tensor(out, x, op=dist.ReduceOp.AVG)
        return out

    def broadcast() -> torch.Tensor:
        dist.broadcast(x, 0)
        return x

    operations: dict[str, Callable[[], torch.Tensor]] = {
        "all_gather coalesced": coalesced,
        "reduce_scatter coalesced": coalesced_scatter,
        "reduce_scatter average": average,
        "broadcast": broadcast,
        "functional all_reduce": lambda: functional.all_reduce(x, "sum", dist.group.WORLD) + 0,
        "functional all_gather": lambda: functional.all_gather_tensor(x, 0, dist.group.WORLD) + 0,
        "functional reduce_scatter": lambda: functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) + 0,
        "functional all_to_all": lambda: functional.all_to_all_single(x, None, None, dist.group.WORLD) + 0,
    }
    failed = {}
    for name, operation in operations.items():
        out.zero_()
        try:
            assert torch.equal(operation(), x), "other values"
        except Exception as error:
            failed[name] = str(error).splitlines()[0][:160]
    dist.barrier()
    dist.monitored_barrier(group=dist.new_group([0], backend="gloo"))
    return {"ok": not failed, "operations": len(operations), "failed": failed}


def send_to_self(group: AxisGroup, device: torch.device) -> Result:
    """Sends to this very rank in one batch, as stages of a pipeline do to others."""
    x, y = torch.arange(1000, device=device), torch.zeros(1000, dtype=torch.int64, device=device)
    group.exchange({0: y}, {0: x}).wait()
    torch.cuda.synchronize()
    return {"ok": torch.equal(x, y)}


def fsdp(device: torch.device) -> Result:
    """Trains a few layers as FSDP2's units on a mesh of one, beside the same without; the curves must be equal."""
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("shard",))

    def train(sharded: bool, reshard: bool) -> list[float]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(256, 256, device=device) for _ in range(4)]
        model = torch.nn.Sequential(*layers)
        if sharded:
            policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
            for layer in layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
            fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        x = torch.randn(32, 256, device=device)
        losses = []
        for _ in range(6):
            loss = (model(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain, kept, freed = train(False, False), train(True, False), train(True, True)
    worst = max(abs(a - b) / abs(a) for other in (kept, freed) for a, b in zip(plain, other))
    return {"ok": worst < 1e-5, "worst": worst, "equal": plain == kept == freed, "losses": plain}


def recorded(cases: Cases, device: torch.device) -> Result:
    """Keeps the recorder's dump with all complete, and one with a collective behind a kernel that runs."""
    recorder = find_recorder()
    assert recorder is not None, "torch has no recorder"
    torch.cuda.synchronize()
    done = settle(recorder)
    idle = unfinished(read_dump(done))
    torch.cuda._sleep(1_980_000_000)  # about a second
    work = dist.all_reduce(torch.ones(3, 5, device=device, dtype=torch.bfloat16), async_op=True)
    behind = dist.all_reduce(torch.ones(7, device=device), async_op=True)
    pending = recorder()
    told = unfinished(read_dump(pending))
    (cases.out / "flight-complete.json").write_bytes(done)
    (cases.out / "flight-pending.json").write_bytes(pending)
    work.wait()
    behind.wait()
    torch.cuda.synchronize()
    dump = read_dump(pending)
    entries = dump.get("entries", [])
    return {
        "ok": idle is None and told is not None and (told.op, told.size_bytes, told.behind) == ("all_reduce", 30, 1),
        "idle": str(idle), "told": str(told), "version": dump.get("version"), "entries": len(entries),
        "states": sorted({str(entry.get("state")) for entry in entries}), "last": entries[-1:] or None,
    }  # fmt: skip


def settle(recorder: Callable[[], bytes]) -> bytes:
    """Returns a dump once the watchdog has seen all to be complete."""
    for _ in range(100):
        found = recorder()
        if unfinished(read_dump(found)) is None:
            return found
        time.sleep(0.05)
    return found


def hang(out: Path) -> None:
    """Starts a rank whose collective waits behind a long kernel, as a run's ranks are started."""
    try:
        ForkLauncher(1).run(hang_in_rank, out, timeout_s=60.0)
    except LaunchError as error:
        print(json.dumps({"launcher": str(error)[:300], "at": time.time()}), flush=True)
        raise


def hang_in_rank(context: RankContext, out: Path) -> None:
    """Starts a collective that doesn't end in time, and waits for it."""
    init_group(context, timeout_s=HANG_S)
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    began = time.monotonic()
    print(json.dumps({"began": time.time()}), flush=True)
    work = dist.all_reduce(torch.ones(1 << 16, device="cuda"), async_op=True)
    recorder = find_recorder()
    if recorder is not None:
        (out / "flight-hanging.json").write_bytes(recorder())
    try:
        work.wait()
        torch.cuda.synchronize()
        print(json.dumps({"ended": "no error", "after_s": time.monotonic() - began}), flush=True)
    except BaseException as error:
        print(json.dumps({"raised": str(error)[:300], "after_s": time.monotonic() - began}), flush=True)
        raise


def hung(cases: Cases, command: Command) -> Result:
    """Tells how a rank ended whose collective hung: soon after its group's limit, long before the kernel."""
    found = command.wait(min(cases.left_s, 60.0))
    errors = [line for line in command.err().splitlines() if "imeout" in line or "abort" in line.lower()]
    lines = [json.loads(line) for line in command.out().splitlines() if line.startswith("{")]
    dump = cases.out / "flight-hanging.json"
    told = unfinished(read_dump(dump.read_bytes())) if dump.exists() else None
    after_s = lines[-1]["at"] - lines[0]["began"] if len(lines) > 1 and "at" in lines[-1] else None
    return {
        "ok": told is not None and found["status"] != 0 and after_s is not None and after_s < HANG_S + LATE_S,
        "told": str(told), "status": found["status"], "command_s": found["command_s"], "ended_after_s": after_s,
        "printed": lines, "said": [line[-300:] for line in errors[:6]],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
