"""What a whole model computes and keeps on one micro-batch: each kind of layer once, and everything around them."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from meshwright.autograd_helper import computed_by_helper
from meshwright.errors import ConfigError
from meshwright.models.build import BuiltModel
from meshwright.models.draw_trial import may_draw
from meshwright.models.forward import model_output
from meshwright.models.operators import BlankGroup, faked, measure_work
from meshwright.parallel import tensor
from meshwright.parallel.forward_stack import ForwardLayer, wrap_forward
from meshwright.parallel.random_ops import RandomOpsMode
from meshwright.spec.model_shape import ModelWork, ModuleWork
from meshwright.spec.sharding_table import ShardingTable


@computed_by_helper
def measure_model(
    built: BuiltModel,
    rows: int,
    sequence: int,
    dtype: torch.dtype,
    table: ShardingTable | None = None,
    degree: int = 1,
    split_tokens: bool = False,
) -> ModelWork:
    """Runs a model's own modules on fake tensors, layers of one kind once, as ``tp`` would split them.

    Args:
        built: on meta; it stays as it is.
        rows: of a micro-batch.
        sequence: tokens a row.
        dtype: of parameters and compute.
        table: the model's, where ``degree`` is above 1.
        degree: of tp; the first rank's part is measured.
        split_tokens: as the layout's ``sequence``.

    Raises:
        ConfigError: when the model's code needs values, and can't run without: routers that count tokens.
    """
    module = copy.deepcopy(built.module).train()
    axis_group = BlankGroup(degree)
    if degree > 1:
        assert table is not None
        tensor.wrap_model(module, table, axis_group, degree, split_tokens)  # type: ignore[arg-type]
    layers = [module.get_submodule(name) for name in built.structure.layers]
    kinds = _Kinds(layers, axis_group)
    tokens = torch.zeros(rows, sequence, dtype=torch.int64)

    def call() -> torch.Tensor:
        output = model_output(module, built.structure, tokens, tokens)
        found = output.logits if output.logits is not None else output.loss
        assert found is not None
        return found

    try:
        with _unlogged(), faked(module, dtype), _whole_rows(), _drawn(built):
            tokens = torch.zeros(rows, sequence, dtype=torch.int64)
            kinds.watch()
            rest = measure_work(module, call, [])
    except Exception as error:
        raise ConfigError(f"model '{built.config.name}' can't be run on fake tensors: {str(error)[:200]}") from error
    rest.sent = list(axis_group.sent)
    return ModelWork(rows=rows, layers=tuple(kinds.works), counts=tuple(kinds.counts), rest=rest)


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Keeps torch from printing the traceback of an operator that it can't fake, which is raised as an error too.

    Grouped products of experts are one: their kernels take float32, their rule for fake tensors bf16 alone.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _drawn(built: BuiltModel) -> contextlib.AbstractContextManager[Any]:
    """Draws as the runtime does, by masks from elsewhere, where a model may draw."""
    return RandomOpsMode(_Masks()) if may_draw(built) else contextlib.nullcontext()


class _Masks:
    """Stands for the numbers of `parallel.dropout_rng`: a mask is one operator that is found again by its name."""

    def kept(self, shape: Sequence[int], p: float, device: torch.device) -> torch.Tensor:
        """As `parallel.random_ops.RandomSource.kept`."""
        return torch.empty(tuple(shape), dtype=torch.bool, device=device).bernoulli_(1.0 - p)

    def uniform(self, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """As `parallel.random_ops.RandomSource.uniform`."""
        return torch.empty(tuple(shape), dtype=torch.float64, device=device).bernoulli_()

    def kept_scores(self, query: torch.Tensor, keys: int, p: float) -> torch.Tensor:
        """As `parallel.random_ops.RandomSource.kept_scores`."""
        return self.kept((*query.shape[:3], keys), p, query.device)


@contextlib.contextmanager
def _whole_rows() -> Iterator[None]:
    """Tells transformers what it can't see on fake tensors: no document begins inside a row, so no mask is needed."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    plain = getattr(masks, "find_packed_sequence_indices", None)
    if plain is None:
        yield
        return
    masks.find_packed_sequence_indices = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = plain


class _Kinds:
    """Replaces every layer by one that is measured the first time its kind is called, and else hands its input on."""

    def __init__(self, layers: list[Any], axis_group: BlankGroup) -> None:
        self.works: list[ModuleWork] = []
        self.counts: list[int] = []
        self._layers, self._axis_group = layers, axis_group
        self._known: dict[Any, int] = {}
        self._given: list[Any] = []

    def watch(self) -> None:
        """Puts the replacements in place; the module is a copy that nobody else uses."""
        for layer in self._layers:
            wrap_forward(
                layer, ForwardLayer.PROBE, "measured once for each kind of layer", partial(self._replaced, layer)
            )

    def _replaced(self, layer: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        key = (
            type(layer),
            getattr(layer, "attention_type", ""),
            tuple((name, tuple(item.shape)) for name, item in layer.named_parameters()),
        )

        def forward(*args: Any, **kwargs: Any) -> Any:
            if key not in self._known:
                sent = len(self._axis_group.sent)
                self._known[key] = len(self.works)
                self.works.append(self._measured(layer, plain, args, kwargs))
                self.counts.append(0)
                with _Unseen():
                    self._given.append(plain(*_detached(args), **_detached(kwargs)))
                del self._axis_group.sent[sent:]
            self.counts[self._known[key]] += 1
            out = self._given[self._known[key]]
            first = next(item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor))
            return tree_map_only(torch.Tensor, lambda item: _through(item, first), out)

        return forward

    def _measured(self, layer: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> ModuleWork:
        inputs: list[torch.Tensor] = []
        lent: list[torch.Tensor] = []

        def leaf(item: torch.Tensor) -> torch.Tensor:
            made = item.detach()
            if item.requires_grad:
                inputs.append(made.requires_grad_())
            else:
                lent.append(made)
            return made

        given, named = tree_map_only(torch.Tensor, leaf, (args, kwargs))
        sent = len(self._axis_group.sent)

        def call() -> torch.Tensor:
            out = plain(*given, **named)
            return out if isinstance(out, torch.Tensor) else next(i for i in out if isinstance(i, torch.Tensor))

        with _Unseen(), torch.enable_grad():
            work = measure_work(layer, call, inputs, lent)
        work.sent = self._axis_group.sent[sent:]
        return work


class _Unseen:
    """What runs inside isn't seen by the modes and hooks around it."""

    def __enter__(self) -> None:
        self._modes = torch.utils._python_dispatch._pop_mode_temporarily()
        self._mode = self._modes.__enter__()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda item: item, lambda item: item)
        self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._modes.__exit__(*error)


def _detached(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda item: item.detach(), value)


def _through(item: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """The layer's input in the place of its output, so that gradients find the way on."""
    return first if item.shape == first.shape and item.is_floating_point() else item.detach()
