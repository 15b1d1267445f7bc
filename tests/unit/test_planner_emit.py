"""A plan in other frameworks' words: what each flag says of the layout, and what can't be said."""

from __future__ import annotations

import dataclasses
import json

import pytest

from meshwright.errors import PlanError
from meshwright.jobs.plan_model import model_of_sizes, question_of
from meshwright.jobs.plan_questions import plan_emit
from meshwright.jobs.requests import PlanConfig
from meshwright.planner.candidate import Candidate
from meshwright.planner.candidate_prices import price_candidate
from meshwright.planner.emit import FRAMEWORKS, emit_plan
from meshwright.planner.question import Question
from meshwright.spec.layout import Layout

DENSE = "layers=8,width=1024,heads=16,kv_heads=4,vocab=32000,ffn=2816"
EXPERTS = "layers=8,width=1024,heads=16,kv_heads=4,vocab=32000,experts=8,active_experts=2,expert_ffn=1408"
DEEP = "layers=31,width=1024,heads=16,kv_heads=4,vocab=32000,ffn=2816"
# Names that stand in the sources of torchtitan b5bcd76, Megatron-LM d98e8a6 and DeepSpeed edaa722.
KNOWN = {
    "torchtitan": {
        "training.max_context_length",
        "training.num_tokens_per_microbatch_per_dp_rank",
        "training.num_tokens_per_train_step",
        "training.mixed_precision_param",
        "training.enable_cpu_offload",
        "training.disable_cuda_graphs",
        "parallelism.data_parallel_replicate_degree",
        "parallelism.data_parallel_shard_degree",
        "parallelism.fsdp_reshard_after_forward",
        "parallelism.tensor_parallel_degree",
        "parallelism.context_parallel_degree",
        "parallelism.expert_parallel_degree",
        "parallelism.pipeline_parallel_degree",
        "parallelism.pipeline_parallel_schedule",
        "parallelism.num_pp_microbatches",
        "parallelism.pipeline_parallel_layers_per_stage",
        "parallelism.pipeline_parallel_first_stage_less_layers",
        "parallelism.pipeline_parallel_last_stage_less_layers",
        "compile.enable",
    },
    "megatron": {
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "pipeline-model-parallel-layout",
        "num-virtual-stages-per-pipeline-rank",
        "context-parallel-size",
        "cp-comm-type",
        "expert-model-parallel-size",
        "expert-tensor-parallel-size",
        "sequence-parallel",
        "micro-batch-size",
        "global-batch-size",
        "seq-length",
        "use-distributed-optimizer",
        "num-distributed-optimizer-instances",
        "use-megatron-fsdp",
        "data-parallel-sharding-strategy",
        "ckpt-format",
        "overlap-grad-reduce",
        "overlap-param-gather",
        "bf16",
        "fp16",
        "recompute-granularity",
        "recompute-method",
        "recompute-num-layers",
        "recompute-modules",
        "optimizer-cpu-offload",
        "use-precision-aware-optimizer",
        "fp8-format",
        "fp8-recipe",
        "moe-token-dispatcher-type",
    },
}


def question(sizes: str = DENSE, devices: int = 16) -> Question:
    config = PlanConfig(sizes=sizes, cluster=f"{devices}xh100", batch=64, sequence=1024)
    return question_of(config, model_of_sizes(sizes))


def written(framework: str, text: str, sizes: str = DENSE) -> tuple[dict[str, str], tuple[str, ...]]:
    """The flags of a layout by name, and the notes."""
    layout = Layout.parse(text if "precision" in text else text + ",precision=bf16")
    asked = question(sizes, layout.world)
    emitted = emit_plan(framework, asked, [price_candidate(asked, layout)])
    words = [line.removeprefix("--").partition(" ") for line in emitted.text.splitlines()]
    return {name: value for name, _, value in words}, emitted.notes


def test_torchtitans_flags_say_the_layout() -> None:
    flags, notes = written("torchtitan", "pp=2,shard=4,tp=2,zero=3,microbatches=8,sequence=true,recompute=full")
    assert flags["parallelism.data_parallel_shard_degree"] == "4"
    assert flags["parallelism.data_parallel_replicate_degree"] == "1"
    assert flags["parallelism.fsdp_reshard_after_forward"] == "always"
    # 64 rows over 4 readers and 8 micro-batches are 2 rows of 1024 tokens.
    assert flags["training.num_tokens_per_microbatch_per_dp_rank"] == str(2 * 1024)
    assert flags["training.num_tokens_per_train_step"] == str(64 * 1024)
    assert flags["parallelism.num_pp_microbatches"] == "8" and flags["parallelism.pipeline_parallel_schedule"] == "1F1B"
    assert "activation-checkpoint:full" in flags and any("balanced by cost" in note for note in notes)
    assert {name for name in flags if "." in name} <= KNOWN["torchtitan"]


def test_megatrons_flags_say_the_layout() -> None:
    text = "pp=2,replicate=2,shard=2,tp=2,zero=1,microbatches=4,schedule=interleaved,stages=2,sequence=true"
    flags, notes = written("megatron", text + ",recompute=full:4")
    assert flags["tensor-model-parallel-size"] == flags["pipeline-model-parallel-size"] == "2"
    # 64 rows over 4 data ranks and 4 micro-batches.
    assert flags["micro-batch-size"] == "4" and flags["global-batch-size"] == "64"
    assert "use-distributed-optimizer" in flags and flags["num-distributed-optimizer-instances"] == "2"
    assert flags["num-virtual-stages-per-pipeline-rank"] == "2" and "sequence-parallel" in flags
    # 4 of 8 layers over 4 stages.
    assert flags["recompute-method"] == "block" and flags["recompute-num-layers"] == "1" and notes
    assert set(flags) <= KNOWN["megatron"]
    experts, _ = written("megatron", "shard=8,ep=4,zero=3", EXPERTS)
    assert experts["expert-model-parallel-size"] == "4" and experts["expert-tensor-parallel-size"] == "1"
    assert experts["data-parallel-sharding-strategy"] == "optim_grads_params" and set(experts) <= KNOWN["megatron"]
    long_rows, _ = written("megatron", "cp=8,attention=gather")
    assert long_rows["cp-comm-type"] == "all_gather" and written("megatron", "cp=4")[0]["cp-comm-type"] == "a2a"
    uneven, _ = written("megatron", "pp=3,microbatches=4")
    assert uneven["pipeline-model-parallel-layout"] == "'Ettt|ttt|ttL'"


def test_deepspeeds_configuration_says_the_layout() -> None:
    asked = question(devices=16)
    layout = Layout.parse("replicate=2,shard=8,zero=3,microbatches=2,precision=bf16")
    emitted = emit_plan("deepspeed", asked, [price_candidate(asked, layout)])
    config = json.loads(emitted.text)
    accumulated = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert accumulated * 16 == config["train_batch_size"] == 64
    zero = config["zero_optimization"]
    assert zero["stage"] == 3 and zero["mics_shard_size"] == 8 and "zero.MiCS_Init" in "\n".join(emitted.notes)
    assert config["bf16"] == {"enabled": True}
    layout = Layout.parse("shard=16,zero=3,precision=bf16,offload=parameters")
    config = json.loads(emit_plan("deepspeed", asked, [price_candidate(asked, layout)]).text)
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("framework", "layout", "sizes", "why"),
    [
        ("torchtitan", "shard=2,zero=1", DENSE, "no zero=1; zero=2 works"),
        ("torchtitan", "shard=2,zero=3,recompute=selective", DENSE, "recompute=full works"),
        ("torchtitan", "shard=2,zero=3,offload=optimizer", DENSE, "take offload=parameters"),
        ("torchtitan", "tp=2", DENSE, "add sequence=true"),
        ("torchtitan", "replicate=2,precision=fp16", DENSE, "take bf16"),
        ("megatron", "shard=2,zero=3,offload=parameters", DENSE, "take offload=optimizer"),
        ("megatron", "pp=2,microbatches=4,schedule=zbv", DENSE, "it has 1f1b and interleaved"),
        ("megatron", "shard=2,zero=1,recompute=selective", DENSE, "recompute=full works"),
        ("deepspeed", "pp=2,microbatches=4", DENSE, "pp=1 works"),
        ("deepspeed", "cp=2", DENSE, "cp=1 works"),
        ("deepspeed", "replicate=2,shard=2,zero=2", DENSE, "replicate=1 works"),
        ("deepspeed", "shard=2,tp=2,ep=2,zero=3", EXPERTS, "fold together under zero=0, 1 or 2"),
        ("deepspeed", "shard=2,tp=2,ep=2,zero=1,offload=optimizer", EXPERTS, "without offload alone"),
        ("deepspeed", "replicate=2,shard=2,zero=3,offload=optimizer", DENSE, "offloads nothing; take replicate=1"),
        ("deepspeed", "shard=4,ep=2,zero=3,secondary=2", EXPERTS, "leave secondary out"),
        ("deepspeed", "shard=2,zero=3,precision=fp8", DENSE, "for precision=fp8; take bf16"),
        ("torchtitan", "shard=2,zero=3,precision=fp8", DENSE, "its float8 is a converter"),
        ("torchtitan", "shard=2,zero=3,precision=tf32", DENSE, "for precision=tf32; take bf16 or float32"),
        ("torchtitan", "pp=5,microbatches=5,schedule=interleaved,stages=3", DEEP, "take stages=2"),
        ("megatron", "shard=2,zero=3,precision=fp8_rowwise", DENSE, "fp16 or fp8"),
        ("megatron", "replicate=4,offload=optimizer", DENSE, "take zero=1 with offload=optimizer"),
        ("megatron", "shard=2,tp=2,zero=1", EXPERTS, "add sequence=true"),
        ("megatron", "replicate=4,compress=int8", DENSE, "leave compress out"),
        ("megatron", "shard=4,ep=4,zero=1,ep_overlap=2", EXPERTS, "like is --overlap-moe-expert-parallel-comm"),
        ("megatron", "shard=4,ep=4,zero=1,compress_tokens=fp8", EXPERTS, "compress_tokens=fp8.*leave it out"),
        ("megatron", "tp=4,tp_overlap=2", DENSE, "leave it out, and hide tp's traffic by its own flags"),
    ],
)
def test_what_a_framework_lacks_is_refused_in_a_sentence(framework: str, layout: str, sizes: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        written(framework, layout, sizes)


def test_what_the_frameworks_check_is_met() -> None:
    """CUDA graphs refuse pipelines, Transformer Engine's words, flags that come in pairs."""
    flags, _ = written("torchtitan", "pp=2,shard=4,zero=3,microbatches=8")
    assert flags["training.disable_cuda_graphs"] == ""
    assert "training.disable_cuda_graphs" in written("torchtitan", "shard=8,ep=4,zero=3", EXPERTS)[0]
    assert "training.disable_cuda_graphs" not in written("torchtitan", "shard=8,zero=3")[0]
    # Eight layers in three stages: 3, 3 and 2, by torchtitan's own rule of fewer layers at the ends.
    flags, _ = written("torchtitan", "pp=3,microbatches=4")
    names = ("layers_per_stage", "first_stage_less_layers", "last_stage_less_layers")
    assert [flags[f"parallelism.pipeline_parallel_{name}"] for name in names] == ["3", "0", "1"]
    flags, notes = written("torchtitan", "shard=2,cp=2,zero=3,attention=gather")
    assert not notes and flags["parallelism.context_parallel_degree"] == "2"
    notes = written("torchtitan", "cp=2,attention=ring")[1]
    assert "FSDP shards parameters over the ranks of cp" in notes[0] and "gathers keys and values" in notes[1]
    assert written("megatron", "cp=2,attention=ring")[0]["cp-comm-type"] == "p2p"
    flags, notes = written("megatron", "shard=2,tp=2,zero=1,offload=optimizer,precision=fp8")
    assert "use-precision-aware-optimizer" in flags and "CUDA_DEVICE_MAX_CONNECTIONS=1" in notes[0]
    assert flags["fp8-format"] == "hybrid" and flags["fp8-recipe"] == "tensorwise" and "bf16" in flags
    assert "use-distributed-optimizer" in written("megatron", "tp=2,offload=optimizer")[0]
    assert written("megatron", "shard=4,ep=4,zero=1", EXPERTS)[0]["moe-token-dispatcher-type"] == "alltoall"
    notes = written("megatron", "shard=4,ep=4,zero=1,ep_node=2", EXPERTS)[1]
    assert "once to each node" in notes[0] and "--moe-enable-deepep" in notes[0]


def test_rows_that_do_not_divide_are_refused() -> None:
    """torchtitan wants a micro-batch's tokens by tp x 2 cp, Megatron a row's by 2 cp."""
    layout = Layout.parse("cp=8,attention=gather,precision=bf16")
    config = PlanConfig(sizes=DENSE, cluster="8xh100", batch=64, sequence=1000)
    asked = question_of(config, model_of_sizes(DENSE))
    for framework, why in (("torchtitan", "into 16 equal parts"), ("megatron", "a multiple of 2 x cp = 16")):
        short = dataclasses.replace(layout, microbatches=64)
        with pytest.raises(PlanError, match=why):
            emit_plan(framework, asked, [price_candidate(asked, short)])


def test_where_the_plan_cannot_be_said_the_next_best_is() -> None:
    asked = question(devices=2)
    layouts = ("pp=2,microbatches=8,precision=bf16", "shard=2,zero=2,precision=bf16")
    candidates: list[Candidate] = [price_candidate(asked, Layout.parse(text)) for text in layouts]
    emitted = emit_plan("deepspeed", asked, candidates)
    assert emitted.candidate is candidates[1] and "pp=1 works" in emitted.notes[0] and layouts[0] in emitted.notes[0]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_plan_can_be_written_for_each(framework: str) -> None:
    config = PlanConfig(sizes=DENSE, cluster="2xh100", batch=64, sequence=1024, emit=framework)  # type: ignore[arg-type]
    emitted = plan_emit(config, model_of_sizes(DENSE))
    assert emitted.text and emitted.is_met and emitted.to_json()["framework"] == framework
    assert dataclasses.is_dataclass(emitted.candidate)
