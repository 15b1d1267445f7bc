"""Layouts of several ranks on one GPU, with real values: `python -m tests.gpu.parts.ranks --out FOLDER`.

NCCL takes one rank a device, so `tests.gpu.staged_group` stands in its place; all else is the product as it is. A
layout in float64 is held to 1e-9 of one device, as by `verify`, one in low precision to what rounding does to that.
That device is the GPU: a CPU has other cosines of the float32 angles in transformers' rotary embeddings, and all
layouts of a llama were 4.9e-7 from it (an H100). What runs several times must give the same bits. Three proofs run with
a planted fault, a wait on a stream that computes nothing, and must fail.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.forking import die_with_parent, fork_obstacle, release_threads
from meshwright.jobs.requests import VerifyConfig
from meshwright.jobs.verify import verify
from meshwright.launch import devices
from meshwright.models.config import ModelConfig
from meshwright.proof import verify as proof
from meshwright.proof.compare import EXACT, Verdict
from meshwright.proof.difference import Difference
from meshwright.proof.one_device import References
from meshwright.spec.layout import Layout
from tests.gpu import staged_group
from tests.gpu.parts.cases import process_age_s, sharing_parser
from tests.runs import call, curve, warm, words, write_corpus

SIZES: dict[str, Any] = {"width": 64, "heads": 4, "layers": 4, "ffn": 128}
GQA: dict[str, Any] = {"kv_heads": 2}
WINDOW = {"sliding_window": 16}
MODELS = {
    "llama": ModelConfig(name="llama", **SIZES, **GQA),
    "llama-varlen": ModelConfig(name="llama", **SIZES, **GQA, attention="varlen"),
    "llama-masked": ModelConfig(name="llama", **SIZES, **GQA, attention="sdpa"),
    "gpt2": ModelConfig(name="gpt2", width=64, heads=4, layers=4),
    "qwen3": ModelConfig(name="qwen3", **SIZES, **GQA),
    "gemma3": ModelConfig(name="gemma3_text", **SIZES | {"layers": 6}, **GQA, overrides=WINDOW),
    "gemma3-varlen": ModelConfig(
        name="gemma3_text", **SIZES | {"layers": 6}, **GQA, overrides=WINDOW, attention="varlen"
    ),
    "mixtral": ModelConfig(name="mixtral", **SIZES | {"layers": 2}, **GQA, experts=4),
}
LAYOUT_S, RUN_S = 90.0, 90.0
"""Limits of a layout's proof and of a run."""
BESIDE = 1e-6
"""Bound for a GPU's curve in float64 beside a CPU's: a number next to the middle may be rounded to either side."""
TOGETHER = "shard=2,zero=2,tp=2,pp=2,microbatches=4"
MICRO = "pp=2,microbatches=4,schedule="


@dataclass(frozen=True)
class Group:
    """Layouts that one process proves in turn."""

    name: str
    model: str
    dtype: str
    layouts: tuple[str, ...]
    repeats: int = 1
    """Times that each runs; the same bits are asked for."""
    planted: bool = False
    """Whether a wait is left out, which must be seen."""
    delay_s: float = 0.0005
    trained: bool = False
    """`meshwright train` instead of a proof."""
    beside_cpu: bool = False
    """The same on CPU ranks beside it, where no run of one rank computes the same; a layout may have more words."""


GROUPS = (
    Group("tensor", "llama", "float64", ("tp=2", "tp=2,sequence=true,recompute=selective"), 2),
    Group("shards", "llama", "float64", ("shard=2,zero=1", "shard=2,zero=2,microbatches=2", "shard=2,zero=3"), 2),
    Group("stages", "llama", "float64", (MICRO + "1f1b", MICRO + "zbv", MICRO + "interleaved,stages=2"), 2),
    Group("tokens", "llama", "float64", ("cp=2,attention=gather", "cp=2,attention=heads", "cp=2,attention=ring"), 2),
    Group("float64-masked", "llama-masked", "float64", ("cp=2,attention=heads", "tp=2", "shard=2,zero=3")),
    Group("rounded", "gpt2", "float64", (
        "replicate=2,compress=int8", "replicate=2 --recovery.compare-every 2", "shard=2,zero=3,compress_weights=int8",
        "islands=2 --outer local_sgd --outer.every 3", "replicate=2,compress=powersgd:4",
        "islands=2,shard=2,zero=2 --outer.every 3 --outer.fragments 2 --outer.delay 1 --outer.compress int8",
        "replicate=2,compress=topk:100", "replicate=4,compress=int8:2"), beside_cpu=True),
    Group("experts", "mixtral", "float64", ("ep=2,shard=2,zero=1", "tp=2", "ep=2,shard=4,zero=3"), 2),
    Group("together", "llama", "float64", (TOGETHER, TOGETHER + ",recompute=full,sequence=true"), 2),
    Group("bf16", "llama", "bf16", ("replicate=2", "shard=2,zero=3", "tp=2,sequence=true", MICRO + "zbv", TOGETHER)),
    Group("varlen", "llama-varlen", "bf16", ("cp=2,attention=gather", "cp=2,attention=heads", "cp=2,attention=ring",
                                             "cp=2,tp=2", "shard=2,zero=3,recompute=selective")),
    Group("trained-stages", "llama", "float64", ("replicate=1", MICRO + "1f1b,tp=2"), 2, trained=True),
    Group("plain", "llama", "float64", ("replicate=1", "replicate=2", "replicate=2,shard=2,zero=3,microbatches=2",
                                        "shard=2,zero=3,recompute=full", "tp=2,loss_chunk=100", "cp=2,tp=2",
                                        "shard=2,zero=3,offload=parameters", MICRO + "zerobubble",
                                        MICRO + "dualpipev")),
    Group("compile", "llama", "bf16", ("tp=2,sequence=true,compile=true",)),
    Group("gpt2", "gpt2", "float64", ("tp=2", "shard=2,zero=3", MICRO + "1f1b,recompute=full")),
    Group("qwen3", "qwen3", "float64", ("tp=2,sequence=true", "cp=2", MICRO + "zbv")),
    Group("gemma3", "gemma3", "float64", ("tp=2", "cp=2,attention=ring", "shard=2,zero=3")),
    Group("gemma3-varlen", "gemma3-varlen", "bf16", ("cp=2,attention=ring", "tp=2")),
    Group("experts-bf16", "mixtral", "bf16", ("ep=2,shard=2,zero=1", "ep=2,shard=4,zero=3", "tp=2")),
    Group("trained-shards", "llama", "float64", ("replicate=1", "shard=2,zero=3,microbatches=2"), 2, trained=True),
    Group("planted", "llama", "float64", ("tp=2", "shard=2,zero=3", MICRO + "1f1b"), planted=True, delay_s=0.002),
)  # fmt: skip


class CpuReferences(References):
    """References on the CPU, whatever the layouts run on."""

    def __init__(self, case: Any, *arguments: Any) -> None:
        super().__init__(dataclasses.replace(case, device="cpu"), *arguments)


def digest_runs(folder: Path, repeats: int) -> None:
    """Has each rank train several times in its process, the later times in used memory, and write down a sum of each.

    Args:
        folder: for a file of each rank, which the ranks of the next layout overwrite.
        repeats: times.
    """
    folder.mkdir(exist_ok=True)
    train_under_layout, form_group = proof._train_under_layout, proof.init_group
    outcome, trained = Difference.outcome, Difference.trained
    digest = hashlib.sha256()

    def summed_outcome(difference: Difference, step: int, loss: float, norm: float) -> None:
        digest.update(repr((step, loss, norm)).encode())
        outcome(difference, step, loss, norm)

    def summed_weights(difference: Difference, weights: Any, steps: int) -> None:
        for weight in weights:
            local = weight.local.detach().cpu().contiguous()
            digest.update(weight.name.encode() + local.reshape(-1).view(torch.uint8).numpy().tobytes())
        trained(difference, weights, steps)

    def repeated(context: Any, case: Any, built: Any, *arguments: Any) -> dict[str, object]:
        nonlocal digest
        digests, result = [], {}
        for number in range(repeats):
            digest = hashlib.sha256()
            # A program is made of the model's own modules: each needs a new one.
            result = train_under_layout(context, case, case.build() if number else built, *arguments)
            digests.append(digest.hexdigest())
        (folder / f"{context.rank}").write_text(" ".join(digests))
        return result

    def form_once(*arguments: Any, **more: Any) -> None:
        if not dist.is_initialized():
            form_group(*arguments, **more)

    Difference.outcome, Difference.trained = summed_outcome, summed_weights
    proof._train_under_layout, proof.init_group = repeated, form_once


def plant() -> None:
    """Has the product wait for collectives on a stream that computes nothing; on the CPU it doesn't wait at all."""
    wait = staged_group.StagedWork.wait
    streams: list[Any] = []

    def misplaced(work: staged_group.StagedWork, timeout: object = None) -> bool:
        caller = sys._getframe(1).f_code.co_filename
        if "/meshwright/" not in caller:
            return wait(work)
        if not torch.cuda.is_available():
            return True
        if not streams:
            streams.append(torch.cuda.Stream())
        with torch.cuda.stream(streams[0]):
            return wait(work)

    staged_group.StagedWork.wait = misplaced


def worst(verdict: Verdict) -> tuple[float, float]:
    """Returns the error that takes most of its bound, and the bound."""
    errors = {"loss": verdict.loss_error, "gradient": verdict.grad_error, "norm": verdict.grad_norm_error,
              "weight": verdict.weight_error}  # fmt: skip
    return max(((error, verdict.bounds.get(kind, EXACT)) for kind, error in errors.items()), key=lambda p: p[0] / p[1])


def prove(group: Group, out: Path, line: Any) -> None:
    """Proves a group's layouts and writes a line for each; one that fails is tried again without asynchrony."""
    digests, began = out / f"digests-{group.name}", time.monotonic()
    digest_runs(digests, group.repeats)
    failed: list[str] = []

    def on_verdict(verdict: Verdict) -> None:
        nonlocal began
        error, bound = worst(verdict)
        good = (not verdict.passed and bool(verdict.wrong)) if group.planted else verdict.passed
        fields: dict[str, Any] = {"case": f"{group.name}: {verdict.layout}", "model": group.model}
        fields |= {"dtype": group.dtype, "worst_error": error, "bound": bound}
        if group.repeats > 1:
            sums = [path.read_text().split() for path in digests.iterdir()]
            fields |= {"runs": group.repeats, "same_bits": bool(sums) and all(len(set(row)) == 1 for row in sums)}
            good = good and fields["same_bits"]
        fields |= {"ok": good, "seconds": round(time.monotonic() - began, 2)}
        if not good or group.planted:
            reason = verdict.refused or verdict.crashed or verdict.wrong
            fields["error" if not good else "seen"] = reason[-600:]
        if not good and not group.planted and not verdict.refused:
            failed.append(verdict.layout)
        line(fields)
        for path in digests.iterdir():
            path.unlink()
        began = time.monotonic()

    request = VerifyConfig(model=MODELS[group.model], dtype=group.dtype, full=True, timeout_s=LAYOUT_S)
    verify(request, layout=list(group.layouts), on_verdict=on_verdict)
    if failed:
        staged_group.SYNCHRONOUS = True
        for verdict in verify(request, layout=failed).verdicts:
            error, bound = worst(verdict)
            line({"case": f"{group.name}: {verdict.layout}, synchronous", "worst_error": error, "bound": bound,
                  "passes_without_races": verdict.passed})  # fmt: skip


def train(group: Group, out: Path, root: Path, line: Any) -> None:
    """Trains under a group's layouts by `meshwright train`: each twice, to the same bits, and along the first.

    Args:
        group: its layouts; the first on one device.
        out: for logs.
        root: for runs.
        line: writes a result.
    """
    write_corpus(root / "corpus.txt")
    first: dict[int, tuple[float, float]] = {}
    for number, layout in enumerate(group.layouts):
        curves = []
        for repeat in range(group.repeats if number else 1):
            began, name = time.monotonic(), f"{number}-{repeat}"
            more = ("--model", "llama", "--model.width", "64", "--model.heads", "4", "--model.kv-heads", "2",
                    "--model.ffn", "128", "--model.layers", "4", "--train.steps", "8", "--data.sequence", "64",
                    "--recovery.snapshot-every", "1")  # fmt: skip
            ranks = 4 if "pp=2" in layout and "tp=2" in layout else 2 if "=2" in layout else 1
            argv = words(root, name, *more, layout=layout + ",precision=float64", devices=ranks)
            status, text = call(argv, out / f"{group.name}-{name}.log", lambda: warnings.simplefilter("ignore"), RUN_S)
            fields: dict[str, Any] = {"case": f"{group.name}: {layout}", "model": "llama", "dtype": group.dtype}
            if status:
                line(fields | {"ok": False, "error": text[-600:]})
                break
            curves.append(curve(root / name))
            first = first or curves[0]
            error = max(
                abs(found - wanted) / max(abs(wanted), 1e-300)
                for step, pair in first.items()
                for found, wanted in zip(curves[-1].get(step, (float("inf"),) * 2), pair)
            )
            good = error <= EXACT and curves[-1] == curves[0]
            fields |= {"worst_error": error, "bound": EXACT, "run": repeat + 1, "same_bits": curves[-1] == curves[0]}
            line(fields | {"ok": good, "seconds": round(time.monotonic() - began, 2)})


def beside_cpu(group: Group, out: Path, root: Path, line: Any) -> None:
    """Trains under layouts that no single rank computes the same as, on the GPU and on CPU ranks."""
    write_corpus(root / "corpus.txt")

    def on_cpu() -> None:
        warnings.simplefilter("ignore")
        devices.count_gpus = lambda: 0

    def as_it_is() -> None:
        warnings.simplefilter("ignore")

    for number, text in enumerate(group.layouts):
        layout, *more = text.split()
        began, curves = time.monotonic(), []
        fields: dict[str, Any] = {"case": f"{group.name}: {text}", "model": group.model, "dtype": group.dtype}
        for kind, before in (("cpu", on_cpu), ("gpu", as_it_is)):
            name = f"{number}-{kind}"
            argv = words(root, name, "--train.steps", "8", "--recovery.snapshot-every", "0", *more,
                         layout=f"{layout},precision={group.dtype}", devices=Layout.parse(layout).world)  # fmt: skip
            status, printed = call(argv, out / f"{group.name}-{name}.log", before, RUN_S)
            if status:
                fields["error"] = f"{kind}: {printed[-600:]}"
                break
            curves.append(curve(root / name))
        if len(curves) == 2:
            first, second = curves
            pairs = [pair for step in first for pair in zip(first[step], second.get(step, (float("inf"),) * 2))]
            fields |= {"worst_error": max(abs(a - b) / max(abs(a), 1e-300) for a, b in pairs), "bound": BESIDE}
        good = fields.get("worst_error", float("inf")) <= BESIDE
        line(fields | {"ok": good, "seconds": round(time.monotonic() - began, 2)})


def run_group(group: Group, out: Path, on_cpu: bool, cpu_references: bool) -> None:
    """Runs a group in this process, forked for it; its lines go to stdout and to a file."""
    results, log = (os.open(out / f"{group.name}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                    for end in ("jsonl", "log"))  # fmt: skip
    stdout = os.dup(1)
    for number in (1, 2):
        os.dup2(log, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))

    def line(fields: dict[str, Any]) -> None:
        plain = {key: str(value) if value == float("inf") else value for key, value in fields.items()}
        text = (json.dumps(plain) + "\n").encode()
        for file in (results, stdout):
            os.write(file, text)

    staged_group.share_device(on_cpu, group.delay_s)
    try:
        if group.trained or group.beside_cpu:
            with tempfile.TemporaryDirectory() as root:
                (train if group.trained else beside_cpu)(group, out, Path(root), line)
            return
        if cpu_references:
            proof.References = CpuReferences
        if group.dtype == "float64":
            torch.use_deterministic_algorithms(True, warn_only=True)
        if group.planted:
            plant()
        prove(group, out, line)
    except BaseException as error:
        line({"case": group.name, "ok": False, "error": "".join(traceback.format_exception(error))[-800:]})


def main() -> int:
    """Runs the groups side by side and returns 1 where something didn't hold."""
    parser = sharing_parser(100.0)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--only", default="")
    parser.add_argument("--cpu-references", action="store_true", help="one device is the CPU: without a real GPU")
    options = parser.parse_args()
    end = time.monotonic() + options.limit_s - process_age_s()
    # Before CUDA is there: products of matrices that are the same to the bit each time.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    chosen = [group for group in GROUPS if not options.only or group.name in options.only.split(",")]
    warm()
    print(
        json.dumps({"case": "imported", "seconds": round(process_age_s(), 1), "obstacle": fork_obstacle()}), flush=True
    )
    release_threads()
    # Python 3.12 warns of any thread, those of libraries too, which hold nothing here.
    warnings.simplefilter("ignore", DeprecationWarning)
    waiting, running = list(chosen), dict[int, Group]()
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < options.jobs:
            group = waiting.pop(0)
            parent, pid = os.getpid(), os.fork()
            if not pid:
                die_with_parent(parent)
                run_group(group, options.out, options.on_cpu, options.cpu_references)
                os._exit(0)
            running[pid] = group
        pid, _ = os.waitpid(-1, os.WNOHANG)
        running.pop(pid, None)
        time.sleep(0.02)
    for pid in running:
        os.kill(pid, signal.SIGKILL)  # its ranks end with it
        os.waitpid(pid, 0)
    return report(options.out, chosen, {group.name for group in (*running.values(), *waiting)})


def report(out: Path, chosen: list[Group], unfinished: set[str]) -> int:
    """Prints how many cases held and which groups the limit cut short; returns 1 where something failed."""
    found = []
    for group in chosen:
        path = out / f"{group.name}.jsonl"
        found += [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    found = [row for row in found if "ok" in row]
    held = sum(row["ok"] for row in found)
    summary = {"case": "all", "held": held, "failed": len(found) - held, "unfinished": sorted(unfinished)}
    print(json.dumps(summary), flush=True)
    return 0 if held == len(found) and not unfinished else 1


if __name__ == "__main__":
    sys.exit(main())
