"""Which keys and values pass between the ranks of ``cp`` under ``attention=ring``: one rule for runtime and planner.

A row of S tokens is cut into 2 c runs of equal length for c ranks; rank i has run i, the early one, and run
2 c - 1 - i, the late one, so that under a causal mask all ranks have as many pairs of query and key. In step t of the
ring a rank computes with the keys of the rank t places before it. Of these it gets what some query of its own sees: no
run that lies after its queries, and of a run at the edge of a window the last tokens alone.
Source: Liu et al., Ring Attention (2023), section 3; Brandon et al., Striped Attention (2023), for the balance.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.placement import Span


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The ring of keys and values of one attention."""

    ranks: int
    """Degree of ``cp``, c."""
    run_tokens: int
    """Tokens of a run, S / (2 c)."""
    window: int = 0
    """Number of tokens that a query sees, its own with them; 0 for all before it."""

    def runs(self, rank: int) -> tuple[int, int]:
        """Returns the numbers of a rank's early and late run."""
        return rank, 2 * self.ranks - 1 - rank

    def spans(self, rank: int) -> tuple[Span, Span]:
        """Returns the tokens of a rank's early and late run in the row."""
        early, late = ((run * self.run_tokens, (run + 1) * self.run_tokens) for run in self.runs(rank))
        return early, late

    def first_seen(self, query_run: int, key_run: int) -> int:
        """Returns the first token of a run of keys that a run of queries sees; the run's length where it sees none."""
        if key_run > query_run:
            return self.run_tokens
        if not self.window:
            return 0
        # The first query looks back furthest: to token `distance` - window + 1 of the run of keys.
        distance = (query_run - key_run) * self.run_tokens
        return min(self.run_tokens, max(0, distance - self.window + 1))

    def first_sent(self, owner: int, reader: int) -> tuple[int, int]:
        """Returns the first token of the owner's early and late run that a reader needs; a run's length for none."""
        early, late = (
            min(self.first_seen(query_run, key_run) for query_run in self.runs(reader)) for key_run in self.runs(owner)
        )
        return early, late

    def tokens_sent(self, owner: int, reader: int) -> int:
        """Returns the number of tokens of a row whose keys and values an owner sends to another rank."""
        return 0 if owner == reader else sum(self.run_tokens - first for first in self.first_sent(owner, reader))

    def has_traffic(self, step: int) -> bool:
        """Returns whether any rank needs keys of the rank ``step`` places before it."""
        return any(self.tokens_sent((rank - step) % self.ranks, rank) for rank in range(self.ranks))
