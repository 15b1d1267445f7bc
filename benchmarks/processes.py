"""Care of the processes that a benchmark starts: time limits, no orphans, and how much other programs disturb them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

QUIET_CORES = 0.15
"""Cores that other programs may keep busy while a machine counts as quiet."""


def run_limited(command: Sequence[str], more: Mapping[str, str], limit_s: float, folder: Path, until: str = "") -> str:
    """Runs a command in a folder with a time limit; whatever it leaves behind is killed.

    Args:
        command: words.
        more: variables beside those of this process.
        limit_s: seconds.
        folder: where it runs.
        until: a line that begins so makes the run count even when its processes abort as they exit (seen now and
            then at the end of a script's run).

    Returns:
        Its standard output.

    Raises:
        RuntimeError: when it fails or takes too long, with the first lines of what went wrong.
    """
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu", **more}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took more than {limit_s:.0f} s: {' '.join(command[:6])}") from None
    finally:
        kill_descendants()
        process.wait()
    counts = bool(until) and any(line.startswith(until) for line in output.splitlines())
    if counts or (process.returncode == 0 and not until):
        return output
    telling = [line for line in errors.splitlines() if "rror" in line or "terminate" in line or "what()" in line]
    raise RuntimeError(f"exit status {process.returncode}: {' | '.join(telling[:4]) or errors[-400:]}")


class ForeignLoad:
    """Tells how many cores were busy with anything but this process's children."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy_s = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy_s, used.ru_utime + used.ru_stime

    def read(self) -> float:
        """Returns the mean since this was made; children count once they have been reaped."""
        wall, busy, own = (now - then for now, then in zip(self._now(), self._start))
        return max(0.0, (busy - own) / wall)


def wait_until_quiet(limit_s: float = 8.0) -> None:
    """Waits until other programs leave the cores alone for a second, but not for long."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        meter = ForeignLoad()
        time.sleep(1.0)
        if meter.read() < QUIET_CORES:
            return


def become_subreaper() -> None:
    """Makes orphans of what is started here children of this process, so that they can be found."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def kill_descendants() -> None:
    """Kills and reaps every process below this one."""
    for _ in range(50):
        parents: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                rest = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(rest[1]), []).append(int(stat.parent.name))
        below, queue = [], [os.getpid()]
        while queue:
            found = parents.get(queue.pop(), [])
            below += found
            queue += found
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.05)


class RankWatch(threading.Thread):
    """Reads off what a run's ranks take, from outside: CPU time at given steps, and memory at every one."""

    def __init__(self, run: Path, steps: tuple[int, int]) -> None:
        super().__init__(daemon=True)
        self._run, self._steps = run, steps
        self._cpu_s: dict[int, float] = {}
        self._ended = threading.Event()
        self.peak_bytes: dict[int, int] = {}
        """Most resident memory but for snapshots, by process: before the first one, and since."""

    def run(self) -> None:
        """Looks at the metrics 20 times a second."""
        seen = 0
        while not self._ended.wait(0.05):
            metrics = self._run / "metrics.jsonl"
            steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if steps == seen:
                continue
            with contextlib.suppress(OSError):  # a rank has ended
                self._look(range(seen + 1, steps + 1))
            seen = steps

    def _look(self, steps: range) -> None:
        events = map(json.loads, (self._run / "events.jsonl").read_text().splitlines())
        pids = [event["pid"] for event in events if event["kind"] == "rank_started"]
        for step in steps:
            self._cpu_s[step] = self._used_s(pids)
        for pid in pids:
            # Snapshots are read after the peak: one that was mapped in between must not count as the rank's own.
            peak = resident_bytes(Path(f"/proc/{pid}/status"), "VmHWM:")
            own = peak - resident_bytes(Path(f"/proc/{pid}/smaps"), "Rss:", "meshwright-snapshot")
            self.peak_bytes[pid] = max(self.peak_bytes.get(pid, 0), own)

    def _used_s(self, pids: Sequence[int]) -> float:
        """Returns user and system seconds of all ranks so far."""
        total = 0
        for pid in pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def end(self) -> float:
        """Ends watching; returns CPU seconds of all ranks a step between the two, 0.0 when it came too late."""
        self._ended.set()
        self.join()
        first, last = self._steps
        seen = first in self._cpu_s and last in self._cpu_s
        return (self._cpu_s[last] - self._cpu_s[first]) / (last - first) if seen else 0.0


def resident_bytes(file: Path, field: str, mapping: str = "") -> int:
    """Returns the sum of a field, of kB, in a status or smaps file of /proc.

    Args:
        file: of a process.
        field: the first word of its lines.
        mapping: part of the names of the mappings that count.
    """
    total, counts = 0, not mapping
    for line in file.read_text().splitlines():
        first, *rest = line.split()
        if mapping and not first.endswith(":"):
            counts = mapping in line
        elif counts and first == field:
            total += int(rest[0]) * 1024
    return total


class CoreShare:
    """Cores of some nodes on this machine: one each, or equal shares of them by a cgroup's quota where there are more.

    Args:
        nodes: how many share the machine.
    """

    PERIOD_US = 10_000
    """In which a quota is used up: short beside a step."""
    SHARED = 0.9
    """Share of the cores that quotas add up to: the rest is for everything else that the machine does."""

    def __init__(self, nodes: int) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._share = 1.0 if nodes <= len(self._cores) else self.SHARED * len(self._cores) / nodes
        second = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        root = Path("/sys/fs/cgroup" if second else "/sys/fs/cgroup/cpu")
        quota = str(round(self._share * self.PERIOD_US))
        values = {"cpu.max": f"{quota} {self.PERIOD_US}"}
        if not second:
            values = {"cpu.cfs_period_us": str(self.PERIOD_US), "cpu.cfs_quota_us": quota}
        self._values = values
        self._groups = [root / f"nodes{os.getpid()}-{node}" for node in range(nodes)] if self._share < 1.0 else []

    def __enter__(self) -> CoreShare:
        for group in self._groups:
            group.mkdir()
            for name, value in self._values.items():
                (group / name).write_text(value)
        return self

    def __exit__(self, *_: object) -> None:
        kill_descendants()
        for group in self._groups:
            # Processes that were killed leave their group a moment later.
            for _attempt in range(50):
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.1)

    def prefix(self, node: int) -> list[str]:
        """Returns the words before a command that runs as a node."""
        pinned = ["taskset", "-c", str(self._cores[node % len(self._cores)])]
        if not self._groups:
            return pinned
        return ["sh", "-c", f'echo $$ > {self._groups[node]}/cgroup.procs && exec "$@"', "sh", *pinned]
