"""The server's decisions in simulated time: quorum, grace, the staleness bound, weights, sites that come and go."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from meshwright.errors import LaunchError
from meshwright.jobs import site_probe
from meshwright.sites.messages import Commit
from meshwright.sites.round_book import Forget, NewVersion, Release, RoundBook
from meshwright.sites.settings import Mode, ServerSettings
from meshwright.spec.layout import Layout
from meshwright.train.run_config import RunConfig


def commit(session: int, number: int, base: int = 0, tokens: float = 10.0, leaves: bool = False) -> Commit:
    figures = {"tokens": tokens, "loss": 1.0, "steps": 1, "raw_bytes": 0, "sent_bytes": 0}
    return Commit(session=session, round=number, base=base, leaves=leaves, **figures)  # type: ignore[arg-type]


def decide(book: RoundBook, now_s: float) -> list[NewVersion | Release | Forget]:
    decisions = []
    while (decision := book.next_decision(now_s)) is not None:
        if isinstance(decision, NewVersion):
            book.versioned(decision, book.version + 1)
        decisions.append(decision)
    return decisions


def book_of(mode: Mode, sites: int, **more: float) -> RoundBook:
    settings = {"quorum": sites, "grace_s": 5.0, "momentum": 0.5} | more
    book = RoundBook(ServerSettings(mode=mode, sites=sites, **settings), version=0)  # type: ignore[arg-type]
    for site in range(sites):
        book.dial_in(site, f"run{site}", 100 + site, 0.0)
    return book


def test_a_version_waits_for_a_quorum_and_then_for_the_grace_window_at_most() -> None:
    book = book_of("sync", 3, quorum=2)
    book.commit(0, commit(100, 0), 1.0)
    assert decide(book, 1.0) == []
    book.commit(1, commit(101, 0, tokens=30.0), 2.0)
    assert decide(book, 2.0) == []
    for site in range(3):
        book.hear(site, 6.0)
    assert decide(book, 6.9) == []
    version, *released = decide(book, 7.0)
    assert isinstance(version, NewVersion) and version.weights == (0.25, 0.75)
    assert [each.site for each in released if isinstance(each, Release)] == [0, 1]
    # The late round goes into the next version, with its staleness.
    book.commit(2, commit(102, 0), 7.5)
    book.commit(0, commit(100, 1, base=1), 8.0)
    book.commit(1, commit(101, 1, base=1), 8.0)
    version, *released = decide(book, 8.0)
    assert isinstance(version, NewVersion) and [each.site for each in version.rounds] == [0, 1, 2]
    assert [each.staleness for each in released if isinstance(each, Release)] == [0, 0, 1]


def test_a_quorum_never_waits_for_the_dead_nor_starts_without_the_late() -> None:
    book = RoundBook(ServerSettings(sites=2, quorum=2, grace_s=5.0, momentum=0.5), version=0)
    book.dial_in(0, "a", 100, 0.0)
    book.commit(0, commit(100, 0), 1.0)
    assert decide(book, 4.0) == []
    book.dial_in(1, "b", 101, 4.0)
    book.commit(1, commit(101, 0), 4.5)
    assert len(decide(book, 4.5)) == 3
    book.commit(0, commit(100, 1, base=1), 6.0)
    book.hear(0, 9.0)
    assert decide(book, 9.4) == []
    forgotten, version, release = decide(book, 9.6)
    assert isinstance(forgotten, Forget) and forgotten.site == 1 and isinstance(version, NewVersion)
    assert isinstance(release, Release) and release.site == 0


def test_a_lost_answer_is_given_again_and_a_new_process_gets_none() -> None:
    book = book_of("sync", 2)
    book.commit(0, commit(100, 0), 1.0)
    book.dial_in(0, "run0", 200, 1.5)
    assert book.is_committed(0, 100, 0) and not book.is_committed(0, 100, 1)
    book.reclaim(0, 100, 0, 1.5)
    book.commit(1, commit(101, 0), 2.0)
    assert [type(each).__name__ for each in decide(book, 2.0)] == ["NewVersion", "Release", "Release"]
    # Applied already, and the answer lost again.
    book.dial_in(0, "run0", 300, 2.5)
    book.reclaim(0, 100, 0, 2.5)
    assert [type(each).__name__ for each in decide(book, 2.5)] == ["Release"]
    book.commit(0, commit(300, 1, base=1), 3.0)
    book.dial_in(0, "run0", 400, 3.1)
    book.commit(1, commit(101, 1, base=1), 3.2)
    assert [getattr(each, "site", None) for each in decide(book, 3.2)] == [None, 1]


@pytest.mark.parametrize("seed", range(20))
def test_no_site_starts_a_round_further_ahead_than_the_bound(seed: int) -> None:
    """Random speeds, deaths and returns: the lead at each release is at most s, and nobody live waits for the dead."""
    draw = random.Random(seed)
    staleness = draw.randrange(3)
    book = book_of("bounded", 4, staleness=staleness, momentum_every=4)
    ready = dict.fromkeys(range(4), 0.0)
    session, rounds = dict(enumerate(range(100, 104))), dict.fromkeys(range(4), 0)
    dead_until = dict.fromkeys(range(4), 0.0)
    waiting: dict[int, float] = {}
    longest_wait, now = 0.0, 0.0
    for _ in range(3000):
        now += 0.05
        for site in range(4):
            if now < dead_until[site]:
                continue
            if site not in book.sites:
                session[site] += 1000
                book.dial_in(site, f"run{site}", session[site], now)
                rounds[site], ready[site] = 0, now + draw.random()
                waiting.pop(site, None)
            book.hear(site, now)
            if draw.random() < 0.001:
                dead_until[site] = now + draw.choice((2.0, 20.0))
            elif site not in waiting and now >= ready[site]:
                book.commit(site, commit(session[site], rounds[site], base=book.version), now)
                rounds[site] += 1
                waiting[site] = now
        for decision in decide(book, now):
            if isinstance(decision, Release):
                assert decision.clock - decision.slowest <= staleness
                assert decision.slowest == min(record.clock for record in book.sites.values())
                longest_wait = max(longest_wait, now - waiting.pop(decision.site, now))
                ready[decision.site] = now + draw.random() * (1 + decision.site)
    # A round lasts at most 4 s, and a dead site is waited for during the grace window at most.
    assert longest_wait <= (staleness + 1) * 4 + 5.0 + 4.2
    assert book.version > 100


def test_momentum_moves_once_in_as_many_rounds_as_asked() -> None:
    book = book_of("async", 2, momentum_every=2)
    taken = []
    for number in range(4):
        book.commit(number % 2, commit(100 + number % 2, number // 2, tokens=10.0 * (1 + number % 2)), 1.0)
        taken += [each for each in decide(book, 1.0) if isinstance(each, NewVersion)]
    assert [each.takes_momentum for each in taken] == [False, True, False, True]
    assert [each.weights[0] for each in taken] == pytest.approx([1.0, 20 / 15, 10 / 15, 20 / 15])


def test_a_site_says_that_no_server_answers_however_long_its_last_pause_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("ab" * 32)
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setattr(site_probe, "_ATTEMPTS_S", -5.0)
    outer = {"meet": "127.0.0.1:9", "key_file": str(tmp_path / "key"), "sites": 2}
    config = RunConfig.from_dict({"outer": outer, "run": str(tmp_path)})
    model: Any = SimpleNamespace(built=SimpleNamespace(module=nn.Linear(2, 2)), fingerprint="none")
    with pytest.raises(LaunchError, match=r"no outer server answers at outer\.meet = 127\.0\.0\.1:9"):
        site_probe.probe_server(config, model, Layout.parse("replicate=1"))
