"""Profile of another training framework: what it does otherwise than our own runtime, as options and methods."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from meshwright.array_types import Values
from meshwright.cluster.device import Device
from meshwright.planner.cost.activation_model import ActivationModel
from meshwright.planner.cost.framework_profile import FrameworkProfile, RuntimeModel, StateBytesPerParameter
from meshwright.planner.cost.kernels import plain_attention_s
from meshwright.planner.cost.layout_batch import Array, LayoutBatch
from meshwright.spec.model_shape import LayerShape


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherStates(StateBytesPerParameter):
    """Bytes of model state; pipelines shard parameters and gradients as other layouts do, experts by elements."""

    walks_backward: bool = False
    working_gradient: float = 0.0
    """Of a second, low-precision gradient beside it."""
    whole_when_accumulating: bool = True
    """Whether gradients stay unsharded below ZeRO-2 with several micro-batches."""
    update: tuple[float, float] = (0.0, 0.0)
    """Temporaries of the update while no activations are alive: (unsharded, sharded) bytes a parameter."""

    def keeps_full_gradients(self, zero: Array, accumulates: Array, is_pipelined: Array) -> Array:
        """Returns whether gradients stay unsharded until the update."""
        return np.asarray((zero < 2) & (accumulates | (not self.whole_when_accumulating)))

    def gathers_once(self, pp: Array) -> Array:
        """Returns False for every layout: each micro-batch gathers."""
        return np.zeros_like(pp, dtype=bool)

    def expert_shards(self, layouts: LayoutBatch, experts: int) -> Array:
        """Returns the ranks over which the state of experts divides."""
        return layouts.expert_shards

    def further_bytes(self, zero: Array, total: Array, owned: Array) -> tuple[Array, Array]:
        """Returns bytes of a second gradient, and of the update's temporaries."""
        update = np.where(zero > 0, self.update[0] * total + self.update[1] * owned, 0.0)
        return self.working_gradient * np.where(zero < 2, total, owned), update


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherActivations(ActivationModel):
    """Bytes that a layer saves between forward and backward, and temporaries beside them."""

    flash: bool = True
    """Fused attention: scores are never held."""
    score_bytes: float = 2.0
    """Per score where attention isn't fused; 5 with dropout (softmax, mask, dropped). Source: Korthikanti (2022)."""
    late_layers: float = 0.0
    """Layers whose row products' results the communication stream still has when the host is as far ahead of the device
    as it can be: CUDA queues 1,024 launches, about 45 a layer. The allocator gives a block that another stream used
    back when the device has passed it, not when the host freed it (`Tensor.record_stream`)."""
    late_work: float = 0.0
    """Tokens x D^2 of a rank of tp, over the root of tp, from which the device takes longer than its host, so that the
    host gets ahead; 0 where it always does."""
    sends_stop_host: bool = False
    """Whether a send between stages waits on the host, which then never gets ahead."""
    gathered: float = 0.0
    """Bytes per element of D, not divided by tp, of what one layer gathers and gives back: inputs and gradients."""
    fresh_gradient: float = 0.0
    """Bytes per parameter of a layer's largest product while its gradient is computed and added: the narrow gradient
    and a wide copy of it."""

    def attention_bytes(self, heads: int, scores: float) -> tuple[float, float]:
        """Returns bytes a token of fused attention's statistics, and of saved scores."""
        return 4.0 * heads * self.flash, 0.0 if self.flash else self.score_bytes * scores

    def buffer_bytes(self, layouts: LayoutBatch, elements: Array, largest_product: int) -> Values:
        """Returns bytes of gathered inputs and of a fresh gradient, while a layer runs."""
        gathered_bytes = self.gathered * elements * _gathers_sequence(layouts)
        return gathered_bytes + self.fresh_gradient * largest_product / layouts.tp

    def late_bytes(self, layouts: LayoutBatch, elements: Array, width: int, layers: Array, in_flight: Array) -> Values:
        """Returns bytes of results that were scattered and are freed late, where the host is ahead of the device."""
        if not self.late_layers:
            return 0.0
        several = layouts.microbatches[:, None] > in_flight
        work = elements * width / layouts.tp**1.5
        slow_device = (work >= self.late_work)[:, None]
        # Without a pipeline the backward before counts too; a step's only forward leaves half of its layers at its end.
        alone = slow_device * np.where(several, self.late_layers, 0.5 * layers)
        # The first rank of two stages alternates; of more, it launches forwards while it waits for the first gradient.
        of_two = slow_device * several * 2.0 * layers
        piped = np.where(in_flight > 2, (in_flight - 2.0) * layers, of_two) * (not self.sends_stop_host)
        ahead = np.minimum(np.where(layouts.pp[:, None] > 1, piped, alone), self.late_layers)
        # Of a layer two products, 2 bytes per element of D each, that tp doesn't divide.
        return 4.0 * (elements * _gathers_sequence(layouts))[:, None] * ahead


def _gathers_sequence(layouts: LayoutBatch) -> Array:
    return np.asarray((layouts.tp > 1) & (layouts.sequence > 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherRuntime(RuntimeModel):
    """Speeds and overlaps of kernels, host and links."""

    flash: bool = True
    """Fused attention kernels."""
    unfused_sinks: str = ""
    """Attention with learned sinks that has no fused kernel: ``all``, or only under a ``window``; empty for none."""
    sink_passes: float = 3.5
    """Bytes moved per score in its forward, by kernels that join mask and softmax."""
    score_passes: float = 11.0
    """Bytes moved per score in forward where attention isn't fused: softmax, mask, dropout."""
    recompute_stops: bool = False
    """Full recompute of a layer ends with the last tensor that backward needs: its last product isn't redone. Source:
    torch.utils.checkpoint, set_checkpoint_early_stop, the default without reentrance."""
    host_tp_power: float = 0.0
    """How it grows with the ranks of tp, which wait for the slowest host among them: as tp to this power."""
    host_ahead: bool = True
    """The host issues later layers while the device is behind; otherwise it waits at each, and what it takes longer
    for one isn't made up at another."""
    host_softmax_s: float = 0.0
    """Host seconds of a layer's forward more where the fused softmax refuses a batch: rows x heads of a rank that are
    no multiple of 4. Source: Megatron-LM, megatron/model/fused_softmax.py, is_kernel_available."""
    tp_overlap: float = 0.0
    """Share of tp's traffic that hides under products."""
    tp_start_s: float = 0.0
    """What each of tp's collectives waits for every other rank beside its transfer: hosts that launch unevenly."""
    tp_meeting: float = 0.0
    """Where hosts launch no faster than devices compute, ranks of tp wait for the latest of them at each collective: of
    some the host, of others the device. A layer takes (host^p + device^p)^(1/p) with this p; at 0, the longer."""
    tp_regather: bool = False
    """Backward gathers the inputs of products again."""
    copies_tokens: bool = False
    """Megatron and nanotron hold tokens outermost. Source: Megatron-LM, core/tensor_parallel/mappings.py."""
    cp_unbalanced: bool = False
    """Ranks of cp hold contiguous pieces of a row, so that the last sees all of it and the others wait."""
    scatter_overlap: float | None = None
    """The same where gradients are scattered and parameters gathered once a step (ZeRO-1 and 2); None is the same."""
    scatter_share: float = 1.0
    """Share of the wires' rate that these reach, where each parameter is scattered and gathered for itself."""
    send_overlap: float = 0.0
    """Share of a send between stages that hides in the steady part."""
    send_divided: bool = False
    """Each rank of tp sends only its part of the activation."""
    reduce_pieces: float = 0.0
    """Collectives that a layer's gradients are scattered in; 0 for few large ones."""
    bucket_bytes: float = 0.0
    """Bytes of each all-reduce of gradients (DDP's buckets); 0 for few large ones."""
    gather_pieces: float = 0.0
    """Collectives that a layer's parameters are gathered in; 0 for few large buckets."""
    reduce_each: bool = False
    """Gradients are reduced after every micro-batch."""

    def launch_s(self, layouts: LayoutBatch, rows: Array, layer: LayerShape, is_backward: bool) -> Values:
        """Returns seconds in which the host launches a layer: ranks of tp wait for the slowest host among them."""
        tp = layouts.tp
        launch_s = self.host_layer_s * tp**self.host_tp_power
        if self.host_softmax_s and layer.heads:
            launch_s = launch_s + self.host_softmax_s * (np.mod(rows * layer.heads / tp, 4.0) > 0)
        return self.with_draws_s(launch_s, layer, is_backward)

    def layer_host_s(self, host_s: Values, busy_s: Values, tp: Array) -> Values:
        """Returns host seconds of a layer: some ranks of tp are late by their host, others by their device."""
        if not self.tp_meeting:
            return host_s
        power = self.tp_meeting
        joint_s = (np.power(host_s, power) + np.power(busy_s, power)) ** (1.0 / power)
        return np.where(tp > 1, joint_s, host_s)

    def end_host_s(self, host_s: Values, busy_s: Values) -> Values:
        """Returns host seconds of embedding or head, for which a host that doesn't run ahead waits."""
        return host_s if self.host_ahead else np.maximum(host_s, busy_s)

    def unfused_attention_s(
        self, layer: LayerShape, scores: Array, device: Device, dtype: str, is_backward: bool
    ) -> Array | None:
        """Returns seconds of attention without a fused kernel: of all layers, or of those with learned sinks."""
        mean_size = (layer.head_size + layer.value_size) / 2
        if layer.sinks and (self.unfused_sinks == "all" or (self.unfused_sinks == "window" and layer.window)):
            return plain_attention_s(scores, mean_size, device, dtype, self.sink_passes, is_backward)
        if self.flash:
            return None
        return plain_attention_s(scores, mean_size, device, dtype, self.score_passes, is_backward) / self.attention

    def attention_imbalance(self, cp: Array) -> Values:
        """Returns the attention of the rank with the end of the rows over the mean, where they are cut in order."""
        return 2.0 - 1.0 / cp if self.cp_unbalanced else 1.0

    def repeated_matmul_s(self, matmul_s: Values, last_product_s: Array) -> Array:
        """Returns seconds of the products that full recompute computes again."""
        return np.asarray(matmul_s - last_product_s if self.recompute_stops else matmul_s)

    def recomputed_scores_s(self, attention_s: Values) -> Values:
        """Returns seconds in which ``block`` recompute computes the scores again."""
        return 0.0 if self.flash else attention_s

    def exposed_tp_s(
        self, blocks: Values, collective_s: Array, gather_s: Array, layouts: LayoutBatch, is_backward: bool
    ) -> Array:
        """Returns exposed seconds of tp's traffic in a layer's pass."""
        start_s = self.tp_start_s * (layouts.tp - 1.0)
        collective_s = collective_s + start_s * np.where(layouts.sequence > 0, 2.0, 1.0)
        regather_s = gather_s * blocks * (layouts.sequence > 0) if self.tp_regather and is_backward else 0.0
        return np.asarray((blocks * collective_s + regather_s) * (1.0 - self.tp_overlap))

    def exposed_send_s(self, send_s: Array) -> Array:
        """Returns exposed seconds of a send between stages."""
        return send_s * (1.0 - self.send_overlap)

    def send_shards(self, tp: Array, token_shards: Array) -> Array:
        """Returns the ranks of tp over which a send between stages is divided."""
        return tp if self.send_divided else token_shards

    def accumulated_share(self, microbatches: Array) -> Array:
        """Returns 1 for every layout: a gradient is added to a wider one from the first micro-batch on."""
        return np.ones_like(microbatches, dtype=float)

    def reduces_each(self) -> bool:
        """Whether ZeRO-2 and 3 reduce gradients after every micro-batch."""
        return self.reduce_each

    def regathers_ends(self) -> bool:
        """Returns True: the rates were fitted to all parameters gathered twice."""
        return True

    def reduce_counts(self, layers: Array, size: Array) -> tuple[Values, Values]:
        """Returns in how many collectives gradients are (reduce-scattered, all-reduced)."""
        buckets = np.maximum(1.0, size / self.bucket_bytes) if self.bucket_bytes else 1.0
        return np.maximum(1.0, self.reduce_pieces * layers), buckets

    def gather_count(self, layers: Array) -> Values:
        """Returns in how many collectives ZeRO-1 and 2 gather parameters."""
        return np.maximum(1.0, self.gather_pieces * layers)

    def scattered_share(self) -> float:
        """Returns seconds of collectives that reach a share of the links' rate, over those at that rate."""
        return 1.0 / self.scatter_share

    def sharded_overlap(self) -> float:
        """Returns the share of compute under which scattered gradients and gathered parameters can go."""
        return self.dp_overlap if self.scatter_overlap is None else self.scatter_overlap


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherProfile(FrameworkProfile):
    """One other framework in the configuration of its published runs."""

    states: OtherStates = dataclasses.field(default_factory=OtherStates)
    saved: OtherActivations = dataclasses.field(default_factory=OtherActivations)
    runtime: OtherRuntime = dataclasses.field(default_factory=OtherRuntime)
