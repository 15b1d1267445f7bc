"""The frameworks whose published runs are checked, as options with their sources; our own runtime is one of them."""

from __future__ import annotations

from benchmarks.published.middle_profile import middle_profile
from benchmarks.published.other_profile import OtherActivations, OtherProfile, OtherRuntime, OtherStates
from meshwright.planner.cost.framework_profile import GIB
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT

__all__ = ["MESHWRIGHT"]
NANOTRON = OtherProfile(
    name="nanotron",
    states=OtherStates(working_gradient=2.0, whole_when_accumulating=False, update=(2.0, 4.0)),
    saved=OtherActivations(gate_extra=2.0, late_layers=20.0, late_work=1.8e10, gathered=6.0, logits=9.0),
    runtime=OtherRuntime(
        attention=0.89,
        pass_width=96.0,
        pass_ffn=12.0,
        loss_passes=(26.7, 25.0),
        accumulate_bytes=7.8,
        host_layer_s=1.8e-3,
        host_step_s=0.04,
        action_s=5.5e-4,
        dp_overlap=0.9,
        scatter_overlap=0.1,
        scatter_share=0.75,
        bucket_bytes=25.0 * 2**20,
        gather_pieces=3.0,
        reduce_pieces=1.0,
        interference=0.05,
    ),
    split="compute",
    allocator=1.15,
    context_bytes=10.5 * GIB,
    source="huggingface/nanotron of winter 2024: models/llama.py, parallel/, optim/",
)
NANOTRON_BEFORE = NANOTRON.with_options(name="nanotron-before", saved__late_work=0.0, saved__sends_stop_host=True)
NANOTRON_AFAB = NANOTRON.with_options(name="nanotron-afab")
MEGATRON_2020 = OtherProfile(
    name="megatron-2020",
    saved=OtherActivations(flash=False, score_bytes=5.0, logits=10.0),
    runtime=OtherRuntime(
        flash=False,
        score_passes=14.3,
        pass_width=35.2,
        loss_passes=(40.0, 10.0),
        action_s=2.97e-3,
        dp_overlap=0.0,
        send_divided=True,
        reduce_bytes=2.0,
    ),
    split="even",
    source="Narayanan et al. (SC 2021); NVIDIA/Megatron-LM of 2020 and 2021",
)
MEGATRON_2022 = MEGATRON_2020.with_options(
    name="megatron-2022", runtime__pass_width=13.3, runtime__score_passes=17.9, runtime__action_s=8e-4
)
DEEPSPEED = MEGATRON_2020.with_options(
    name="megatron-deepspeed",
    runtime__action_s=0.0,
    runtime__matmul=1.08,
    runtime__host_layer_s=8.3e-4,
    runtime__host_tp_power=0.066,
    runtime__host_backward=1.62,
    runtime__host_ahead=False,
    runtime__host_softmax_s=3.9e-4,
    runtime__host_microbatch_s=6e-4,
    runtime__host_step_s=0.0019,
    runtime__update_bytes=29.0,
    runtime__score_passes=11.0,
    runtime__pass_width=16.8,
    runtime__pass_ffn=2.9,
    runtime__loss_passes=(20.8, 10.7),
    runtime__tp_meeting=2.5,
    runtime__reduce_bytes=4.0,
)
DEEPSPEED_BIGSCIENCE = MEGATRON_2020.with_options(
    name="megatron-deepspeed-bigscience",
    runtime__action_s=0.0,
    runtime__matmul=0.984,
    runtime__score_passes=22.0,
    runtime__pass_width=62.4,
    runtime__tp_start_s=2.9e-4,
    states__gradient=5.5,
    states__working_gradient=0.0,
    states__optimizer=16.0,
    context_bytes=2.5 * GIB,
)
SAILOR = MEGATRON_2020.with_options(
    name="sailor",
    runtime__host_step_s=0.0067,
    runtime__loss_passes=(64.0, 40.0),
    runtime__tp_start_s=3e-5,
    saved__score_bytes=4.0,
    runtime__host_layer_s=1.3e-3,
    runtime__score_passes=50.0,
    runtime__pass_width=25.0,
    runtime__pass_ffn=21.0,
    runtime__matmul=0.85,
    runtime__action_s=5e-4,
    allocator=1.0,
    allocator_bytes=4.4 * GIB,
    source="eth-easl/sailor: a fork of Megatron-DeepSpeed in float32 with TF32 products, no dropout",
)
MEGATRON_PLAIN = OtherProfile(
    name="megatron-te",
    saved=OtherActivations(logits=4.15, fresh_gradient=6.0),
    runtime=OtherRuntime(attention=1.47, dp_overlap=0.0, tp_regather=True, accumulate_bytes=19.6),
    split="even",
    source="NVIDIA Megatron-LM 0.14 with Transformer Engine 2.11; SimuMax's strategy files: no overlap",
)
NEMO = OtherProfile(
    name="nemo",
    runtime=OtherRuntime(dp_overlap=1.0, pass_width=16.9, tp_overlap=0.19, action_s=2e-4, host_step_s=0.142),
    split="even",
    source="MLPerf training logs and configurations, v3.0",
)
NEMO_OVERLAP = NEMO.with_options(
    name="nemo-overlap",
    runtime__pass_width=15.3,
    runtime__host_step_s=0.176,
    runtime__tp_overlap=1.0,
    runtime__dp_overlap=1.0,
    runtime__send_overlap=0.55,
)
BRIDGE = OtherProfile(
    name="bridge",
    runtime=OtherRuntime(
        dp_overlap=0.9,
        attention=1.89,
        pass_width=65.6,
        route_bytes=30.0,
        cast_bytes=3.9,
        tp_overlap=1.0,
        ep_overlap=0.5,
        unfused_sinks="all",
    ),
    split="even",
    source="Megatron-Bridge performance tables, containers before 26.06",
)
COMPOSER = OtherProfile(
    name="fsdp-composer",
    runtime=OtherRuntime(
        attention=0.62,
        pass_width=105.0,
        dp_overlap=0.9,
        reduce_each=True,
        reduce_bytes=2.0,
        recompute_stops=True,
        interference=0.7,
    ),
    source="llm-foundry, scripts/train/benchmarking",
)
COMPOSER_HOPPER = COMPOSER.with_options(name="fsdp-composer-hopper", runtime__attention=0.46, runtime__pass_width=76.0)
TITAN_EAGER = OtherProfile(
    name="torchtitan-eager",
    saved=OtherActivations(selective_share=0.5, logits=12.0),
    runtime=OtherRuntime(
        dp_overlap=0.9,
        pass_width=190.0,
        reduce_each=True,
        cp_unbalanced=True,
        recompute_stops=True,
        interference=0.35,
        # Selective recompute keeps what reduce-scatters give and gathers inputs again; functional collectives of tokens
        # copy them. Source: torchtitan, distributed/activation_checkpoint.py; torch, _functional_collectives.py.
        tp_regather=True,
        copies_tokens=True,
    ),
    allocator_bytes=2.0 * GIB,
    source="pytorch/torchtitan, benchmarks/ and docs/performance.md",
)
TITAN = TITAN_EAGER.with_options(
    name="torchtitan",
    runtime__attention=0.87,
    runtime__pass_width=70.0,
    runtime__pass_ffn=11.0,
    runtime__cast_bytes=5.5,
    saved__logits=11.0,
)
TITAN_2025 = TITAN.with_options(name="torchtitan-2025", saved__logits=4.0, source="torchtitan of 2025: loss compiled")
# Scales of rows are found, applied and turned by passes over what a product reads, so they weigh less in wide layers.
TITAN_ROWWISE = TITAN.with_options(name="torchtitan-rowwise", runtime__cast_bytes=26.0)
TITAN_ASYNC_ROWWISE = TITAN_ROWWISE.with_options(
    name="torchtitan-async-tp-rowwise", runtime__tp_overlap=0.16, runtime__copies_tokens=False
)
TITAN_ASYNC = TITAN.with_options(name="torchtitan-async-tp", runtime__tp_overlap=0.16, runtime__copies_tokens=False)
BRIDGE_GRAPHS = BRIDGE.with_options(
    name="bridge-graphs",
    runtime__unfused_sinks="window",
    runtime__pass_width=19.3,
    runtime__ep_overlap=0.7,
    runtime__route_bytes=6.0,
    runtime__cast_bytes=2.1,
)
MEGATRON_CORE = middle_profile(
    "megatron-core",
    ((BRIDGE_GRAPHS, BRIDGE), (NEMO, NEMO_OVERLAP), (MEGATRON_PLAIN,)),
    "NVIDIA Megatron-Core with Transformer Engine, 2023 on: what NeMo, Megatron-Bridge and SimuMax ran",
)
