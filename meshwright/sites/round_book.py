"""Decides, without sockets or tensors, when rounds become versions, who may go on, and who is forgotten.

Times are seconds of one monotonic clock, which the caller reads. A site is **live** while it was heard of within the
grace window. Its **clock** counts the rounds that it has committed; one that dials in takes the slowest live clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.sites.messages import Commit
from meshwright.sites.settings import ServerSettings


@dataclass(slots=True)
class SiteRecord:
    """A site, as the server knows it."""

    site: int
    run: str
    session: int
    heard_at: float
    clock: int
    tokens: float = 0.0
    """Target tokens of its last round."""
    last_session: int = 0
    last_round: int = -2
    """Session and round of its last commit."""
    awaits: tuple[int, int] | None = None
    """Session and round whose version it waits for."""


@dataclass(frozen=True, slots=True)
class CommittedRound:
    """A round that waits to become part of a version."""

    site: int
    commit: Commit
    at: float
    clock: int
    """Of the site, with this round."""


@dataclass(frozen=True, slots=True)
class NewVersion:
    """Decision: the next version, of some rounds with their weights in the order of their sum."""

    rounds: tuple[CommittedRound, ...]
    weights: tuple[float, ...]
    takes_momentum: bool
    quorum_at: float
    """When the grace window began."""


@dataclass(frozen=True, slots=True)
class Release:
    """Decision: a site may go on from the present version."""

    site: int
    round: int
    staleness: int
    waited_s: float
    clock: int
    slowest: int
    """Smallest clock of a live site."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Decision: a site has been silent for the grace window."""

    site: int
    silent_s: float


@dataclass(slots=True)
class RoundBook:
    """The rounds of all sites.

    Args:
        settings: how versions are made.
        version: the present version, -1 before the first weights.
    """

    settings: ServerSettings
    version: int = -1
    delayed: int = 0
    """Movements since the last update of the momentum."""
    opened_at: float = 0.0
    """When the server started."""
    started: bool = False
    """``sync``: whether as many sites as a quorum have been live at once, before which no version is made; after a
    restart the grace window bounds that wait."""
    sites: dict[int, SiteRecord] = field(default_factory=dict)
    """The live sites, by number."""
    _pending: list[CommittedRound] = field(default_factory=list)
    _waiting: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    """Round, its staleness and when it was committed, of sites whose round is applied."""
    _quorum_at: float | None = None

    def owner(self, site: int) -> str:
        """Returns the run that a live site's number belongs to; empty for none."""
        return self.sites[site].run if site in self.sites else ""

    def dial_in(self, site: int, run: str, session: int, now_s: float) -> None:
        """Begins a session of a site; a round that it committed before stays committed."""
        known = self.sites.pop(site, None)
        slowest = self.slowest_clock()
        clock = known.clock if known is not None else (slowest if slowest is not None else 0)
        self.sites[site] = SiteRecord(site, run, session, now_s, clock)
        if known is not None:
            self.sites[site].last_session, self.sites[site].last_round = known.last_session, known.last_round
            self.sites[site].tokens = known.tokens
        # Whoever waited in the session before is released by the one that asks (`reclaim`).
        self._waiting.pop(site, None)
        self.started = self.started or len(self.sites) >= self.settings.quorum

    def hear(self, site: int, now_s: float) -> None:
        """Notes a sign of life."""
        if site in self.sites:
            self.sites[site].heard_at = now_s

    def slowest_clock(self) -> int | None:
        """Returns the smallest clock of a live site; None without any."""
        return min((record.clock for record in self.sites.values()), default=None)

    def is_committed(self, site: int, session: int, round_number: int) -> bool:
        """Returns whether a round of a site's session was committed, applied or not."""
        record = self.sites.get(site)
        if any((each.commit.session, each.commit.round) == (session, round_number) for each in self._rounds_of(site)):
            return True
        return record is not None and (record.last_session, record.last_round) == (session, round_number)

    def _rounds_of(self, site: int) -> Iterator[CommittedRound]:
        return (each for each in self._pending if each.site == site)

    def commit(self, site: int, commit: Commit, now_s: float) -> None:
        """Takes in a round that is staged on all shards."""
        record = self.sites[site]
        record.heard_at, record.clock, record.tokens = now_s, record.clock + 1, commit.tokens
        record.last_session, record.last_round = record.awaits = commit.session, commit.round
        self._pending.append(CommittedRound(site, commit, now_s, record.clock))
        if commit.leaves:
            self.leave(site)

    def reclaim(self, site: int, session: int, round_number: int, now_s: float) -> None:
        """Lets a site that lost its connection wait again for the release of a round that it had committed."""
        record = self.sites[site]
        record.awaits = session, round_number
        if not any(each.commit.round == round_number for each in self._rounds_of(site)):
            self._waiting[site] = (round_number, 0, now_s)

    def leave(self, site: int) -> None:
        """Removes a site that has said so; what it committed stays."""
        self.sites.pop(site, None)
        self._waiting.pop(site, None)

    def next_decision(self, now_s: float) -> NewVersion | Release | Forget | None:
        """Returns what is to be done now; called until it returns None."""
        for record in list(self.sites.values()):
            silent_s = now_s - record.heard_at
            if silent_s > self.settings.grace_s:
                self.leave(record.site)
                return Forget(record.site, silent_s)
        for site in sorted(self._waiting):
            if (release := self._release(site, now_s)) is not None:
                return release
        if not self._pending:
            return None
        if self.settings.mode != "sync":
            return self._single_version()
        self.started = self.started or (self.version > 0 and now_s > self.opened_at + self.settings.grace_s)
        return self._sync_version(now_s) if self.started else None

    def _release(self, site: int, now_s: float) -> Release | None:
        round_number, staleness, committed_at = self._waiting[site]
        slowest = self.slowest_clock()
        assert slowest is not None  # the site itself is live
        clock = self.sites[site].clock
        if self.settings.mode == "bounded" and clock - slowest > self.settings.staleness:
            return None
        del self._waiting[site]
        return Release(site, round_number, staleness, now_s - committed_at, clock, slowest)

    def _sync_version(self, now_s: float) -> NewVersion | None:
        committed_sites = {each.site for each in self._pending}
        missing = self.sites.keys() - committed_sites
        # Sites that were forgotten don't count: a quorum never waits for the dead.
        needed = min(self.settings.quorum, len(self.sites.keys() | committed_sites))
        if self._quorum_at is None:
            if len(committed_sites) < needed:
                return None
            self._quorum_at = now_s
        if missing and now_s < self._quorum_at + self.settings.grace_s:
            return None
        rounds = tuple(sorted(self._pending, key=lambda each: (each.site, each.commit.round)))
        total = sum(each.commit.tokens for each in rounds)
        weights = tuple(each.commit.tokens / total if total > 0 else 0.0 for each in rounds)
        decision = NewVersion(rounds, weights, True, self._quorum_at)
        self._pending, self._quorum_at = [], None
        return decision

    def _single_version(self) -> NewVersion:
        each = self._pending.pop(0)
        # By tokens, as in a mean over the live sites' last rounds: sites of equal rounds have the weight 1.
        others = [record.tokens for record in self.sites.values() if record.tokens > 0 and record.site != each.site]
        mean = (sum(others) + each.commit.tokens) / (len(others) + 1)
        weight = each.commit.tokens / mean if mean > 0 else 0.0
        self.delayed += 1
        takes_momentum = self.delayed >= self.settings.momentum_every
        self.delayed = 0 if takes_momentum else self.delayed
        return NewVersion((each,), (weight,), takes_momentum, each.at)

    def versioned(self, decision: NewVersion, version: int) -> list[int]:
        """Notes that a version was made; returns its rounds' staleness, in their order.

        Args:
            decision: that was carried out.
            version: the new one.
        """
        staleness = [max(0, version - 1 - each.commit.base) for each in decision.rounds]
        self.version = version
        for each, stale in zip(decision.rounds, staleness):
            record = self.sites.get(each.site)
            if record is not None and record.awaits == (each.commit.session, each.commit.round):
                self._waiting[each.site] = (each.commit.round, stale, each.at)
        return staleness
