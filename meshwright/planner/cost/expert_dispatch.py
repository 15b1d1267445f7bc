"""Prices the exchange of tokens and experts (`Layout.ep_node`): once for each expert, for each rank, or for each node.

The router is taken to choose every k of a layer's X experts as often. Then a token has an expert among x of them with
the chance 1 - C(X-x, k) / C(X, k). Where it first chooses some groups of experts (DeepSeek-V3: 4 of 8), it is taken to
choose these as often too, and then k of their experts. Source: the hypergeometric distribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from meshwright.array_types import Values
from meshwright.cluster import traffic
from meshwright.cluster.device import Device
from meshwright.planner.cost.axis_columns import SHARDS
from meshwright.planner.cost.element_bytes import compute_bytes
from meshwright.planner.cost.groups import CollectiveTimes, Machine, WireTime
from meshwright.planner.cost.kernels import move_s
from meshwright.planner.cost.layout_batch import Array, LayoutBatch, PricedJob
from meshwright.spec.compression import row_bytes
from meshwright.spec.layout_rules import fits_expert_node
from meshwright.spec.model_shape import LayerShape

CHOICE_BYTES = 8
"""Bytes of an expert and its weight, which travel with a token that goes to a node or rank."""
ROW_MOVES = 7.0
"""Times that a pass moves the bytes of a row which it sends on, beside what it moves by expert. Counted at the kernels
of one forward of DeepSeek-V3's router over 8 ranks: 3.65 rows of a token move those of 12 more where experts' weights
are in bf16, and of 24 in float32."""
ROUND_MOVES, ROUND_BYTES = 9.0, 2.0
"""Times that the bytes of an unrounded value are moved to round it to float8 and to decode it, and bytes beside.
Counted at `parallel.row_codec.RowCodec`: magnitudes, the largest of each run, scaling and narrowing read or write each
value six times; widening it and scaling it back three times; and either touches its byte once."""
FUSED_ROUND_MOVES = 3.0
"""The same where torch.compile fuses them: two kernels that round read a value, and one that decodes writes it."""
ROUND_OPERATIONS, FUSED_ROUND_OPERATIONS = 22.0, 3.0
"""Kernels that round and decode a message of rows, eager and fused, counted on a simulated GPU."""
EXCHANGE_OPERATIONS = 40.0
"""Operators that a pass runs for each further chunk of tokens: sorts and counts, copies, sums, the experts' own."""
LEAST_GAIN = 0.1
"""Share by which an exchange must be faster than that by expert, as its small kernels aren't priced."""
TURN_S = 5e-5
"""Seconds in which the host hands over from one half of a micro-batch to the other: more than the 15 us seen on two
idle cores, and never measured beside a GPU. Two hundred of them are in ``python -m timeit -s "import torch; from
meshwright.parallel.turns import Turns, give_way; t = Turns(torch.device('cpu')); f = lambda: [give_way() for _ in
range(100)]" "t.run(f, f)"``."""


Pieces = tuple[Values, Values]
"""Seconds that a layer's pass computes between its journeys: all but the experts, and the experts."""


def visit_share(layer: LayerShape, local_experts: Values) -> Values:
    """Returns the chance that a token chooses one of a rank's experts, of the shape of ``local_experts``.

    Args:
        layer: with experts.
        local_experts: numbers of neighbouring experts, which begin where a group does or lie inside one; means where
            ranks don't divide the experts.
    """
    sizes, places = np.unique(np.asarray(local_experts, float), return_inverse=True)
    shares = np.array([_visit_share(layer, float(size)) for size in sizes])[places.reshape(np.shape(local_experts))]
    return float(shares) if np.ndim(local_experts) == 0 else shares


def _visit_share(layer: LayerShape, local_experts: float) -> float:
    """Returns 1 - the chance that none is chosen, summed over how many of their groups may be."""
    groups, chosen = (layer.expert_groups, layer.chosen_groups) if layer.expert_groups else (1, 1)
    group_size = layer.experts / groups
    touched = max(1, math.ceil(local_experts / group_size))
    missed = 0.0
    for hit in range(max(0, chosen - (groups - touched)), min(touched, chosen) + 1):
        ways = math.comb(touched, hit) * math.comb(groups - touched, chosen - hit) / math.comb(groups, chosen)
        candidates, own = chosen * group_size, local_experts * hit / touched
        for already in range(layer.active_experts):
            ways *= max(0.0, candidates - own - already) / (candidates - already)
        missed += ways
    return 1.0 - missed


@dataclass(frozen=True, slots=True)
class ExpertExchange:
    """The exchange of a layer's tokens with its experts, for N layouts."""

    layouts: LayoutBatch
    groups: CollectiveTimes
    device: Device
    tokens: Values
    """That a rank sends, (N,)."""
    element: float
    """Bytes of an element."""
    is_compiled: bool = False
    """Whether layers are compiled."""

    @property
    def is_fused(self) -> bool:
        """Whether torch.compile fuses what rounds a row, and what decodes it: on GPUs that have float8."""
        return self.is_compiled and self.device.units > 0 and "fp8" in self.device.peak_flops

    def wire(self, layer: LayerShape) -> WireTime:
        """Returns the exchanges of one pass of a layer with experts: tokens out, and what comes back."""
        chunks = np.maximum(1.0, self.layouts.ep_overlap) * np.where(self.layouts.ep_halves > 0, 2.0, 1.0)
        exact_bytes = layer.width * self.element
        size = self.tokens / chunks * layer.active_experts * exact_bytes
        wire = self.groups.wire(traffic.all_to_all_s, size * self._mean_share(layer), self.groups.ep).scaled(2.0)
        wire = wire + self._rounding(layer, size / exact_bytes)
        is_by_node = self.layouts.ep_node > 0
        wire = self._by_node(layer, exact_bytes, chunks).where(is_by_node, wire) if is_by_node.any() else wire
        return wire.scaled(chunks)

    def _out_share(self, layer: LayerShape) -> Array:
        """Returns the bytes of a row on its way to experts over those of its values, (N,)."""
        rounded_share = row_bytes(layer.width) / (layer.width * self.element)
        return np.where(self.layouts.compress_tokens > 0, rounded_share, 1.0)

    def _mean_share(self, layer: LayerShape) -> Array:
        """Returns the same of the ways there and back, where nothing is rounded, (N,)."""
        return np.asarray((1.0 + self._out_share(layer)) / 2.0)

    def _rounding(self, layer: LayerShape, rows: Values) -> WireTime:
        """Returns what rounding and decoding so many rows takes, (N,), which lies on their way."""
        moves = FUSED_ROUND_MOVES if self.is_fused else ROUND_MOVES
        moved_bytes = rows * layer.width * (moves * self.element + ROUND_BYTES)
        return WireTime(move_s(np.where(self.layouts.compress_tokens > 0, moved_bytes, 0.0), self.device))

    @property
    def round_operations(self) -> Array:
        """Operators that round and decode in a pass of a layer, (N,)."""
        legs = np.where(self.layouts.ep_node > 1, 2.0, 1.0) * np.maximum(1.0, self.layouts.ep_overlap)
        each = FUSED_ROUND_OPERATIONS if self.is_fused else ROUND_OPERATIONS
        return np.where(self.layouts.compress_tokens > 0, legs * each, 0.0)

    def kept_bytes(self, layer: LayerShape) -> Array:
        """Returns the bytes that a pass of a layer keeps of it for recompute (`Layout.ep_keep`), (N,).

        What came for this rank's experts; and what came back, which by expert the gradients of weights need, and of
        which by node the sum by token is kept.
        """
        ep, out_share = self.layouts.ep, self._out_share(layer)
        by_node_rows = ep * visit_share(layer, layer.experts / ep) * out_share + 1.0
        rows = np.where(self.layouts.ep_node > 0, by_node_rows, layer.active_experts * (1.0 + out_share))
        kept_bytes = self.tokens * rows * layer.width * self.element
        return np.asarray(np.where(self.layouts.ep_keep > 0, kept_bytes, 0.0))

    def _by_node(self, layer: LayerShape, exact_bytes: float, chunks: Array) -> WireTime:
        """Returns the exchanges of a chunk where a token travels once to each node, and inside it once to each rank."""
        ep, run = self.layouts.ep, np.maximum(1.0, self.layouts.ep_node)
        inside, across = self.groups.ep.split_runs(run)
        node_share, rank_share = (visit_share(layer, layer.experts * ranks / ep) for ranks in (run, 1.0))
        tokens = self.tokens / chunks
        sent, forwarded = tokens * ep / run * node_share, np.where(run > 1, tokens * ep * rank_share, 0.0)
        # On the way out a token takes its experts and their weights along.
        message_bytes = exact_bytes * self._mean_share(layer) + layer.active_experts * CHOICE_BYTES / 2.0
        wire = self.groups.wire(traffic.all_to_all_s, sent * message_bytes, across)
        wire = wire + self.groups.wire(traffic.all_to_all_s, forwarded * message_bytes, inside)
        wire = wire.scaled(2.0) + self._rounding(layer, sent + forwarded)
        return wire + WireTime(move_s((sent + forwarded) * exact_bytes * ROW_MOVES, self.device))


def overlapped_s(exchange_s: Values, chunks: Values, whole_s: Values, chunk_s: Values) -> Array:
    """Returns the seconds of an exchange that chunks of tokens don't hide, and by which they slow the experts, (N,).

    Of n chunks the first travels there and the last back beside no product: the longer of the exchange, and of the
    products with an n-th of it, less the products of all tokens at once.

    Args:
        exchange_s: of all chunks, there and back.
        chunks: n.
        whole_s: of the experts' products, of all tokens.
        chunk_s: of one chunk.
    """
    return np.asarray(np.maximum(exchange_s, chunks * chunk_s + exchange_s / chunks) - whole_s)


def turns_s(exchange_s: Values, rest_s: Values, experts_s: Values, ends: Values = 0.0) -> Array:
    """Returns the seconds of a layer's pass whose two halves take turns (`parallel.halves`), (N,).

    While the first half's tokens travel there the second computes what isn't experts, and while the second's do, the
    first computes its experts; the ways back lie under the second's experts and the first's next layer. So a journey of
    each half lies under the experts of one, and under the rest of one.

    Args:
        exchange_s: of both halves, there and back.
        rest_s: of all but the experts' products, of both halves.
        experts_s: of the experts' products, of both halves.
        ends: ends of a stage's pass for each layer, where the last journey, or the first rest, has nothing beside it.
    """
    steady_s = np.maximum(rest_s, exchange_s / 2.0) + np.maximum(experts_s, exchange_s / 2.0)
    return np.asarray(steady_s + ends * np.minimum(exchange_s / 4.0, rest_s / 2.0))


def paired_ep_s(
    journey_s: Values,
    forward: Pieces,
    backward: Pieces,
    repeated: Pieces,
    repeated_share: Values,
    keeps: Values,
    ends: Values,
) -> tuple[Values, Values, Values]:
    """Returns the exposed seconds of a layer's exchange where a forward and a backward take turns, (N,).

    One has a journey under way while the other computes up to its next one (`parallel.turns`), until the forward has
    ended: it has two journeys a layer, and backward two of its own and two in what it computes again, between which and
    its own it computes nothing.

    Args:
        journey_s: of a layer's tokens, there or back.
        forward: of the one pass.
        backward: of the other one.
        repeated: of the forward that backward computes again.
        repeated_share: of the layers of which it does.
        keeps: whether that exchanges nothing (`Layout.ep_keep`).
        ends: ends of a stage's pass for each layer, where the last journey, or the first piece, has nothing beside it.

    Returns:
        Of a forward; of a backward that repeats nothing; and what is more in one that repeats its forward.
    """

    def exposed_s(*pieces: Values) -> Values:
        return sum((np.maximum(journey_s - piece_s, 0.0) for piece_s in pieces), 0.0 * journey_s)

    hidden_share = 1.0 / (1.0 + repeated_share * (1.0 - keeps))
    forward_s = exposed_s(*forward) + ends * np.minimum(journey_s, forward[0])
    alone_s = hidden_share * exposed_s(*backward) + (1.0 - hidden_share) * 2.0 * journey_s
    pieces = backward[0] + repeated[0], repeated[1], 0.0, backward[1]
    both_s = hidden_share * exposed_s(*pieces) + (1.0 - hidden_share) * 4.0 * journey_s
    kept_s = exposed_s(backward[0] + repeated[0], backward[1] + repeated[1])
    both_s = np.where(keeps, kept_s, both_s)
    return forward_s, alone_s, both_s - alone_s


def fastest_nodes(job: PricedJob, machine: Machine, devices: int) -> Mapping[int, int]:
    """Returns the form of the exchange (`Layout.ep_node`) that is fastest for each degree of ``ep``, where it isn't 0.

    It is chosen for micro-batches of a row, which fill their links; one that is faster by less than `LEAST_GAIN` isn't.

    Args:
        job: model and batch.
        machine: devices and links.
        devices: ranks of the layouts.
    """
    layer = next((block for block in job.shape.blocks if block.experts), None)
    return {} if layer is None else _fastest_nodes(layer, job.sequence, job.precision, machine, devices)


@lru_cache(maxsize=64)
def _fastest_nodes(
    layer: LayerShape, sequence: int, precision: str, machine: Machine, devices: int
) -> Mapping[int, int]:
    fastest: dict[int, int] = {}
    for ep in range(2, min(devices, layer.experts) + 1):
        if layer.experts % ep or devices % ep:
            continue
        runs = [0, *(run for run in range(1, machine.fabric.devices + 1) if fits_expert_node(run, ep))]
        layouts = LayoutBatch.of({"ep": ep, SHARDS: devices, "ep_node": np.array(runs)})
        groups, element = CollectiveTimes(layouts, machine), float(compute_bytes(precision))
        exchange = ExpertExchange(layouts, groups, machine.device, float(sequence), element)
        seconds = np.broadcast_to(exchange.wire(layer).seconds, len(runs))
        best = int(np.argmin(seconds))
        if seconds[best] * (1.0 + LEAST_GAIN) < seconds[0]:
            fastest[ep] = runs[best]
    return MappingProxyType(fastest)
