"""Profile of a training framework: how it uses memory, links and kernels, as named options without hidden factors.

The methods are our own runtime's; a profile of another framework overrides those in which it differs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from meshwright.array_types import Values
from meshwright.cluster.device import Device
from meshwright.errors import PlanError
from meshwright.planner.cost.activation_model import ActivationModel
from meshwright.planner.cost.layout_batch import Array, LayoutBatch
from meshwright.spec.layout import Layout
from meshwright.spec.model_shape import LayerShape

GIB = 1024.0**3
EULER = 0.5772156649
"""Limit of 1 + 1/2 + ... + 1/n - ln n."""
JITTER = 0.008
"""Mean delay of a node in a step, over the step. Fitted to how published runs' errors grow with their nodes, with a
constant of its own for each framework and device: 0.0084; without any one framework 0.005 to 0.015, and of each alone
above 0 but for the sweep, whose network was measured in each run (docs/predictions.md)."""
RATED_HEAD = 128.0
"""Size of a head at which rates of fused attention are told."""
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
    lone_gradient: float = 4.0
    """Of the gradient of a rank that shares no weight, in a step of one micro-batch: nothing is added to it."""
    compute_copies: bool = False
    """Whether weights that nothing shards have whole copies that compute, and gradients of their own, one by one."""
    optimizer: float = 12.0
    """Masters and moments; sharded from ZeRO-1 on."""
    walks_backward: bool = True
    """Whether memory is that of the fullest moment of a step; else all gradients beside all activations."""

    def keeps_full_gradients(self, zero: Array, accumulates: Array, is_pipelined: Array) -> Array:
        """Returns whether gradients stay unsharded until the update, of the arguments' shape, bool.

        Args:
            zero: ZeRO level.
            accumulates: whether a step has several micro-batches.
            is_pipelined: whether there is a pipeline.
        """
        # A pipeline reduce-scatters once a step, after its last backward, at every ZeRO level.
        return np.asarray(((zero < 2) & accumulates) | is_pipelined)

    def gathers_once(self, pp: Array) -> Array:
        """Returns whether parameters are gathered, and gradients reduce-scattered, once a step, (N,) bool."""
        return np.asarray(pp > 1)

    def expert_shards(self, layouts: LayoutBatch, experts: int) -> Array:
        """Returns the ranks over which the state of X = ``experts`` experts a layer divides, (N,).

        Shards of a layer's stacked experts are full experts, so that 8 experts lie on 8 of 16 ranks. Source: torch
        2.13, FSDP2 shards dim 0.
        """
        return layouts.expert_parts(experts) if experts else layouts.expert_shards

    def further_bytes(self, zero: Array, total: Array, owned: Array) -> tuple[Array, Array]:
        """Returns bytes of further gradients, and of temporaries while no activations are alive, (N, P) each.

        Args:
            zero: ZeRO level, (N, 1).
            total: parameters of each rank before the data axes shard them, (N, P).
            owned: of these, what the data axes leave a rank, (N, P).
        """
        return np.zeros_like(total), np.zeros_like(total)


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeModel:
    """Speeds and overlaps of kernels, host and links."""

    matmul: float = 1.0
    """Share of the device's own rate of matrix products that the framework's kernels reach."""
    attention: float = 1.0
    """The same of attention."""
    hopper_attention: float = 0.0
    """The same on Hopper with heads of `RATED_HEAD`, where it was measured by itself; 0 where it wasn't."""
    hopper_exponential: float = 0.0
    """Elements of a head whose products take as long as a score's exponential, on Hopper."""
    eager_moves: float = 1.0
    """Time of an element-wise operator by itself over that of its bytes in a fused kernel."""
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
    """Bytes moved per element for which dropout draws a number; 0 where the kernel that drops draws, in the passes."""
    mask_bytes: float = 1.0
    """Bytes kept of each element that dropout decides on; 0 where backward draws its number again."""
    draw_s: float = 0.0
    """Host seconds of such a draw."""
    pass_backward: float = 1.5
    """Bytes that backward moves over those of forward."""
    host_layer_s: float = 0.0
    """Seconds in which the host issues a layer's forward; backward costs `host_backward` as much."""
    host_backward: float = 1.5
    """Host time of a backward over that of a forward."""
    selective_host: float = 1.0
    """Host time of a pass under selective recompute over another's, where Python is asked for each operator whether its
    result is kept."""
    host_runs_ahead: bool = True
    """Whether the host launches while the device computes; False where the ranks' own cores do both in turn."""
    host_microbatch_s: float = 0.0
    """Host time of a micro-batch beside its layers."""
    host_step_s: float = 0.01
    """Of a step: data, logging, reading the loss."""
    context: str = "ring"
    """How attention meets the keys of cp's other ranks: one of `spec.layout_fields.ATTENTIONS`."""
    copies_tokens: bool = True
    """Whether tokens of several rows are copied around tp's collectives, as they aren't the outermost dimension."""
    cp_overlap: float = 0.5
    """Share of a ring's traffic that hides under attention."""
    ep_overlap: float = 0.0
    """Share of ep's traffic that hides."""
    pairs_in_turns: bool = False
    """Whether the passes that a schedule pairs take turns where rows travel to experts; else one follows the other."""
    stops_ahead_of_sums: bool = False
    """Whether recompute ends ahead of a layer's last sum over tp, as it ends ahead of the product that is summed."""
    selective_sends: bool = False
    """Whether selective recompute sends again what a layer sends in forward; a ring of keys and values it never does,
    as attention's output is kept."""
    dp_overlap: float = 0.8
    """Share of the last backward (or of every one, where each reduces) under which gradients can go."""
    reduce_floor: float = 0.0
    """Least share of gradients' traffic that takes time from compute, as where the same cores carry both."""
    gather_overlap: float = 0.9
    """Share of compute under which ZeRO-3 gathers can go."""
    simulated: bool = False
    """Whether a pipeline's time is that of its actions one by one, with sends beside compute, as our runtime runs them;
    else that of the schedule's formula, with exposed sends as each rank's own time."""
    sends_in_turn: bool = False
    """Whether a rank carries a pipeline's sends and receives one after the other, as NCCL does those of a group."""
    action_s: float = 0.0
    """What a pipeline engine spends on each forward or backward of a stage beside computing and sending."""
    reduce_rounds: float = 1.0
    """Messages of a summed gradient that follow on each other, of those that ZeRO doesn't scatter."""
    reduce_bytes: float = 4.0
    """Bytes per element of a gradient on the wire."""
    gather_bytes: float = 2.0
    """Bytes per element of a parameter on the wire."""
    accumulate_bytes: float = 0.0
    """Bytes moved per parameter of a rank after each micro-batch, to add its gradient to the sum."""
    loss_passes: tuple[float, float] = (14.0, 10.0)
    """Bytes moved per logit by the loss in forward and backward: cast, softmax, gradient, cast back."""
    update_bytes: float = 30.0
    """Bytes that the optimizer moves per parameter it owns."""
    interference: float = 0.0
    """Share of hidden traffic's time by which it slows the compute that hides it."""
    jitter: float = JITTER
    """Mean delay of a node in a step, over the step; see `straggler_share`."""

    def launch_s(self, layouts: LayoutBatch, rows: Array, layer: LayerShape, is_backward: bool) -> Values:
        """Returns seconds in which the host launches a forward or backward of a layer, (N,) or a scalar.

        Args:
            layouts: N layouts.
            rows: of a micro-batch, (N,).
            layer: its sizes.
            is_backward: backward, not forward.
        """
        return self.with_draws_s(self.host_layer_s, layer, is_backward)

    def with_draws_s(self, launch_s: Values, layer: LayerShape, is_backward: bool) -> Values:
        """Returns launch seconds of a pass from those of a forward without dropout."""
        if self.draw_s and not is_backward:
            launch_s = launch_s + self.draw_s * (layer.drops + layer.drops_scores)
        return launch_s * (self.host_backward if is_backward else 1.0)

    def layer_host_s(self, host_s: Values, busy_s: Values, tp: Array) -> Values:
        """Returns host seconds of a layer's pass, waits for the device included, (N,): the host runs ahead."""
        return host_s

    def end_host_s(self, host_s: Values, busy_s: Values) -> Values:
        """Returns host seconds of embedding or head, waits for the device included, (N,): the host runs ahead."""
        return host_s

    def attention_share(self, device: Device, head_size: float) -> float:
        """Returns the share of a device's rate of fused attention that is reached.

        A score's exponential takes as long whatever the head's size E, so that small heads reach less.

        Args:
            device: that runs it.
            head_size: E.
        """
        if not (self.hopper_attention and device.is_hopper):
            return self.attention
        exponential = self.hopper_exponential
        slowed = (1.0 + exponential / RATED_HEAD) / (1.0 + exponential / head_size)
        return self.hopper_attention * min(1.0, slowed)

    def unfused_attention_s(
        self, layer: LayerShape, scores: Array, device: Device, dtype: str, is_backward: bool
    ) -> Array | None:
        """Returns seconds of attention without a fused kernel, (N,); None where the fused one computes it.

        Args:
            layer: its sizes.
            scores: pairs of query and key over all heads, masked ones too, (N,).
            device: that runs it.
            dtype: of the kernel.
            is_backward: backward, not forward.
        """
        return None

    def attention_imbalance(self, cp: Array) -> Values:
        """Returns the slowest rank's attention over the mean of the ranks of cp, (N,) or a scalar."""
        return 1.0

    def repeated_matmul_s(self, matmul_s: Values, last_product_s: Array) -> Array:
        """Returns seconds of the products that full recompute computes again, (N,).

        Recompute ends with the last tensor that backward needs: its last product isn't redone. Source:
        torch.utils.checkpoint, set_checkpoint_early_stop, the default without reentrance.
        """
        return np.asarray(matmul_s - last_product_s)

    def recomputed_scores_s(self, attention_s: Values) -> Values:
        """Returns seconds in which ``block`` recompute computes the scores again: fused attention always does."""
        return 0.0

    def exposed_tp_s(
        self, blocks: Values, collective_s: Array, gather_s: Array, layouts: LayoutBatch, is_backward: bool
    ) -> Array:
        """Returns exposed seconds of tp's traffic in a layer's pass, (N,).

        Args:
            blocks: that tp splits: attention, feed-forward; (N,) or a scalar.
            collective_s: of a block's collectives, (N,).
            gather_s: of an all-gather of the hidden state, (N,).
            layouts: N layouts.
            is_backward: backward, not forward.
        """
        return np.asarray(blocks * collective_s)

    def exposed_send_s(self, send_s: Array) -> Array:
        """Returns exposed seconds of a send between stages, (N,)."""
        return send_s

    def send_shards(self, tp: Array, token_shards: Array) -> Array:
        """Returns the ranks of tp over which a send between stages is divided, (N,)."""
        return token_shards

    def accumulated_share(self, microbatches: Array) -> Array:
        """Returns the share of micro-batches whose gradients are added to others, (N,): all but the first."""
        return np.asarray(1.0 - 1.0 / microbatches)

    def reduces_each(self) -> bool:
        """Whether ZeRO-2 and 3 reduce gradients after every micro-batch."""
        return True

    def regathers_ends(self) -> bool:
        """Whether ZeRO-3 gathers embedding and head for backward too, not for forward alone."""
        return False

    def reduce_counts(self, layers: Array, size: Array) -> tuple[Values, Values]:
        """Returns in how many collectives gradients are (reduce-scattered, all-reduced), (N, P) or scalars.

        Args:
            layers: number of layers of each rank, (N or 1, P).
            size: bytes of its gradients, (N, P).
        """
        return 1.0, self.reduce_rounds

    def gather_count(self, layers: Array) -> Values:
        """Returns in how many collectives ZeRO-1 and 2 gather parameters, (N or 1, P) or a scalar."""
        return 1.0

    def scattered_share(self) -> float:
        """Returns seconds of collectives that scatter gradients and gather parameters once a step, over a wire's."""
        return 1.0

    def sharded_overlap(self) -> float:
        """Returns the share of compute under which these collectives can go."""
        return self.dp_overlap

    def slowed_s(self, hidden_s: Array) -> Values:
        """Returns seconds by which hidden traffic slows the compute that hides it, (N, P) or a scalar."""
        return self.interference * hidden_s

    def straggler_share(self, nodes: Array) -> Array:
        """Returns what a step waits for the slowest of its nodes, over the step, of the argument's shape.

        A step ends with its latest node. The largest of n independent exponential delays of mean j is j (1 + 1/2 + ...
        + 1/n): Renyi (1953). What one node loses is in the measured rates of its devices, so n = 1 adds nothing.

        Args:
            nodes: of the job.
        """
        harmonic = np.log(nodes) + EULER + 0.5 / nodes - 1.0 / (12.0 * nodes**2)
        return np.asarray(self.jitter * np.maximum(harmonic - 1.0, 0.0))


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
    workspace_bytes: float = 0.0
    """Of these, what libraries have allocated for good."""
    context_bytes: float = 1.0 * GIB
    """Bytes of driver, libraries and communicators on a device, outside the allocator."""
    source: str = ""
    """Source of the options."""

    def __post_init__(self) -> None:
        """Refuses an unknown way to split."""
        if self.split not in SPLITS:
            raise PlanError(f"engine {self.name}: split {self.split} is none of {', '.join(SPLITS)}")

    def for_layout(self, layout: Layout) -> FrameworkProfile:
        """Returns the profile for a layout: its way of attention over cp, and fused passes where ``compile`` is on."""
        runtime, saved = self.runtime, self.saved
        if layout.attention:
            runtime = dataclasses.replace(runtime, context=layout.attention)
        if layout.compile and runtime.fused_width:
            runtime = dataclasses.replace(
                runtime,
                pass_width=runtime.fused_width,
                pass_ffn=runtime.fused_ffn,
                host_layer_s=runtime.fused_layer_s,
                selective_host=1.0,
            )
            saved = saved.of_compiled_layers()
        return self if runtime is self.runtime else dataclasses.replace(self, runtime=runtime, saved=saved)

    def with_options(self, **options: Any) -> Self:
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
