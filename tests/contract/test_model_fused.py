"""What layers' own operators move, eager, fused and with dropout, beside what the closed form counts of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.fused import Call, fused
from meshwright.models.measure import measure_shape
from meshwright.models.work import measure_model
from meshwright.planner.cost.meshwright_profile import DRAW_BYTES, MESHWRIGHT, drop_bytes, score_bytes
from meshwright.spec.model_shape import ModelWork, Operator
from tests.tiers import further

SEQUENCE, ROWS, WIDTH, HEADS = 512, 2, 256, 4
TOKENS = SEQUENCE * ROWS


def built(name: str, dropout: float = 0.0) -> BuiltModel:
    sizes = {"layers": 2, "width": WIDTH, "heads": HEADS} | ({"ffn": 4 * WIDTH} if name == "llama" else {})
    return build_meta(ModelConfig(name=name, dropout=dropout, **sizes), vocab=128, context=SEQUENCE)


def measured(name: str, dropout: float = 0.0) -> ModelWork:
    return measure_model(built(name, dropout), ROWS, SEQUENCE, torch.bfloat16)


def moved(work: ModelWork, back: bool = False) -> float:
    """Bytes of a layer's element-wise operators per token and element of D."""
    rows = work.layers[0].backward if back else work.layers[0].forward
    return sum(item.bytes for item in rows if item.kind == "element") / TOKENS / WIDTH


@pytest.mark.parametrize(("name", "branches"), further([("gpt2", 1), ("llama", 2)]))
def test_fused_layers_move_what_the_engine_says(name: str, branches: int) -> None:
    work, runtime = measured(name), MESHWRIGHT.runtime
    made = work.compiled()
    assert moved(made) == pytest.approx(runtime.fused_width + 4 * branches * runtime.fused_ffn, rel=0.1)
    assert moved(work) == pytest.approx(runtime.pass_width + 4 * branches * runtime.pass_ffn, rel=0.2)
    assert moved(made, back=True) / moved(made) == pytest.approx(runtime.pass_backward, rel=0.15)
    for back in (False, True):
        eager, few = ([item for _, item in one.operators(back)] for one in (work, made))
        assert len(few) < 0.7 * len(eager)
        for kind in ("product", "attention"):
            assert [item for item in few if item.kind == kind] == [item for item in eager if item.kind == kind]
    assert made.saved_bytes == work.saved_bytes and made.rest == work.rest


def test_a_run_reads_what_enters_it_and_writes_what_is_needed() -> None:
    a, b, c, d, e = (torch.zeros(8) for _ in range(5))
    add, exp = Operator("element", "add", (), 0.0, 96), Operator("element", "exp", (), 0.0, 64)
    product = Operator("product", "mm", (1, 2, 2, 2), 16.0, 96)
    calls = [Call.of(add, (a, b), c), Call.of(exp, (c,), d), Call.of(product, (d, a), e), Call.of(exp, (e,), b)]
    rows = fused(calls, {b.untyped_storage()._cdata})
    # a and b in, d out; c stays in the kernel. Then e in, b out.
    assert [(row.name, row.bytes) for row in rows] == [("fused", 3 * 32), ("mm", 96), ("fused", 2 * 32)]
    kept = fused(calls[:2], {c.untyped_storage()._cdata, d.untyped_storage()._cdata})
    assert [row.bytes for row in kept] == [4 * 32]


def test_dropout_is_measured_as_the_runtime_draws() -> None:
    plain, dropped = measured("gpt2"), measured("gpt2", 0.1)
    draws = [item for item in dropped.layers[0].forward if item.name == "draw"]
    sizes = sorted(item.bytes / DRAW_BYTES for item in draws)
    scores = HEADS * SEQUENCE / WIDTH  # for each element of D
    assert sizes == [TOKENS * WIDTH, TOKENS * WIDTH, TOKENS * WIDTH * scores]
    assert not any(item.kind == "attention" for item in dropped.layers[0].forward)
    told = 2 * (DRAW_BYTES + drop_bytes(2)) + scores * (DRAW_BYTES + drop_bytes(2) + score_bytes(2, False))
    assert moved(dropped) - moved(plain) == pytest.approx(told, rel=0.05)
    # Of the closed form four passes over scores are products' own.
    back = 2 * drop_bytes(2) + scores * (drop_bytes(2) + score_bytes(2, True) - 4 * 2)
    assert moved(dropped, back=True) - moved(plain, back=True) == pytest.approx(back, rel=0.15)
    # A mask of a byte each, and of each score the softmax, what is kept of it, the mask.
    kept = (dropped.layers[0].kept.saved[0] - plain.layers[0].kept.saved[0]) / TOKENS / WIDTH
    assert kept == pytest.approx(2 + scores * 5, rel=0.05)
    outside = [item for item in dropped.rest.forward if item.name == "draw"]
    assert [item.bytes / DRAW_BYTES for item in outside] == [TOKENS * WIDTH]
    assert not any(item.name == "draw" for item in plain.layers[0].forward)


def test_layers_tell_what_they_drop() -> None:
    shape = measure_shape(built("gpt2", 0.1))
    assert (shape.blocks[0].drops, shape.blocks[0].drops_scores) == (2, True)
    for name in ("gpt2", "llama"):
        block = measure_shape(built(name)).blocks[0]
        assert (block.drops, block.drops_scores) == (0, False)
    llama = measure_shape(built("llama", 0.1)).blocks[0]  # its only dropout is attention's
    assert (llama.drops, llama.drops_scores) == (0, True)
    assert dataclasses.replace(llama, drops_scores=False) == measure_shape(built("llama")).blocks[0]
