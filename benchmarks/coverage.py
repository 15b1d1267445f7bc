"""Which of transformers' causal-LM types train the same under every layout as on one device, in float64 to 1e-9.

Builds a tiny random model of each type and verifies it under each layout, every type in a process of its own.

    python benchmarks/coverage.py [--types gpt2,llama] [--layouts tp=2] [--jobs 1] [--resume]
        [--patience 1] [--out docs/coverage.md] [--json docs/coverage.json]

With ``--resume`` cells that the JSON file has already are kept; ``--again crashed,timeout`` runs some outcomes anew.
``--patience 6`` waits six times as long, on a machine where other programs run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coverage_page import LAYOUTS, write_page

if TYPE_CHECKING:
    from meshwright.models.analysis.objective import Objective
    from meshwright.models.build import BuiltModel
    from meshwright.spec.sharding_table import ShardingTable

LIMIT_S = 45.0
"""For the reference, and for each layout."""
TYPE_LIMIT_S = 240.0
SIZES = {"layers": 4, "width": 64, "heads": 4}
VOCAB, CONTEXT, ROWS, TOKENS = 64, 48, 4, 16
LENGTHS = (CONTEXT, TOKENS)
"""Tokens a row of the two steps."""
ROOT = Path(__file__).parent.parent


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="", help="model types, separated by commas; all when not given")
    parser.add_argument("--layouts", default=";".join(LAYOUTS), help="layouts, separated by ';'")
    parser.add_argument("--jobs", type=int, default=1, help="types at the same time")
    parser.add_argument("--resume", action="store_true", help="keep what the JSON file has already")
    parser.add_argument("--again", default="", help="with --resume: outcomes to run anew")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on all limits")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "coverage.md")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "coverage.json")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Runs what is missing and writes both files."""
    chosen = parse(argv)
    sys.path.insert(0, str(ROOT))
    names = load_everything()
    names = [name for name in names if not chosen.types or name in chosen.types.split(",")]
    known: dict[str, Any] = json.loads(chosen.json.read_text()) if chosen.json.exists() else {}
    wanted = {name: missing(known.get(name, {}), chosen) for name in names}
    queue = [name for name in names if wanted[name]]
    running: dict[int, tuple[str, int, float]] = {}
    done, began = 0, time.monotonic()
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    while queue or running:
        while queue and len(running) < chosen.jobs:
            name = queue.pop(0)
            pid, pipe = start(name, wanted[name], chosen.patience)
            running[pid] = (name, pipe, time.monotonic())
        for pid, (name, pipe, since) in list(running.items()):
            found = collect(pid, pipe, since, chosen.patience)
            if found is None:
                continue
            del running[pid]
            done += 1
            known[name] = merged(known.get(name, {}), found, wanted[name])
            chosen.json.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
            left = f"{done}/{done + len(queue) + len(running)} {time.monotonic() - began:.0f} s"
            print(f"[{left}] {name}: {summary(known[name], wanted[name])}", flush=True)
        time.sleep(0.05)
    print(write_page(known, chosen.out))


def load_everything() -> list[str]:
    """Imports what every type needs, before anything is forked, and returns the names of all types."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    import meshwright.proof.verify
    from meshwright.launch.host_memory import keep_host_memory

    assert meshwright.proof.verify
    torch.set_num_threads(1)
    keep_host_memory()  # the tables are read in this process's children
    transformers.logging.set_verbosity_error()
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def missing(held: dict[str, Any], chosen: argparse.Namespace) -> list[str]:
    """Returns the layouts that are still to run for a type."""
    layouts = chosen.layouts.split(";")
    if not chosen.resume or not held:
        return layouts
    again = [outcome for outcome in chosen.again.split(",") if outcome]
    if "unbuilt" in held:
        return layouts if "unbuilt" in again else []
    cells = held.get("cells", {})
    return [layout for layout in layouts if layout not in cells or cells[layout]["outcome"] in again]


def merged(held: dict[str, Any], found: dict[str, Any], layouts: list[str]) -> dict[str, Any]:
    """Adds what a process found to what was known of its type; what it didn't reach ran out of time, or died."""
    if "unbuilt" in found:
        return {"unbuilt": found["unbuilt"]}
    kept = {key: item for key, item in held.items() if key != "unbuilt"} | {
        key: item for key, item in found.items() if key not in ("cells", "ended", "why")
    }
    cells = held.get("cells", {}) | found.get("cells", {})
    for layout in layouts:
        if layout not in found.get("cells", {}):
            cells[layout] = {"outcome": found["ended"] or "crashed", "why": found.get("why", "its process ended")}
    kept["cells"] = {layout: cells[layout] for layout in LAYOUTS if layout in cells} | cells
    return kept


def summary(found: dict[str, Any], layouts: list[str]) -> str:
    """One line of what a type gave."""
    if "unbuilt" in found:
        return f"can't be built: {found['unbuilt'][:150]}"
    cells = [f"{layout} {found['cells'][layout]['outcome']}" for layout in layouts]
    reasons = [found["cells"][layout].get("why", "") for layout in layouts]
    share = f"{found['share']:.0%} split; " if "share" in found else ""
    return f"{share}{', '.join(cells)} {next((f'({why[:160]})' for why in reasons if why), '')}"


def start(name: str, layouts: list[str], patience: float) -> tuple[int, int]:
    """Forks a process that proves one type, and returns its id and the pipe that it writes lines of JSON to."""
    receive, send = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(send)
        os.set_blocking(receive, False)
        return pid, receive
    os.setpgid(0, 0)
    os.close(receive)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    out = os.fdopen(send, "w", buffering=1)
    try:
        prove(name, layouts, patience, out)
    except BaseException as error:
        out.write(json.dumps({"ended": "crashed", "why": _short(f"{type(error).__name__}: {error}")}) + "\n")
    finally:
        os._exit(0)


def collect(pid: int, pipe: int, since: float, patience: float) -> dict[str, Any] | None:
    """Returns what a process found, once it has ended or its time is up; None before."""
    ended = ""
    if os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() - since < patience * TYPE_LIMIT_S:
            return None
        ended = "timeout"
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    text = b""
    while chunk := _read(pipe):
        text += chunk
    os.close(pipe)
    found: dict[str, Any] = {"cells": {}, "ended": ended}
    for line in text.decode().splitlines():
        facts = json.loads(line)
        found["cells"] |= facts.pop("cells", {})
        found |= facts
    return found


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 1 << 16)
    except BlockingIOError:
        return b""


def prove(name: str, layouts: list[str], patience: float, out: Any) -> None:
    """Builds and verifies one type, writing each result as it is reached."""
    from meshwright.errors import MeshwrightError
    from meshwright.models.analysis.experts import find_experts
    from meshwright.models.build import build_meta
    from meshwright.models.config import ModelConfig
    from meshwright.proof.reference import OptimizerRecipe
    from meshwright.proof.verify import Case, random_batches, verify
    from meshwright.spec.layout import Layout

    def tell(**facts: Any) -> None:
        out.write(json.dumps(facts) + "\n")

    sizes: dict[str, Any] = dict(SIZES)
    while True:
        try:
            built = build_meta(ModelConfig(name=name, **sizes), VOCAB, CONTEXT)
            break
        except MeshwrightError as error:
            useless = re.match(r"model\.(\w+) = \S+ has no effect", str(error))
            if useless is None or sizes.pop(useless[1], None) is None:
                return tell(unbuilt=_short(str(error)))

    def build() -> BuiltModel:
        return build_meta(ModelConfig(name=name, **sizes), VOCAB, CONTEXT)

    remember_tables(built, tell)
    mixture = bool(find_experts(built.module))
    tell(mixture=mixture)
    batches = random_batches(len(LENGTHS), ROWS, LENGTHS, VOCAB, False)
    case = Case(build=build, batches=batches, recipe=OptimizerRecipe(), timeout_s=patience * LIMIT_S)
    todo = [layout for layout in layouts if mixture or "ep=" not in layout]
    for layout in set(layouts) - set(todo):
        tell(cells={layout: {"outcome": "none"}})
    while todo:
        began = time.monotonic()

        def done(verdict: Any, todo: list[str] = todo) -> None:
            nonlocal began
            outcome = "timeout" if "did not end within" in verdict.crashed else verdict.outcome
            if verdict.refused and verdict.scope:
                outcome = "whole"  # it ran, and equals one device, but wasn't split as it was asked to
            error = max(verdict.loss_error, verdict.grad_error, verdict.grad_norm_error, verdict.weight_error)
            why = "" if verdict.passed else _short(verdict.refused or verdict.crashed or verdict.worst.name)
            cell = {"outcome": outcome, "error": float(f"{error:.1e}") if math.isfinite(error) else 0.0}
            cell |= {"lengths": list(LENGTHS)} | ({"why": why} if why else {})
            tell(cells={todo.pop(0): cell | {"seconds": round(time.monotonic() - began, 1)}})
            began = time.monotonic()

        try:
            verify(case, [Layout.parse(f"{layout},precision=float64") for layout in todo], done)
        except Exception as error:
            text = str(error)
            if broken := runs_alone(built):
                return tell(unbuilt=broken)
            outcome = "timeout" if "did not end within" in text else "crashed"
            lines = [line for line in text.strip().splitlines() if not line.startswith(("then [", "all "))]
            why = lines[-1] if lines else type(error).__name__
            lost = todo[:] if " of 1 " in text else todo[:1]  # without a reference all are lost
            del todo[: len(lost)]
            for layout in lost:
                tell(cells={layout: {"outcome": outcome, "why": _short(f"{type(error).__name__}: {why}")}})


def runs_alone(built: Any) -> str:
    """Why plain PyTorch can't run the model on nothing but tokens, in float64; "" when it can."""
    import torch

    from meshwright.models.build import use_float64
    from meshwright.models.deferred import materialise
    from meshwright.models.forward import model_forward

    try:
        use_float64(built.module)
        module = materialise(built.module, built.recipe, 1).double().train()
        model_forward(module, built.structure, torch.arange(2 * TOKENS).view(2, -1))
    except Exception as error:
        return _short(f"plain PyTorch can't run it on tokens alone in float64: {type(error).__name__}: {error}")
    return ""


def remember_tables(full_model: BuiltModel, tell: Any) -> None:
    """Reads each table once, and tells what share of the layers' parameters it splits and what stays whole."""
    from meshwright.models.analysis import table as tables
    from meshwright.train import model_analysis

    held: dict[int, ShardingTable] = {}

    def remembered(
        built: BuiltModel, degree: int = 2, objective: Objective | None = None, narrow: int = 0
    ) -> ShardingTable:
        if degree not in held:
            began = time.monotonic()
            held[degree] = tables.sharding_table(built, degree, objective, narrow)
            tell(**split_facts(full_model, held[degree]), table_s=round(time.monotonic() - began, 1))
        return held[degree]

    model_analysis.sharding_table = remembered


def split_facts(built: Any, table: Any) -> dict[str, Any]:
    """Returns the share of the layers' parameters that two ranks split, and the reasons of what stays whole."""
    sizes = {name: item.numel() for name, item in built.module.named_parameters()}
    split = sum(sizes[f"{layer}.{part.name}"] for layer, part, _, _ in table.splits(2))
    called = [layer for layer, rows in table.layers.items() if rows.refused.get("") != "the layer isn't called"]
    inside = tuple(f"{layer}." for layer in called)
    every = sum(size for name, size in sizes.items() if name.startswith(inside))
    whole: dict[str, str] = {}
    for layer in called:
        whole |= table.layers[layer].refused
    return {"share": round(split / max(1, every), 3), "whole": whole | dict(table.refused)}


def _short(text: str) -> str:
    return " ".join(text.split())[:300]


if __name__ == "__main__":
    main(sys.argv[1:])
