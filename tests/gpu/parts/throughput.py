"""Speed of steps on one GPU: meshwright beside loops by hand, on the same weights and rows; a trace; 8B projected.

A llama of 1.2B (18 layers, D = 2,048, 32 query and 8 key heads, F = 8,192, 32,768 words) on 4 rows of 4,096 tokens,
bf16 compute over float32 weights, fused AdamW, clipping at 1, loss logged. Each contender is a process of its own,
forked from one that has imported everything and touched no GPU. Loops by hand are timed by CUDA events, meshwright by
its ``metrics.jsonl``; medians leave out the first `WARM` steps. Model FLOPs a token: 6 (N - N_embedding) + 12 L D S,
the formula of torchtitan, which counts the whole square of attention and nothing that is recomputed.

    python -m tests.gpu.parts.throughput --out FOLDER [--only ours-compiled,fsdp2-compiled] [--limit-s 170] [--tiny]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.launch.preload import prepare_environment

prepare_environment()
from meshwright.torch_compat.torchao_import import import_before_transformers  # noqa: E402

# Else transformers' import of torchao would touch the GPU, and no process could be forked.
import_before_transformers()

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from meshwright.cli.main import main as run_command  # noqa: E402
from tests.gpu import hand_loops  # noqa: E402
from tests.gpu.device_trace import trace_steps  # noqa: E402
from tests.gpu.parts.throughput_cases import CASES, PARTS, PEAK, SHAPES, TINY, Case, Shape  # noqa: E402
from tests.gpu.parts.throughput_inputs import Inputs  # noqa: E402
from tests.gpu.parts.throughput_ratios import Ratios  # noqa: E402
from tests.runs import Running  # noqa: E402

WARM, TIMED, TRACED = 4, 12, 2
CASE_LIMIT_S, CASE_LEAST_S = 80.0, 15.0
"""Seconds after which a contender is ended, and which must be left for it to begin."""
WARM_LIMIT_S, LATE_S, WARM_AT_ONCE, WARM_NICE = 75.0, 8.0, 3, 5
"""Seconds in which the compiler's cache is filled, and in which what runs then must end; its processes, and how nice
they are to others."""


class Child(Running):
    """A function in a process of its own, forked from this one."""

    @staticmethod
    def _run(work: Any, output: Path, before: Callable[[], None] | None, begun: int) -> None:
        status = 99
        try:
            os.setsid()
            os.close(begun)
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number in (1, 2):
                os.dup2(file, number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = int(work() or 0)
        except BaseException:
            importlib.import_module("traceback").print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def until(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        """Waits until something is there or the process ended, then kills what is left; returns whether it is there."""
        end = time.monotonic() + limit_s
        ended = False
        while not is_done() and not ended and time.monotonic() < end:
            ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
            time.sleep(0.02)
        self.end()
        if not ended:
            os.waitpid(self.pid, 0)
        return is_done()


@dataclass
class Firsts:
    """Says whether a run of meshwright has recorded the steps that are waited for, and when it recorded the first."""

    run: Path
    steps: int
    summary: Path | None
    """Of the trace behind them; None where none is made."""
    started: float
    first_step_s: float = 0.0

    def __call__(self) -> bool:
        """Looks."""
        lines = _lines(self.run / "metrics.jsonl")
        self.first_step_s = self.first_step_s or (time.time() - self.started if lines else 0.0)
        return len(lines) >= self.steps and (self.summary is None or self.summary.exists())


@dataclass
class Bench:
    """The folders, the inputs and the results of a call."""

    out: Path
    work: Path
    inputs: Inputs
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def say(self, line: dict[str, Any]) -> None:
        """Prints a result."""
        print(json.dumps(line), flush=True)

    def prepare(self) -> Path:
        """Prepares the text and returns the set's folder."""
        words = ["prepare", *self.inputs.data_words(self.inputs.shapes["1.2b"], False, prepares=True)]
        child = Child(lambda: run_command(words), self.out / "prepare.log")
        child.until(lambda: False, CASE_LIMIT_S)
        (found,) = (path.parent for path in (self.work / "prepared").glob("*/manifest.json"))
        return found

    def run(self, name: str, case: Case, limit_s: float) -> None:
        """Runs a contender and prints its figures."""
        began = time.time()
        try:
            figures = self.by_hand(name, case, limit_s) if case.hand else self.by_meshwright(name, case, limit_s)
        except Exception as error:
            log = self.out / f"{name}.log"
            tail = log.read_text(errors="replace")[-1500:] if log.exists() else ""
            self.say({"case": name, "error": f"{type(error).__name__}: {error}", "log": tail})
            return
        self.results[name] = figures | {"setting": case.setting, "ours": case.hand is None}
        self.say({"case": name, "setting": case.setting, "wall_s": round(time.time() - began, 1), **figures})

    def start_by_hand(self, name: str, case: Case, steps: int, warms: bool = False) -> tuple[Child, Callable[[], bool]]:
        """Starts a loop by hand in a process of its own, of one layer if it only warms.

        Returns:
            It, and whether its figures are there.
        """
        loop, result, started = case.hand, self.work / f"{name}.json", time.time()
        assert loop is not None
        rows = self.work / f"rows-{case.documents}.npz"

        def work() -> None:
            os.nice(WARM_NICE if warms else 0)
            with _attention_order(case.cudnn):
                hand_loops.run(loop, self.work / "model", rows, steps, result, started, layers=int(warms))

        return Child(work, self.out / f"{name}.log"), result.exists

    def by_hand(self, name: str, case: Case, limit_s: float) -> dict[str, Any]:
        """Runs a loop by hand; returns its figures."""
        child, is_done = self.start_by_hand(name, case, WARM + TIMED)
        if not child.until(is_done, limit_s):
            raise RuntimeError("it ended, or its time did, before its last step")
        found = json.loads((self.work / f"{name}.json").read_text())
        return self.figures(self.inputs.shapes["1.2b"], found["step_s"], found["loss"], found) | {
            "loop": repr(case.hand)
        }

    def start_meshwright(self, name: str, case: Case, steps: int, warms: bool = False) -> tuple[Child, Firsts]:
        """Starts the command in a process of its own.

        Args:
            name: of its run directory.
            case: what it trains.
            steps: that are waited for; those of a trace come behind them.
            warms: train one layer, with few words, for the compiler's cache alone.
        """
        shape, run = self.inputs.shapes[case.shape], (self.work if warms else self.out) / name
        words = [
            "train",
            *self.inputs.data_words(shape, case.documents),
            *self.inputs.model_words(case, shape, warms),
            *case.words,
        ]
        settings = {
            "train.batch": shape.rows, "train.steps": 1000, "train.sample-tokens": 0, "optimizer.lr": "3e-4",
            "schedule.shape": "constant", "schedule.warmup": 1, "evaluation.every": 0, "checkpoint.every": 0,
            "recovery.snapshot-every": 0, "monitor.display": "none", "devices": 1, "layout": case.layout, "run": run,
        }  # fmt: skip
        words += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        words += ["--train.no-prove", "--monitor.no-report", "--monitor.no-tensorboard"]
        is_traced, summary = case.traced and not warms, self.out / f"{name}.trace-summary.json"

        def work() -> int:
            os.nice(WARM_NICE if warms else 0)
            if is_traced:
                trace_steps(steps, TRACED, self.out / f"{name}.trace.json.gz", summary)
            for part in case.without:
                PARTS[part]()
            with _attention_order(case.cudnn):
                return run_command(words)

        firsts = Firsts(run, steps, summary if is_traced else None, time.time())
        return Child(work, self.out / f"{name}.log"), firsts

    def warm(self, names: Sequence[str], limit_s: float, go: Path | None) -> None:
        """Fills the compiler's cache, with one layer of each kind: timed runs compile little then.

        Args:
            names: of the contenders.
            limit_s: for all.
            go: nothing is begun once this file is there, and what runs has `LATE_S` left.
        """
        end, waiting, kinds = time.monotonic() + limit_s, {}, {}
        for name in names:
            case = CASES[name]
            if not case.cudnn and ("compile=true" in case.layout or (case.hand and case.hand.compile)):
                kinds.setdefault((case.shape, case.layout, case.words, case.documents, case.hand, case.without), name)
        left, seconds, failed, late = list(kinds.values()), {}, [], False
        began: dict[str, float] = {}
        while (left or waiting) and time.monotonic() < end:
            if go is not None and go.exists() and not late:
                late, left, end = True, [], min(end, time.monotonic() + LATE_S)
            if left and len(waiting) < WARM_AT_ONCE:
                name = left.pop(0)
                began[name] = time.monotonic()
                start = self.start_by_hand if CASES[name].hand else self.start_meshwright
                waiting[name] = start(f"warm-{name}", CASES[name], 1, warms=True)
            for name, (child, is_done) in list(waiting.items()):
                done = is_done()
                if done or not child.alive():
                    seconds[name] = round(time.monotonic() - began[name], 1)
                    failed += [] if done else [name]
                    child.until(lambda: True, 0.0)
                    del waiting[name]
            time.sleep(0.1)
        for child, _ in waiting.values():
            child.until(lambda: True, 0.0)
        unfinished = sorted(set(kinds.values()) - set(seconds))
        self.say({"case": "warm", "first_step_s": seconds, "unfinished": unfinished, "failed": failed})

    def by_meshwright(self, name: str, case: Case, limit_s: float) -> dict[str, Any]:
        """Runs the command up to the last step that is needed; returns its figures."""
        steps, shape, run = WARM + TIMED, self.inputs.shapes[case.shape], self.out / name
        summary = self.out / f"{name}.trace-summary.json"
        child, firsts = self.start_meshwright(name, case, steps)
        done = child.until(firsts, limit_s)
        lines = _lines(run / "metrics.jsonl")
        if not done and len(lines) < steps:
            raise RuntimeError(f"{len(lines)} steps were recorded before it ended, or its time did")
        lines, plan = lines[:steps], json.loads((run / "plan.json").read_text())["prediction"]
        peak, planned = lines[-1]["memory"]["peak"], plan["peak"]
        timed = lines[WARM:]
        parts = {part: statistics.median(line["parts"].get(part, 0.0) for line in timed) for part in timed[0]["parts"]}
        measured = {"peak_bytes": peak, "first_step_s": firsts.first_step_s}
        figures = self.figures(shape, [line["step_s"] for line in lines], [line["loss"] for line in lines], measured)
        if case.layers:
            figures.pop("mfu", None)
        step_s = figures["step_ms"] / 1e3
        figures |= {
            "layout": case.layout,
            "planned_bytes": planned,
            "peak_of_planned": round(peak / planned, 4),
            "planned_parts": plan["memory"],
            "planned_step_ms": round(plan["step_s"] * 1e3, 2),
            "step_of_planned": round(step_s / plan["step_s"], 4),
            "parts_ms": {part: round(spent * 1e3, 3) for part, spent in parts.items()},
            "own_mfu": timed[-1]["mfu"],
        }
        if case.traced:
            trace = json.loads(summary.read_text()) if summary.exists() else None
            self.say({"case": f"{name}-trace", "steps": TRACED, "summary": trace})
        return figures

    def figures(self, shape: Shape, step_s: list[float], loss: list[float], found: dict[str, Any]) -> dict[str, Any]:
        """Returns what is reported of every contender."""
        timed, tokens = step_s[WARM:], shape.rows * shape.sequence
        median = max(statistics.median(timed), 1e-9)
        return {
            "step_ms": round(median * 1e3, 2),
            "step_ms_least_most": [round(min(timed) * 1e3, 2), round(max(timed) * 1e3, 2)],
            "tokens_per_s": round(tokens / median),
            "mfu": round(shape.flops_per_token() * tokens / median / PEAK, 4),
            "peak_bytes": found["peak_bytes"],
            "first_step_s": round(found["first_step_s"], 2),
            "loss": [round(value, 5) for value in loss[:6]],
        }


@contextlib.contextmanager
def _attention_order(cudnn_first: bool) -> Iterator[None]:
    """Has torch's attention prefer cuDNN's kernel, in this process and those that it forks."""
    if not cudnn_first:
        yield
        return
    # Which kernel attention takes is chosen when a layer is compiled, and is no part of the cache's key.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-cudnn-")
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


def await_go(go: Path) -> float:
    """Waits for the file and returns the monotonic time at which its limit ends; ends with who would write it."""
    parent = os.getppid()
    while not go.exists():
        if os.getppid() != parent:
            sys.exit(1)
        time.sleep(0.05)
    return time.monotonic() - (time.time() - go.stat().st_mtime) + float(go.read_text())


def _lines(path: Path) -> list[dict[str, Any]]:
    """Returns the whole lines of a file of JSON lines, none where there is none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def main() -> int:
    """Runs the chosen contenders within the limit; 0 when all that ran agree and none failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="names, separated by commas, in their order; all when not given")
    parser.add_argument("--limit-s", type=float, default=170.0)
    parser.add_argument("--case-limit-s", type=float, default=CASE_LIMIT_S, help="of each contender")
    parser.add_argument("--no-warm", action="store_true", help="compile in the timed runs alone")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the part itself")
    parser.add_argument("--go", type=Path, help="file awaited after the setup; it holds the limit from then on")
    parser.add_argument("--work", type=Path, default=Path("/tmp/meshwright-throughput"), help="for what isn't kept")
    options = parser.parse_args()
    end = time.monotonic() + options.limit_s
    for name in ("torch._inductor.compile_fx", "torch._dynamo", "torch.profiler", "meshwright.jobs.train"):
        importlib.import_module(name)
    work = options.work / f"{os.getpid()}-{random.randrange(1 << 30)}"
    work.mkdir(parents=True)
    inputs = Inputs(work=work, shapes=TINY if options.tiny else SHAPES)
    bench = Bench(options.out, work, inputs)
    chosen = options.only.split(",") if options.only else list(CASES)
    weights = Child(inputs.write_weights, options.out / "weights.log")
    steps = WARM + TIMED
    tokens = max(shape.rows * shape.sequence for shape in inputs.shapes.values()) * (steps + 6)
    inputs.write_text(documents=round(tokens / (inputs.shapes["1.2b"].sequence * 600 / 4096 * 1.3)))
    documents_a_row = inputs.write_rows(bench.prepare(), steps)
    bench.say({"case": "rows", "documents_a_row": documents_a_row, "steps": steps})
    if not weights.until((work / "model" / "model.safetensors").exists, CASE_LIMIT_S):
        bench.say({"case": "weights", "error": (options.out / "weights.log").read_text()[-1500:]})
        return 1
    if not options.no_warm:
        bench.warm(chosen, WARM_LIMIT_S if options.go else min(WARM_LIMIT_S, options.limit_s / 3), options.go)
    bench.say({"case": "setup", "seconds": round(options.limit_s - (end - time.monotonic()), 1), "order": chosen})
    if options.go:
        end = await_go(options.go)
    for name in chosen:
        left = end - time.monotonic()
        if left < CASE_LEAST_S:
            bench.say({"case": name, "skipped": f"{left:.0f} s are left"})
            continue
        bench.run(name, CASES[name], min(options.case_limit_s, left - 2.0))
    agree = Ratios(shapes=inputs.shapes, results=bench.results, say=bench.say).compare()
    return int(not agree or any(name not in bench.results for name in chosen))


if __name__ == "__main__":
    sys.exit(main())
