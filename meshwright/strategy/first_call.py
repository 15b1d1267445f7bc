"""Refuses models whose rows or calls depend on each other, where readers or micro-batches divide the rows.

On one device a call has all rows of a batch, and a step is one call; a reader or a micro-batch has some of the rows.
What looks at several of them (experts with a capacity, a norm over the batch) computes something else then, and so does
what an attribute carries from call to call. The first rank tries that at the first call that trains, on a copy of the
model that was made before it was sharded; the others get its answer where all ranks meet next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.analysis.call_trial import CallFacts, CallTrial, as_trial_call, limit_tokens
from meshwright.models.analysis.clone import LARGEST_FUNCTION, SMALL, make_clone, realise_model
from meshwright.models.analysis.loss_extremes import scaled_matrices
from meshwright.models.analysis.objective_trial import SCALES
from meshwright.models.build import BuiltModel
from meshwright.parallel.byte_collectives import broadcast_bytes
from meshwright.parallel.model_source import Fill
from meshwright.parallel.stage import copy_module
from meshwright.parallel.training_modes import set_training_modes, training_modes
from meshwright.spec.layout import Layout
from meshwright.torch_compat.tensors import BatchNormBase


class FirstCall:
    """Tries a model at the first call that trains it, and refuses it on every rank.

    Args:
        built: before it is sharded; it stays unchanged.
        layout: to be run.
        readers: number of ranks that read other rows.
        fill: values of a box of a buffer, by name, for a module on meta.
        accepts: whether the user wants each call to see its own rows alone.
        microbatches: number of calls that a schedule makes of a step's rows of one reader; None where user code calls.
    """

    def __init__(
        self,
        built: BuiltModel,
        layout: Layout,
        readers: int,
        fill: Fill | None = None,
        accepts: bool = False,
        microbatches: int | None = None,
    ) -> None:
        self._layout, self._readers, self._accepts = layout, readers, accepts
        self._calls, self._is_scheduled = readers * (microbatches or 1), microbatches is not None
        self._source: BuiltModel | None = None
        self._fill = fill
        self._facts: CallFacts | None = None
        self._is_open = (self._calls > 1 or (self._is_scheduled and layout.world > 1)) and dist.get_backend() != "fake"
        if not self._is_open or dist.get_rank():
            return
        weights = {name for name, _ in built.module.named_parameters(remove_duplicate=False)}
        constants = {name: value for name, value in built.recipe.constants.items() if name not in weights}
        # what can't be copied (a lock, say) can't be tried
        with contextlib.suppress(Exception):
            recipe = dataclasses.replace(built.recipe, constants=constants)
            self._source = dataclasses.replace(built, module=copy_module(built.module), recipe=recipe)

    def try_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tries the model once on the arguments of its first call; `settle` tells the outcome.

        Args:
            module: as its user calls it, for the modes of its submodules.
            args: of the call.
            kwargs: of the call.
        """
        source, self._source = self._source, None
        if source is None:
            return
        # A model that can't be tried is trained all the same: it need not run on the CPU, or in float64.
        with contextlib.suppress(Exception):
            self._facts = self._try(source, training_modes(module), args, kwargs)

    def _try(
        self, source: BuiltModel, modes: dict[str, bool], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallFacts:
        """Returns what the calls of a real copy of the model show."""
        call = as_trial_call(args, kwargs)
        module = None
        if source.structure.transformers and _elements(source.module) > SMALL:
            clone = make_clone(source)
            # a class of its own family: the arguments are for that one
            if type(clone.module) is type(source.module):
                module, call = clone.module, limit_tokens(call, clone.vocab)
        if module is None:
            if _elements(source.module) > LARGEST_FUNCTION:
                return CallFacts()
            module = realise_model(source, _drawing())
            if self._fill is not None:
                self._fill_buffers(module, source)
        set_training_modes(module, modes)
        for child in module.modules():
            # of its statistics the user was asked already
            if isinstance(child, BatchNormBase):
                child.__dict__["forward"] = _identity
        # with small matrices a router chooses the same experts for all tokens
        with scaled_matrices(module, SCALES[-1]):
            return CallTrial(module, call).facts()

    def _fill_buffers(self, module: nn.Module, source: BuiltModel) -> None:
        """Sets the buffers that the module had on meta."""
        assert self._fill is not None
        for name, buffer in module.named_buffers():
            if name not in source.recipe.constants:
                buffer.copy_(self._fill(name, tuple((0, size) for size in buffer.shape)))

    def settle(self) -> None:
        """Tells every rank what the first one's trial showed; all ranks call it together, once it matters.

        Raises:
            ConfigError: on every rank, where the layout would train another model.
        """
        if not self._is_open:
            return
        self._is_open = False
        facts = dataclasses.asdict(self._facts or CallFacts())
        facts = json.loads(broadcast_bytes(json.dumps(facts).encode() if not dist.get_rank() else b""))
        if reason := self.refusal(CallFacts(**{**facts, "remembers": tuple(facts["remembers"])})):
            raise ConfigError(reason)

    def refusal(self, facts: CallFacts) -> str:
        """Returns why the layout would train another model than one device; "" where it wouldn't."""
        where = (
            f"step() computes a batch in {self._calls} calls"
            if self._is_scheduled
            else f"each of the {self._readers} readers of {self._layout} calls the model on rows of its own"
        )
        cure = f"one reader, where ranks split the model (tp={self._layout.world})"
        cure += ", and microbatches=1" if self._is_scheduled else ""
        accept = (
            "or local_rows=True where the layout is given, to train each call's rows by themselves as "
            "DistributedDataParallel does"
        )
        if facts.mixes_rows and self._calls > 1 and not self._accepts:
            return (
                "what the model computes for a row depends on the other rows of the call (experts with a capacity that "
                f"rows share, a norm over the batch), and {where}; nearest that works: {cure}, code that looks at each "
                f"row by itself, {accept}"
            )
        if facts.remembers and self._is_scheduled:
            return (
                f"forward changes the attribute '{facts.remembers[0]}' and reads it in later calls, and step() "
                "calls it for each micro-batch, and again to try things out, not once a step; nearest that works: an "
                "attribute that follows from the arguments alone, or a loop that calls the model and backward itself, "
                "under replicate, shard or tp"
            )
        if facts.remembers and facts.mixes_remembered_rows and not self._accepts:
            return (
                f"forward changes the attribute '{facts.remembers[0]}' by the rows that it sees and reads it in later "
                f"calls, and {where}; nearest that works: {cure}, an attribute that doesn't depend on the rows, "
                f"{accept}"
            )
        return ""


def _elements(module: nn.Module) -> int:
    """Returns the number of a module's weights."""
    return sum(item.numel() for item in module.parameters())


def _drawing() -> Callable[[str, nn.Parameter], torch.Tensor]:
    """Returns a function from a parameter's name and itself to random values of its shape."""
    generator = torch.Generator().manual_seed(11)

    def draw(_: str, parameter: nn.Parameter) -> torch.Tensor:
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        # around one for scales of norms, small for matrices, as in other clones
        scale = 0.2 if parameter.dim() < 2 else 0.5 / max(1, parameter.shape[-1]) ** 0.5
        values = values * scale + (1.0 if parameter.dim() < 2 else 0.0)
        return values if parameter.is_floating_point() else torch.zeros(parameter.shape, dtype=parameter.dtype)

    return draw


def _identity(x: torch.Tensor, *_: object) -> torch.Tensor:
    """Returns its input, (B, C, ...)."""
    return x
