# ruff: noqa: E501
"""The run directory of a run that never was: any number of ranks and steps, in the formats that a run writes."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

LAYOUT = "pp=4,replicate=4,shard=2,tp=2,zero=2,microbatches=8,schedule=1f1b"
RANKS = 64
STAGES, MICRO = 4, 8


def write(folder: Path, steps: int, ranks: int = RANKS, every: int = 50, slow: int = 37, name: str = "") -> Path:
    """Writes a run directory of ``steps`` steps; rank ``slow`` is waited for; ``name`` goes into texts."""
    draw = random.Random(7)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text('[model]\nname = "mixtral"\nlayers = 32\n\n[data]\npaths = ["text"]\n')
    plan = {
        "layout": {"text": LAYOUT},
        "ranks": ranks,
        "reason": f"fastest of 94,939{name}",
        "prediction": {
            "step_s": 1.1,
            "parts": {"data": 0.002, "pipeline": 0.9, "reduce": 0.1, "norm": 0.01, "optimizer": 0.06},
            "memory": {"parameters": 9e9, "gradients": 9e9, "optimizer": 18e9, "activations": 21e9},
            "traffic": {"pp": 4e8, "replicate": 2e9, "shard": 3e9, "tp": 6e9},
        },
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(record(step, draw)) + "\n")
    start = 1_760_000_000.0
    events = [{"kind": "run_started", "rank": 0, "time": start, "step": 0, "layout": LAYOUT, "note": name}]
    events += [
        {"kind": "rank_started", "rank": rank, "time": start, "device": f"cuda:{rank % 8}"} for rank in range(ranks)
    ]
    for step in range(max(1, steps // 10), steps + 1, max(1, steps // 10)):
        at = start + step * 1.2
        path = f"runs/x/checkpoints/step-{step:08d}{name}"
        events.append(
            {
                "kind": "checkpoint_saved",
                "rank": 0,
                "time": at,
                "step": step,
                "path": path,
                "bytes": 3.6e10,
                "seconds": 4.1,
            }
        )
        events.append(
            {"kind": "evaluated", "rank": 0, "time": at, "step": step, "loss": 1.7 + 6 * math.exp(-step / 900)}
        )
    events.append(
        {
            "kind": "slow_rank",
            "rank": -1,
            "time": start + 9,
            "slow": slow,
            "place": f"tp 1{name}",
            "share": 0.9,
            "others": 0.5,
        }
    )
    (folder / "events.jsonl").write_text(
        "".join(json.dumps({"pid": 1, "host": "node-0"} | event) + "\n" for event in events)
    )
    (folder / "timeline").mkdir(exist_ok=True)
    recorded = [step for step in range(1, steps + 1) if step % every == 0 or step == 3]
    for rank in range(ranks):
        with (folder / "timeline" / f"rank-{rank:05d}.jsonl").open("w") as file:
            for step in recorded:
                file.write(json.dumps(timeline(rank, step, start + step * 1.2, rank == slow, ranks, draw)) + "\n")
    return folder


def record(step: int, draw: random.Random) -> dict:
    parts = {"data": 0.002, "pipeline": 0.95, "reduce": 0.12, "norm": 0.01, "optimizer": 0.06, "other": 0.004}
    parts = {name: seconds * draw.uniform(0.95, 1.2) for name, seconds in parts.items()}
    step_s = sum(parts.values())
    comm = [
        ("tp", "all_gather", 6e9),
        ("tp", "reduce_scatter", 6e9),
        ("pp", "send", 4e8),
        ("replicate", "all_reduce", 2e9),
    ]
    return {
        "step": step, "loss": 1.6 + 6 * math.exp(-step / 900) + draw.gauss(0, 0.03) + (4 if step == 4321 else 0),
        "grad_norm": abs(draw.gauss(0.8, 0.1)) + (30 if step == 4321 else 0), "lr": 3e-4 * min(1, step / 500),
        "tokens": 4_194_304, "tokens_total": 4_194_304 * step, "tokens_per_s": 4_194_304 / step_s, "step_s": step_s,
        "parts": parts, "memory": {"peak": 62e9, "parameters": 9e9, "gradients": 9e9, "optimizer": 18e9}, "layout": LAYOUT,
        "accuracy": 0.4, "mfu": 0.43 + draw.gauss(0, 0.01), "skipped": step == 4321, "epoch": step / 9000, "terms": {},
        "experts": [0.125 + (0.02 if x == 3 else -0.02 / 7) for x in range(8)],
        "comm": [{"axis": axis, "op": op, "calls": 64, "bytes": size, "seconds": size / 4e10, "exposed_s": size / 2e11,
                  "raw_bytes": size, "rounding_error": 0.0} for axis, op, size in comm],
    }  # fmt: skip


def timeline(rank: int, step: int, start: float, slow: bool, ranks: int, draw: random.Random) -> dict:
    """A 1F1B step of a stage: warm-up forwards, pairs, cool-down backwards; a quick rank waits after each."""
    stage = rank * STAGES // ranks
    factor, now, phases, waits = (1.25 if slow else 1.0), 2000, [["data", 0, 2000, 0]], []
    warm = STAGES - 1 - stage
    order = [("forward", micro) for micro in range(min(MICRO, warm))]
    for micro in range(MICRO):
        order += [("forward", micro + warm)] if micro + warm < MICRO else []
        order.append(("backward", micro))
    now += stage * 30_000
    for phase, micro in order:
        work = int((30_000 if phase == "forward" else 62_000) * factor * draw.uniform(0.97, 1.03))
        pause = int(5_000 if slow else 22_000 * draw.uniform(0.8, 1.2))
        phases.append([phase, now, work + pause, micro])
        waits.append(
            [
                f"{'recv' if phase == 'forward' else 'all_reduce'} over {'pp' if phase == 'forward' else 'tp'} of layer 3",
                now + work,
                pause,
                1 << 20,
            ]
        )
        now += work + pause
    for phase, cost in (("reduce", 110_000), ("optimizer", 60_000), ("record", 3000)):
        phases.append([phase, now, cost, 0])
        now += cost
    return {"step": step, "start": start + draw.uniform(0, 1e-3), "phases": phases, "waits": waits}
