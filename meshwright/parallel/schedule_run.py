"""Runs stages by a schedule through torch's pipeline runtime, which sends and receives between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from meshwright.errors import MeshwrightError, PlanError
from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.fsdp import accumulate_gradients
from meshwright.parallel.stage_module import StageModule
from meshwright.parallel.turns import Turns
from meshwright.schedules.action import Schedule
from meshwright.torch_compat.pipelining import (
    actions_with_sends,
    load_actions,
    make_runtime,
    run_microbatches,
    run_pairs,
    unsupported,
)

Forward = Callable[[StageModule, int, tuple[torch.Tensor, ...]], Any]
"""(stage, micro-batch, what it received) to what the next stage gets, or in the last stage the loss."""
Backward = Callable[[int], None]
"""Called with a micro-batch's number before its backward."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
_DIMS, _TENSORS = 6, 16
_RECEIVES = ("RECV_F", "RECV_B")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorKind:
    """Shape and type of a tensor that crosses between stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorKind:
        """Returns a tensor's."""
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype)

    def example(self) -> torch.Tensor:
        """Returns a tensor without memory; a floating one needs a gradient."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.dtype.is_floating_point)


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineGroup:
    """The ranks that a micro-batch passes through."""

    axis_group: AxisGroup
    """Of the axis ``pp``."""
    schedule: Schedule
    """What runs when."""
    device: torch.device
    """Where this rank computes."""


@contextmanager
def _raising_refusals() -> Iterator[None]:
    """Raises a refusal of ours as it was: torch's runtime wraps what a stage raises in an error of shapes."""
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, MeshwrightError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from cause.__cause__


class _TorchStage(PipelineStage):
    """A stage as torch's runtime drives it: the forward is ours, sends are booked."""

    def __init__(
        self,
        stage: StageModule,
        pipeline_group: PipelineGroup,
        tensor_kinds: tuple[Sequence[TensorKind], ...],
        forward: Forward,
        backward: Backward,
    ) -> None:
        # From the trial forward: with known shapes torch's runtime infers none itself.
        inputs, outputs = (tuple(kind.example() for kind in tensors) for tensors in tensor_kinds)
        super().__init__(
            stage.module,
            stage.stage_index,
            pipeline_group.schedule.stages,
            pipeline_group.device,
            input_args=inputs,
            output_args=outputs,
            group=pipeline_group.axis_group.group,
        )
        self._stage_module, self._pipeline_group, self._run_forward, self._before_backward = (
            stage,
            pipeline_group,
            forward,
            backward,
        )
        self._microbatch = 0

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Called by torch's runtime for a first exchange with the stages beside this one."""
        # torch 2.11 sends to a stage of the same rank too, which gloo refuses.
        return [
            item
            for item in super()._get_init_p2p_neighbors_ops()
            if item.group_peer != self._pipeline_group.axis_group.index
        ]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: object, **kwargs: object) -> object:
        """Called by torch's runtime before the forward of a micro-batch."""
        # Not as a keyword of the forward: torch 2.11 takes every value of these for a tensor in a backward in halves.
        self._microbatch = fwd_chunk_id
        with _raising_refusals():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: object, **_kwargs: object) -> object:
        """Called by torch's runtime for the forward of a micro-batch."""
        return self._run_forward(self._stage_module, self._microbatch, args)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: object, **kwargs: object) -> object:
        """Called by torch's runtime for a backward."""
        self._before_backward(bwd_chunk_id)
        with _raising_refusals():
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: object, **kwargs: object) -> None:
        """Called by torch's runtime for the second half of a backward, which calls none of FSDP2's hooks."""
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        accumulate_gradients(self._stage_module.module)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Called by torch's runtime to send what the next stage gets."""
        return self._book_sends(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Called by torch's runtime to send the gradients for the stage before."""
        if (gradients := self.bwd_cache.get(bwd_chunk_id)) is not None:
            # A boundary of several streams may be a permuted view, and so may its gradient; sends need plain memory.
            self.bwd_cache[bwd_chunk_id] = tuple(
                item.contiguous() if isinstance(item, torch.Tensor) else item for item in gradients
            )
        return self._book_sends(super().get_bwd_send_ops(bwd_chunk_id))

    def _book_sends(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        axis_group = self._pipeline_group.axis_group
        axis_group.log.add(axis_group.axis, "send", sum(operation.tensor.nbytes for operation in operations), 0.0, 0.0)
        return operations


class _PendingReceive:
    """A posted receive, whose wait is reported as a collective's is."""

    def __init__(self, work: dist.Work, axis_group: AxisGroup, description: str) -> None:
        self._work, self._log, self._description = work, axis_group.log, description
        self._number = axis_group.log.start_operation()

    def wait(self) -> object:
        """Called by torch's runtime before the stage computes."""
        started = time.perf_counter()
        with self._log.waiting(self._description, self._number):
            result = self._work.wait()
        self._log.stage_wait_s += time.perf_counter() - started
        return result


class _ReceiveBuffers(dict[tuple[int, int], Any]):
    """The table of torch's runtime of posted receives, by (stage, micro-batch), which wraps each in a report.

    Args:
        axis_group: of the axis ``pp``.
        content: what arrives (the input, the gradient), for the report.
    """

    def __init__(self, axis_group: AxisGroup, content: str) -> None:
        super().__init__()
        self._axis_group, self._description = axis_group, content

    def __setitem__(self, key: tuple[int, int], works: Sequence[dist.Work]) -> None:
        stage, microbatch = key
        description = (
            f"receive over {self._axis_group.axis} of {self._description} of micro-batch {microbatch} for stage {stage}"
        )
        super().__setitem__(key, [_PendingReceive(work, self._axis_group, description) for work in works])


class ScheduleRun:
    """A schedule, ready to run micro-batches of one shape.

    Args:
        stages: stages of this rank.
        pipeline_group: ranks and schedule.
        tensor_kinds: for each stage the tensors that it receives and those that it sends.
        forward: of a stage on a micro-batch.
        backward: called before each backward.
        pairs: runs the passes of a pair in turns; None: one after the other.
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        pipeline_group: PipelineGroup,
        tensor_kinds: Sequence[tuple[Sequence[TensorKind], ...]],
        forward: Forward,
        backward: Backward,
        pairs: Turns | None = None,
    ) -> None:
        self._stages = [
            _TorchStage(stage, pipeline_group, kinds_of_stage, forward, backward)
            for stage, kinds_of_stage in zip(stages, tensor_kinds)
        ]
        self._count = pipeline_group.schedule.microbatches
        if reason := unsupported():
            raise PlanError(f"pp: {reason}")
        self._runtime = make_runtime(self._stages, self._count, _loss_as_is)
        if pairs is not None:
            run_pairs(self._runtime, pairs.run_beside_backward)
        schedule = pipeline_group.schedule
        load_actions(self._runtime, {rank: list(map(str, row)) for rank, row in enumerate(schedule.actions)})
        if not pipeline_group.axis_group.on_cuda:
            # After torch has added the sends and receives, whose order `_receives_first` changes.
            actions_by_rank = actions_with_sends(self._runtime)
            actions_by_rank.update({rank: _receives_first(row) for rank, row in actions_by_rank.items()})
        # So that a hang is reported with the micro-batch and the stage that a rank waits for.
        for name, content in (("fwd_recv_ops", "the input"), ("bwd_recv_ops", "the gradient")):
            setattr(self._runtime, name, _ReceiveBuffers(pipeline_group.axis_group, content))

    def step(self) -> None:
        """Runs all micro-batches forward and backward; data axes have been summed by FSDP2, others not."""
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        run_microbatches(self._runtime, self._count)


def _receives_first(actions: Sequence[Any]) -> list[Any]:
    """Puts the receives of a step before all else, in their order.

    Gloo sends nothing until the receive is posted: posted after the action before it, the whole transfer would wait for
    that action. The buffers exist anyway, one for each micro-batch. On CUDA receives stay where they are, since NCCL
    runs a group's sends and receives one after the other.
    """
    receive_actions = [action for action in actions if action.computation_type in _RECEIVES]
    return receive_actions + [action for action in actions if action.computation_type not in _RECEIVES]


def _loss_as_is(output: torch.Tensor, _target: None) -> torch.Tensor:
    """Returns the last stage's output, which is the loss itself."""
    return output


def chain(
    stages: Sequence[StageModule],
    pipeline_group: PipelineGroup,
    forward: Callable[[StageModule, tuple[torch.Tensor, ...]], torch.Tensor | tuple[torch.Tensor, ...]],
) -> list[tuple[Sequence[TensorKind], ...]]:
    """Passes one batch of any shape forward through all stages, one after the other.

    Args:
        stages: stages of this rank, lowest first.
        pipeline_group: ranks and schedule.
        forward: (stage, what it received) to what it sends; in the last stage, to the loss.

    Returns:
        For each stage the kinds of the tensors that it received and of those that it sent.
    """
    tensor_kinds: list[tuple[Sequence[TensorKind], ...]] = []
    rank_of_stage, last_stage = pipeline_group.schedule.placement, pipeline_group.schedule.stages - 1
    # What a stage hands to the next one where both lie on this rank: nothing is sent.
    local_output: tuple[torch.Tensor, ...] = ()
    for stage in stages:
        stage_index = stage.stage_index
        received: tuple[torch.Tensor, ...] = ()
        if stage_index:
            is_local = rank_of_stage[stage_index - 1] == rank_of_stage[stage_index]
            received = local_output if is_local else _receive(pipeline_group, rank_of_stage[stage_index - 1])
        sent = forward(stage, received)
        if stage_index == last_stage:
            sent = (sent,)
        elif rank_of_stage[stage_index + 1] == rank_of_stage[stage_index]:
            local_output = sent
        else:
            _send(pipeline_group, sent, rank_of_stage[stage_index + 1])
        tensor_kinds.append(
            ([TensorKind.of(tensor) for tensor in received], [TensorKind.of(tensor) for tensor in sent])
        )
    return tensor_kinds


def _send(pipeline_group: PipelineGroup, tensors: tuple[torch.Tensor, ...], index: int) -> None:
    peer = dist.get_global_rank(pipeline_group.axis_group.group, index)
    # The receiver doesn't know the shapes of a new batch: a header of fixed size goes ahead of the tensors.
    dist.send(_header(tensors).to(pipeline_group.device), peer, group=pipeline_group.axis_group.group)
    for tensor in tensors:
        dist.send(tensor.contiguous(), peer, group=pipeline_group.axis_group.group)
    pipeline_group.axis_group.log.add(
        pipeline_group.axis_group.axis, "send", sum(tensor.nbytes for tensor in tensors), 0.0, 0.0
    )


def _receive(pipeline_group: PipelineGroup, index: int) -> tuple[torch.Tensor, ...]:
    peer = dist.get_global_rank(pipeline_group.axis_group.group, index)
    # Its length is fixed, so it can be received before any shape is known.
    header = torch.zeros(1 + _TENSORS * (_DIMS + 2), dtype=torch.int64, device=pipeline_group.device)
    with pipeline_group.axis_group.log.waiting(
        f"receive over {pipeline_group.axis_group.axis}", pipeline_group.axis_group.log.start_operation()
    ):
        dist.recv(header, peer, group=pipeline_group.axis_group.group)
    count, *fields = header.tolist()
    tensors = []
    for start in range(0, count * (_DIMS + 2), _DIMS + 2):
        # A record is (dtype, number of dims, sizes padded to _DIMS).
        dtype_index, dims, *sizes = fields[start : start + _DIMS + 2]
        tensor = torch.empty(sizes[:dims], dtype=_DTYPES[dtype_index], device=pipeline_group.device)
        dist.recv(tensor, peer, group=pipeline_group.axis_group.group)
        tensors.append(tensor)
    return tuple(tensors)


def _header(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Returns int64 integers of fixed number: the number of tensors, then dtype, number of dims and sizes of each."""
    values = [len(tensors)]
    for tensor in tensors:
        if len(tensors) > _TENSORS or tensor.dim() > _DIMS or tensor.dtype not in _DTYPES:
            raise PlanError(
                f"pp: {len(tensors)} tensors such as {tuple(tensor.shape)} {tensor.dtype} cross between stages; at "
                f"most {_TENSORS} of {_DIMS} dims can"
            )
        values += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *([0] * (_DIMS - tensor.dim()))]
    values += [0] * (1 + _TENSORS * (_DIMS + 2) - len(values))
    return torch.tensor(values, dtype=torch.int64)
