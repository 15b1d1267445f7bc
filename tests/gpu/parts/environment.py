"""What the machine is and what its device reaches bare: versions, memory, products, copies, a launch, imports."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "numpy",
    "torchao",
    "tyro",
    "tokenizers",
    "safetensors",
    "nvidia-nccl-cu13",
)
QUERIES = (
    "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.sm,clocks.mem,temperature.gpu,persistence_mode"
)


def main() -> int:
    """Prints a line a fact."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.parse_args()
    _say("machine", python=sys.version.split()[0], cores=os.cpu_count(), memory=_first_line("/proc/meminfo"))
    _say(
        "machine", cpu=_model_name(), numa=sorted(path.name for path in Path("/sys/devices/system/node").glob("node*"))
    )
    _say("packages", **{name: _version(name) for name in PACKAGES})
    smi = subprocess.run(
        ["nvidia-smi", f"--query-gpu={QUERIES}", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
    )
    _say("nvidia-smi", text=(smi.stdout or smi.stderr).strip())
    _opened()
    for module in ("torch", "transformers", "meshwright", "meshwright.train.trainer"):
        began = time.perf_counter()
        __import__(module)
        _say("import", module=module, seconds=round(time.perf_counter() - began, 2))
    import torch

    began = time.perf_counter()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    _say("context", seconds=round(time.perf_counter() - began, 2), free=free, total=total)
    found = torch.cuda.get_device_properties(0)
    _say("device", name=found.name, units=found.multi_processor_count, l2=found.L2_cache_size, total=found.total_memory)
    _products(torch)
    _copies(torch)
    _say("clocks", text=_clocks())
    return 0


OPENING = """
import ctypes, json, os, sys, time
from meshwright.forking import fork_obstacle, _uses_cuda_driver

def open_files():
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return sorted(path for path in found if "nvidia" in path)

def in_fork():
    there, here = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            import torch
            answer = str(torch.ones(3, device="cuda").sum().item())
        except BaseException as error:
            answer = str(error)[:160]
        os.write(here, answer.encode())
        os._exit(0)
    os.close(here)
    answer = os.read(there, 400).decode()
    os.waitpid(pid, 0)
    return answer

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
for name, code in STEPS:
    began = time.perf_counter()
    try:
        exec(code)
        error = None
    except BaseException as failed:
        error = str(failed)[:160]
    seconds = time.perf_counter() - began
    forks = name in FORKS
    print(json.dumps({
        "step": name, "seconds": round(seconds, 2), "open": open_files(), "initialised": _uses_cuda_driver(),
        "obstacle": fork_obstacle(), "error": error, "in_fork": in_fork() if forks else None,
    }), flush=True)
"""
"""Prints after each step what of the driver this process has open, and what a fork of it can do."""
ORDERS = {
    "ours": (
        ("import torch", "import torch"),
        ("is_available", "torch.cuda.is_available()"),
        ("device_count", "torch.cuda.device_count()"),
        ("nvml", "from meshwright.doctor.nvml import Nvml; kept = Nvml(); kept.gpus()"),
        (
            "torchao",
            "from meshwright.torch_compat.torchao_import import import_before_transformers as ahead; ahead()",
        ),
        ("transformers", "import transformers.models.llama.modeling_llama"),
        ("trainer", "import meshwright.train.trainer"),
    ),
    "a user's": (
        ("import meshwright", "import meshwright"),
        ("transformers", "import transformers.models.llama.modeling_llama"),
        ("context", "import torch; torch.ones(2, device='cuda')"),
    ),
}
"""What two processes do, step by step."""
FORKS = ("nvml", "trainer", "transformers", "context")


def _opened() -> None:
    """Tells which step opens the driver's devices, and which initialises it, in processes of their own."""
    started = {}
    for name, steps in ORDERS.items():
        text = f"STEPS, FORKS = {steps!r}, {FORKS!r}\n{OPENING}"
        started[name] = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    for name, process in started.items():
        try:
            out, _ = process.communicate(timeout=25)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
        for line in out.splitlines():
            if line.startswith("{"):
                _say("opened", process=name, **json.loads(line))


def _products(torch) -> None:
    """Times square products: what a share of the data sheet's peak can be had at all."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for size in (4096, 8192):
            a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
            seconds = _median(torch, lambda a=a, b=b: a @ b)
            _say("product", dtype=str(dtype), size=size, tflops=round(2 * size**3 / seconds / 1e12, 1))
    torch.backends.cuda.matmul.allow_tf32 = True
    a, b = (torch.randn(8192, 8192, device="cuda") for _ in range(2))
    _say("product", dtype="tf32", size=8192, tflops=round(2 * 8192**3 / _median(torch, lambda: a @ b) / 1e12, 1))


def _copies(torch) -> None:
    """Times copies on the device and from and to pinned memory, and what a launch takes of the host."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    seconds = _median(torch, lambda: target.copy_(source))
    _say("copy", kind="device", gb_s=round(2 * source.nbytes / seconds / 1e9, 1))
    began = time.perf_counter()
    pinned = torch.empty(2**27, pin_memory=True)
    _say("pin", bytes=pinned.nbytes, seconds=round(time.perf_counter() - began, 3))
    part = source[: 2**27]
    _say("copy", kind="to host", gb_s=round(part.nbytes / _median(torch, lambda: pinned.copy_(part, True)) / 1e9, 1))
    _say("copy", kind="from host", gb_s=round(part.nbytes / _median(torch, lambda: part.copy_(pinned, True)) / 1e9, 1))
    small = torch.ones(16, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(2000):
        small.add_(1)
    queued = time.perf_counter() - began
    torch.cuda.synchronize()
    _say(
        "launch", host_us=round(queued / 2000 * 1e6, 2), device_us=round((time.perf_counter() - began) / 2000 * 1e6, 2)
    )


def _median(torch, work: Callable[[], object], times: int = 8) -> float:
    """Returns the median seconds of some work on the device, by its own events."""
    for _ in range(3):
        work()
    found = []
    for _ in range(times):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        work()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) / 1e3)
    return max(statistics.median(found), 1e-9)


def _clocks() -> str:
    words = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True, timeout=20, check=False).stdout.strip()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _first_line(path: str) -> str:
    return Path(path).read_text().splitlines()[0]


def _model_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")


def _say(case: str, **found: object) -> None:
    print(json.dumps({"case": case} | found), flush=True)


if __name__ == "__main__":
    sys.exit(main())
