"""A layout for a model and a loop of one's own: the runtime's axes on any module, stepped by `loss.backward()`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshwright.axes.comm.wire import TrafficLog
from meshwright.errors import ConfigError, PlanError
from meshwright.models.build import BuiltModel
from meshwright.plan import Layout
from meshwright.runtime.build import TRANSFORMS, Source, Work, build, check
from meshwright.runtime.clock import Clock
from meshwright.runtime.materialise import Fill
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.program import Part, Program
from meshwright.strategy.facts import shared_facts
from meshwright.strategy.held import HeldModel
from meshwright.strategy.mesh import compute_device, ranks_of
from meshwright.strategy.own import Model, as_source, check_equal, precise, read_model
from meshwright.train.loss import IGNORED, cross_entropy_sums
from meshwright.train.step import fill_missing


class HybridParallelStrategy:
    """Copies, shards, tensor and expert parallel for a module of one's own, in a loop of one's own.

    ::

        strategy = HybridParallelStrategy("replicate=2,tp=2")
        model = strategy.shard(model)
        optimizer = strategy.optimizer(torch.optim.AdamW, lr=1e-3)
        for x, y in loader:                       # DistributedSampler(data, count, index) of strategy.reader
            loss = loss_of(model(x), y)           # the mean over this rank's rows
            loss.backward()
            strategy.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    Gradients are those of the mean of the readers' losses: of the mean over the global batch, where every reader has as
    many rows (or targets) and the loss is a mean over them. `loss` does so for any number of targets.

    Args:
        layout: degrees of ``replicate``, ``shard`` (with ``zero``), ``tp`` (with ``sequence``) and ``ep``, and
            ``recompute``, ``precision``, ``compile``, ``offload=parameters``.
        split_vocabulary: under ``tp``, split the head too: logits are then of a part of the vocabulary, and the loss
            must be `loss`. Without it logits are whole.
        average: whether gradients are means over the readers, not sums.

    Raises:
        PlanError: for a layout that doesn't fit the ranks, or that a loop of one's own can't run.
        ConfigError: when there is no process group.
    """

    def __init__(self, layout: Layout | str, *, split_vocabulary: bool = False, average: bool = True) -> None:
        self.layout = ranks_of(layout)
        _check(self.layout)
        self._split_vocabulary, self._average = split_vocabulary, average
        self._mesh: Mesh | None = None
        self._held: HeldModel | None = None
        self._last, self._queued, self._pending, self._saved_up = True, False, False, False
        self._seed, self._forwards = 1, 0

    def shard(
        self,
        model: Model,
        *,
        example: torch.Tensor | None = None,
        device: torch.device | str | None = None,
        fill: Fill | None = None,
        seed: int = 1,
    ) -> nn.Module:
        """Leaves this rank its parts of a model; every rank calls it together.

        Args:
            model: with real weights, the same on all ranks; or a function that builds one, which is run on meta, so
                that no rank ever holds it whole; or a module on meta, with ``fill``.
            example: one input (B, ...) of a model that doesn't take tokens (B, S); needed by ``tp``.
            device: where to compute; when None, this rank's GPU under nccl, else where the weights are. ``"meta"``
                shapes the parts without memory.
            fill: values of a box of a weight, by name, for a module on meta.
            seed: of the weights of a model that a function builds, and of dropout: each forward that trains draws anew,
                the same numbers for the same rows of the global batch under every layout.

        Returns:
            The module itself (or what the function built), whose parameters are now parts, float32 or float64. Where
            an error is raised instead, the module is left without its weights.

        Raises:
            PlanError: the model doesn't allow the layout.
            ConfigError: the weights can't be had, or aren't equal.
        """
        where = compute_device(model if isinstance(model, nn.Module) else None, device)
        built, self._seed = read_model(model, seed), seed
        training = built.module.training
        layout = self.layout = precise(self.layout, built)
        kind = "cpu" if where.type == "meta" else where.type
        check(layout, kind, len(built.anatomy.layers))
        from_module = where.type != "meta" and fill is None
        if from_module:
            _check_made(built)
        mesh = self._mesh = Mesh(layout, kind, TrafficLog())
        if from_module:
            check_equal(built, mesh.world)
        facts = shared_facts(built, layout, example, self._split_vocabulary)
        source = as_source(built, facts, fill, _no_compute)
        program = _outline(source, layout, mesh) if where.type == "meta" else build(
            source, layout, mesh, where, Clock(kind)
        )
        program.meter = None
        module = program.module.train(training)
        self._held = HeldModel(program, layout, mesh.rank, built.anatomy.ties, self._settle, self._forget)
        module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        module.register_forward_hook(self._after_forward)
        return module

    @property
    def reader(self) -> tuple[int, int]:
        """(index, count) of this rank among those that read other rows: ``rank`` and ``num_replicas`` of a sampler."""
        return self.layout.reader(torch.distributed.get_rank())

    @property
    def bytes(self) -> int:
        """Bytes of the weights that this rank holds; a gradient or a moment of an optimizer takes as many again."""
        return self._ready().bytes

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around forward and backward of all micro-batches of a step but the last: gradients add up, unsent."""
        self._last = False
        try:
            yield
        finally:
            self._last = True

    def clip_grad_norm_(self, most: float) -> torch.Tensor:
        """Clips the gradient of the whole model, wherever its parts are, and returns its norm before."""
        return self._ready().clip(most)

    def grad_norm(self) -> torch.Tensor:
        """Returns the 2-norm of the gradient of the whole model, the same on every rank."""
        return self._ready().norm()

    def optimizer(
        self, make: Callable[..., torch.optim.Optimizer], groups: Iterable[Any] | None = None, **settings: Any
    ) -> torch.optim.Optimizer:
        """Makes an optimizer over this rank's parts, plain tensors; its `step` waits for the gradients' sums.

        Args:
            make: a class of torch.optim, or another that takes parameters and works element by element.
            groups: parameters of the sharded model or groups of them, as torch takes them; all when None.
            **settings: of ``make``.
        """
        return self._ready().optimizer(make, groups, settings)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy over the targets of the global batch; -100 counts for nothing.

        Args:
            logits: (B, S, V), or this rank's part of V.
            targets: (B, S) int64; those of (B, S) logits, nothing is shifted.

        Returns:
            A scalar whose mean over the readers (`mean`) is that of all targets, exactly, however many each has.
        """
        assert self._mesh is not None
        program, count = self._ready().program, self.reader[1]
        total = (targets != IGNORED).sum().to(torch.float64)
        self._mesh.world.all_reduce(total).wait()
        readers = self.layout.world // count
        scale = (count if self._average else 1) * readers / max(1.0, float(total))
        return cross_entropy_sums(logits, targets, scale, program.view.vocab)[0]

    def mean(self, value: torch.Tensor | float) -> float:
        """Returns the mean of a number over the readers, to be logged."""
        return self._ready().average(value)

    def state_dict(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """Returns ``{"model": ..., "optimizer": ...}`` for torch.distributed.checkpoint, to save or to load in place.

        Each entry says which boxes of the whole weight it is, so that any layout, or none, loads what another saved.
        Numbers of the optimizer's groups (rates, decays) aren't part of it.
        """
        return self._ready().state_dict(optimizer)

    def _ready(self) -> HeldModel:
        if self._held is None:
            raise ConfigError("no model has been sharded yet; call shard(model) first")
        return self._held

    def _before_forward(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        program = self._ready().program
        if program.chance is not None and program.module.training:
            shape = next(item.shape for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor))
            program.chance.begin((self._seed, self._forwards), self.reader[0] * shape[0], shape)
            self._forwards += 1
        for sync in program.parts[0].sync:
            sync.begin(self._last)

    def _after_forward(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if (chance := self._ready().program.chance) is not None:
            chance.end()
        if not torch.is_grad_enabled():
            self._ready().release()
            return
        found = list(_tensors(output))
        if not found:
            raise ConfigError(
                f"the model gave a {type(output).__name__} without tensors, so its backward can't be followed: return "
                "tensors, or an object, dict, list or tuple of them"
            )
        for item in (item for item in found if item.requires_grad):
            item.register_hook(self._in_backward)

    def _in_backward(self, _: torch.Tensor) -> None:
        if not self._last:
            self._saved_up = True
        elif self._pending:
            raise ConfigError(
                "a second backward before the optimizer's step: the gradients of the first are being summed already; "
                "put all but the last into `with strategy.accumulate():`, forward and backward both"
            )
        elif not self._queued:
            self._queued = True
            engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
            engine.queue_callback(self._backward_done)

    def _backward_done(self) -> None:
        self._queued, self._pending = False, True

    def _settle(self) -> None:
        """Makes gradients those of the whole model's loss, once after each backward."""
        if not self._pending:
            if self._saved_up:
                raise ConfigError("the last backward before a step sums the gradients: leave it out of accumulate()")
            return
        program = self._ready().program
        for sync in program.parts[0].sync:
            sync.finish()
        fill_missing(program)
        count = self.reader[1]
        if self._average and count > 1:
            torch._foreach_mul_([weight.gradient for weight in program.weights], 1.0 / count)
        self._pending = self._saved_up = False

    def _forget(self) -> None:
        """Ends what is under way for gradients that nobody wants."""
        if self._pending:
            for sync in self._ready().program.parts[0].sync:
                sync.finish()
        self._pending = self._saved_up = False


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Tensors of what a model returned, in whatever they are nested."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from (item for item in tree_leaves(list(vars(leaf).values())) if isinstance(item, torch.Tensor))


def _no_compute(*_: Any) -> Any:
    raise ConfigError("the loop is the user's own: call the model, and backward on its loss")


def _outline(source: Source, layout: Layout, mesh: Mesh) -> Program:
    """Builds a program that holds no memory: shapes and places alone."""
    layers = [source.module.get_submodule(name) for name in source.layers]
    work = Work(source, layout, mesh, [Part(source.module, layers)])
    for transform in TRANSFORMS:
        transform(work)
    return Program(work.parts, source.compute, work.view, mesh, Clock(mesh.device_type))


def _check(layout: Layout) -> None:
    """Refuses what a loop of the user's own can't do."""
    cures = {
        "pp": "a pipeline runs its own order of forwards and backwards: use PipelineEngine",
        "cp": "a loop of one's own reads whole rows: use tp with sequence=true, or `meshwright train`",
    }
    for name, cure in cures.items():
        if layout.degree(name) > 1:
            raise PlanError(f"{name}={layout.degree(name)}: {cure}")
    if layout.microbatches > 1:
        raise PlanError(
            f"microbatches={layout.microbatches} has no effect on a loop of one's own: leave it out, and accumulate "
            "with `with strategy.accumulate():`"
        )
    if layout.precision == "fp16":
        raise PlanError("precision=fp16 needs a loss scale that a loop of one's own lacks: write precision=bf16")
    if layout.offload == "optimizer":
        raise PlanError("offload=optimizer belongs to the trainer's own AdamW: write offload=parameters")


def _check_made(built: BuiltModel) -> None:
    """Refuses weights that nobody can make, before any rank waits for another."""
    lost = [name for name, ref in built.recipe.refs.items() if ref.numel and not built.recipe.replay.made(ref)]
    if lost:
        raise ConfigError(
            f"{lost[0]} is on meta, and nothing says what is in it: hand in the function that builds the model, or "
            "fill=, a function of a weight's name and box"
        )
