"""Random faults of ``chaos --random``, drawn from a seed: they follow from it and the run's ranks and nodes alone.

Drawn by time, a fault strikes in the step that the run has reached by then; drawn by steps, always in the same one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import ConfigError, nearest
from meshwright.monitor.progress import PROGRESS, RankStamp, read_progress, read_run_progress
from meshwright.resilience.run_lock import living_owners
from meshwright.train.faults import KINDS

PAUSE, NODE = "pause", "node"
RANDOM_KINDS = {
    **KINDS,
    PAUSE: "the rank is stopped, and continues after some seconds",
    NODE: "every rank of a node is killed in one step",
}
"""Kinds of random faults: `train.faults.KINDS`, and those made of several."""
DEFAULT_KINDS = ("kill", "exit", "raise", "nan", "slow", PAUSE)
"""Kinds that a run survives without a change of its losses or a wait for the hang limit; ``node`` too with several."""
JITTER = 0.25
"""A fault's time differs from its turn by up to this share of the interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The ranks of a run, as far as draws need them."""

    ranks: int
    """Number of ranks."""
    nodes: tuple[tuple[int, ...], ...] = ()
    """Ranks of each node; empty for a run of one node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """A fault that was drawn."""

    at_s: float
    """Seconds after the first look at the run; 0 for a fault that is drawn by steps."""
    kind: str
    """One of `RANDOM_KINDS`."""
    target: int
    """A rank; the number of a node for ``node``."""
    at_step: int = 0
    """The step of the run, counted from 1; 0 for a fault that is drawn by time."""

    @property
    def turn(self) -> float:
        """The step or the seconds that it is drawn for."""
        return self.at_step or self.at_s

    def __str__(self) -> str:
        """Returns ``12.3 s  kill rank 1`` or ``step 40  kill rank 1``."""
        when = f"step {self.at_step:5d}" if self.at_step else f"{self.at_s:8.1f} s"
        return f"{when}  {self.kind} {'node' if self.kind == NODE else 'rank'} {self.target}"


def draw_faults(
    world: World, seed: int, every: float, kinds: Sequence[str] = (), *, by_steps: bool = False
) -> Iterator[Draw]:
    """Yields faults without end: the same for the same world, seed, interval and kinds.

    Args:
        world: ranks and nodes of the run.
        seed: of the draws.
        every: mean seconds between faults, or steps.
        kinds: of `RANDOM_KINDS`; `DEFAULT_KINDS` when empty.
        by_steps: the interval is in steps.

    Raises:
        ConfigError: for an unknown kind, or ``node`` in a run of one node.
    """
    for kind in kinds:
        if kind not in RANDOM_KINDS:
            raise ConfigError(f"--kinds {kind}: unknown{nearest(kind, RANDOM_KINDS)}")
    if NODE in kinds and not world.nodes:
        raise ConfigError("--kinds node: the run is on one node; a lost node needs several")
    chosen = tuple(kinds) or (*DEFAULT_KINDS, *((NODE,) if world.nodes else ()))
    generator, turn = random.Random(seed), 0
    while True:
        turn += 1
        at = every * (turn + JITTER * generator.uniform(-1.0, 1.0))
        kind = generator.choice(chosen)
        target = generator.randrange(len(world.nodes) if kind == NODE else world.ranks)
        at_s, at_step = (0.0, max(1, round(at))) if by_steps else (round(at, 3), 0)
        yield Draw(at_s=at_s, kind=kind, target=target, at_step=at_step)


def read_world(run_dir: Path) -> World:
    """Reads the ranks and nodes of a run that is under way.

    Raises:
        ConfigError: when none is.
    """
    stamps = read_run_progress(run_dir)
    if not stamps or run_ended(run_dir):
        raise ConfigError(f"{run_dir} holds no run that is under way")
    ranks = {stamp.rank for stamp in stamps}
    generation = max(stamp.generation for stamp in stamps)
    nodes = []
    for path in sorted(run_dir.glob(f"node-*-{PROGRESS}"), key=_node_number):
        node_ranks = tuple(stamp.rank for stamp in read_progress(path) if stamp.generation == generation)
        nodes.append(tuple(rank for rank in node_ranks if rank in ranks))
    nodes = [node_ranks for node_ranks in nodes if node_ranks]
    return World(ranks=max(ranks) + 1, nodes=tuple(nodes) if len(nodes) > 1 else ())


def run_ended(run_dir: Path) -> bool:
    """Whether nobody trains in a run directory any more: no command owns it, and no rank lives that stamped."""
    if living_owners(run_dir):
        return False
    return all(stamp.phase == "done" or not _lives(stamp) for stamp in read_run_progress(run_dir))


def _lives(stamp: RankStamp) -> bool:
    try:
        os.kill(stamp.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _node_number(path: Path) -> int:
    return int(path.name.split("-")[1])
