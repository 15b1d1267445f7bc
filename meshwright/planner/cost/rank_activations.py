"""Bytes of the activations of N layouts' ranks, (N, P), by how many layers of the model recompute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.array_types import Index
from meshwright.planner.cost.layout_batch import Array
from meshwright.planner.cost.measured_bytes import ActivationBytes
from meshwright.planner.cost.stages import StageCut, block_kinds, recomputed_layers
from meshwright.planner.cost.step_memory import ActivationParts
from meshwright.spec.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class RankActivations:
    """What the activations of each rank are computed of, for any share of recomputed layers; K kinds of layer."""

    shape: ModelShape
    """The model."""
    cuts: Sequence[StageCut]
    """Distinct cuts of the model."""
    cut_index: Array
    """Each layout's index among them, (N,) int64."""
    counts: Array
    """Layers of each kind of each rank, (K, N or 1, P)."""
    saved: Array
    """Bytes that a layer of each kind saves without recompute, (K, N, 1)."""
    spared: Array
    """Of these, bytes that it doesn't save where it recomputes, (K, N, 1)."""
    spared_rest: Array
    """The same of the other layers, where these recompute in another way, (K, N, 1)."""
    ends: Array
    """Bytes that the model's ends save, (N, P)."""
    working: Array
    """Most bytes beside what is saved while the backward of a layer runs, (N, P)."""
    in_flight: Array
    """Micro-batches in flight, (N, P)."""
    mode: Array
    """How layers recompute: index into `RECOMPUTES`, (N, 1)."""
    rest: Array
    """The same of all other layers, (N, 1)."""
    measured: ActivationBytes | None
    """What the modules take over the closed form, where they were read."""

    def take(self, index: Index) -> RankActivations:
        """Returns those of some of the layouts."""
        return RankActivations(
            shape=self.shape,
            cuts=self.cuts,
            cut_index=self.cut_index[index],
            counts=self.counts[:, index] if self.counts.shape[1] > 1 else self.counts,
            saved=self.saved[:, index],
            spared=self.spared[:, index],
            spared_rest=self.spared_rest[:, index],
            ends=self.ends[index],
            working=self.working[index],
            in_flight=self.in_flight[index],
            mode=self.mode[index],
            rest=self.rest[index],
            measured=self.measured,
        )

    def parts(self, recompute_share: Array) -> ActivationParts:
        """Returns the bytes where a share of the model's layers recompute, (N,)."""
        share, recomputed = recompute_share[:, None], self._recomputed(recompute_share)
        spared = self.spared * recomputed + self.spared_rest * (self.counts - recomputed)
        saved = (self.saved * self.counts - spared).sum(axis=0) + self.ends
        # A layer is the mean of those that recompute and of the others.
        spared = self.spared * share + self.spared_rest * (1.0 - share)
        layer = ((self.saved - spared) * (self.counts > 0)).max(axis=0)
        saved, layer, ends, working = saved * self.in_flight, layer, self.ends * self.in_flight, self.working
        if self.measured is not None:
            # The modules' own bytes over the closed form's, read once on one device, hold for every layout. What exists
            # at once is the most of any layer, so that one recomputed layer has as much as all.
            layers = self.counts.sum(axis=0)
            rank_share = np.where(layers > 0, recomputed.sum(axis=0) / np.maximum(layers, 1.0), share)
            ratio = self.measured.saved.ratio(self.mode, rank_share, self.rest)
            saved, layer, ends = saved * ratio, layer * ratio, ends * ratio
            working = working * self.measured.working.ratio(self.mode, np.ceil(share), self.rest)
        return ActivationParts(saved=saved, layer=layer, ends=ends, working=working)

    def _recomputed(self, recompute_share: Array) -> Array:
        """Returns layers of each kind that recompute on each rank, (K, N, P) or what broadcasts to it.

        They are whole ones where the model's layers have several ranks or kinds.
        """
        is_whole = recompute_share >= 1.0
        kind_count, _, ranks = self.counts.shape
        if is_whole.all():
            return self.counts
        if ranks == 1 and kind_count == 1:
            return self.counts * recompute_share[:, None]
        kinds, layers = block_kinds(self.shape)[0], len(self.shape.blocks)
        numbers = np.rint(recompute_share * layers).astype(int)
        keys, key_index = np.unique(numbers * len(self.cuts) + self.cut_index, return_inverse=True)
        recomputed = np.empty((len(keys), kind_count * ranks))
        places = [cut.places_in_counts(kinds) for cut in self.cuts]
        for row, key in zip(recomputed, keys.tolist()):
            number, cut = divmod(key, len(self.cuts))
            row[:] = np.bincount(places[cut][recomputed_layers(number, layers)], minlength=row.size)
        return recomputed.reshape(-1, kind_count, ranks).transpose(1, 0, 2)[:, key_index]
