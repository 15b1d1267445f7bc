"""Stand-ins of a hidden state: a module's code reads another shape off it than what its matrices compute with.

Code reads sizes off its input (``B, T, C = x.shape``) and reshapes by them what its matrices return. Where these return
a rank's part, the input's own shape is the wrong one. So the module is called with a tensor of the right shape and of
no numbers; a module in it that is handed this very tensor gets the real one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from meshwright.parallel import tensor_hooks
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward

Shape = tuple[int, int, int]


def present(root: nn.Module, seen_shape: Callable[[Shape], Shape], place: ForwardLayer, what: str) -> None:
    """Calls a module with a stand-in of its hidden state; what it hands the stand-in to gets the hidden state itself.

    Args:
        root: gets hooks, as all modules below it do.
        seen_shape: returns the shape of the stand-in of a hidden state (B, S, D).
        place: of the call's end among what wraps the module's forward.
        what: the stand-in is of, for `forward_stack.describe`.
    """
    hidden_states: list[torch.Tensor] = []
    stand_ins: list[torch.Tensor] = []

    def enter(x: torch.Tensor) -> torch.Tensor:
        hidden_states.append(x)
        # Not a number: code that computes with it, instead of reading its shape, is found out.
        blank = x.detach().new_full((1, 1, 1), float("nan"))
        stand_ins.append(blank.expand(seen_shape((x.shape[0], x.shape[1], x.shape[2]))))
        return stand_ins[-1]

    def closing(plain: Forward) -> Forward:
        def forward(*args: object, **kwargs: object) -> object:
            try:
                return plain(*args, **kwargs)
            finally:
                # Also after an exception: the next call must not meet this one's stand-in.
                if hidden_states:
                    hidden_states.pop()
                    stand_ins.pop()

        return forward

    def swap(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if not stand_ins:
            return None
        # By identity: only the very stand-in is replaced; a module that was handed another tensor keeps it.
        args = tuple(hidden_states[-1] if value is stand_ins[-1] else value for value in args)
        return args, {key: hidden_states[-1] if value is stand_ins[-1] else value for key, value in kwargs.items()}

    wrap_forward(root, place, f"sees a stand-in of {what}", closing)
    for name, submodule in root.named_modules():
        if name:
            submodule.register_forward_pre_hook(swap, with_kwargs=True, prepend=True)
    tensor_hooks.on_hidden(root, enter, purpose=f"a stand-in of {what}")
