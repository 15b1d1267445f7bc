"""Measures the operators and saved activations of a model on one micro-batch: each kind of layer once, and the rest."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from meshwright.autograd_helper import computed_by_helper
from meshwright.errors import ConfigError
from meshwright.models.attention import VARLEN, skip_packing_check, use_varlen
from meshwright.models.build import BuiltModel
from meshwright.models.forward import model_output
from meshwright.models.operators import BlankGroup, faked, measure_work
from meshwright.models.random_draws import may_draw
from meshwright.parallel import tensor
from meshwright.parallel.document_attention import document_attention
from meshwright.parallel.forward_stack import ForwardLayer, wrap_forward
from meshwright.parallel.random_ops import RandomOpsMode, RandomSource
from meshwright.parallel.stage import copy_module
from meshwright.spec.model_shape import KeptBytes, ModelWork, ModuleWork
from meshwright.spec.sharding_table import ShardingTable
from meshwright.torch_compat.tensors import tree_map_only, without_dispatch_mode


@computed_by_helper
def measure_model(
    built: BuiltModel,
    rows: int,
    sequence: int,
    dtype: torch.dtype,
    table: ShardingTable | None = None,
    degree: int = 1,
    split_tokens: bool = False,
    partition: Callable[..., KeptBytes] | None = None,
) -> ModelWork:
    """Runs a model's own modules on fake tensors, layers of one kind once, split as ``tp`` would split them.

    Args:
        built: on meta; it stays unchanged.
        rows: B of a micro-batch.
        sequence: S.
        dtype: of parameters and compute.
        table: the model's, where ``degree`` is above 1.
        degree: of tp; the first rank's shard is measured.
        split_tokens: the layout's ``sequence``.
        partition: reads what a compiled layer keeps (`compiled_bytes.layer_bytes`), of layers that nothing splits.

    Raises:
        ConfigError: when the model's code needs values, and can't run without: routers that count tokens.
    """
    # the axis group is a stand-in that records what a rank would send
    axis_group = BlankGroup(degree)
    module = _as_run(built, table, axis_group, split_tokens)
    layers = [module.get_submodule(name) for name in built.structure.layers]
    kinds = _LayerKinds(layers, axis_group, partition, built.structure.width or 0)
    tokens = torch.zeros(rows, sequence, dtype=torch.int64)

    def call() -> torch.Tensor:
        output = model_output(module, built.structure, tokens, tokens)
        result = output.logits if output.logits is not None else output.loss
        assert result is not None
        return result

    try:
        # A module of one's own may hold a transformers model.
        with _fake_rows(module, dtype), _random_ops_mode(built), _WholeRows():
            tokens = torch.zeros(rows, sequence, dtype=torch.int64)
            # outside_layers counts embedding, head and loss: layers hide their own work from it
            kinds.watch()
            outside_layers = measure_work(module, call, [])
    except Exception as error:
        raise ConfigError(f"model '{built.config.name}' can't be run on fake tensors: {str(error)[:200]}") from error
    outside_layers.sent = list(axis_group.sent)
    return ModelWork(
        rows=rows,
        layers=tuple(kinds.works),
        counts=tuple(kinds.counts),
        rest=outside_layers,
        # wrap_model has split the weights of tp already.
        gradients=tuple(weight.numel() for weight in module.parameters() if weight.requires_grad),
    )


def _as_run(built: BuiltModel, table: ShardingTable | None, axis_group: BlankGroup, split_tokens: bool) -> nn.Module:
    """Returns a copy of the module as a rank runs it: split by tp, and attending by documents where that was chosen."""
    module = copy_module(built.module).train()
    if axis_group.size > 1:
        assert table is not None
        tensor.wrap_model(module, table, axis_group, axis_group.size, split_tokens)  # type: ignore[arg-type]
    if built.config.attention == VARLEN:
        use_varlen(module)
    return module


@contextlib.contextmanager
def _fake_rows(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Has a module run on fake tensors, of which none says whether its rows have several documents."""
    with _silence_fake_errors(), faked(module, dtype), skip_packing_check(False):
        yield


@contextlib.contextmanager
def _silence_fake_errors() -> Iterator[None]:
    """Keeps torch from printing the traceback of an operator that it can't fake, which is raised as an error too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _random_ops_mode(built: BuiltModel) -> contextlib.AbstractContextManager[Any]:
    """Returns a mode that draws masks as the runtime does, where a model may draw; else a mode that does nothing."""
    return RandomOpsMode(_Masks()) if may_draw(built) else contextlib.nullcontext()


class _WholeRows(TorchFunctionMode):
    """Has attention by documents take torch's causal kernel, which keeps the same and computes a whole row's pairs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replaces `document_attention`."""
        if func is not document_attention:
            return func(*args, **(kwargs or {}))
        query, key, value, _, scale = args
        shares_heads = query.shape[1] != key.shape[1]
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=shares_heads
        ).transpose(1, 2)


class _Masks(RandomSource):
    """Replaces `parallel.dropout_rng`: each mask is one operator that the counter recognises by its name."""

    def dropout_mask(self, shape: Sequence[int], p: float, device: torch.device) -> torch.Tensor:
        """Returns a bool mask of ``shape``, fake: True where an element is kept."""
        return torch.empty(tuple(shape), dtype=torch.bool, device=device).bernoulli_(1.0 - p)

    def uniform(self, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Returns float64 numbers of ``shape``, fake."""
        return torch.empty(tuple(shape), dtype=torch.float64, device=device).bernoulli_()

    def attention_dropout_mask(self, query: torch.Tensor, keys: int, p: float) -> torch.Tensor:
        """Returns a bool mask (B, H, S, keys) for attention weights, fake."""
        return self.dropout_mask((*query.shape[:3], keys), p, query.device)


class _LayerKinds:
    """Replaces every layer by one that measures its kind at the first call, and otherwise passes its input on."""

    def __init__(
        self, layers: list[Any], axis_group: BlankGroup, partition: Callable[..., KeptBytes] | None, width: int
    ) -> None:
        self.works: list[ModuleWork] = []
        self.counts: list[int] = []
        self._layers, self._axis_group, self._partition, self._width = layers, axis_group, partition, width
        self._kind_index: dict[Any, int] = {}
        self._outputs: list[Any] = []

    def watch(self) -> None:
        """Wraps the layers' forwards; the module is a copy that nobody else uses."""
        for layer in self._layers:
            wrap_forward(
                layer,
                ForwardLayer.PROBE,
                "measured once for each kind of layer",
                partial(self._measuring_forward, layer),
            )

    def _measuring_forward(self, layer: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a forward that measures the layer's kind once and counts the calls."""
        # layers of one class, attention type and shapes cost the same
        key = (
            type(layer),
            getattr(layer, "attention_type", ""),
            tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()),
        )

        def forward(*args: Any, **kwargs: Any) -> Any:
            if key not in self._kind_index:
                sent_before = len(self._axis_group.sent)
                self._kind_index[key] = len(self.works)
                self.works.append(self._measure_layer(layer, plain, args, kwargs))
                self.counts.append(0)
                # once more without counting, for an output of the right shape
                with _HiddenFromModes():
                    self._outputs.append(plain(*_detached(args), **_detached(kwargs)))
                # the second run's collectives were recorded too; only the measured run's count
                del self._axis_group.sent[sent_before:]
            self.counts[self._kind_index[key]] += 1
            layer_output = self._outputs[self._kind_index[key]]
            layer_input = next(item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor))
            return tree_map_only(torch.Tensor, lambda item: _skip_layer(item, layer_input), layer_output)

        return forward

    def _measure_layer(self, layer: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> ModuleWork:
        """Measures one layer on detached leaves of its arguments."""
        inputs: list[torch.Tensor] = []
        lent: list[torch.Tensor] = []

        # differentiable arguments are inputs; others (masks, position tables) belong to every layer
        def leaf(item: torch.Tensor) -> torch.Tensor:
            detached = item.detach()
            if item.requires_grad:
                inputs.append(detached.requires_grad_())
            else:
                lent.append(detached)
            return detached

        leaf_args, leaf_kwargs = tree_map_only(torch.Tensor, leaf, (args, kwargs))
        sent_before = len(self._axis_group.sent)

        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            result = plain(*args, **kwargs)
            return (
                result if isinstance(result, torch.Tensor) else next(i for i in result if isinstance(i, torch.Tensor))
            )

        with _HiddenFromModes(), torch.enable_grad():
            work = measure_work(layer, partial(call, *leaf_args, **leaf_kwargs), inputs, lent, self._width)
            if self._partition is not None:
                work.compiled = self._partition(layer, call, (leaf_args, leaf_kwargs))
        work.sent = self._axis_group.sent[sent_before:]
        return work


class _HiddenFromModes:
    """Hides what runs inside from the modes and hooks around it."""

    def __enter__(self) -> None:
        self._modes = without_dispatch_mode()
        self._mode = self._modes.__enter__()
        # hooks that do nothing override those of the outer measurement
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda item: item, lambda item: item)
        self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._modes.__exit__(*error)


def _detached(value: Any) -> Any:
    """Returns nested values with their tensors detached."""
    return tree_map_only(torch.Tensor, lambda item: item.detach(), value)


def _skip_layer(output: torch.Tensor, layer_input: torch.Tensor) -> torch.Tensor:
    """Returns the layer's input in place of an output of its shape, so that gradients bypass the layer."""
    return layer_input if output.shape == layer_input.shape and output.is_floating_point() else output.detach()
