"""A long run with a fault every so often: how much of its time it trained, what the rest went to, what grew.

    python benchmarks/bench_soak.py [--minutes 30] [--ranks 4] [--layout shard=2,tp=2] [--seed 0] [--json OUT]

Every 20 to 60 seconds a random rank is killed, stopped, hung (also with the interpreter's lock held) or ended, at a
random place of a step; one that didn't come to its place, since no snapshot followed that step, is asked for again.
The supervisor finds hanging ranks by itself unless `--hang` sets a limit. Goodput is the steps that were done times
the median time of a step under the whole layout, over the wall time; `lost_time.py` says where the rest went. Looked
at each second: memory, open files and shared memory of the supervisor, and the files and number of all processes.
The seed replays the faults.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lost_time import account, read_lines, tell
from processes import ForeignLoad, kill_descendants

from meshwright.spec.layout import Layout
from meshwright.train.faults import Fault, ask

KINDS = ("kill", "kill", "kill", "stop", "hang", "gil", "exit")
PHASES = ("data", "forward", "backward", "collective", "reduce", "optimizer", "snapshot")
BETWEEN_S = (20.0, 60.0)
TAIL = 1 << 16
"""Bytes in which a line of metrics ends."""
AHEAD = 3
"""Steps between asking for a fault and its place."""
ROOM = {
    "anonymous": (1.02, 2 << 20),
    "shared": (1.1, 1 << 20),
    "files": (1.0, 4),
    "all files": (1.1, 8),
    "processes": (1.0, 2),
}
"""By how much the most of the last third may lie over that of the first two: a factor, and something beside."""


def main() -> int:
    """Runs the soak and prints what came of it; exit status 1 when something grew or the run ended by itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layout", default="shard=2,tp=2")
    parser.add_argument("--hang", type=float, help="recovery.hang_s; found out by the run itself when not given")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--folder", type=Path, help="where the run's files go, and stay")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if options.folder is not None:
            options.folder.mkdir(parents=True)
        found = _soak(options.folder or Path(folder), options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if found["alive"] and not found["grew"] else 1


def _soak(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    run, log = folder / "run", (folder / "log").open("w")
    metrics, load = run / "metrics.jsonl", ForeignLoad()
    command = subprocess.Popen(_words(folder, run, options), stdout=log, stderr=log, env=_variables(folder))
    try:
        _await(lambda: read_lines(metrics)[3:], 300.0)
        faults, looks = Asker(run, options), []
        # A step's line and its moment belong together, give or take the time of a look.
        first, began = _last_step(metrics), time.time()
        end = began + 60 * options.minutes
        while time.time() < end and command.poll() is None:
            time.sleep(1.0)
            looks.append(_look(command.pid))
            faults.look()
        last, ended = _last_step(metrics), time.time()
        alive = command.poll() is None
        command.send_signal(signal.SIGINT)
        command.wait(120)
        foreign = load.read()
        found = account(run, began, ended, first, last)
        text = (folder / "log").read_text()[-2000:]
        events = [event["kind"] for event in read_lines(run / "events.jsonl")]
    finally:
        command.kill()
        kill_descendants()
    seen = events.count("rank_lost")
    print(f"{len(faults.happened)} faults happened, {seen} failures seen; other programs kept {foreign:.2f} cores busy")
    tell(found)
    if not alive:
        print(f"the run ended by itself:\n{text}")
    grew = _growth([look for look in looks if look])
    told = {"seed": options.seed, "faults": faults.happened, "alive": alive, "grew": grew, "looks": looks}
    return told | {"goodput": found.goodput, "foreign_cores": foreign} | dataclasses.asdict(found)


class Asker:
    """Asks a run for a fault every so often."""

    def __init__(self, run: Path, options: argparse.Namespace) -> None:
        self._run, self._draw = run, random.Random(options.seed)
        self._due = time.time() + self._draw.uniform(*BETWEEN_S)
        self._ranks = options.ranks
        self._asked: Fault | None = None
        self._mark = run
        self.happened: list[str] = []
        """Faults that came to their place."""

    def look(self) -> None:
        """Asks for what is due, and again for what had no place; called about once a second."""
        if self._asked is not None:
            if self._mark.exists():
                self.happened.append(str(self._asked))
                self._asked = None
            elif _last_step(self._run / "metrics.jsonl") > self._asked.step + 1:
                self._ask(self._asked)
        elif time.time() >= self._due:
            kind, rank, phase = self._draw.choice(KINDS), self._draw.randrange(self._ranks), self._draw.choice(PHASES)
            self._due = time.time() + self._draw.uniform(*BETWEEN_S)
            self._ask(Fault(kind=kind, rank=rank, phase=phase))

    def _ask(self, fault: Fault) -> None:
        row = _last_row(self._run / "metrics.jsonl")
        # While a device is left out there are fewer ranks.
        rank = fault.rank % Layout.parse(row["layout"]).world
        self._asked = dataclasses.replace(fault, step=row["step"] + AHEAD, rank=rank)
        self._mark = ask(self._run, self._asked)


def _last_row(metrics: Path) -> dict[str, Any]:
    """Returns the last whole line, without reading those before."""
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - TAIL))
        return json.loads(file.read().rpartition(b"\n")[0].rpartition(b"\n")[2])


def _last_step(metrics: Path) -> int:
    return int(_last_row(metrics)["step"])


def _words(folder: Path, run: Path, options: argparse.Namespace) -> list[str]:
    text = folder / "text.txt"
    text.write_bytes(b"".join(Path(os.__file__).with_name(name).read_bytes() for name in ("os.py", "typing.py")))
    return [
        *(sys.executable, "-m", "meshwright", "train", "--model", "gpt2", "--model.layers", "4"),
        *("--model.width", "128"),
        *("--data", str(text), "--data.tokenizer", "chars", "--data.sequence", "128", "--train.batch", "8"),
        *("--data.cache", str(folder / "prepared"), "--train.steps", "1000000", "--train.sample-tokens", "0"),
        *("--evaluation.every", "0", "--checkpoint.every", "200", "--monitor.display", "none"),
        *("--monitor.no-tensorboard", "--monitor.no-report", "--layout", options.layout, "--run", str(run)),
        "--train.no-prove",
        *("--devices", str(options.ranks), "--recovery.back-s", "5", "--recovery.attempts", "10"),
        *(("--recovery.hang-s", str(options.hang)) if options.hang else ()),
    ]


def _variables(folder: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}


def _look(pid: int) -> dict[str, int]:
    """Returns bytes of the supervisor's own and shared memory, its files, and files and number of all processes."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        held = [os.stat(path) for path in Path(f"/proc/{pid}/fd").iterdir() if "memfd" in os.readlink(path)]
        ranks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        files = {one: len(os.listdir(f"/proc/{one}/fd")) for one in (str(pid), *ranks)}
    except (OSError, ValueError):
        return {}
    # A file that several descriptors lead to is there once.
    shared = sum({one.st_ino: one.st_size for one in held}.values())
    anonymous = int(status["RssAnon"].split()[0]) * 1024
    counts = {"files": files[str(pid)], "all files": sum(files.values()), "processes": len(files)}
    return {"anonymous": anonymous, "shared": shared} | counts


def _growth(looks: Sequence[dict[str, int]]) -> list[str]:
    """Prints how the run's resources moved; returns the names of those that grew."""
    grew = []
    for name, (factor, more) in ROOM.items():
        values = [look[name] for look in looks]
        cut = max(1, len(values) * 2 // 3)
        before, after = max(values[:cut]), max(values[cut:], default=0)
        if after > before * factor + more:
            grew.append(name)
        text = f"{name:<10} {before:>10} at most in the first two thirds, {after:>10} in the last"
        print(f"{text}: {'GREW' if name in grew else 'no growth'}")
    return grew


def _await(condition: Any, limit_s: float) -> None:
    end = time.time() + limit_s
    while not condition():
        if time.time() > end:
            raise RuntimeError(f"it did not happen within {limit_s:g} s")
        time.sleep(0.2)


if __name__ == "__main__":
    raise SystemExit(main())
