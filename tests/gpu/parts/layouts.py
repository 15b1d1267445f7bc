"""Times layouts of one rank, step by step and byte by byte, in one process: rows that the planner is held against.

    python -m tests.gpu.parts.layouts --out FOLDER [--set first|second|rest|tiny] [--limit-s 120]

Each case builds the run's own program and takes its own steps; nothing is read between them, as in a run. A row has
what was measured, and which layout it was: `benchmarks/fit_device.py` prices it, anywhere and later.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import gzip
import itertools
import json
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from meshwright.launch.contract import RankContext
from meshwright.launch.preload import prepare_environment
from meshwright.launch.rendezvous import init_group
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.parallel.axis_group import TrafficLog
from meshwright.parallel.build import build
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.program import Program
from meshwright.parallel.step_timer import StepTimer
from meshwright.parallel.wire import AUTO
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.utilization import model_flops_per_s
from meshwright.spec.layout import Layout
from meshwright.spec.placement import Box
from meshwright.train.config import OptimizerConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import ModelAnalysis, analyse_model, check_shapes
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.session import make_model_source
from meshwright.train.step import Stepper

PEAK_FLOPS = 989.4e12
"""Dense bf16 of an H100 by its data sheet, by which MFU is told."""
WARM_UP, STEPS = 3, 5
SLOW_WARM_UP, SLOW_STEPS, SLOW_S = 2, 3, 0.3
"""The same of steps that take longer than this."""
MODELS = {
    "0.4B": ModelConfig(name="llama", layers=24, width=1024, heads=16, kv_heads=16, ffn=2816, vocab=32000),
    "1.1B": ModelConfig(name="llama", layers=16, width=2048, heads=32, kv_heads=8, ffn=8192, vocab=32000),
    "8B/8": ModelConfig(name="llama", layers=4, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256),
    "gpt2": ModelConfig(name="gpt2", layers=12, width=1024, heads=16, vocab=50304),
    "mixtral": ModelConfig(
        name="mixtral", layers=8, width=1024, heads=16, kv_heads=8, ffn=2816, experts=8, vocab=32000
    ),
    "qwen3": ModelConfig(name="qwen3", layers=16, width=2048, heads=16, kv_heads=8, ffn=6144, vocab=32000),
    "gemma3": ModelConfig(name="gemma3_text", layers=12, width=1536, heads=8, kv_heads=4, ffn=6144, vocab=65536),
    "gemma3-varlen": ModelConfig(
        name="gemma3_text", layers=12, width=1536, heads=8, kv_heads=4, ffn=6144, vocab=65536, attention="varlen"
    ),
    "tiny-mixtral": ModelConfig(name="mixtral", layers=2, width=64, heads=4, kv_heads=2, ffn=128, experts=4, vocab=512),
    "tiny": ModelConfig(name="llama", layers=2, width=64, heads=4, kv_heads=2, ffn=128, vocab=512),
}
"""Models by name; 8B/8 has 4 layers of Llama 3 8B and its ends."""
FIRST = """
1.1B 1 4096 precision=bf16
1.1B 1 4096 precision=bf16,recompute=full
8B/8 1 8192 precision=bf16
0.4B 1 1024 precision=bf16
1.1B 4 1024 precision=bf16,recompute=selective
0.4B 16 1024 precision=bf16
1.1B 4 2048 precision=bf16,microbatches=4
1.1B 1 4096 precision=fp16
0.4B 4 1024 precision=float32
0.4B 4 1024 precision=bf16,offload=optimizer
0.4B 4 1024 precision=bf16,offload=parameters
8B/8 1 4096 precision=fp8
1.1B 1 8192 precision=bf16,recompute=full
gpt2 8 1024 precision=bf16
8B/8 2 4096 precision=bf16,recompute=full
1.1B 4 4096 precision=bf16,recompute=full,microbatches=2
1.1B 1 4096 precision=bf16,compile=true
1.1B 1 4096 precision=fp8,compile=true
"""
"""A line a case: model, rows of the batch, tokens of a row, layout. Cases that say most about the price come first,
and those that compile last, each of which takes as long as ten others."""
SECOND = """
1.1B 4 4096 precision=bf16,compile=true
1.1B 8 4096 precision=bf16,compile=true,microbatches=2
1.1B 4 4096 precision=bf16
8B/8 2 8192 precision=bf16,compile=true
8B/8 2 8192 precision=bf16
8B/8 2 8192 precision=bf16,recompute=full
8B/8 1 8192 precision=bf16,loss_chunk=off
1.1B 4 4096 precision=bf16,recompute=selective
1.1B 4 4096 precision=bf16,recompute=full
0.4B 4 1024 precision=bf16,offload=optimizer
0.4B 8 4096 precision=bf16
8B/8 2 8192 precision=fp8,compile=true
1.1B 1 16384 precision=bf16
0.4B 4 1024 precision=bf16,offload=parameters
gpt2 8 1024 precision=bf16
8B/8 2 8192 precision=bf16,recompute=selective
0.4B 16 2048 precision=bf16,recompute=full
1.1B 4 2048 precision=bf16
0.4B 4 1024 precision=float32
1.1B 4 4096 precision=fp16,microbatches=2
8B/8 4 4096 precision=bf16,microbatches=2
gpt2 16 1024 precision=bf16,recompute=full
1.1B 4 4096 precision=bf16,compile=true,recompute=full
0.4B 16 1024 precision=bf16,compile=true
"""
"""Those in which a slow host isn't the limit, by micro-batches that keep the device at work; compiled layers in
sizes that share a graph, which `parts.throughput` may have left in the compiler's cache."""
REST = """
1.1B 1 4096 precision=tf32
1.1B 1 4096 precision=tf32,compile=true
0.4B 8 1024 precision=bf16,recompute=full
8B/8 1 4096 precision=bf16
1.1B 2 4096 precision=bf16
1.1B 1 2048 precision=bf16
1.1B 1 1024 precision=bf16
0.4B 2 4096 precision=bf16
0.4B 1 8192 precision=bf16
1.1B 1 4096 precision=bf16,recompute=selective
8B/8 1 4096 precision=bf16,recompute=selective
1.1B 8 4096 precision=bf16,recompute=full
1.1B 1 4096 precision=bf16,loss_chunk=off
8B/8 1 4096 precision=bf16,loss_chunk=off
0.4B 4 2048 precision=fp16
1.1B 1 2048 precision=float32
1.1B 1 4096 precision=fp8
8B/8 2 4096 precision=bf16,microbatches=2
1.1B 8 1024 precision=bf16,microbatches=8
0.4B 8 1024 precision=bf16,microbatches=4,recompute=selective
0.4B 4 2048 precision=bf16,offload=optimizer,microbatches=2
0.4B 4 2048 precision=bf16,offload=parameters,microbatches=2
8B/8 1 8192 precision=bf16,recompute=full
gpt2 4 1024 precision=bf16,recompute=full
gpt2 4 1024 precision=bf16,microbatches=4
0.4B 32 1024 precision=bf16,recompute=full
0.4B 4 4096 precision=bf16,recompute=selective
8B/8 4 2048 precision=bf16
8B/8 2 2048 precision=bf16,recompute=selective
1.1B 8 2048 precision=bf16,recompute=full
1.1B 16 1024 precision=bf16,recompute=full
1.1B 2 8192 precision=bf16,recompute=full
0.4B 2 1024 precision=bf16
0.4B 8 1024 precision=bf16
1.1B 2 2048 precision=fp16,microbatches=2
0.4B 2 2048 precision=float32,recompute=full
8B/8 1 2048 precision=bf16,microbatches=1
0.4B 8 1024 precision=fp8
0.4B 16 1024 precision=bf16,compile=true
8B/8 1 4096 precision=bf16,compile=true
1.1B 1 4096 precision=bf16,compile=true,recompute=selective
1.1B 1 4096 precision=bf16,compile=true,recompute=full
1.1B 2 4096 precision=bf16,compile=true,microbatches=2
8B/8 1 4096 precision=fp8,compile=true
"""
FAMILIES = """
mixtral 4 4096 precision=bf16
qwen3 4 4096 precision=bf16
gemma3 4 4096 precision=bf16
qwen3 4 4096 precision=bf16,compile=true
mixtral 4 4096 precision=bf16,recompute=full
gemma3 4 4096 precision=bf16,compile=true
mixtral 4 4096 precision=bf16,compile=true
"""
"""Models of which none was there when constants were fitted: experts, norms of heads, windows, a wide vocabulary."""
THIRD = """
1.1B 4 4096 precision=bf16,compile=true
gemma3 4 4096 precision=bf16
gemma3-varlen 4 4096 precision=bf16
1.1B 4 4096 precision=bf16
8B/8 2 8192 precision=bf16
mixtral 4 4096 precision=bf16
0.4B 4 1024 precision=float32
qwen3 4 4096 precision=bf16
0.4B 8 4096 precision=bf16
8B/8 2 8192 precision=bf16,recompute=full
mixtral 4 4096 precision=bf16,compile=true
1.1B 1 16384 precision=bf16
gpt2 8 1024 precision=bf16
8B/8 4 4096 precision=bf16,microbatches=2
1.1B 4 4096 precision=bf16,recompute=full
8B/8 2 8192 precision=bf16,compile=true
gpt2 16 1024 precision=bf16,recompute=full
1.1B 4 4096 precision=fp16,microbatches=2
"""
"""Those whose prices a calibration of the same call is to give, the ones first that say most of kernels."""
TINY = """
tiny-mixtral 2 64 precision=bf16
tiny 2 64 precision=bf16
tiny 4 64 precision=fp16,microbatches=2,recompute=selective
tiny 2 64 precision=float32,recompute=full
tiny 2 64 precision=bf16,compile=true
tiny 2 64 precision=fp8
tiny 2 64 precision=bf16,offload=optimizer
tiny 2 64 precision=bf16,offload=parameters
"""
KERNELS = {
    "elementwise": ("triton_",),
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas"),
    "copy": ("memcpy",),
    "optimizer": ("_update", "adam"),
}
"""Words in the names of kernels, by their kind; the first kind that fits counts."""
LONGEST = 16
"""Names of kernels that a row has."""
SETS = {"first": FIRST, "second": SECOND, "rest": REST, "families": FAMILIES, "third": THIRD, "tiny": TINY}
FRAMES = 6
"""Innermost Python frames by which a block of a trace is known."""
IMPORTS_S = 14.0
"""Seconds until the first case begins, which count against the part's limit too: 13 s were seen."""
COMPILE_S, BUILD_S, RATE = 9.0, 1.5, 3.5e14
"""Seconds until the first step of a new compiled shape, of building a program, and FLOP/s: guesses, by which a case is
left out that would no longer fit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A layout of a model on so many rows of so many tokens."""

    model: str
    rows: int
    sequence: int
    layout: Layout

    @classmethod
    def parse(cls, line: str) -> Case:
        """Reads a line of a set."""
        model, rows, sequence, layout = line.split()
        return cls(model, int(rows), int(sequence), Layout.parse(layout))

    @property
    def name(self) -> str:
        """Its line."""
        return f"{self.model} {self.rows} {self.sequence} {self.layout}"

    @property
    def config(self) -> ModelConfig:
        """The model's sizes, with its longest row."""
        return dataclasses.replace(MODELS[self.model], context=self.sequence)

    @property
    def shape_key(self) -> tuple[object, ...]:
        """What a compiled layer is specialised to."""
        layout = self.layout
        return (self.model, self.rows // layout.microbatches, self.sequence, layout.precision, str(layout.recompute))

    def guess_step_s(self) -> float:
        """Returns about how long a step takes."""
        parameters = measured_shape(self.model).parameters
        on_host_s = 0.0 if self.layout.offload == "none" else 2e-9 * parameters
        return 8.0 * parameters * self.rows * self.sequence / RATE + on_host_s

    @property
    def steps(self) -> tuple[int, int]:
        """Steps of warm-up, and those that count: fewer of long ones."""
        return (WARM_UP, STEPS) if self.guess_step_s() < SLOW_S else (SLOW_WARM_UP, SLOW_STEPS)

    def guess_s(self, compiled: set[tuple[object, ...]]) -> float:
        """Returns about how long it takes."""
        compile_s = COMPILE_S if self.layout.compile and self.shape_key not in compiled else 0.0
        return BUILD_S + sum(self.steps) * self.guess_step_s() + compile_s


@cache
def measured_shape(model: str) -> Any:
    """Returns the sizes of a model as the planner reads them."""
    return measure_shape(build_meta(dataclasses.replace(MODELS[model], context=8192)))


class Bench:
    """Runs cases on one device, of which it is the only rank.

    Args:
        device: of the rank.
        out: the folder of its files.
    """

    def __init__(self, device: torch.device, out: Path) -> None:
        self._device, self._out, self._analyses = device, out, dict[str, ModelAnalysis]()
        self._traces = 0

    def run(self, case: Case) -> dict[str, Any]:
        """Returns the measured part of a row; what it allocated is free again."""
        self._reset()
        before = self._allocated()
        try:
            return self._run(case, before)
        finally:
            gc.collect()

    def _run(self, case: Case, before: int) -> dict[str, Any]:
        begun = time.perf_counter()
        program = self._program(case)
        optimizer = LocalAdamW(program.weights, OptimizerConfig(), on_host=case.layout.offload == "optimizer")
        stepper = Stepper(program, optimizer, LossScaler(case.layout.precision == "fp16"), clip=1.0, seed=0)
        batches, targets = self._batches(case), case.rows * case.sequence
        warm_up, steps = case.steps
        built_s = time.perf_counter() - begun
        outcomes = [stepper.run(0, batches, targets, 1e-4, 0.0)]
        assert program.state_meter is not None
        state = program.state_meter.read(optimizer.bytes())
        program.state_meter.close()
        program.state_meter = None
        loss = outcomes[0].read()["loss"]
        first_s = time.perf_counter() - begun - built_s
        for step in range(1, warm_up):
            stepper.run(step, batches, targets, 1e-4, 0.0)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        program.step_timer.drain()
        marks, processor_s = [self._mark()], time.process_time()
        for step in range(warm_up, warm_up + steps):
            outcomes.append(stepper.run(step, batches, targets, 1e-4, 0.0))
            marks.append(self._mark())
        issued_s = marks[-1][1] - marks[0][1]
        outcomes[-1].read()
        seconds, memory = self._seconds(marks), self._memory(before)
        parts = {name: total / steps for name, total in program.step_timer.drain().items()}
        return {
            "step_time_s": statistics.median(seconds),
            "steps_s": [round(value, 6) for value in seconds],
            "issued_s": issued_s / steps,
            "processor_s": (time.process_time() - processor_s) / steps,
            "parts": parts,
            "built_s": round(built_s, 2),
            "first_s": round(first_s, 2),
            "loss": round(loss, 3),
            "state": state,
            **memory,
            "kernels": self._kernels(lambda: stepper.run(warm_up + steps, batches, targets, 1e-4, 0.0).read()),
            "trace": self._trace(lambda: stepper.run(warm_up + steps + 1, batches, targets, 1e-4, 0.0).read()),
        }

    def _program(self, case: Case) -> Program:
        """Returns the rank's program, as `train.session.build_program` builds it, but with weights drawn in place."""
        built, layout = build_meta(case.config), case.layout
        analysis = analyse_model(built, layout, self._analyses.get(case.model), case.sequence)
        self._analyses[case.model] = analysis
        check_shapes(analysis, layout, case.rows, case.sequence)
        source = make_model_source(built, layout, analysis)
        mesh = Mesh(layout, self._device.type, TrafficLog(), AUTO)
        source = dataclasses.replace(source, fill=self._draw)
        return build(source, layout, mesh, self._device, StepTimer(self._device.type))

    def _draw(self, name: str, box: Box) -> torch.Tensor:
        """Returns values of a weight, drawn on the device."""
        sizes = [stop - start for start, stop in box]
        if len(sizes) == 1:
            return torch.full(sizes, float(not name.endswith("bias")), device=self._device)
        return torch.randn(sizes, device=self._device).mul_(0.02)

    def _batches(self, case: Case) -> list[MicroBatch]:
        generator = torch.Generator().manual_seed(0)
        sizes = (case.rows, case.sequence + 1)
        tokens = torch.randint(0, MODELS[case.model].vocab or 1000, sizes, generator=generator).to(self._device)
        chunks = tokens.chunk(case.layout.microbatches)
        return [MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), None) for rows in chunks]

    # -------------------------------------------------------- clocks and bytes

    def _mark(self) -> tuple[torch.cuda.Event | None, float]:
        """Returns the device's present place in its queue, and the host's time."""
        if self._device.type != "cuda":
            return None, time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event, time.perf_counter()

    def _seconds(self, marks: list[tuple[torch.cuda.Event | None, float]]) -> list[float]:
        """Returns the seconds between marks: the device's on a GPU."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        pairs = itertools.pairwise(marks)
        return [
            1e-3 * first[0].elapsed_time(last[0]) if first[0] and last[0] else last[1] - first[1]
            for first, last in pairs
        ]

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._device.type == "cuda" else 0

    def _reset(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _kernels(self, step: Callable[[], object]) -> dict[str, Any] | None:
        """Returns the device's seconds in one step by `KERNELS`, and of the longest kernels by name."""
        if self._device.type != "cuda":
            return None
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        # Without the tree of events, which takes seconds to build.
        results = profiler.profiler.kineto_results if profiler.profiler is not None else None
        spent: dict[str, float] = defaultdict(float)
        by_name: dict[str, float] = defaultdict(float)
        for event in results.events() if results is not None else ():
            if event.device_type() != DeviceType.CUDA:
                continue
            seconds, name = 1e-9 * event.duration_ns(), event.name().lower()
            kinds = (kind for kind, words in KERNELS.items() if any(word in name for word in words))
            spent[next(kinds, "elementwise")] += seconds
            by_name[event.name()[:90]] += seconds
        longest = sorted(by_name.items(), key=lambda item: -item[1])[:LONGEST]
        return {
            **{kind: round(seconds, 7) for kind, seconds in spent.items()},
            "longest": {name: round(seconds, 7) for name, seconds in longest},
        }

    def _trace(self, step: Callable[[], object]) -> str | None:
        """Writes what the allocator did in one step to a file of its own, and returns its name.

        The file has ``live``, bytes that were allocated before; ``events``, each as bytes (negative when they are free
        again), the number of the block, and of the frames that asked for it, -1 where no Python did; and ``frames``,
        innermost first.
        """
        if self._device.type != "cuda":
            return None
        live = self._allocated()
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=1_000_000)
        step()
        torch.cuda.synchronize()
        history = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(None)
        blocks, frames, events = dict[int, int](), dict[str, int](), []
        for event in history:
            if event["action"] not in ("alloc", "free_completed"):
                continue
            found = [f"{_short(frame)}" for frame in event.get("frames", [])[:FRAMES]]
            sign = 1 if event["action"] == "alloc" else -1
            if sign > 0:
                blocks[event["addr"]] = len(blocks)
            number = blocks.get(event["addr"], -1)
            frame = frames.setdefault(" < ".join(found), len(frames)) if found and sign > 0 else -1
            events.append([sign * event["size"], number, frame])
        self._traces += 1
        name = f"trace-{self._traces}.json.gz"
        with gzip.open(self._out / name, "wt", encoding="utf-8") as file:
            json.dump({"live": live, "frames": list(frames), "events": events}, file)
        return name

    def _memory(self, before: int) -> dict[str, int]:
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "device_bytes": total - free,
            "bytes_before": before,
        }


def _short(frame: dict[str, Any]) -> str:
    """Returns a frame of a trace in few words."""
    return f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"


def described(case: Case, device: str) -> dict[str, Any]:
    """Returns the part of a row that says what was run, in the columns of `benchmarks/truth`."""
    layout, config = case.layout, case.config
    return {
        "case": case.name,
        "framework": "meshwright",
        "gpu_type": device,
        "gpus": 1,
        "torch": torch.__version__,
        "model": dataclasses.asdict(config),
        "seq_len": case.sequence,
        "gbs": case.rows,
        "mbs": case.rows // layout.microbatches,
        "grad_acc": layout.microbatches,
        "precision": layout.precision,
        "recompute": str(layout.recompute),
        "layout": str(layout),
    }


def rows(cases: list[Case], bench: Bench, device: str, limit_s: float) -> Iterator[dict[str, Any]]:
    """Yields a row for each case, or why there is none."""
    begun, compiled = time.perf_counter(), set[tuple[object, ...]]()
    for case in cases:
        left_s = limit_s - (time.perf_counter() - begun)
        if case.guess_s(compiled) > left_s:
            yield {"case": case.name, "skipped": f"{left_s:.0f} s are left"}
            continue
        row, case_begun = described(case, device), time.perf_counter()
        if case.layout.compile and case.shape_key not in compiled:
            # As in a run of its own: no other model's graphs count against the limit of recompilations.
            torch.compiler.reset()
        try:
            row |= bench.run(case)
            job = PricedJob(shape=measured_shape(case.model), sequence=case.sequence, rows=case.rows)
            row["mfu"] = round(model_flops_per_s(job, row["step_time_s"]) / PEAK_FLOPS, 4)
            row["tokens_per_s"] = round(case.rows * case.sequence / row["step_time_s"], 1)
        except torch.cuda.OutOfMemoryError as error:
            row |= {"status": "oom", "why": str(error).split(". ")[0]}
        except Exception as error:
            traceback.print_exc()
            row["error"] = "\n".join(traceback.format_exception_only(error))[-600:]
        if case.layout.compile:
            compiled.add(case.shape_key)
        yield row | {"took_s": round(time.perf_counter() - case_begun, 2)}


def main(argv: list[str]) -> int:
    """Runs the part; exit status 0 when every case ran or was left out for want of time."""
    parser = argparse.ArgumentParser(prog="tests.gpu.parts.layouts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--set", default="second", help="first, second, third, rest, families, tiny, or several as first+rest"
    )
    parser.add_argument("--limit-s", type=float, default=1e9)
    chosen = parser.parse_args(argv)
    prepare_environment()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    init_group(RankContext(rank=0, world=1, local_rank=0, local_world=1, device=str(device)))
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    cases = [Case.parse(line) for key in chosen.set.split("+") for line in SETS[key].strip().splitlines()]
    failed = False
    write: Callable[[str], object] = (chosen.out / "layouts.jsonl").open("a", encoding="utf-8").write
    for row in rows(cases, Bench(device, chosen.out), name, chosen.limit_s - IMPORTS_S):
        failed |= "error" in row
        print(json.dumps(row), flush=True)
        write(json.dumps(row) + "\n")
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
