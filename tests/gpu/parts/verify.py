"""`meshwright verify` on a GPU: whole models under layouts of one rank, in each precision."""

from __future__ import annotations

import sys
import time

from tests.gpu.parts.cases import Cases, Command, Result
from tests.runs import warm

LLAMA = (
    "--model",
    "llama",
    "--model.layers",
    "2",
    "--model.width",
    "64",
    "--model.heads",
    "4",
    "--model.kv-heads",
    "2",
)
GPT2 = ("--model", "gpt2", "--model.layers", "2", "--model.width", "64", "--model.heads", "4", "--model.dropout", "0.2")
MIXTRAL = ("--model", "mixtral", *LLAMA[2:])
VERIFY: dict[str, tuple[str, ...]] = {
    "float64": (*LLAMA, "--layout", "replicate=1", "microbatches=4", "recompute=full", "recompute=selective"),
    "float64 dropout": (*GPT2, "--layout", "replicate=1", "microbatches=2,recompute=full", "recompute=selective"),
    "bf16": (*LLAMA, "--dtype", "bf16", "--layout", "replicate=1", "microbatches=4", "recompute=selective"),
    "float64 compiled": (*LLAMA, "--steps", "2", "--layout", "compile=true", "loss_chunk=64"),
    "float64 offload": (*LLAMA, "--layout", "offload=optimizer", "offload=parameters", "tp=2"),
    "fp8": (*LLAMA, "--dtype", "fp8", "--layout", "replicate=1"),
    "bf16 compiled": (*LLAMA, "--dtype", "bf16", "--steps", "2", "--layout", "compile=true", "loss_chunk=64"),
    "float64 experts": (*MIXTRAL, "--layout", "replicate=1", "recompute=selective"),
    "float64 masked": (*LLAMA, "--model.attention", "sdpa", "--layout", "replicate=1", "recompute=selective"),
    "bf16 masked": (*LLAMA, "--model.attention", "sdpa", "--dtype", "bf16", "--layout", "replicate=1"),
    "fp16": (*LLAMA, "--dtype", "fp16", "--layout", "replicate=1", "offload=parameters"),
    "tf32": (*LLAMA, "--dtype", "tf32", "--layout", "replicate=1", "microbatches=4"),
    "float32": (*LLAMA, "--dtype", "float32", "--layout", "replicate=1"),
}
"""Proofs, the most telling first; a layout of two ranks is refused where there is one GPU."""
AT_ONCE = 4
"""Proofs beside each other."""


def main() -> int:
    """Runs the proofs, several at a time."""
    cases = Cases.from_arguments(limit_s=120.0)
    warm()
    waiting = [name for name in VERIFY if cases.wants(name)]
    running: dict[str, Command] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name = waiting.pop(0)
            if cases.left_s < 10:
                cases.tell(f"verify {name}", skipped=f"{cases.left_s:.0f} s are left")
            else:
                file = f"verify-{name.replace(' ', '-')}"
                running[name] = cases.start(file, ("verify", "--json", *VERIFY[name]))
        for name, command in list(running.items()):
            if not command.alive() or cases.left_s < 3:
                del running[name]
                cases.run(f"verify {name}", lambda command=command: proved(command))
        time.sleep(0.05)
    return cases.finish()


def proved(command: Command) -> Result:
    """Returns each layout's errors; one of two ranks is refused where there is one GPU."""
    ended = command.wait(0.1)
    try:
        layouts = command.json()["layouts"]
    except ValueError:
        return ended
    told: Result = {"ok": bool(layouts), "command_s": ended["command_s"], "layouts": {}}
    for found in layouts:
        errors = {name: found[name] for name in ("loss_error", "grad_error", "grad_norm_error", "weight_error")}
        why = {name: str(found[name])[:400] for name in ("refused", "crashed", "wrong") if found.get(name)}
        told["layouts"][found["layout"]] = {"passed": found["passed"], **errors, **why, "bounds": found.get("bounds")}
        told["ok"] &= found["passed"] or bool(found["refused"] and "tp=2" in found["layout"])
    return told


if __name__ == "__main__":
    sys.exit(main())
