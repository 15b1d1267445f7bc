"""Wraps the forward of a sharded model that user code calls: dropout numbers, input checks, backward hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.analysis.call_trial import output_tensors
from meshwright.spec.layout import Layout
from meshwright.strategy.mesh import refuse_uneven_tokens
from meshwright.strategy.module_state import batch_norms
from meshwright.strategy.outside_watch import watch_outside_reads
from meshwright.strategy.sharded_model import ShardedModel
from meshwright.strategy.split_logits import guard_logits
from meshwright.torch_compat.tensors import in_backward, tree_leaves
from meshwright.train.model_analysis import has_layer_units


class ForwardHooks:
    """Hooks of the module of a strategy.

    Args:
        sharded_model: this rank's shards of the model.
        seed: of dropout.
        reader: (index, count) of this rank among those that read other rows.
        local_batch_norm: let BatchNorm compute its statistics over this rank's rows.
    """

    def __init__(self, sharded_model: ShardedModel, seed: int, reader: tuple[int, int], local_batch_norm: bool) -> None:
        assert sharded_model.sync is not None and sharded_model.guard is not None
        self._sharded_model, self._sync, self._guard = sharded_model, sharded_model.sync, sharded_model.guard
        self._seed, self._reader = seed, reader
        uses_local_statistics = reader[1] == 1 or local_batch_norm
        self._statistics = [] if uses_local_statistics else batch_norms(sharded_model.program.module)

        self._gathers = has_layer_units(sharded_model.layout)

    def attach(self, module: nn.Module) -> None:
        """Registers the hooks on a module."""
        layer_ids = {id(layer) for stage in self._sharded_model.program.stages for layer in stage.layers}
        layers = [name for name, child in module.named_modules() if id(child) in layer_ids]
        watch_outside_reads(module, layers, self._sharded_model.layout)
        module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        module.register_forward_hook(self._after_forward)
        # Outside of all other hooks, and after a forward that fails too.
        module.register_forward_pre_hook(self._show_plain_weights, prepend=True)
        module.register_forward_hook(self._show_split_weights, always_call=True)
        if (vocab := self._sharded_model.program.view.vocab) is not None:
            guard_logits(module, vocab)

    @torch.compiler.disable
    def _show_plain_weights(self, _module: nn.Module, _args: object) -> None:
        """Shows the forward plain parts of weights; a step that failed has ended."""
        self._guard.end("step")
        self._guard.begin("forward")
        self._sharded_model.adopt_replaced_data()

    @torch.compiler.disable
    def _show_split_weights(self, _module: nn.Module, _args: object, _output: object) -> None:
        """Shows user code what it may read of the parts."""
        self._guard.end("forward")

    @torch.compiler.disable
    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Checks the inputs and starts the step's random numbers."""
        for shown in [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)][:1]:
            refuse_uneven_tokens(self._sharded_model.layout, shown)
        # evaluation: no backward follows and no dropout is drawn
        if not torch.is_grad_enabled():
            return
        program = self._sharded_model.program
        self._sync.discard_failed_pass()
        if self._gathers:
            _refuse_substituted_weights(module, self._sharded_model.layout)
        if any(item.training for item in self._statistics):
            raise ConfigError(
                "the model has BatchNorm, whose statistics would be of this rank's rows alone: use GroupNorm, or call "
                "eval() of those layers, or accept it: HybridParallelStrategy(..., local_batch_norm=True)"
            )
        # inside a backward: a checkpoint around the model runs its forward again
        is_recomputation = in_backward()
        if not is_recomputation:
            self._sharded_model.agreement.before_forward((args, kwargs))
            self._sharded_model.first_call.try_call(module, args, kwargs)
        # any of them: user code may train one submodule of a model that otherwise evaluates
        if program.dropout_rng is not None and any(item.training for item in module.modules()):
            if is_recomputation:
                raise ConfigError(
                    "torch.utils.checkpoint around the whole model draws other random numbers the second time: write "
                    "recompute=full in the layout instead"
                )
            # the global batch index of the first row addresses the dropout masks
            shape = next(tensor.shape for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor))
            step = self._sharded_model.random_step
            program.dropout_rng.begin_forward((self._seed, int(step)), self._reader[0] * shape[0], shape)
            step += 1

    @torch.compiler.disable
    def _after_forward(self, _module: nn.Module, _args: object, output: object) -> None:
        """Ends the random numbers, and hooks the outputs, so that backward opens a pass."""
        if (dropout_rng := self._sharded_model.program.dropout_rng) is not None:
            dropout_rng.end_forward()
        if not torch.is_grad_enabled():
            # no backward will free the gathered weights
            self._sharded_model.release()
            return
        outputs = list(output_tensors(output))
        if not outputs:
            raise ConfigError(
                f"the model gave a {type(output).__name__} without tensors, so its backward can't be followed: return "
                "tensors, or an object, dict, list or tuple of them"
            )
        for item in (tensor for tensor in outputs if tensor.requires_grad):
            item.register_hook(self._sync.open_pass)


def _refuse_substituted_weights(module: nn.Module, layout: Layout) -> None:
    """Refuses tensors in the places of parameters, where FSDP2 puts the gathered weights there in the call."""
    for name, child in module.named_modules():
        for key, item in child._parameters.items():
            if item is not None and not isinstance(item, nn.Parameter):
                raise ConfigError(
                    f"the call has another tensor in the place of '{'.'.join(filter(None, (name, key)))}', as by "
                    f"torch.func.functional_call, and {layout} puts the gathered weight there: change the weights in "
                    "place around the call (under torch.no_grad()), or use replicate in float32"
                )
