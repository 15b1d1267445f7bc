"""What lies between a call of a module and its own code under a layout: hooks and wrappers, in the order they run."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.autograd_helper import computed_by_helper
from meshwright.errors import ConfigError, nearest_path
from meshwright.models.build import BuiltModel
from meshwright.parallel.axis_group import TrafficLog
from meshwright.parallel.build import apply_transforms, check
from meshwright.parallel.forward_stack import describe, wrappers
from meshwright.parallel.mesh import Mesh
from meshwright.spec.layout import Layout
from meshwright.torch_compat.fake_group import fake_process_group
from meshwright.train.model_analysis import analyse_model
from meshwright.train.session import make_model_source


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleStack:
    """One module of a rank."""

    module: str
    """Its name in the model; "" is the model itself."""
    type: str
    """Its class."""
    lines: tuple[str, ...]
    """What a call goes through, outermost first, as `parallel.forward_stack.describe` prints it."""

    def to_json(self) -> dict[str, object]:
        """Returns plain values."""
        return {"module": self.module, "type": self.type, "lines": list(self.lines)}


@computed_by_helper
def module_stacks(built: BuiltModel, layout: Layout, name: str, rank: int = 0) -> list[ModuleStack]:
    """Builds one rank of a layout without memory or other ranks, and reads off what its modules are wrapped in.

    It does so in a process of its own. DTensor caches, per process, the mesh on which a result lies, under a
    key that leaves out which rank the process is: a rank that is forked later would get results that take it for the
    pretended one, and wouldn't sum its gradients.

    Args:
        built: the model on meta; it stays as it is.
        layout: any that the model allows.
        name: a module of the model; it and everything inside of it that a hook or wrapper changes is returned.
        rank: whose stage of the model is shown.

    Raises:
        ConfigError: the model has no such module, or another rank has it.
        PlanError: the model doesn't allow the layout.
    """
    names = [path for path, _ in built.module.named_modules()]
    if name not in names:
        outermost = [path for path, _ in built.module.named_children()]
        hint = nearest_path(name, [*built.structure.layers, *names[1:]])
        raise ConfigError(f"the model has no module '{name}'{hint}; its outermost modules are {', '.join(outermost)}")
    if not 0 <= rank < layout.world:
        raise ConfigError(f"rank {rank}: layout {layout} has the ranks 0 to {layout.world - 1}")
    check(layout, "cuda", len(built.structure.layers))
    analysis = analyse_model(built, layout)
    with fake_process_group(rank, layout.world):
        work = apply_transforms(
            make_model_source(built, layout, analysis, filled=False), layout, Mesh(layout, "cpu", TrafficLog())
        )
        stacks = []
        for stage in work.stages:
            prefix = f"{name}." if name else ""
            for path, module in stage.module.named_modules():
                changed = wrappers(module) or module._forward_pre_hooks or module._forward_hooks
                if path == name or (path.startswith(prefix) and changed):
                    stacks.append(ModuleStack(module=path, type=type(module).__name__, lines=tuple(describe(module))))
    return stacks
