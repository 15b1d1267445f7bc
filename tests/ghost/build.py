"""Builds the simulated GPU against the CUDA wheel of torch that this interpreter has."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parent / "device"
LIBRARIES = ("torch_cuda", "c10_cuda", "torch_cpu", "torch_python", "torch_cuda_linalg", "caffe2_nvrtc")
"""The wheel's libraries whose unanswered questions go to CUDA."""
ANSWERED = re.compile(r"(cuda|__cuda|nccl|cublas|cudnn|cuFile|cusolver|cusparse)")
"""What `libghost.so` answers in the real libraries' place; the profiler's and the compiler's libraries stay real."""


def build() -> Path:
    """Compiles the simulated GPU, once per wheel and source.

    Returns:
        The folder with `libghost.so`, `libcuda.so.1`, `libnvidia-ml.so.1` and `nvidia-smi`.

    Raises:
        RuntimeError: where this interpreter has no CUDA wheel, or gcc fails.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("this interpreter has no torch: `make ghost` makes an environment that has")
    site = Path(spec.origin).parents[1]
    libraries = [site / "torch" / "lib" / f"lib{name}.so" for name in LIBRARIES]
    if not libraries[0].exists():
        raise RuntimeError(f"torch in {site} is a CPU build; the simulated GPU stands under the CUDA wheel")
    folder = Path(sys.prefix) / "ghost" / _fingerprint(libraries)
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    include = [f"-I{path}" for path in sorted(site.glob("nvidia/*/include")) if path.is_dir()]
    compiler = ["gcc", "-shared", "-fPIC", "-O1", "-w", *include]
    sources = [SOURCES / name for name in ("runtime.c", "nccl.c")]
    _run([*compiler, "-o", folder / "own.so", *sources, "-lpthread", "-ldl"])
    stubs = folder / "stubs.c"
    stubs.write_text(_stubs(libraries, folder / "own.so"), encoding="ascii")
    _run([*compiler, "-o", folder / "libghost.so", *sources, stubs, "-lpthread", "-ldl"])
    _run([*compiler, "-o", folder / "libcuda.so.1", SOURCES / "driver.c", "-ldl"])
    _run([*compiler, "-o", folder / "libnvidia-ml.so.1", SOURCES / "nvml.c"])
    shutil.copy2(SOURCES / "nvidia-smi", folder / "nvidia-smi")
    (folder / "complete").touch()
    return folder


def _fingerprint(libraries: list[Path]) -> str:
    """Returns what the result depends on: our sources, and which wheel it is."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    for path in libraries:
        digest.update(f"{path}:{path.stat().st_size}:{path.stat().st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _stubs(libraries: list[Path], own: Path) -> str:
    """Returns functions that return 0, for all that the wheel asks of CUDA's libraries and our sources don't define."""
    wanted = {name for path in libraries for name in _symbols(path, "--undefined-only") if ANSWERED.match(name)}
    return "".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(wanted - _symbols(own, "--defined-only")))


def _symbols(library: Path, which: str) -> set[str]:
    lines = _run(["nm", "-D", which, library]).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line.strip()}


def _run(words: list[str | Path]) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{words[0]} failed while building the simulated GPU:\n{done.stderr[-4000:]}")
    return done.stdout
