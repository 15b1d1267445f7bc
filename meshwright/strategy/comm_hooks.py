"""`register_comm_hook` on a sharded model: hooks written for DistributedDataParallel run where its own would."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks, post_localSGD_hook, powerSGD_hook

from meshwright.errors import ConfigError
from meshwright.parallel.comm_hook import CommHook, GradientHook
from meshwright.parallel.data_parallel import LateGradientReducer
from meshwright.parallel.program import Program
from meshwright.spec.layout import Layout

_REFUSED = {
    optimizer_overlap_hooks.__name__: "it steps the optimizer inside backward; step after backward()",
    post_localSGD_hook.__name__: "it lets copies part, which are compared here; nearest that works: meshwright train "
    "with islands=N and --outer local_sgd",
    powerSGD_hook.__name__: "its callbacks wait for further sums, on the threads of gloo that would make them; nearest "
    "that works: compress=int8 in the layout",
}
"""Hooks of torch, by module, that can't run, and what does the same."""


def offer_comm_hook(program: Program, layout: Layout) -> None:
    """Gives a program's module the method ``register_comm_hook(state, hook)`` of DistributedDataParallel.

    Args:
        program: of a custom loop.
        layout: it was built for.
    """

    def register_comm_hook(state: object, hook: GradientHook) -> None:
        """Communicates each bucket of gradients by ``hook(state, bucket)`` instead of a sum over copies.

        Raises:
            ConfigError: the layout does more than copy, the hook can't run, or there is one.
        """
        _register(program, layout, state, hook)

    program.module.__dict__["register_comm_hook"] = register_comm_hook


def _register(program: Program, layout: Layout, state: object, hook: Callable[..., object]) -> None:
    name, origin = getattr(hook, "__name__", type(hook).__name__), getattr(hook, "__module__", "")
    reason = next((text for module, text in _REFUSED.items() if origin == module), "")
    # torch wraps hooks for an optimizer in backward in a function of that module.
    if reason:
        raise ConfigError(f"register_comm_hook: {name} can't run: {reason}")
    if not callable(hook):
        raise ConfigError(f"register_comm_hook: {name} is no function of (state, bucket)")
    reducers = [sync for sync in program.stages[0].gradient_syncs if isinstance(sync, LateGradientReducer)]
    is_plain = layout.world == layout.copies and not layout.is_mixed_precision and layout.offload == "none"
    if not is_plain or layout.compress or len(reducers) != 1:
        raise ConfigError(
            f"register_comm_hook: a hook replaces the sum of gradients over copies, and under {layout} that isn't all "
            f"that is summed, or is rounded; nearest that works: replicate={layout.world}, or compress=bf16, fp16 or "
            "int8 in the layout instead of a hook"
        )
    reducers[0].set_comm_hook(CommHook(state, hook, layout.copies))
