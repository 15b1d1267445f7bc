"""Private names of torch.distributed.pipelining."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from meshwright.torch_compat import PrivateName

__all__ = [
    "PRIVATE_NAMES",
    "actions_with_sends",
    "load_actions",
    "make_runtime",
    "run_microbatches",
    "run_pairs",
    "stage_backward_input",
    "stage_backward_weight",
    "unsupported",
]

PRIVATE_NAMES = (
    PrivateName(
        "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime",
        "runs any list of actions; public schedules run their own alone",
    ),
    PrivateName(
        "torch.distributed.pipelining.schedules:_Action.from_str",
        "actions of that list",
    ),
    PrivateName(
        "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime._step_microbatches",
        "runs them",
    ),
    PrivateName(
        "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime.register_custom_function",
        "runs both passes of a pair together",
    ),
    PrivateName("torch.distributed.pipelining.schedules:_PipelineScheduleRuntime._assert_unsharded", "the same"),
    PrivateName("torch.distributed.pipelining.schedules:_PipelineScheduleRuntime._maybe_compute_loss", "the same"),
    PrivateName("torch.distributed.pipelining.schedules:_PipelineScheduleRuntime._maybe_get_loss", "the same"),
    PrivateName("torch.distributed.pipelining.schedules:_wait_batch_p2p", "the same"),
    PrivateName(
        "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime._stages", "the same", of_instances=True
    ),
    PrivateName(
        "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime._n_microbatches",
        "the same",
        of_instances=True,
    ),
    PrivateName("torch.distributed.pipelining.schedules:OVERLAP_F_B", "the same"),
    PrivateName(
        "torch.distributed.pipelining._backward:stage_backward_input", "whether a model's backward can be halved"
    ),
    PrivateName(
        "torch.distributed.pipelining._backward:stage_backward_weight",
        "the same",
    ),
    PrivateName(
        "torch.distributed.pipelining:PipelineStage._get_init_p2p_neighbors_ops",
        "torch 2.11 sends to a stage of the same rank too, which gloo refuses; torch 2.15 has no first exchange",
        until="2.14",
    ),
    PrivateName(
        "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime._prepare_schedule_with_comms",
        "takes the list and adds sends and receives",
    ),
    PrivateName(
        "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime.pipeline_order",
        "the list without sends, which torch's messages print",
        of_instances=True,
    ),
    PrivateName(
        "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime.pipeline_order_with_comms",
        "the list with sends, whose order is ours",
        of_instances=True,
    ),
)


def unsupported() -> str:
    """Returns why this torch runs no lists of actions; "" where it does."""
    runtime = getattr(torch_schedules, "_PipelineScheduleRuntime", None)
    if hasattr(torch_schedules, "_Action") and hasattr(runtime, "_prepare_schedule_with_comms"):
        return ""
    return f"torch {torch.__version__} runs no lists of actions; torch 2.11 to 2.15 do"


def make_runtime(stages: Sequence[Any], microbatches: int, loss: Any) -> object:
    """Returns torch's runtime for lists of actions over the stages of this rank."""
    # What fails is raised; torch would print the whole schedule beside it, from every rank.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    runtime: Any = torch_schedules._PipelineScheduleRuntime
    return runtime(list(stages), n_microbatches=microbatches, loss_fn=loss, scale_grads=False)


def load_actions(runtime: Any, actions: Mapping[int, Sequence[str]]) -> None:
    """Gives the runtime the actions of every rank, in torch's text form."""
    rows = {rank: [torch_schedules._Action.from_str(text) for text in row] for rank, row in actions.items()}
    runtime.pipeline_order = rows
    runtime._prepare_schedule_with_comms(rows)


def actions_with_sends(runtime: Any) -> dict[int, list[Any]]:
    """Returns the runtime's own lists, sends and receives among them; changes of it are obeyed."""
    lists: dict[int, list[Any]] = runtime.pipeline_order_with_comms
    return lists


def run_microbatches(runtime: Any, count: int) -> None:
    """Runs the actions on ``count`` micro-batches, whose inputs the stages know themselves."""
    runtime._step_microbatches(
        arg_mbs=[()] * count, kwarg_mbs=[{}] * count, target_mbs=[None] * count, return_outputs=False
    )


def run_pairs(runtime: Any, run: Callable[[Callable[[], None], Callable[[], None]], None]) -> None:
    """Has ``run`` run the forward and the backward of each pair of different stages; torch runs one, then the other."""
    stages = {stage.stage_index: stage for stage in runtime._stages}

    def run_pair(action: Any, context: Any) -> None:
        passes = [
            functools.partial(_forward, runtime, stages, part, context)
            if part.computation_type == torch_schedules.FORWARD
            else functools.partial(_backward, runtime, stages, part)
            for part in action.sub_actions
        ]
        kinds = [part.computation_type for part in action.sub_actions]
        if kinds[0] == torch_schedules.FORWARD and len({part.stage_index for part in action.sub_actions}) == 2:
            run(*passes)
        else:
            for one_pass in passes:
                one_pass()

    runtime.register_custom_function(torch_schedules.OVERLAP_F_B, run_pair)


def _forward(runtime: Any, stages: Mapping[int, Any], action: Any, context: Any) -> None:
    """Runs a forward as torch's runtime does, whose own function can't be called from outside."""
    index, microbatch = action.stage_index, action.microbatch_index
    stage = stages[index]
    runtime._assert_unsharded(stage)
    if not stage.is_first and index - 1 not in stages:
        torch_schedules._wait_batch_p2p(runtime.fwd_recv_ops.pop((index, microbatch)))
    output = stage.forward_one_chunk(
        microbatch, context.arg_mbs[microbatch], context.kwarg_mbs[microbatch], save_forward_output=False
    )
    runtime._maybe_compute_loss(stage, output, context.target_mbs, microbatch)
    if index + 1 in stages:
        stages[index + 1].set_local_fwd_input(output, microbatch)


def _backward(runtime: Any, stages: Mapping[int, Any], action: Any) -> None:
    """Runs a backward likewise."""
    index, microbatch = action.stage_index, action.microbatch_index
    stage = stages[index]
    runtime._assert_unsharded(stage)
    if not stage.is_last and index + 1 not in stages:
        torch_schedules._wait_batch_p2p(runtime.bwd_recv_ops.pop((index, microbatch)))
    loss = runtime._maybe_get_loss(stage, microbatch)
    runtime.backward_counter[index] += 1
    is_last = runtime.backward_counter[index] == runtime._n_microbatches
    stage.backward_one_chunk(microbatch, loss=loss, full_backward=True, last_backward=is_last)
    if index - 1 in stages:
        stages[index - 1].set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)


def splits_custom_functions() -> bool:
    """Returns whether torch can run the backward of a custom autograd function in halves.

    Before 2.13 its pipelining reads a field of autograd nodes that those of Python's functions lack ("Attribute
    '_input_metadata' is invalid").
    """
    major, minor, *_ = torch.__version__.split(".")
    return (int(major), int(minor)) >= (2, 13)
