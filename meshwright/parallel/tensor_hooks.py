"""Hooks on the model's own modules that run a group's collectives on its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from meshwright.parallel import selective
from meshwright.parallel.forward_stack import Forward, ForwardLayer, described, plain_forward, wrap_forward

HookResult: TypeAlias = "tuple[tuple[object, ...], dict[str, torch.Tensor]]"
"""Arguments that replace those of the module's call."""
Move = Callable[[torch.Tensor], torch.Tensor]
"""A movement of one tensor, with its gradient."""
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x, weight) to their product, in the weight's own orientation."""


class Once:
    """Applies a movement once to each tensor that several modules read, so that their gradients meet before it.

    What it moved is kept until the last of the modules has read something: adapters read others in between.
    Weak references wouldn't do: a product of matrices saves a view of its input, so the moved tensor's Python object is
    gone before the next module asks for it.
    """

    def __init__(self, move: Move) -> None:
        self._move = move
        self.readers = 0
        self._read_by: set[nn.Module] = set()
        self._moved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, x: torch.Tensor, reader: nn.Module | None = None) -> torch.Tensor:
        """Returns ``x`` moved; the same tensor as before where a module has read ``x`` already.

        Args:
            x: of any shape.
            reader: the module that reads it, once in a forward; None where no other does.
        """
        if reader in self._read_by:
            # The forward before ended halfway, as a recompute does that has what it needs.
            self._release()
        moved = next((output for tensor, output in self._moved if tensor is x), None)
        if moved is None:
            moved = self._move(x)
            self._moved.append((x, moved))
        if reader is not None:
            self._read_by.add(reader)
        # The last reader releases all tensors.
        if len(self._read_by) >= self.readers:
            self._release()
        return moved

    def _release(self) -> None:
        self._read_by.clear()
        self._moved.clear()


def on_input(
    module: nn.Module, move: Move, only: Callable[[torch.Tensor], bool] | None = None, *, purpose: str
) -> None:
    """Moves the tensors that a module is called with.

    Args:
        module: gets a hook.
        move: what happens to them.
        only: which; the first positional one when not given.
        purpose: what for, for `forward_stack.describe`.
    """
    if isinstance(move, Once):
        move.readers += 1

    def hook(reader: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> HookResult:
        if only is None:
            moved = move(args[0], reader) if isinstance(move, Once) else move(args[0])
            return (moved, *args[1:]), kwargs
        wanted_tensor = only

        def move_if_wanted(value: object) -> object:
            return move(value) if isinstance(value, torch.Tensor) and wanted_tensor(value) else value

        return tuple(move_if_wanted(value) for value in args), {
            key: move_if_wanted(value) for key, value in kwargs.items()
        }

    module.register_forward_pre_hook(described(hook, f"input: {purpose}"), with_kwargs=True)


def on_output(module: nn.Module, move: Move, *, purpose: str) -> None:
    """Moves the tensor that a module returns, the first where it returns several; ``purpose`` as in `on_input`."""

    def hook(_: nn.Module, _args: object, out: torch.Tensor | tuple[torch.Tensor, ...]) -> object:
        return move(out) if isinstance(out, torch.Tensor) else type(out)((move(out[0]), *out[1:]))

    module.register_forward_hook(described(hook, f"output: {purpose}"))


def on_hidden(module: nn.Module, move: Move, prepend: bool = False, *, purpose: str) -> None:
    """Moves the hidden state that a layer is called with: its first floating (B, S, D) argument.

    Args:
        module: gets a hook.
        move: what happens to it.
        prepend: ahead of hooks that the module already has.
        purpose: what for, for `forward_stack.describe`.
    """

    def hook(_: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> HookResult:
        for position, value in enumerate(args):
            if is_hidden(value):
                return (*args[:position], move(value), *args[position + 1 :]), kwargs
        for key, value in kwargs.items():
            if is_hidden(value):
                return args, kwargs | {key: move(value)}
        raise ValueError(f"a layer is called without a hidden state (B, S, D){object_hint((*args, *kwargs.values()))}")

    module.register_forward_pre_hook(described(hook, f"hidden state: {purpose}"), with_kwargs=True, prepend=prepend)


def is_hidden(value: object) -> bool:
    """Returns whether a value can be a hidden state (B, S, D)."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 3


_PRODUCT = "_meshwright_product"


def set_product(module: nn.Module, product: Product) -> None:
    """Replaces the product x W^T of a linear module where its output is summed over ranks (`sum_output`).

    Args:
        module: an `nn.Linear`.
        product: (x (..., K), weight (N, K)) to (..., N).
    """
    module.__dict__[_PRODUCT] = product


def is_plain_product(module: nn.Module) -> bool:
    """Returns whether a module is x W + b and nothing else, so that b can be added after a sum."""
    conv = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    # A model's own code may have set the forward of this one module.
    is_of_class = getattr(plain_forward(module), "__func__", None) is type(module).forward
    return is_of_class and (conv or type(module).forward is nn.Linear.forward)


def sum_output(module: nn.Module, move: Move, is_first_rank: bool, unsplit_names: tuple[str, ...]) -> None:
    """Makes a module's output, of which each rank has a summand, the sum.

    Args:
        module: its forward is replaced.
        move: the sum.
        is_first_rank: whether this rank alone adds what isn't split, where that can't be added afterwards.
        unsplit_names: names of its parameters that aren't split.
    """
    if is_plain_product(module):
        wrap_forward(
            module,
            ForwardLayer.TENSOR,
            "its product is summed over ranks, then the bias added",
            lambda _plain: summed_product(module, move),
        )
    # No unsplit weight is added, or this is the rank that adds it.
    elif is_first_rank or not unsplit_names:
        wrap_forward(module, ForwardLayer.TENSOR, "its output is summed over ranks", partial(_apply_after, move))
    else:
        wrap_forward(
            module,
            ForwardLayer.TENSOR,
            "its output is summed over ranks; weights that aren't split count on the first rank alone",
            partial(_zero_unsplit_weights, module, unsplit_names, move),
        )


def summed_product(module: nn.Module, move: Move) -> Forward:
    """Returns the forward of a plain linear module that adds its bias after ``move``, the sum over ranks."""
    default: Product = nn.functional.linear if isinstance(module, nn.Linear) else torch.matmul
    multiply: Product = module.__dict__.get(_PRODUCT, default)

    def product(x: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        # y = sum over ranks of x W, plus b once: inside the sum every rank would add b.
        y = move(selective.sent_product(multiply, x, weight))
        return y if module.bias is None else y + module.bias

    return product


def _apply_after(move: Move, plain: Forward) -> Forward:
    return lambda *args, **kwargs: move(plain(*args, **kwargs))


def _zero_unsplit_weights(module: nn.Module, unsplit_names: tuple[str, ...], move: Move, plain: Forward) -> Forward:
    def forward(*args: object, **kwargs: object) -> torch.Tensor:
        # Not through the module's call, whose hooks have let the input in already.
        zeroed = []
        try:
            for name in unsplit_names:
                path, _, key = name.rpartition(".")
                parameters: dict[str, torch.Tensor] = module.get_submodule(path)._parameters
                zeroed.append((parameters, key, parameters[key]))
                # A product, so that the weight stays in the graph and gets a zero gradient.
                parameters[key] = parameters[key] * 0.0
            return move(plain(*args, **kwargs))
        finally:
            for parameters, key, parameter in zeroed:
                parameters[key] = parameter

    return forward


def differentiable(value: torch.Tensor) -> bool:
    """Returns whether a gradient flows back through a tensor of any shape."""
    return value.requires_grad and value.is_floating_point()


def any_tensor(_: torch.Tensor) -> bool:
    """Accepts a tensor of any shape."""
    return True


def object_hint(arguments: Iterable[object]) -> str:
    """Returns a clause on what to change where a hidden state lies in an object of the model's own class; "" else.

    Args:
        arguments: of a call of a layer.
    """
    for argument in arguments:
        if any(is_hidden(value) for value in getattr(argument, "__dict__", {}).values()):
            return f", which lies in a {type(argument).__name__}: pass the tensor itself"
    return ""
