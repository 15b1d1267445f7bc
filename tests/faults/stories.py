"""Scripted faults of one node and the events that they lead to, recorded: ``python -m tests.faults.stories``.

    python -m tests.faults.stories [--only NAME ...] [--write]

`stories.json` has what was recorded when a supervisor of one node and one of several were different programs. A story
is what the supervisor reported, and rank 0 of its recoveries, each with the fields that don't depend on how fast the
machine is; then the exit status, the steps of the checkpoints, and the last line of the text.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.events import StepRecord
from meshwright.resilience import host_memory_budget
from meshwright.train import rate
from meshwright.train.launched_step import LaunchedStep
from meshwright.train.memory import RESTORING, RankMemory
from meshwright.train.step_recorder import StepRecorder
from tests.runs import Running, events, happened, rows, wait_until, words, write_corpus

STORIES = Path(__file__).with_suffix(".json")
OF_RANK_0 = (
    *("restored", "resumed", "recovered", "rewound", "run_started", "step_skipped", "step_repeated"),
    *("damage_repaired", "limits_left", "interrupted"),
)
"""Events of rank 0 that belong to a story, beside all of the supervisor's."""
FIXED = (
    *("lost", "place", "phase", "generation", "device", "devices", "left_out", "ranks", "present", "minimum"),
    *("tier", "sick", "suspects", "withdrawn", "damaged", "replayed", "from_disk_only"),
)
"""Fields whose values are the same on every machine."""
BESIDE = ("checkpoint_saved", "checkpoint_failed")
"""Events whose place among the others depends on the disk."""


def raises(step: int, rank: int, error: Exception) -> Callable[[], None]:
    """Returns what makes a rank fail after a step's last sum."""

    def plant() -> None:
        whole = StepRecorder.record

        def record(self: StepRecorder, launched: LaunchedStep, *args: Any, **counts: Any) -> StepRecord:
            if launched.step + 1 == step and self._deps.rank == rank:
                raise error
            return whole(self, launched, *args, **counts)

        StepRecorder.record = record  # type: ignore[method-assign]

    return plant


def ruins() -> None:
    """Plants a learning rate that is sane until the past says something, and ruins the model then, finitely."""
    rate.learning_rate = lambda step, *more: 10.0 if step == 18 else 1e-3  # type: ignore[assignment]


def without_memory() -> None:
    """Leaves no room for snapshots."""
    host_memory_budget.available_bytes = lambda: 1000  # type: ignore[assignment]


def spoils_the_newest_state() -> None:
    """Makes the first restoring from memory find a damaged shard."""
    whole = RankMemory.restore

    def restore(self: RankMemory, *args: Any) -> Any:
        if self.state is not None and self._generation == 1:
            stored = self.state.snapshots[0].stored_shards[0]
            stored_wrong = dataclasses.replace(stored, checksum=stored.checksum ^ 1)
            self.state.snapshots[0].stored_shards[0] = stored_wrong
        return whole(self, *args)

    RankMemory.restore = restore  # type: ignore[method-assign]


@dataclass(frozen=True)
class Scenario:
    """One run, and what is done to it."""

    faults: str = ""
    layout: str = "replicate=2"
    ranks: int = 2
    more: tuple[str, ...] = ("--recovery.snapshot-every", "1", "--recovery.back-s", "1e-6")
    before: Callable[[], None] | None = None
    signals: tuple[tuple[str, int], ...] = ()
    """Each a kind of planted fault or of event, after which the command gets a signal."""
    again: bool = False
    """Whether the same command is given a second time."""
    steps: int = 24
    often: bool = field(default=True, kw_only=True)


NO_DISK = ("--checkpoint.every", "0")
EACH = ("--recovery.snapshot-every", "1")
SHRINK = ("--recovery.on-death", "shrink", *EACH)
SOON = (*EACH, "--recovery.back-s", "1e-6")
WAITS = (*SHRINK, *NO_DISK, "--recovery.minimum", "2", "--recovery.back-s")
SCENARIOS = {
    "undisturbed": Scenario(),
    "phases": Scenario(
        ";".join(
            f"kill:rank={at % 2},step={4 + 3 * at},phase={phase}"
            for at, phase in enumerate(("data", "forward", "backward", "collective", "optimizer", "snapshot"))
        ),
        "shard=2,zero=3",
    ),
    "starts": Scenario(
        "kill:rank=1,step=0,generation=0;kill:rank=0,step=6,phase=checkpoint;kill:rank=1,step=0,generation=2",
        more=("--recovery.snapshot-every", "2", "--recovery.back-s", "1e-6"),
    ),
    "shrink": Scenario("kill:rank=2,step=6,phase=backward", "replicate=3,rows=3x2-2", 3, SHRINK),
    "back": Scenario(
        "kill:rank=2,step=4,phase=forward;slow:rank=0,step=5,seconds=0.3",
        *("replicate=3,rows=3x2-2", 3, (*SHRINK, "--recovery.back-s", "2")),
    ),
    "twice": Scenario("kill:rank=1,step=4;kill:rank=1,step=6", more=EACH),
    "waits": Scenario("kill:rank=1,step=4,phase=forward", more=(*WAITS, "2")),
    "waits-in-vain": Scenario(
        "kill:rank=1,step=4,phase=forward", more=(*WAITS, "3600"), signals=(("waiting", signal.SIGTERM),)
    ),
    "hang": Scenario("hang:rank=1,step=7,phase=backward.1", more=EACH),
    "stop": Scenario("stop:rank=1,step=7,phase=backward.1", more=(*EACH, "--recovery.hang-s", "4")),
    "rewind": Scenario(
        "nan:rank=1,step=8,phase=reduce",
        more=("--recovery.on-sick", "rewind", "--recovery.no-learned-limits", *EACH),
    ),
    "rewinds": Scenario(
        ";".join(f"nan:rank=1,step=8,phase=reduce,generation={at}" for at in range(3)),
        more=("--recovery.on-sick", "rewind", "--recovery.no-learned-limits", "--recovery.attempts", "2", *EACH),
    ),
    "jump": Scenario(
        "flip:rank=0,step=19", "replicate=1", 1,
        ("--recovery.no-learned-limits", "--recovery.spike", "1.5", "--recovery.on-sick", "stop"),
    ),
    "flip": Scenario(
        "flip:rank=1,step=9,phase=forward,of=weights,bit=20,seed=4", more=("--recovery.snapshot-every", "2")
    ),
    "flip-of-three": Scenario(
        "flip:rank=2,step=9,phase=forward,bit=22,seed=1;flip:rank=2,step=15,phase=forward,bit=22,seed=1",
        *("replicate=3,rows=3x2-2", 3, ("--recovery.snapshot-every", "2")),
    ),
    "flip-of-one": Scenario("flip:rank=0,step=19", "replicate=1", 1, ("--recovery.snapshot-every", "2")),
    "ruin": Scenario("", "replicate=1", 1, ("--recovery.snapshot-every", "2"), ruins),
    "always": Scenario(
        "", "shard=2,zero=2", more=(*EACH, *NO_DISK), before=raises(9, 0, ZeroDivisionError("planted fault"))
    ),
    "fruitless": Scenario(
        ";".join(f"kill:rank={at % 2},step={0 if at else 6},generation={at}" for at in range(9)),
        more=(*SOON, *NO_DISK, "--recovery.attempts", "2"),
    ),
    "writer": Scenario("kill:rank=-1,step=6,phase=checkpoint.write", more=("--checkpoint.keep", "9")),
    "last-checkpoint": Scenario("kill:rank=-1,step=24,phase=checkpoint.rename"),
    "no-memory": Scenario("kill:rank=1,step=8,phase=forward", before=without_memory),
    "steps-down": Scenario(
        "kill:rank=1,step=6,phase=forward", "replicate=3,rows=3x2-2", 3,
        (*SHRINK, *NO_DISK, "--recovery.layouts", "replicate=1"),
    ),
    "damaged-snapshot": Scenario("kill:rank=1,step=8,phase=forward", more=SOON, before=spoils_the_newest_state),
    "terminated": Scenario(
        "hang:rank=0,step=5,phase=record", more=("--launch.stop-s", "2", "--recovery.idle-s", "0", *EACH, *NO_DISK),
        signals=(("hang", signal.SIGTERM),), again=True,
    ),
    "killed": Scenario(
        "hang:rank=0,step=20,phase=forward",
        more=(*NO_DISK, "--recovery.snapshot-every", "2", "--recovery.idle-s", "0"),
        signals=(("hang", signal.SIGKILL),), again=True,
    ),
}  # fmt: skip


def tell(root: Path, name: str) -> dict[str, Any]:
    """Runs a scenario and returns its story."""
    scenario, run = SCENARIOS[name], root / name
    more = (*scenario.more, "--train.steps", str(scenario.steps))
    faults = ("--recovery.faults", scenario.faults) if scenario.faults else ()
    argv = words(root, name, *faults, *more, layout=scenario.layout, devices=scenario.ranks)
    statuses, texts = [], []
    for attempt in range(1 + scenario.again):
        running = Running(argv, root / f"{name}.log", before=scenario.before)
        for kind, number in scenario.signals if attempt == 0 else ():
            wait_until(lambda kind=kind: happened(run, kind) or events(run, kind))  # type: ignore[misc]
            running.kill(number)
        statuses.append(running.wait())
        running.no_orphans()
        texts.append(plain(running.text().strip().splitlines()[-1]) if running.text().strip() else "")
    told = rows(run, "events.jsonl")
    story = [line for row in told if (line := told_of(row))]
    saved = [[row["kind"], row["step"]] for row in told if row["kind"] in BESIDE]
    return {"story": story, "beside": saved, "status": statuses, "text": texts}


def told_of(row: dict[str, Any]) -> list[Any] | None:
    """Returns what a story has of an event: its kind, the names of its fields, and the values that are fixed."""
    kind = row["kind"]
    if kind in BESIDE or not (row["rank"] == -1 or (row["rank"] == 0 and kind in OF_RANK_0)):
        return None
    values = {key: row[key] for key in FIXED if key in row} | ({"why": plain(row["why"])} if "why" in row else {})
    if RESTORING in row.get("why", ""):
        # All ranks say so together.
        values = {key: value for key, value in values.items() if key not in ("lost", "place")}
    return [kind, sorted(row.keys() - {"kind", "rank", "pid", "host", "time"}), values]


def is_like(found: dict[str, Any], recorded: dict[str, Any]) -> bool:
    """Returns whether a story is the recorded one; the last snapshot that ranks leave may be a step older or newer."""
    found = json.loads(json.dumps(found))
    pairs = list(zip(found["beside"], recorded["beside"]))
    near = all(kind == other and abs(step - at) <= 1 for (kind, step), (other, at) in pairs)
    same = all(found[key] == recorded[key] for key in ("story", "status", "text"))
    return same and near and len(found["beside"]) == len(recorded["beside"])


def plain(text: str) -> str:
    """Returns a sentence without times, sizes and paths."""
    text = re.sub(r"/\S+", "PATH", text)
    return re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", text)


def main() -> int:
    """Tells the scenarios, and compares them to those recorded, or records them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--into", type=Path, default=STORIES)
    words_given = parser.parse_args()
    recorded = json.loads(words_given.into.read_text()) if words_given.into.exists() else {}
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "corpus.txt")
        for name in words_given.only:
            found = tell(Path(folder), name)
            same = name in recorded and is_like(found, recorded[name])
            differing += not same
            sys.stdout.write(f"{name}: {'same' if same else json.dumps(found)}\n")
            sys.stdout.flush()
            recorded[name] = found
    if words_given.write:
        words_given.into.write_text(json.dumps(recorded, indent=1) + "\n")
    return min(differing, 1)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    raise SystemExit(main())
