"""Bytes of model state per rank, by layout: what the runtime's own tensors add up to, beside the ZeRO paper's."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.plan import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSizes:
    """The model as numbers of trainable parameters."""

    total: int
    """All of them, tied ones once."""
    layers: tuple[int, ...]
    """Those of each repeated layer, in order."""

    @property
    def rest(self) -> int:
        """Those outside the layers: embedding, head, last norm."""
        return self.total - sum(self.layers)


def state_memory(layout: Layout, sizes: StateSizes) -> tuple[dict[str, int], dict[str, str]]:
    """Returns (bytes of the fullest rank, formula) for parameters, gradients and optimizer state.

    N is the number of parameters, d the degree of ``shard``, c the bytes of a compute element, w those of a master
    weight (and of a reduced gradient). Uneven dims add at most one row a weight.

    Source: Rajbhandari et al., ZeRO (SC 2020), section 3.1 (K = 12 bytes of optimizer state with float32 masters) and
    figure 1; that FSDP2 keeps no low-precision shard at rest, and that level 3 holds the layer at work, the one
    gathered ahead and the rest outside the layers, is the runtime's own property, checked by its tests.
    """
    shards, count = layout.degree("shard"), sizes.total
    wide = 8 if layout.precision == "float64" else 4
    narrow = 2 if layout.mixed else wide
    if not layout.zero and not layout.mixed:
        memory = {"parameters": wide * count, "gradients": wide * count, "optimizer": 2 * wide * count}
        return memory, {"parameters": "w N", "gradients": "w N", "optimizer": "2 w N"}
    if layout.zero == 3:
        widest = sorted(sizes.layers, reverse=True)[:2]
        parameters, told = narrow * (sizes.rest + sum(widest)), "c (rest + 2 largest layers)"
    else:
        parameters, told = narrow * count, "c N"
    whole = layout.zero == 1 and layout.microbatches > 1
    memory = {
        "parameters": parameters,
        "gradients": wide * count if whole else wide * count // shards,
        "optimizer": 3 * wide * count // shards,
    }
    return memory, {
        "parameters": told,
        "gradients": "w N" if whole else "w N / d",
        "optimizer": "3 w N / d",
    }


def paper_memory(layout: Layout, count: int) -> int:
    """Returns the ZeRO paper's bytes of model state per rank: c + g + K per parameter, divided as the level says.

    Source: Rajbhandari et al., ZeRO (SC 2020), figure 1, with compute elements and gradients of c bytes and K = 3w.
    """
    wide = 8 if layout.precision == "float64" else 4
    narrow = 2 if layout.mixed else wide
    shards = layout.degree("shard")
    divided = (3 * wide, narrow, narrow)[: layout.zero]
    whole = (3 * wide, narrow, narrow)[layout.zero :]
    return count * sum(divided) // shards + count * sum(whole)
