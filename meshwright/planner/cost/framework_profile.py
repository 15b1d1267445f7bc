"""Profiles of training frameworks: how each uses memory, links and kernels, as named options without hidden factors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from meshwright.errors import PlanError
from meshwright.spec.layout import Layout

GIB = 1024.0**3
SPLITS = ("balanced", "even", "compute", "slots")
"""Rules that assign layers to stages. balanced: minimize the most expensive stage. even: equal counts, the later ones
larger, or with embedding and head as a layer each where only that divides. compute: nanotron's thresholds of compute
cost. slots: embedding and head always as a layer each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytesPerParameter:
    """Bytes of model state per parameter that a rank holds before the data axes shard it."""

    parameter: float = 2.0
    """Of the weight that computes; gathered layer by layer at ZeRO-3."""
    gradient: float = 4.0
    """Of the reduced or accumulated gradient."""
    working_gradient: float = 0.0
    """Of a second, low-precision gradient beside it."""
    optimizer: float = 12.0
    """Masters and moments; sharded from ZeRO-1 on."""
    whole_when_accumulating: bool = True
    """Whether gradients stay unsharded below ZeRO-2 with several micro-batches."""
    whole_in_pipeline: bool = False
    """Whether a pipeline keeps unsharded gradients at every level, as it reduce-scatters once a step."""
    update: tuple[float, float] = (0.0, 0.0)
    """Temporaries of the update while no activations are alive: (unsharded, sharded) bytes a parameter."""
    whole_experts: bool = False
    """Whether shards of a layer's stacked experts are full experts, so that 8 experts lie on 8 of 16 ranks. Source:
    torch 2.13, FSDP2 shards dim 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationModel:
    """Bytes that a layer saves between forward and backward, and temporaries beside them."""

    flash: bool = True
    """Fused attention: scores are never held."""
    score_bytes: float = 2.0
    """Per score where attention isn't fused; 5 with dropout (softmax, mask, dropped). Source: Korthikanti (2022)."""
    gate_extra: float = 0.0
    """More bytes per element of F: eager SwiGLU saves silu(gate) too (2), a decomposed GELU more."""
    kept_gather: float = 0.0
    """Bytes per element of D of each layer that tp doesn't divide, though the tokens are: gathered inputs that the
    communication stream hasn't given back when the next micro-batch starts."""
    kept_gather_piped: float = 0.0
    """The same in a pipeline, where a rank runs more than two forwards ahead."""
    gathered: float = 0.0
    """Bytes per element of D, not divided by tp, of what one layer gathers and gives back: inputs and gradients."""
    fresh_gradient: float = 0.0
    """Bytes per parameter of a layer's largest product while its gradient is computed and added: the narrow gradient
    and a wide copy of it."""
    logits: float = 12.0
    """Bytes per logit of one micro-batch at the peak: logits, their float32 copy, their gradient."""
    selective_share: float = 1.0
    """Share of the products whose results ``selective`` recompute keeps."""
    expert_copies: float = 4.0
    """Bytes per element of D of each routed token beside the expert's own: dispatched input and result to combine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeModel:
    """Speeds and overlaps of kernels, host and links."""

    matmul: float = 1.0
    """Share of the device's own rate of matrix products that the framework's kernels reach."""
    attention: float = 1.0
    """The same of attention."""
    flash: bool = True
    """Fused attention kernels."""
    unfused_sinks: str = ""
    """Attention with learned sinks that has no fused kernel: ``all``, or only under a ``window``; empty for none."""
    sink_passes: float = 3.5
    """Bytes moved per score in its forward, by kernels that join mask and softmax."""
    score_passes: float = 11.0
    """Bytes moved per score in forward where attention isn't fused: softmax, mask, dropout."""
    pass_width: float = 30.0
    """Bytes moved per element of D in a layer's forward by all that isn't a product: norms, residuals, rotations."""
    pass_ffn: float = 8.0
    """The same per element of F: activation function and gate."""
    route_bytes: float = 12.0
    """Bytes moved per element of D of each routed token in forward: sorting it to its expert and back."""
    cast_bytes: float = 4.0
    """Bytes moved per element of what products read when they run in 8 or 4 bits: scales, casts, transposes."""
    fused_width: float = 0.0
    """`pass_width` of a layer that torch.compile made, whose element-wise operations between two products are one
    kernel; 0 where `compile` isn't a choice of the engine, and its other options say how it was run."""
    fused_ffn: float = 0.0
    """`pass_ffn` of such a layer."""
    fused_layer_s: float = 0.0
    """`host_layer_s` of such a layer: fewer launches, and what torch.compile's guards and wrapper take."""
    draw_bytes: float = 0.0
    """Bytes moved per element for which dropout draws a number, where that is done by operations of its own; 0 where
    the kernel that drops draws, which is among the passes."""
    draw_s: float = 0.0
    """Host seconds of such a draw."""
    pass_backward: float = 1.5
    """Bytes that backward moves over those of forward."""
    host_layer_s: float = 0.0
    """Seconds in which the host issues a layer's forward; backward costs `host_backward` as much."""
    host_backward: float = 1.5
    """Host time of a backward over that of a forward."""
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
    host_piped_s: float = 0.0
    """Host seconds of a layer's forward in a pipeline, for one rank of tp; the larger of it and `host_layer_s`."""
    host_piped_power: float = 0.0
    """How it grows with the ranks of tp, which wait for the slowest host among them: as tp to this power."""
    host_microbatch_s: float = 0.0
    """Host time of a micro-batch beside its layers."""
    host_step_s: float = 0.01
    """Of a step: data, logging, reading the loss."""
    tp_overlap: float = 0.0
    """Share of tp's traffic that hides under products."""
    tp_start_s: float = 0.0
    """What each of tp's collectives waits for every other rank beside its transfer: hosts that launch unevenly."""
    tp_meeting: float = 0.0
    """Where hosts launch no faster than devices compute, ranks of tp wait for the latest of them at each collective: of
    some the host, of others the device. A layer takes (host^p + device^p)^(1/p) with this p; at 0, the longer."""
    tp_regather: bool = False
    """Backward gathers the inputs of products again."""
    cp_unbalanced: bool = False
    """Ranks of cp hold contiguous pieces of a row, so that the last sees all of it and the others wait."""
    cp_overlap: float = 0.5
    """Share of cp's traffic that hides under attention."""
    ep_overlap: float = 0.0
    """Share of ep's traffic that hides."""
    dp_overlap: float = 0.8
    """Share of the last backward (or of every one, where each reduces) under which gradients can go."""
    scatter_overlap: float | None = None
    """The same where gradients are scattered and parameters gathered once a step (ZeRO-1 and 2); None is the same."""
    scatter_share: float = 1.0
    """Share of the wires' rate that these reach, where each parameter is scattered and gathered for itself."""
    gather_overlap: float = 0.9
    """Share of compute under which ZeRO-3 gathers can go."""
    send_overlap: float = 0.0
    """Share of a send between stages that hides in the steady part."""
    action_s: float = 0.0
    """What a pipeline engine spends on each forward or backward of a stage beside computing and sending."""
    send_divided: bool = False
    """Each rank of tp sends only its part of the activation."""
    reduce_bytes: float = 4.0
    """Bytes per element of a gradient on the wire."""
    gather_bytes: float = 2.0
    """Bytes per element of a parameter on the wire."""
    reduce_pieces: float = 0.0
    """Collectives that a layer's gradients are scattered in; 0 for few large ones."""
    bucket_bytes: float = 0.0
    """Bytes of each all-reduce of gradients (DDP's buckets); 0 for few large ones."""
    gather_pieces: float = 0.0
    """Collectives that a layer's parameters are gathered in; 0 for few large buckets."""
    accumulate_bytes: float = 0.0
    """Bytes moved per parameter of a rank after each micro-batch, to add its gradient to the sum."""
    loss_passes: tuple[float, float] = (14.0, 10.0)
    """Bytes moved per logit by the loss in forward and backward: cast, softmax, gradient, cast back."""
    reduce_each: bool = False
    """Gradients are reduced after every micro-batch."""
    update_bytes: float = 30.0
    """Bytes that the optimizer moves per parameter it owns."""
    interference: float = 0.0
    """Share of hidden traffic's time by which it slows the compute that hides it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameworkProfile:
    """One framework in the configuration of its published runs."""

    name: str
    """Name of the framework."""
    states: StateBytesPerParameter = dataclasses.field(default_factory=StateBytesPerParameter)
    """Bytes of model state."""
    saved: ActivationModel = dataclasses.field(default_factory=ActivationModel)
    """Activations."""
    runtime: RuntimeModel = dataclasses.field(default_factory=RuntimeModel)
    """Time."""
    split: str = "balanced"
    """One of `SPLITS`."""
    allocator: float = 1.1
    """Reserved bytes over allocated, of all that comes and goes: activations, logits."""
    allocator_bytes: float = 0.25 * GIB
    """Reserved bytes beside these: workspaces of libraries, halves of blocks."""
    context_bytes: float = 1.0 * GIB
    """Bytes of driver, libraries and communicators on a device, outside the allocator."""
    source: str = ""
    """Source of the options."""

    def __post_init__(self) -> None:
        """Refuses an unknown way to split."""
        if self.split not in SPLITS:
            raise PlanError(f"engine {self.name}: split {self.split} is none of {', '.join(SPLITS)}")

    def for_layout(self, layout: Layout) -> FrameworkProfile:
        """Returns the profile for a layout: with fused passes and fewer launches where ``compile`` is on.

        Saved activations stay priced as eager: which of them a compiled layer recomputes isn't known in advance.
        """
        runtime = self.runtime
        if not layout.compile or not runtime.fused_width:
            return self
        compiled_runtime = dataclasses.replace(
            runtime, pass_width=runtime.fused_width, pass_ffn=runtime.fused_ffn, host_layer_s=runtime.fused_layer_s
        )
        return dataclasses.replace(self, runtime=compiled_runtime)

    def with_options(self, **options: Any) -> FrameworkProfile:
        """Returns the profile with options changed, each named ``group__field`` or ``field``.

        Args:
            options: such as ``runtime__tp_overlap=0.5`` or ``split="even"``.
        """
        changes: dict[str, Any] = {}
        for key, value in options.items():
            group, _, name = key.partition("__")
            current = changes.get(group, getattr(self, group))
            changes[group] = dataclasses.replace(current, **{name: value}) if name else value
        return dataclasses.replace(self, **changes)
