"""Runs the parts of `tests/gpu/parts` on a machine with a GPU, each under its own limit, and keeps every result.

Parts in which nothing is timed run side by side, as forks of `parts.together`; the others run alone, one after the
other. One that takes long to set up does so beside the first group, and waits for its turn.

    python -m tests.gpu.first --out FOLDER [--parts environment,kernels] [--limit-s 600]
        [--limits together=200,throughput=120] [--more "throughput --only ours-compiled"]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "MESHWRIGHT_GPU_PART"
"""The variable by which the processes of a part are found, wherever they went."""
GRACE_S = 3.0
PACKED_BYTES = 2 * 2**20
"""Files above this are left out of the archive."""


@dataclass(frozen=True)
class Part:
    """One module of `parts`, or the tests of this folder."""

    name: str
    limit_s: float
    alone: bool
    """Whether it is timed, so that nothing may run beside it."""
    sets_up: bool = False
    """Whether it starts beside the first group, and waits for a file with its limit before it is timed."""
    named_only: bool = False
    """Whether it runs only when it is asked for by its name."""


PARTS = (
    Part("environment", 45, True),
    Part("nccl", 150, False),
    Part("verify", 190, False),
    Part("train", 190, False),
    Part("models", 190, False),
    Part("recovery", 150, False),
    Part("ranks", 190, False),
    Part("proof", 120, False),
    Part("tests", 190, False),
    Part("kernels", 70, True),
    Part("throughput", 170, True, sets_up=True),
    Part("snapshots", 75, True),
    Part("calibrate", 40, True),
    Part("layouts", 75, True),
    Part("quality", 235, False, named_only=True),
)
TOGETHER = "together"
"""The part whose forks are those that may run beside each other."""
TOGETHER_S = 210.0
"""Its limit, its imports among it."""


class Results:
    """The file that holds a JSON line a result; several parts write it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def add(self, part: str, found: dict) -> None:
        """Writes a line, at once."""
        line = json.dumps({"part": part, "at_s": round(time.monotonic() - self._began, 1)} | found)
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()
            print(line if len(line) < 400 else line[:400] + "...", flush=True)


def main() -> int:
    """Runs what was asked for and returns 1 when a part failed."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    # Parts share what they compile, in a folder where nobody else has put code.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="meshwright-inductor-"))
    results = Results(options.out / "results.jsonl")
    end = time.monotonic() + options.limit_s
    names = options.parts.split(",") if options.parts else [part.name for part in PARTS if not part.named_only]
    wanted = [part for part in PARTS if part.name in names]
    limits = dict(one.split("=") for one in options.limits.split(",") if one)
    failed: list[str] = []

    def limit_of(part: Part) -> float:
        return float(limits.get(part.name, part.limit_s))

    def start(part: Part) -> Started:
        more = [word for text in options.more for word in text.split()[1:] if text.split()[0] == part.name]
        return start_part(part, more, limit_of(part), options.out, results)

    def run(part: Part) -> None:
        left_s = end - time.monotonic() - GRACE_S
        limit_s = min(limit_of(part), left_s)
        if limit_s < 10:
            results.add(part.name, {"end": "skipped: no time left"})
            return
        if end_part(ahead.pop(part.name, None) or start(part), limit_s, results):
            failed.append(part.name)

    ahead: dict[str, Started] = {}
    together = [part for part in wanted if not part.alone]
    for part in wanted:
        if part.name == "environment":
            run(part)
    if together:
        ahead = {part.name: start(part) for part in wanted if part.sets_up}
        group = Part(TOGETHER, TOGETHER_S, False)
        words = ["--parts", ",".join(part.name for part in together)]
        words += ["--limits", ",".join(f"{part.name}={limit_of(part):g}" for part in together)]
        for text in options.more:
            words += ["--more", text]
        limit_s = min(limit_of(group), end - time.monotonic() - GRACE_S)
        ahead[group.name] = start_part(group, words, limit_s, options.out, results)
        run(group)
    for part in wanted:
        if part.alone and part.name != "environment":
            run(part)
    for name in ahead:
        kill_marked(name)
    pack(options.out)
    print(f"failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--parts", default="", help="names, separated by commas; all but quality when not given")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for everything together")
    parser.add_argument("--limits", default="", help="other limits of parts: throughput=120,kernels=40")
    parser.add_argument("--more", action="append", default=[], help="a part and more arguments for it")
    return parser.parse_args()


@dataclass(frozen=True)
class Started:
    """A part under way."""

    part: Part
    folder: Path
    process: subprocess.Popen
    reader: threading.Thread
    go: Path | None
    """File that it waits for."""


def start_part(part: Part, more: list[str], limit_s: float, out: Path, results: Results) -> Started:
    """Starts a part."""
    folder = out / part.name
    folder.mkdir(exist_ok=True)
    words = ["-m", f"tests.gpu.parts.{part.name}", "--out", str(folder), "--limit-s", f"{limit_s:.0f}", *more]
    go = folder / "go" if part.sets_up else None
    if go is not None:
        go.unlink(missing_ok=True)
        words += ["--go", str(go)]
    environment = os.environ | {
        MARK: part.name,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if not part.alone:
        # Side by side each would start a thread a core.
        environment |= {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with (folder / "stderr.txt").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors
        )
    reader = threading.Thread(target=_read, args=(process, part.name, results, folder))
    reader.start()
    return Started(part, folder, process, reader, go)


def end_part(started: Started, limit_s: float, results: Results) -> bool:
    """Awaits a part's end or its limit, from now on, and returns whether it failed."""
    name, began = started.part.name, time.monotonic()
    if started.go is not None:
        partial = started.go.with_suffix(".part")
        partial.write_text(f"{limit_s:.1f}")
        partial.rename(started.go)
    try:
        status: int | str = started.process.wait(limit_s)
    except subprocess.TimeoutExpired:
        status = "killed at its limit"
    kill_marked(name)
    started.reader.join(GRACE_S)
    found: dict = {"end": status, "seconds": round(time.monotonic() - began, 1)}
    if status:
        found["stderr"] = (started.folder / "stderr.txt").read_text(errors="replace")[-1500:]
    results.add(name, found)
    return bool(status)


def _read(process: subprocess.Popen, name: str, results: Results, folder: Path) -> None:
    """Takes the lines of a part as they come; what is no JSON object goes to a file."""
    assert process.stdout is not None
    with (folder / "stdout.txt").open("wb") as other:
        for line in process.stdout:
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if isinstance(found, dict):
                results.add(name, found)
            else:
                other.write(line)
                other.flush()


def kill_marked(name: str) -> None:
    """Kills every process of a part that still lives, its orphans among them."""
    wanted = f"{MARK}={name}".encode()
    for _ in range(3):
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if wanted in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                    os.kill(int(path.parent.name), signal.SIGKILL)


def pack(out: Path) -> None:
    """Puts what the parts left, but for large files, into one archive and removes their folders' claim on it."""
    with tarfile.open(out / "parts.tar.gz", "w:gz") as archive:
        for path in sorted(out.rglob("*")):
            small = path.is_file() and path.stat().st_size <= PACKED_BYTES
            if small and path.name not in ("parts.tar.gz", "results.jsonl"):
                archive.add(path, path.relative_to(out))


if __name__ == "__main__":
    sys.exit(main())
