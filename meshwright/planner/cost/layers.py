"""One layer on one micro-batch: seconds by part, bytes saved, bytes sent; for every layout at once."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.cluster import traffic
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import CollectiveTimes, Machine
from meshwright.planner.cost.kernels import attention_s, matmul_s, move_s, plain_attention_s
from meshwright.planner.cost.layout_batch import Array, LayoutBatch, PricedJob
from meshwright.planner.cost.meshwright_profile import MOST_SCORES, drop_bytes, score_bytes
from meshwright.planner.cost.prices import LAYER_TRAFFIC
from meshwright.spec.model_shape import LayerShape, Product

FULL, BLOCK, SELECTIVE = 2, 3, 1


@dataclass(kw_only=True, slots=True)
class PassTime:
    """Seconds of a forward or a backward of one layer or end of the model, by part; arrays (N,)."""

    matmul: Any = 0.0
    attention: Any = 0.0
    elementwise: Any = 0.0
    recompute: Any = 0.0
    tp: Any = 0.0
    cp: Any = 0.0
    ep: Any = 0.0
    host: Any = 0.0
    """What the host needs to issue it; not added, but a floor under the rest."""

    @property
    def compute(self) -> Any:
        """What the device computes."""
        return self.matmul + self.attention + self.elementwise + self.recompute

    @property
    def busy(self) -> Any:
        """What the device takes: compute and exposed traffic."""
        return self.compute + self.tp + self.cp + self.ep


@dataclass(kw_only=True, slots=True)
class LayerCost:
    """A layer, or an end of the model, on one micro-batch."""

    forward: PassTime = field(default_factory=PassTime)
    backward: PassTime = field(default_factory=PassTime)
    saved: Any = 0.0
    """Bytes held from forward to backward."""
    kept: Any = 0.0
    """Bytes that are held longer than needed when another micro-batch follows."""
    working: Any = 0.0
    """Bytes held only while the layer runs or recomputes."""
    parameters: Any = 0.0
    """Parameters of a rank, experts left out, before the data axes shard them."""
    experts: Any = 0.0
    """Parameters of routed experts of a rank."""


class PricedModel:
    """What all layers of a job on N layouts have in common.

    Args:
        job: model and batch.
        degrees: layouts.
        machine: what they run on.
        engine: how it is run.
    """

    def __init__(self, job: PricedJob, degrees: LayoutBatch, machine: Machine, engine: FrameworkProfile) -> None:
        self.job, self.degrees, self.machine, self.engine = job, degrees, machine, engine
        self.groups = CollectiveTimes(degrees, machine)
        self.element = {"float32": 4.0, "float64": 8.0}.get(job.precision, 2.0)

    @cached_property
    def rows(self) -> Array:
        """Rows of a micro-batch."""
        rows = np.where(self.degrees.rows > 0, self.degrees.rows, self.job.rows)
        return np.asarray(rows / (self.degrees.data * self.degrees.microbatches))

    @cached_property
    def tokens(self) -> Array:
        """Tokens of a micro-batch that a rank of cp has; tp divides them further where ``sequence``."""
        return self.rows * self.job.sequence / self.degrees.cp

    @cached_property
    def divided(self) -> Array:
        """By what tp divides what lies between the sharded parts."""
        return np.where(self.degrees.sequence > 0, self.degrees.tp, 1.0)

    def product_s(self, product: Product, layer: LayerShape | None = None, parts: int = 1) -> Array:
        """Returns seconds of a product: ``parts`` 1 for forward, 2 for both products of backward."""
        d, tp = self.degrees, self.degrees.tp
        m: Any = self.tokens
        n: Any = float(product.outer)
        k: Any = float(product.inner)
        if product.experts and layer is not None:
            spread = d.ep > 1
            routed = self.tokens * layer.active_experts * self.engine.saved.expert_imbalance
            local = layer.experts / d.ep
            m = np.where(spread, routed / tp, routed) / local
            n = n / np.where(spread | (product.split != "columns"), 1.0, tp)
            k = k / np.where(spread | (product.split != "rows"), 1.0, tp)
            return local * self._products_s(m, n, k, parts)
        n = n / tp if product.split == "columns" else n
        k = k / tp if product.split == "rows" else k
        m = m / self.divided if not product.split else m
        return self._products_s(m, n, k, parts)

    def _products_s(self, m: Any, n: Any, k: Any, parts: int) -> Array:
        device, dtype, share = self.machine.device, self.job.dtype, self.engine.runtime.matmul
        if parts == 1:
            return matmul_s(m, n, k, device, dtype, share)
        return matmul_s(m, k, n, device, dtype, share) + matmul_s(k, n, m, device, dtype, share)

    def layer(self, layer: LayerShape) -> LayerCost:
        """Returns what a layer costs."""
        forward, again = self._pass(layer, False), self._pass(layer, False)
        backward = self._pass(layer, True)
        self._communicate(layer, forward, backward)
        if self.engine.runtime.recompute_stops and layer.products:
            again.matmul = again.matmul - self.product_s(layer.products[-1], layer)
        self._recompute(forward, again, backward)
        self._met(forward, backward)
        cost = self.sizes(layer)
        cost.forward, cost.backward = forward, backward
        return cost

    def sizes(self, layer: LayerShape) -> LayerCost:
        """Returns what a layer holds alone; its time and traffic stand at 0."""
        cost = LayerCost()
        tp, ep = self.degrees.tp, self.degrees.ep
        split = sum(item.inner * item.outer for item in layer.products if item.split and not item.experts)
        rest = layer.parameters - layer.expert_parameters - split
        cost.parameters = split / tp + rest
        cost.experts = layer.expert_parameters / np.where(ep > 1, ep, tp) + 0.0 * tp
        self._saved(layer, cost)
        return cost

    def take(self, index: Any) -> PricedModel:
        """Returns the same of the layouts at an index, slice or mask."""
        part = copy.copy(self)
        for name in [name for name, item in vars(type(self)).items() if isinstance(item, cached_property)]:
            vars(part).pop(name, None)
        part.degrees = self.degrees.take(index)
        part.groups = self.groups.take(index, part.degrees)
        return part

    def _pass(self, layer: LayerShape, back: bool) -> PassTime:
        runtime, device = self.engine.runtime, self.machine.device
        parts = 2 if back and not self.job.adapters else 1
        matmul: Any = sum(self.product_s(product, layer, parts) for product in layer.products)
        width = layer.width * runtime.pass_width / self.divided
        ffn = (layer.ffn + layer.active_experts * layer.expert_ffn) * runtime.pass_ffn * (2 if layer.gated else 1)
        routed = layer.active_experts * layer.width * runtime.route_bytes
        moved = self.tokens * (width + (ffn + routed) / self.degrees.tp) * (self.element / 2.0)
        elementwise = move_s(moved, device) * (runtime.pass_backward if back else 1.0)
        if self.job.products in ("fp8", "fp4"):
            rotated = 2.0 if self.job.products == "fp4" else 1.0
            elementwise = elementwise + move_s(self._cast(layer, back) * runtime.cast_bytes * rotated, device)
        if runtime.draw_bytes and layer.drops:
            each = drop_bytes(self.element) + (0.0 if back else runtime.draw_bytes)
            elementwise = elementwise + move_s(self.tokens * layer.width / self.divided * layer.drops * each, device)
        attention, host = self._attention(layer, back), self._host(layer, back)
        return PassTime(matmul=matmul, attention=attention, elementwise=elementwise, host=host)

    def _host(self, layer: LayerShape, back: bool) -> Any:
        """Seconds in which the host issues a forward or backward of a layer."""
        runtime, tp = self.engine.runtime, self.degrees.tp
        piped = runtime.host_piped_s * tp**runtime.host_piped_power * (self.degrees.pp > 1)
        host = np.maximum(runtime.host_layer_s * tp**runtime.host_tp_power, piped)
        if runtime.host_softmax_s and layer.heads:
            host = host + runtime.host_softmax_s * (np.mod(self.rows * layer.heads / tp, 4.0) > 0)
        if runtime.draw_s and not back:
            host = host + runtime.draw_s * (layer.drops + layer.drops_scores)
        return host * (runtime.host_backward if back else 1.0)

    def _cast(self, layer: LayerShape, back: bool) -> Any:
        """Elements that are cast for products: their inputs in forward, gradients and inputs again in backward."""
        total: Any = 0.0
        for product in layer.products:
            many = layer.active_experts if product.experts else 1
            inner = product.inner / np.where(product.split == "rows", self.degrees.tp, 1.0)
            outer = product.outer / np.where(product.split == "columns", self.degrees.tp, 1.0)
            total = total + many * self.tokens * (outer if back else inner)
        return total

    def _attention(self, layer: LayerShape, back: bool) -> Any:
        if not layer.heads:
            return 0.0
        runtime, device = self.engine.runtime, self.machine.device
        dtype = "tf32" if self.job.products == "tf32" else self.job.precision
        keys = layer.attended(self.job.sequence) if runtime.causal else float(self.job.sequence)
        scores = self.tokens * layer.heads / self.degrees.tp
        if runtime.cp_unbalanced:
            scores = scores * (2.0 - 1.0 / self.degrees.cp)
        size = (layer.head_size + layer.value_size) / 2
        full = scores * self.job.sequence
        if layer.sinks and (runtime.unfused_sinks == "all" or (runtime.unfused_sinks == "window" and layer.window)):
            return plain_attention_s(full, size, device, dtype, runtime.sink_passes, back)
        if self._plain(layer):
            return self._plain_s(layer, full, size, back)
        if runtime.flash:
            took = attention_s(scores * keys, layer.head_size, layer.value_size, device, dtype, back)
            return took / runtime.attention
        return plain_attention_s(full, size, device, dtype, runtime.score_passes, back) / runtime.attention

    def _plain(self, layer: LayerShape) -> bool:
        """Whether our runtime computes attention without a fused kernel: dropped weights, float64 on a device."""
        runtime = self.engine.runtime
        if not (runtime.flash and runtime.draw_bytes and layer.heads):
            return False
        return layer.drops_scores or (self.job.precision == "float64" and self.machine.device.units > 0)

    def _plain_s(self, layer: LayerShape, scores: Any, size: float, back: bool) -> Any:
        """Seconds of such attention; where the weights are too many to keep, backward makes them again."""
        device, dtype, drops = self.machine.device, self.job.precision, layer.drops_scores
        more = drop_bytes(self.element) if drops else 0.0
        drawn = self.engine.runtime.draw_bytes if drops else 0.0
        ahead = score_bytes(self.element, False) + more
        if not back:
            return plain_attention_s(scores, size, device, dtype, ahead + drawn, False)
        again = plain_attention_s(scores, size, device, dtype, ahead, False)
        passed = plain_attention_s(scores, size, device, dtype, 0.0, True)
        passed = passed + move_s(scores * (score_bytes(self.element, True) + more), device)
        return passed + again * (drops & (scores > MOST_SCORES))

    def _score_saved(self, layer: LayerShape) -> tuple[Any, Any]:
        """Bytes a token that attention without a fused kernel keeps, and has while it runs beside these."""
        row, saved = layer.heads * float(self.job.sequence), self.engine.saved
        if not self._plain(layer):
            return (0.0 if saved.flash else saved.score_bytes * row), 0.0
        kept = row * (2.0 * self.element + 1.0 if layer.drops_scores else self.element)
        many = layer.drops_scores & (self.tokens * row / self.degrees.tp > MOST_SCORES)
        return np.where(many, row, kept), np.where(many, kept - row, 0.0)

    def awaited(self, *passes: PassTime) -> None:
        """Raises the host's time to the device's where it waits for each layer, so that their sum is one of longest."""
        if not self.engine.runtime.host_ahead:
            for one in passes:
                one.host = np.maximum(one.host, one.busy)

    def _met(self, *passes: PassTime) -> None:
        """Raises the host's time where ranks of tp meet that are late by their host or by their device."""
        power = self.engine.runtime.tp_meeting
        if power:
            for one in passes:
                joined = (np.power(one.host, power) + np.power(one.busy, power)) ** (1.0 / power)
                one.host = np.where(self.degrees.tp > 1, joined, one.host)

    def _communicate(self, layer: LayerShape, forward: PassTime, backward: PassTime) -> None:
        """Adds exposed traffic of tp, cp and ep."""
        d, runtime, groups = self.degrees, self.engine.runtime, self.groups
        size = self.tokens * layer.width * self.element
        reduce = groups.seconds(traffic.all_reduce_s, size, groups.tp)
        gather = groups.seconds(traffic.all_gather_s, size, groups.tp)
        each = np.where(d.sequence > 0, 2 * gather, reduce)
        spread = (d.ep > 1) & (layer.experts > 0)
        blocks = np.where(spread & (layer.ffn == 0), 1.0, 2.0) if layer.heads else 1.0
        waits = runtime.tp_start_s * (d.tp - 1.0)
        each = each + waits * np.where(d.sequence > 0, 2.0, 1.0)
        exposed = 1.0 - runtime.tp_overlap
        forward.tp = blocks * each * exposed
        again = gather * blocks * (d.sequence > 0) if runtime.tp_regather else 0.0
        backward.tp = (blocks * each + again) * exposed
        if layer.heads:
            part = self.tokens * 2.0 * (layer.key_width + layer.value_width) / 2 * self.element * d.cp / d.tp
            ring, shown = groups.seconds(traffic.all_gather_s, part, groups.cp), 1.0 - runtime.cp_overlap
            forward.cp = np.maximum(shown * ring, ring - forward.attention)
            backward.cp = np.maximum(shown * 2.0 * ring, 2.0 * ring - backward.attention)
        if layer.experts:
            routed = self.tokens / d.tp * layer.active_experts * layer.width * self.element
            exchange = groups.seconds(traffic.all_to_all_s, routed, groups.ep) * (1.0 - runtime.ep_overlap)
            forward.ep = backward.ep = 2.0 * exchange * self.engine.saved.expert_imbalance

    def _recompute(self, forward: PassTime, again: PassTime, backward: PassTime) -> None:
        """Adds to backward what is computed a second time."""
        d = self.degrees
        full, selective, block = (d.recompute == code for code in (FULL, SELECTIVE, BLOCK))
        work = again.matmul + again.attention + again.elementwise
        part = again.elementwise + (1.0 - self.engine.saved.selective_share) * again.matmul
        redone = np.where(full, work, np.where(selective, part, 0.0))
        if not self.engine.runtime.flash:
            redone = redone + np.where(block, again.attention, 0.0)
        backward.recompute = redone * d.recompute_share
        for name in LAYER_TRAFFIC:
            extra = np.where(full, getattr(forward, name), 0.0) * d.recompute_share
            setattr(backward, name, getattr(backward, name) + extra)
        backward.host = backward.host + np.where(full | selective, again.host, 0.0) * d.recompute_share

    def _saved(self, layer: LayerShape, cost: LayerCost) -> None:
        """Bytes that autograd keeps. Source: Korthikanti et al. (2022), section 4, extended to gated layers."""
        d, saved, w = self.degrees, self.engine.saved, self.element
        norms = w * (2.0 if saved.norm_output else 1.0) + saved.norm_extra
        between = layer.width * (2 * norms + (2.0 if layer.dropout else 0.0)) + w * layer.latent
        qkv = layer.query_width + layer.key_width + layer.value_width
        inside = (w + saved.attention_extra) * qkv + w * layer.mixed_width + 4.0 * layer.heads * saved.flash
        inside += layer.ffn * (w * (3.0 if layer.gated else 2.0) + saved.gate_extra)
        between, inside = self._routed(layer, between, inside)
        scores, passing = self._score_saved(layer)
        everything = self.tokens * (between / self.divided + (inside + scores) / d.tp)
        results = 2 * layer.width / self.divided + (qkv + layer.ffn * (2.0 if layer.gated else 1.0)) / d.tp
        products = self.tokens * w * (saved.selective_share * results + layer.mixed_width / d.tp)
        entry = self.tokens * w * layer.width / self.divided
        without = everything - self.tokens * scores / d.tp
        options = [entry, np.minimum(products + entry, everything), without]
        reduced = np.select([d.recompute == code for code in (FULL, SELECTIVE, BLOCK)], options, everything)
        cost.saved = everything + (reduced - everything) * d.recompute_share
        over = (d.tp > 1) & (d.sequence > 0)
        cost.kept = self.tokens * layer.width * over * np.where(d.pp > 1, saved.kept_gather_piped, saved.kept_gather)
        gathered = saved.gathered * self.tokens * layer.width * over
        cost.working = np.where(d.recompute > 0, everything - reduced, 0.0) + gathered
        if self._plain(layer):
            cost.working = cost.working + self.tokens * passing / d.tp
        largest = max(
            (item.inner * item.outer for item in layer.products if item.split and not item.experts), default=0
        )
        cost.working = cost.working + saved.fresh_gradient * largest / d.tp

    def _routed(self, layer: LayerShape, between: Any, inside: Any) -> tuple[Any, Any]:
        """Adds what routed tokens save: float32 scores of the router, copies, and the experts' own."""
        if not layer.experts:
            return between, inside
        saved, w = self.engine.saved, self.element
        own = saved.expert_copies * layer.width + layer.expert_ffn * (w * (3.0 if layer.gated else 2.0))
        own += layer.expert_ffn * saved.gate_extra
        return between + 4.0 * layer.experts, inside + layer.active_experts * saved.expert_imbalance * own
