"""The first law over every axis: pairs on 4 ranks, triples on 8, four dims on 16; and planted faults of each axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel import collectives, context, gathered_attention, head_exchange, ring_attention
from meshwright.parallel.gathered_attention import GatheredAttention
from meshwright.parallel.partial_grads import PartialGradReducer
from meshwright.parallel.vocab_shard import VocabShard
from meshwright.proof.compare import Verdict
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from tests.tiers import cases

SEQUENCE, VOCAB = 16, 61


def small(name: str, **sizes: Any) -> ModelConfig:
    return ModelConfig(name=name, **({"layers": 2, "width": 32, "heads": 4} | sizes))


MODELS = {
    "gpt2": small("gpt2"),
    "llama": small("llama", kv_heads=2),
    "qwen3": small("qwen3", kv_heads=2),
    "mixtral": small("mixtral", kv_heads=2),
    "gemma3_text": small("gemma3_text", overrides={"sliding_window": 5}),
    "bloom": small("bloom"),
    "falcon": small("falcon"),
    "phi3": small("phi3", kv_heads=1),
    "deep": small("llama", layers=4),
    "plain": ModelConfig(name="tests.plain_model:build"),
}
PAIRS = (
    "tp=2,shard=2,zero=2,sequence=true",
    "tp=2,replicate=2,microbatches=2",
    "pp=2,tp=2,microbatches=2,recompute=full",
    "pp=2,shard=2,zero=3,microbatches=4",
    "cp=2,tp=2",
    "cp=2,shard=2,zero=1,recompute=selective",
    "pp=2,cp=2,microbatches=2",
)


def prove(
    model: str, texts: tuple[str, ...], rows: int = 8, documents: bool = False, allow_whole: bool = False
) -> list[Verdict]:
    config = MODELS[model]

    def build() -> BuiltModel:
        return build_meta(config, vocab=VOCAB, context=SEQUENCE)

    batches = random_batches(1, rows, SEQUENCE, VOCAB, documents=documents)
    case = Case(build=build, batches=batches, recipe=OptimizerRecipe(), timeout_s=250, allow_whole=allow_whole)
    return verify(case, [Layout.parse(f"{text},precision=float64") for text in texts])


def all_pass(verdicts: list[Verdict]) -> None:
    assert [(verdict.layout, verdict.refused, verdict.worst) for verdict in verdicts if not verdict.passed] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "part"),
    cases(
        [("llama", 0), ("mixtral", 0), ("llama", 1), ("gpt2", 0), ("qwen3", 1), ("gemma3_text", 1), ("falcon", 0)],
        (0,),
        extended=(1,),
    ),
)
def test_pairs_of_axes(model: str, part: int) -> None:
    all_pass(prove(model, PAIRS[part::2], documents=model in ("llama", "gemma3_text")))


@pytest.mark.slow
def test_rows_and_layers_shared_out_by_speed() -> None:
    all_pass(prove("llama", ("replicate=2,tp=2,rows=3-1",), documents=True))
    all_pass(prove("deep", ("pp=2,shard=2,zero=1,split=1-3,microbatches=4,rows=3-1",), rows=16))


@pytest.mark.slow
@pytest.mark.extended("test_rows_and_layers_shared_out_by_speed")
def test_rows_and_layers_of_other_layouts_shared_out_by_speed() -> None:
    texts = ("pp=2,replicate=2,microbatches=2,rows=3-1", "shard=2,cp=2,zero=3,rows=1-3")
    all_pass(prove("llama", texts, documents=True))
    all_pass(prove("deep", ("pp=2,split=3-1,microbatches=2",), rows=16))


@pytest.mark.slow
def test_pairs_with_experts() -> None:
    all_pass(prove("mixtral", ("shard=2,tp=2,ep=4,zero=1,sequence=true",)))


@pytest.mark.slow
@pytest.mark.extended("test_pairs_with_experts")
def test_more_pairs_with_experts() -> None:
    all_pass(prove("mixtral", ("cp=2,tp=2,ep=2", "pp=2,shard=2,ep=2,zero=2")))


@pytest.mark.slow
def test_what_a_module_allows_passes_and_the_rest_is_refused_with_the_reason() -> None:
    verdicts = prove("plain", ("tp=2,shard=2,zero=3", "tp=2,replicate=2", "pp=2,tp=2,microbatches=2", "cp=2,tp=2"))
    all_pass(verdicts[:3])
    assert verdicts[3].passed or "attention=gather" in verdicts[3].refused
    (refused,) = prove("bloom", ("cp=2,attention=gather",))
    assert not refused.passed and "tokens" in refused.refused


@pytest.mark.slow
def test_bloom_whose_heads_come_from_outside() -> None:
    all_pass(prove("bloom", ("tp=2,shard=2,zero=1", "pp=2,tp=2,microbatches=2")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "text"),
    cases(
        [
            ("llama", "pp=2,shard=2,tp=2,zero=2,microbatches=2,sequence=true"),
            ("llama", "pp=2,tp=2,cp=2,microbatches=2,schedule=gpipe"),
            ("gemma3_text", "shard=2,cp=2,tp=2,zero=3,attention=gather"),
            ("mixtral", "shard=2,tp=2,replicate=2,ep=4,zero=2"),
            ("llama", "tp=8"),  # more ranks than heads: attention stays whole
        ],
        (4,),
        extended=(0,),
    ),
)
def test_eight_ranks(model: str, text: str) -> None:
    all_pass(prove(model, (text,), allow_whole=text == "tp=8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "texts"),
    cases(
        [
            (
                "llama",
                ("shard=2,cp=2,zero=1,microbatches=2", "shard=2,cp=2,zero=2,microbatches=2", "shard=2,cp=2,zero=3"),
            ),
            (
                "mixtral",
                (
                    "shard=2,cp=2,zero=3,secondary=2",
                    "shard=2,cp=2,ep=2,zero=3,secondary=2,microbatches=2",
                    "shard=2,cp=2,ep=4,zero=1",
                ),
            ),
            ("llama", ("replicate=2,shard=2,cp=2,zero=2,microbatches=2", "pp=2,shard=2,cp=2,zero=3,microbatches=2")),
            ("gpt2", ("shard=2,cp=2,tp=2,zero=3,sequence=true",)),
            ("deep", ("pp=2,shard=2,cp=2,zero=1,microbatches=4,schedule=zbv",)),
            ("mixtral", ("replicate=2,cp=2,ep=2,tp=2", "shard=2,cp=2,tp=2,ep=2,zero=2")),
        ],
        (1,),
    ),
)
def test_state_is_shared_by_the_ranks_that_read_other_tokens(model: str, texts: tuple[str, ...]) -> None:
    all_pass(prove(model, texts))


@pytest.mark.long
@pytest.mark.slow
def test_sixteen_ranks_in_four_dims() -> None:
    all_pass(prove("mixtral", ("pp=2,shard=2,cp=2,tp=2,ep=4,zero=1,microbatches=2",), rows=8))


@pytest.mark.slow
def test_fewer_key_heads_than_ranks_and_heads_that_do_not_divide() -> None:
    """Two key heads can't be divided by 4 ranks, nor four heads by 3: those layers stay whole, and are right."""
    all_pass(prove("llama", ("tp=4,sequence=true", "tp=3"), allow_whole=True))
    assert any(verdict.refused for verdict in prove("llama", ("tp=3",)))


@pytest.mark.slow
@pytest.mark.extended("test_fewer_key_heads_than_ranks_and_heads_that_do_not_divide")
def test_fewer_key_heads_than_ranks_of_cp_and_of_shards() -> None:
    all_pass(prove("llama", ("cp=4", "tp=4,shard=2,zero=3"), allow_whole=True))


@pytest.mark.slow
def test_a_key_head_that_ranks_share_inside_a_fused_matrix_whose_rows_are_sharded() -> None:
    """Of one matrix some rows are a rank's own and some its neighbour's too, and each shard has other ones of them."""
    all_pass(prove("phi3", ("tp=2,shard=2,zero=1", "tp=2,shard=2,zero=3,microbatches=2")))


def _no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows' products are never added up."""
    monkeypatch.setattr(collectives._ReduceFromGroup, "forward", staticmethod(lambda ctx, x, axis_group: x.view_as(x)))


def _no_sum_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of what enters a split part is left as this rank's share."""
    monkeypatch.setattr(collectives, "copy_to_group", lambda x, axis_group: x)


def _nothing_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of norms under split tokens stay each rank's own."""
    monkeypatch.setattr(PartialGradReducer, "finish", lambda self: None)


def _own_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is normalised over this rank's run of the vocabulary."""
    monkeypatch.setattr(VocabShard, "sum", lambda self, values: values)


def _same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank takes the first run of the tokens."""
    own = context.local_tokens
    monkeypatch.setattr(context, "local_tokens", lambda x, index, size, balanced=False: own(x, 0, size, balanced))


def _shifted_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads come back one rank off."""
    back = head_exchange._to_tokens

    def shifted(x: torch.Tensor, axis_group: Any, spans: Any, features: int) -> torch.Tensor:
        return back(x, axis_group, [*spans[1:], spans[0]], features)

    monkeypatch.setattr(head_exchange, "_to_tokens", shifted)


def _dropped_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over split tokens forgets the mask, and with it the sliding window."""
    plain = GatheredAttention.__torch_function__

    def dropped(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is gathered_attention._ATTENTION:
            kwargs = dict(kwargs or {}) | {"attn_mask": None, "is_causal": True}
        return plain(self, func, types, args, kwargs)

    monkeypatch.setattr(GatheredAttention, "__torch_function__", dropped)


@pytest.mark.slow
def _averaged_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial outputs count alike, whatever the weights of their keys add up to."""
    plain = ring_attention.merge

    def averaged(output: torch.Tensor, sums: torch.Tensor, block: torch.Tensor, block_sums: torch.Tensor) -> None:
        plain(output, sums, block, torch.where(sums.isfinite(), sums, block_sums))

    monkeypatch.setattr(ring_attention, "merge", averaged)


@pytest.mark.parametrize(
    ("plant", "model", "text"),
    [
        (_no_sum, "llama", "tp=2"),
        (_no_sum_backward, "gpt2", "tp=2"),
        (_nothing_owed, "llama", "tp=2,sequence=true"),
        (_nothing_owed, "qwen3", "tp=2"),
        (_own_vocabulary, "llama", "tp=2"),
        (_same_tokens, "llama", "cp=2"),
        (_shifted_heads, "llama", "cp=2,attention=heads"),
        (_dropped_mask, "gemma3_text", "cp=2,attention=gather"),
        (_averaged_blocks, "llama", "cp=2,attention=ring"),
    ],
)
def test_planted_faults_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None], model: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rehearsal, which then leaves nothing to split or refuses, or by the proof."""
    plant(monkeypatch)
    (verdict,) = prove(model, (text,))
    assert not verdict.passed
    if not verdict.refused:
        assert max(verdict.grad_error, verdict.grad_norm_error, verdict.weight_error, verdict.loss_error) > 1e-6
