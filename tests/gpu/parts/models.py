"""Families and modules of one's own on a GPU: along the CPU's curve, by strategies, compiled by the planner's choice.

Each family trains on documents three times: on the GPU in float32 and in bf16, and on the CPU.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import meshwright
from examples.my_model import build
from meshwright.cli.main import main as run_command
from meshwright.launch import devices
from meshwright.launch.contract import RankContext
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.rendezvous import init_group
from tests.gpu.parts.cases import Cases, Command, Result
from tests.gpu.staged_group import share_device
from tests.runs import WORDS, curve, events, last_step, rows, warm, words, write_corpus

STEPS = 12
SIZES = ("--model.width", "64", "--model.heads", "4", "--model.kv-heads", "2", "--model.ffn", "128")
FAMILIES: dict[str, tuple[str, ...]] = {
    "gemma3": ("--model", "gemma3_text", "--model.layers", "6", *SIZES, "--model.overrides", "sliding_window", "16"),
    "mixtral": ("--model", "mixtral", "--model.layers", "2", *SIZES, "--model.experts", "4"),
    "own": ("--model", "examples.my_model:build", "--model.width", "64", "--model.layers", "4",
            "--data.no-mask-documents"),
    "qwen3": ("--model", "qwen3", "--model.layers", "2", *SIZES),
    "gemma2": ("--model", "gemma2", "--model.layers", "2", *SIZES, "--model.overrides", "sliding_window", "16"),
}  # fmt: skip
KINDS = {"cpu": "replicate=1", "float32": "replicate=1", "bf16": "precision=bf16", "recomputed":
         "precision=bf16,recompute=selective,microbatches=2"}  # fmt: skip
BOUNDS = {"float32": 1e-4, "bf16": 2e-2, "recomputed": 2e-2}
"""Of a loss, relative to the CPU's: a dozen steps of float32, and roundings to bf16."""
AT_ONCE = 4
CHOSEN = (
    *("--model", "llama", "--model.layers", "12", "--model.width", "1024", "--model.heads", "16", "--model.kv-heads"),
    *("8", "--model.ffn", "2816", "--data.sequence", "512", "--train.batch", "16", "--optimizer.lr", "3e-4"),
    *("--train.steps", "20000", "--checkpoint.every", "0", "--recovery.snapshot-every", "0"),
)
"""A run that is long enough for the planner to compile it."""
CHOSEN_STEPS = 16
OWN_LAYOUTS = {"replicate=1": 1, "recompute=full": 1, "precision=bf16": 1, "replicate=2": 2, "shard=2,zero=3": 2}
"""Layouts of the module's own loop, with their ranks."""


def main() -> int:
    """Starts everything, a few runs at a time, and compares."""
    cases = Cases.from_arguments(limit_s=150.0)
    warm()
    out = cases.out
    write_corpus(out / "corpus.txt", 3000)
    write_documents(out / "texts.jsonl")
    chosen = cases.start("chosen", words(out, "chosen", *CHOSEN, layout="auto")) if cases.wants("auto") else None
    loop = cases.start("loop", work=own_loop) if cases.wants("strategies") else None
    waiting = [(name, kind) for name in FAMILIES for kind in KINDS if cases.wants(name)]
    running: dict[tuple[str, str], Command] = {}
    done: dict[tuple[str, str], Result] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE and cases.left_s > 10:
            key = waiting.pop(0)
            running[key] = start(cases, *key)
        for key, command in list(running.items()):
            if not command.alive() or cases.left_s < 4:
                done[key] = command.wait(0.1)
                del running[key]
                if key[0] not in {name for name, _ in (*waiting, *running)}:
                    cases.run(key[0], lambda name=key[0]: compared(out, name, done))
        if waiting and cases.left_s < 10:
            cases.tell("families", skipped=str(waiting))
            waiting = []
        time.sleep(0.05)
    if loop:
        cases.run("strategies on a module of one's own", lambda: strategies(cases, loop))
    if chosen:
        cases.run("auto chooses compile", lambda: chose(cases, chosen))
    return cases.finish()


def write_documents(path: Path) -> None:
    """Writes texts of a few words to many."""
    draw = random.Random(1)
    texts = (" ".join(draw.choices(WORDS, k=draw.randint(2, 40))) for _ in range(1500))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def start(cases: Cases, name: str, kind: str) -> Command:
    """Starts a family's run."""
    run = f"{name}-{kind}"
    more = (*FAMILIES[name], "--data", str(cases.out / "texts.jsonl"), "--data.sequence", "64")
    argv = words(cases.out, run, *more, "--train.steps", str(STEPS), layout=KINDS[kind])

    def train() -> int:
        if kind == "cpu":
            devices.count_gpus = lambda: 0
        return run_command(argv)

    return cases.start(run, work=train)


def compared(out: Path, name: str, done: dict[tuple[str, str], Result]) -> Result:
    """Compares the curves of a family with that of the CPU."""
    told: Result = {"ok": True, "devices": {}, "worst": {}}
    curves = {}
    for kind in KINDS:
        ended = done[(name, kind)]
        if not ended["ok"]:
            return told | {"ok": False, "kind": kind, "ended": ended}
        curves[kind] = curve(out / f"{name}-{kind}")
        told["devices"][kind] = events(out / f"{name}-{kind}", "rank_started")[0]["device"]
    for kind, bound in BOUNDS.items():
        pairs = [(curves["cpu"][step][0], curves[kind].get(step, (float("inf"),))[0]) for step in curves["cpu"]]
        told["worst"][kind] = max(abs(a - b) / abs(a) for a, b in pairs)
        told["ok"] &= told["worst"][kind] < bound and told["devices"][kind].startswith("cuda")
    losses = [loss for loss, _ in curves["float32"].values()]
    return told | {"losses": [losses[0], losses[-1]], "ok": told["ok"] and len(losses) == STEPS}


def chose(cases: Cases, command: Command) -> Result:
    """Tells whether the planner chose compiled layers, what their first step took, and how the run went."""
    run, cases_out = cases.out / "chosen", cases.out
    while command.alive() and last_step(run) < CHOSEN_STEPS and cases.left_s > 5:
        time.sleep(0.1)
    reached = last_step(run)
    if command.alive():
        command.signal(signal.SIGTERM)
    ended = command.wait(min(30.0, cases.left_s))
    found = rows(run)
    if not found:
        return ended | {"ok": False}
    plan = json.loads((cases_out / "chosen" / "plan.json").read_text())
    losses = [row["loss"] for row in found]
    told = {
        "status": ended["status"], "layout": found[-1]["layout"], "reason": plan["reason"][:400], "steps": len(found),
        "reached": reached,
        "first_step_s": found[0]["step_s"], "step_ms": [round(1e3 * row["step_s"], 1) for row in found[1:]],
        "planned_ms": round(1e3 * plan["prediction"]["step_s"], 2), "memory": found[-1]["memory"],
        "losses": [losses[0], losses[-1]],
    }  # fmt: skip
    compiles, learns = "compile=true" in found[-1]["layout"], losses[-1] < losses[0]
    return told | {"ok": compiles and learns and ended["status"] == 143}


def own_loop() -> int:
    """Trains a module by plain torch and under layouts in ranks that share the GPU; prints the errors."""
    share_device(not torch.cuda.is_available())
    status = 0
    for layout, ranks in OWN_LAYOUTS.items():
        with tempfile.TemporaryDirectory() as root:
            path = str(Path(root) / "model")
            told: Result = {"layout": layout}
            try:
                told |= ForkLauncher(ranks).run(loop_in_rank, layout, path, timeout_s=60.0)[0]
                # A weight whose gradient is next to nothing may move either way in bf16: its loss is held.
                error = told["loss"] if "bf16" in layout else max(told["loss"], told["weights"])
                told["ok"] = error < (2e-2 if "bf16" in layout else 1e-9)
            except Exception as error:
                told |= {"ok": False, "error": str(error)[-600:]}
        status |= int(not told["ok"])
        print(json.dumps(told), flush=True)
    return status


def loop_in_rank(context: RankContext, layout: str, path: str) -> dict[str, Any]:
    """Returns how far the loop under a layout is from the same by plain torch, in loss and in weights."""
    init_group(context, timeout_s=60.0)
    device = torch.device(context.device)
    wide = "bf16" not in layout

    def train(strategy: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model: Any = build()
        model = model.double() if wide else model
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        index, count = 0, 1
        if strategy is None:
            model = model.to(device)
        else:
            model, optimizer = strategy.shard(model, optimizer)
            index, count = strategy.reader
        losses = []
        for tokens in torch.randint(199, (4, 8, 33), generator=torch.Generator().manual_seed(1)):
            own = tokens.chunk(count)[index].to(device)
            logits = model(own[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss) if strategy is None else strategy.mean(loss))
        if strategy is None:
            return losses, {name: weight.detach().cpu() for name, weight in model.named_parameters()}
        return losses, {weight.name: weight.local.detach().cpu() for weight in strategy.weights}

    plain_losses, plain = train(None)
    strategy = meshwright.HybridParallelStrategy(layout)
    losses, found = train(strategy)
    gaps = []
    for weight in strategy.weights:
        wanted = weight.extract_shard(plain[weight.name])
        gaps.append(float((wanted - found[weight.name]).abs().max()) / float(plain[weight.name].abs().max()))
    loss_gap = max(abs(a - b) / abs(a) for a, b in zip(plain_losses, losses, strict=True))
    return {"loss": loss_gap, "weights": max(gaps), "losses": losses, "device": str(strategy.weights[0].local.device)}


def strategies(cases: Cases, command: Command) -> Result:
    """Returns what the module's own loop found."""
    ended = command.wait(cases.left_s)
    return ended | {"layouts": [json.loads(line) for line in command.out().splitlines() if line.startswith("{")]}


if __name__ == "__main__":
    sys.exit(main())
