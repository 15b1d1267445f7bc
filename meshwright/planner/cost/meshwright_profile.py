"""Profile of our own runtime: bytes that compiled layers move, and cost of its counter-based dropout, beside options.

Sums count bytes by operator: w is the bytes of an element of compute, a bool has one byte.
"""

from __future__ import annotations

from meshwright.planner.cost.activation_model import ActivationModel
from meshwright.planner.cost.framework_profile import GIB, FrameworkProfile, RuntimeModel, StateBytesPerParameter
from meshwright.spec.layout_choices import GPU_CHUNK_LOGITS

FUSED_WIDTH = 38.0
"""Bytes moved per element of D in a compiled layer's forward, in bf16. Source: counted by `models.fused` off a layer's
operators, what eager code keeps for backward written too: 58, 78 and 70 bytes of a GPT-2 with F = 4 D and of Llamas
with F = 4 and 3.5 D, where eager's are 164, 164 and 144; of which these and `FUSED_FFN` give 58, 78 and 73. For
comparison: of torchtitan's passes torch.compile left 70 of 190 (`benchmarks/published`), of 90 that is 33."""
FUSED_FFN = 5.0
"""The same per element of F of each branch."""
FUSED_LAYER_S = 2e-4
"""Host seconds of a compiled layer's forward: 14 of the 38 operators of a Llama layer remain, at eager's rate of 4e-4
for all 38, and 5e-5 for guards and autograd's wrapper. An estimate, never measured."""
DRAW_BYTES = 11.5
"""Bytes moved on a device in the time in which `parallel.triton_kernels.dropout` hashes an element's place, beside
those that it reads and writes. Source: measured on one H100, 2026-11-26: 0.183 ms for 4 x 4096 x 2048 in bf16, whose
4 bytes an element take 0.047 ms at 2.85 TB/s. Backward hashes again; its 0.34 ms are of a host that launches slowly."""
CORE_DRAW_BYTES = 44.0
"""Bytes moved in the same time on a processor core, where numpy draws within the cache: 2.0 ns an element, where a
product of two float32 tensors needs 0.55 ns for its 12 bytes. Source: measured on a shared core of an AMD EPYC,
8 x 2^20 elements."""
CORE_DRAW_EXPS = 1.75
"""The same in exponentials of an element, 1.14 ns each: an operation that calibration measures and no cache helps."""
CORE_DRAW_S = 2.1e-4
"""Host seconds of a draw and the products that drop, 20 operations, of which 38 make a layer's 4e-4."""
DRAW_S = 2.1e-5
"""Host seconds of a kernel that drops and of its place in autograd's graph: 2 operations, of which 38 make a layer's
4e-4."""
MOST_SCORES = 2.0**26
"""Most attention weights of a micro-batch that are saved with their dropout; beyond, backward recomputes them from a
saved byte each. Source: `parallel.random_ops.DEAR`."""
ATTENTION = 0.75
"""Share of the device's own rate of fused attention that torch's kernels reach. Source: the mean of what was fitted to
codes that call such kernels from PyTorch, llm-foundry 0.62 and 0.46, nanotron 0.89, torchtitan 0.87, each of a machine
and version, rounded (`benchmarks/published/framework_profiles.py`)."""
HOPPER_ATTENTION = 1.3
"""The same on Hopper, where torch takes cuDNN's kernel and `kernels.RATES` has older ones. Source: measured on one
H100, 2026-11-26: causal, E = 128, 579 TFLOP/s in forward and 457 in backward at S = 4096, 615 and 469 at S = 8192,
where the table says 445 and 356."""
HOPPER_EXPONENTIAL = 63.0
"""Elements of a head whose products (4 FLOP each in forward) take as long as a score's exponential: 989 TFLOP/s over 4
times 3.9 T/s. Source: Shah et al., FlashAttention-3 (2024), section 3.2. Measured on one H100, 2026-11-27, 128 heads,
S = 8192: E = 64 takes 0.68 and 0.64 of E = 128's time in forward and backward, where this gives 0.66."""
EAGER_MOVES = 1.25
"""Time of an element-wise operator by itself over that of its bytes at 2.85 TB/s: operands that are broadcast or in
strides, and none of it in the cache. Source: there, kernels of eager steps, milliseconds measured and by bytes: llamas
113.8 of 92.7, 67.9 of 48.2, 178.9 of 139.3; a Qwen3 159.6 of 127.4, a Gemma 3 134.3 of 112.8. Compiled ones lie at
their bytes."""
UPDATE_BYTES = 30.0
"""Bytes moved per parameter that is updated, its gradient's norm included, in the time that they take. Source: measured
on one H100, 2026-11-27: 4.0, 11.6 and 20.2 ms for 0.37, 1.10 and 1.92 billion, at 2.85 TB/s: weight and two moments in
float32 read and written (24), a gradient in 16 bits read by the norm and by the update (4), the weight's copy written
(2). A gradient in float32 has 4 more and no copy. Before one kernel did it, 41."""
HOST_STEP_S = 5e-4
"""Host seconds of a step that nothing hides. Source: there, of steps of 208 ms forward, backward, norm and update left
0.2 ms; the host issues a step while the device is at the one before."""
CONTEXT_BYTES = 1.3 * GIB
"""Bytes of the driver's context and of libraries. Source: there 1.40e9 beside what the allocator had reserved."""
WORKING_FFN, FUSED_WORKING_FFN = 4.0, 2.0
"""Bytes per element of F while a layer's backward runs, eager and compiled: the gradient of what the last product read,
and in eager code one more behind it. Source: there, the allocator's events of a step of Llamas and a GPT-2."""
CAST_FFN, FUSED_CAST_FFN = 7.0, 5.0
"""What float8 adds to these. Source: there, of 1.1 billion eager and of Llama 3 8B's layers compiled."""
FUSED_AGAIN_FFN = 4.0
"""What recompute adds in a compiled layer. Source: there, of the 1.1 billion's layers."""
WORKING_WIDTH = 12.0
"""Bytes per element of D: six of its gradients in 16 bits. A guess for layers whose feed-forward part is narrow."""
WORKSPACE_BYTES = 2.0**26
"""Bytes of cuBLAS's workspaces, which stay allocated between steps. Source: there, 67.2 MB beside the state."""
PASS_WIDTH = 110.0
"""Bytes moved per element of D in an eager layer's forward. Source: the geometric mean of what was fitted to eager
PyTorch codes, torchtitan 190, nanotron 96, llm-foundry 105 and 76. Counted off a layer's operators (`FUSED_WIDTH`) they
are 116 of a GPT-2, and 60 of a Llama whose F is 3.5 D."""
INTERFERENCE = 0.5
"""Share of hidden traffic's time by which it slows compute: collectives take units and memory of the device. Source:
the geometric mean of FSDP codes, torchtitan 0.35 and llm-foundry 0.7."""
ACCUMULATE_BYTES = 10.0
"""Bytes moved per parameter to add a gradient to the sum in float32: 4 read, 4 written, 2 of the gradient. Fitted to
others: nanotron 7.8, Megatron with Transformer Engine 19.6."""
SELECTIVE_HOST = 1.9
"""Host time of a pass under selective recompute over another's, eager: 121 ms of 48 in forward and 64 more in backward
for 16 layers, 124 of 68 and 108 more for 24, on an H100 whose host held the steps up."""
MESHWRIGHT = FrameworkProfile(
    name="meshwright",
    # As autograd makes it, in the type of compute (`parallel.compute_copies`).
    states=StateBytesPerParameter(lone_gradient=2.0, compute_copies=True),
    saved=ActivationModel(
        selective_is_wide=True,
        gate_extra=2.0,
        rms_extra=4.0,
        logits=2.0,
        chunk_logits=float(GPU_CHUNK_LOGITS),
        working_width=WORKING_WIDTH,
        working_ffn=WORKING_FFN,
        fused_working_ffn=FUSED_WORKING_FFN,
        fused_again_ffn=FUSED_AGAIN_FFN,
        cast_ffn=CAST_FFN,
        fused_cast_ffn=FUSED_CAST_FFN,
    ),
    runtime=RuntimeModel(
        attention=ATTENTION,
        hopper_attention=HOPPER_ATTENTION,
        hopper_exponential=HOPPER_EXPONENTIAL,
        eager_moves=EAGER_MOVES,
        pass_width=PASS_WIDTH,
        pass_ffn=12.0,
        # Read twice and the gradient written; in backward scaled in its memory.
        loss_passes=(6.0, 4.0),
        update_bytes=UPDATE_BYTES,
        host_step_s=HOST_STEP_S,
        host_layer_s=4e-4,
        selective_host=SELECTIVE_HOST,
        dp_overlap=0.8,
        context="heads",
        pairs_in_turns=True,
        stops_ahead_of_sums=True,
        selective_sends=True,
        simulated=True,
        sends_in_turn=True,
        interference=INTERFERENCE,
        accumulate_bytes=ACCUMULATE_BYTES,
        fused_width=FUSED_WIDTH,
        fused_ffn=FUSED_FFN,
        fused_layer_s=FUSED_LAYER_S,
        draw_bytes=DRAW_BYTES,
        draw_s=DRAW_S,
        mask_bytes=0.0,
    ),
    workspace_bytes=WORKSPACE_BYTES,
    context_bytes=CONTEXT_BYTES,
    source="the runtime's own accounts of state; activations by the modules of transformers; what codes over "
    "PyTorch have in common, by their published runs",
)
"""Our runtime on accelerators."""


def drops_bytes(runtime: RuntimeModel, width: float, is_backward: bool) -> float:
    """Returns bytes moved per element on which dropout outside of attention decides.

    Args:
        runtime: that draws; without a mask one kernel draws and drops, and again in backward.
        width: bytes of an element.
        is_backward: backward, not forward.
    """
    if not runtime.mask_bytes:
        return 2.0 * width + runtime.draw_bytes
    return drop_bytes(width) + (0.0 if is_backward else runtime.draw_bytes)


def drop_bytes(width: float) -> float:
    """Returns bytes moved per element by dropout's two operations, in forward or in backward.

    Args:
        width: bytes of an element, w: a product with the mask reads w + 1 and writes w, a scaling reads and writes w.
    """
    return 4.0 * width + 1.0


def score_bytes(width: float, is_backward: bool) -> float:
    """Returns bytes moved per score of unfused attention without dropout.

    Args:
        width: bytes of an element, w: forward writes scores, masks them, takes the softmax, reads the result (6 w);
            backward writes gradients, and passes them through softmax and mask to two products (9 w).
        is_backward: backward, not forward.
    """
    return (9.0 if is_backward else 6.0) * width
