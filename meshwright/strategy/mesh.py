"""Converts between layouts and torch device meshes: a DeviceMesh, its dims, or degrees by keyword become a layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.errors import ConfigError, PlanError, nearest
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.groups import round_axes, row_axes
from meshwright.spec.layout import Layout

Dim: TypeAlias = int | str | DeviceMesh | None
"""Ranks of one axis: how many; a dim of a mesh by name; or that dim itself, ``mesh["tp"]``."""


def axis_of_dim() -> dict[str, str]:
    """Returns the axis by each other name that meshes of user code have for it: `spec.axis.Axis.aliases`."""
    axis_by_alias: dict[str, str] = {}
    for name, axis in known_axes().items():
        for alias in axis.aliases:
            axis_by_alias.setdefault(alias, name)
    return axis_by_alias


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
    plan = as_layout(layout)
    # axes of one rank are no dims; a single rank still needs one
    shape = {name: size for name, size in plan.shape().items() if size > 1} or {row_axes(Holds.COPY)[0]: 1}
    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def as_layout(layout: Layout | str | DeviceMesh) -> Layout:
    """Reads a layout, or a mesh whose dims have names, and checks that it fits the default process group.

    Raises:
        PlanError: when it doesn't.
        ConfigError: when there is no process group.
    """
    if isinstance(layout, DeviceMesh):
        layout = layout_of_mesh(layout)
    if not isinstance(layout, (Layout, str)):
        raise ConfigError(
            f"layout is a {type(layout).__name__}: give a text such as 'replicate=2,tp=2', a Layout, or a DeviceMesh "
            "whose dims have names"
        )
    plan = Layout.parse(layout) if isinstance(layout, str) else layout
    if not dist.is_initialized():
        raise ConfigError(
            "there is no process group; start the script with torchrun and call torch.distributed.init_process_group()"
        )
    plan.check_ranks(dist.get_world_size())
    _check_one_island(plan)
    return plan


def _check_one_island(layout: Layout) -> None:
    """Refuses islands: a custom loop has no outer step."""
    if layout.islands > 1:
        raise PlanError(
            f"{layout}: islands join by the outer step of meshwright train, which a custom loop doesn't run; write "
            f"{row_axes(Holds.COPY)[0]}={layout.islands} in place of the islands"
        )


def layout_of_mesh(mesh: DeviceMesh, zero: int | None = None) -> Layout:
    """Returns the layout of a mesh whose dims are named as axes, or as `axis_of_dim` has them.

    An ``ep`` dim becomes ranks that read rows of their own (``shard``), over which experts are dealt out.

    Args:
        mesh: over all ranks, its dims in the order of a layout: ``pp, replicate, shard, cp, tp``.
        zero: ZeRO level of the ``shard`` dim; 3 when None.

    Raises:
        PlanError: a dim has no name, or one that no axis has; or the ranks are in another order.
    """
    names = mesh.mesh_dim_names
    if names is None:
        dims = ", ".join("?" * mesh.ndim)
        raise PlanError(
            f"the mesh has {mesh.ndim} dims without names, so nothing says what each is for: write mesh_dim_names="
            f"({dims}) with names of {', '.join(known_axes())}"
        )
    return layout_of_dims({name: mesh[name] for name in names}, zero)


def layout_of_dims(dims: Mapping[str, Dim], zero: int | None = None, mesh: DeviceMesh | None = None) -> Layout:
    """Returns the layout of axes that are given one by one.

    Args:
        dims: ranks of each axis, by the axis's name or another of `axis_of_dim`.
        zero: ZeRO level of the ``shard`` dim; 3 when None.
        mesh: where dims that are given by name are looked up.

    Raises:
        PlanError: see `layout_of_mesh`.
    """
    axes, aliases = known_axes(), axis_of_dim()
    degrees: dict[str, int] = {}
    ranks_by_axis: dict[str, list[int]] = {}
    for name, dim in dims.items():
        axis = aliases.get(name, name)
        if axis not in axes:
            raise PlanError(f"'{name}' is no axis{nearest(name, [*axes, *aliases])}")
        if dim is None:
            continue
        if isinstance(dim, str):
            dim = _mesh_dim(mesh, dim)
        if isinstance(dim, DeviceMesh):
            if dim.ndim != 1:
                raise PlanError(f"{name} is a mesh of dims {dim.mesh_dim_names}: give one of them, as mesh['{name}']")
            # the ranks along the dim, in order, to be compared with the layout's
            ranks_by_axis[axis], dim = dim.mesh.flatten().tolist(), dim.size()
        if axis in degrees:
            raise PlanError(f"'{name}' and another dim are both axis '{axis}': give each axis once")
        degrees[axis] = dim
    shard = row_axes(Holds.SHARD)[0]
    for name in (name for name, axis in axes.items() if axis.carves):
        if degrees.get(name, 1) > 1 and shard not in degrees and name in ranks_by_axis:
            # Ranks of an expert dim read rows of their own: they are data ranks for all that isn't an expert.
            degrees[shard], ranks_by_axis[shard] = degrees[name], ranks_by_axis.pop(name)
        ranks_by_axis.pop(name, None)
    sharded = any(degrees.get(name, 1) > 1 for name in row_axes(Holds.SHARD))
    layout = Layout(degrees=degrees, zero=(3 if zero is None else zero) if sharded else 0)
    _check_one_island(layout)
    if dist.is_initialized():
        _check_order(layout, ranks_by_axis)
    return layout


def _mesh_dim(mesh: DeviceMesh | None, name: str) -> DeviceMesh:
    """Returns a mesh's dim by name."""
    if mesh is None or name not in (mesh.mesh_dim_names or ()):
        available = "no mesh was given" if mesh is None else f"the mesh has {mesh.mesh_dim_names}"
        raise PlanError(
            f"'{name}' is no dim: {available}; give device_mesh= a mesh with that dim, or a number of ranks"
        )
    return mesh[name]


def _check_order(layout: Layout, ranks_by_axis: Mapping[str, list[int]]) -> None:
    """Refuses ranks in another order than a layout puts them."""
    shape = layout.shape()
    if layout.world != dist.get_world_size():
        layout.check_ranks(dist.get_world_size())
    grid = torch.arange(layout.world).reshape(tuple(shape.values()))
    coordinates = [int(item) for item in (grid == dist.get_rank()).nonzero()[0]]
    for axis, ranks in ranks_by_axis.items():
        if axis not in shape or len(ranks) == 1:
            continue
        dim = tuple(shape).index(axis)
        index: list[int | slice] = [*coordinates]
        index[dim] = slice(None)
        expected = grid[tuple(index)].tolist()
        if expected != ranks:
            # A loop of one's own has no islands.
            order = ", ".join(name for name in shape if name not in round_axes())
            raise PlanError(
                f"the dim of '{axis}' has ranks {ranks}, where the layout {layout} puts {expected}: order the mesh's "
                f"dims as ({order}), or call device_mesh('{layout}')"
            )


def merge_dim(dim: Dim, size: int | None) -> Dim:
    """Returns the ranks of a pipeline, which may be given by two names."""
    if dim is not None and size is not None:
        raise ConfigError("pipeline_parallel_dim and pipeline_parallel_size are one number of ranks: give one of them")
    return size if dim is None else dim


def choose_layout(
    layout: Layout | str | DeviceMesh | None, mesh: DeviceMesh | None, dims: dict[str, Dim], zero: int | None
) -> Layout | str | DeviceMesh:
    """Returns the one source of the degrees: a layout, a mesh, or the layout of dims by keyword."""
    given_dims = {name: dim for name, dim in dims.items() if dim is not None}
    # dims by keyword may be looked up in a mesh
    if given_dims and layout is None:
        return layout_of_dims(given_dims, zero, mesh)
    if given_dims or (layout is None) == (mesh is None):
        raise ConfigError(
            "give one of: a layout such as 'replicate=2,tp=2', a DeviceMesh whose dims have names, or dims by keyword "
            "(data_parallel_dim=2, tensor_parallel_dim=mesh['tp'])"
        )
    layout_or_mesh = mesh if layout is None else layout
    if isinstance(layout_or_mesh, DeviceMesh):
        return layout_of_mesh(layout_or_mesh, zero)
    if zero is not None:
        raise ConfigError(f"zero={zero} belongs into the layout: write shard=N,zero={zero}")
    assert layout_or_mesh is not None
    return layout_or_mesh


def compute_device(module: torch.nn.Module | None, device: torch.device | str | None) -> torch.device:
    """Returns the device of this rank: the given one, else its GPU under nccl, else the weights'."""
    if device is not None:
        return torch.device(device)
    if "nccl" in dist.get_backend_config() and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    weights_device = next((parameter.device for parameter in module.parameters()), None) if module is not None else None
    return weights_device if weights_device is not None and weights_device.type != "meta" else torch.device("cpu")


def refuse_unsupported(layout: Layout) -> None:
    """Refuses layouts that a custom loop can't run."""
    if layout.degree(Mechanics.TOKENS) > 1:
        raise PlanError(
            f"{layout.format_degree(Mechanics.TOKENS)}: a loop of one's own reads whole rows: use tp with "
            "sequence=true, or `meshwright train`"
        )
    if layout.microbatches > 1 and layout.degree(Mechanics.STAGES) == 1:
        raise PlanError(
            f"microbatches={layout.microbatches} has no effect on a loop of one's own: leave it out, and accumulate "
            "with `with strategy.accumulate():`"
        )
    if layout.precision == "fp16":
        raise PlanError("precision=fp16 needs a loss scale that a loop of one's own lacks: write precision=bf16")
    if layout.offload == "optimizer":
        raise PlanError("offload=optimizer belongs to the trainer's own AdamW: write offload=parameters")


def refuse_uneven_tokens(layout: Layout, inputs: torch.Tensor) -> None:
    """Refuses rows whose tokens ``sequence=true`` can't divide.

    Args:
        layout: to be run.
        inputs: (B, S, ...) of a model.

    Raises:
        PlanError: with the number of tokens, and the nearest that work.
    """
    parts = layout.degree(Mechanics.MATRICES) if layout.sequence else 1
    if inputs.dim() > 1 and inputs.shape[1] % parts:
        lower = inputs.shape[1] // parts * parts
        near = " or ".join(str(count) for count in (lower, lower + parts) if count)
        raise PlanError(
            f"rows of {inputs.shape[1]} tokens don't divide into the {parts} parts of sequence=true; nearest that "
            f"works: rows of {near} tokens, or sequence=false"
        )
