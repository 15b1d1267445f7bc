"""Proves random models under random layouts: ``python -m tests.generated.prove --seeds 0:200 --layouts 4``.

Each must equal one device or be refused with a reason; anything else is printed with its seed and ends with status 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from random import Random

import torch

from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.compare import Verdict
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from tests.generated import oddities
from tests.generated.models import draw_spec

LAYOUTS = (
    *("tp=2", "tp=2,sequence=true", "cp=2", "cp=2,attention=gather", "pp=2,microbatches=4", "shard=2,zero=3"),
    *("pp=2,microbatches=4,schedule=zbv,stages=2", "replicate=2,microbatches=2", "shard=2,zero=2,recompute=full"),
    *("pp=2,microbatches=4,stages=2,schedule=interleaved", "tp=2,recompute=full", "tp=3", "rows=3-1,shard=2,zero=2"),
)
ODD_LAYOUTS = (*("tp=2", "cp=2", "pp=2,microbatches=4", "pp=2,microbatches=4,schedule=zbv,stages=2", "shard=2,zero=3"),)
LENGTHS, ROWS = (32, 12), 8


def prove(seed: int, count: int, layouts: Iterable[str] = ()) -> list[Verdict]:
    """Returns the verdicts on a seed's model under ``count`` layouts of its own, or under those that are named."""
    config = ModelConfig(name="tests.generated.models:build", overrides={"seed": seed})
    return _verified(config, draw_spec(seed).vocab, list(layouts) or Random(seed).sample(LAYOUTS, count))


def prove_oddity(name: str, layouts: Iterable[str] = ()) -> list[Verdict]:
    """Returns the verdicts on one of `tests.generated.oddities` under layouts that are named, or `ODD_LAYOUTS`."""
    config = ModelConfig(name=f"tests.generated.oddities:{name}")
    return _verified(config, oddities.VOCAB, list(layouts) or ODD_LAYOUTS)


def _verified(config: ModelConfig, vocab: int, texts: Iterable[str]) -> list[Verdict]:
    batches = random_batches(2, ROWS, LENGTHS, vocab, documents=False)
    case = Case(
        build=partial(build_meta, config), batches=batches, recipe=OptimizerRecipe(), timeout_s=120, allow_whole=True
    )
    return verify(case, [Layout.parse(f"{text},precision=float64") for text in texts])


def sound(verdict: Verdict) -> bool:
    """Whether a verdict is a pass, or a refusal that says why."""
    return verdict.passed or (verdict.outcome == "refused" and len(verdict.refused) > 20)


def main(words: list[str]) -> int:
    """Proves a range of seeds and prints what each gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="first:stop")
    parser.add_argument("--layouts", type=int, default=3, help="for each model")
    parser.add_argument("--only", default="", help="layouts by name, separated by ';'")
    parser.add_argument("--odd", action="store_true", help="the models of tests.generated.oddities in place of seeds")
    chosen = parser.parse_args(words)
    torch.set_num_threads(1)
    named = [item for item in chosen.only.split(";") if item]
    first, stop = (int(item) for item in chosen.seeds.split(":"))
    models: list[int | str] = [model.__name__ for model in oddities.ALL] if chosen.odd else list(range(first, stop))
    counts: Counter[str] = Counter()
    bad = 0
    for model in models:
        found = prove_oddity(model, named) if isinstance(model, str) else prove(model, chosen.layouts, named)
        for verdict in found:
            counts[verdict.outcome] += 1
            if not sound(verdict):
                bad += 1
                print(model if isinstance(model, str) else json.dumps(dataclasses.asdict(draw_spec(model))))
            why = verdict.refused or verdict.crashed or verdict.wrong
            print(model, verdict.outcome, verdict.layout, "" if verdict.passed else why[:400], flush=True)
    print(f"{len(models)} models: {dict(counts)}, {bad} neither equal nor refused with a reason")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
