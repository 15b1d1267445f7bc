# long: three frameworks, each a writer, share one view of a layout
"""A plan in the words of other frameworks: flags of torchtitan and Megatron-LM, a configuration of DeepSpeed.

Layout, batch and precision are written; the model, its data and its optimizer stay with the reader. What a framework
can't express is refused with a sentence, and nothing is left out in silence: differences are notes.

Source of the names, all of August 2026: torchtitan b5bcd76 (torchtitan/config/configs.py,
distributed/activation_checkpoint.py), Megatron-LM d98e8a6 (megatron/training/arguments.py,
megatron/core/model_parallel_config.py), DeepSpeed edaa722 (deepspeed/runtime/config.py, runtime/zero/config.py,
docs/_pages/config-json.md).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from meshwright.errors import PlanError
from meshwright.planner.candidate import Candidate
from meshwright.planner.cases import candidate_json
from meshwright.planner.question import Question
from meshwright.schedules.spec import searched_schedules
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.groups import row_axes
from meshwright.spec.layer_graph import even_bounds
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import Recompute
from meshwright.spec.layout_fields import DEFAULT_SCHEDULE
from meshwright.units import format_seconds

TORCHTITAN_SCHEDULES: Mapping[str, str] = MappingProxyType(
    {
        "1f1b": "1F1B",
        "gpipe": "GPipe",
        "interleaved": "Interleaved1F1B",
        "loopedbfs": "LoopedBFS",
        "zbv": "ZBVZeroBubble",
        "dualpipev": "DualPipeV",
    }
)
"""Our schedules by torch's names, by which torchtitan looks them up. Source: torch.distributed.pipelining.schedules,
`get_schedule_class`."""
MEGATRON_SCHEDULES = ("1f1b", "interleaved")
"""Our schedules that Megatron-LM has."""
MEGATRON_ATTENTIONS: Mapping[str, str] = MappingProxyType({"heads": "a2a", "gather": "all_gather", "ring": "p2p"})
"""Ways of `cp` by Transformer Engine's names, which `--cp-comm-type` hands on."""
FSDP_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Megatron-FSDP's strategies by ZeRO level."""
_PRECISIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "torchtitan": ("bf16", "float32"),
        "megatron": ("bf16", "float32", "fp16", "fp8"),
        "deepspeed": ("bf16", "float32", "fp16"),
    }
)
"""Precisions that a flag or a key of each asks for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Emitted:
    """A layout in the words of another framework."""

    framework: str
    """One of `FRAMEWORKS`."""
    candidate: Candidate
    """The layout that was written."""
    text: str
    """Flags, one a line, or a JSON configuration."""
    notes: tuple[str, ...]
    """What differs there, and why layouts before this one weren't written."""

    @property
    def is_met(self) -> bool:
        """Whether the question has an answer, as always where it isn't refused."""
        return True

    def to_json(self) -> dict[str, object]:
        """Returns the answer as plain values."""
        written = {"framework": self.framework, "text": self.text, "notes": list(self.notes)}
        return written | {"best": candidate_json(self.candidate)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """A layout's sizes as other frameworks count them."""

    replicate: int
    """Ranks that hold copies."""
    shard: int
    """Ranks that share the state and read other rows."""
    pp: int
    tp: int
    cp: int
    ep: int
    rows: int
    """Of the global batch."""
    micro_rows: int
    """Of a micro-batch on a data rank."""

    @classmethod
    def of(cls, question: Question, layout: Layout) -> _Batch:
        replicate = math.prod(layout.degree(name) for name in row_axes(Holds.COPY))
        shard = math.prod(layout.degree(name) for name in row_axes(Holds.SHARD))
        rows = question.job.rows
        return cls(
            replicate=replicate,
            shard=shard,
            pp=layout.degree(Mechanics.STAGES),
            tp=layout.degree(Mechanics.MATRICES),
            cp=layout.degree(Mechanics.TOKENS),
            ep=layout.degree(Mechanics.EXPERTS),
            rows=rows,
            micro_rows=rows // (replicate * shard * layout.microbatches),
        )


def narrowed_question(framework: str, question: Question) -> Question:
    """Returns the question with a search bounded to what a framework is likelier to express; given choices stay."""
    return dataclasses.replace(question, limits={**SPACES[framework], **question.limits})


def recomputed_whole(layouts: Sequence[Layout]) -> list[Layout]:
    """Returns forms of layouts that recompute every layer, of those that recompute some whole ones."""
    return [
        dataclasses.replace(layout, recompute=Recompute("full"))
        for layout in layouts
        if layout.recompute.mode == "full"
    ]


_NODE_DISPATCH = {
    "torchtitan": "where DeepEP is installed, --parallelism.expert_parallel_comm_backend deepep does the like",
    "megatron": "where DeepEP is installed, --moe-token-dispatcher-type flex --moe-enable-deepep does the like",
    "deepspeed": "deepspeed sends it once for each",
}
"""What each framework has in place of ``ep_node``."""


def emit_plan(framework: str, question: Question, candidates: Sequence[Candidate]) -> Emitted:
    """Writes the first of some layouts that a framework can express.

    Args:
        framework: one of `FRAMEWORKS`.
        question: what was planned.
        candidates: the plan first, then others by time.

    Raises:
        PlanError: when it can express none of them, with the reason for the plan.
    """
    reasons: list[str] = []
    for index, candidate in enumerate(candidates):
        try:
            text, notes = FRAMEWORKS[framework](question, candidate.layout)
        except PlanError as error:
            reasons.append(str(error))
            continue
        if candidate.layout.ep_node:
            whom = "node" if candidate.layout.ep_node > 1 else "rank"
            notes = [f"the plan sends a token once to each {whom} of its experts; {_NODE_DISPATCH[framework]}", *notes]
        if index:
            slower = candidate.price.step_s / candidates[0].price.step_s - 1
            notes = [
                f"the plan is {candidates[0].layout}, and {reasons[0]}; this one takes "
                f"{format_seconds(candidate.price.step_s)} a step, {slower:+.1%}",
                *notes,
            ]
        return Emitted(framework=framework, candidate=candidate, text=text, notes=tuple(notes))
    raise PlanError(
        f"{framework} can express none of {len(candidates)} layouts that were planned for it; of the plan, "
        f"{candidates[0].layout}: {reasons[0]}"
    )


def _refuse_our_own(framework: str, layout: Layout) -> None:
    """Refuses what no other framework of the three has in this form."""
    for has, what, cure in (
        (layout.islands > 1, "islands that join once in some steps", "leave islands out"),
        (bool(layout.compress.name != "none"), f"compress={layout.compress}", "leave compress out"),
        (layout.compress_weights != "none", f"compress_weights={layout.compress_weights}", "leave it out"),
        (layout.compress_tokens != "none", f"compress_tokens={layout.compress_tokens}", "leave it out"),
        (
            layout.tp_overlap > 0,
            f"tp_overlap={layout.tp_overlap}",
            "leave it out, and hide tp's traffic by its own flags",
        ),
        (
            layout.ep_overlap > 0,
            f"ep_overlap={layout.ep_overlap}",
            "leave it out (Megatron's like is --overlap-moe-expert-parallel-comm)",
        ),
        (
            layout.ep_halves,
            "ep_halves=true",
            "leave it out (Megatron's like is --overlap-moe-expert-parallel-comm)",
        ),
        (layout.ep_keep, "ep_keep=true", "leave it out"),
        (bool(layout.rows), f"uneven rows ({layout.rows})", "plan for one kind of device"),
    ):
        if has:
            raise PlanError(f"{framework} has no {what}; {cure}")
    if layout.precision not in _PRECISIONS[framework]:
        in_code = framework == "torchtitan" and layout.precision.startswith("fp8")
        why = "; its float8 is a converter of a Python configuration" if in_code else ""
        cures = " or ".join(_PRECISIONS[framework])
        raise PlanError(f"{framework} has no flag or key for precision={layout.precision}{why}; take {cures}")


def _check_torchtitan(question: Question, layout: Layout, batch: _Batch) -> None:
    """Refuses what torchtitan has no flag for, or checks and refuses itself."""
    _refuse_our_own("torchtitan", layout)
    if layout.zero == 1:
        raise PlanError("torchtitan shards parameters wherever it shards (FSDP2), so it has no zero=1; zero=2 works")
    if batch.tp > 1 and not layout.sequence:
        raise PlanError("torchtitan's tp splits tokens too unless a model's own code says otherwise; add sequence=true")
    if layout.offload == "optimizer":
        raise PlanError("torchtitan offloads parameters, gradients and optimizer together; take offload=parameters")
    if layout.secondary:
        raise PlanError("torchtitan keeps no secondary copy of gathered weights; leave secondary out")
    if batch.pp > 1 and (layout.schedule or DEFAULT_SCHEDULE) not in TORCHTITAN_SCHEDULES:
        raise PlanError(f"torchtitan has no schedule={layout.schedule}; it has {', '.join(TORCHTITAN_SCHEDULES)}")
    tokens, parts = batch.micro_rows * question.job.sequence, batch.tp * (2 * batch.cp if batch.cp > 1 else 1)
    if tokens % parts:
        raise PlanError(
            f"torchtitan splits the {tokens} tokens of a micro-batch into {parts} equal parts (tp x 2 cp), "
            "and they don't divide; take a sequence that does"
        )


def _torchtitan(question: Question, layout: Layout) -> tuple[str, list[str]]:
    batch, job, notes = _Batch.of(question, layout), question.job, []
    _check_torchtitan(question, layout, batch)
    section = "--parallelism"
    flags = [
        f"--training.max_context_length {job.sequence}",
        f"--training.num_tokens_per_microbatch_per_dp_rank {batch.micro_rows * job.sequence}",
        f"--training.num_tokens_per_train_step {batch.rows * job.sequence}",
        f"--training.mixed_precision_param {'bfloat16' if layout.precision == 'bf16' else 'float32'}",
        f"{section}.data_parallel_replicate_degree {batch.replicate}",
        f"{section}.data_parallel_shard_degree {batch.shard}",
    ]
    if layout.zero or batch.cp > 1:
        flags.append(f"{section}.fsdp_reshard_after_forward {'always' if layout.zero == 3 else 'never'}")
    if batch.tp > 1:
        flags.append(f"{section}.tensor_parallel_degree {batch.tp}")
    if batch.cp > 1:
        flags.append(f"{section}.context_parallel_degree {batch.cp}")
        if not layout.zero:
            notes.append("torchtitan's FSDP shards parameters over the ranks of cp too; the plan copies them")
        if _cp_attention(question, layout, batch) != "gather":
            notes.append("torchtitan's cp gathers keys and values; the plan was priced otherwise (attention=)")
    if batch.ep > 1:
        flags.append(f"{section}.expert_parallel_degree {batch.ep}")
    if batch.pp > 1:
        flags += _torchtitan_pipeline(job.shape.layers, layout, batch)
        notes.append("the stages' layers are balanced by cost here and by number there")
    if batch.pp > 1 or batch.ep > 1:
        flags.append("--training.disable_cuda_graphs")  # on by default, and refused with pp and most ep
    if layout.offload == "parameters":
        flags.append("--training.enable_cpu_offload")
    if layout.compile:
        flags.append("--compile.enable")
    # tyro takes the word of a subcommand behind all flags.
    flags.append(f"activation-checkpoint:{_whole_recompute('torchtitan', layout, job.shape.layers) or 'none'}")
    return "\n".join(flags), notes


def _torchtitan_pipeline(layers: int, layout: Layout, batch: _Batch) -> list[str]:
    """Writes the pipeline: where layers don't divide, the first and the last stage have fewer."""
    section, schedule = "--parallelism", layout.schedule or DEFAULT_SCHEDULE
    flags = [
        f"{section}.pipeline_parallel_degree {batch.pp}",
        f"{section}.pipeline_parallel_schedule {TORCHTITAN_SCHEDULES[schedule]}",
        f"{section}.num_pp_microbatches {layout.microbatches}",
    ]
    stages = batch.pp * layout.stages_per_rank
    lacking = -layers % stages
    each, first = (layers + lacking) // stages, lacking // 2
    if lacking - first <= each:
        return [
            *flags,
            f"{section}.pipeline_parallel_layers_per_stage {each}",
            f"{section}.pipeline_parallel_first_stage_less_layers {first}",
            f"{section}.pipeline_parallel_last_stage_less_layers {lacking - first}",
        ]
    usual = dataclasses.replace(layout, stages=0).stages_per_rank
    if layout.stages_per_rank != usual:
        raise PlanError(
            f"torchtitan gives a rank {usual} stages where {layers} layers are too few for {stages} even ones; take "
            f"stages={usual}"
        )
    return flags


def _whole_recompute(framework: str, layout: Layout, layers: int) -> str:
    """Returns ``full`` or an empty text; refuses what recomputes a part of the layers, or a part of each."""
    if not layout.recompute:
        return ""
    if layout.recompute.mode != "full" or layout.recompute.share(layers) < 1:
        raise PlanError(
            f"{framework} has no recompute={layout.recompute}: it recomputes all layers whole, or by a rule of its "
            "own; recompute=full works"
        )
    return "full"


def _check_megatron(question: Question, layout: Layout, batch: _Batch) -> None:
    """Refuses what Megatron-LM has no flag for, or checks and refuses itself (`validate_args`, `MoELayer`)."""
    _refuse_our_own("megatron", layout)
    job = question.job
    if layout.secondary:
        raise PlanError("megatron keeps no secondary copy of gathered weights; leave secondary out")
    if layout.offload == "parameters":
        raise PlanError("megatron offloads the optimizer alone; take offload=optimizer")
    if layout.offload == "optimizer" and not layout.zero and batch.replicate > 1:
        raise PlanError("megatron offloads what its distributed optimizer shards; take zero=1 with offload=optimizer")
    if layout.compile:
        raise PlanError("megatron compiles no layers by a flag; leave compile out")
    if batch.cp > 1 and job.sequence % (2 * batch.cp):
        raise PlanError(f"megatron's rows are a multiple of 2 x cp = {2 * batch.cp} tokens; {job.sequence} is none")
    if job.shape.experts and batch.tp > 1 and not layout.sequence:
        raise PlanError("megatron trains experts beside tp with tokens split alone; add sequence=true")


def _megatron(question: Question, layout: Layout) -> tuple[str, list[str]]:
    batch, job, notes = _Batch.of(question, layout), question.job, []
    _check_megatron(question, layout, batch)
    flags = [
        f"--tensor-model-parallel-size {batch.tp}",
        f"--pipeline-model-parallel-size {batch.pp}",
        f"--context-parallel-size {batch.cp}",
        f"--micro-batch-size {batch.micro_rows}",
        f"--global-batch-size {batch.rows}",
        f"--seq-length {job.sequence}",
    ]
    if batch.tp > 1 and layout.sequence:
        flags.append("--sequence-parallel")
    if batch.cp > 1:
        flags.append(f"--cp-comm-type {MEGATRON_ATTENTIONS[_cp_attention(question, layout, batch)]}")
    if job.shape.experts:
        flags.append(f"--expert-model-parallel-size {batch.ep}")
        # Without ep tp splits each expert; with it ep divides tp's ranks too, and an expert is whole.
        flags.append(f"--expert-tensor-parallel-size {1 if batch.ep > 1 else batch.tp}")
        if batch.ep > 1:
            flags.append("--moe-token-dispatcher-type alltoall")
    flags += _megatron_pipeline(job.shape.layers, layout, batch)
    flags += _megatron_data(layout, batch)
    if layout.precision == "fp8":  # of present values, as here; the default's scales follow from the steps before
        flags += ["--bf16", "--fp8-format hybrid", "--fp8-recipe tensorwise"]
    elif layout.precision != "float32":
        flags.append(f"--{layout.precision}")
    flags += _megatron_recompute(job.shape.layers, layout, batch)
    if layout.offload == "optimizer":
        flags += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    if layout.zero > 1:
        notes.append("megatron's FSDP refuses CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment")
    elif batch.tp > 1 or batch.cp > 1:
        notes.append("megatron's tp and cp want CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment before Blackwell")
    if layout.recompute.mode == "full" and layout.recompute.share(job.shape.layers) < 1:
        notes.append("megatron recomputes the first layers of each stage; the plan spaces them evenly over the model")
    return "\n".join(flags), notes


def _cp_attention(question: Question, layout: Layout, batch: _Batch) -> str:
    """Returns how cp computes attention: as said, else heads where they divide, else a gather."""
    heads = min((block.kv_heads for block in question.job.shape.blocks if block.kv_heads), default=0)
    return layout.attention or ("heads" if heads and heads % (batch.cp * batch.tp) == 0 else "gather")


def _megatron_pipeline(layers: int, layout: Layout, batch: _Batch) -> list[str]:
    if batch.pp == 1:
        return []
    schedule, stages = layout.schedule or DEFAULT_SCHEDULE, layout.stages_per_rank
    if schedule not in MEGATRON_SCHEDULES:
        raise PlanError(f"megatron has no schedule={schedule}; it has {' and '.join(MEGATRON_SCHEDULES)}")
    if schedule == "interleaved" and layout.microbatches % batch.pp:
        raise PlanError(
            f"megatron's interleaved schedule takes micro-batches in groups of pp, and {layout.microbatches} is no "
            f"multiple of {batch.pp}"
        )
    flags = [f"--num-virtual-stages-per-pipeline-rank {stages}"] if stages > 1 else []
    if layout.split or layers % (batch.pp * stages):
        parts = layout.split.layers or [b - a for a, b in pairwise(even_bounds(layers, batch.pp * stages))]
        # E embedding, t decoder layers, L loss; | between stages.
        texts = ["t" * count for count in parts]
        texts[0], texts[-1] = "E" + texts[0], texts[-1] + "L"
        flags = [f"--pipeline-model-parallel-layout '{'|'.join(texts)}'"]
    return flags


def _megatron_data(layout: Layout, batch: _Batch) -> list[str]:
    overlap = ["--overlap-grad-reduce"] if batch.replicate * batch.shard > 1 else []
    if not layout.zero:
        # Offload is of the distributed optimizer, also on one data rank.
        return ["--use-distributed-optimizer", *overlap] if layout.offload == "optimizer" else overlap
    flags = ["--use-distributed-optimizer", *overlap, "--overlap-param-gather"]
    if layout.zero > 1:
        flags += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {FSDP_STRATEGIES[layout.zero]}"]
        flags.append("--ckpt-format fsdp_dtensor")
    if batch.replicate > 1:
        flags.append(f"--num-distributed-optimizer-instances {batch.replicate}")
    return flags


def _megatron_recompute(layers: int, layout: Layout, batch: _Batch) -> list[str]:
    if not layout.recompute:
        return []
    if layout.recompute.mode != "full":
        raise PlanError(
            f"megatron has no recompute={layout.recompute}: its selective recompute runs whole modules again, ours "
            "everything but products and attention; recompute=full works"
        )
    if layout.recompute.rest != "none":
        raise PlanError(
            f"megatron has no recompute={layout.recompute}: it recomputes layers in one way; recompute=full works, or "
            f"recompute=full:{layout.recompute.count}"
        )
    share = layout.recompute.share(layers)
    if share >= 1:
        return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    by_stage = math.ceil(share * layers / (batch.pp * layout.stages_per_rank))
    return ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {by_stage}"]


def _check_deepspeed(layout: Layout, batch: _Batch) -> None:
    """Refuses what a configuration can't ask for, or DeepSpeed checks and refuses itself."""
    _refuse_our_own("deepspeed", layout)
    mics = batch.replicate > 1 and batch.shard > 1
    if batch.pp > 1:
        raise PlanError(
            "deepspeed's pipelines are code (PipelineModule), which its configuration can't ask for; pp=1 works"
        )
    if batch.cp > 1:
        raise PlanError("deepspeed's Ulysses changes the model's attention by code, no configuration does; cp=1 works")
    if batch.tp > 1 and batch.ep > 1 and (layout.zero == 3 or layout.offload != "none"):
        raise PlanError("deepspeed's AutoTP and AutoEP fold together under zero=0, 1 or 2 without offload alone")
    if mics and (layout.zero < 3 or batch.ep > 1):
        raise PlanError(
            f"deepspeed shards zero={layout.zero} over all data ranks, so it has no replicate={batch.replicate} beside "
            f"shard={batch.shard}; replicate=1 works, and zero=3 without experts by MiCS"
        )
    if mics and layout.offload != "none":
        raise PlanError("deepspeed's MiCS (copies of shards) offloads nothing; take replicate=1, or leave offload out")
    if layout.secondary and batch.ep > 1:
        raise PlanError("deepspeed's AutoEP has no secondary copy of gathered weights; leave secondary out")
    if layout.offload != "none" and not layout.zero:
        raise PlanError("deepspeed offloads what ZeRO shards; take zero=1, 2 or 3 with offload")
    if layout.offload == "parameters" and layout.zero < 3:
        raise PlanError("deepspeed offloads parameters under zero=3 alone; take offload=optimizer")


def _deepspeed(question: Question, layout: Layout) -> tuple[str, list[str]]:
    batch, notes = _Batch.of(question, layout), []
    _check_deepspeed(layout, batch)
    zero: dict[str, object] = {"stage": layout.zero}
    if batch.replicate > 1 and batch.shard > 1:
        zero["mics_shard_size"] = batch.shard
        notes.append("deepspeed's MiCS wants the model built under deepspeed.zero.MiCS_Init")
    if layout.secondary:
        zero["zero_hpz_partition_size"] = layout.secondary
    if layout.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if layout.offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, object] = {
        "train_batch_size": batch.rows,
        "train_micro_batch_size_per_gpu": batch.micro_rows,
        "gradient_accumulation_steps": layout.microbatches,
        "zero_optimization": zero,
    }
    if layout.precision in ("bf16", "fp16"):
        config[layout.precision] = {"enabled": True}
    if batch.tp > 1:
        config["tensor_parallel"] = {"autotp_size": batch.tp}
        notes.append("deepspeed's AutoTP splits no tokens between its products (sequence parallelism)")
    if batch.ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": batch.ep}
        notes.append('add "preset_model" to expert_parallel: the family of the mixture')
    if _whole_recompute("deepspeed", layout, question.job.shape.layers):
        notes.append("recompute=full is the model's own: call gradient_checkpointing_enable() on it")
    if layout.compile:
        notes.append("compile=true is a call there: engine.compile()")
    return json.dumps(config, indent=2), notes


def _axes_without(*mechanics: Mechanics) -> tuple[str, ...]:
    return tuple(name for name, axis in known_axes().items() if axis.mechanics not in mechanics)


SPACES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "torchtitan": {
            "levels": (0, 2, 3),
            "recomputes": ("none", "full"),
            "schedules": tuple(name for name in searched_schedules() if name in TORCHTITAN_SCHEDULES),
            "offloads": ("none", "parameters"),
        },
        "megatron": {
            "recomputes": ("none", "full"),
            "schedules": MEGATRON_SCHEDULES,
            "offloads": ("none", "optimizer"),
        },
        "deepspeed": {"recomputes": ("none", "full"), "axes": _axes_without(Mechanics.STAGES, Mechanics.TOKENS)},
    }
)
"""Bounds of a search for layouts that a framework is likelier to express, fields of `Space`."""
FRAMEWORKS: Mapping[str, Callable[[Question, Layout], tuple[str, list[str]]]] = MappingProxyType(
    {"torchtitan": _torchtitan, "megatron": _megatron, "deepspeed": _deepspeed}
)
"""Each framework's writer: returns the text and its notes, or raises `PlanError`."""
