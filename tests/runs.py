"""The test tool for whole runs: `meshwright train` in a forked process of its own session, so that starts are cheap."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from meshwright.cli.arguments import read_config
from meshwright.cli.main import main
from meshwright.forking import release_threads
from meshwright.launch.devices import Devices
from meshwright.launch.preload import prepare_environment
from meshwright.parallel import peak_rate
from meshwright.train.run_config import RunConfig

LIMIT_S = 240.0
"""Of a whole run, which takes seconds: a limit ends what hangs, and says nothing of how fast a machine is."""
LATE = ("numpy.ma", "torch.utils.serialization", "meshwright.parallel.node_dispatch")
"""What every run, or each rank of it, imports only when it comes to use it."""
WORDS = ("the", "cat", "sat", "on", "mats", "and", "she", "saw", "him", "run", "far", "from", "big", "old", "house")


def write_corpus(path: Path, sentences: int = 300, seed: int = 0) -> Path:
    """Writes a small text of few words and returns its path."""
    draw = random.Random(seed)
    lines = (" ".join(draw.choices(WORDS, k=9)) + "." for _ in range(sentences))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def words(root: Path, run: str, *more: str, layout: str = "replicate=1", devices: int = 1) -> list[str]:
    """Returns the command of a tiny run, which isn't proven first; ``more`` wins."""
    return [
        *("train", "--model", "gpt2", "--model.layers", "2", "--model.width", "32", "--data", str(root / "corpus.txt")),
        *("--data.tokenizer", "chars", "--data.sequence", "16", "--data.cache", str(root / "prepared")),
        *("--data.workers", "1", "--train.batch", "8", "--train.steps", "24", "--train.sample-tokens", "0"),
        *("--schedule.warmup", "2", "--evaluation.every", "0", "--checkpoint.every", "3"),
        *("--monitor.display", "none", "--monitor.no-tensorboard", "--monitor.no-report"),
        *("--train.no-prove", "--layout", layout, "--devices", str(devices), "--run", str(root / run), *more),
    ]


@cache
def warm() -> None:
    """Imports once what every run imports, so that forked runs find it in memory."""
    prepare_environment()
    for name in ("meshwright.jobs.train", "meshwright.cli.train", "transformers.models.gpt2.modeling_gpt2", *LATE):
        importlib.import_module(name)
    read_config(RunConfig, [], "train")  # tyro imports what it parses a type with when it meets one


@cache
def warm_compiler() -> None:
    """Imports once what each process that traces compiled layers imports; forked ones find it in memory.

    The modules alone: each process still traces anew, and nothing that one has compiled is another's.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler warns of its own deprecated parts
        for name in ("_functorch.aot_autograd", "_inductor.compile_fx", "distributed.tensor.experimental._func_map"):
            importlib.import_module(f"torch.{name}")
        importlib.import_module("torch._dynamo").lookup_backend("aot_eager")


class Running:
    """A command under way in a process of its own session."""

    def __init__(self, argv: Sequence[str], output: Path, before: Callable[[], None] | None = None) -> None:
        self.output = output
        sys.stdout.flush()
        sys.stderr.flush()
        warm()
        release_threads()
        # The command collects before it starts ranks: half a second, of what this process has imported.
        gc.collect()
        gc.freeze()
        there, begun = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread, and those of pytest-xdist are no harm.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            os.close(there)
            self._run(argv, output, before, begun)
        self.status: int | None = None
        os.close(begun)
        os.read(there, 1)  # its session is there, by which its processes are found
        os.close(there)

    @staticmethod
    def _run(argv: Sequence[str], output: Path, before: Callable[[], None] | None, begun: int) -> None:
        status = 99
        try:
            os.setsid()
            os.close(begun)
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number in (1, 2):
                os.dup2(file, number)
            sys.stdout = os.fdopen(1, "w")
            sys.stderr = os.fdopen(2, "w")
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            Devices.threads = lambda self, local_world: 1  # type: ignore[method-assign]
            # Of each rank's start, which multiplies larger matrices ten times as long for a rate that is reported.
            peak_rate.SPAN_S, peak_rate.SIZE["cpu"] = 0.005, 128
            if before:
                before()
            status = main(argv)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Returns the exit status, or minus the signal that ended it."""
        end = time.monotonic() + limit_s
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                os.killpg(self.pid, signal.SIGKILL)
                raise AssertionError(f"still running after {limit_s} s: {self.text()}")
            time.sleep(0.005)
        return status

    def poll(self) -> int | None:
        """Returns the exit status, or minus the signal that ended it; None while it runs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def text(self) -> str:
        """Returns what it printed."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def alive(self) -> list[int]:
        """Returns the processes of its session that live, itself included."""
        return [pid for pid, state in self._processes() if state != "Z"]

    def _processes(self) -> list[tuple[int, str]]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if int(fields[3]) == self.pid:
                    found.append((int(entry.name), fields[0]))
        return found

    def ranks(self) -> list[int]:
        """Returns its ranks' process ids."""
        return [pid for pid in self.alive() if pid != self.pid]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the command's own process."""
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kills what is left of its session, after a test that failed."""
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def no_orphans(self, limit_s: float = 60.0) -> None:
        """Fails when a process of its session still lives after a moment."""
        wait_until(lambda: not self.alive(), limit_s)


def wait_until(condition: Callable[[], object], limit_s: float = 120.0) -> None:
    """Waits for a condition, a limited time."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.003)


def call(
    argv: Sequence[str], output: Path, before: Callable[[], None] | None = None, limit_s: float = LIMIT_S
) -> tuple[int, str]:
    """Runs a command to its end and returns (exit status, what it printed)."""
    running = Running(argv, output, before)
    status = running.wait(limit_s)
    running.no_orphans()
    return status, running.text()


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    """Returns the lines of a run's metrics or events; a torn last line of a killed writer is left out."""
    path = run / name
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def curve(run: Path) -> dict[int, tuple[float, float]]:
    """Returns step to (loss, grad_norm); a step done twice must have come out the same to the bit."""
    found: dict[int, tuple[float, float]] = {}
    for row in rows(run):
        value = (row["loss"], row["grad_norm"])
        assert found.setdefault(row["step"], value) == value, f"step {row['step']} differs when done again"
    return found


def last_step(run: Path) -> int:
    """Returns the last step that the metrics show, 0 before the first; of a growing file its end alone is parsed."""
    path = run / "metrics.jsonl"
    for line in reversed(path.read_text(encoding="utf-8").splitlines() if path.exists() else []):
        with contextlib.suppress(json.JSONDecodeError):
            return int(json.loads(line)["step"])
    return 0


def happened(run: Path, kind: str) -> bool:
    """Returns whether a planted fault of a kind has happened."""
    return any(path.suffix != ".ask" for path in (run / "chaos").glob(f"{kind}-*"))


def events(run: Path, kind: str) -> list[dict]:
    """Returns a run's events of one kind."""
    return [row for row in rows(run, "events.jsonl") if row["kind"] == kind]
