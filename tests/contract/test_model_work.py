"""What a model computes and keeps, read off fake tensors, is what it computes and keeps."""

from __future__ import annotations

import contextlib
import inspect
import logging
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.cluster.calibration import Calibration
from meshwright.cluster.cluster import Cluster
from meshwright.errors import ConfigError
from meshwright.models import operators
from meshwright.models.analysis.table import sharding_table
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.forward import model_forward
from meshwright.models.measure import measure_shape
from meshwright.models.work import measure_model
from meshwright.parallel import recompute, selective
from meshwright.planner.activation_bytes import count_activation_bytes
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT
from meshwright.planner.cost.operators import price_operators
from meshwright.spec.model_shape import ModelWork
from tests.tiers import further

ROWS, TOKENS, VOCAB = 2, 32, 96
MODELS = ("llama", "gpt2", "qwen3", "bloom", "gemma3_text")


def built(name: str) -> BuiltModel:
    return build_meta(ModelConfig(name=name, layers=3, width=64, heads=4), vocab=VOCAB, context=TOKENS)


def latent(name: str, **sizes: int) -> ModelConfig:
    """A model; of multi-head latent attention one whose latents and experts are narrower than it."""
    ranks = {"q_lora_rank": 3 * sizes["width"] // 8, "kv_lora_rank": sizes["width"] // 4}
    narrow = {**ranks, "moe_intermediate_size": sizes["width"] // 2} if name == "deepseek_v3" else {}
    return ModelConfig(name=name, heads=4, overrides=narrow, **sizes)  # type: ignore[arg-type]


def flops(work: ModelWork, kind: str, backward: bool = False) -> float:
    return sum(count * item.flops for count, item in work.operators(backward) if item.kind == kind)


@pytest.mark.parametrize("name", further(MODELS, (0, 1)))
def test_operators_are_the_closed_forms(name: str) -> None:
    model = built(name)
    work = measure_model(model, ROWS, TOKENS, torch.float32)
    assert sum(work.counts) == 3
    expected = 2.0 * ROWS * TOKENS * measure_shape(model).matmul_parameters
    scores = 0.0 if name != "bloom" else 4.0 * ROWS * 3 * TOKENS * TOKENS * 64  # its attention isn't fused
    assert flops(work, "product") == pytest.approx(expected + scores, rel=0.02)
    assert flops(work, "product", True) == pytest.approx(2 * (expected + scores), rel=0.02)
    assert all(item.is_meta for item in model.module.parameters())


def real(model: BuiltModel) -> nn.Module:
    """The model with values, on processor cores."""
    module = model.module.to_empty(device="cpu")
    model.fill_buffers(module, torch.device("cpu"))
    for item in module.parameters():
        torch.nn.init.normal_(item, std=0.02)
    return module


def _really_saved(model: BuiltModel) -> int:
    """Bytes that autograd keeps in a real forward, parameters left out."""
    module = real(model)
    own = {item.untyped_storage().data_ptr() for item in (*module.parameters(), *module.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(item: torch.Tensor) -> torch.Tensor:
        storage = item.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return item

    module.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda item: item):
        model_forward(module, model.structure, torch.zeros(ROWS, TOKENS, dtype=torch.int64))
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("name", further(["llama", "gpt2", "gemma3_text"]))
def test_kept_bytes_are_those_of_a_real_forward(name: str) -> None:
    work = measure_model(built(name), ROWS, TOKENS, torch.float32)
    assert work.saved_bytes == pytest.approx(_really_saved(built(name)), rel=0.005)
    layer = work.layers[0]
    saved, selective, full = layer.kept.saved
    assert full == ROWS * TOKENS * 64 * 4
    assert full < selective < saved


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_selective_recompute_keeps_the_bytes_that_are_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted on fake tensors, and on what real layers keep; products narrower than the model are in neither."""
    kept: list[int] = []
    leave = selective._FirstRun.__exit__

    def counted(run: Any, *error: Any) -> None:
        tensors = [leaf for result in run.results for leaf in result.leaves if isinstance(leaf, torch.Tensor)]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        kept.append(sum(storage.nbytes() for storage in storages.values()))
        leave(run, *error)

    monkeypatch.setattr(selective._FirstRun, "__exit__", counted)
    model = build_meta(latent(name, layers=3, width=64), vocab=VOCAB, context=TOKENS)
    work, module = measure_model(model, ROWS, TOKENS, torch.float32), real(model).train()
    recompute.apply([module.get_submodule(layer) for layer in model.structure.layers], "selective", None, width=64)
    model_forward(module, model.structure, torch.zeros(ROWS, TOKENS, dtype=torch.int64))
    planned = [
        kind.kept.saved[1] - kind.kept.saved[2] for kind, count in zip(work.layers, work.counts) for _ in range(count)
    ]
    assert sorted(kept) == pytest.approx(sorted(planned), rel=0.002)
    narrow = [item for kind in work.layers for item in kind.forward if item.kind == "product" and not item.kept_bytes]
    assert {item.sizes[-1] < 64 for item in narrow} <= {True}
    # The way up from latents is, and the way down of small experts.
    assert bool(narrow) == (name == "deepseek_v3")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_the_closed_form_of_selective_recompute_has_what_modules_keep(name: str) -> None:
    """Where no module is read, the sizes alone say what is kept: products of experts and latents too."""
    model = build_meta(latent(name, layers=4, width=256), vocab=512, context=128)
    work = measure_model(model, 1, 128, torch.bfloat16)
    job = PricedJob(shape=measure_shape(model), sequence=128, rows=1, precision="bf16")
    counted = count_activation_bytes(job, Machine.of(Cluster.parse("8xh100")), MESHWRIGHT, work)
    assert counted.saved.real[1] == pytest.approx(counted.saved.closed[1], rel=0.07)


class Wrapped(nn.Module):
    """A module of one's own around a model of transformers, which looks for documents in each forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


def build_wrapped(vocab: int, context: int) -> nn.Module:
    return Wrapped(build_meta(ModelConfig(name="llama", layers=3, width=64, heads=4), vocab, context).module)


def test_a_module_around_a_model_is_measured_as_the_model() -> None:
    model = build_meta(ModelConfig(name="tests.contract.test_model_work:build_wrapped"), vocab=VOCAB, context=TOKENS)
    wrapped, own = (measure_model(item, ROWS, TOKENS, torch.float32) for item in (model, built("llama")))
    for is_backward in (False, True):
        assert list(wrapped.operators(is_backward)) == list(own.operators(is_backward))


def test_tensor_parallel_halves_what_it_divides() -> None:
    model = built("llama")
    table = sharding_table(model, 2)
    whole = measure_model(model, ROWS, TOKENS, torch.float32)
    parts = {split: measure_model(model, ROWS, TOKENS, torch.float32, table, 2, split) for split in (False, True)}
    for part in parts.values():
        assert flops(part, "product") == pytest.approx(flops(whole, "product") / 2)
    assert parts[True].saved_bytes < parts[False].saved_bytes < whole.saved_bytes
    size = ROWS * TOKENS * 64 * 4
    assert sorted(parts[False].layers[0].sent) == [("all_reduce", size, 2)] * 4
    assert {(op, moved) for op, moved, _ in parts[True].layers[0].sent} == {
        ("all_gather", size), ("reduce_scatter", size)
    }  # fmt: skip


def test_measured_rates_price_operators() -> None:
    rows = [("float32", form, True, m, n, k, 2.0 * m * n * k / 1e11) for form in ("nt", "nn", "tn") for m in (16, 4096)
            for n in (16, 4096) for k in (16, 4096)]  # fmt: skip
    operations = [("copy", "float32", True, count, count / 1e9) for count in (1000, 1_000_000)]
    calibration = Calibration(machine={"kind": "cpu"}, ranks=2, matmul=tuple(rows), operations=tuple(operations))
    work = measure_model(built("llama"), ROWS, TOKENS, torch.float32)
    by_position = price_operators(work, calibration, "float32", True)
    seconds = by_position.first_end.plus(by_position.last_end).plus(by_position.layer, sum(work.counts))
    assert seconds.forward["matmul"] == pytest.approx(flops(work, "product") / 1e11, rel=1e-3)
    assert seconds.backward["matmul"] == pytest.approx(2 * seconds.forward["matmul"], rel=1e-3)
    moved = sum(count * item.bytes for count, item in work.operators() if item.kind != "product")
    assert seconds.forward["elementwise"] == pytest.approx(moved / 8e9, rel=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_products_are_read_in_every_type(dtype: torch.dtype) -> None:
    """Experts of two products, one of them of both branches: by hand 2 T k (2 D F + F D) FLOPs, and twice that back."""
    sizes = {"layers": 2, "width": 64, "heads": 4, "ffn": 96, "experts": 8}
    model = build_meta(ModelConfig(name="mixtral", **sizes), vocab=256, context=TOKENS)  # type: ignore[arg-type]
    (layer,) = measure_model(model, ROWS, TOKENS, dtype).layers
    grouped = [[item for item in items if item.name == "_grouped_mm"] for items in (layer.forward, layer.backward)]
    by_hand = 2.0 * ROWS * TOKENS * 2 * 3 * 64 * 96
    assert [sum(item.flops for item in items) for items in grouped] == [by_hand, 2 * by_hand]
    assert all(item.sizes[0] == 8 for items in grouped for item in items)


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral"])
def test_torch_prints_nothing_of_what_it_cannot_fake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture's grouped products, as torch has them, have no fake form in float32: the caller alone is told."""
    monkeypatch.setattr(operators, "_GroupedProducts", contextlib.nullcontext)
    built = build_meta(ModelConfig(name=name, layers=4, width=64, heads=4), vocab=256, context=32)
    logger, records = logging.getLogger("torch._subclasses.fake_tensor"), []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with pytest.raises(ConfigError, match="can't be run on fake tensors"):
            inspect.unwrap(measure_model)(built, 1, 32, torch.float32)  # here, not in the process that it starts
    finally:
        logger.removeHandler(handler)
    assert records == [] and not logger.disabled
