"""What snapshots cost a run of 1.1 billion parameters: how long the training thread stands still, and a kill -9 in it.

Its state, 13 GB, is copied to pinned host memory every 100 steps, which is what a run chooses here. Step times are
compared with those of the same run without snapshots; the first snapshot and the steps before it, beside which its
memory is allocated and registered with the driver, are told apart.
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

EVERY, KILLED, PLAIN_STEPS, STEPS = 100, 230, 30, 250
"""Steps between snapshots, the step in which the rank is killed, and the last steps that are waited for."""
LARGE = (
    *("--model", "llama", "--model.layers", "18", "--model.width", "2048", "--model.heads", "32", "--model.kv-heads"),
    *("8", "--model.ffn", "8192", "--data.sequence", "1024", "--train.batch", "4", "--train.steps", "1000"),
    *("--checkpoint.every", "0", "--optimizer.lr", "1e-4", "--schedule.shape", "constant"),
)
SMALL = ("--model.layers", "2", "--model.width", "64", "--model.heads", "4", "--model.kv-heads", "2", "--model.ffn",
         "128", "--data.sequence", "64")  # fmt: skip
THREADS = Devices.threads


def main() -> int:
    """Runs both, one after the other; ``--tiny``: to try the part itself."""
    tiny = "--tiny" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--tiny"]
    cases = Cases.from_arguments(limit_s=75.0)
    warm()
    write_corpus(cases.out / "corpus.txt", 3000)
    sizes = (*LARGE, *(SMALL if tiny else ()))
    cases.run("plain", lambda: reached(cases, "plain", PLAIN_STEPS, *sizes, "--recovery.snapshot-every", "0"))
    kept = ("--recovery.snapshot-every", str(EVERY), "--recovery.faults", f"kill:rank=0,step={KILLED},phase=backward")
    cases.run("kept", lambda: reached(cases, "kept", STEPS, *sizes, *kept))
    cases.run("stalls", lambda: stalls(cases))
    cases.run("restored", lambda: restored(cases))
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
    plain, kept = (rows(cases.out / name) for name in ("plain", "kept"))
    before = [row for row in kept if row["step"] < KILLED]
    first, later = ([row for row in before if row["step"] % EVERY == 0][part] for part in (slice(1), slice(1, None)))
    after = [row for row in before if row["step"] % EVERY == 1 and row["step"] > EVERY + 1]
    others = [row for row in before if row["step"] % EVERY > 1 and row["step"] > 2]

    def median_ms(found: list[dict[str, Any]]) -> float:
        return round(1e3 * statistics.median(row["step_s"] for row in found), 1) if found else -1.0

    told: Result = {
        "plain_ms": median_ms(plain[2:]), "others_ms": median_ms(others), "first_snapshot_ms": median_ms(first),
        "snapshot_ms": median_ms(later), "after_ms": median_ms(after),
        "other_ms": {row["step"]: round(1e3 * row["parts"]["other"], 1) for row in before},
        "step_ms": {row["step"]: round(1e3 * row["step_s"], 1) for row in kept},
        "plain_step_ms": [round(1e3 * row["step_s"], 1) for row in plain],
        "state_bytes": sum(value for key, value in plain[-1]["memory"].items() if key in ("parameters", "optimizer")),
    }  # fmt: skip
    of_four = statistics.mean(row["step_s"] for row in before if row["step"] > EVERY + 1)
    return told | {"mean_over_plain": round(of_four / statistics.median(row["step_s"] for row in plain[2:]), 4)}


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
    a, b = ({row["step"]: row["loss"] for row in rows(cases.out / name)} for name in ("plain", "kept"))
    # Kernels of attention add gradients in no fixed order.
    told["worst"] = max(abs(a[step] - b[step]) / a[step] for step in a if step in b)
    is_restored = [row["tier"] for row in told["restored"]] == ["memory"] and len(told["recovered_s"]) == 1
    return told | {"ok": is_restored and told["worst"] < 1e-3}


if __name__ == "__main__":
    sys.exit(main())
