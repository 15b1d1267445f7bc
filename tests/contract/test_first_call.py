"""Rows or calls that depend on each other are refused in custom loops where readers or micro-batches divide rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.analysis.call_trial import CallFacts, CallTrial, as_trial_call
from meshwright.strategy import HybridParallelStrategy
from meshwright.strategy.one_device import OneDevice
from tests.contract.careless_loops.habit import shares, trained
from tests.own_models import VOCAB, gpt2, mean_loss, mixtral, rows
from tests.plain_model import PlainModel
from tests.ranks.group import run_ranks
from tests.tiers import further

MIXES, BY_ROWS = "depends on the other rows of the call", "by the rows that it sees and reads it in later calls"
IN_STEP = "reads it in later calls, and step() calls it for each micro-batch"


class Habit(PlainModel):
    """A model with one habit in its logits."""

    def __init__(self, habit: str) -> None:
        super().__init__(VOCAB, 12, 2)
        self.habit, self.calls, self.average = habit, 0, 0.0
        self.average_tensor = torch.zeros(())
        self.memory: torch.Tensor | None = None
        self.last: Any = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        self.calls += 1
        if self.habit == "norm of rows":
            return logits - logits.mean(0)
        if self.habit == "warm-up":
            return logits * min(1.0, self.calls / 4)
        if self.habit == "late change":
            return logits * (1.0 if self.calls < 500 else 2.0)
        if self.habit == "running mean":
            logits = logits * (1 + self.average)
            self.average = 0.9 * self.average + 0.1 * float(logits.detach().abs().mean())
        if self.habit == "running tensor":
            logits = logits * (1 + self.average_tensor)
            self.average_tensor = 0.9 * self.average_tensor + 0.1 * logits.detach().abs().mean()
        if self.habit == "memory of each row":
            earlier, self.memory = self.memory, logits.detach()
            logits = logits if earlier is None or earlier.shape != logits.shape else logits + 0.1 * earlier
        # what is only reported moves nothing
        self.last = (logits, logits.mean())
        return logits


class Capacity(nn.Module):
    """Four experts, each of which takes so many tokens of a call."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.embedding, self.router = nn.Embedding(VOCAB, 12), nn.Linear(12, 4)
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head, self.factor = nn.Linear(12, VOCAB), factor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        out, capacity = torch.zeros_like(flat), int(self.factor * len(flat) / 4)
        for number, expert in enumerate(self.experts):
            index = (chosen == number).nonzero()[:, 0][:capacity]
            out = out.index_add(0, index, expert(flat[index]) * weights[index, None])
        return self.head(x + out.view_as(x)).clone()


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind, _, factor = name.partition(" of ")
    return (Capacity(float(factor)) if kind == "capacity" else Habit(name)).double()


def loops(_rank: int, text: str, names: list[str], **options: Any) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    for name in names:
        strategy = HybridParallelStrategy(text, **options)
        try:
            outcome[name] = [strategy.mean(loss) for loss in trained(strategy, strategy.shard(build(name)))]
        except ConfigError as error:
            outcome[name] = str(error)
    return outcome


def on_one_device(name: str) -> list[float]:
    device = OneDevice()
    return [float(loss) for loss in trained(device, device.shard(build(name)))]


REFUSED = {
    "norm of rows": MIXES,
    "capacity of 1.0": MIXES,
    "capacity of 2.0": MIXES,
    "running mean": BY_ROWS,
    "running tensor": BY_ROWS,
}
EQUAL = ["none", "warm-up", "late change", "memory of each row", "capacity of 8"]


@pytest.mark.parametrize("text", further(["replicate=2", "shard=2,zero=3", "tp=2"], (0, 2)))
def test_readers_of_a_loop_equal_one_device_or_are_refused(text: str) -> None:
    # the trial of a split refuses a running mean by itself: it calls the model and its parts in turn
    names = [name for name in (*EQUAL, *REFUSED) if text != "tp=2" or not name.startswith("running")]
    wanted = {name: on_one_device(name) for name in names}
    for outcome in run_ranks(2, loops, text, list(wanted)):
        for name, losses in wanted.items():
            words = REFUSED.get(name) if text != "tp=2" else None
            if words:
                assert words in outcome[name] and "local_rows=True" in outcome[name], (name, outcome[name])
            else:
                assert outcome[name] == pytest.approx(losses, rel=1e-9), name


def test_rows_of_each_call_by_themselves_can_be_asked_for() -> None:
    for outcome in run_ranks(2, lambda rank: loops(rank, "replicate=2", list(REFUSED), local_rows=True)):
        assert all(isinstance(losses, list) for losses in outcome.values()), outcome


def stepping(_rank: int, text: str, names: list[str], microbatches: int) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    for name in names:
        model = build(name)
        strategy = HybridParallelStrategy(text)
        _, _ = strategy.shard(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss=mean_loss, microbatches=microbatches
        )
        try:
            outcome[name] = [strategy.step(batch) for batch in shares(strategy)]
        except ConfigError as error:
            outcome[name] = str(error)
    return outcome


def test_micro_batches_of_a_step_equal_one_device_or_are_refused() -> None:
    refused = {
        "norm of rows": MIXES,
        **dict.fromkeys(["warm-up", "late change", "running mean", "memory of each row"], IN_STEP),
    }
    for outcome in run_ranks(2, stepping, "pp=2", ["none", *refused], 2):
        assert outcome["none"] == pytest.approx(on_one_device("none"), rel=1e-9)
        for name, words in refused.items():
            assert words in outcome[name], (name, outcome[name])
    for outcome in run_ranks(2, stepping, "pp=2", ["warm-up", "norm of rows"], 1):
        assert IN_STEP in outcome["warm-up"]
        assert outcome["norm of rows"] == pytest.approx(on_one_device("norm of rows"), rel=1e-9)


class TokensFirst(nn.Module):
    """Takes tokens (S, B), as torch's recurrent layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(VOCAB, 8), nn.LSTM(8, 8), nn.Linear(8, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens))[0])


class CountsExperts(nn.Module):
    """Returns beside its logits as many numbers as a call has rows, which aren't of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(tokens)
        return self.head(x), x.mean((0, 1))[:4]


class CachedTable(nn.Module):
    """Keeps a table that it computes at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head, self.length = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB), 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] > self.length:
            self.length, self.table = tokens.shape[1], torch.arange(tokens.shape[1])[:, None] / 10
        return self.head(self.embedding(tokens) + self.table[: tokens.shape[1]])


@pytest.mark.parametrize("make", [gpt2, mixtral, TokensFirst, CountsExperts, CachedTable])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_models_whose_rows_stand_alone_show_nothing(make: Any, count: int) -> None:
    module = make().double()
    before, state = torch.get_rng_state(), dict(vars(module))
    tokens = rows()[0][0][:count]
    assert CallTrial(module, as_trial_call((tokens,), {})).facts() == CallFacts()
    assert torch.equal(before, torch.get_rng_state()) and state.keys() <= vars(module).keys()
