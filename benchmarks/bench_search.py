"""How long planning takes: searches of large clusters, planning again after a loss, devices of several kinds.

``python benchmarks/bench_search.py`` prints seconds of the clock and of one core, the best of ``--rounds``; then the
whole command in a process of its own. Other programs on the machine disturb the clock more than the core's seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.cli.arguments import read_config
from meshwright.jobs.plan_model import model_of_sizes, question_of
from meshwright.jobs.requests import PlanConfig
from meshwright.planner.choose import choose, search_space
from meshwright.planner.question import Question
from meshwright.planner.scaling import replan
from meshwright.planner.unequal import choose_unequal

ROOT = Path(__file__).resolve().parent.parent
GPT3 = "--sizes layers=96,width=12288,heads=96,vocab=51200,gated=false --batch 1536"
LLAMA = "--sizes layers=80,width=8192,heads=64,kv_heads=8,ffn=28672,vocab=128256 --batch 2048 --sequence 4096"
DENSE = "--sizes layers=128,width=25600,heads=160,vocab=51200,gated=false --batch 3072"
MIXTURE = (
    "--sizes layers=64,width=8192,heads=64,kv_heads=8,vocab=128000,experts=64,active_experts=4,expert_ffn=8192 "
    "--batch 4096 --sequence 4096"
)
SMALL = "--sizes layers=32,width=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256 --batch 768 --sequence 4096"
SEARCHES = {
    "GPT-3 175B, 1,024 H100": f"{GPT3} --cluster 1024xh100",
    "dense 1T, 16,384 H100": f"{DENSE} --cluster 16384xh100",
    "mixture 1T, 4,096 H100": f"{MIXTURE} --cluster 4096xh100",
}
LOSSES = {
    "GPT-3 175B, 128 nodes to 127": f"{GPT3} --cluster 1024xh100",
    "Llama 70B, 128 nodes to 127": f"{LLAMA} --cluster 1024xh100",
    "Llama 70B, 32 nodes to 31": f"{LLAMA} --cluster 256xh100",
}
KINDS = {
    "8B, 64 H100 and 32 A100": f"{SMALL} --cluster 64xh100+32xa100-80",
    "8B, 8 H100 and 8 A100": f"{SMALL} --cluster 8xh100+8xa100-40",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times that each is done; the best counts")
    rounds = parser.parse_args(argv).rounds
    print(f"{'search':<32}{'clock s':>9}{'core s':>9}  layouts")
    for name, words in SEARCHES.items():
        asked = _question(words)
        _print(name, rounds, lambda asked=asked: f"{search_space(asked).considered}")  # type: ignore[misc]
    print(f"{'planning again, warm':<32}{'clock s':>9}{'core s':>9}  plan")
    for name, words in LOSSES.items():
        asked = _question(words)
        choose(asked, 1)
        _print(name, rounds, lambda asked=asked: _again(asked))  # type: ignore[misc]
    print(f"{'devices of several kinds':<32}{'clock s':>9}{'core s':>9}  plan")
    for name, words in KINDS.items():
        asked = _question(words)
        _print(name, rounds, lambda asked=asked: str(choose_unequal(asked).best[0].layout))  # type: ignore[misc]
    print(f"{'whole command, cold':<32}{'clock s':>9}{'core s':>9}")
    for name, words in SEARCHES.items():
        _print(name, rounds, lambda words=words: _command(words))  # type: ignore[misc]
    return 0


def _question(words: str) -> Question:
    config = read_config(PlanConfig, words.split(), "plan")
    return question_of(config, model_of_sizes(config.sizes))


def _again(asked: Question) -> str:
    """Plans for one node fewer."""
    part, choice = replan(dataclasses.replace(asked, cluster=asked.cluster.without(1)))
    return f"{part.cluster.devices} devices: {choice.best[0].layout}"


def _command(words: str) -> str:
    command = [sys.executable, "-m", "meshwright", "plan", *words.split()]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return ""


def _print(name: str, rounds: int, run: Callable[[], str]) -> None:
    """Prints the least times of some rounds, and what came of the last."""
    clocks, cores, told = [], [], ""
    for _ in range(rounds):
        clock, core = time.perf_counter(), _core_s()
        told = run()
        clocks.append(time.perf_counter() - clock)
        cores.append(_core_s() - core)
    print(f"{name:<32}{min(clocks):>9.2f}{min(cores):>9.2f}  {told}", flush=True)


def _core_s() -> float:
    """Seconds that this process and those that it waited for have computed."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    raise SystemExit(main())
