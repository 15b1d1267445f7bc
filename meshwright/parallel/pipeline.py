"""The program of a pipeline: stages run by a schedule, weights that several stages hold summed over them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.forward_stack import ForwardLayer
from meshwright.parallel.fsdp import fsdp_units, reshard_all
from meshwright.parallel.halves import Kinds, RowCut, Tensors
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline_stages import Division, PipelineStageModule, build_stages, check
from meshwright.parallel.program import Program
from meshwright.parallel.schedule_run import PipelineGroup, ScheduleRun, chain
from meshwright.parallel.stage_module import Compute, LossView, RowBatch, StageModule, Stamp
from meshwright.parallel.step_timer import StepTimer
from meshwright.parallel.training_modes import evaluation_mode
from meshwright.parallel.transform import DTYPES, Transform, TransformContext, uses_axis
from meshwright.parallel.turns import Held, Turns
from meshwright.parallel.weights import Weight
from meshwright.spec.axes.pp import AXIS
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout


class _SharedWeight:
    """A weight that several stages hold, and the sum of its gradient over them."""

    def __init__(self, copies: list[Weight], axis_group: AxisGroup | None) -> None:
        self._primary, *self.twins = copies
        self._axis_group, self._of = axis_group, copies[0].name

    def spread(self) -> None:
        """Copies the values that the optimizer wrote to this rank's other stages."""
        for twin in self.twins:
            twin.local.copy_(self._primary.local)

    def start(self) -> Callable[[], object]:
        """Starts the gradient's sum over stages and ranks, and returns the function that waits for it."""
        parameter = self._primary.parameter
        grad_sum = self._primary.gradient
        grad_sum = torch.zeros_like(self._primary.local) if grad_sum is None else grad_sum.contiguous()
        for twin in self.twins:
            if twin.gradient is not None:
                grad_sum.add_(twin.gradient)
            twin.parameter.grad = None
        # The twins' gradients are in the sum: optimizer and norm see the first copy alone.
        parameter.grad = self._primary.as_dtensor(grad_sum)  # type: ignore[assignment]
        return self._axis_group.all_reduce(grad_sum, self._of).wait if self._axis_group else lambda: None


StageOutput: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""Tensors for the next stage; the loss, (), in the last."""


class PipelineProgram(Program):
    """Runs this rank's stages by the layout's schedule.

    Args:
        stages: this rank's stages, wrapped and materialised, from `build_stages`.
        compute: forward and loss of one micro-batch.
        view: what the loss must know of the layout.
        mesh: ranks and groups.
        clock: books the parts of a step.
        layout: what is made true.
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        compute: Compute,
        view: LossView,
        mesh: Mesh,
        clock: StepTimer,
        layout: Layout,
    ) -> None:
        super().__init__(stages, compute, view, mesh, clock)
        self._pipeline_stages: list[PipelineStageModule] = [
            stage for stage in stages if isinstance(stage, PipelineStageModule)
        ]
        division = self._pipeline_stages[0].division
        assert division is not None
        cpu = mesh.device_type == "cpu"
        device = torch.device("cpu") if cpu else torch.device(mesh.device_type, torch.cuda.current_device())
        self._pipeline_group = PipelineGroup(
            axis_group=mesh.group_with(Mechanics.STAGES), schedule=division.schedule, device=device
        )
        self._shared = self._find_shared_weights(division, mesh)
        self.twins = [twin for shared in self._shared for twin in shared.twins]
        for stage in self._pipeline_stages:
            assert stage.cut is not None
            # Only now: the weights are real, and the data axes' hooks are attached.
            stage.cut.arm(DTYPES[layout.compute_precision], device)
            _disable_reshard(stage.module)
        self._current_run: tuple[Any, ScheduleRun] | None = None
        self._batches: Sequence[RowBatch] = ()
        self._scale = 1.0
        self._key = (0, 0)
        self._stamp: Stamp | None = None
        self._sums: list[torch.Tensor] = []
        self.pairs: Turns | None = None
        """Runs a schedule's pairs of a forward and a backward, where these exchange rows with experts."""
        self._row_cuts: dict[int, RowCut] = {}
        """Where the halves of a micro-batch take turns: how each stage's tensors are halved."""

    @property
    def reporters(self) -> int:
        """Number of ranks that report the same loss sums: the last stage's alone report any."""
        assert self.mesh is not None
        return super().reporters // self.mesh.layout.degree(Mechanics.STAGES)

    def hold(self, item: Held) -> None:
        """Has each half of a micro-batch, or pass of a pair, that runs in turns with another keep its own."""
        super().hold(item)
        if self.pairs is not None:
            self.pairs.hold(item)

    def forward_backward(
        self, batches: Sequence[RowBatch], scale: float, key: tuple[int, int], stamp: Stamp | None = None
    ) -> torch.Tensor:
        """Runs a step's micro-batches and returns the losses in the shape of `Program.forward_backward`.

        Ranks without the last stage return zeros.
        """
        self._copy_to_twins()
        self._batches, self._scale, self._key, self._stamp = batches, scale, key, stamp
        self.rounding_key.seed, self.rounding_key.step = key
        run = self._schedule_run()
        # Drops the loss sums of the step before, and of a new shape's trial forward.
        self._sums.clear()
        run.step()
        self.progress_hooks.outside()
        self.step_timer.lap("pipeline")
        if self.state_meter is not None:
            self.state_meter.sample()
        if self.before_sums is not None:
            self.before_sums()
        for stage in self.stages:
            for sync in stage.gradient_syncs:
                # Only now: a backward in halves doesn't call the hooks by which a sum would start earlier.
                sync.begin_microbatch(True)
                sync.finish()
        # All started before the first is waited for, so that the sums of tied weights overlap.
        for wait_for_sum in [shared.start() for shared in self._shared]:
            wait_for_sum()
        if self.after_sums is not None:
            self.after_sums()
        self.step_timer.lap("reduce")
        self._batches = ()
        return self._loss_sums()

    def change_reader_shares(self, shares: Sequence[int]) -> None:
        """Takes other shares; the next step finds its shapes by a trial forward on every rank.

        The trial gathers over readers, who must all run it, also those that keep their rows.
        """
        super().change_reader_shares(shares)
        self._current_run = None

    @torch.no_grad()
    def evaluate(self, batch: RowBatch) -> torch.Tensor:
        """Returns (loss sum, target tokens, right predictions) of one batch; zeros without the last stage."""
        self._copy_to_twins()
        self._sums.clear()
        self._scale = 1.0
        try:
            with evaluation_mode(stage.module for stage in self.stages):
                self._trial(batch)
        finally:
            for stage in self.stages:
                reshard_all(stage.module)
        return self._loss_sums()

    def clear_gradients(self) -> None:
        """Frees all gradients."""
        super().clear_gradients()
        for twin in self.twins:
            twin.parameter.grad = None

    def _copy_to_twins(self) -> None:
        with torch.no_grad():
            for shared in self._shared:
                shared.spread()

    def _loss_sums(self) -> torch.Tensor:
        if self._sums:
            return torch.stack(self._sums).sum(dim=0)
        return torch.zeros(3 + 2 * len(self.loss_terms), dtype=torch.float64, device=self._pipeline_group.device)

    def _schedule_run(self) -> ScheduleRun:
        """Returns the schedule for micro-batches of the present shape; a new shape takes one trial forward."""
        shape = tuple(self._batches[0].tokens.shape)
        if self._current_run is None or self._current_run[0] != shape:
            with torch.no_grad():
                tensor_kinds = self._trial(self._batches[0])
                if self.halves is not None:
                    halves = [self._trial(half) for half in self.halves.halve(self._batches[0])]
                    self._row_cuts = {
                        stage.stage_index: RowCut(whole, *parts)
                        for stage, whole, *parts in zip(self.stages, tensor_kinds, *halves)
                    }
            for stage in self.stages:
                reshard_all(stage.module)
            self._current_run = (
                shape,
                ScheduleRun(
                    self.stages, self._pipeline_group, tensor_kinds, self._forward, self._before_backward, self.pairs
                ),
            )
        return self._current_run[1]

    def _forward(self, stage: StageModule, microbatch: int, received: Tensors) -> StageOutput:
        if self._stamp:
            self._stamp.phase("forward", microbatch)

        def run(batch: RowBatch, first_row: int, received: Tensors) -> Tensors:
            forward = functools.partial(self._compute_stage, stage, batch, received)
            return self.forward_with_rng(forward, self._key, first_row, batch.tokens.shape)

        batch, row = self._batches[microbatch], self.first_row_of(self._batches, microbatch)
        if self.halves is None:
            output = run(batch, row, received)
        else:
            cut = self._row_cuts[stage.stage_index]
            one, other = self.halves.run(batch, row, run, cut.split(received))
            output = (one[0] + other[0], one[1] + other[1]) if stage.is_last else cut.join(one, other)
        if self.state_meter is not None:
            self.state_meter.sample()
        return self._take_sums(stage, output)

    def _compute_stage(self, stage: StageModule, batch: RowBatch, received: Tensors) -> Tensors:
        """Returns what a stage hands on of some rows; in the last stage their loss and sums (`Compute`)."""
        assert isinstance(stage, PipelineStageModule) and stage.cut is not None
        return stage.cut.run(lambda: self._compute(stage.module, batch, self._scale, self.view), received)

    def _take_sums(self, stage: StageModule, output: Tensors) -> StageOutput:
        """Returns what the schedule is given of `_compute_stage`, and keeps the sums of the last stage."""
        if not stage.is_last:
            return output
        loss, sums = output
        self._sums.append(sums)
        return loss

    def _trial(self, batch: RowBatch) -> list[Kinds]:
        """Runs a forward of some rows through all stages; returns what each receives and hands on."""
        return chain(
            self.stages,
            self._pipeline_group,
            lambda stage, received: self._take_sums(stage, self._compute_stage(stage, batch, received)),
        )

    def _before_backward(self, microbatch: int) -> None:
        if self._stamp:
            self._stamp.phase("backward", microbatch)
        if self.state_meter is not None:
            self.state_meter.sample()  # an early stage has whole gradients only after its last forward

    def _find_shared_weights(self, division: Division, mesh: Mesh) -> list[_SharedWeight]:
        """Finds the weights that several stages hold; of those of one rank, the first alone is trained."""
        axis_groups = _holder_groups(division, mesh)
        weights_by_name: dict[str, list[Weight]] = {}
        for weight in (*self.weights, *self.frozen):
            weights_by_name.setdefault(weight.name, []).append(weight)
        shared = []
        for name, weights in sorted(weights_by_name.items()):
            axis_group = axis_groups.get(division.holders[name])
            if len(weights) > 1 or (axis_group and weights[0].parameter.requires_grad):
                shared.append(_SharedWeight(weights, axis_group if weights[0].parameter.requires_grad else None))
            for weight_list in (self.weights, self.frozen):
                # The optimizer must meet each weight of this rank once.
                weight_list[:] = [weight for weight in weight_list if weight not in weights[1:]]
        return shared


def _holder_groups(division: Division, mesh: Mesh) -> dict[tuple[int, ...], AxisGroup]:
    """Returns a group for each set of ``pp`` indices that share weights; every rank makes all groups, in one order."""
    names, pipeline_group = mesh.device_mesh.mesh_dim_names or (), mesh.group_with(Mechanics.STAGES)
    size = pipeline_group.size
    pipeline_ranks = mesh.device_mesh.mesh.movedim(names.index(pipeline_group.axis), -1).reshape(-1, size).tolist()
    axis_groups = {}
    for holders in sorted(set(division.holders.values())):
        if len(holders) == size:
            axis_groups[holders] = pipeline_group
        elif len(holders) > 1:
            # A collective call: ranks outside of the group take part in making it.
            group, _ = dist.new_subgroups_by_enumeration(
                [[pipeline[index] for index in holders] for pipeline in pipeline_ranks]
            )
            if pipeline_group.index in holders:
                axis_groups[holders] = mesh.axis_group(pipeline_group.axis, group)
    return axis_groups


def _disable_reshard(module: nn.Module) -> None:
    """Keeps a sharded stage gathered after a forward: the schedule gathers and frees it as a whole."""
    for unit in fsdp_units(module):
        unit.set_reshard_after_forward(False, recurse=False)


def _split(context: TransformContext) -> None:
    """Cuts the model into this rank's stages, which a schedule runs."""
    context.stages = build_stages(context.source, context.layout, context.required_mesh)
    context.make_program = _program


def _program(context: TransformContext, clock: StepTimer) -> PipelineProgram:
    return PipelineProgram(
        context.stages, context.source.compute, context.view, context.required_mesh, clock, context.layout
    )


TRANSFORM = Transform(layer=ForwardLayer.STAGE, axis=AXIS.name, applies=uses_axis(AXIS.name), apply=_split, check=check)
