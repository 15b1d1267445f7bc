"""Halves of a micro-batch beside what two forwards on two threads may mix up: random numbers, signals, devices."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

from meshwright.errors import PlanError
from meshwright.parallel.halves import RowCut
from meshwright.parallel.keyed_random import DrawnStates, seed_all
from meshwright.parallel.schedule_run import TensorKind
from meshwright.parallel.turns import Held, Turns, give_way
from meshwright.proof.verify import random_batches
from meshwright.spec.layout import Layout
from meshwright.train import session
from meshwright.train.config import TrainConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import analyse_model
from meshwright.train.share_balance import check_rebalance
from tests.contract.test_node_dispatch import ROWS, TOKENS, VOCAB, model
from tests.fake.recorder import build_rank
from tests.ranks.group import run_ranks

STEPS = 3


def test_a_model_that_draws_nothing_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward is done again where torch's generator has moved; the other half's start isn't such a draw."""
    monkeypatch.setattr(session, "may_draw", lambda _: True)
    layout = Layout.parse("shard=2,zero=2,ep=2,ep_halves=true")
    facts = analyse_model(model(), layout, None)

    def work(rank: int) -> int:
        program = build_rank(model(), layout, facts)
        assert program.dropout_rng is not None
        calls = []
        program.module.get_submodule("model.layers.0").register_forward_hook(lambda *_: calls.append(1))
        (batch,) = random_batches(1, ROWS, TOKENS, VOCAB, documents=False)
        first, last = layout.span(rank, ROWS)
        for step in range(STEPS):
            program.forward_backward(
                [MicroBatch(batch.tokens[first:last], batch.targets[first:last], None)], 1.0, (0, step)
            )
        return len(calls)

    assert run_ranks(2, work, timeout=250) == [2 * STEPS] * 2


def test_each_half_draws_on_from_its_own_seed() -> None:
    """A checkpoint that is computed again in backward, one half after the other, would else draw other numbers."""

    def draws(seed: int) -> list[float]:
        seed_all(seed)
        numbers = []
        for _ in range(3):
            numbers.append(float(torch.rand(())))
            give_way()
        return numbers

    drawn = DrawnStates()
    turns = Turns(torch.device("cpu"), [Held(drawn, drawn.OF_FORWARD)])
    assert list(turns.run(lambda: draws(1), lambda: draws(2))) == [draws(1), draws(2)]


def test_a_signal_in_the_other_half_ends_both() -> None:
    """A signal reaches the first half while it waits: the second one stops where it would give way next."""
    main, went_on = threading.main_thread(), []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def second() -> None:
        assert main.ident is not None
        signal.pthread_kill(main.ident, signal.SIGUSR2)
        time.sleep(0.2)  # by now the first half has ended
        for turn in range(3):
            give_way()
            went_on.append(turn)

    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            Turns(torch.device("cpu")).run(give_way, second)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not went_on


def test_the_second_half_computes_on_the_rank_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on the first GPU: where that stays its device, every rank of a node takes up memory there."""
    chosen: list[tuple[str, torch.device]] = []

    def set_device(device: torch.device) -> None:
        chosen.append((threading.current_thread().name, device))

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    device = torch.device("cuda", 3)
    turns = Turns(device)
    for _ in range(2):
        turns.run(give_way, give_way)
    assert chosen == [("second half", device)]


def test_a_sum_over_rows_between_stages_is_refused() -> None:
    """Both halves have one, and the stage behind would be handed the first one's alone."""
    kinds = [TensorKind(shape=(), dtype=torch.float32)], [TensorKind(shape=(), dtype=torch.float32)]
    one, other = (torch.tensor(value) for value in (1.0, 2.0))
    assert torch.equal(RowCut(kinds, kinds, kinds).join((one,), (one.clone(),))[0], one)
    with pytest.raises(PlanError, match=r"of shape \(\) between two stages of pp isn't the same .* drop ep_halves"):
        RowCut(kinds, kinds, kinds).join((one,), (other,))


def test_no_reader_is_left_with_a_row_that_has_no_halves() -> None:
    layout = Layout.parse("shard=2,zero=1,ep=2,ep_halves=true")
    with pytest.raises(PlanError, match=r"ep_halves=true needs two rows .* ep_overlap=2"):
        check_rebalance(TrainConfig(batch=8, rebalance=5), layout)
