"""What recovery takes: from a kill to the next step; and what copies of the state and checkpoints cost the training.

    python benchmarks/bench_recovery.py recover [--seeds 3] [--json OUT]
    python benchmarks/bench_recovery.py stall [--blocks 12] [--width 512] [--modes none,snapshot] [--json OUT]

`recover` kills a rank of a small run at a random place for each seed, and reads the time from the mark that the rank
leaves before it dies to the event of the next step. `stall` trains on two ranks in blocks of ten steps, in turn without
any copy, with a snapshot, with a checkpoint of ours and with one of torch's `dcp.async_save` in the middle of each
block, and compares what held up the loop, as shares of the median block without any, and the blocks' times. Under a
hundred blocks the 99th percentile is the worst.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import run_limited

from meshwright.checkpoint.agreement import Agreement, build_group
from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.snapshot import Segment
from meshwright.launch.contract import RankContext
from meshwright.launch.devices import Devices, count_cores
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.rendezvous import init_group
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.verify import random_batches
from meshwright.resilience.disk import DiskWriter
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import OptimizerConfig
from meshwright.train.faults import FOLDER
from meshwright.train.feed import MicroBatch
from meshwright.train.memory import RankMemory, RecoveryMemory
from meshwright.train.model_analysis import analyse_model
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.session import build_program
from meshwright.train.state import state_tensors
from meshwright.train.step import Stepper
from meshwright.train.supervisor_requests import SupervisorRequests

CASES = {
    "replicate=2, a new process": ("replicate=2", 2, "restart"),
    "shard=2,zero=3, a new process": ("shard=2,zero=3", 2, "restart"),
    "4 to 3 ranks": ("shard=2,tp=2", 4, "shrink"),
    "8 to 7 ranks": ("replicate=8", 8, "shrink"),
    "8 to 7 ranks, from 3 axes": ("pp=2,shard=2,tp=2", 8, "shrink"),
}
PHASES = ("data", "forward", "backward", "collective", "optimizer", "snapshot")
STEPS, BLOCK = 30, 10
MODES = ("none", "snapshot", "checkpoint", "dcp async")
LIMIT_S = 600.0


def main() -> int:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["recover", "stall"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=12, help="of each kind")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--modes", default=",".join(MODES), help="kinds of blocks, none among them")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        found = recover(Path(folder), options.seeds) if options.what == "recover" else stall(Path(folder), options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def recover(folder: Path, seeds: int) -> list[dict[str, Any]]:
    """Kills a rank in each case and for each seed; prints a line each."""
    (folder / "text.txt").write_bytes(
        b"".join(Path(os.__file__).with_name(name).read_bytes() for name in ("os.py", "typing.py"))
    )
    rows = []
    for name, (layout, ranks, policy) in CASES.items():
        for seed in range(seeds):
            draw = random.Random(f"{name} {seed}")
            fault = f"kill:rank={draw.randrange(ranks)},step={draw.randrange(8, 24)},phase={draw.choice(PHASES)}"
            rows.append({"case": name, "fault": fault, **_recovery(folder, layout, ranks, policy, fault)})
            text = "{case:<32} {fault:<44} {seconds:5.2f} s, seen after {seen:.3f} s, {lost} steps again"
            print(text.format(**rows[-1]), flush=True)
    times = sorted(row["seconds"] for row in rows)
    print(f"{len(rows)} recoveries: median {statistics.median(times):.2f} s, longest {times[-1]:.2f} s")
    return rows


def _recovery(folder: Path, layout: str, ranks: int, policy: str, fault: str) -> dict[str, Any]:
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    words = [
        *("train", "--model", "gpt2", "--model.layers", "4", "--model.width", "64", "--data", str(folder / "text.txt")),
        *("--data.tokenizer", "chars", "--data.sequence", "64", "--data.cache", str(folder / "prepared")),
        *("--train.batch", "8", "--train.steps", str(STEPS), "--train.sample-tokens", "0", "--schedule.warmup", "2"),
        *("--evaluation.every", "0", "--checkpoint.every", "0", "--monitor.display", "none"),
        *("--monitor.no-tensorboard", "--monitor.no-report", "--layout", layout, "--devices", str(ranks)),
        "--train.no-prove",
        *("--run", str(run), "--recovery.snapshot-every", "1", "--recovery.on-death", policy),
        *("--recovery.faults", fault),
    ]
    variables = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    run_limited([sys.executable, "-m", "meshwright", *words], variables, LIMIT_S, Path.cwd())
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    at = {event["kind"]: event for event in events}
    (mark,) = (run / FOLDER).iterdir()
    killed = mark.stat().st_mtime
    return {
        "seconds": at["recovered"]["time"] - killed,
        "seen": at["fenced"]["time"] - killed,
        "lost": at["rank_lost"]["step"] - 1 - at["restored"]["step"],
        "layout": at["planned"]["layout"],
    }


def stall(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Trains with and without copies of the state; prints what each kind costs."""
    config = ModelConfig(name="gpt2", layers=6, width=options.width, heads=8, vocab=8192, context=128)
    devices = Devices(kind="cpu", count=2, found=count_cores(), cores=count_cores())
    segments = tuple((Segment(), Segment()) for _ in range(2))
    disk, control = tuple(Segment() for _ in range(2)), SupervisorRequests()
    memory = RecoveryMemory(segments=segments, disk=disk, control=control, every=BLOCK)
    layout = Layout.parse("shard=2,zero=2")
    store = CheckpointConfig(keep=1)
    writer = DiskWriter(folder / "ours", store, Origin(), lambda kind, **data: None)
    launcher = ForkLauncher(2, devices=devices)
    modes = [mode for mode in MODES if mode in options.modes.split(",")]
    launcher.start(train, config, layout, memory, options.blocks, folder, modes)
    try:
        found = launcher.wait(LIMIT_S * 4, watch=lambda: writer.poll(disk, layout, control))[0]
    finally:
        launcher.cancel()
        writer.close()
    blocks, stalls, size = found
    print(f"gpt2 of width {options.width}: {size / 2**20:.0f} MiB of state over 2 ranks, a copy every {BLOCK} steps")
    base = statistics.median(blocks["none"])
    told = {}
    for mode in modes:
        share = sorted(held / (base if base else 1.0) for held in stalls[mode])
        slower = statistics.median(one / other - 1 for one, other in zip(blocks[mode], blocks["none"]))
        p50, p99 = (statistics.median(share), share[math.ceil(0.99 * len(share)) - 1]) if share else (0.0, 0.0)
        told[mode] = {"stall_p50": p50, "stall_p99": p99, "slower": slower, "stalls_s": stalls[mode]}
        print(f"  {mode:<11} holds up the loop for {p50:6.2%} of its time (p99 {p99:6.2%}); blocks {slower:+.1%}")
    return told


def train(
    context: RankContext,
    config: ModelConfig,
    layout: Layout,
    memory: RecoveryMemory,
    blocks: int,
    folder: Path,
    modes: Sequence[str],
) -> tuple[dict[str, list[float]], dict[str, list[float]], int]:
    """Runs blocks of every kind in turn on this rank; returns seconds of blocks and of stalls, and bytes of state."""
    torch.set_num_threads(1)
    init_group(context, timeout_s=LIMIT_S, group_s=LIMIT_S)
    built = build_meta(config)
    facts = analyse_model(built, layout)
    plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=layout.world, reason="to be measured")
    program = build_program(built, plan, torch.device("cpu"), facts)
    optimizer = LocalAdamW(program.weights, OptimizerConfig(), on_host=False)
    scaler = LossScaler(False)
    stepper = Stepper(program, optimizer, scaler, clip=1.0, seed=0)
    group = build_group(LIMIT_S)
    rank_memory = RankMemory(memory, context.rank, 0, Agreement(group))
    batch = random_batches(1, 4, 128, config.vocab or 1000, False)[0]
    mine = slice(*layout.span(context.rank, 4))
    batches, targets = [MicroBatch(batch.tokens[mine], batch.targets[mine], None)], int((batch.targets >= 0).sum())
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    stalls: dict[str, list[float]] = {mode: [] for mode in modes}
    pending: Any = None
    step = 0
    for block in range(blocks + 1):
        for mode in modes if block % 2 else reversed(modes):
            dist.barrier()
            began, held = time.perf_counter(), 0.0
            for at in range(BLOCK):
                stepper.run(step, batches, targets, 1e-4, False).read()
                step += 1
                if at != 1 or mode == "none":
                    continue
                paused = time.perf_counter()
                if mode == "snapshot":
                    rank_memory.save_snapshot(step, program, optimizer, scaler, 0)
                elif mode == "checkpoint":
                    rank_memory.save_checkpoint(step, program, optimizer, scaler, 0, LIMIT_S)
                else:
                    if pending is not None:
                        pending.result()
                    target = folder / "dcp" / f"{step}"
                    state = state_tensors(program, optimizer)
                    pending = dcp.async_save(state, checkpoint_id=target, process_group=group)
                held = time.perf_counter() - paused
            if block:
                times[mode].append(time.perf_counter() - began)
                if mode != "none":
                    stalls[mode].append(held)
    if pending is not None:
        pending.result()
    rank_memory.close()
    size = sum(item.numel() * item.element_size() for item in program.module.state_dict().values()) * 3
    return times, stalls, size


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
