"""Selective recompute: what wide products of matrices and attention return is kept, everything else runs again.

To compute a value of a product again takes 2 K operations, where it sums K of them, and to keep it two bytes whatever K
is. So products that sum fewer values than the hidden state has, D, run again: multi-head latent attention's way up from
its latents, the way down of small experts, adapters of low rank, and attention's scores where no kernel fuses them.

Operators in the graphs of compiled layers are marked by this rule (`compiled_layers`). Eager layers need more than
torch's own contexts (`torch.utils.checkpoint.create_selective_checkpoint_contexts`, torch 2.13) do:

- Code may write into what a product returned, as ``h = self.up(x); h += x``. torch keeps that very memory, and its
  check of versions doesn't see it behind the view that a linear module makes: gradients were wrong without a word. Here
  a kept result is copied ahead of the first operator that writes into it, and where the layer returns its memory.
  What writes without an operator of torch's isn't seen: numpy, and functions that the layer's own code has compiled
  where they write into a result without a gradient (into others they write back by an operator).
- Of a product that ranks of ``tp`` sum, the sum is kept and the summand isn't: with ``sequence`` it is 1 / tp as large,
  and nothing is summed twice. In the second run the product isn't computed either, as nothing reads it. So are queries,
  keys and values kept as heads of all tokens where ranks of ``cp`` exchange them.

Source: Korthikanti et al., Reducing Activation Recomputation (2022), section 5.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, cast

import torch

from meshwright.parallel.document_attention import REFERENCE_OPERATOR
from meshwright.parallel.forward_stack import Forward
from meshwright.parallel.ring_attention import RING_OPERATOR
from meshwright.torch_compat.tensors import (
    FLOAT8_PRODUCT,
    FUSED_ATTENTION,
    GROUPED_PRODUCT,
    TorchDispatchMode,
    dispatch_mode,
    tree_flatten,
    tree_unflatten,
)
from meshwright.torch_compat.varlen import VARLEN_OPERATOR

PRODUCTS: dict[Any, int] = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten.baddbmm.default: 1,
    cast("Any", FLOAT8_PRODUCT).default: 0,
    cast("Any", GROUPED_PRODUCT).default: 0,
}
"""Products of matrices, and which of their arguments is the left factor, (..., M, K)."""
ATTENTION: frozenset[Any] = frozenset(
    cast("Any", operator).default for operator in (*FUSED_ATTENTION, VARLEN_OPERATOR, REFERENCE_OPERATOR, RING_OPERATOR)
)
"""Fused attention, whose results are always kept: dear to compute, small to hold."""
CANDIDATES = ATTENTION | PRODUCTS.keys()
_COLLECTIVE = "a collective"
"""What stands for an operator among kept results."""
_ORDER = (
    "recompute=selective: a layer's second run came to {second} where its first had {first}: the layer computes "
    "something else when it is called again with the same arguments; nearest that works: recompute=full"
)


class _Shape:
    """Stands for a tensor whose values nothing reads."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._size, self._stride, self._like = tensor.size(), tensor.stride(), (tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        """Returns a tensor of this shape, (any), of whatever values."""
        return torch.empty_strided(self._size, self._stride, dtype=self._like[0], device=self._like[1])


class _Result:
    """What an operator of the first run returned."""

    def __init__(self, operator: object, leaves: list[Any], spec: Any) -> None:
        self.operator, self.leaves, self.spec = operator, leaves, spec


_Results: TypeAlias = "deque[_Result]"


class _SelectiveRun(TorchDispatchMode):
    """A run of one call of a layer.

    Args:
        results: what the call's first run kept, in order.
        width: D, of the hidden state.
    """

    supports_higher_order_operators = True
    """A layer may call flex attention, say."""

    def __init__(self, results: _Results, width: int) -> None:
        super().__init__()
        self.results, self.width = results, width
        self._tokens: list[contextvars.Token[_SelectiveRun | None]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns whether functions that a layer's own code has compiled run as the compiler made them."""
        return True

    def __enter__(self) -> Any:
        self._tokens.append(_RUN.set(self))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _RUN.reset(self._tokens.pop())

    def collective_of(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns what ranks give each other, of any shape, by ``make``; the second run takes it from the first."""
        raise NotImplementedError

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor's memory, of any shape, is kept."""
        return False

    def release(self, out: object) -> None:
        """Lets other code write into the tensors, of any shape, of what the layer returns."""


_RUN: contextvars.ContextVar[_SelectiveRun | None] = contextvars.ContextVar("selective run", default=None)
_IS_SENT: contextvars.ContextVar[bool] = contextvars.ContextVar("sent product", default=False)


class _FirstRun(_SelectiveRun):
    """Keeps what operators return that are `is_kept`."""

    def __init__(self, results: _Results, width: int) -> None:
        super().__init__(results, width)
        self._passes = False
        self._places: dict[int, tuple[_Result, int]] = {}
        """Of each kept storage, by its address, the result and which of its leaves it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator."""
        kwargs = kwargs or {}
        if self._passes:
            return func(*args, **kwargs)
        if func not in _WRITTEN:
            _WRITTEN[func] = _written_arguments(func)
        if self._places and _WRITTEN[func] != ():
            self._copy_ahead(func, args, kwargs)
        out = func(*args, **kwargs)
        if func in CANDIDATES and is_kept(func, args, self.width):
            self._keep(func, out)
        return out

    def collective_of(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Keeps what comes of the collective, and nothing that goes into it."""
        self._passes = True
        try:
            out = make()
        finally:
            self._passes = False
        self._keep(_COLLECTIVE, out)
        return out

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor's memory, of any shape, is kept."""
        return tensor.untyped_storage()._cdata in self._places

    def _keep(self, operator: object, out: Any) -> None:
        leaves, spec = tree_flatten(out)
        result = _Result(operator, list(leaves), spec)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if is_sent_product():
                    result.leaves[place] = _Shape(leaf)
                else:
                    # The tensor itself becomes one of the graph, which then would hold itself.
                    result.leaves[place] = leaf.detach()
                    self._places[leaf.untyped_storage()._cdata] = result, place
        self.results.append(result)

    def _copy_ahead(self, func: Any, args: Any, kwargs: Any) -> None:
        """Copies the kept results into whose memory an operator is about to write."""
        self._copy_kept(_written(func, args, kwargs))

    def release(self, out: object) -> None:
        """Copies the kept results in whose memory the layer returns tensors, of any shape."""
        self._copy_kept(leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, torch.Tensor))

    def _copy_kept(self, tensors: Iterable[torch.Tensor]) -> None:
        for leaf in tensors:
            found = self._places.pop(leaf.untyped_storage()._cdata, None)
            if found is not None:
                result, place = found
                result.leaves[place] = result.leaves[place].clone()


class _SecondRun(_SelectiveRun):
    """Takes what kept operators returned in the first run."""

    def __init__(self, results: _Results, width: int) -> None:
        super().__init__(results, width)
        self._has_begun = False

    def __enter__(self) -> Any:
        if self._has_begun:
            raise RuntimeError(
                "recompute=selective: a layer's kept results were asked for twice; a graph that is kept "
                "(retain_graph=True) runs backward once here; nearest that works: recompute=full"
            )
        self._has_begun = True
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator, or returns what it returned."""
        if func in CANDIDATES and is_kept(func, args, self.width):
            return self._take(func)
        return func(*args, **(kwargs or {}))

    def collective_of(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns what came of the first run's."""
        out: torch.Tensor = self._take(_COLLECTIVE)
        return out

    def _take(self, operator: object) -> Any:
        result = self.results.popleft() if self.results else None
        if result is None or result.operator is not operator:
            first = "none" if result is None else result.operator
            raise RuntimeError(_ORDER.format(second=operator, first=first))
        leaves = [leaf.empty() if isinstance(leaf, _Shape) else leaf for leaf in result.leaves]
        return tree_unflatten(leaves, result.spec)


def selective_contexts(width: int) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of a layer's two runs for torch's ``checkpoint``, one pair a call; ``width`` is D."""
    results: _Results = deque()
    return _FirstRun(results, width), _SecondRun(results, width)


def is_kept(operator: Any, arguments: Sequence[Any], width: int) -> bool:
    """Returns whether selective recompute keeps what an operator returns.

    Args:
        operator: of torch.
        arguments: of its call, in order; tensors or what else has a ``shape``.
        width: D, of the hidden state.
    """
    left = PRODUCTS.get(operator)
    if left is None:
        return operator in ATTENTION
    summed = arguments[left].shape[-1]
    # A graph whose sizes are symbols doesn't know theirs.
    return is_sent_product() or (isinstance(summed, int) and summed >= width)


def _current_run() -> _SelectiveRun | None:
    # Dynamo can't trace variables of a context, and compiled layers keep nothing here.
    return None if torch.compiler.is_compiling() else _RUN.get()


def run_and_release(plain: Forward, *args: Any, **kwargs: Any) -> Any:
    """Returns what a layer's forward returns; other code may then write into it."""
    out = plain(*args, **kwargs)
    run = _current_run()
    if run is not None:
        run.release(out)
    return out


def kept_collective(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Returns what ranks give each other; selective recompute keeps it in place of all that ``make`` computes.

    Args:
        make: sums products over ranks, or exchanges this rank's tokens for its heads of all tokens; any shape.
    """
    run = _current_run()
    return make() if run is None else run.collective_of(make)


def sent_product(multiply: Callable[..., torch.Tensor], *factors: torch.Tensor) -> torch.Tensor:
    """Returns a product that nothing reads but `kept_collective`, whose result selective recompute keeps in its place.

    Args:
        multiply: makes it of the factors.
        factors: (..., K) and a weight of either orientation; the product is (..., N).
    """
    if torch.compiler.is_compiling():
        return multiply(*factors)
    token = _IS_SENT.set(True)
    try:
        return multiply(*factors)
    finally:
        _IS_SENT.reset(token)


def is_sent_product() -> bool:
    """Returns whether a product is made whose only reader is `kept_collective`."""
    return _IS_SENT.get()


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor, of any shape, that other code than torch's may write into.

    It is a copy where the memory is kept. Other modes that look on, as those of a model's own selective checkpoint, may
    keep what they see.
    """
    run = _RUN.get()
    may_be_kept = run.keeps(tensor) if run is not None else dispatch_mode() is not None
    return tensor.clone(memory_format=torch.contiguous_format) if may_be_kept else tensor.contiguous()


_WRITTEN: dict[Any, tuple[tuple[int, str], ...] | None] = {}
"""Of each operator met, place and name of the arguments that it writes into; None where that may be any."""


def _written_arguments(func: Any) -> tuple[tuple[int, str], ...] | None:
    schema = getattr(func, "_schema", None)
    if schema is None:  # an operator of higher order
        return None
    if func.namespace == "c10d":
        # Their schemas don't say that they write into the first argument: a result, in which some find what they send.
        return tuple((0, item.name) for item in schema.arguments[:1])
    infos = ((place, item.name, item.alias_info) for place, item in enumerate(schema.arguments))
    return tuple((place, name) for place, name, info in infos if info is not None and info.is_write)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that an operator writes into."""
    places = _WRITTEN[func]
    values: Any = (args, kwargs)
    if places is not None:
        values = [args[place] if place < len(args) else kwargs.get(name) for place, name in places]
    yield from (leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor))
