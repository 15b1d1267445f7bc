"""Finds by trial whether a model's logits are a linear function of what its head is called with.

Where they are, the loss may compute them a chunk at a time (`train.chunked_loss`) in place of the model's own code.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.models.analysis.clone import Clone, duplicate_module
from meshwright.models.analysis.logit_map import LogitMap
from meshwright.models.analysis.objective import Objective, nothing_dropped
from meshwright.models.build import BuiltModel
from meshwright.models.forward import call_model, model_output
from meshwright.models.structure import ModelStructure
from meshwright.parallel.float64_ops import Float64Ops
from meshwright.parallel.forward_stack import ForwardLayer, wrap_forward
from meshwright.parallel.head_cut import HeadCut, HeadInput
from meshwright.parallel.keyed_random import seed_all
from meshwright.parallel.stage import copy_module
from meshwright.torch_compat.tensors import TorchArgs, TorchFunction, TorchKwargs

TOLERANCE = 1e-9
"""Largest relative difference between equal logits and gradients, in float64."""
_LARGE = 1e9
"""A product at which a limited logit has reached its limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadTrial:
    """How a model computes its logits."""

    name: str = ""
    """Its head, where logits are ``logit_map`` of the head's product; "" where the loss needs whole logits."""
    logit_map: LogitMap = LogitMap()  # noqa: RUF009 - frozen
    refused: str = "its forward wasn't tried out"
    """Why the loss needs whole logits, in a clause."""


def try_head(built: BuiltModel, clone: Clone, objective: Objective, length: int, changing: str = "") -> HeadTrial:
    """Compares logits and gradients of a clone with those from its head's input and weights.

    Args:
        built: the model, on meta; it stays unchanged.
        clone: of it, small and real.
        objective: the model's own loss.
        length: tokens of a row on which the clone runs.
        changing: why logits of the same rows may change from call to call, in a clause; "" where they don't.
    """
    structure, name = clone.structure, clone.structure.head
    if not objective.plain:
        return HeadTrial(refused=f"its own loss ({objective.content}) is trained as its code computes it")
    if changing:
        return HeadTrial(refused=changing)
    if name is None:
        return HeadTrial(refused="no module outside of its layers is a linear head")
    head = clone.module.get_submodule(name)
    if type(head).forward is not nn.Linear.forward:
        return HeadTrial(refused=f"its head {name} is a {type(head).__name__}, and no plain nn.Linear")
    if head._forward_hooks:
        return HeadTrial(refused=f"its head {name} has a forward hook of its own, which takes whole logits")
    try:
        clone_map = _read_logit_map(duplicate_module(clone.module), structure, length)
        logit_map = clone_map
        if not clone.full_size:
            # The numbers of a narrow clone's code may follow from its sizes: the full model's are those that count.
            logit_map = _read_logit_map(copy_module(built.module).to(torch.bfloat16), built.structure, length)
        refused = "its logits are no scaled or limited product of its head"
        if clone_map is not None and logit_map is not None:
            refused = _difference(clone, clone_map, length)
    except Exception as error:
        refused = f"its head couldn't be tried out: {type(error).__name__}: {error}".partition("\n")[0][:200]
    if refused or logit_map is None:
        return HeadTrial(refused=refused)
    return HeadTrial(name=name, logit_map=logit_map, refused="")


class _UnknownValues(TorchFunctionMode):
    """Lets code run on that reads a value of a tensor without memory: it reads 0."""

    def __torch_function__(
        self,
        func: TorchFunction,
        types: Collection[type],
        args: TorchArgs = (),
        kwargs: TorchKwargs | None = None,
    ) -> object:
        """Answers for values; torch calls this for each function."""
        name = getattr(func, "__name__", "")
        if name in ("item", "__bool__", "__int__", "__float__", "__index__"):
            tensor = args[0]
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return False if name == "__bool__" else 0
        return func(*args, **(kwargs or {}))


def _read_logit_map(module: nn.Module, structure: ModelStructure, length: int) -> LogitMap | None:
    """Returns what a model's code does to its head's product, which is replaced by chosen numbers; None for other code.

    Args:
        module: a copy of the model, on meta or real, which is changed: the code behind its head runs on real numbers.
        structure: of it.
        length: tokens of a row.
    """
    assert structure.head is not None
    head = module.get_submodule(structure.head)
    columns = int(head.weight.shape[0])  # type: ignore[union-attr, index]
    product = 20.0 * torch.randn(length, columns, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    # The numbers from which limit and factor are read; the others test them.
    product[0, 0], product[0, 1] = _LARGE, 1e-3
    wrap_forward(
        head,
        ForwardLayer.PROBE,
        "chosen numbers for its product",
        lambda _: lambda hidden: product.reshape(*hidden.shape[:-1], columns),
    )
    tokens = torch.zeros(1, length, dtype=torch.int64, device=head.weight.device)  # type: ignore[arg-type]
    with torch.no_grad(), Float64Ops(), nothing_dropped(), _UnknownValues():
        output = model_output(module, structure, tokens, tokens if not structure.transformers else None)
    if output.logits is None or output.logits.numel() != product.numel():
        return None
    logits = output.logits.reshape(product.shape).double()
    top, slope = float(logits[0, 0]), float(logits[0, 1]) / 1e-3
    is_linear = abs(top / _LARGE - slope) <= TOLERANCE * abs(slope)
    limit = 0.0 if is_linear else top
    if not is_linear and not abs(float(logits[0, 1])) < abs(limit):
        return None
    # a = c artanh(z / c) / x at a small x.
    factor = slope if is_linear else limit * float(torch.atanh(logits[0, 1] / limit)) / 1e-3
    expected = limit * torch.tanh(factor * product / limit) if limit else factor * product
    is_equal = bool(((logits - expected).abs() <= TOLERANCE * expected.abs()).all())
    return LogitMap(factor, limit) if is_equal and factor else None


def _difference(clone: Clone, logit_map: LogitMap, length: int) -> str:
    """Returns how a clone's logits or gradients differ from those of its head's input, in a clause; "" for equal."""
    module, structure = duplicate_module(clone.module), clone.structure
    assert structure.head is not None
    cut = HeadCut(module, structure.head)
    generator = torch.Generator().manual_seed(6)
    tokens, targets = (torch.randint(clone.vocab, (2, length), generator=generator) for _ in range(2))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def logits_of(head: HeadInput) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = logit_map.factor * nn.functional.linear(head.hidden, head.weight, head.bias)
        return logit_map.limit * torch.tanh(scaled / logit_map.limit) if logit_map.limit else scaled, head.hidden

    with Float64Ops(), nothing_dropped():
        seed_all(0)
        expected = model_output(module, structure, tokens, targets).logits
        seed_all(0)
        logits, _ = cut.run(lambda: call_model(module, structure, tokens, targets), logits_of)
    if expected is None:
        return "its forward returns no logits"
    if logits.numel() != expected.numel():
        return f"its logits are {tuple(expected.shape)}, and its head's product {tuple(logits.shape)}"
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    actual_grads = torch.autograd.grad(logits, trained, upstream.reshape(logits.shape), allow_unused=True)
    expected_grads = torch.autograd.grad(expected, trained, upstream, allow_unused=True)
    pairs = [(logits.detach().reshape(expected.shape), expected.detach()), *zip(actual_grads, expected_grads)]
    largest = max(float(grad.abs().max()) for grad in expected_grads if grad is not None and grad.numel())
    for index, (actual, wanted) in enumerate(pairs):
        if actual is None or wanted is None:
            present = actual if wanted is None else wanted
            is_equal = present is None or not float(present.abs().sum())
        else:
            size = float(wanted.abs().max()) if index == 0 else largest
            is_equal = not actual.numel() or float((actual - wanted).abs().max()) <= TOLERANCE * size
        if not is_equal:
            return f"its {'logits' if index == 0 else 'gradients'} aren't those of its head's product"
    return ""
