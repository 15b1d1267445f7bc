"""A shard's rows of the outer weights and momentum, the outer step on them, and versions that sites still read.

With g_i the movements of a version and w_i their weights, g = sum_i w_i g_i:

    sync               b = momentum b + g;    theta = theta - lr (g + momentum b)         Nesterov; lr b without
    async, bounded     delta = delta + g;     theta = theta - lr g / N
      each N-th        b = momentum b + delta / N;    theta = theta - lr (g / N + momentum b);    delta = 0

The second is delayed Nesterov with c = 0: a movement acts at once, momentum once in N movements, so that one which is
already old isn't thrown further. N movements from one version, of equal weight, add up to the first.
Source: Liu et al., Asynchronous Local-SGD Training for Language Modeling (2024), algorithm 3.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from meshwright.sites.boxes import NamedBox, Shapes, relative_slices, shard_rows
from meshwright.sites.messages import Apply

Array = NDArray[np.floating]
Arrays = dict[str, Array]
_WEIGHTS, _MOMENTUM, _DELAYED = "weights", "outer_momentum", "delayed"


class StageError(Exception):
    """A round isn't staged as it should be, or a version isn't kept."""


class _StagedRound:
    """Movements of one round of a site, box by box."""

    def __init__(self, session: int, round_number: int, arrays: Arrays) -> None:
        self.session, self.round = session, round_number
        self.arrays = arrays
        self.boxes: set[NamedBox] = set()
        self.committed = False

    @property
    def elements(self) -> int:
        """Elements that have come."""
        return sum(named.elements for named in self.boxes)


class OuterWeights:
    """A shard of the server's state.

    Args:
        shapes: of all weights.
        dtype: of weights and momentum.
        shard: index of this shard.
        shards: number of shards.
    """

    def __init__(self, shapes: Shapes, dtype: str, shard: int, shards: int) -> None:
        self.shapes, self.dtype = dict(shapes), np.dtype(dtype)
        self.rows = {name: shard_rows(shape, shard, shards) for name, shape in self.shapes.items()}
        self._shard = shard
        self.version = -1
        self._weights, self._momentum, self._delayed = self._zeros(), self._zeros(), self._zeros()
        self._versions: dict[int, Arrays] = {}
        self._pins: dict[int, int] = {}
        self._staged: dict[int, list[_StagedRound]] = {}
        self._sessions: dict[int, int] = {}

    def _zeros(self) -> Arrays:
        arrays = {}
        for name, shape in self.shapes.items():
            start, stop = self.rows[name]
            arrays[name] = np.zeros((stop - start, *shape[1:]), dtype=self.dtype)
        return arrays

    @property
    def elements(self) -> int:
        """Elements of the weights on this shard."""
        return sum(array.size for array in self._weights.values())

    def admit(self, site: int, session: int) -> None:
        """Begins a site's session: what earlier ones staged without a commit goes."""
        self._sessions[site] = session
        self._staged[site] = [staged for staged in self._staged.get(site, []) if staged.committed]

    def open_stage(self, site: int, session: int, round_number: int) -> _StagedRound:
        """Returns what a site's round is staged in.

        Raises:
            StageError: for another session than the site's present one, or a round that was committed.
        """
        if self._sessions.get(site) != session:
            raise StageError(f"session {session} of site {site} has ended")
        rounds = self._staged.setdefault(site, [])
        for staged in rounds:
            if (staged.session, staged.round) == (session, round_number):
                if staged.committed:
                    raise StageError(f"round {round_number} of site {site} is committed")
                return staged
        # A new round of the session: one that was given up before it goes.
        rounds[:] = [staged for staged in rounds if staged.committed]
        rounds.append(_StagedRound(session, round_number, self._zeros()))
        return rounds[-1]

    def write(self, staged: _StagedRound, named: NamedBox, values: Array) -> None:
        """Writes a box of a movement; values: (elements,)."""
        slices = relative_slices(named.box, self.rows[named.name])
        target = staged.arrays[named.name][slices]
        target[...] = values.reshape(target.shape)
        staged.boxes.add(named)

    def commit(self, site: int, session: int, round_number: int) -> float:
        """Keeps a staged round until it is applied; returns the squared 2-norm of this shard's part of it.

        Raises:
            StageError: unless all of this shard's elements have come and are finite.
        """
        staged = self._find(site, session, round_number)
        if staged.elements != self.elements:
            raise StageError(f"round {round_number} of site {site}: {staged.elements} of {self.elements} elements came")
        squares = sum(float(np.vdot(array, array)) for array in staged.arrays.values())
        if not math.isfinite(squares):
            raise StageError(f"round {round_number} of site {site} holds values that aren't finite")
        staged.committed = True
        return squares

    def _find(self, site: int, session: int, round_number: int) -> _StagedRound:
        for staged in self._staged.get(site, []):
            if (staged.session, staged.round) == (session, round_number):
                return staged
        if not self.elements:
            # A shard without a row of any weight is sent nothing.
            return _StagedRound(session, round_number, self._zeros())
        raise StageError(f"round {round_number} of site {site} isn't staged")

    def _take(self, site: int, session: int, round_number: int) -> Arrays:
        staged = self._find(site, session, round_number)
        self._staged[site] = [other for other in self._staged.get(site, []) if other is not staged]
        return staged.arrays

    def seed(self, site: int, session: int, round_number: int) -> None:
        """Takes a staged round as the first weights, version 0."""
        self._weights, self.version = self._take(site, session, round_number), 0

    def apply(self, order: Apply) -> float:
        """Makes the next version; returns the squared 2-norm of this shard's part of the pseudo-gradient."""
        taken = [
            (self._take(site, session, round_number), weight) for site, session, round_number, weight in order.movements
        ]
        squares, weights = 0.0, Arrays()
        scale = 1.0 / order.momentum_every if order.momentum_every else 1.0
        for name, before in self._weights.items():
            mean = np.zeros_like(before)
            for arrays, weight in taken:
                mean += weight * arrays[name]
            squares += float(np.vdot(mean, mean))
            momentum, delayed = self._momentum[name], self._delayed[name]
            if order.momentum_every:
                delayed += mean
            if order.takes_momentum:
                momentum *= order.momentum
                momentum += delayed * scale if order.momentum_every else mean
                delayed[...] = 0
            direction = mean * scale
            if order.takes_momentum:
                direction = direction + order.momentum * momentum if order.nesterov else momentum
            # A new array: the one before may be pinned.
            weights[name] = before - order.lr * direction
        self._weights, self.version = weights, order.version
        self._release()
        return squares

    def pin(self, site: int, version: int) -> None:
        """Keeps the present version readable for a site, in place of its last.

        Raises:
            StageError: when it isn't the present one.
        """
        if version != self.version:
            raise StageError(f"version {version} isn't the present one, {self.version}")
        self._versions[version], self._pins[site] = self._weights, version
        self._release()

    def drop(self, site: int) -> None:
        """Forgets a site: its pinned version, and its open round."""
        self._pins.pop(site, None)
        self._sessions.pop(site, None)
        self._staged[site] = [staged for staged in self._staged.get(site, []) if staged.committed]
        self._release()

    def _release(self) -> None:
        for version in set(self._versions) - set(self._pins.values()):
            del self._versions[version]

    def pinned(self, site: int, session: int, version: int) -> Arrays:
        """Returns the rows of a version that is pinned for a site.

        Raises:
            StageError: when it isn't.
        """
        if self._sessions.get(site) != session or self._pins.get(site) != version:
            raise StageError(f"version {version} isn't pinned for session {session} of site {site}")
        return self._versions[version]

    def save(self, folder: Path) -> None:
        """Writes weights, momentum and what waits for it into ``folder/shard-I.safetensors``."""
        groups = ((_WEIGHTS, self._weights), (_MOMENTUM, self._momentum), (_DELAYED, self._delayed))
        tensors = {f"{prefix}/{name}": array for prefix, arrays in groups for name, array in arrays.items()}
        with open(folder / _file_name(self._shard), "wb") as file:
            file.write(save(tensors))
            file.flush()
            os.fsync(file.fileno())

    def load(self, folder: Path, version: int, saved_shards: int) -> None:
        """Reads this shard's rows of a state that any number of shards saved.

        Raises:
            StageError: when it doesn't hold all rows.
        """
        filled = 0
        for saved_shard in range(saved_shards):
            with safe_open(folder / _file_name(saved_shard), framework="np") as file:
                for prefix, arrays in (
                    (_WEIGHTS, self._weights),
                    (_MOMENTUM, self._momentum),
                    (_DELAYED, self._delayed),
                ):
                    for name, shape in self.shapes.items():
                        saved_start, saved_stop = shard_rows(shape, saved_shard, saved_shards)
                        start, stop = self.rows[name]
                        first, last = max(start, saved_start), min(stop, saved_stop)
                        if first < last:
                            rows = file.get_slice(f"{prefix}/{name}")[first - saved_start : last - saved_start]
                            arrays[name][first - start : last - start] = rows
                            filled += rows.size
        if filled != 3 * self.elements:
            raise StageError(f"{folder} holds {filled} of {3 * self.elements} elements")
        self.version = version


def _file_name(shard: int) -> str:
    return f"shard-{shard}.safetensors"
