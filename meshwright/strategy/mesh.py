"""A layout's text to the ranks it stands for: a torch DeviceMesh, or the project's own with its wires."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.errors import ConfigError
from meshwright.plan import Layout


def device_mesh(layout: Layout | str, device_type: str = "cpu") -> DeviceMesh:
    """Builds a mesh of as many dims as the layout has axes, named as these, outermost first.

    ``device_mesh("pp=2,replicate=2,shard=2,tp=2")`` has four. Axes that divide the ranks of others a second time
    (``ep``) are no dims of it.

    Args:
        layout: its degrees multiply to the ranks of the default process group.
        device_type: ``"cpu"`` or ``"cuda"``.

    Raises:
        PlanError: when they don't.
        ConfigError: when there is no process group.
    """
    plan = ranks_of(layout)
    shape = {name: size for name, size in plan.shape().items() if size > 1} or {"replicate": 1}
    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def ranks_of(layout: Layout | str) -> Layout:
    """Reads a layout and checks that it fits the default process group.

    Raises:
        PlanError: when it doesn't.
        ConfigError: when there is no process group.
    """
    plan = Layout.parse(layout) if isinstance(layout, str) else layout
    if not dist.is_initialized():
        raise ConfigError(
            "there is no process group; start the script with torchrun and call torch.distributed.init_process_group()"
        )
    plan.check_ranks(dist.get_world_size())
    return plan


def compute_device(module: torch.nn.Module | None, asked: torch.device | str | None) -> torch.device:
    """Returns where this rank computes: as asked, else its GPU under nccl, else where the weights are."""
    if asked is not None:
        return torch.device(asked)
    if "nccl" in dist.get_backend_config() and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    found = next((item.device for item in module.parameters()), None) if module is not None else None
    return found if found is not None and found.type != "meta" else torch.device("cpu")
