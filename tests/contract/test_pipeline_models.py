"""A pipeline equals one rank for any model and schedule, in float64 to 1e-9; planted faults are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.models.analysis.layer_graph import read_layer_graph
from meshwright.models.analysis.small_config import shrink_config
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel import pipeline
from meshwright.parallel.pipeline import PipelineProgram
from meshwright.parallel.stage import Stage
from meshwright.parallel.weights import Weight
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.schedules.spec import known_schedules
from meshwright.spec.layout import Layout
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from tests.plain_model import Block
from tests.tiers import cases

SEQUENCE, VOCAB = 10, 61


def config(name: str, layers: int = 4) -> ModelConfig:
    return ModelConfig(name=name) if ":" in name else shrink_config(ModelConfig(name=name), layers=layers, width=32)


def case(name: str, layers: int = 4) -> Case:
    def build() -> BuiltModel:
        return build_meta(config(name, layers), vocab=VOCAB, context=SEQUENCE)

    batches = random_batches(2, 8, SEQUENCE, VOCAB, documents=name in ("gpt2", "llama"))
    return Case(build=build, batches=batches, recipe=OptimizerRecipe(), timeout_s=250)


def layouts(*texts: str) -> list[Layout]:
    return [Layout.parse(f"{text},precision=float64") for text in texts]


def all_pass(name: str, *texts: str, layers: int = 4) -> None:
    verdicts = verify(case(name, layers), layouts(*texts))
    assert [(verdict.layout, verdict.refused) for verdict in verdicts if not verdict.passed] == []
    assert all(verdict.worst.error < 1e-9 for verdict in verdicts)


def test_every_schedule_trains_a_tied_model_as_one_rank_does() -> None:
    all_pass("gpt2", *(f"pp=2,microbatches=4,schedule={name}" for name in known_schedules()))


def test_uneven_stages_interleaved_train_as_one_rank_does() -> None:
    """Seven layers in six stages, three a rank: cut by their weights, and as named."""
    texts = (
        "microbatches=4,schedule=interleaved,stages=3",
        "microbatches=2,schedule=interleaved,stages=3,split=1-1-2-1-1-1",
    )
    all_pass("gpt2", *(f"pp=2,{text}" for text in texts), layers=7)


def test_the_first_and_the_last_stage_may_have_no_layer() -> None:
    """Named, and because there are more stages than layers; the head is tied to the embedding."""
    all_pass(
        "gpt2",
        "pp=2,microbatches=2,split=0-4",
        "pp=2,microbatches=2,split=4-0,loss_chunk=3",
        "pp=2,microbatches=4,schedule=interleaved,stages=3",
    )


@pytest.mark.extended("test_the_first_and_the_last_stage_may_have_no_layer")
def test_both_ends_of_split_backwards_may_have_no_layer() -> None:
    all_pass(
        "gpt2",
        "pp=2,microbatches=4,schedule=zbv,split=0-3-1-0",
        "pp=3,microbatches=4,schedule=zerobubble,split=0-4-0",
    )


@pytest.mark.extended("test_the_first_and_the_last_stage_may_have_no_layer")
@pytest.mark.parametrize("zero", cases([3, 1]))
def test_ends_without_a_layer_beside_other_axes(zero: int) -> None:
    all_pass(
        "llama",
        "pp=2,tp=2,sequence=true,microbatches=2,split=0-4",
        "pp=2,tp=2,sequence=true,microbatches=2,split=4-0",
        "pp=2,cp=2,split=0-4",
        "pp=2,cp=2,split=4-0",
        f"pp=2,shard=2,zero={zero},microbatches=2,split=0-4",
        f"pp=2,shard=2,zero={zero},microbatches=2,split=4-0,recompute=full",
    )


@pytest.mark.parametrize("zero", cases([3, 1, 2]))
def test_stages_whose_state_is_sharded(zero: int) -> None:
    all_pass(
        "gpt2",
        f"pp=2,shard=2,zero={zero},microbatches=2",
        f"pp=2,shard=2,zero={zero},microbatches=4,schedule=zbv,recompute=full",
    )


def test_copies_of_a_pipeline_and_more_stages() -> None:
    all_pass(
        "llama",
        "pp=2,replicate=2,microbatches=2",
        "pp=4,microbatches=2,recompute=full",
    )


@pytest.mark.extended("test_copies_of_a_pipeline_and_more_stages")
def test_copies_of_a_pipeline_that_splits_its_backward() -> None:
    all_pass("llama", "pp=2,replicate=2,microbatches=4,schedule=zerobubble")


@pytest.mark.parametrize("name", cases(["gemma3_text", "marian"]))
def test_families(name: str) -> None:
    all_pass(
        name,
        "pp=2,microbatches=2,split=3-1",
        "pp=2,microbatches=4,schedule=zbv",
        "pp=2,microbatches=2,schedule=interleaved,split=0-3-1-0",
    )


def test_experts() -> None:
    all_pass("mixtral", "pp=2,microbatches=2", "pp=2,ep=2,shard=2,zero=1,split=4-0")


def test_a_model_that_is_not_from_transformers() -> None:
    all_pass(
        "tests.plain_model:build",
        "pp=2,microbatches=2,shard=2,zero=3,recompute=full",
    )


@pytest.mark.extended("test_a_model_that_is_not_from_transformers")
def test_uneven_stages_of_a_model_that_is_not_from_transformers() -> None:
    all_pass(
        "tests.plain_model:build",
        "pp=2,microbatches=4,split=1-2",
        "pp=2,microbatches=2,schedule=interleaved,split=0-2-1-0",
    )


class _Sideways(nn.Module):
    """Its last block reads what the first gave, on a way that ``hidden`` shows autograd or not."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 12)
        self.blocks = nn.ModuleList([Block(12) for _ in range(3)])
        self.head = nn.Linear(12, VOCAB)
        self.hidden = hidden

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](self.embedding(tokens))
        middle = self.blocks[1](first)
        return self.head(self.blocks[2](middle * (1 + first.detach().mean()) if self.hidden else middle + first))


class _Looped(_Sideways):
    """Goes through its blocks twice."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


class _Fed(nn.Module):
    """Every block reads the embedding, so that every stage holds it; the head is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 12)
        self.blocks = nn.ModuleList([Block(12) for _ in range(4)])
        self.merge = nn.Linear(12, 12)
        self.head = nn.Linear(12, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = start = self.embedding(tokens)
        for block in self.blocks:
            x = block(self.merge(x) + start)
        return self.head(x)


def fed() -> nn.Module:
    return _Fed()


def sideways() -> nn.Module:
    return _Sideways(hidden=False)


def hidden_sideways() -> nn.Module:
    return _Sideways(hidden=True)


def looped() -> nn.Module:
    return _Looped(hidden=False)


def test_a_weight_that_many_stages_read_is_one_weight() -> None:
    name = f"{__name__}:fed"
    all_pass(
        name,
        "pp=2,microbatches=4,schedule=zbv",
        # What comes between layers must not meet what stands for the last one in a stage with the head alone.
        "pp=2,microbatches=2,split=4-0",
    )


@pytest.mark.extended("test_a_weight_that_many_stages_read_is_one_weight")
def test_a_weight_that_more_stages_read_is_one_weight() -> None:
    all_pass(f"{__name__}:fed", "pp=2,shard=2,zero=2,microbatches=4,schedule=interleaved", "pp=4,microbatches=2")


def test_a_skip_is_carried_where_it_crosses_one_cut_alone() -> None:
    # Of three stages the last one has the head alone, as no cut can be in front of layer 1.
    all_pass(f"{__name__}:sideways", "pp=2,microbatches=2,split=2-1", "pp=3,microbatches=4")
    built = build_meta(ModelConfig(name=f"{__name__}:sideways"), vocab=VOCAB)
    assert set(read_layer_graph(built).blocked) == {1}


@dataclasses.dataclass
class State:
    """What some models hand from block to block."""

    hidden: torch.Tensor


class Carrying(nn.Module):
    """Its blocks hand on a tensor in an object, or beside a number, which ``as_tensor`` makes a tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 12), nn.Linear(12, VOCAB)
        self.blocks = nn.ModuleList(CarryingBlock(kind) for _ in range(2))
        self.kind = kind

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        start = {"object": State(x), "number": (x, 1), "tensor": (x, x.new_ones(()))}[self.kind]
        for block in self.blocks:
            start = block(start)
        return self.head(start.hidden if isinstance(start, State) else start[0])


class CarryingBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block, self.kind = nn.Linear(12, 12), kind

    def forward(self, state: Any) -> Any:
        if isinstance(state, State):
            return State(torch.tanh(self.block(state.hidden)))
        return torch.tanh(self.block(state[0])) * state[1], state[1] + 1


def carrying_object() -> nn.Module:
    return Carrying("object")


def carrying_number() -> nn.Module:
    return Carrying("number")


def carrying_tensor() -> nn.Module:
    return Carrying("tensor")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("carrying_object", r"layer 'blocks\.0' is called with a State, .* return tensors, alone or in a tuple"),
        ("carrying_number", r"layer 'blocks\.0' returns a value of type int, .* works: a tensor in its place"),
    ],
)
def test_what_is_no_tensor_between_layers_is_named(function: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        read_layer_graph(build_meta(ModelConfig(name=f"{__name__}:{function}")))
    # what the second refusal says works
    assert 1 not in read_layer_graph(build_meta(ModelConfig(name=f"{__name__}:carrying_tensor"))).blocked


def test_stages_that_the_spine_forbids_are_refused_before_a_rank_starts() -> None:
    built = build_meta(ModelConfig(name=f"{__name__}:sideways"), vocab=VOCAB)
    known = ModelAnalysis(layer_graph=read_layer_graph(built))
    assert analyse_model(built, Layout.parse("pp=2,microbatches=2,split=2-1"), known).layer_graph == known.layer_graph
    for text in ("pp=2,microbatches=2,split=1-2", "pp=4,microbatches=4"):
        with pytest.raises(PlanError, match="layer 2 reads what layer 0 made"):
            analyse_model(built, Layout.parse(text), known)


@pytest.mark.parametrize(("function", "why"), [("hidden_sideways", "on another way"), ("looped", "more than once")])
def test_models_that_stages_would_change_are_refused(function: str, why: str) -> None:
    built = build_meta(ModelConfig(name=f"{__name__}:{function}"), vocab=VOCAB)
    with pytest.raises(PlanError, match=why):
        read_layer_graph(built)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("pp=2,split=3-2", "split=3-2 has 5 layers, the model 4; for one, split=2-2"),
        ("pp=2,split=2-1-1", "has 3 stages, the schedule 2"),
        ("pp=8", "take 6 stages or fewer"),
        ("pp=4,split=2-0-1-1", "only the first stage"),
        ("pp=2,schedule=zbv,compile=true,microbatches=4", "two halves"),
        ("pp=2,schedule=zbw", "no such schedule"),
    ],
)
def test_impossible_pipelines_are_refused_before_a_rank_starts(text: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        pipeline.check(Layout.parse(text), 4)


def _tie_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline._SharedWeight, "start", lambda self: lambda: None)


def _tie_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every holder of a tied weight adds the whole of it to the norm."""
    boxes = Weight.boxes.func  # type: ignore[attr-defined]

    def once(self: Weight):  # type: ignore[no-untyped-def]
        return tuple(dataclasses.replace(box, copies=1) for box in boxes(self))

    monkeypatch.setattr(Weight, "boxes", property(once))


def _layer_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage hands its first layer's input on."""
    arm = Stage.arm

    def skip(self: Stage, *args) -> None:  # type: ignore[no-untyped-def]
        arm(self, *args)
        if self.is_last:
            self.layers[0].forward = lambda hidden, *args, **kwargs: hidden

    monkeypatch.setattr(Stage, "arm", skip)
    monkeypatch.setattr("meshwright.models.analysis.stage_rehearsal._compare", lambda *args: None)


def _wrong_share_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks without a loss report the loss sums too."""
    monkeypatch.setattr(PipelineProgram, "reporters", property(lambda self: 2))


@pytest.mark.parametrize("plant", [_tie_not_summed, _tie_counted_twice, _layer_dropped, _wrong_share_of_rows])
def test_planted_faults_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    (verdict,) = verify(case("gpt2"), layouts("pp=2,microbatches=2"))
    assert not verdict.passed and not verdict.refused
    assert max(verdict.grad_error, verdict.grad_norm_error, verdict.weight_error, verdict.loss_error) > 1e-6
