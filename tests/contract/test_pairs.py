"""A forward and a backward that run as one action: in turns, where both exchange rows with experts."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch

from meshwright.models.build import build_meta
from meshwright.parallel.row_exchange import Leg
from meshwright.proof.verify import random_batches
from meshwright.spec.layout import Layout
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import analyse_model
from tests.contract.test_expert_parallel import case, config, prove
from tests.contract.test_node_dispatch import TOKENS, VOCAB
from tests.fake.recorder import build_rank
from tests.ranks.group import run_ranks
from tests.tiers import further

ROWS = 12
V = "schedule=dualpipev"


def test_pairs_equal_one_device() -> None:
    prove(
        case(config("mixtral", layers=4), rows=ROWS),
        f"pp=2,shard=2,zero=1,ep=2,microbatches=6,{V}",
        f"pp=2,shard=2,zero=2,ep=2,ep_node=1,microbatches=6,{V},recompute=full",
    )


@pytest.mark.extended("test_pairs_equal_one_device")
def test_pairs_of_more_layouts_equal_one_device() -> None:
    prove(
        case(config("mixtral", layers=4), rows=ROWS),
        f"pp=2,shard=2,zero=3,ep=2,microbatches=6,{V},recompute=selective",
        f"pp=2,tp=2,sequence=true,ep=2,ep_overlap=2,microbatches=6,{V}",
    )


@pytest.mark.extended("test_pairs_equal_one_device")
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_models(name: str) -> None:
    prove(case(config(name, layers=4, experts=6), rows=ROWS), f"pp=2,shard=2,zero=1,ep=2,microbatches=6,{V}")


@pytest.mark.parametrize("more", further(["", ",recompute=full"], (1,)))
def test_random_numbers_are_those_of_each_row(more: str) -> None:
    drops = dataclasses.replace(config("mixtral", layers=4), dropout=0.3)
    prove(case(drops, rows=ROWS), f"pp=2,shard=2,zero=1,ep=2,microbatches=6,{V}{more}")


def journeys_of(text: str) -> list[list[tuple[str, int, str]]]:
    """Returns of each rank what begins and ends in a step: the event, its way to the experts, the thread."""
    layout, model = Layout.parse(text), build_meta(config("mixtral", layers=4), vocab=VOCAB, context=TOKENS)
    facts = analyse_model(model, layout, None)

    def work(rank: int) -> list[tuple[str, int, str]]:
        program = build_rank(model, layout, facts)
        (batch,) = random_batches(1, ROWS, TOKENS, VOCAB, documents=False)
        first, last = layout.span(rank, ROWS)
        rows = zip(batch.tokens[first:last].split(1), batch.targets[first:last].split(1))
        batches = [MicroBatch(tokens, targets, None) for tokens, targets in rows]
        program.forward_backward(batches, 1, (0, 0))  # its trial forward is no part of a step
        events: list[tuple[str, int, str]] = []
        begin, end = Leg.begin, Leg.end

        def begin_noted(leg: Leg, *args: Any, **kwargs: Any) -> Any:
            events.append(("begin", id(leg), threading.current_thread().name))
            return begin(leg, *args, **kwargs)

        def end_noted(leg: Leg) -> Any:
            events.append(("end", id(leg), threading.current_thread().name))
            return end(leg)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Leg, "begin", begin_noted)
            patch.setattr(Leg, "end", end_noted)
            program.forward_backward(batches, 1, (0, 1))
        return events

    return run_ranks(4, work, timeout=250)


@pytest.mark.parametrize(("schedule", "pairs"), [("dualpipev", True), ("zbv", False)])
def test_a_pass_travels_while_the_other_computes(schedule: str, pairs: bool) -> None:
    layout = f"pp=2,shard=2,zero=1,ep=2,microbatches=6,schedule={schedule}"
    actions = Layout.parse(layout).pipeline().actions
    for rank, events in enumerate(journeys_of(layout)):
        under_way: set[int] = set()
        numbers = []
        for event, way, _ in events:
            if event == "begin":
                under_way.add(way)
            else:
                numbers.append(len(under_way))
                under_way.remove(way)
        # Two stages of a layer, there and back, forward and backward, six micro-batches.
        assert len(numbers) == 2 * 2 * 2 * 6 and not under_way
        # A pair has two journeys of each pass, all but the last of which begin before another's end.
        count = sum(len(action.parts) == 2 for action in actions[rank // 2])
        assert (count > 0) == pairs
        assert sum(number == 2 for number in numbers) == 3 * count
        assert len({thread for _, _, thread in events}) == (2 if pairs else 1)


def test_a_backward_that_fails_ends_its_pair() -> None:
    layout = Layout.parse(f"pp=2,shard=2,zero=1,ep=2,microbatches=6,{V}")
    model = build_meta(config("mixtral", layers=4), vocab=VOCAB, context=TOKENS)
    facts = analyse_model(model, layout, None)

    def work(rank: int) -> list[str]:
        program = build_rank(model, layout, facts)
        (batch,) = random_batches(1, ROWS, TOKENS, VOCAB, documents=False)
        first, last = layout.span(rank, ROWS)
        rows = zip(batch.tokens[first:last].split(1), batch.targets[first:last].split(1))
        end = Leg.end

        def end_or_fail(leg: Leg) -> list[torch.Tensor]:
            if threading.current_thread().name == "second half":
                raise ValueError("no way")
            return end(leg)

        messages = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Leg, "end", end_or_fail)
            try:
                program.forward_backward([MicroBatch(*pair, None) for pair in rows], 1, (0, 0))
            except RuntimeError as error:
                cause: BaseException | None = error
                while cause is not None:
                    messages.append(str(cause))
                    cause = cause.__cause__
        return messages

    # What failed is told, not that the forward beside it was ended.
    for messages in run_ranks(4, work, timeout=100):
        assert "Failed to run stage backward" in messages[0] and messages[-1] == "no way"
