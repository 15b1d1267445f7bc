"""A node of three is lost in the middle of a step, on a real Slurm or a real Ray of this machine, again and again.

    python benchmarks/bench_cluster_stories.py slurm|ray [--times 10] [--nodes 1,2,0] [--seed 0] [--json OUT]

A story: a run is submitted and watched; a node's daemon, its supervisor and its rank are killed at once (SIGKILL), at a
random moment of a step; the others go on; the daemon starts again and the run grows; the run is cancelled; nothing is
left. Seconds are from the kill (from the daemon's start, from the cancel) to the event that the run itself writes.

Which step was **committed** is read from outside: the memory files that the processes left alive hold, parsed here,
say of which steps every rank's snapshot is whole. The run has to go on from the newest of these. Slurm needs root,
munge and slurm-wlm; Ray `pip install 'meshwright[ray]'`. Exit status 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from meshwright.train.faults import Fault, ask
from tests import ray_cluster, slurm_cluster
from tests.committed import committed_before_restore, run_processes
from tests.ray_cluster import RayTestCluster
from tests.runs import Running, events, last_step, rows, warm, words, write_corpus
from tests.slurm_cluster import SlurmCluster

LAYOUT = "shard=3,zero=2,rows=3x2-2,precision=float64"
RESUME_BAR_S = 15.0
"""From the kill to the first step without the node."""
START_S, LEAVE_S, STEP_S = 400.0, 60.0, 0.3
_FIELDS = {
    "start_s": "submitted to 1st step",
    "resume_s": "went on after",
    "noticed_s": "  noticed",
    "fenced_s": "  its generation ended",
    "planned_s": "  planned",
    "started_s": "  ranks started",
    "restored_s": "  state restored",
    "step_s": "  first step done",
    "again": "steps again",
    "grow_s": "grew after",
    "cancel_s": "cancelled in",
    "left_s": "nothing left after",
    "load": "load",
}
_STAGES = {
    "noticed_s": ("node_lost", "leader_lost"),
    "fenced_s": ("fenced", "leading"),
    "planned_s": ("planned",),
    "started_s": ("rank_started",),
    "restored_s": ("restored",),
    "step_s": ("recovered",),
}
"""Stages from a kill to the next step, each with the events that end it."""


class SlurmGround:
    """Three slurmd of this machine, and runs that are submitted to them."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self._cluster = cluster
        os.environ["SLURM_CONF"] = cluster.environment["SLURM_CONF"]
        self.kill_node, self.start_node, self.lives = cluster.kill_node, cluster.start_node, cluster.lives

    def submit(self, argv: list[str], log: Path) -> Callable[[], str]:
        """Submits a run; returns why it can't go on any more, empty while it can."""
        slurm = ("--on", "slurm", "--slurm.nodes", "3", "--slurm.cpus-per-node", "1", "--slurm.time", "30")
        running = Running([*argv, *slurm], log)
        assert running.wait() == 0, running.text()
        return lambda: ""

    def is_empty(self) -> bool:
        """Whether the cluster has no job and all nodes are idle."""
        return self._cluster.call("squeue", "-h") == "" and set(self._cluster.states()) == {"idle"}


class RayGround:
    """A head and three raylets of this machine, and drivers of runs on them."""

    def __init__(self, cluster: RayTestCluster) -> None:
        self._cluster = cluster
        self._driver: Running | None = None
        self.kill_node, self.start_node, self.lives = cluster.kill_node, cluster.start_node, cluster.lives

    def submit(self, argv: list[str], log: Path) -> Callable[[], str]:
        """Starts a run's driver; returns why it can't go on any more, empty while it can."""
        ray = ("--on", "ray", "--ray.address", self._cluster.address, "--ray.nodes", "3", "--ray.timeout", "120")
        self._driver = driver = Running([*argv, *ray], log)
        return lambda: "" if driver.pid in driver.alive() else f"the driver has ended: {driver.text()[-2000:]}"

    def is_empty(self) -> bool:
        """Whether the driver has ended with all that it has started."""
        return self._driver is None or not self._driver.alive()


@contextmanager
def slurm_ground(folder: Path) -> Iterator[SlurmGround]:
    """Starts Slurm and stops it."""
    with SlurmCluster(folder) as cluster:
        yield SlurmGround(cluster)


@contextmanager
def ray_ground(folder: Path) -> Iterator[RayGround]:
    """Starts Ray and stops it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with RayTestCluster(folder) as cluster:
        yield RayGround(cluster)


GROUNDS: dict[str, tuple[Callable[[Path], AbstractContextManager[SlurmGround | RayGround]], Callable[[], str]]] = {
    "slurm": (slurm_ground, slurm_cluster.missing),
    "ray": (ray_ground, ray_cluster.missing),
}


def _end(*_: object) -> None:
    """Ends through the grounds' own ends, which no second signal cuts short: no daemon stays."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def main() -> int:
    """Tells the stories and a table; returns 1 when a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=list(GROUNDS))
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--nodes", default="1,2,0", help="which node is killed, in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the files go, and stay")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ground, missing = GROUNDS[options.engine]
    if missing():
        print(missing())
        return 2
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    signal.signal(signal.SIGTERM, _end)
    warm()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        write_corpus(folder / "corpus.txt")
        nodes, draw = [int(text) for text in options.nodes.split(",")], random.Random(options.seed)
        stories: list[dict[str, Any]] = []
        with ground(folder / options.engine) as cluster:
            for number in range(options.times):
                story = Story(cluster, folder, f"run-{number}", nodes[number % len(nodes)], draw.random())
                stories.append(story.tell())
                print(_line(number, stories[-1]), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(stories, indent=1))
    print(_table(stories))
    return 1 if any(story["missed"] for story in stories) else 0


def _line(number: int, story: dict[str, Any]) -> str:
    told = [f"{label} {story[name]:.1f}" for name, label in _FIELDS.items() if name in story]
    return f"{number + 1}: node {story['node']}: {', '.join(told)}; {'; '.join(story['missed']) or 'all bars held'}"


def _table(stories: list[dict[str, Any]]) -> str:
    lines = [f"{'':<24}{'least':>8}{'median':>8}{'most':>8}"]
    for name, label in _FIELDS.items():
        values = [story[name] for story in stories if name in story]
        if values:
            lines.append(f"{label:<24}{min(values):>8.1f}{statistics.median(values):>8.1f}{max(values):>8.1f}")
    kept = sum(not story["missed"] for story in stories)
    return "\n".join([*lines, f"{kept} of {len(stories)} stories held all bars"])


class Story:
    """One run from its submission to its end.

    Args:
        ground: the cluster.
        folder: of the corpus; the run's directory is made there.
        name: of the run.
        node: which is killed.
        moment: at which share of a step.
    """

    def __init__(self, ground: SlurmGround | RayGround, folder: Path, name: str, node: int, moment: float) -> None:
        self._ground, self._folder, self._node, self._moment = ground, folder, node, moment
        self._run = folder / name
        self._ended: Callable[[], str] = lambda: ""
        self._told: dict[str, Any] = {"node": node, "moment": moment, "missed": []}

    def tell(self) -> dict[str, Any]:
        """Runs it; returns seconds, steps, and under `missed` the bars that it didn't hold."""
        self._told["load"] = os.getloadavg()[0]
        try:
            self._submit()
            self._lose_a_node()
            self._grow()
            self._cancel()
        except AssertionError as error:
            self._told["missed"].append(str(error)[:2000] or traceback.format_exc(limit=-2))
            self._clean_up()
        return self._told

    def _meshwright(self, *argv: str) -> str:
        running = Running(argv, self._folder / f"{self._run.name}-command.log")
        assert running.wait() == 0, f"meshwright {argv[0]}: {running.text()}"
        return running.text()

    def _submit(self) -> None:
        argv = words(
            self._folder, self._run.name, "--recovery.snapshot-every", "1", "--recovery.idle-s", "0",
            "--checkpoint.every", "0", "--train.steps", "100000",
            "--recovery.faults", f"slow:rank=0,step=3,seconds={STEP_S},generation=0", layout=LAYOUT, devices=3,
        )  # fmt: skip
        began = time.time()
        self._ended = self._ground.submit(argv, self._folder / f"{self._run.name}.log")
        self._await(lambda: last_step(self._run) >= 1, START_S, "no first step")
        self._told["start_s"] = rows(self._run, "events.jsonl")[-1]["time"] - began
        self._await(lambda: last_step(self._run) >= 5, START_S, "no fifth step")
        shown = self._meshwright("status", str(self._run))
        assert re.search(r"RUNNING, on (n\[0-2\]|127\.0\.0\.)", shown), f"status doesn't say who runs it: {shown}"

    def _lose_a_node(self) -> None:
        step = last_step(self._run)
        self._await(lambda: last_step(self._run) > step, START_S, "it stands")
        time.sleep(self._moment * STEP_S)
        seen, killed_at = last_step(self._run), time.time()
        self._ground.kill_node(self._node)
        newest = committed_before_restore(self._run, LEAVE_S)
        self._await(lambda: events(self._run, "recovered"), LEAVE_S, "it didn't go on")
        restored, recovered = events(self._run, "restored")[0], events(self._run, "recovered")[0]
        done = max(
            row["step"]
            for row in rows(self._run)
            if row["step"] < recovered["step"] or row["layout"].startswith("shard=3")
        )
        resume_s = recovered["time"] - killed_at
        told: dict[str, Any] = {
            "resume_s": resume_s,
            "again": done - restored["step"],
            "seen": seen,
            "committed": newest,
        }
        self._told |= told | {"restored": restored["step"], "tier": restored["tier"]} | self._stages(killed_at)
        self._bar(resume_s <= RESUME_BAR_S, f"went on after {resume_s:.1f} s")
        self._bar(restored["step"] == newest, f"restored step {restored['step']}, committed was {newest}")
        self._bar(restored["step"] >= seen - 1, f"restored step {restored['step']}, the metrics had {seen}")

    def _stages(self, killed_at: float) -> dict[str, float]:
        """Returns the seconds of each stage from the kill to the first step, by the run's own events."""
        told = [event for event in rows(self._run, "events.jsonl") if event["time"] >= killed_at]
        told = told[: next(number for number, event in enumerate(told) if event["kind"] == "recovered") + 1]
        ends, before = {}, killed_at
        for stage, kinds in _STAGES.items():
            # A stage ends with the last node's event; one that a story lacks has no time of its own.
            ends[stage] = max([event["time"] for event in told if event["kind"] in kinds], default=before)
            before = ends[stage] = max(ends[stage], before)
        starts = [killed_at, *ends.values()]
        return {stage: stop - start for (stage, stop), start in zip(ends.items(), starts)}

    def _grow(self) -> None:
        # Without the sleep of the first generation steps would keep cores busy that others need.
        fault = Fault(kind="slow", rank=0, step=last_step(self._run) + 20, seconds=STEP_S, generation=1)
        ask(self._run, fault)
        began = time.time()
        self._ground.start_node(self._node)
        # A job whose batch script was lost is put back into the queue by Slurm, with a checkpoint, and starts anew.
        self._await(lambda: rows(self._run)[-1]["layout"].startswith("shard=3"), START_S, "it didn't grow")
        self._told["grow_s"] = time.time() - began
        self._told["requeued"] = bool(events(self._run, "interrupted"))

    def _cancel(self) -> None:
        reached, began = last_step(self._run), time.time()
        shown = self._meshwright("cancel", str(self._run), "--wait", "240")
        self._told["cancel_s"] = time.time() - began
        assert "ended after step" in shown, shown
        self._await(lambda: not run_processes(self._run) and self._ground.is_empty(), LEAVE_S, "something is left")
        self._told["left_s"] = time.time() - began
        state = json.loads(self._meshwright("status", str(self._run), "--json"))["state"]
        self._bar(state == "interrupted", f"its state is {state}")
        self._bar(any((self._run / "checkpoints").glob("*")), "no checkpoint after cancel")
        losses: dict[int, float] = {}
        for row in rows(self._run):
            loss = losses.setdefault(row["step"], row["loss"])
            self._bar(abs(loss - row["loss"]) <= 1e-9 * abs(loss), f"step {row['step']} differs when done again")
        self._bar(sorted(losses) == list(range(1, max(losses) + 1)) and max(losses) >= reached, "steps are missing")

    def _bar(self, holds: bool, sentence: str) -> None:
        if not holds:
            self._told["missed"].append(sentence)

    def _await(self, condition: Callable[[], object], limit_s: float, sentence: str) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert not (why := self._ended() if "left" not in sentence else ""), why
            assert time.monotonic() < end, f"{sentence} within {limit_s:g} s; {self._tail()}"
            time.sleep(0.02)

    def _tail(self) -> str:
        kinds = [f"{event['kind']}@{event['time']:.1f}" for event in rows(self._run, "events.jsonl")[-12:]]
        alive = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:120] for pid in run_processes(self._run)]
        return f"last events {kinds}, alive {alive}"

    def _clean_up(self) -> None:
        """Ends what a failed story has left, so that the next one finds the cluster as this one did."""
        Running(["cancel", str(self._run), "--now"], self._folder / "clean-up.log").wait()
        end = time.monotonic() + LEAVE_S
        while run_processes(self._run) and time.monotonic() < end:
            time.sleep(0.1)
        for pid in run_processes(self._run):
            os.kill(pid, 9)
        if not self._ground.lives(self._node):
            self._ground.start_node(self._node)
        end = time.monotonic() + LEAVE_S
        while not self._ground.is_empty() and time.monotonic() < end:
            time.sleep(0.1)


if __name__ == "__main__":
    raise SystemExit(main())
