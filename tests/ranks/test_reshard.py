"""A checkpoint of any layout loads under any other: weights and moments to the bit, whatever axes split them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.store import CheckpointStore
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.verify import random_batches
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import OptimizerConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.session import build_program
from meshwright.train.state import load_state, save_state, state_tensors
from meshwright.train.step import Stepper
from tests.ranks.group import run_ranks
from tests.tiers import cases

VOCAB, CONTEXT, ROWS = 64, 16, 8


def model(name: str) -> BuiltModel:
    kv = {"kv_heads": 2} if name in ("llama", "mixtral") else {}
    return build_meta(ModelConfig(name=name, layers=2, width=32, heads=4, **kv), VOCAB, CONTEXT)


def work(rank: int, name: str, text: str, folder: Path, facts: ModelAnalysis, save: bool) -> dict[str, Any]:
    """Trains a step and saves, or loads; returns this rank's parts with their boxes."""
    layout = Layout.parse(f"precision=float64,{text}")
    plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=layout.world, reason="")
    program = build_program(model(name), plan, torch.device("cpu"), facts=facts)
    optimizer = LocalAdamW(program.weights, OptimizerConfig(lr=1e-2))
    scaler = LossScaler(False)
    store = CheckpointStore.build(folder, CheckpointConfig())
    if save:
        index, count = layout.reader(rank)
        stepper = Stepper(program, optimizer, scaler, clip=1.0, seed=0)
        (batch,) = random_batches(1, ROWS, CONTEXT, VOCAB, documents=False)
        rows = slice(index * ROWS // count, (index + 1) * ROWS // count)
        chunks = zip(batch.tokens[rows].chunk(layout.microbatches), batch.targets[rows].chunk(layout.microbatches))
        micro = [MicroBatch(tokens, targets, None) for tokens, targets in chunks]
        stepper.run(0, micro, int((batch.targets != -100).sum()), 1e-2, False).read()
        save_state(store, 1, program, optimizer, scaler, Origin(model="m", data="d", layout=layout), 100)
    else:
        assert load_state(store, program, optimizer, scaler, Origin(model="m", data="d", layout=layout)) is not None
    found: dict[str, Any] = {}
    for weight in program.weights:
        for kind in ("weights", "exp_avg", "exp_avg_sq"):
            held = state_tensors(program, optimizer)[f"{kind}/{weight.name}"]
            for piece in weight.boxes:
                local = held._local_tensor if hasattr(held, "_local_tensor") else held
                part = (
                    local[tuple(slice(*span) for span in piece.local_box)]
                    if isinstance(local, torch.Tensor)
                    else dict(local.boxes).get(piece.global_box, torch.empty(0))
                )
                found[f"{kind}/{weight.name}", piece.global_box] = part.clone()
    return found


def assembled(ranks: list[dict[str, Any]], name: str) -> dict[str, torch.Tensor]:
    """Puts all ranks' parts into whole tensors; what several ranks hold must be equal."""
    shapes = {key: item.shape for key, item in model(name).module.named_parameters()}
    whole: dict[str, torch.Tensor] = {}
    for parts in ranks:
        for (key, box), part in parts.items():
            full = whole.setdefault(key, torch.full(shapes[key.partition("/")[2]], float("nan"), dtype=torch.float64))
            at = full[tuple(slice(*span) for span in box)]
            assert bool(torch.isnan(at).all()) or torch.equal(at, part), key
            at.copy_(part)
    assert not any(bool(torch.isnan(item).any()) for item in whole.values())
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    cases(
        [
            ("gpt2", "tp=2", ["shard=3,zero=3", "pp=2,microbatches=2", "replicate=1"]),
            ("llama", "tp=4,sequence=true", ["tp=3", "cp=2,shard=2,zero=1", "pp=2,tp=2,microbatches=2"]),
            ("mixtral", "shard=2,ep=2,tp=2,zero=3", ["tp=2", "shard=2,ep=2,zero=1", "replicate=1"]),
            ("gpt2", "pp=2,shard=2,zero=2,microbatches=2", ["tp=2", "replicate=1"]),
            # Embedding and head, one weight, in stages without a layer.
            ("gpt2", "pp=3,microbatches=4,split=0-2-0", ["pp=2,microbatches=2,split=2-0", "shard=2,zero=3"]),
        ],
        (3,),
        extended=(1,),
    ),
)
def test_any_layout_to_any_layout(name: str, saved: str, loaded: list[str], tmp_path: Path) -> None:
    def run(text: str, save: bool) -> dict[str, torch.Tensor]:
        layout = Layout.parse(f"precision=float64,{text}")
        facts = analyse_model(model(name), layout)
        return assembled(run_ranks(layout.world, work, name, text, tmp_path / "ckpt", facts, save, timeout=250), name)

    wanted = run(saved, True)
    for text in loaded:
        found = run(text, False)
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[key], found[key]) for key in wanted), text
