"""Halves of a micro-batch that take turns at the exchange with experts: what one device gives, and no byte more."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from meshwright.errors import PlanError
from meshwright.models.config import ModelConfig
from meshwright.parallel.row_exchange import Leg
from meshwright.proof.verify import random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import analyse_model
from tests.contract.test_expert_parallel import case, config, layouts, prove
from tests.contract.test_node_dispatch import ROWS, TOKENS, VOCAB, model, traffic_of
from tests.fake.recorder import build_rank
from tests.ranks.group import run_ranks
from tests.tiers import further


@pytest.mark.extended("test_every_axis_that_carries_tokens")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_models(name: str) -> None:
    # Dense first layers and shared experts of DeepSeek; three rows of a micro-batch are halves of one and two.
    prove(case(config(name, experts=6), rows=12), "shard=4,zero=1,ep=4,ep_node=2,ep_halves=true")


def test_every_axis_that_carries_tokens() -> None:
    prove(
        case(config("mixtral", experts=6), sequence=8),
        "shard=2,zero=2,ep=2,ep_halves=true,microbatches=2,recompute=full",
        "tp=2,ep=2,ep_halves=true",
    )


@pytest.mark.extended("test_every_axis_that_carries_tokens")
def test_pairs_of_axes_that_carry_tokens() -> None:
    prove(
        case(config("mixtral", experts=6), sequence=8),
        "tp=2,sequence=true,shard=2,zero=1,ep=2,ep_halves=true",
        "shard=4,zero=1,ep=4,ep_node=2,ep_halves=true,ep_overlap=2",
        "cp=2,shard=2,zero=1,ep=2,ep_halves=true,recompute=selective",
    )


def test_pipelines() -> None:
    # Halves of a backward would count once what two halves of rows use twice: zbv runs each backward whole.
    prove(
        case(config("mixtral", layers=4), rows=12),
        "pp=2,shard=2,zero=1,ep=2,ep_halves=true,microbatches=2,schedule=zbv",
    )
    layout = Layout.parse("pp=2,shard=2,zero=1,ep=2,ep_halves=true,microbatches=4,schedule=zbv")
    assert "ep_halves=true" in layout.unsplit_backward_reason and not layout.pipeline().splits_backward


@pytest.mark.extended("test_pipelines")
def test_more_pipelines() -> None:
    prove(
        case(config("mixtral", layers=4), rows=12),
        "pp=2,shard=2,zero=1,ep=2,ep_halves=true,microbatches=2",
        "pp=2,shard=2,zero=3,ep=2,ep_halves=true,microbatches=2,recompute=full",
        "pp=2,tp=2,ep=2,ep_halves=true,microbatches=3,schedule=interleaved",
    )


def own(overrides: dict[str, Any], dropout: float = 0.0) -> ModelConfig:
    return dataclasses.replace(config("mixtral"), overrides=overrides, dropout=dropout)


def test_random_numbers_are_those_of_each_row() -> None:
    prove(case(own({}, dropout=0.3)), "shard=2,zero=1,ep=2,ep_halves=true")


def test_a_loss_that_depends_on_calls_sees_the_halves() -> None:
    router = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    prove(case(own(router)), "shard=2,zero=1,ep=2,ep_halves=true", "shard=2,zero=1,ep=2,ep_halves=true,microbatches=2")


def test_documents_in_a_row() -> None:
    proof = dataclasses.replace(case(config("mixtral")), batches=random_batches(2, 8, 8, 61, documents=True))
    prove(proof, "shard=2,zero=1,ep=2,ep_halves=true", "pp=2,tp=2,ep=2,ep_halves=true,microbatches=2")


@pytest.mark.parametrize(
    "text", further(["shard=4,zero=1,ep=2", "shard=4,zero=2,ep=2,microbatches=2", "pp=2,shard=2,zero=1,ep=2"])
)
def test_weights_are_gathered_and_gradients_sent_once(text: str) -> None:
    # The experts' counts travel once for each half; a pipeline's first step also tries each half to learn its shapes.
    plain, halved = (traffic_of(text + more, every_pair=True) for more in ("", ",ep_halves=true"))
    for (_, one), (_, other) in zip(plain, halved):
        assert one.keys() == other.keys()
        assert all(one[axis] == other[axis] for axis in one.keys() - {"ep", "pp"})
        assert 0 < other["ep"] - one["ep"] < (200 if "pp" not in text else other["ep"] / 2)


def journeys_of(text: str) -> list[list[tuple[str, int]]]:
    """Returns of each rank, in order, what begins and ends in a step, each with a number of its way to the experts."""
    layout = Layout.parse(text)
    facts = analyse_model(model(), layout, None)

    def work(rank: int) -> list[tuple[str, int]]:
        program = build_rank(model(), layout, facts)
        (batch,) = random_batches(1, ROWS, TOKENS, VOCAB, documents=False)
        first, last = layout.span(rank, ROWS)
        events: list[tuple[str, int]] = []
        begin, end = Leg.begin, Leg.end

        def begin_noted(leg: Leg, *args: Any, **kwargs: Any) -> Any:
            events.append(("begin", id(leg)))
            return begin(leg, *args, **kwargs)

        def end_noted(leg: Leg) -> Any:
            events.append(("end", id(leg)))
            return end(leg)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Leg, "begin", begin_noted)
            patch.setattr(Leg, "end", end_noted)
            program.forward_backward([MicroBatch(batch.tokens[first:last], batch.targets[first:last], None)], 1, (0, 0))
        return events

    return run_ranks(4, work, timeout=250)


@pytest.mark.parametrize(
    ("more", "alone"),
    further([("", 8), (",ep_node=1", 8), (",ep_halves=true", 2), (",ep_halves=true,ep_node=1", 2)], (0, 2)),
)
def test_one_half_travels_while_the_other_computes(more: str, alone: int) -> None:
    for events in journeys_of(f"shard=4,zero=1,ep=4{more}"):
        under_way: set[int] = set()
        numbers = []
        for event, way in events:
            if event == "begin":
                under_way.add(way)
            else:
                numbers.append(len(under_way))
                under_way.remove(way)
        # Two layers, there and back, forward and backward; of halves all but the last of each pass go in twos.
        assert len(numbers) == (16 if "halves" in more else 8) and not under_way
        assert numbers.count(1) == alone and max(numbers) <= 2


def refusal(text: str, rows: int = 8) -> str:
    try:
        Layout.parse(text).check_batch(rows)
    except PlanError as error:
        return str(error)
    (verdict,) = verify(case(config("mixtral"), rows=rows), layouts(text))
    return verdict.refused


def test_what_cant_work_is_refused() -> None:
    assert "zero=2" in refusal("shard=2,zero=3,ep=2,ep_halves=true")
    assert "ep=2 or more" in refusal("replicate=2,ep_halves=true")
    assert "nearest that works: microbatches=2" in refusal("shard=2,zero=1,ep=2,ep_halves=true,microbatches=4")
    assert "nearest that works: 6 rows" in refusal("shard=3,zero=1,ep=3,ep_halves=true", rows=3)


def test_another_number_of_ranks_keeps_only_what_it_can() -> None:
    layout = Layout.parse("pp=2,shard=4,zero=3,ep=4,ep_halves=true")
    assert layout.with_degrees({"pp": 2, "shard": 2, "ep": 2}).ep_halves
    assert not layout.with_degrees({"shard": 4, "ep": 4}).ep_halves
    assert not layout.with_degrees({"pp": 2, "shard": 2}).ep_halves
    assert Layout.parse(str(layout)) == layout
