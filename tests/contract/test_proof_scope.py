"""A pass says what it proved: rows long enough, heads in their ratio, every kind of layer, and what was split."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import transformers

from meshwright.cli.main import main
from meshwright.errors import PlanError
from meshwright.models.analysis import context, table
from meshwright.models.analysis.context import trial_tokens
from meshwright.models.analysis.rescale import rescale_group
from meshwright.models.analysis.small_config import (
    choose_layers,
    kind_pairs,
    kinds_of_layers,
    shrink_config,
    with_every_kind,
)
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel import head_exchange
from meshwright.parallel.axis_group import AxisGroup
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.scope import read_scope
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.spec.sharding_table import Block, ShardingGroup
from meshwright.train.model_analysis import analyse_model
from tests.odd_models import VOCAB
from tests.tiers import further

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


def chunked(span: int) -> ModelConfig:
    return ModelConfig(name="tests.odd_models:chunks", overrides={"span": span})


def case(config: ModelConfig, lengths: tuple[int, ...], rows: int = 4, allow_whole: bool = False) -> Case:
    def build() -> BuiltModel:
        return build_meta(config, vocab=VOCAB, context=max(lengths))

    batches = random_batches(len(lengths), rows, lengths, VOCAB, documents=False)
    return Case(build=build, batches=batches, recipe=OptimizerRecipe(), timeout_s=250, allow_whole=allow_whole)


@pytest.mark.parametrize("span", further([16, 32, 64, 100], (1,)))
@pytest.mark.parametrize("layout", ["cp=2", "cp=2,attention=gather", "tp=2,sequence=true"])
def test_tokens_that_meet_far_apart_are_seen_in_the_rows_of_the_run(span: int, layout: str) -> None:
    with pytest.raises(PlanError, match="with rows of 240 tokens"):
        analyse_model(build_meta(chunked(span)), Layout.parse(layout), tokens=240)


@pytest.mark.parametrize("layout", further(["cp=2", "cp=2,attention=gather", "tp=2,sequence=true"]))
def test_rows_too_short_for_tokens_to_meet_are_split(layout: str) -> None:
    facts = analyse_model(build_meta(chunked(64)), Layout.parse(layout), tokens=48)
    assert facts.table is not None
    analyse_model(build_meta(chunked(0)), Layout.parse(layout), tokens=240)


@pytest.mark.parametrize("span", further([32, 100]))
def test_the_proof_sees_what_a_blind_trial_let_pass(span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "trial_tokens", lambda tokens, elements: (8, ""))
    (verdict,) = verify(case(chunked(span), (120, 24)), [Layout.parse("cp=2,precision=float64")])
    assert verdict.outcome == "wrong" and verdict.loss_error > 1e-9
    assert "the gradient of '" in verdict.wrong and "cp=2" in verdict.wrong
    assert "its forward computes something else" in verdict.wrong
    assert verdict.scope is not None and verdict.scope.lengths == (120, 24)


def test_a_trial_says_why_its_rows_are_shorter_than_the_run_s() -> None:
    assert trial_tokens(200, 1000) == (200, "")
    length, why = trial_tokens(8192, 1 << 24)
    assert length == 256 and "8192" in why
    facts = analyse_model(build_meta(chunked(0)), Layout.parse("cp=2"), tokens=4096)
    assert "512" in facts.tried and "4096" in facts.tried


def test_a_way_of_attention_that_a_trial_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of one way must not hide behind the other, which is taken in its place and is right."""
    built = build_meta(ModelConfig(name="llama", layers=1, width=32, heads=4, kv_heads=2), 64, 32)
    layout = Layout.parse("cp=4")
    sound = analyse_model(built, layout, tokens=24)
    assert sound.attention == "heads" and not sound.heads_refused
    exchange = head_exchange._to_tokens

    def half(x: torch.Tensor, axis_group: AxisGroup, spans: list[head_exchange.Spans], features: int) -> torch.Tensor:
        is_shared = not head_exchange._covers_in_order(spans, features)
        return exchange(x / 2 if is_shared else x, axis_group, spans, features)

    monkeypatch.setattr(head_exchange, "_to_tokens", half)
    facts = analyse_model(built, layout, tokens=24)
    assert facts.attention == "gather" and "the gradient of '" in facts.heads_refused
    summary = read_scope(built, layout, facts, (24,)).summary
    assert "attention=gather" in summary and "not by attention=heads: with rows of 8 tokens" in summary


def test_what_was_not_split_is_refused_by_name_unless_allowed() -> None:
    config = ModelConfig(name="xlnet", layers=1, width=32, heads=4)
    layouts = [Layout.parse("tp=2,precision=float64")]
    (refused,) = verify(case(config, (8,)), layouts)
    assert refused.outcome == "refused" and "transformer.layer.0" in refused.refused
    assert "--allow-whole" in refused.refused and refused.grad_error < 1e-9
    (allowed,) = verify(case(config, (8,), allow_whole=True), layouts)
    assert allowed.passed and allowed.scope is not None and allowed.scope.layer_share == 0.0


def test_a_pass_names_shares_windows_and_experts() -> None:
    config = ModelConfig(name="mixtral", layers=1, width=32, heads=4, experts=4, overrides={"sliding_window": 5})
    (verdict,) = verify(case(config, (8,)), [Layout.parse("tp=2,precision=float64")])
    scope = verdict.scope
    assert verdict.passed and scope is not None
    assert scope.split["tp"] > 0.9 and scope.layer_share > 0.9
    assert scope.windows == {"sliding_window=5": True}
    assert scope.experts_used + scope.experts_idle == 4 and scope.experts_used >= 2
    assert json.loads(json.dumps(verdict.to_json()))["scope"]["layers"] == {"MixtralDecoderLayer": 1}


def test_a_layout_that_crashes_is_one_verdict_and_the_others_stand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from meshwright.parallel import program

    plain = program.Program.forward_backward

    def dying(self: program.Program, *args: object, **kwargs: object) -> torch.Tensor:
        if self.mesh is not None and self.mesh.layout.degree("replicate") == 2:
            raise KeyError("planted")
        return plain(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(program.Program, "forward_backward", dying)
    words = ["verify", "--model", "tests.odd_models:chunks", "--steps", "1", "--json", "--sequence", "16", "--layout"]
    assert main([*words, "replicate=2", "shard=2"]) == 1
    first, second = json.loads(capsys.readouterr().out)["layouts"]
    assert "planted" in first["crashed"] and not first["passed"]
    assert second["passed"]


@pytest.mark.parametrize(("heads", "kv_heads", "parts"), [(32, 8, 2), (32, 8, 4), (8, 1, 2), (12, 4, 3), (6, 6, 2)])
def test_a_clone_keeps_the_ratio_of_heads(heads: int, kv_heads: int, parts: int) -> None:
    config = ModelConfig(name="llama", layers=4, width=64 * heads, heads=heads, kv_heads=kv_heads)
    small = shrink_config(config, parts=parts)
    assert small.heads and small.kv_heads and small.heads * kv_heads == small.kv_heads * heads
    assert small.kv_heads >= min(kv_heads, parts)
    assert build_meta(small, 64, 16).hf_config.num_key_value_heads == small.kv_heads


@pytest.mark.parametrize("name", further(["gemma3_text", "cohere2", "qwen3_next", "llama4_text", "jamba"], (0, 2)))
def test_a_clone_has_every_kind_of_layer_beside_its_neighbours(name: str) -> None:
    built = build_meta(ModelConfig(name=name, layers=16), 64, 32)
    wanted = kind_pairs(kinds_of_layers(built))
    assert len(wanted) > 1
    small = build_meta(with_every_kind(built, shrink_config(built.config)), 64, 32)
    assert wanted <= kind_pairs(kinds_of_layers(small))
    assert len(small.structure.layers) < 16


def test_few_layers_hold_every_pair() -> None:
    kinds = "sssssf" * 5
    chosen = choose_layers(kinds, 2)
    assert kind_pairs([kinds[place] for place in chosen]) == kind_pairs(kinds) and len(chosen) == 4
    assert len(choose_layers("aaaaaaaa", 3)) == 3
    odd = "a" + "b" * 9 + "c" + "b" * 9
    chosen = choose_layers(odd, 2)
    assert kind_pairs([odd[place] for place in chosen]) == kind_pairs(odd) and len(chosen) < 8


def test_streams_that_are_permuted_views_pass_through_a_split_backward() -> None:
    config = ModelConfig(name="tests.odd_models:streams")
    (verdict,) = verify(case(config, (8,)), [Layout.parse("pp=2,microbatches=4,schedule=zbv,precision=float64")])
    assert verdict.passed, verdict


@pytest.mark.parametrize("schedule", ["stages=1,schedule=zerobubble", "stages=2,schedule=zbv"])
def test_a_backward_that_can_t_come_in_halves_is_whole_in_the_first(schedule: str) -> None:
    config = ModelConfig(name="tests.odd_models:encoder_decoder", overrides={"encoders": 5})
    layout = Layout.parse(f"pp=2,microbatches=4,{schedule},precision=float64")
    layer_graph = analyse_model(build_meta(config), layout).layer_graph
    assert layer_graph is not None and layer_graph.whole_backward
    (verdict,) = verify(case(config, (8,)), [layout])
    assert verdict.passed, verdict


@pytest.mark.parametrize("layout", ["tp=2,sequence=true", "cp=2"])
def test_token_splits_of_a_model_without_layers_are_refused(layout: str) -> None:
    with pytest.raises(PlanError, match="no stack of repeated layers"):
        analyse_model(build_meta(ModelConfig(name="tests.odd_models:no_stack")), Layout.parse(layout))


def test_modules_of_one_s_own_split_their_tokens() -> None:
    (verdict,) = verify(case(chunked(0), (16, 8)), [Layout.parse("cp=2,precision=float64")])
    assert verdict.passed and verdict.scope is not None and verdict.scope.attention


def grown(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> Case:
    """A proof whose sharding table grows from a narrower clone; with ``wrong`` query rows go to other heads."""

    def interleaved(group: ShardingGroup, *layers: object) -> ShardingGroup | None:
        found = rescale_group(group, *layers)  # type: ignore[arg-type]
        if found is None or not found.heads:
            return found
        splits = []
        for split in found.splits:
            size = split.blocks[0].size // 2
            count = split.blocks[0].count
            halves = (Block(start=size * half * count, size=size, count=count) for half in (0, 1))
            splits.append(dataclasses.replace(split, blocks=tuple(halves)) if "q_proj" in split.name else split)
        return dataclasses.replace(found, splits=tuple(splits))

    if wrong:
        monkeypatch.setattr(table, "rescale_group", interleaved)
    config = ModelConfig(name="llama", layers=1, width=64, heads=8, kv_heads=2)
    return dataclasses.replace(case(config, (8,)), rescaled=True)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_table_that_grew_wrongly_is_seen(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (verdict,) = verify(grown(monkeypatch, wrong), [Layout.parse("tp=2,precision=float64")])
    assert verdict.outcome == ("wrong" if wrong else "passed")
    assert verdict.scope is not None and verdict.scope.grown


def test_a_model_that_gives_its_loss_alone_is_refused_by_name_under_cp() -> None:
    (verdict,) = verify(case(ModelConfig(name="tests.odd_models:loss_alone"), (8,)), [Layout.parse("cp=2")])
    assert verdict.outcome == "refused"
    assert "loss has terms (loss) that it computes from whole rows; use shard=2" in verdict.refused
