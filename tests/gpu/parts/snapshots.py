"""What snapshots cost a run of 1.1 billion parameters: how long the training thread stands still, and a kill -9 in it.

Its state, 13 GB, is copied to pinned host memory every 100 steps, which is what a run chooses here. Step times are
compared with those of the same run without snapshots, where there is time for it; the first snapshot and the steps
before it, beside which its memory is allocated and registered with the driver, are told apart. After a kill -9 the run
goes on from the last snapshot, and the steps that it trains again must have the losses that they had.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from meshwright.cli.main import main as run_command
from meshwright.launch.devices import Devices
from tests.gpu.parts.cases import Cases, Command, Result
from tests.runs import events, last_step, rows, warm, words, write_corpus

EVERY, KILLED, PLAIN_STEPS, STEPS = 100, 230, 20, 240
"""Steps between snapshots, the step in which the rank is killed, and the last steps that are waited for."""
LARGE = (
    *("--model", "llama", "--model.layers", "18", "--model.width", "2048", "--model.heads", "32", "--model.kv-heads"),
    *("8", "--model.ffn", "8192", "--data.sequence", "1024", "--train.batch", "4", "--train.steps", "1000"),
    *("--checkpoint.every", "0", "--optimizer.lr", "1e-4", "--schedule.shape", "constant"),
)
SMALL = ("--model.layers", "2", "--model.width", "64", "--model.heads", "4", "--model.kv-heads", "2", "--model.ffn",
         "128", "--data.sequence", "64")  # fmt: skip
THREADS = Devices.threads
FIRST_LOSSES: dict[tuple[str, int], float] = {}
"""Loss of each run's steps, as they were first recorded."""
PLAIN_S = 28.0
"""Seconds that a run without snapshots takes."""


def main() -> int:
    """Runs both; ``--tiny``: to try the part itself."""
    tiny = "--tiny" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--tiny"]
    cases = Cases.from_arguments(limit_s=75.0)
    warm()
    write_corpus(cases.out / "corpus.txt", 3000)
    sizes = (*LARGE, *(SMALL if tiny else ()))
    kept = ("--recovery.snapshot-every", str(EVERY), "--recovery.faults", f"kill:rank=0,step={KILLED},phase=backward")
    cases.run("kept", lambda: reached(cases, "kept", STEPS, *sizes, *kept))
    cases.run("restored", lambda: restored(cases))
    if cases.left_s > PLAIN_S:
        cases.run("plain", lambda: reached(cases, "plain", PLAIN_STEPS, *sizes, "--recovery.snapshot-every", "0"))
    cases.run("stalls", lambda: stalls(cases))
    return cases.finish()


def reached(cases: Cases, name: str, step: int, *more: str) -> Result:
    """Runs up to a step and ends the run without its last checkpoint, whose 13 GB say nothing here."""
    argv = words(cases.out, name, *more, layout="precision=bf16")

    def train() -> int:
        # All cores draw the first weights.
        Devices.threads = THREADS  # type: ignore[method-assign]
        return run_command(argv)

    command, began = cases.start(name, work=train), time.monotonic()
    first_s = 0.0
    while command.alive() and last_step(cases.out / name) < step and cases.left_s > 3:
        first_s = first_s or (time.monotonic() - began if last_step(cases.out / name) else 0.0)
        for row in rows(cases.out / name):
            FIRST_LOSSES.setdefault((name, row["step"]), row["loss"])
        time.sleep(0.05)
    took_s = time.monotonic() - began
    was_alive = command.alive()
    command.end()
    found = last_step(cases.out / name)
    told: Result = {"ok": found >= step and was_alive, "steps": found, "first_step_after_s": round(first_s, 1)}
    return told | {"took_s": round(took_s, 1)} | ({} if told["ok"] else {"last": said(command)})


def said(command: Command) -> str:
    """Returns the last words of a run."""
    return (command.err() or command.out())[-1200:]


def stalls(cases: Cases) -> Result:
    """Compares steps with a snapshot, those behind them, and others, with steps of the run without."""
    kept = rows(cases.out / "kept")
    plain = rows(cases.out / "plain") if (cases.out / "plain").exists() else []
    before = [row for row in kept if row["step"] <= KILLED]
    at = {"first_snapshot_ms": EVERY, "after_first_ms": EVERY + 1, "snapshot_ms": 2 * EVERY, "after_ms": 2 * EVERY + 1}
    told: Result = {
        name: max((round(1e3 * row["step_s"], 1) for row in before if row["step"] == step), default=-1.0)
        for name, step in at.items()
    }
    others = [row for row in before if row["step"] > 2 and row["step"] % EVERY > 1]
    settled = [row for row in others if row["step"] > EVERY]
    told |= {
        "plain_ms": median_ms(plain[2:]),
        "others_ms": median_ms(settled),
        "first_steps_ms": median_ms(others[:20]),
    }
    stalled = sorted(before[2:], key=lambda row: -row["step_s"])[:12]
    told |= {
        "longest_ms": {row["step"]: round(1e3 * row["step_s"], 1) for row in stalled},
        "memory_from_step": next((row["step"] for row in kept if "snapshots" in row["memory"]), 0),
        "state_bytes": sum(kept[-1]["memory"][key] for key in ("parameters", "optimizer")),
        "mean_over_others": round(
            statistics.mean(row["step_s"] for row in before[2:]) / max(1e-9, median_s(settled)), 4
        ),
    }
    return told


def median_s(found: list[dict[str, Any]]) -> float:
    """Returns the median step; -1 of none."""
    return statistics.median(row["step_s"] for row in found) if found else -1.0


def median_ms(found: list[dict[str, Any]]) -> float:
    """Returns the same in milliseconds."""
    return round(1e3 * median_s(found), 1)


def restored(cases: Cases) -> Result:
    """Tells what the kill cost, and how far the curve is from the undisturbed one."""
    run = cases.out / "kept"
    told: Result = {
        "lost": [row["why"][:200] for row in events(run, "rank_lost")],
        "restored": [
            {key: row[key] for key in ("step", "tier", "bytes", "seconds")} for row in events(run, "restored")
        ],
        "recovered_s": [round(row["seconds"], 2) for row in events(run, "recovered")],
    }
    # Records of steps that are trained again are taken out of the file.
    again = [
        (FIRST_LOSSES["kept", row["step"]], row["loss"])
        for row in rows(run)
        if told["restored"] and told["restored"][0]["step"] < row["step"] < KILLED
        if ("kept", row["step"]) in FIRST_LOSSES
    ]
    # Kernels of attention add gradients in no fixed order.
    told |= {"again": len(again), "worst": max((abs(a - b) / a for a, b in again), default=-1.0)}
    is_restored = [row["tier"] for row in told["restored"]] == ["memory"] and len(told["recovered_s"]) == 1
    return told | {"ok": is_restored and len(again) > 1 and told["worst"] < 1e-3}


if __name__ == "__main__":
    sys.exit(main())
