"""Attention by documents is the model's own: operator against SDPA with a dense mask, families, layouts in float64."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshwright.data.config import DataConfig
from meshwright.errors import ConfigError
from meshwright.jobs import attention_checks
from meshwright.jobs.model_reading import ReadModel
from meshwright.jobs.verify import verify
from meshwright.jobs.verify_job import case_of
from meshwright.launch.devices import Devices
from meshwright.models.analysis.clone import realise_model, shrink_config
from meshwright.models.analysis.document_masks import varlen_refusal
from meshwright.models.attention import announce_rows, use_varlen
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.forward import model_output
from meshwright.parallel import document_attention as documents
from meshwright.planner.memory import StateSizes
from meshwright.spec.layout import Layout
from meshwright.train.run_config import RunConfig
from tests.runs import write_corpus

POSITIONS = torch.stack(
    [
        torch.cat([torch.arange(size) for size in (1, 13, 10)]),
        torch.cat([torch.arange(size) for size in (24,)]),
    ]
)


def test_bounds_are_where_positions_begin_anew() -> None:
    bounds = documents.document_bounds(POSITIONS)
    assert bounds.starts.tolist() == [0, 1, 14, 24, 48] and bounds.longest == 24
    assert documents.row_bounds(2, 24, torch.device("cpu")).starts.tolist() == [0, 24, 48]
    mask = documents.pack_mask(bounds, 5)
    assert documents.is_packed_mask(mask) and not documents.is_packed_mask(torch.ones(2, 1, 24, 24, dtype=torch.bool))
    starts, longest, window = documents.unpack_mask(mask)
    assert (starts.tolist(), longest, window) == (bounds.starts.tolist(), 24, 5)
    assert mask.untyped_storage().nbytes() == 5 * 4


@pytest.mark.parametrize("window", [0, 5])
def test_reference_is_sdpa_with_a_dense_mask(window: int) -> None:
    """Values and gradients in float64, with grouped key heads and values of another size."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 24, 8), (2, 2, 24, 8), (2, 2, 24, 6))
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    row, column = torch.arange(24)[:, None], torch.arange(24)
    document = (POSITIONS == 0).cumsum(1)
    visible = (row >= column) & (row - column < (window or 24)) & (document[:, :, None] == document[:, None, :])
    mask = documents.pack_mask(documents.document_bounds(POSITIONS), window)
    assert torch.equal(documents.dense_mask(mask, 2, 24), visible[:, None])
    own = documents.document_attention(*inputs, mask, 0.3)
    key, value = (x.repeat_interleave(2, dim=1) for x in inputs[1:])
    plain = functional.scaled_dot_product_attention(inputs[0], key, value, visible[:, None], scale=0.3)
    upstream = torch.randn(own.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(own, plain.transpose(1, 2), rtol=1e-12, atol=1e-12)
    for grad, expected in zip(
        torch.autograd.grad(own, inputs, upstream), torch.autograd.grad(plain, inputs, upstream.transpose(1, 2))
    ):
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)


def test_kernel_gets_the_documents_padded_heads_and_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window counts its own token, the kernel's does not; heads of 12 are padded to 16."""
    calls: list[Any] = []

    def kernel(query: torch.Tensor, *arguments: Any) -> torch.Tensor:
        calls.append((query, *arguments))
        return query

    monkeypatch.setattr(documents, "varlen_kernel", kernel)
    monkeypatch.setattr(documents, "_has_kernel", lambda _tensor: True)
    query, key = torch.randn(2, 4, 24, 12), torch.randn(2, 2, 24, 12)
    for window, left in ((0, -1), (5, 4)):
        mask = documents.pack_mask(documents.document_bounds(POSITIONS), window)
        output = documents.document_attention(query, key, key, mask)
        got_query, got_key, _, starts, longest, got_left, scale = calls.pop()
        assert output.shape == (2, 24, 4, 12) and torch.equal(output.transpose(1, 2), query)
        assert got_query.shape == (48, 4, 16) and got_key.shape == (48, 2, 16)
        assert starts.dtype == torch.int32 and starts.tolist() == [0, 1, 14, 24, 48]
        assert (longest, got_left) == (24, left) and scale == pytest.approx(12**-0.5)


@pytest.mark.parametrize(
    ("family", "refusal"),
    [
        ("llama", ""),
        ("qwen3", ""),
        ("gemma3_text", ""),
        ("mixtral", ""),
        ("gpt2", ""),
        ("gemma2", "'eager'"),
        ("llama4_text", "its mask isn't causal"),
        ("falcon", "takes no other mask"),
    ],
)
def test_families_are_tried(family: str, refusal: str) -> None:
    reason = varlen_refusal(build_meta(ModelConfig(name=family), 128, 64))
    assert (refusal in reason) if refusal else not reason


def test_dropped_attention_weights_are_refused() -> None:
    assert "drops attention weights" in varlen_refusal(build_meta(ModelConfig(name="gpt2", dropout=0.1), 128, 64))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "float32"}, "computes in bf16 and fp16"),
        ({"capability": 7.5}, "compute capability 8.0"),
        ({"capability": None}, ""),
        ({"head_dim": 264}, "up to 256 elements, and here are 264"),
        ({"cp": "gather"}, "attention=gather cuts the mask"),
        ({"kind": "cpu", "precision": "float32", "capability": 7.5}, ""),
    ],
)
def test_what_the_kernel_cant_do_is_refused_before_ranks_start(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"precision": "bf16", "capability": 9.0, "head_dim": 16, "cp": "", "kind": "cuda"} | changes
    monkeypatch.setattr(attention_checks, "least_compute_capability", lambda: facts["capability"])
    config = ModelConfig(name="llama", attention="varlen", overrides={"head_dim": facts["head_dim"]})
    built, analysis = build_meta(config, 128, 64), SimpleNamespace(attention=facts["cp"])
    devices = Devices(kind=facts["kind"], count=2, found=2, cores=2)
    expected = pytest.raises(ConfigError, match=reason) if reason else contextlib.nullcontext()
    with expected:
        attention_checks.check_attention(built, facts["precision"], analysis, devices)  # type: ignore[arg-type]
    # Who doesn't ask for it gets what the author wrote.
    plain = build_meta(ModelConfig(name="llama"), 128, 64)
    attention_checks.check_attention(plain, "float32", analysis, devices)  # type: ignore[arg-type]
    assert attention_checks.attention_header_row(plain, analysis, "cuda") == {}  # type: ignore[arg-type]
    assert ("with a mask" in attention_checks.attention_header_row(built, analysis, "cuda")["attention"]) == bool(  # type: ignore[arg-type]
        facts["cp"]
    )


@pytest.mark.parametrize(
    ("model", "facts", "chosen", "reason"),
    [
        ({}, {}, "varlen", ""),
        ({}, {"documents": False}, "auto", ""),
        ({"name": "mistral", "overrides": {"sliding_window": 32}}, {"documents": False}, "varlen", ""),
        ({"name": "mistral", "overrides": {"sliding_window": 64}}, {"documents": False}, "varlen", ""),
        ({"name": "mistral", "overrides": {"sliding_window": 65}}, {"documents": False}, "auto", ""),
        ({}, {"kind": "cpu"}, "auto", ""),
        ({}, {"precision": "float32"}, "auto", "computes in bf16 and fp16"),
        ({"name": "llama4_text"}, {}, "auto", "its mask isn't causal"),
        ({"attention": "sdpa"}, {}, "sdpa", ""),
    ],
)
def test_auto_takes_the_kernel_in_place_of_a_mask(
    model: dict[str, Any], facts: dict[str, Any], chosen: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_checks, "least_compute_capability", lambda: 9.0)
    facts = {"precision": "bf16", "documents": True, "kind": "cuda"} | facts
    built, said = build_meta(ModelConfig(**{"name": "llama"} | model), 128, 64), list[str]()
    devices = Devices(kind=facts["kind"], count=2, found=2, cores=2)
    layout = Layout.parse(f"replicate=2,precision={facts['precision']}")
    data = DataConfig(mask_documents=facts["documents"], sequence=64)
    rest: Any = (SimpleNamespace(layout=layout), SimpleNamespace(attention=""), data)
    text: Any = SimpleNamespace(train=SimpleNamespace(ends=[3, 9]))
    read = ReadModel(built=built, sizes=StateSizes(total=0, layers=()), fingerprint="")
    found = attention_checks.choose_attention(read, *rest, text, devices, said.append)
    assert found.built.config.attention == chosen and [reason in line for line in said] == [True] * bool(reason)


def test_a_plan_for_gpus_is_measured_without_the_mask_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_checks, "least_compute_capability", lambda: 9.0)
    tried: list[str] = []
    trial = attention_checks.varlen_refusal
    monkeypatch.setattr(attention_checks, "varlen_refusal", lambda built: tried.append("") or trial(built))
    windowed = build_meta(ModelConfig(name="mistral", overrides={"sliding_window": 32}), 128, 64)
    plain = build_meta(ModelConfig(name="llama"), 128, 64)

    def measured_as(built: Any, precision: str, kind: Any, tokens: int = 64) -> str:
        devices = Devices(kind=kind, count=2, found=2, cores=2)
        return str(attention_checks.as_run_on(built, precision, tokens, devices).config.attention)

    assert [measured_as(windowed, precision, "cuda") for precision in ("bf16", "fp8")] == ["varlen"] * 2
    assert tried == [""], "the model is tried once"
    assert measured_as(windowed, "bf16", "cpu") == measured_as(windowed, "float32", "cuda") == "auto"
    assert measured_as(windowed, "bf16", "cuda", tokens=31) == measured_as(plain, "bf16", "cuda") == "auto"


def test_no_dense_mask_is_made() -> None:
    """Every mask of a model with windows is a document mask, also for rows without a boundary."""
    config = ModelConfig(name="gemma3_text", layers=6, width=32, heads=4, overrides={"sliding_window": 5})
    built = build_meta(config, 32, 24)
    module = built.module.to_empty(device="cpu")
    built.fill_buffers(module, "cpu")
    use_varlen(module)
    masks: list[torch.Tensor | None] = []
    for name in built.structure.layers:
        module.get_submodule(name).register_forward_pre_hook(
            lambda _m, _a, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
    tokens = torch.zeros(2, 24, dtype=torch.int64)
    for positions in (POSITIONS, None):
        masks.clear()
        bounds = None if positions is None else documents.document_bounds(positions)
        with torch.no_grad(), announce_rows(bounds):
            module(tokens, position_ids=positions, use_cache=False)
        assert {mask.shape[-1] - 1 for mask in masks if mask is not None} == ({0, 5} if bounds else {5})
        assert all(mask is None or documents.is_packed_mask(mask) for mask in masks)


@pytest.mark.parametrize("by_documents", [False, True])
def test_a_window_as_long_as_the_row_takes_the_causal_kernel(by_documents: bool) -> None:
    """transformers makes a mask of it, which hides nothing and costs the flash kernel."""
    built = build_meta(
        ModelConfig(name="mistral", layers=2, width=32, heads=4, overrides={"sliding_window": 24}), 32, 24
    )
    module = built.module.to_empty(device="cpu")
    built.fill_buffers(module, "cpu")
    if by_documents:
        use_varlen(module)
    masks: list[torch.Tensor | None] = []
    module.get_submodule(built.structure.layers[0]).register_forward_pre_hook(
        lambda _m, _a, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    with torch.no_grad(), announce_rows(None):
        module(torch.zeros(2, 24, dtype=torch.int64), use_cache=False)
    (mask,) = masks
    assert mask is None if by_documents else mask is not None and mask.shape[-2:] == (24, 24)


class HostReads(TorchDispatchMode):
    """Counts numbers that the host reads off tensors, for which it waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2"])
def test_a_forward_reads_nothing_off_the_device(family: str) -> None:
    """A caller of a batch knows whether rows have documents; a model that is called by its own user still looks."""
    built = build_meta(ModelConfig(name=family, layers=2, width=32, heads=4), 32, 24)
    module = realise_model(built, lambda name, _: built.tensor(name))
    module.config._attn_implementation = "sdpa"
    tokens = torch.zeros(2, 24, dtype=torch.int64)
    own = [module(tokens, position_ids=positions, use_cache=False).logits for positions in (POSITIONS, None)]
    for is_varlen in (False, True):
        if is_varlen:
            use_varlen(module)
        for positions, expected in zip((POSITIONS, None), own):
            bounds = documents.document_bounds(POSITIONS) if positions is not None and is_varlen else None
            with HostReads() as reads:
                more: dict[str, Any] = {"mask_documents": positions is not None, "bounds": bounds}
                output = model_output(module, built.structure, tokens, None, positions, **more)
            # Under dense masks, one a kind of layers, a look whether rows have documents is worth the causal kernel.
            looks = positions is not None and not is_varlen
            assert reads.count == looks * (2 if family == "gemma3_text" else 1)
            torch.testing.assert_close(output.logits, expected)
    with HostReads() as reads:
        module(tokens, position_ids=POSITIONS, use_cache=False)
    assert reads.count > 0


class OwnDocuments(LlamaForCausalLM):
    """Positions begin again at each zero."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        starts = torch.where(input_ids == 0, torch.arange(input_ids.shape[1]), 0).cummax(dim=1).values
        return super().forward(input_ids, position_ids=torch.arange(input_ids.shape[1]) - starts, **kwargs)


def test_a_model_that_finds_documents_itself_is_asked_for_them() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    module, tokens = OwnDocuments(config), torch.randint(1, 32, (2, 24))
    tokens[:, 7] = tokens[0, 13] = 0
    own = module(tokens, use_cache=False).logits
    structure = build_meta(ModelConfig(name="llama"), 32, 24).structure
    torch.testing.assert_close(model_output(module, structure, tokens).logits, own)
    # What stands before another document's first token makes no difference to it.
    changed = tokens.clone()
    changed[:, 0] = 31 - changed[:, 0]
    torch.testing.assert_close(model_output(module, structure, changed).logits[:, 7:], own[:, 7:])


@pytest.mark.long
def test_no_family_finds_documents_where_nobody_gives_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what `skip_packing_check` answers in their stead is what they would have found."""
    masks: Any = importlib.import_module("transformers.masking_utils")
    look, seen = masks.find_packed_sequence_indices, []
    monkeypatch.setattr(masks, "find_packed_sequence_indices", lambda ids: seen.append(look(ids)) or seen[-1])
    looked = []
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        seen.clear()
        with contextlib.suppress(Exception):  # what can't be built so small, or needs more than tokens
            built = build_meta(shrink_config(ModelConfig(name=family)), 64, 32)
            module = realise_model(built, lambda name, _: built.tensor(name)).train()  # noqa: B023
            with torch.no_grad():
                module(torch.randint(0, 64, (4, 32)))
        assert all(item is None for item in seen), family
        looked += [family] * bool(seen)
    assert len(looked) > 100


@pytest.mark.parametrize(
    ("model", "precisions", "kind", "proven"),
    [
        ({}, {"bf16"}, "cuda", "varlen"),
        ({}, {"bf16", "fp8"}, "cuda", "varlen"),
        ({}, {"float32"}, "cuda", "auto"),
        ({}, {"float64"}, "cuda", "auto"),
        ({}, {"bf16"}, "cpu", "auto"),
        ({"attention": "sdpa"}, {"bf16"}, "cuda", "sdpa"),
        ({"overrides": {"head_dim": 264}}, {"bf16"}, "cuda", "auto"),
        ({"name": "llama4_text"}, {"bf16"}, "cuda", "auto"),
    ],
)
def test_a_proof_takes_what_a_run_there_would(
    model: dict[str, Any], precisions: set[str], kind: str, proven: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_devices(monkeypatch, kind)
    config = ModelConfig(**{"name": "llama"} | model)
    clone = shrink_config(config)

    def build() -> Any:
        return build_meta(config, 128, 64)

    assert attention_checks.attention_to_prove(build, clone, precisions, 64, True).attention == proven
    whole_rows = attention_checks.attention_to_prove(build, clone, precisions, 64, False)
    assert whole_rows == clone, "the causal kernel reads no mask"


def test_float64_of_a_proof_stands_for_bf16_and_that_of_a_run_for_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_devices(monkeypatch, "cuda")
    config, clone = ModelConfig(name="llama"), shrink_config(ModelConfig(name="llama"))

    def proven(*precisions: str) -> str:
        def build() -> Any:
            return build_meta(config, 128, 64)

        return attention_checks.attention_to_prove(build, clone, precisions, 64, True, float64_for="bf16").attention

    assert [proven("float64"), proven("float64", "fp16"), proven("float64", "float32")] == ["varlen", "varlen", "auto"]
    paths = tuple(str(write_corpus(tmp_path / f"{number}.txt", seed=number)) for number in range(4))
    data = DataConfig(paths=paths, cache=str(tmp_path / "prepared"), tokenizer="chars", sequence=32)
    job = RunConfig(model=config, data=data)
    subjects = {
        precision: case_of(job, [Layout(precision=precision)], False, 2, 60.0)[1]
        for precision in ("float64", "float32", "bf16")
    }
    by_documents = {precision for precision, subject in subjects.items() if "attending by documents" in subject}
    assert by_documents == {"bf16"}


def on_devices(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(attention_checks, "least_compute_capability", lambda: 9.0)
    devices = Devices(kind="cuda" if kind == "cuda" else "cpu", count=2, found=2, cores=2)
    monkeypatch.setattr(attention_checks, "found_devices", lambda _count: devices)


def test_float64_takes_plain_products_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel computes in 16 bits; what a proof computes in float64 must not reach it."""
    calls: list[torch.dtype] = []

    def kernel(query: torch.Tensor, *_rest: Any) -> torch.Tensor:
        calls.append(query.dtype)
        return query

    monkeypatch.setattr(documents, "varlen_kernel", kernel)
    with FakeTensorMode():
        mask = torch.empty(5, 24, 1, dtype=torch.int32, device="cuda")
        # A wheel without CUDA can't index such a tensor.
        packed = documents.PackedMask(torch.empty(5, dtype=torch.int32, device="cuda"), 24, 0)
        monkeypatch.setattr(documents, "unpack_mask", lambda _mask: packed)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            query, key = (torch.empty(2, heads, 24, 16, dtype=dtype, device="cuda") for heads in (4, 2))
            output = documents.document_attention(query, key, key, mask)
            assert output.shape == (2, 24, 4, 16) and output.dtype == dtype and output.device.type == "cuda"
    assert calls == [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("family", "attention", "layouts"),
    [
        ("llama", "varlen", ["tp=2,sequence=true", "cp=2,attention=heads", "pp=2,microbatches=2,schedule=zbv"]),
        ("gemma3_text", "auto", ["shard=2,zero=3,recompute=selective"]),
    ],
)
def test_layouts_equal_one_device_whose_mask_is_dense(
    family: str, attention: Any, layouts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the user's word, or because a run on GPUs would choose it."""
    if attention == "auto":
        on_devices(monkeypatch, "cuda")
    subjects: list[str] = []
    report = verify(
        model=ModelConfig(name=family, attention=attention), layout=layouts, steps=2,
        on_start=lambda subject, _layouts: subjects.append(subject),
    )  # fmt: skip
    assert all(verdict.passed for verdict in report.verdicts), report.verdicts
    assert ("as a run on these GPUs does" in subjects[0]) == (attention == "auto")
