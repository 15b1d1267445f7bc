"""`meshwright calibrate` on one GPU, its figures beside the catalogue's, and what it doesn't measure yet.

    python -m tests.gpu.parts.calibrate --out FOLDER [--whole] [--limit-s 60]

The calibration stays in FOLDER/calibration.json, for `benchmarks/fit_device.py`: a quick one, to which the host's times
are added that a whole one has. A whole one takes minutes on a slow host.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import meshwright
from meshwright.calibrate import clock as clock_module
from meshwright.calibrate.clock import DeviceTimer
from meshwright.calibrate.host import host_times
from meshwright.cli.calibrate_output import calibration_lines
from meshwright.cluster.calibration import Calibration
from meshwright.cluster.cluster import Cluster
from meshwright.jobs.requests import CalibrateConfig
from meshwright.launch.devices import found_devices
from meshwright.launch.preload import prepare_environment
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.work import measure_model
from meshwright.planner.cost.kernels import rates, sustained_share
from meshwright.spec.model_shape import ModelWork
from meshwright.torch_compat.tensors import fused_adamw_

LARGE = 8192
COPY_BYTES = 1 << 28
HOST_ELEMENTS = 1 << 25
TOKENS, WIDTH = 4096, 2048
STEP_PRODUCTS = (
    *((16384, 8192, 2048), (16384, 2048, 8192), (16384, 2048, 2048), (8192, 2048, 16384)),
    *((16384, 14336, 4096), (16384, 4096, 14336), (14336, 4096, 16384)),
)
"""Products of a llama of 1.1B and of 8B, (m, n, k), the last of each that of a weight's gradient."""
Figures = dict[str, Any]


def calibrated(folder: Path, whole: bool, timeout_s: float) -> Iterator[Figures]:
    """Measures the machine and yields the calibration's figures, then those beside the catalogue's."""
    path = folder / "calibration.json"
    begun = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s {text.strip()}", file=sys.stderr, flush=True)

    config = CalibrateConfig(out=str(path), quick=not whole, practice=0, timeout_s=timeout_s)
    result = meshwright.calibrate(config, say=say)
    assert result is not None
    took_s = time.perf_counter() - begun
    lines = list(calibration_lines(result.calibration, path))
    print("\n".join(lines), file=sys.stderr)
    yield {
        "case": "calibration",
        "quick": not whole,
        "took_s": round(took_s, 2),
        "measured_s": result.calibration.taken_s,
        "lines": lines,
        "shortfalls": list(result.shortfalls),
    }
    yield from beside_catalogue(result.calibration)


def host_added(folder: Path) -> Iterator[Figures]:
    """Adds to the calibration what a quick one leaves out, the host's seconds, and yields them."""
    path, begun = folder / "calibration.json", time.perf_counter()
    calibration = Calibration.load(path)

    def work_of(model: ModelConfig, rows: int) -> ModelWork:
        return measure_model(build_meta(model), rows, int(model.context or 0), torch.float32)

    host = host_times(calibration, found_devices(None), work_of)
    dataclasses.replace(calibration, host=host).write(path)
    microseconds = {name: round(1e6 * value, 1) for name, value in host}
    yield {"case": "host's times", "took_s": round(time.perf_counter() - begun, 2)} | microseconds


def beside_catalogue(calibration: Calibration) -> Iterator[Figures]:
    """Yields the measured figures of the device beside the catalogue's, and kernels at sizes of training."""
    nominal = Cluster.parse("1xh100").device
    fitted = Cluster.parse("1xh100").calibrated(calibration).device
    reached = rates(nominal)
    for dtype in sorted({str(row[0]) for row in calibration.matmul}):
        best, catalogue = calibration.best_matmul(dtype), nominal.peak(dtype) * nominal.share(dtype)
        yield {
            "case": f"best product {dtype}",
            "measured_tflops": round(best / 1e12, 1),
            "catalogue_tflops": round(catalogue / 1e12, 1),
            "catalogue_sustained": round(catalogue * sustained_share(nominal) / 1e12, 1),
        }
    yield {
        "case": "memory bandwidth",
        "measured_gb_s": round(fitted.bandwidth_bytes_per_s * fitted.memory_share / 1e9, 1),
        "catalogue_gb_s": round(nominal.bandwidth_bytes_per_s * nominal.memory_share / 1e9, 1),
        "launch_us": round(1e6 * calibration.launch_s, 2),
        "catalogue_launch_us": round(1e6 * nominal.launch_s, 2),
    }
    for sequence in (2048, 8192):
        for size in (64, 128):
            forward, backward = (
                float(calibration.attention_s(32, sequence, size, "bf16", is_backward)) for is_backward in (False, True)
            )
            flops = 2.0 * 32 * sequence**2 * size
            yield {
                "case": f"attention 32 x {sequence} x {size}",
                "forward_share": round(flops / forward / nominal.peak("bf16"), 3),
                "backward_share": round(2.5 * flops / backward / nominal.peak("bf16"), 3),
                "planned_shares": [reached.flash_forward, reached.flash_backward],
            }


def sustained(clock: DeviceTimer) -> Iterator[Figures]:
    """Yields the rate of one large product over two seconds, as the device warms and its power is limited."""
    left, right = (torch.randn(LARGE, LARGE, device=clock.device).to(torch.bfloat16) for _ in range(2))
    result = torch.empty_like(left)
    for name, scale in (("random", 1.0), ("zeros", 0.0)):
        left.mul_(scale)
        seconds = [clock.timed(lambda: torch.mm(left, right, out=result), 50) for _ in range(12)]
        tflops = [round(2.0 * LARGE**3 / value / 1e12, 1) for value in seconds]
        yield {"case": f"products {LARGE}^3 bf16 of {name} in a row", "tflops": tflops, "clock": read_clock()}


def rested(clock: DeviceTimer) -> Iterator[Figures]:
    """Yields products of a step of 16,384 tokens, by how long the device copies before them (`clock.REST`)."""
    usual = clock_module.REST
    for rest in (0.0, 0.25, 0.5, 1.0, 2.0):
        clock_module.REST = rest
        tflops = []
        for m, n, k in STEP_PRODUCTS:
            left, right = (torch.randn(*shape, device=clock.device).to(torch.bfloat16) for shape in ((m, k), (k, n)))
            result = torch.empty(m, n, dtype=torch.bfloat16, device=clock.device)
            seconds = clock.seconds(functools.partial(torch.mm, left, right, out=result))
            tflops.append(round(2e-12 * m * n * k / seconds, 1))
        yield {"case": f"products of a step, rest {rest}", "tflops": tflops, "clock": read_clock()}
    clock_module.REST = usual


def read_clock() -> str:
    """Returns the device's clock, power and temperature."""
    query = "--query-gpu=clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,clocks_event_reasons.active"
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


def low_precision(clock: DeviceTimer) -> Iterator[Figures]:
    """Yields products in float8, in TF32 and in fp16, which calibration doesn't measure."""
    device = clock.device
    for m, n, k in ((LARGE, LARGE, LARGE), (TOKENS, 8192, WIDTH)):
        eight = [torch.randn(rows, k, device=device).to(torch.float8_e4m3fn) for rows in (m, n)]
        for name, scales in (
            ("tensorwise", [torch.ones((), device=device)] * 2),
            ("rowwise", [torch.ones(m, 1, device=device), torch.ones(1, n, device=device)]),
        ):

            def product(eight: list[torch.Tensor] = eight, scales: list[torch.Tensor] = scales) -> object:
                return torch._scaled_mm(eight[0], eight[1].t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)

            rate = 2e-12 * m * n * k / clock.seconds(product)
            yield {"case": f"fp8 {name} {m} x {n} x {k}", "tflops": round(rate, 1)}
        wide = [torch.randn(m, k, device=device), torch.randn(k, n, device=device)]
        for name, dtype, tf32 in (("tf32", torch.float32, True), ("fp16", torch.float16, False)):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            operands = [item.to(dtype) for item in wide]
            seconds = clock.seconds(lambda operands=operands: torch.mm(*operands))  # type: ignore[misc]
            torch.backends.cuda.matmul.allow_tf32 = False
            yield {"case": f"{name} {m} x {n} x {k}", "tflops": round(2e-12 * m * n * k / seconds, 1)}


def copies(clock: DeviceTimer) -> Iterator[Figures]:
    """Yields the rates of copies between device and host, and of the host's own update of offloaded state."""
    nominal = Cluster.parse("1xh100").host
    assert nominal is not None
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device=clock.device)
    for name, host in (
        ("pinned", torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)),
        ("pageable", torch.zeros(COPY_BYTES, dtype=torch.uint8)),
    ):
        up_s = clock.timed(lambda host=host: device.copy_(host, non_blocking=True), 5)  # type: ignore[misc]
        down_s = clock.timed(lambda host=host: host.copy_(device, non_blocking=True), 5)  # type: ignore[misc]
        yield {
            "case": f"copies, {name}",
            "to_device_gb_s": round(COPY_BYTES / up_s / 1e9, 2),
            "to_host_gb_s": round(COPY_BYTES / down_s / 1e9, 2),
            "catalogue_gb_s": round(nominal.copy_bytes_per_s / 1e9, 2),
        }
    state = [[torch.zeros(HOST_ELEMENTS)] for _ in range(4)]
    flags = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    begun, count = time.perf_counter(), 4
    for _ in range(count):
        fused_adamw_(*state, [], [torch.ones(())], **flags, amsgrad=False, maximize=False)
    seconds = (time.perf_counter() - begun) / count
    yield {
        "case": "AdamW on the host",
        "elements_per_s": round(HOST_ELEMENTS / seconds),
        "gb_s": round(28.0 * HOST_ELEMENTS / seconds / 1e9, 1),
        "catalogue_gb_s": round(nominal.kernel_bytes_per_s / 1e9, 1),
        "threads": torch.get_num_threads(),
    }


def launches(clock: DeviceTimer) -> Iterator[Figures]:
    """Yields the host's seconds of small operations, with autograd and without."""
    x = torch.randn(16, 64, device=clock.device)
    weight = torch.randn(64, 64, device=clock.device, requires_grad=True)
    works: dict[str, Callable[[], object]] = {
        "add": lambda: torch.add(x, x),
        "linear": lambda: torch.nn.functional.linear(x, weight.detach()),
        "linear under autograd": lambda: torch.nn.functional.linear(x, weight),
        "linear and its backward": lambda: torch.nn.functional.linear(x, weight).sum().backward(),
    }
    yield {"case": "host microseconds"} | {
        name: round(1e6 * clock.launch_seconds(work), 2) for name, work in works.items()
    }


def bytes_beside(clock: DeviceTimer) -> Iterator[Figures]:
    """Yields the bytes of the device that no tensor has: context, libraries, workspaces."""
    free, total = torch.cuda.mem_get_info(clock.device)
    yield {
        "case": "memory beside tensors",
        "device_bytes": total,
        "used_bytes": total - free,
        "reserved_bytes": torch.cuda.memory_reserved(clock.device),
        "allocated_bytes": torch.cuda.memory_allocated(clock.device),
        "catalogue_bytes": Cluster.parse("1xh100").device.memory_bytes,
    }


def main(argv: list[str]) -> int:
    """Runs the part; exit status 0 when all of it could be measured."""
    parser = argparse.ArgumentParser(prog="tests.gpu.parts.calibrate")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--limit-s", type=float, default=120.0)
    chosen = parser.parse_args(argv)
    begun, failed = time.perf_counter(), False
    prepare_environment()

    def printed(name: str, figures: Callable[[], Iterator[Figures]]) -> bool:
        if time.perf_counter() - begun > chosen.limit_s - 2.0:
            print(json.dumps({"case": name, "skipped": "no time is left"}), flush=True)
            return True
        try:
            for line in figures():
                print(json.dumps(line | {"at_s": round(time.perf_counter() - begun, 2)}), flush=True)
        except Exception as error:
            traceback.print_exc()
            print(json.dumps({"case": name, "error": str(error)[-600:]}), flush=True)
            return False
        return True

    # Before this process touches the device: ranks that measure are forked from it.
    failed |= not printed("calibration", lambda: calibrated(chosen.out, chosen.whole, chosen.limit_s))
    if not (failed or chosen.whole):
        failed |= not printed("host's times", lambda: host_added(chosen.out))
    assert not torch.cuda.is_initialized()
    clock = DeviceTimer(torch.device("cuda:0"), 0.003)
    for part in (rested, sustained, copies, launches, low_precision, bytes_beside):
        failed |= not printed(part.__name__, lambda part=part: part(clock))  # type: ignore[misc]
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
